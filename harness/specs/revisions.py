"""The identity of a model's weights, independent of the name of their folder."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from espalier.harness.paths import located
from espalier.harness.specs.hub_cache import cached_commit
from espalier.harness.specs.run_spec import CHECKPOINT, ModelSpec
from espalier.harness.store.files.digests import Digests, digest

#: Files of a model directory that shape its input or output.
MODEL_FILES = (
    *("*.json", "*.jinja", "additional_chat_templates/*.jinja"),
    *("*.safetensors", "*.model", "merges.txt", "vocab.txt"),
)


def model_revision(model: ModelSpec, digests: Digests) -> str:
    """Return the identity of a model's weights: a digest of a local directory's files, or hub id and commit.

    Random weights follow from the architecture and a fixed seed; weights in memory have their own digest.
    """
    if model.in_memory is not None:
        return f"memory-{model.in_memory}"
    if model.weights == "random":
        # The signals that methods can read, sites and estimates do not change the weights.
        ignored = {"signals", "unproved", "nominal_work"}
        facts = {name: fact for name, fact in asdict(model.facts).items() if name not in ignored}
        return f"random-{digest([facts, dict(model.architecture), _borrowed(model, digests)])[:12]}"
    if model.path is not None:
        files = [file for pattern in MODEL_FILES for file in model.path.glob(pattern)]
        return digests.files(files, model.path)
    return f"{model.hub}@{cached_commit(model) or model.revision}"


def _borrowed(model: ModelSpec, digests: Digests) -> list[str]:
    """Return digests of the files that a model without a checkpoint reads: a chat template, a processor."""
    taken: list[Path] = []
    if model.conversation == CHECKPOINT and model.path is not None:
        taken += model.path.glob("chat_template.jinja")
    if "processor" in model.architecture:
        folder = located(model.architecture["processor"])
        taken += sorted([*folder.glob("*.json"), *folder.glob("*.jinja")])
    return [digests.file(file) for file in taken]
