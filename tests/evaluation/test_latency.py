"""Prompts of a length that is asked for, answers of a length, and both sides beside what the bandwidth allows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import run
from espalier.harness.config.build_spec import build_spec
from espalier.harness.engine.record import GeneratedBatch, SampleRecord
from espalier.harness.errors import Refused, UserError
from espalier.harness.evaluation import latency
from espalier.harness.evaluation.latency import (
    LatencyRound,
    LatencyRun,
    StepReads,
    alternate,
    gains,
    prompt_block,
    side_summary,
)
from espalier.harness.evaluation.synthetic_prompts import (
    QUESTION,
    PromptComposition,
    compose_prompt,
    parts,
    words,
)
from espalier.harness.kinds import checkpoint_check as lengths
from espalier.harness.runs.result_row import _reported
from espalier.harness.store import Store
from tests import commands
from tests.refused import refused

spec_of = partial(commands.spec_of, "benchmark=latency")


# ------------------------------------------------------------------ prompts


def model(
    picture: Callable[[int], int], a_word: int = 1, limit: float = math.inf
) -> Callable[[PromptComposition], int]:
    """Return how a made-up model counts: a frame of 20 tokens, words, and pictures by their number."""

    def count(prompt: PromptComposition) -> int:
        total = 20 + a_word * (prompt.before + prompt.after) + picture(prompt.pictures)
        if total > limit:
            raise UserError("too long")
        return total

    return count


def only_one(pictures: int) -> int:
    if pictures > 1:
        raise UserError("one picture")
    return 100


MODELS = {
    "each the same": model(lambda n: 144 * n),
    "words of three tokens": model(lambda n: 144 * n, a_word=3),
    "one alone has crops": model(lambda n: 1485 if n == 1 else 729 * n),
    "one is all": model(only_one),
    "few positions": model(lambda n: 144 * n, limit=1700),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tokens", [1550, 2048, 4096])
def test_no_picture_and_no_word_more_would_fit(name: str, tokens: int) -> None:
    count = MODELS[name]

    def size(prompt: PromptComposition) -> float:
        try:
            return count(prompt)
        except UserError:
            return math.inf

    composed = compose_prompt(count, tokens)
    assert size(composed) <= tokens
    assert size(replace(composed, before=0, pictures=composed.pictures + 1)) > tokens
    if composed.pictures > 1 or name == "one is all":
        assert size(replace(composed, before=composed.before + 1)) > tokens
    least = PromptComposition(0, 1, 1)
    lengths = [n for n in range(1, 200) if size(replace(least, after=n)) - size(least) < QUESTION]
    assert composed.after <= lengths[-1]


def test_a_prompt_that_holds_no_picture_is_told_with_the_least() -> None:
    with pytest.raises(UserError, match=r"prompt_tokens=100: .* takes 165; valid: at least 165"):
        compose_prompt(MODELS["each the same"], 100)


def test_pixels_follow_seed_and_number_and_words_stand_around_them() -> None:
    made = PromptComposition(2, 2, 3)
    first, left, right, last = parts(made, 0, 0)
    assert (first, last) == (words(2), "describe what is")
    assert not isinstance(left, str)
    assert not isinstance(right, str)
    assert left.tobytes() != right.tobytes()
    again = parts(made, 0, 0)[1]
    other = [parts(made, 1, 0)[1], parts(made, 0, 1)[1]]
    assert again.tobytes() == left.tobytes()  # type: ignore[union-attr]
    assert all(picture.tobytes() != left.tobytes() for picture in other)  # type: ignore[union-attr]
    assert len(parts(replace(made, before=0), 0, 0)) == 3


# ------------------------------------------------------------------ turns


def record(**times: float) -> SampleRecord:
    return SampleRecord("0", 90, 10, (), (), (90, 90), 180, 4000, 5, times_ms=times)


class Side:
    """Notes that it was called, and takes as long as it is told."""

    def __init__(self, name: str, called: list[str], step: float) -> None:
        self.name, self.called, self.step = name, called, step

    def generate(self, inputs: Any, samples: Sequence[str], **more: Any) -> GeneratedBatch:
        assert more == {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
        self.called.append(self.name)
        times = {"prefill": 100.0 + len(self.called), "decode_per_token": self.step}
        return GeneratedBatch(SimpleNamespace(), tuple(record(**times) for _ in samples))  # type: ignore[arg-type]


def test_sides_take_turns_and_the_first_round_does_not_count() -> None:
    called: list[str] = []
    sides = {"own": Side("own", called, 2.0), "plain": Side("plain", called, 6.0)}
    rounds = alternate(sides, {}, ["0", "1"], 8, [], rounds=3)
    assert called[:2] != called[2:4] == called[6:8]
    assert sorted(called) == ["own"] * 4 + ["plain"] * 4
    assert {name: len(turns) for name, turns in rounds.items()} == {"own": 3, "plain": 3}
    # A record has its row's share of the batch's time.
    assert ([turn.step for turn in rounds["own"]], rounds["plain"][0].kv_bytes) == ([4.0] * 3, 8000)
    assert rounds["own"][0].peak_bytes > 0


def turn(step: float, kv_bytes: int) -> LatencyRound:
    return LatencyRound(100.0, 1.0, step, kv_bytes, 7, (record(), record()))


def test_a_step_is_bound_by_weights_and_the_cache_in_the_middle_of_the_answer() -> None:
    reads = StepReads(weights=1000, entry=10, rate=1e6)
    assert reads.bound(turn(5.0, 4000), tokens=20) == pytest.approx(1e3 * (1000 + 4000 + 200) / 1e6)
    side = side_summary([turn(8.0, 4000), turn(13.0, 4000), turn(10.4, 4000)], reads, 20)
    assert (side["step_ms"], side["bound_reached"]) == (10.4, pytest.approx(0.5))
    assert side["throughput"] == pytest.approx(2 / 10.4e-3)
    block = gains({"own": [turn(5.0, 0)] * 2, "plain": [turn(10.0, 4800)] * 2}, reads, 20)
    assert block["step"]["ratio"] == pytest.approx(2)
    assert block["step"]["bound"] == pytest.approx(6000 / 1200)


def test_a_row_says_which_length_came_about() -> None:
    block = prompt_block([record(), replace(record(), text=30)], 128)
    assert block == {"asked": 128, "visual": 90, "text": 20, "visual_share": pytest.approx(9 / 11)}


class Full:
    def generate(self, *_: Any, **__: Any) -> GeneratedBatch:
        raise RuntimeError("not enough memory: you tried to allocate memory\nand more")


def test_where_the_whole_cache_does_not_fit_the_method_stands_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StepReads, "of", lambda adapter: StepReads(1000, 10, 1e6))
    group = SimpleNamespace(generate={"max_new_tokens": 8})
    answered: Any = SimpleNamespace(
        answered=lambda: (group, [0, 1, 2]), batch_size=2, encode=lambda block: {}
    )
    side: Any = Side("own", [], 2.0)
    pair: Any = SimpleNamespace(reduced=side, plain=Full())
    clocked = LatencyRun(spec_of().benchmark, 0)
    opened: Any = SimpleNamespace(generator=side, paired=pair)
    block = clocked.measure(answered, opened, SimpleNamespace(devices=[]))  # type: ignore[arg-type]
    assert block["plain"] is None
    assert "allocate memory" in block["note"]
    assert (block["batch_size"], block["own"]["step_ms"]) == (2, 4.0)
    pair.plain.generate = lambda *_, **__: 1 / 0
    with pytest.raises(ZeroDivisionError):
        clocked.measure(answered, opened, SimpleNamespace(devices=[]))  # type: ignore[arg-type]


# ------------------------------------------------------------------ command lines


def test_lengths_are_settings_that_a_sweep_goes_through() -> None:
    specs = [
        build_spec(cell).benchmark
        for cell in commands.cells_of("-m", "benchmark=latency", "benchmark.prompt_tokens=256,500")
    ]
    assert [benchmark.prompt_tokens for benchmark in specs] == [256, 500]
    spec = spec_of("benchmark.new_tokens=7", "engine.batch_size=3")
    assert spec.benchmark.generation == {"min_new_tokens": 7, "max_new_tokens": 7}
    assert spec.benchmark.limit == 3
    assert spec_of("limit=5", "engine.batch_size=3").benchmark.limit == 5
    assert "engine.batch_size='auto': benchmark=latency" in refused(
        spec_of, "engine.batch_size=auto"
    )


def test_what_positions_or_memory_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths.check_lengths(spec_of("benchmark.prompt_tokens=511"))
    with pytest.raises(Refused, match="prompt_tokens=512: model='seedling' has 512 positions"):
        lengths.check_lengths(spec_of("benchmark.prompt_tokens=512"))
    large = ("model=llava_ov_7b", "model.weights=random", "model.dtype=bfloat16")
    with pytest.raises(Refused, match="32768 positions; valid: fewer than 32768, or more of"):
        lengths.check_lengths(spec_of(*large, "benchmark.prompt_tokens=32768"))
    spec = spec_of(*large, "benchmark.prompt_tokens=8192", "engine.batch_size=8")
    # 14.1 GB of weights (of which a step reads no table of embeddings) and 57,344 bytes a token.
    least = lengths.least_bytes(spec, 8192)
    assert least == pytest.approx(14.1e9 + 8 * (8192 + 512) * 57344, rel=0.01)
    monkeypatch.setattr(lengths.DeviceMemory, "reachable", lambda self: least)
    lengths.check_lengths(spec)
    monkeypatch.setattr(lengths.DeviceMemory, "reachable", lambda self: least - 1)
    with pytest.raises(Refused, match=r"8 rows take at least 16\.\d GiB"):
        lengths.check_lengths(spec)


def test_memory_of_a_job_s_gpu_is_left_to_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths.torch.cuda, "is_available", lambda: False)
    spec = spec_of("benchmark.prompt_tokens=64")
    lengths.check_lengths(replace(spec, model=replace(spec.model, device="cuda")))


def test_random_weights_keep_what_the_clock_says() -> None:
    values: Mapping[str, float | None] = {"value": 3.0, "stderr": None}
    large = spec_of("model=llava_ov_7b", "model.weights=random", "model.dtype=bfloat16")
    assert _reported(large, values) == values
    scored = replace(large, benchmark=replace(large.benchmark, prompt_tokens=None))
    assert _reported(scored, values) == {"value": None, "stderr": None}


@pytest.mark.slow
@pytest.mark.sampled(12)
@pytest.mark.parametrize("method", ["random_kv", "none"])
def test_a_row_has_both_sides(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(latency, "COPIED", 2**16)
    arguments = [
        *("benchmark=latency", f"method={method}", "ratio=0.5", f"store={tmp_path}", "json=true"),
        *("benchmark.prompt_tokens=400", "benchmark.new_tokens=5", "engine.batch_size=2"),
        *("engine.warmup=0", "model.device=cpu"),
    ]
    assert run.main(arguments) == 0, capfd.readouterr().err
    (row,) = Store(tmp_path).rows()
    block = row["extra"]["latency"]
    assert row["n_samples"] == block["batch_size"] == 2
    assert row["extra"]["new_tokens"] == block["new_tokens"] == 5
    assert block["prompt"]["asked"] == 400
    assert 396 <= block["prompt"]["visual"] + block["prompt"]["text"] <= 400
    assert block["prompt"]["visual"] == 2 * 144
    assert row["metrics"]["throughput"]["value"] == pytest.approx(
        1e3 / row["time"]["decode_ms_per_token"]
    )
    facts = (6, 6, 32)
    entry = 2 * 4 * math.prod(facts)
    held = 144 if method == "random_kv" else 288
    assert block["own"]["kv_bytes"] == 2 * entry * (held + block["prompt"]["text"])
    assert block["own"]["bound_ms"] == pytest.approx(
        1e3
        * (block["weight_bytes"] + block["own"]["kv_bytes"] + 2 * entry * 5 / 2)
        / block["copy_bytes_per_second"]
    )
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["run_key"] == row["run_key"]
    if method == "none":
        assert block["plain"] is None
        assert "unreduced" in block["note"]
    else:
        assert block["plain"]["kv_bytes"] == 2 * entry * (288 + block["prompt"]["text"])
        assert 1 < block["gain"]["step"]["bound"] < 2
        assert row["extra"]["speedup_note"] == "extra.latency has both sides"
