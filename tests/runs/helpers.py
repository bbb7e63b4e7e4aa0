"""Runs of run.py inside the test process, with the model and the evaluation replaced by measured-looking data."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import run
from espalier.harness.engine.record import SampleRecord
from espalier.harness.evaluation.evaluate import Evaluation
from espalier.harness.evaluation.samples import Sample
from espalier.harness.specs.run_spec import RunSpec

N_TEXT = 20


def fake_record(spec: RunSpec, method: Any, sample: str) -> SampleRecord:
    """Return telemetry that meets the budget exactly, as the engine would report it."""
    facts = spec.model.facts
    depth, visual = facts.text.layers, facts.visual_tokens
    kept = spec.budget.keep(method, facts, visual, N_TEXT)
    entering = [visual] * depth
    for site, count in zip(method.sites(depth), kept, strict=True):
        first = site.layer if site.where == "layer" else 0
        entering[first:] = [count] * (depth - first)
    return SampleRecord(
        sample=sample,
        visual=visual,
        text=N_TEXT,
        requested=kept,
        kept=kept,
        entering=tuple(entering),
        kv_entries=sum(entering),
        kv_bytes=sum(entering) * 64,
        new_tokens=4,
        times_ms={
            "vision": 1.0,
            "select": 0.5,
            "prefill": 3.0,
            "decode": 8.0,
            "decode_per_token": 2.0,
        },
    )


@dataclass
class Fake:
    """Stands in for espalier.harness.evaluation.evaluate.evaluate and counts its calls."""

    specs: list[RunSpec] = field(default_factory=list)
    loads: int = 0
    stop_after: int | None = None
    error: Callable[[], BaseException] = KeyboardInterrupt
    speedup: dict[str, Any] | None = None
    devices: tuple[str, ...] = ("cpu",)
    #: While the run has ended and its speed-up is still to be measured.
    over: bool = False

    def evaluate(
        self, spec: RunSpec, adapter: Any, method: Any, journal: Any, progress: Any, **more: Any
    ) -> Evaluation:
        self.specs.append(spec)
        total = spec.benchmark.limit or 3
        done = len(journal.entries())
        for number in range(done, total):
            if number == self.stop_after:
                self.stop_after = None
                raise self.error()
            journal.append({"task": spec.benchmark.task, "doc_id": number, "answer": "yes"})
            progress(number + 1, total)
        print("noise of a third party")
        self.over = True
        more["answered"]()
        self.over = False
        samples = tuple(
            Sample(spec.benchmark.task, n, "yes", 164, 4, fake_record(spec, method, f"t/{n}"))
            for n in range(total)
        )
        return Evaluation(
            metrics={name: {"value": 0.5, "stderr": 0.1} for name in spec.benchmark.metrics},
            n_samples=total,
            samples=samples,
            scores={},
            failures=(),
            resumed=done,
            seconds=1.0,
            versions={spec.benchmark.task: 1.0},
            speedup=self.speedup,
        )


@dataclass
class Outcome:
    """What a command line did."""

    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        """JSON lines of stdout, in order."""
        return [json.loads(line) for line in self.out.splitlines() if line.startswith("{")]

    @property
    def last(self) -> dict[str, Any]:
        """The last line of stdout."""
        return dict(json.loads(self.out.splitlines()[-1]))


def with_defaults(argv: Sequence[str], *defaults: str) -> list[str]:
    """Return a command line with defaults for the keys that it lacks; a key may stand there once."""
    keys = {text.partition("=")[0] for text in argv}
    return [*(text for text in defaults if text.partition("=")[0] not in keys), *argv]


class Bench:
    """Calls run.main with a store of its own."""

    def __init__(self, store: Path, capsys: pytest.CaptureFixture[str], fake: Fake) -> None:
        self.store, self.capsys, self.fake = store, capsys, fake

    def success(self, *argv: str) -> Outcome:
        """Return what a command did that ends well."""
        done = self(*argv)
        assert done.code == 0, done.err
        return done

    def refusal(self, *argv: str) -> str:
        """Return the one line of a command that is refused before a model is loaded."""
        loads = self.fake.loads
        done = self(*argv)
        assert (done.code, done.out, self.fake.loads) == (2, "", loads)
        (line,) = done.err.splitlines()
        return line

    def __call__(self, *argv: str) -> Outcome:
        self.capsys.readouterr()
        code = run.main(with_defaults(argv, f"store={self.store}", "limit=3", "json=true"))
        captured = self.capsys.readouterr()
        return Outcome(code, captured.out, captured.err)


def make_bench(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Bench:
    fake = Fake()

    def load(spec: Any) -> object:
        fake.loads += 1
        return SimpleNamespace(
            devices=tuple(map(torch.device, fake.devices)), model=torch.nn.Linear(512, 512)
        )

    monkeypatch.setattr("espalier.harness.evaluation.evaluate.evaluate", fake.evaluate)
    monkeypatch.setattr(
        "espalier.harness.evaluation.evaluate.open_benchmark",
        lambda spec, *more: SimpleNamespace(tasks=()),
    )
    monkeypatch.setattr("espalier.harness.models.build_adapter.load_adapter", load)
    return Bench(store, capsys, fake)
