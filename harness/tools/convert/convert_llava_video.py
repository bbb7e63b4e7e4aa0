"""Convert a release of LLaVA-Video (lmms-lab's format) to a checkpoint that the project loads."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from espalier.harness.models.llava_video import (
    LlavaVideoConfig,
    LlavaVideoForConditionalGeneration,
)
from espalier.harness.specs.commands import command_parser
from espalier.harness.tools.convert.checkpoint_writer import (
    Checkpoint,
    Say,
    open_release,
    run_conversion,
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
    checkpoint = Checkpoint(
        model_class=LlavaVideoForConditionalGeneration,
        config=config,
        processor=tokenizer,
        generation=generation_of(release.config, tokenizer),
        rename=partial(rename_llava, rows=config.text_config.vocab_size),
        optional=("lm_head.weight",) if config.tie_word_embeddings else (),
    )
    write_checkpoint(release, checkpoint, target, say)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    example = "/models/LLaVA-Video-7B-Qwen2 /models/llava_video"
    parser = command_parser("convert llava_video", __doc__, example)
    return run_conversion(parser, convert, arguments)


if __name__ == "__main__":
    sys.exit(main())
