"""Check a published model for a benchmark: its checkpoint is complete, and its prompts equal the originals."""

from __future__ import annotations

import torch

from espalier.harness.errors import UserError
from espalier.harness.evaluation.lmms_tasks import LoadedBenchmark, quiet
from espalier.harness.evaluation.prompt_text import PromptTexts, chat_of
from espalier.harness.models.adapter import Adapter
from espalier.harness.models.build_adapter import build_skeleton
from espalier.harness.models.chat_templates import other_template
from espalier.harness.models.checkpoint_files import check_checkpoint
from espalier.harness.models.families import ADAPTERS
from espalier.harness.models.reference_prompts import PromptTokens, compare_tokens
from espalier.harness.ranks import without_launcher
from espalier.harness.specs.hub_cache import cached_file
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store.files.digests import Digests
from espalier.harness.tools.doctor.findings import NotHere

#: Prompts that are compared.
PROMPTS = 3


def whole_checkpoint(spec: RunSpec) -> str:
    """Return where a model's checkpoint is, after reading the header of every weight file.

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
                f"model={model.name}: {model.hub} is not in the cache; valid: python -m espalier benchmarks prefetch "
                f"{spec.benchmark.name} model={model.name}"
            )
        folder = config.parent
    check_checkpoint(folder, Digests())
    return f"{folder}: whole"


def unloaded(spec: RunSpec) -> Adapter:
    """Return the adapter of a checkpoint without its weights: processor, configuration and template are there."""
    family = ADAPTERS.load(spec.model.adapter)
    config = family.checkpoint_config(spec.model)
    skeleton = build_skeleton(family.class_of(config), config, spec.model)
    # A skeleton is on no device, but the output of a processor must be on one.
    cpu_family = type(family.__name__, (family,), {"device": torch.device("cpu")})
    adapter: Adapter = cpu_family(skeleton, family.load_processor(spec.model), spec.model)
    return adapter


def same_tokens(spec: RunSpec, loaded: LoadedBenchmark) -> tuple[str, str]:
    """Compare prompts' token ids with those of the originals' procedure, and the template with the model file's.

    Returns:
        What is the same or differs, in one line, and the first prompt.

    Raises:
        NotHere: the model has random weights.
        UserError: its processor or configuration cannot be read.
    """
    if spec.model.weights == "random":
        raise NotHere(f"model={spec.model.name} has random weights")
    adapter = unloaded(spec)
    task = loaded.tasks[0]
    name = task.config.task
    wording = PromptTexts(spec.benchmark.text, {name: task})
    prompts: list[PromptTokens] = []
    with without_launcher(), quiet(), loaded.serving():
        for row in range(min(PROMPTS, len(task.eval_docs))):
            doc = task.eval_docs[row]
            messages = wording.of(task.doc_to_messages(doc), doc, name, row)
            prompts.append(compare_tokens(adapter, chat_of(messages)))
    differences = [
        f"prompt {row} differs from the original's, {tokens.difference}"
        for row, tokens in enumerate(prompts)
        if tokens.difference is not None
    ]
    summary = differences[:1] or [
        f"{len(prompts)} prompts of {', '.join(str(len(tokens.ours)) for tokens in prompts)} tokens as in the original"
    ]
    template = other_template(spec.model, adapter.shipped_template)
    if template is not None:
        summary.append(template)
    elif spec.model.template_sha256 is not None:
        summary.append("the chat template is the one that the model's file knows")
    return "; ".join(summary), prompts[0].prompt
