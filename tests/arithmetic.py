"""A benchmark of sums and a stand-in for model and engine, for tests of the evaluation alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from espalier.harness.cost.budget import Budget
from espalier.harness.cost.facts import ModelFacts, StackFacts
from espalier.harness.engine.record import GeneratedBatch, SampleRecord
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.run_spec import EngineSpec, MethodSpec, ModelSpec, RunSpec

YAML = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: sums.jsonl}}
test_split: test
output_type: generate_until
doc_to_visual: !function utils.images
doc_to_text: !function utils.question
doc_to_target: target
process_results: !function utils.score
metric_list:
  - {metric: right, aggregation: mean, higher_is_better: true}
  - {metric: rare, aggregation: mean, higher_is_better: true}
  - {metric: f1, aggregation: !function utils.f1, higher_is_better: true}
"""

UTILS = """
from PIL import Image

def images(doc):
    return [Image.new("RGB", (4, 4))]

def question(doc, lmms_eval_specific_kwargs=None):
    print("noise from a task")
    return doc["question"]

def score(doc, results):
    if doc["target"] == "unscorable":
        raise KeyError("no such column")
    return {"right": float(results[0] == doc["target"]), "f1": (results[0], doc["target"])}

def f1(pairs):
    hits = sum(a == b for a, b in pairs)
    return 2 * hits / (hits + len(pairs))
"""


def write_task(folder: Path, questions: Sequence[tuple[str, str]], generation: str = "") -> Path:
    """Write the benchmark `sums` with (question, target) pairs and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sums.yaml").write_text(YAML + generation)
    (folder / "utils.py").write_text(UTILS)
    lines = [json.dumps({"question": q, "target": a}) for q, a in questions]
    (folder / "sums.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def sums(n: int, wrong: Sequence[int] = ()) -> list[tuple[str, str]]:
    """Return n sums; the targets of those in `wrong` are false."""
    return [(f"{i}+7", "no" if i in wrong else str(i + 7)) for i in range(n)]


def make_spec(include_path: Path, **changes: Any) -> RunSpec:
    """Return a run of the benchmark; `changes` go to the benchmark, engine or run that has them."""
    stack = StackFacts(2, 8, 16, 2, 2, 4, gated=True, causal=True)
    facts = ModelFacts(stack, stack, None, (8, 8), 32, 6, "token", 1, frozenset())
    engine = {"batch_size": 2, "max_errors": 0, "warmup": 0, "prefetch": 0}
    engine |= {k: changes.pop(k) for k in tuple(changes) if k in engine}
    bench: dict[str, Any] = {"task": "sums", "metrics": ("right",), "limit": None, "generation": {}}
    bench |= {k: changes.pop(k) for k in tuple(changes) if k in bench}
    return RunSpec(
        model=ModelSpec(
            "calculator", "none", None, "x", None, "float32", "sdpa", "trained", "cpu", facts
        ),
        method=MethodSpec("none"),
        benchmark=BenchmarkSpec(name="sums", include_path=include_path, headline="right", **bench),
        budget=Budget("kept", 0.0),
        engine=EngineSpec(**engine),
        seed=0,
        force=False,
        log="none",
        store=include_path,
        **changes,
    )


class StandIn:
    """Adapter and session in one, which encodes and answers in this process."""

    paired: None = None

    @property
    def generator(self) -> Self:
        return self

    @property
    def adapter(self) -> Self:
        return self

    def encode(self, messages: Sequence[Any]) -> Mapping[str, Any]:
        raise NotImplementedError

    def preparer(self) -> Callable[[Sequence[Any]], Mapping[str, Any]]:
        """Encode in another thread as in this one."""
        return self.encode

    def to_device(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        return inputs


@dataclass
class Calculator(StandIn):
    """Adapter and session in one: adds the numbers of the question.

    A question with `bad` raises; `batches` lists the sample ids of each call, `settings` its
    keyword arguments.
    """

    tail: str = ""
    batches: list[list[str]] = field(default_factory=list)
    settings: list[dict[str, Any]] = field(default_factory=list)
    fail: type[BaseException] = RuntimeError

    def encode(self, messages: Sequence[Any]) -> Mapping[str, Any]:
        """Keep the text of each chat; require the image beside it."""
        for chat in messages:
            kinds = [part["type"] for part in chat[0]["content"]]
            assert kinds == ["image", "text"], kinds
        return {"text": [chat[0]["content"][1]["text"] for chat in messages]}

    def prompt_summary(self, chat: Any) -> dict[str, str | None]:
        """Say what a row says of prompts."""
        return {"rendered": chat[0]["content"][1]["text"]}

    def generate(
        self, inputs: Mapping[str, Any], samples: Sequence[str], **more: Any
    ) -> GeneratedBatch:
        """Add up."""
        self.batches.append(list(samples))
        self.settings.append(more)
        if any("bad" in text for text in inputs["text"]):
            raise self.fail("cannot add this\nsecond line")
        answers = [sum(map(int, text.split("+"))) for text in inputs["text"]]
        records = tuple(
            SampleRecord(
                sample=name,
                visual=6,
                text=answer,
                requested=(3,),
                kept=(3,),
                entering=(6, 3),
                kv_entries=9,
                kv_bytes=100,
                new_tokens=2,
                times_ms={"vision": 1.0, "select": 0.5, "prefill": 2.0, "decode_per_token": 0.25},
            )
            for name, answer in zip(samples, answers, strict=True)
        )
        return GeneratedBatch(ids=torch.tensor(answers)[:, None], records=records)

    def decode(self, ids: torch.Tensor) -> list[str]:
        """Write the sums as text."""
        return [f"{int(row[0])}{self.tail}" for row in ids]
