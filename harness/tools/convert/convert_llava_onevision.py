"""Convert a release of LLaVA-OneVision (lmms-lab's format) to a checkpoint of transformers' own class."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
)

from espalier.harness.models.conversations import TAGGED, template_of
from espalier.harness.models.llava_onevision import LlavaOnevisionAdapter
from espalier.harness.specs.commands import command_parser
from espalier.harness.tools.convert.checkpoint_writer import (
    Checkpoint,
    Say,
    open_release,
    require_settings,
    run_conversion,
    write_checkpoint,
)
from espalier.harness.tools.convert.llava_release import padded_rows, rename_llava
from espalier.harness.tools.convert.lmms_release import (
    configuration,
    generation_of,
    read_tokenizer,
)


def convert(source: Path, target: Path, say: Say) -> None:
    """Write a checkpoint that the OneVision models load with model.path=<target>.

    Args:
        source: directory of the release: config.json, tokenizer, safetensors shards.
        target: directory to write, new or empty.
        say: called with progress lines.

    Raises:
        UserError: the release is incomplete, holds unknown tensors, or `target` is in use.
    """
    release = open_release(source, target)
    require_settings(release.config, {"mm_spatial_pool_mode": "bilinear"})
    tokenizer = read_tokenizer(release)
    config = configuration(
        LlavaOnevisionConfig, release, "LLaVA-OneVision", tokenizer, newline="one_token"
    )
    # As many rows as in transformers' own checkpoints, which the model files state.
    rows = padded_rows(config.text_config.vocab_size)
    config.text_config.vocab_size = rows
    processor = LlavaOnevisionAdapter.built_processor(config, tokenizer)
    processor.chat_template = template_of("qwen_1_5", TAGGED)
    checkpoint = Checkpoint(
        model_class=LlavaOnevisionForConditionalGeneration,
        config=config,
        processor=processor,
        generation=generation_of(release.config, tokenizer),
        rename=partial(rename_llava, rows=rows),
        optional=("lm_head.weight",) if config.tie_word_embeddings else (),
    )
    write_checkpoint(release, checkpoint, target, say)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    example = "/models/llava-onevision-qwen2-7b-ov /models/llava_ov_7b"
    parser = command_parser("convert llava_onevision", __doc__, example)
    return run_conversion(parser, convert, arguments)


if __name__ == "__main__":
    sys.exit(main())
