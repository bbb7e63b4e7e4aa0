"""Whole answers by speculative decoding: every decoder, transport and accident, with two trained models."""

from __future__ import annotations

import json
import os
import signal
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from espalier.harness.cost.budget import Budget
from espalier.harness.decoding.speculative import drafters
from espalier.harness.decoding.speculative.decoding_record import DecodingRecord
from espalier.harness.decoding.speculative.draft_model import DraftModel, draft_of
from espalier.harness.decoding.speculative.forward_times import MEASUREMENTS, best_window_of
from espalier.harness.decoding.speculative.guidance import Guidance, GuidanceReader, GuidedReducer
from espalier.harness.decoding.speculative.speculation import Speculation, with_chats
from espalier.harness.decoding.speculative.speculative_summary import speculative_block
from espalier.harness.engine.session import Session
from espalier.harness.errors import UserError
from espalier.harness.models.build_adapter import load_adapter
from espalier.harness.runs import admission
from espalier.harness.specs.catalogue import build_method, names_of
from espalier.harness.store.files.digests import Digests
from espalier.methods.base import Decoder, MethodError, Positions
from espalier.methods.none import NoReduction
from espalier.methods.parallelvlm import ParallelVLM
from lab.bench.speculative_bench import chat_of
from tests.commands import caption_spec

GREEDY = {"do_sample": False, "max_new_tokens": 40}

#: Overrides of every decoder, and of those with settings where the way of an answer is another: a tree is drafted, the
#: target guides by what it computed, nobody guides, the draft guides itself, or sees no image. Which tokens a guidance
#: keeps changes no answer; tests/methods/test_decoders_choice.py holds each of them to its formula.
DECODERS = (
    *names_of(Decoder),
    "specvlm_sd method.params.shape=tree",
    *(
        f"parallelvlm method.params.guidance={guidance}"
        for guidance in ("attention_variation method.params.L=2", "self", "none")
    ),
    "parallelvlm method.params.guidance=none method.params.text_only=true ratio=1",
)


@cache
def target():
    return load_adapter(caption_spec("method=none").model)


def speculation(name: str, *overrides: str) -> Speculation:
    method, *more = name.split()
    job = admission.admit(caption_spec(f"method={method}", *more, *overrides), Digests())
    return Speculation(job.spec, target(), job.method)


@cache
def plainly(scene: int, **settings: Any) -> list[int]:
    """What transformers' own decoding says."""
    inputs = target().encode([chat_of((scene,))])
    ids = target().model.generate(**inputs, **(settings or GREEDY))
    return ids[0, inputs["input_ids"].shape[1] :].tolist()


def answer(
    session: Speculation, scene: int, **settings: Any
) -> tuple[list[int], DecodingRecord, Any]:
    generated = session.generate(
        target().to_device(with_chats(target(), [chat_of((scene,))])),
        [f"captions/{scene}"],
        **(settings or GREEDY),
    )
    (record,) = generated.records
    # As the journal keeps it.
    kept = json.loads(json.dumps(record.decoding))
    return generated.ids[0].tolist(), DecodingRecord.from_entry(kept), record


@pytest.mark.sampled(36)
@pytest.mark.parametrize(
    ("name", "ratio"),
    [(name, "0.9") for name in DECODERS]
    + [(name, "0") for name in names_of(Decoder) if build_method(name, {}).guided],  # type: ignore[attr-defined]
)
def test_every_decoder_says_what_the_target_says(name: str, ratio: str) -> None:
    overrides = [] if "ratio" in name else [f"ratio={ratio}"]
    with speculation(name, "engine.transport=sequential", *overrides) as session:
        for scene in (3, 4):
            tokens, decoded, record = answer(session, scene)
            assert tokens == plainly(scene)
            assert decoded.mismatch is None
            assert decoded.degraded is None
            assert record.new_tokens == len(tokens) == decoded.spent.tokens
            assert record.kept == record.requested == ()
            assert record.entering == (144,) * 6  # the target keeps every token
        decoder = session._method
    without_draft = decoder.source == "nobody"
    assert (decoded.plain is None) == without_draft
    if not without_draft:
        chooses = decoder.guided or decoder.reducer is not None
        draft_visual = 14 if chooses and ratio == "0.9" else 144
        assert decoded.draft_visual == (0 if decoder.text_only else draft_visual)
    assert target().decoder.config._attn_implementation == "sdpa"


@pytest.mark.slow
def test_a_thread_of_its_own_says_the_same() -> None:
    for name in ("parallelvlm", "pearl", "vanilla_sd"):
        with speculation(name, "engine.transport=threads", "ratio=0.5") as session:
            tokens, decoded, _ = answer(session, 5)
            assert tokens == plainly(5)
            assert decoded.degraded is None


@pytest.mark.slow
def test_with_one_processor_greedy_answers_take_rounds_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sampled ones draw what they draw on any other machine."""
    sampled = {"do_sample": True, "max_new_tokens": 20}
    monkeypatch.setattr(drafters, "processors", lambda: 1)
    with speculation("parallelvlm", "ratio=0.5") as session:
        tokens, decoded, _ = answer(session, 5)
        assert tokens == plainly(5)
        drawn, at_once, _ = answer(session, 5, **sampled)
    assert all(played.pending == 0 for played in decoded.rounds)
    assert any(played.pending for played in at_once.rounds)
    with speculation("parallelvlm", "engine.transport=sequential", "ratio=0.5") as session:
        assert answer(session, 5, **sampled)[0] == drawn
    blocks = [speculative_block([record.entry()], True) for record in (decoded, at_once)]
    assert [(block["overlap"], block["in_turn"]) for block in blocks] == [
        (False, "one processor"),
        (True, None),
    ]


def shared_memory(*processes: int) -> set[str]:
    """Shared memory that torch named after one of these processes; other tests have theirs at the same time."""
    return {
        name
        for name in os.listdir("/dev/shm")
        if any(f"_{process}_" in name for process in processes)
    }


@pytest.mark.exhaustive
def test_a_process_of_its_own_says_the_same_and_survives_being_killed() -> None:
    cores = os.sched_getaffinity(0)
    with speculation("parallelvlm", "ratio=0.5") as session:
        assert session.transport == "processes"
        tokens, decoded, _ = answer(session, 6)
        assert tokens == plainly(6)
        assert decoded.degraded is None
        assert decoded.devices == 1
        assert decoded.first
        assert decoded.steps.draft > 0
        session.window.timings *= (
            MEASUREMENTS  # the rounds counted from here on are those of answers
        )
        first = process_of(session)
        kill_at_round(session, 3)
        tokens, decoded, _ = answer(session, 7)
        assert tokens == plainly(7)  # nothing is lost
        assert decoded.degraded == "the drafter's process ended by signal 9"
        # The next answer has a new process.
        tokens, decoded, _ = answer(session, 8)
        assert tokens == plainly(8)
        assert decoded.degraded is None
        second = process_of(session)
        assert second != first
        # One that is killed between two answers is missed when the next begins.
        os.kill(second, signal.SIGKILL)
        tokens, decoded, _ = answer(session, 9)
        assert tokens == plainly(9)
        assert decoded.degraded is not None
        tokens, decoded, _ = answer(session, 10)
        assert tokens == plainly(10)
        assert decoded.degraded is None
        # One that hangs is given up.
        hung = process_of(session)
        session._provider._process._patience = 0.3
        stop_at_round(session, 2, hung)
        tokens, decoded, _ = answer(session, 11)
        assert tokens == plainly(11)
        assert decoded.degraded == "the drafter did not answer within 0.3 s"
    for process in (first, second, hung):
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
    assert not shared_memory(os.getpid(), first, second, hung)
    assert os.sched_getaffinity(0) == cores


@pytest.mark.slow
def test_a_process_killed_while_it_is_timed_costs_no_answer() -> None:
    with speculation("pearl") as session:
        kill_at_round(session, 5)  # the first rounds are those that are timed
        tokens, decoded, _ = answer(session, 3)
        assert tokens == plainly(3)
        assert (decoded.steps, decoded.gamma) == (None, 1)
        assert decoded.degraded is None  # a new process drafts
        tokens, decoded, _ = answer(session, 4)
        assert tokens == plainly(4)
        assert decoded.steps is not None


def process_of(session: Speculation) -> int:
    return session._provider._process._process.pid


def at_round(session: Speculation, number: int, act: Any) -> None:
    """Do something to the drafter's process before a round of the next answer."""
    transport = session._provider._process
    original, calls = transport.at_once, []

    def counted(draft: Any, rows: Any) -> Any:
        calls.append(None)
        if len(calls) == number:
            act()
        return original(draft, rows)

    transport.at_once = counted


def kill_at_round(session: Speculation, number: int) -> None:
    at_round(session, number, lambda: os.kill(process_of(session), signal.SIGKILL))


def stop_at_round(session: Speculation, number: int, process: int) -> None:
    at_round(session, number, lambda: os.kill(process, signal.SIGSTOP))


@pytest.mark.exhaustive
def test_a_process_samples_like_a_thread_and_is_not_started_for_ever() -> None:
    settings = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 24}
    with speculation("pearl", "engine.transport=sequential", "method.params.gamma=2") as session:
        sampled, _, _ = answer(session, 6, **settings)
    with speculation("pearl", "method.params.gamma=2", "engine.compare=false") as session:
        # Rows that tokens were drawn from cross the pipe too.
        assert answer(session, 6, **settings)[0] == sampled
        session._provider._losses = 3
        os.kill(process_of(session), signal.SIGKILL)
        for scene in (7, 8):
            tokens, decoded, _ = answer(session, scene)
            assert tokens == plainly(scene)
            assert decoded.degraded == "the drafter's process ended by signal 9"
            assert decoded.plain is None


@pytest.mark.slow
def test_sampling_is_repeated_by_its_seed_whatever_the_transport() -> None:
    settings = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 24}
    # A run that samples nothing has no seed but 0.
    sampled = "+benchmark.generation={do_sample: true, temperature: 1.5}"
    answers = {}
    for kind in ("sequential", "threads"):
        with speculation(
            "pearl", f"engine.transport={kind}", "method.params.gamma=3", "engine.compare=false"
        ) as session:
            answers[kind], decoded, _ = answer(session, 3, **settings)
            assert decoded.mismatch is None
    assert answers["sequential"] == answers["threads"]
    with speculation(
        "pearl", "engine.transport=sequential", "method.params.gamma=3", "seed=1", sampled
    ) as session:
        repeated, _, _ = answer(session, 3, **settings)
    assert repeated != answers["sequential"]


def test_a_question_draws_by_its_id() -> None:
    """Two samples of one run that ask the same draw other numbers, and each the same ones again."""
    settings = {"do_sample": True, "temperature": 2.0, "max_new_tokens": 24}
    with speculation("autoregressive", "engine.transport=sequential") as session:
        inputs = target().to_device(with_chats(target(), [chat_of((3,))]))
        first, second, repeated = (
            session.generate(inputs, [name], **settings).ids[0].tolist() for name in ("a", "b", "a")
        )
    assert first == repeated
    assert first != second


def test_what_looks_on_changes_no_bit() -> None:
    chosen: list[Guidance] = []
    inputs = target().encode([chat_of((3,))])
    with Session(target(), NoReduction(), Budget("kept", 0.0)) as session:
        plain = session.generate(inputs, output_logits=True, **GREEDY)
    looking = GuidanceReader(ParallelVLM(), chosen.append)
    with Session(target(), looking, Budget("kept", 0.9)) as session:
        generated = session.generate(inputs, output_logits=True, **GREEDY)
    assert torch.equal(plain.logits, generated.logits)
    (guidance,) = chosen
    assert guidance.n_tokens == 144
    assert guidance.kept.shape == (14,)


def test_a_draft_with_other_visual_tokens_is_refused() -> None:
    guidance = Guidance(torch.arange(10), 100)
    inputs = target().encode([chat_of((3,))])
    with (
        Session(target(), GuidedReducer(lambda: guidance), Budget("kept", 0.9)) as session,
        pytest.raises(MethodError, match="the draft sees 144 visual tokens, the target 100"),
    ):
        session.generate(inputs, **GREEDY)


@pytest.mark.parametrize(
    ("policy", "places"),
    [("original", "original"), ("renumbered", "renumbered"), ("method", "renumbered")],
)
def test_a_guided_draft_has_its_tokens_where_the_policy_says(
    policy: str, places: Positions
) -> None:
    guidance = Guidance(torch.arange(5, 144, 9), 144)
    spec = speculation("parallelvlm", f"engine.positions={policy}", "ratio=0.9")._spec
    drafts = draft_of(spec, ParallelVLM())
    draft = DraftModel(drafts, target())  # any weights will do
    draft.guide(guidance)
    inputs = target().encode([chat_of((3,))])
    tokens, _ = draft._prefill(inputs, "0", DynamicCache(config=target().decoder.config))
    logits = {}
    for way in ("original", "renumbered"):
        with Session(
            target(), GuidedReducer(lambda: guidance), Budget("kept", 0.9), positions=way
        ) as session:
            cache = DynamicCache(config=target().decoder.config)
            logits[way], _ = session.prefill(inputs, cache, "0")
    assert torch.equal(tokens, logits[places])
    assert not torch.equal(logits["original"], logits["renumbered"])


def test_several_chats_and_settings_that_cannot_be_honoured_are_refused() -> None:
    with speculation("pearl", "engine.transport=sequential") as session:
        chats = [chat_of((3,)), chat_of((4,))]
        with pytest.raises(ValueError, match="one at a time"):
            session.generate(target().to_device(with_chats(target(), chats)), ["0", "1"], **GREEDY)
        with pytest.raises(UserError, match="num_beams"):
            answer(session, 3, num_beams=2, max_new_tokens=4)


def test_a_draft_that_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    options = f"method.draft_options={{path: {tmp_path}}}"
    with pytest.raises(UserError, match=r"method.draft_options.path=.*holds no model"):
        speculation("pearl", options)


@pytest.mark.slow
def test_the_best_window_follows_what_was_accepted_and_changes_no_answer() -> None:
    with speculation(
        "parallelvlm", "ratio=0.9", "method.params.gamma=best", "engine.transport=sequential"
    ) as session:
        for scene in (3, 4, 5):
            expected = best_window_of(session.window.played)
            tokens, decoded, _ = answer(session, scene)
            assert tokens == plainly(scene)
            assert expected in (None, decoded.gamma)
        assert expected is not None  # two answers have rounds enough


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("engine.rescore=true", "engine.rescore"),
        ("engine.backend=emulate", "engine.backend"),
        ("ratio=1", "leaves the draft no visual token"),
        ("method.params.gamma=0", "method.params.gamma=0"),
    ],
)
def test_what_a_decoder_cannot_do_is_one_line(override: str, line: str) -> None:
    with pytest.raises((UserError, MethodError), match=line):
        speculation("parallelvlm", override)
