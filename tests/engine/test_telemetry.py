"""Times and bytes of a record, under a clock that only the model's own parts move, by known amounts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.harness.engine import attention_probe as probe
from espalier.harness.engine.record import GeneratedBatch
from espalier.harness.engine.session import Session
from espalier.harness.evaluation.evaluate import evaluate_session
from espalier.harness.evaluation.metered import time_medians
from espalier.harness.kinds.rescore import Rescored
from espalier.harness.models.adapter import Adapter
from espalier.harness.store import Journal
from espalier.methods.base import Need, Plan, Site, TokenReducer, View
from espalier.methods.none import NoReduction
from tests.arithmetic import Calculator, make_spec, sums, write_task
from tests.family_runs import HALF, adapter_of
from tests.tiny import CHATS, DEPTH, Scatter, chat

#: Duration of one call of each part, in milliseconds.
TOWER, PROJECTOR, LAYER, ROWS, PLAN = 120, 30, 12, 42, 60
STEPS = 3
GENERATION = {"max_new_tokens": STEPS + 1, "do_sample": False, "suppress_tokens": [3]}
LAYER_2 = Site("layer", 2)


class Now:
    """A clock in nanoseconds that advances only explicitly."""

    def __init__(self) -> None:
        self.value = 0

    def spend(self, milliseconds: float) -> None:
        self.value += round(milliseconds * 1e6)


@pytest.fixture
def adapter() -> Adapter:
    return adapter_of("llava", "float32")


@pytest.fixture
def now(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> Iterator[Now]:
    """A clock that tower, projector and each decoder layer move when they run."""
    now = Now()
    monkeypatch.setattr("espalier.harness.cost.clock.perf_counter_ns", lambda: now.value)
    parts = [(adapter.tower, TOWER), (adapter.projector, PROJECTOR)]
    parts += [(layer, LAYER) for layer in adapter.decoder.layers]

    def hook(cost: int) -> Any:
        return lambda module, args, output: now.spend(cost)

    # Before the engine's hooks, which end their phase when the projector is done.
    handles = [part.register_forward_hook(hook(cost), prepend=True) for part, cost in parts]
    yield now
    for handle in handles:
        handle.remove()


@dataclass(frozen=True)
class Timed(TokenReducer):
    """Keeps the first tokens of each row; each plan takes `PLAN`."""

    now: Now
    site: Site = LAYER_2
    wants: tuple[Need, ...] = ()

    def sites(self, depth: int) -> tuple[Site, ...]:
        return (self.site,)

    def needs(self, site: Site) -> tuple[Need, ...]:
        return self.wants

    def plan(self, view: View, keep: int) -> Plan:
        self.now.spend(PLAN)
        return Plan(torch.arange(keep).expand(view.tokens.shape[0], -1))


def run(adapter: Adapter, method: TokenReducer, chats: Any, **settings: Any) -> GeneratedBatch:
    with Session(adapter, method, HALF) as session:
        return session.generate(adapter.encode(chats), None, **{**GENERATION, **settings})


def times(generated: GeneratedBatch) -> dict[str, float]:
    """Return the times of the batch; each sample has the same share of it."""
    first, *other_rows = (dict(record.times_ms) for record in generated.records)
    assert all(row_times == first for row_times in other_rows)
    return first


#: One chat, and three alike, which run as one batch: plans of rows with equal counts are made at once.
BATCHES = [[chat("w1 w2", 1)], [chat("w1 w2", seed) for seed in (1, 2, 3)]]


@pytest.mark.parametrize("chats", BATCHES, ids=["one", "three"])
@pytest.mark.parametrize("site", [Site("layer", 2), Site("prefix"), Site("vision")])
def test_a_sample_has_its_share_of_the_batch_and_selection_is_in_it(
    adapter: Adapter, now: Now, chats: Any, site: Site
) -> None:
    rows = len(chats)
    assert times(run(adapter, Timed(now, site), chats)) == {
        "vision": (TOWER + PROJECTOR) / rows,
        "select": PLAN / rows,
        "prefill": (DEPTH * LAYER + PLAN) / rows,
        "decode": STEPS * DEPTH * LAYER / rows,
        "decode_per_token": DEPTH * LAYER / rows,
    }


@pytest.mark.parametrize("chats", BATCHES, ids=["one", "three"])
@pytest.mark.parametrize(
    ("signal", "phase"),
    [
        ("last_attention", "prefill"),
        ("next_last_attention", "prefill"),
        ("cls_attention", "vision"),
    ],
)
def test_signals_count_as_selection_where_they_are_computed(
    adapter: Adapter, now: Now, monkeypatch: pytest.MonkeyPatch, chats: Any, signal: str, phase: str
) -> None:
    calls: list[int] = []
    plain = probe.head_rows

    def slow(*args: Any) -> Any:
        calls.append(1)
        now.spend(ROWS)
        return plain(*args)

    monkeypatch.setattr(probe, "head_rows", slow)
    rows = len(chats)
    times_ms = times(run(adapter, Timed(now, wants=(Need(signal),)), chats))
    assert calls == [1]
    expected = {"vision": TOWER + PROJECTOR, "prefill": DEPTH * LAYER + PLAN}
    expected[phase] += ROWS
    assert times_ms["select"] == (PLAN + ROWS) / rows
    assert {name: times_ms[name] for name in expected} == {
        name: value / rows for name, value in expected.items()
    }


def test_what_a_layer_runs_ahead_for_a_method_is_selection(adapter: Adapter, now: Now) -> None:
    """The next layer's projections run again for its attention row."""
    layer = adapter.decoder.layers[2].self_attn.q_proj
    handle = layer.register_forward_hook(lambda *_: now.spend(ROWS))
    method = Timed(now, wants=(Need("next_last_attention"),))
    times_ms = times(run(adapter, method, BATCHES[0], max_new_tokens=1))
    handle.remove()
    assert times_ms["select"] == PLAN + ROWS
    assert times_ms["prefill"] == DEPTH * LAYER + PLAN + 2 * ROWS


def test_unequal_rows_pay_for_every_plan_that_is_made(adapter: Adapter, now: Now) -> None:
    """Two images in the second row: its count differs, so a second plan is made."""
    times_ms = times(run(adapter, Timed(now), CHATS))
    assert times_ms["select"] == 2 * PLAN / 3
    assert times_ms["prefill"] == (DEPTH * LAYER + 2 * PLAN) / 3


def test_a_step_is_timed_by_the_steps_that_ran(adapter: Adapter, now: Now) -> None:
    """The prefill gives the first token; an answer of one token has no step."""
    times_ms = times(run(adapter, Timed(now), BATCHES[0], max_new_tokens=1))
    assert (times_ms["decode"], times_ms["decode_per_token"]) == (0, 0)


def test_judging_has_a_phase_of_its_own(adapter: Adapter, now: Now) -> None:
    with Session(adapter, Timed(now), HALF) as session:
        generated = Rescored(adapter, session).generate(
            adapter.encode(BATCHES[1]), None, **GENERATION
        )
    times_ms = times(generated)
    assert times_ms["rescore"] == (TOWER + PROJECTOR + 2 * DEPTH * LAYER) / 3
    assert times_ms["prefill"] == (DEPTH * LAYER + PLAN) / 3


# ------------------------------------------------------------------ bytes

#: Keys and values of one entry in one layer: two heads of eight numbers in four bytes, twice.
ENTRY = 2 * 2 * 8 * 4


@pytest.mark.sampled
@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("method", [NoReduction(), Scatter((2,)), Scatter(("prefix",))])
def test_bytes_are_those_of_one_answer(adapter: Adapter, method: TokenReducer, beams: int) -> None:
    """Beams hold a cache each during the search; a sample's figure is that of one beam, so that rows are comparable."""
    (record,) = run(adapter, method, BATCHES[0], num_beams=beams).records
    assert record.kv_bytes == (sum(record.entering) + DEPTH * record.text) * ENTRY
    assert record.kv_entries == sum(record.entering)
    padded = run(adapter, method, CHATS, num_beams=beams)
    assert {padded_record.kv_bytes for padded_record in padded.records} == {
        sum(padded.cache_lengths) * ENTRY
    }


# ------------------------------------------------------------------ the run's row


class Slower(Calculator):
    """Takes 1000 ms for its first batch, then 1, 2, 3, ... ms; the wall clock moves by seconds."""

    wall: float = 0.0

    def generate(self, inputs: Any, samples: Any, **settings: Any) -> GeneratedBatch:
        cold = not self.batches
        number = len(self.batches)
        self.wall += 1000.0 if cold else 2.0
        generated = super().generate(inputs, samples, **settings)
        for record in generated.records:
            record.times_ms.update(vision=1000.0 if cold else float(number))  # type: ignore[attr-defined]
        return generated


def test_the_cold_batch_is_not_the_measurement(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    spec = make_spec(write_task(tmp_path / "t", sums(6)), warmup=1)
    model = Slower()
    monkeypatch.setattr(
        "espalier.harness.evaluation.chat_model.time.perf_counter", lambda: model.wall
    )
    result = evaluate_session(spec, model, journal)
    assert model.batches[0] == model.batches[1]
    assert [sample.record.times_ms["vision"] for sample in result.samples] == [1, 1, 2, 2, 3, 3]
    assert time_medians([sample.record for sample in result.samples])["vision_ms"] == 2
    assert (result.seconds, result.samples_per_second) == (6, 1)
    entries = [entry for entry in journal.entries() if "answer" in entry]
    assert [entry["record"]["times_ms"]["vision"] for entry in entries] == [1, 1, 2, 2, 3, 3]
