"""A note about words of own data that a model with a closed vocabulary does not know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from espalier.harness.config.lmms_task_files import index_of
from espalier.harness.errors import foreign, tell_once
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store.files.untrusted_json import read_json

#: Number of words that the note spells out.
NAMED = 8


def note_unknown_words(spec: RunSpec) -> None:
    """Print on stderr which words of own data a model reads as unknown: a tokenizer of whole words has no other ones.

    Raises:
        UserError: the tokenizer's file cannot be read.
    """
    table, path = spec.benchmark.own_data(), spec.model.path
    file = None if path is None else path / "tokenizer.json"
    if table is None or spec.benchmark.text is not None or file is None or not file.is_file():
        return
    with foreign(f"model.path: {str(file)!r} cannot be read", "a tokenizer.json"):
        model = read_json(file)["model"]
        vocabulary = set(model["vocab"]) if model["type"] == "WordLevel" else None
    if vocabulary is None:
        return
    prompt = _prompt(spec.benchmark)
    texts = [*(text for record in table.records for text in (record.question, *record.choices))]
    texts += [prompt.get("pre_prompt") or "", prompt.get("post_prompt") or ""]
    words = dict.fromkeys(word for text in texts for word in text.split())
    unknown = [word for word in words if word not in vocabulary]
    if unknown:
        count = len(unknown) - NAMED
        tail = f" and {count} more" if count > 0 else ""
        tell_once(
            f"model={spec.model.name} knows {len(vocabulary)} words; of {spec.benchmark.name} it does not know "
            f"{', '.join(unknown[:NAMED])}{tail} (+benchmark.prompt.post_prompt='' leaves out the instruction)"
        )


def _prompt(benchmark: BenchmarkSpec) -> dict[str, Any]:
    """Return the prompt settings of the benchmark's task, with those of the user."""
    assert benchmark.include_path is not None  # own data have tasks of this repository
    (leaf,) = index_of(benchmark.include_path).leaves(benchmark.task)
    tables: Mapping[str, Any] = leaf.settings.get("lmms_eval_specific_kwargs") or {}
    return {**tables.get("default", {}), **benchmark.prompt}
