"""A published model beside a benchmark: its checkpoint whole, its prompts those of the originals."""

from __future__ import annotations

from harness.admission.checkpoint_files import check_checkpoint
from harness.digests import Digests
from harness.doctor.findings import NotHere
from harness.errors import UserError
from harness.hub import cached_file
from harness.specs import RunSpec


def whole_checkpoint(spec: RunSpec) -> str:
    """Say where a model's checkpoint lies, after reading the header of every weight file.

    Raises:
        NotHere: the model has random weights.
        UserError: it is not here, or a file is missing or damaged.
    """
    model = spec.model
    if model.weights == "random":
        raise NotHere(f"model={model.name} has random weights")
    folder = model.path
    if folder is None:
        config = cached_file(model, "config.json")
        if config is None:
            raise UserError(
                f"model={model.name}: {model.hub} is not in the cache; valid: python -m harness.benchmarks prefetch "
                f"{spec.benchmark.name} model={model.name}"
            )
        folder = config.parent
    check_checkpoint(folder, Digests())
    return f"{folder}: whole"


def same_tokens(spec: RunSpec) -> str:
    """Compare the ids of rendered prompts with the originals' procedure.

    Raises:
        NotHere: this version cannot.
    """
    raise NotHere(f"model={spec.model.name}: no comparison of token ids in this version")
