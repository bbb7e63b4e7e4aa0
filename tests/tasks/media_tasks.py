"""Benchmarks of pictures and videos as lmms-eval tasks, and command lines that run tiny checkpoints on them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from espalier.harness.specs.run_spec import ModelSpec
from tests.tiny import VOCABULARY

#: Token ids of the tokenizer's printable ASCII characters; all else is suppressed, so that answers compare as text.
PRINTABLE = range(14, 14 + 94)
SUPPRESSED = [token for token in range(VOCABULARY) if token not in PRINTABLE]

#: Tokens of every answer: no model here can end one.
STEPS = 5

YAML = f"""
task: NAME
dataset_path: json
dataset_kwargs: {{data_files: {{test: NAME.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_visual: !function utils.visuals
doc_to_text: !function utils.question
doc_to_target: mark
process_results: !function utils.score
generation_kwargs: {{max_new_tokens: {STEPS}, do_sample: false, temperature: 0, suppress_tokens: {SUPPRESSED}}}
lmms_eval_specific_kwargs:
  default: {{pre_prompt: ""}}
  qwen2_5_vl: {{pre_prompt: "Q: "}}
metric_list:
  - {{metric: mark, aggregation: mean, higher_is_better: true}}
"""

#: `messages` is what a chat task writes by hand; without it lmms-eval builds the chat of `visuals` and `question`.
UTILS = """
from PIL import Image

def opened(path):
    return Image.open(path) if path.endswith(".png") else path

def visuals(doc):
    return [opened(path) for path in doc["media"]]

def question(doc, lmms_eval_specific_kwargs=None):
    return lmms_eval_specific_kwargs["pre_prompt"] + doc["question"]

def messages(doc, lmms_eval_specific_kwargs=None):
    kinds = {".png": "image", ".mp4": "video"}
    parts = [{"type": kinds[path[-4:]], "url": path} for path in doc["media"]]
    text = {"type": "text", "text": question(doc, lmms_eval_specific_kwargs)}
    return [{"role": "user", "content": [*parts, text]}]

def score(doc, results):
    return {"mark": doc["mark"] if results[0] else -1000.0}
"""

MESSAGES = "doc_to_messages: !function utils.messages\n"


def write_benchmark(
    folder: Path, name: str, docs: Sequence[tuple[str, Sequence[str]]], by_hand: bool
) -> Path:
    """Write a task of (question, paths of media) documents; its only metric is the mean of 0, 1, 4, 9, ..."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.yaml").write_text(YAML.replace("NAME", name) + (MESSAGES if by_hand else ""))
    (folder / "utils.py").write_text(UTILS)
    lines = [
        json.dumps({"question": question, "media": list(media), "mark": float(number**2)})
        for number, (question, media) in enumerate(docs)
    ]
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def benchmark(folder: Path, name: str) -> list[str]:
    """Return the overrides that choose a written benchmark."""
    return [
        *(f"benchmark.{key}={name}" for key in ("name", "task")),
        f"benchmark.include_path={folder}",
        f"benchmark.sources=[{folder}]",
        "benchmark.metrics=[mark]",
        "benchmark.headline=mark",
        "limit=null",
    ]


def tiny_model(choice: str, spec: ModelSpec, folder: Path | None) -> list[str]:
    """Return the overrides that put a tiny checkpoint in the place of the real one of a config file."""
    # Without empty ones, so that commits from before them can be compared, too.
    facts = {
        key: value
        for key, value in asdict(spec.facts).items()
        if key != "signals" and value not in ((), {})
    }
    tables = {
        "facts": facts,
        "processor": spec.processor,
        "architecture": spec.architecture,
        "video": asdict(spec.video),
    }
    return [
        f"model={choice}",
        f"model.path={'null' if folder is None else folder}",
        "model.dtype=float32",
        "model.device=cpu",
        *(f"++model.{name}={_literal(table)}" for name, table in tables.items() if table),
    ]


def _literal(value: Any) -> str:
    """Return a table as Hydra reads it, without the defaults of what the family does not have."""
    if isinstance(value, Mapping):
        present = {key: item for key, item in value.items() if item not in (None, 0)}
        return "{" + ",".join(f"{key}:{_literal(item)}" for key, item in present.items()) + "}"
    return json.dumps(value).replace('"', "").replace(" ", "")
