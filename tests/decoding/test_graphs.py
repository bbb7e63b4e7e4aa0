"""Recorded steps of one token: the plain step's logits and answers, and a refusal if nothing can be recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from espalier.harness.decoding.speculative import draft_model, speculation
from espalier.harness.decoding.speculative.cached_model import CachedModel, SparseDrafter
from espalier.harness.decoding.speculative.draft_model import TreeDrafter
from espalier.harness.decoding.speculative.drafts import (
    EMPTY_DRAFT,
    Draft,
    Greedy,
    RandomNumbers,
    Rule,
    Sampling,
)
from espalier.harness.decoding.speculative.state_machine import Machine
from espalier.harness.decoding.speculative.transports import SequentialTransport
from espalier.harness.engine import text_stack as fixed
from espalier.harness.engine.kv_cache import step_mask
from espalier.harness.engine.text_stack import WARMING, CudaGraphs, graphs_for
from espalier.harness.errors import Refused
from espalier.harness.kinds.decoder import check_graphs
from espalier.harness.models.adapter import Adapter
from espalier.methods.parallelvlm import ParallelVLM
from espalier.methods.uniform import Uniform
from tests.commands import spec_of
from tests.decoding.models import LIMIT, NAMES, encoded, in_doubles, plain, side, some
from tests.decoding.tape import Tapes
from tests.decoding.test_cached_model import RAGGED
from tests.decoding.test_speculation import answer, plainly
from tests.decoding.test_speculation import speculation as speculating
from tests.runs.test_keys_walk import built

#: Few slots a recording, so that short answers outgrow it; and what a test's answer is long at least.
SMALL, SPAN = 8, 60


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed, "BUCKET", SMALL)


@torch.inference_mode()
def started(name: str, graphs: Tapes | None, **options: Any) -> CachedModel:
    """A side with NaN in all storage that was not written yet."""
    model_side = side(name, graphs=graphs, **options)
    model_side.start()
    for layer in model_side.cache.layers:
        for store in layer.storage:
            store[:, :, layer.get_seq_length() :] = float("nan")
    return model_side


def close(computed: Tensor, expected: Tensor) -> None:
    scale = float(expected.abs().max())
    assert float((computed - expected).abs().max()) <= 1e-9 * scale


@pytest.mark.sampled
@pytest.mark.parametrize("name", [*NAMES, "internvl_phi3"])
@torch.inference_mode()
def test_a_recorded_step_is_the_plain_step(name: str) -> None:
    """Past the ends of recordings, after windows, after going back before an end, and up to the last slot."""
    tapes, prompt = Tapes(), started(name, None).cache.lengths[0]
    # An odd capacity is not a multiple of a recording's slots.
    room = SPAN + (prompt + SPAN) % 2 + 1
    recorded, plain_stack = (started(name, recorder, room=room).stack for recorder in (tapes, None))
    generator = torch.Generator().manual_seed(0)
    kept: list[tuple[Tensor, Tensor]] = []
    place = 0
    for cut in [0] * 12 + [11, 0, 0, 3] + [0] * 14:
        for stack in (recorded, plain_stack):
            stack.cache.cut(cut)
        place -= cut
        ids = torch.randint(0, 100, (1,), generator=generator)
        kept.append((recorded.run(ids, [place]), plain_stack.run(ids, [place])))
        place += 1
        assert (
            recorded.cache.lengths
            == plain_stack.cache.lengths
            == (prompt + place,) * len(recorded.cache.layers)
        )
        if place % 5 == 0:
            window = torch.randint(0, 100, (3,), generator=generator)
            places = list(range(place, place + 3))
            close(recorded.run(window, places), plain_stack.run(window, places))
            place += 3
    while place < room:
        ids = torch.tensor([place])
        kept.append((recorded.run(ids, [place]), plain_stack.run(ids, [place])))
        place += 1
    for computed, expected in kept:  # all at the end: no step may write over the rows of another
        close(computed, expected)
    assert len(tapes.recorded) >= 3
    assert tapes.recorded == sorted(set(tapes.recorded))
    assert tapes.recorded[-1] == prompt + room
    assert tapes.recorded[-1] % SMALL
    assert tapes.replays == len(kept)
    for layer, theirs in zip(recorded.cache.layers, plain_stack.cache.layers, strict=True):
        for computed, expected in zip(layer.entries, theirs.entries, strict=True):
            close(computed, expected)


@pytest.mark.sampled(18)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_answers_are_those_of_plain_decoding(name: str, overlap: bool) -> None:
    tapes = Tapes(), Tapes()
    target = started(name, tapes[0])
    for drafter in (
        None,
        started(name, tapes[1]),
        started(name, Tapes(), method=Uniform(), ratio=0.9),
    ):
        trace = Machine(drafter, target, Greedy(), SequentialTransport(), 3, overlap).run(LIMIT)
        assert trace.tokens == plain(name)
    assert min(tape.replays for tape in tapes) > 0


@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.3}], ids=["deaf", "listening"])
def test_sampled_answers_are_the_same(settings: dict[str, Any]) -> None:
    rule: Rule = Sampling(RandomNumbers(3))
    options = {"do_sample": True, "temperature": 1.5, "numbers": RandomNumbers(3), **settings}

    def answer(graphs: Tapes | None) -> list[int]:
        target, draft = (started("qwen2_5_vl", graphs, **options) for _ in range(2))
        return Machine(draft, target, rule, SequentialTransport(), 3).run(LIMIT).tokens

    tapes = Tapes()
    assert answer(tapes) == answer(None)
    assert tapes.replays > 0


@pytest.mark.parametrize("tree", [False, True])
def test_other_drafters_go_with_recorders(tree: bool) -> None:
    """A part of the target's own cache; trees take windows and levels alone."""
    tapes, name = Tapes(), "llava"
    target = started(name, tapes)
    if tree:
        drafter: Any = TreeDrafter(started(name, tapes), (-1, -1, 0, 0, 1))
    else:
        visual = in_doubles(name).layout(encoded(name)).visual[0]
        drafter = SparseDrafter(target, some(name, 0.5), visual)
    trace = Machine(drafter, target, Greedy(), SequentialTransport(), 3).run(LIMIT)
    assert trace.tokens == plain(name)
    assert (tapes.replays > 0) == (not tree)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "transport"),
    [("vanilla_sd", "sequential"), ("parallelvlm", "threads"), ("std", "auto")],
)
def test_both_sides_of_a_run_record(
    name: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target, plain decoding and the draft; each model has its own recorder."""
    recorded: dict[str, Tapes] = {}

    def record(adapter: Adapter, setting: bool | str) -> Tapes:
        assert setting == "auto"
        return recorded.setdefault(adapter.spec.name, Tapes())

    for module in (speculation, draft_model):
        monkeypatch.setattr(module, "graphs_for", record)
    how = f"engine.transport={transport}", "engine.graphs=auto", "ratio=0.5"
    with speculating(name, *how, "method.params.gamma=3") as both:
        tokens, decoded, _ = answer(both, 3)
    assert tokens == plainly(3)
    assert decoded.mismatch is None
    assert set(recorded) == {"seedling"} | ({"seedling_draft"} if name != "std" else set())
    assert min(tapes.replays for tapes in recorded.values()) > 10


def test_layers_of_different_lengths_take_plain_steps() -> None:
    tapes = Tapes()
    method, ratio = RAGGED
    draft = side("llava", method, ratio, graphs=tapes).draft([], 5)
    assert draft.tokens == side("llava", method, ratio).draft([], 5).tokens
    assert tapes.recorded == []


def test_a_full_cache_is_an_error_before_anything_is_written() -> None:
    model_side = side("llava", graphs=Tapes(), room=2)
    model_side.rows([5, 6], EMPTY_DRAFT)
    keys = [layer.entries[0].clone() for layer in model_side.cache.layers]
    with pytest.raises(RuntimeError, match="room"):
        model_side.rows([5, 6, 7], EMPTY_DRAFT)
    assert all(map(torch.equal, keys, (layer.entries[0] for layer in model_side.cache.layers)))


@pytest.mark.slow
def test_windows_and_steps_follow_each_other() -> None:
    used = side("internvl", graphs=Tapes())
    for sequence in ([3, 4, 5, 6], [3], [3, 9], [], [3, 9, 7, 8], [2]):
        for split in range(len(sequence) + 1):
            draft = Draft(tuple(sequence[split:]))
            assert used.rows(sequence[:split], draft) == side("internvl").rows(
                sequence[:split], draft
            )


@torch.inference_mode()
def test_a_token_of_a_tree_is_no_step() -> None:
    """It does not see the neighbouring branch."""
    tapes = Tapes()
    recorded, plain_stack = started("llava", tapes).stack, started("llava", None).stack
    mask = torch.tensor([[True, False, True]])
    for stack in (recorded, plain_stack):
        stack.run(torch.tensor([7, 8]), [0, 1])
    close(*(stack.run(torch.tensor([9]), [1], mask) for stack in (recorded, plain_stack)))
    assert tapes.recorded == []


def test_a_step_sees_what_is_before_it_and_itself() -> None:
    mask = step_mask(torch.tensor([2]), 5, 3, torch.float64)
    assert mask.shape == (1, 1, 3, 5)
    assert mask[0, 0, 1].tolist() == [0, 0, 0, float("-inf"), float("-inf")]


def test_a_router_on_the_host_cannot_be_recorded() -> None:
    """Why models with experts are refused; if this comes to work, they need not be."""
    model_side = side("deepseek_ocr", graphs=Tapes())
    with pytest.raises(RuntimeError, match="reads from the device"):
        model_side.draft([], 2)


class Device:
    """What torch.cuda is asked for by a recording, written down in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.current = "side's"

    def __call__(self, event: str) -> None:
        self.calls.append(event)

    def stream(self, name: str) -> Any:
        stream = SimpleNamespace(device=torch.device("cuda:0"), name=name)
        stream.wait_stream = lambda waited: self(f"{name} waits for {waited.name}")
        return stream

    @contextmanager
    def entered(self, stream: Any) -> Iterator[None]:
        self.current, before = stream.name, self.current
        yield
        self.current = before

    def graph(self) -> Any:
        def begin(pool: Any, capture_error_mode: str) -> None:
            self(f"begin in {pool}, {capture_error_mode}, on {self.current}")

        return SimpleNamespace(
            capture_begin=begin,
            capture_end=lambda: self(f"end on {self.current}"),
            replay=lambda: self(f"replay on {self.current}"),
        )


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    fake = Device()
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: fake.stream("own"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: fake.stream("side's"))
    monkeypatch.setattr(torch.cuda, "stream", fake.entered)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", fake.graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    return fake


def test_a_recording_keeps_to_its_own_stream_and_waits_for_no_device(device: Device) -> None:
    graphs, inputs = CudaGraphs(torch.device("cuda:0")), (torch.ones(1), torch.ones(1))

    def step(first: Tensor, other: Tensor) -> Tensor:
        assert (first, other) == inputs
        device(f"step on {device.current}")
        return first

    replay = graphs.capture(step, inputs)
    recording = [
        "own waits for side's",
        *["step on own"] * WARMING,
        "begin in pool, thread_local, on own",
        "step on own",
        "end on own",
        "side's waits for own",
    ]
    assert device.calls == recording
    assert replay() is inputs[0]
    assert device.calls[len(recording) :] == ["replay on side's"]


def test_a_step_that_fails_does_not_leave_the_stream_recording(device: Device) -> None:
    def step() -> Tensor:
        if any(event.startswith("begin") for event in device.calls):
            raise RuntimeError("not while capturing")
        return torch.ones(1)

    with pytest.raises(RuntimeError, match="not while capturing"):
        CudaGraphs(torch.device("cuda:0")).capture(step, ())
    assert device.calls[-1] == "end on own"


# ------------------------------------------------------------------ where it can be done

ON_GPU = {"device": "cuda:0"}


def like(**changes: Any) -> Any:
    """An adapter that says it is on a GPU, as far as one is looked at before recording."""
    adapter = in_doubles("llava")
    spec = replace(adapter.spec, **{**ON_GPU, "attention": "sdpa", **changes})
    return SimpleNamespace(spec=spec, model=adapter.model, decoder=adapter.decoder)


EXPERTS = replace(in_doubles("llava").facts.text, experts=4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "cpu"}, "model.device='cpu' is not a GPU"),
        ({"attention": "eager"}, "model.attention='eager' is not sdpa"),
        ({"facts": replace(in_doubles("llava").facts, text=EXPERTS)}, "experts"),
    ],
)
def test_what_cannot_be_recorded_is_refused_or_left(changes: dict[str, Any], words: str) -> None:
    adapter = like(**changes)
    with pytest.raises(Refused, match=r"^engine\.graphs=true .*valid: false, auto$") as refusal:
        graphs_for(adapter, True)
    assert words in str(refusal.value)
    assert graphs_for(adapter, "auto") is None
    assert graphs_for(adapter, False) is None


def test_a_model_spread_over_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(Refused, match="device_map='auto' spreads"):
        graphs_for(like(device_map="auto"), True)


def test_what_only_a_loaded_model_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = like()
    adapter.model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])
    with pytest.raises(Refused, match="several devices"):
        graphs_for(adapter, True)
    adapter = like()
    adapter.decoder = SimpleNamespace(rotary_emb=SimpleNamespace(rope_type="dynamic"))
    with pytest.raises(Refused, match="rotary frequencies"):
        graphs_for(adapter, True)
    assert graphs_for(adapter, "auto") is None


def test_what_can_be_recorded_is() -> None:
    devices: list[torch.device] = []

    class Made(CudaGraphs):
        def __init__(self, device: torch.device) -> None:
            devices.append(device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("espalier.harness.engine.text_stack.CudaGraphs", Made)
        adapter = like()
        adapter.device = torch.device("cuda:0")
        assert isinstance(graphs_for(adapter, True), Made)
        assert isinstance(graphs_for(adapter, "auto"), Made)
        assert graphs_for(adapter, False) is None
    assert devices == [torch.device("cuda:0")] * 2


def test_a_run_is_refused_before_anything_is_loaded() -> None:
    spec = spec_of("method=pearl", "engine.graphs=true", "model.device=cpu")
    method: Any = built("decoder")
    with pytest.raises(Refused, match=r"engine\.graphs=true .*model\.device='cpu'"):
        check_graphs(spec, method)
    spec = replace(spec, model=replace(spec.model, **ON_GPU))
    with pytest.raises(Refused, match=r"method\.draft_options\.device='cpu'"):
        check_graphs(spec, method)
    draft = replace(spec.method.draft, **ON_GPU)
    spec = replace(spec, method=replace(spec.method, draft=draft))
    check_graphs(spec, method)
    # A draft that prunes between its layers.
    guided = spec_of("method=parallelvlm", "method.params.guidance=self").method
    spec = replace(spec, method=replace(guided, draft=draft))
    with pytest.raises(Refused, match=r"'parallelvlm' .*different lengths"):
        check_graphs(spec, ParallelVLM(guidance="self"))
    check_graphs(spec, ParallelVLM())


@pytest.mark.parametrize("graphs", ["false", "auto"])
def test_nothing_else_is_refused_on_a_cpu(graphs: str) -> None:
    spec = spec_of("method=pearl", f"engine.graphs={graphs}", "model.device=cpu")
    assert spec.engine.graphs == ("auto" if graphs == "auto" else False)
    method: Any = built("decoder")
    check_graphs(spec, method)
