"""What identifies a model's weights, whatever its folder is called."""

from __future__ import annotations

from dataclasses import asdict

from harness.digests import Digests, digest
from harness.hub import cached_commit
from harness.specs import CHECKPOINT, ModelSpec

#: Files of a model directory that shape its input or output.
MODEL_FILES = (
    *("*.json", "*.jinja", "additional_chat_templates/*.jinja"),
    *("*.safetensors", "*.model", "merges.txt", "vocab.txt"),
)


def model_revision(model: ModelSpec, digests: Digests) -> str:
    """Return what identifies a model's weights: a digest of a local directory's files, or hub id and commit.

    Random weights follow from the architecture and a fixed seed.
    """
    if model.weights == "random":
        # What methods may read of a model makes no weights.
        facts = {k: v for k, v in asdict(model.facts).items() if k != "signals"}
        return f"random-{digest([facts, dict(model.architecture), _borrowed(model, digests)])[:12]}"
    if model.path is not None:
        files = [file for pattern in MODEL_FILES for file in model.path.glob(pattern)]
        return digests.files(files, model.path)
    return f"{model.hub}@{cached_commit(model) or model.revision}"


def _borrowed(model: ModelSpec, digests: Digests) -> list[str]:
    """Return the hash of the chat template that a model without a checkpoint takes from a directory, if it does."""
    if model.conversation != CHECKPOINT or model.path is None:
        return []
    return [digests.file(file) for file in model.path.glob("chat_template.jinja")]
