"""The unreduced model timed beside a method: how much, in which order, what is compared; the run is left alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from espalier.harness.cost.bounds import Gain, first_token_bound, prefill_bound
from espalier.harness.cost.facts import Work
from espalier.harness.cost.flops import sample_flops
from espalier.harness.engine.record import GeneratedBatch, SampleRecord
from espalier.harness.engine.session import Session
from espalier.harness.evaluation.evaluate import Evaluation, evaluate
from espalier.harness.evaluation.latency import (
    MOST,
    NEW_TOKENS,
    PAIRS,
    SHARE,
    PairPlan,
    measure,
    plan_pairs,
)
from espalier.harness.kinds.kind import PairedSessions
from espalier.harness.models.adapter import Adapter
from espalier.harness.specs.catalogue import build_method
from espalier.harness.specs.generation import Settings
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store import Journal
from tests import commands
from tests.tiny import LLAVA

# ------------------------------------------------------------------ how much


@pytest.mark.parametrize("gain", [1.0, 2.4, 7.0])
@pytest.mark.parametrize("processes", [1, 4])
def test_auto_costs_a_tenth_at_most_and_has_pairs_enough_for_an_interval(
    gain: float, processes: int
) -> None:
    # One by one up to the last that is left out.
    sizes = [*range(2500), *range(2500, 21000, 50)]
    plans = [(n, b, plan_pairs("auto", n, b, gain, processes)) for n in sizes for b in (1, 8)]
    planned = [(n, plan) for n, _, plan in plans if plan is not None]
    for n, plan in planned:
        # The untimed pair before the first costs as much as any other.
        assert (plan.pairs + 1) * plan.rows * (1 + gain) * processes <= SHARE * n
        assert plan.pairs >= PAIRS
        assert plan.pairs * plan.rows <= MOST
    # It is left out only where four pairs of single samples and the untimed one cost more.
    left_out = max(n for n, _, plan in plans if plan is None)
    assert left_out == math.ceil((PAIRS + 1) * (1 + gain) * processes / 0.08) - 1
    assert planned[-1][1] == PairPlan(4, 8)


@pytest.mark.parametrize(
    ("wanted", "samples", "batch", "expected"),
    [
        (32, 500, 8, PairPlan(4, 8)),
        (32, 500, 1, PairPlan(32, 1)),
        (32, 500, 50, PairPlan(4, 8)),  # batches of the run would give no pair
        (10, 500, 8, PairPlan(5, 2)),
        (32, 12, 8, PairPlan(4, 3)),
        (1, 500, 8, PairPlan(1, 1)),
    ],
)
def test_a_number_is_taken_as_samples(
    wanted: int, samples: int, batch: int, expected: PairPlan
) -> None:
    assert plan_pairs(wanted, samples, batch, 3.0) == expected


# ------------------------------------------------------------------ what is compared


@dataclass
class Side:
    """A session that takes `times[n]` milliseconds for the prefill of its n-th batch."""

    name: str
    log: list[tuple[str, list[str]]]
    kept: int
    times: Sequence[float]
    steps: int = 2
    settings: list[Mapping[str, Any]] = field(default_factory=list)
    calls: int = 0

    def generate(
        self, inputs: Any, samples: Sequence[str] | None = None, **more: Any
    ) -> GeneratedBatch:
        assert samples is not None
        self.log.append((self.name, list(samples)))
        self.settings.append(more)
        prefill = self.times[self.calls]
        self.calls += 1
        times = {"vision": 10.0, "prefill": prefill, "decode_per_token": prefill / 10}
        record = SampleRecord("s", 16, 4, (), (), (self.kept,) * 5, 0, 0, 1, times_ms=times)
        ids = torch.zeros(len(samples), 1 + self.steps, dtype=torch.long)
        return GeneratedBatch(ids, (record,) * len(samples))


REQUESTS = [SimpleNamespace(args=("", None, {}, n, "task", "test")) for n in range(10)]
GROUP = Settings({"do_sample": False, "max_new_tokens": 40, "min_new_tokens": 20}, ())


def paired(plain: Sequence[float], reduced: Sequence[float], **more: Any) -> tuple[Any, Side, Side]:
    log: list[tuple[str, list[str]]] = []
    sides = Side("own", log, 4, reduced, **more), Side("plain", log, 16, plain, **more)
    planned = PairPlan(len(plain) - 1, 2)
    done = measure(
        PairedSessions(*sides), REQUESTS, GROUP, lambda block: block, planned, LLAVA.facts
    )
    return done, *sides


def test_both_answer_the_same_batches_in_turns_after_one_that_does_not_count() -> None:
    done, reduced, _ = paired([99, 8, 8, 8, 8], [1, 2, 2, 2, 2])
    names = [[f"task/{n}", f"task/{n + 1}"] for n in (0, 0, 2, 5, 7)]
    assert reduced.log == [
        (side, name)
        for name, order in zip(names, ("po", "op", "po", "op", "po"), strict=True)
        for side in ({"o": "own", "p": "plain"}[letter] for letter in order)
    ]
    assert done.speedup["prefill"]["ratio"] == pytest.approx(4)  # the cold 99 over 1 is not in it
    assert done.speedup["first_token"]["ratio"] == pytest.approx(18 / 12)
    assert done.speedup["decode_per_token"]["ratio"] == pytest.approx(4)
    assert (done.speedup["samples"], done.speedup["pairs"]) == (8, 4)
    assert reduced.settings[0] == {"do_sample": False, "max_new_tokens": NEW_TOKENS}


def test_answers_of_one_token_say_nothing_of_decoding() -> None:
    done, *_ = paired([1, 8, 8, 8, 8], [1, 2, 2, 2, 2], steps=0)
    assert done.speedup["decode_per_token"] is None


def test_the_bound_is_that_of_the_same_phase() -> None:
    """The head runs behind the prefill phase; with it on both sides the bound would be too low."""
    facts = LLAVA.facts
    seen = Work(tokens=17, pairs=17 * 17, units=16)
    counted = [sample_flops(facts, (4,) * 5, 16, 4, work) for work in (seen, Work())]
    cost = counted[0].exact
    text = counted[0].exact_full.text
    assert prefill_bound(counted[1:]) == prefill_bound(counted) == text / cost.text
    assert first_token_bound(counted[1:]) == text / cost.text
    before = cost.tower + cost.projector
    assert first_token_bound(counted[:1]) == (text + before) / (cost.text + before)
    assert prefill_bound(counted) > 1 / counted[0].share_of_full
    done, *_ = paired([1, 8, 8, 8, 8], [1, 2, 2, 2, 2])
    assert done.speedup["bound"] == done.speedup["prefill"]["bound"] == prefill_bound(counted)


def test_above_the_bound_means_the_whole_interval() -> None:
    assert not Gain(6.0, 4.9, 7.0, 5.0).above_bound
    assert Gain(6.0, 5.1, 7.0, 5.0).above_bound
    assert not Gain(6.0, None, None, 5.0).above_bound  # a single pair has no interval
    fast, *_ = paired([1, 100, 101, 99, 100], [1, 2, 2, 2, 2])
    assert fast.speedup["above_bound"] is fast.speedup["prefill"]["above_bound"] is True
    even, *_ = paired([1, 2, 2, 2, 2], [1, 2, 2, 2, 2])
    assert even.speedup["above_bound"] is even.speedup["first_token"]["above_bound"] is False
    assert even.speedup["prefill"]["low"] == even.speedup["prefill"]["high"] == 1


def test_one_pair_has_a_ratio_and_no_interval() -> None:
    done, *_ = paired([1, 8], [1, 2])
    assert done.speedup["prefill"] | {"bound": 0} == {
        "ratio": pytest.approx(4),
        "low": None,
        "high": None,
        "bound": 0,
        "above_bound": False,
    }


def test_an_unreduced_model_that_does_not_fit_costs_the_run_nothing() -> None:
    class TooLarge(Side):
        def generate(self, *args: Any, **more: Any) -> GeneratedBatch:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    reduced, plain = Side("own", [], 4, [1.0] * 5), TooLarge("plain", [], 16, [])
    done = measure(
        PairedSessions(reduced, plain),
        REQUESTS,
        GROUP,
        lambda block: block,
        PairPlan(4, 2),
        LLAVA.facts,
    )
    assert done.speedup is None
    assert done.note == (
        "the unreduced model failed after the run: OutOfMemoryError: CUDA out of memory."
    )


# ------------------------------------------------------------------ a real run


def spec_of(*overrides: str) -> RunSpec:
    settings = ["limit=8", "model.device=cpu", "engine.batch_size=4", "ratio=0.75", *overrides]
    return commands.spec_of(*settings)


def run(adapter: Adapter, journal: Journal, *overrides: str) -> Evaluation:
    spec = spec_of(*overrides)
    return evaluate(spec, adapter, build_method(spec.method.name, spec.method.params), journal)


@pytest.mark.slow
def test_a_run_answers_the_same_with_and_without(
    adapter: Adapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled = "+benchmark.generation={do_sample: true, temperature: 1.0, max_new_tokens: 3}"
    methods = ("method=fastv", sampled)
    without, beside = Journal(tmp_path / "a.jsonl"), Journal(tmp_path / "b.jsonl")
    first = run(adapter, without, *methods, "engine.paired=0")
    assert (first.speedup, first.speedup_note) == (None, "engine.paired=0")
    calls: list[str] = []
    generate = Session.generate

    def watched(session: Session, inputs: Any, samples: Any, **more: Any) -> GeneratedBatch:
        calls.append(type(session.method).__name__)
        return generate(session, inputs, samples, **more)

    monkeypatch.setattr(Session, "generate", watched)
    state = torch.random.get_rng_state()
    second = run(adapter, beside, *methods, "engine.paired=4")
    assert torch.equal(state, torch.random.get_rng_state())
    assert [s.answer for s in first.samples] == [s.answer for s in second.samples]
    assert first.metrics == second.metrics
    assert (second.speedup["samples"], second.speedup["batch_size"]) == (4, 1)
    # A warm-up and two batches of the run, then five pairs, the first of them untimed.
    assert calls == ["FastV"] * 3 + [
        name
        for number in range(5)
        for name in (("NoReduction", "FastV") if number % 2 == 0 else ("FastV", "NoReduction"))
    ]
    # All answers are in the journal: the rest of the run is to measure.
    calls.clear()
    again = run(adapter, beside, *methods, "engine.paired=4")
    assert again.resumed == 8
    assert again.speedup is not None
    assert len(calls) == 10
    assert again.samples == second.samples


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        (("method=none", "engine.paired=4"), "method=none reduces nothing"),
        (
            ("method=uniform", "engine=emulate", "engine.paired=4"),
            "engine.backend=emulate saves nothing",
        ),
        (("method=uniform",), "engine.paired=auto: a tenth of a run of 8 samples pays for no 4"),
    ],
)
def test_a_row_without_a_speed_up_says_why(
    adapter: Adapter, tmp_path: Path, overrides: Sequence[str], note: str
) -> None:
    done = run(adapter, Journal(tmp_path / "j.jsonl"), "benchmark=seedling_vqa", *overrides)
    assert done.speedup is None
    assert done.speedup_note.startswith(note)
