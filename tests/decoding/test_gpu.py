"""Both sides on GPUs, if there are any: the same answers, and plausible figures."""

from __future__ import annotations

import pytest
import torch

from espalier.harness.decoding.speculative.decoding_record import DecodingRecord
from espalier.harness.decoding.speculative.speculation import Speculation, with_chats
from espalier.harness.engine import text_stack as fixed
from espalier.harness.engine.text_stack import CudaGraphs, TextStack, prefill_words
from espalier.harness.models.build_adapter import load_adapter
from espalier.harness.runs import admission
from espalier.harness.store.files.digests import Digests
from lab.bench.speculative_bench import chat_of
from tests.commands import caption_spec
from tests.decoding.test_speculation import GREEDY

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")


def answered(*overrides: str) -> tuple[str, list[DecodingRecord]]:
    """Two answers with the ids of `generate` on the same device, and the transport."""
    job = admission.admit(caption_spec(*overrides), Digests())
    adapter, records = load_adapter(job.spec.model), []
    with Speculation(job.spec, adapter, job.method) as speculation:
        for scene in (3, 4):
            inputs = adapter.to_device(with_chats(adapter, [chat_of((scene,))]))
            plain = {name: value for name, value in inputs.items() if name != "chats"}
            ids = adapter.model.generate(**plain, **GREEDY)[:, plain["input_ids"].shape[1] :]
            generated = speculation.generate(inputs, [str(scene)], **GREEDY)
            assert torch.equal(generated.ids, ids)
            (record,) = generated.records
            records.append(DecodingRecord.from_entry(record.decoding))
    assert all(decoding.degraded is None and decoding.mismatch is None for decoding in records)
    return speculation.transport, records


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_two_models_on_one_gpu_are_streams_of_it(device: str) -> None:
    transport, records = answered("method=parallelvlm", "ratio=0.5", f"model.device={device}")
    assert transport == "threads"
    assert [(record.devices, record.target_devices, record.apart) for record in records] == [
        (0, 1, False)
    ] * 2


def test_in_turn_each_side_is_timed_by_its_events() -> None:
    _, records = answered("method=vanilla_sd", "model.device=cuda")
    for step in (part for answer in records for part in answer.rounds):
        assert 0 < step.draft_busy <= step.draft_seconds
        assert 0 < step.target_busy <= step.target_seconds


@pytest.mark.parametrize("name", ["vanilla_sd", "pearl", "std", "sd_tree", "autoregressive"])
def test_steps_that_are_graphs_say_the_same(name: str) -> None:
    """In turn, in two streams that record at the same time, and on a part of the target's cache."""
    answered(f"method={name}", "model.device=cuda:0", "engine.graphs=true")


@torch.inference_mode()
def test_a_graph_is_the_plain_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the end of a recording and back."""
    monkeypatch.setattr(fixed, "BUCKET", 8)
    adapter = load_adapter(caption_spec("method=none", "model.device=cuda:0").model)
    stacks = [TextStack(adapter, 40, graphs) for graphs in (None, CudaGraphs(adapter.device))]
    ids = torch.arange(30, device=adapter.device)[None]
    for stack in stacks:
        _, stack.following = prefill_words(adapter, ids, stack.cache)
    rows: list[list[torch.Tensor]] = [[], []]
    place = 0
    for cut in [0] * 20 + [12] + [0] * 20:
        place -= cut
        for stack, into in zip(stacks, rows, strict=True):
            stack.cache.cut(cut)
            into.append(stack.run(ids[0, place % 30].view(1), [place]))
        place += 1
    plain, graphs = (torch.cat(figure) for figure in rows)
    torch.testing.assert_close(graphs, plain, rtol=1e-4, atol=1e-4 * float(plain.abs().max()))


@several
def test_a_draft_on_its_own_gpu_has_a_process() -> None:
    transport, records = answered(
        "method=parallelvlm",
        "ratio=0.5",
        "model.device=cuda:0",
        "method.draft_options={device: 'cuda:1'}",
    )
    assert transport == "processes"
    assert [(record.devices, record.target_devices, record.apart) for record in records] == [
        (1, 1, True)
    ] * 2


@several
def test_a_target_on_all_gpus() -> None:
    _, records = answered(
        "method=pearl", "model.device_map=auto", "method.draft_options={device: 'cuda:0'}"
    )
    assert all(record.target_devices >= 1 for record in records)
