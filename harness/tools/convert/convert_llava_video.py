"""Convert a release of LLaVA-Video (lmms-lab's format) to a checkpoint that the project loads."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from espalier.harness.models.architectures.llava_releases import (
    LlavaVideoConfig,
    LlavaVideoForConditionalGeneration,
)
from espalier.harness.tools.convert.checkpoint_writer import (
    Say,
    command_line,
    open_release,
    write_checkpoint,
)
from espalier.harness.tools.convert.convert_llava import rename_llava
from espalier.harness.tools.convert.convert_llava_onevision import (
    configuration,
    generation_of,
    read_tokenizer,
)


def convert(source: Path, target: Path, say: Say) -> None:
    """Write a checkpoint that model=llava_video_7b loads with model.path=<target>.

    Args:
        source: directory of the release: config.json, tokenizer, safetensors shards.
        target: directory to write, new or empty.
        say: called with progress lines.

    Raises:
        UserError: the release is incomplete, holds unknown tensors, or `target` is in use.
    """
    release = open_release(source, target)
    tokenizer = read_tokenizer(release)
    config = configuration(LlavaVideoConfig, release, "LLaVA-Video", tokenizer, "grid")
    write_checkpoint(
        release,
        target,
        say,
        model_class=LlavaVideoForConditionalGeneration,
        config=config,
        processor=tokenizer,
        generation=generation_of(release.config, tokenizer),
        rename=partial(rename_llava, rows=config.text_config.vocab_size),
    )


#: Runs the command line.
main = command_line(
    "llava_video", __doc__, convert, "/models/LLaVA-Video-7B-Qwen2 /models/llava_video"
)
