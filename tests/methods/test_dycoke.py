"""DyCoke: frames against a literal version, decoding steps against whole forwards with eager attention."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch.nn.functional import cosine_similarity

from espalier.harness.cost.budget import Budget, BudgetError
from espalier.harness.engine.session import Session
from espalier.harness.models.adapter import Adapter
from espalier.harness.specs.catalogue import build_method
from espalier.harness.specs.run_spec import VideoSpec
from espalier.methods.base import Attended, MethodError, Site, View
from espalier.methods.dycoke import DyCoke
from tests.engine.decode_oracle import step_logits
from tests.families import FAMILIES
from tests.families.onevision import ONEVISION, video, watch
from tests.families.qwen import QWEN2, QWEN25, clip, video_chat
from tests.family_runs import adapter_of, generation
from tests.methods.cases import generators_for, grid_of
from tests.methods.runs import kept_by
from tests.methods.twins import best, check_method
from tests.tiny import Family, load_tiny, save_tiny

PAPER, OFFICIAL = DyCoke(), DyCoke(reading="official")
DECODE = DyCoke(temporal=False, l=2)


def clip_of(frames: int, height: int = 2, width: int = 3, first: int = 0) -> list:
    return [(first + number, 0, height, width) for number in range(frames)]


def view_of(*tilings: list, seed: int = 0) -> View:
    """Random tokens of some rows, the frames of each one given as a tiling."""
    grid = torch.stack([grid_of(tiling) for tiling in tilings])
    tokens = torch.randn(*grid.shape[:2], 5, generator=torch.Generator().manual_seed(seed))
    return View(Site("prefix"), tokens, grid, {}, generators_for(range(len(tilings))))


# ---------------------------------------------------------------- before the decoder


def slow_frames(view: View, row: int) -> list[list[int]]:
    """Token indices of each frame."""
    frames: list[list[int]] = []
    last_frame = None
    for token, (frame, *_) in enumerate(view.grid[row].tolist()):
        if frame != last_frame:
            frames.append([])
        last_frame = frame
        frames[-1].append(token)
    return frames


def slow_pairs(view: View, row: int, reading: str) -> dict[int, int]:
    """Which frame each thinned frame is compared with, as in the loops of the paper and of the released code."""
    frames, places = slow_frames(view, row), view.grid[row, :, 1:].tolist()
    clips: list[list[int]] = []
    for number, frame in enumerate(frames):
        before = frames[number - 1] if number else []
        equal = [places[token] for token in frame] == [places[token] for token in before]
        clips[-1].append(number) if equal else clips.append([number])
    pairs: dict[int, int] = {}
    for numbers in clips:
        total = len(numbers)
        if reading == "official" and total <= 4:
            continue
        for start in range(0, total - 1, 2):
            pairs[numbers[start + 1]] = numbers[start]
        thirds = range(0, total - 4, 4) if reading == "official" else range(0, total - 2, 4)
        for start in thirds:
            pairs[numbers[start + 2]] = numbers[start]
    return pairs


def slow_dycoke(method: DyCoke, view: View, row: int, keep: int) -> dict[int, torch.Tensor]:
    frames, pairs = slow_frames(view, row), slow_pairs(view, row, method.reading)
    tokens = view.tokens[row].double()
    full_tokens = [
        token for number, frame in enumerate(frames) if number not in pairs for token in frame
    ]
    remaining, sizes = keep - len(full_tokens), sum(len(frames[number]) for number in pairs)
    kept, upto = list(full_tokens), 0
    for number in sorted(pairs):
        now, then = frames[number], frames[pairs[number]]
        share = remaining * (upto + len(now)) // sizes - remaining * upto // sizes
        upto += len(now)
        likeness = [
            (float(cosine_similarity(tokens[a], tokens[b], dim=0)), a)
            for a, b in zip(now, then, strict=True)
        ]
        kept += [token for _, token in sorted(likeness)[:share]]
    return {token: view.tokens[row, token] for token in kept}


def three_shapes(_method: DyCoke, _keep: int, frames: int) -> View:
    return view_of(clip_of(frames), clip_of(frames, 1, 6), clip_of(frames, 3, 2), seed=frames)


def whole_frames(frames: int, reading: str) -> int:
    """Tokens of the frames that are not thinned."""
    return 6 * (frames - len(slow_pairs(three_shapes(PAPER, 0, frames), 0, reading)))


test_dycoke = check_method(
    "dycoke",
    slow_dycoke,
    views=three_shapes,
    varied=range(2, 14),
    keeps=lambda n_tokens: range(whole_frames(n_tokens // 6, "paper"), n_tokens + 1),
)

test_dycoke_official = check_method(
    "dycoke",
    slow_dycoke,
    settings=({"reading": "official"},),
    views=three_shapes,
    varied=range(5, 14),
    keeps=lambda n_tokens: range(whole_frames(n_tokens // 6, "official"), n_tokens + 1),
)


@pytest.mark.parametrize("method", [PAPER, OFFICIAL], ids=["paper", "official"])
@pytest.mark.parametrize("frames", range(2, 14))
def test_fewer_frames_than_a_window_and_fewer_tokens_than_whole_frames_are_refused(
    frames: int, method: DyCoke
):
    keep, line = 6 * frames, "valid: videos of 5 or more frames"
    if method is PAPER or frames >= 5:
        n_full = whole_frames(frames, method.reading)
        keep, line = n_full - 1, rf"cannot keep {n_full - 1} of .* hold {n_full}; valid"
    with pytest.raises(MethodError, match=line):
        method.plan(three_shapes(method, 0, frames), keep)


def test_windows_start_anew_where_the_size_of_frames_changes():
    rows = (
        [(0, 0, 4, 5), *clip_of(9, 2, 2, 1), (10, 0, 2, 2)],  # a picture, then ten frames
        [*clip_of(6, 2, 3), *clip_of(4, 1, 6, 6)],  # two videos
        [*clip_of(5, 2, 2), (5, 0, 5, 4), *clip_of(5, 2, 2, 6)],  # a picture between two videos
    )
    view = view_of(*rows)
    expected = ({2: 1, 3: 1, 4: 3, 6: 5, 7: 5, 8: 7, 10: 9}, {1: 0, 2: 0, 3: 2, 5: 4, 7: 6})
    assert slow_pairs(view, 0, "paper") == expected[0]
    assert slow_pairs(view, 1, "paper") == expected[1] | {8: 6, 9: 8}
    for keep in (44, 50, 59, 60):
        kept = PAPER.plan(view, keep).kept
        for row in range(3):
            assert kept[row].tolist() == sorted(slow_dycoke(PAPER, view, row, keep))
            single = View(view.site, view.tokens[row : row + 1], view.grid[row : row + 1])
            assert torch.equal(PAPER.plan(single, keep).kept[0], kept[row])


def test_a_worked_window():
    """Four frames of two tokens. Token 1 of frame 1 moves, both of frame 2 do (token 0 more), token 0 of frame 3."""
    turned = [(0, 0), (0, 30), (90, 60), (180, 60)]
    angles = torch.tensor([angle for frame in turned for angle in frame]).deg2rad()
    tokens = torch.stack([angles.cos(), angles.sin()], dim=1)[None]
    view = replace(view_of(clip_of(4, 1, 2)), tokens=tokens)
    assert [PAPER.plan(view, keep).kept.tolist() for keep in (8, 5, 2)] == [
        [[0, 1, 2, 3, 4, 5, 6, 7]],
        [[0, 1, 3, 4, 6]],
        [[0, 1]],
    ]


def test_the_share_left_is_that_of_the_paper_and_of_the_released_code():
    assert PAPER.fractions(1 - 0.7, 1) == (pytest.approx(0.475),)
    frames, size = 32, 196
    view = view_of(clip_of(frames, 14, 14))
    thinned = len(slow_pairs(view, 0, "official"))
    released = (frames - thinned) * size + thinned * math.floor(0.3 * size)
    assert round(released / (frames * size), 3) == 0.494
    counts = torch.bincount(OFFICIAL.plan(view, released).kept[0] // size)
    assert set(counts.tolist()) == {size, math.floor(0.3 * size)}
    assert counts[30] == size  # the third frame of the last window
    assert PAPER.plan(view, released).kept[0].tolist().count(30 * size) <= 1


def test_ratios_that_no_sample_can_reach_are_refused_with_their_range():
    facts = ONEVISION.facts
    budget = Budget("kept", 0.75)
    with pytest.raises(BudgetError, match=r"reaches 0 <= ratio < 0\.75"):
        budget.keep(PAPER, facts, 320, 32)
    assert Budget("kept", 0.74).keep(PAPER, facts, 320, 32) == (83,)
    assert Budget("kept", 0.0).keep(PAPER, facts, 320, 32) == (320,)


def test_a_picture_is_refused_whatever_is_kept():
    view = view_of([(0, 0, 6, 8)])
    for keep in (48, 12):
        with pytest.raises(
            MethodError, match=r"dycoke needs frames to compare.* of 2 or more frames"
        ):
            PAPER.plan(view, keep)
    with pytest.raises(MethodError, match="dycoke needs frames"):
        PAPER.plan(view_of(clip_of(8), [(0, 0, 6, 8)]), 40)


# ---------------------------------------------------------------- while tokens are generated


def slow_steps(method: DyCoke, paid: list[list[float]]) -> list[list[int]]:
    """The entries that each step of one row attends to."""

    def alike(a: list[float], b: list[float]) -> bool:
        dot = sum(x * y for x, y in zip(a, b, strict=True))
        lengths = math.sqrt(sum(x * x for x in a) * sum(x * x for x in b))
        return dot / lengths >= method.threshold

    everything = list(range(len(paid[0])))
    count = math.floor((1 - method.P) * len(everything) + 1e-9)
    released = method.reading == "official"
    steps = [best(paid[0], count) if released and method.threshold > 0 else everything]
    chosen_by = None
    for before, now in pairwise(paid):
        if released:
            steps.append(everything if alike(now, before) else best(now, count))
        elif chosen_by is not None and alike(now, chosen_by):
            steps.append(steps[-1])
        else:
            steps.append(best(now, count))
            chosen_by = now
    return steps


def attended(method: DyCoke, paid: torch.Tensor) -> list[torch.Tensor]:
    """The (B, N) entries of each step for (steps, B, N) attention."""
    last: Attended | None = None
    steps = []
    for now in paid:
        grid = torch.zeros(*now.shape, 4, dtype=torch.long)
        view = View(Site("decode", 3), now.new_zeros(*now.shape, 0), grid, {"last_attention": now})
        last = method.attend(view, last)
        steps.append(torch.ones_like(now, dtype=bool) if last.entries is None else last.entries)
    return steps


@pytest.mark.parametrize("reading", ["paper", "official"])
@pytest.mark.parametrize("P", [0.05, 0.5, 0.7, 0.9, 0.95])
def test_steps_attend_as_in_a_literal_version(reading: str, P: float):
    method = DyCoke(reading=reading, P=P)
    generator = torch.Generator().manual_seed(1)
    base = torch.rand(1, 4, 30, generator=generator)
    noise = torch.rand(12, 4, 30, generator=generator)
    # Slow drift with a jump now and then, so that sets are kept, lost and found again.
    jumps = (torch.rand(12, 4, 1, generator=generator) < 0.3).float()
    paid = base + 0.5 * noise + 3 * jumps * noise.flip(2) ** 4
    together = attended(method, paid)
    kept, anew = 0, 0
    for row in range(4):
        expected = slow_steps(method, paid[:, row].tolist())
        for step, entries in enumerate(expected):
            assert together[step][row].nonzero()[:, 0].tolist() == entries
        single = attended(method, paid[:, row : row + 1])
        assert all(torch.equal(a[0], b[row]) for a, b in zip(single, together, strict=True))
        equal = [a == b for a, b in pairwise(expected[1:])]
        kept, anew = kept + sum(equal), anew + len(equal) - sum(equal)
    assert kept > 3
    assert anew > 3  # both happen


def test_the_release_prunes_at_the_first_step_and_the_paper_at_the_second():
    paid = torch.tensor([0.1, 0.4, 0.2, 0.3, 0.0]).expand(2, 1, 5)
    everything, best = [True] * 5, [False, True, False, True, False]
    steps = {
        reading: [step[0].tolist() for step in attended(DyCoke(reading=reading, P=0.6), paid)]
        for reading in ("paper", "official")
    }
    assert steps == {"paper": [everything, best], "official": [best, everything]}
    # A cosine of 0, that of the first step, is alike enough.
    lax = attended(DyCoke(reading="official", P=0.6, threshold=0.0), paid)
    assert all(step.all() for step in lax)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_attention_that_is_not_finite_is_an_error(poison: float):
    paid = torch.rand(2, 2, 8)
    paid[1, 1, 3] = poison
    with pytest.raises(MethodError, match="NaN or infinite"):
        attended(PAPER, paid)


# ---------------------------------------------------------------- hyper-parameters


def test_sites_are_the_prefix_and_the_steps_from_layer_l_on():
    assert (PAPER.sites(6), PAPER.decode_site(6)) == ((Site("prefix"),), Site("decode", 3))
    assert (DECODE.sites(6), DyCoke(P=0.0).decode_site(6)) == ((), None)
    with pytest.raises(MethodError, match=r"method\.params\.l=6 .*to 5 \(the model has 6 "):
        DyCoke(l=6).decode_site(6)
    assert (PAPER.needs_frames(), DECODE.needs_frames()) == (True, False)


# ---------------------------------------------------------------- on models


#: 9 frames of 4 tokens; Qwen's 10 and 8 frames are 5 and 4 of its own.
LONG = {
    "onevision": Family(
        replace(ONEVISION, video=VideoSpec(frames=9)),
        (
            watch("w1 w2 w3", video(0, frames=9)),
            watch("w4", video(1, frames=12)),
            watch("w5 w6 w7 w8 w9", video(3, frames=10, width=24)),
        ),
    ),
    "qwen2": Family(
        replace(QWEN2, video=VideoSpec(frames=10, rule="fps")),
        (video_chat("w1 w2 w3", clip(40, 42, 56)), video_chat("w4", clip(32, 28, 42))),
    ),
    "qwen25": Family(
        replace(QWEN25, video=VideoSpec(frames=10, rule="fps")),
        (video_chat("w1 w2 w3", clip(40, 42, 56)), video_chat("w4", clip(32, 28, 42))),
    ),
}


@cache
def long_adapter(name: str, attention: str = "sdpa") -> Adapter:
    family = LONG.get(name) or FAMILIES[name]
    with TemporaryDirectory() as folder:
        return load_tiny(family.spec, save_tiny(family.spec, Path(folder)), "float64", attention)


@pytest.mark.sampled(24)
@pytest.mark.parametrize("reading", ["paper", "official"])
@pytest.mark.parametrize("name", ["llava", "llava_next", "qwen2_5_vl", "internvl", *LONG])
def test_steps_equal_whole_forwards_with_eager_attention(name: str, reading: str):
    """The oracle chooses by its own attention maps and masks by hand; long answers, so that sets are used again."""
    adapter, eager = long_adapter(name), long_adapter(name, "eager")
    family = LONG.get(name) or FAMILIES[name]
    temporal = name in LONG and not (reading == "official" and name != "onevision")
    for chat in family.chats:
        inputs = adapter.encode([chat])
        method = DyCoke(temporal=temporal, l=2, P=0.6, threshold=0.8, reading=reading)
        with Session(adapter, method, Budget("kept", 0.3)) as session:
            generated = session.generate(
                inputs, None, **generation(adapter, inputs, max_new_tokens=10)
            )
        origin = generated.records[0].origin
        paid_steps: list[list[float]] = []

        def choose(step, paid, origin=origin, paid_steps=paid_steps, method=method):
            paid_steps.append(paid[origin].tolist())
            entries = torch.zeros(len(paid), dtype=torch.bool)
            entries[origin[slow_steps(method, paid_steps)[-1]]] = True
            return entries

        expected = step_logits(eager, inputs, generated.ids, [(0, origin.tolist())], 2, choose)
        # The models normalise in single precision whatever their own.
        assert (generated.logits - expected).abs().max() < 2e-6 * expected.abs().max()
        counts = [len(entries) for entries in slow_steps(method, paid_steps)]
        assert generated.records[0].attended == sum(counts) / len(counts)
        assert min(counts) < len(origin) or reading == "official"


@pytest.mark.sampled(18)
@pytest.mark.parametrize(
    "name", ["llava", "llava_next", "onevision_image", "qwen2_5_vl", "internvl"]
)
def test_the_second_part_alone_on_images(name: str):
    adapter, chats = adapter_of(name), list(FAMILIES[name].chats)
    plain = kept_by(adapter, build_method("none", {}), chats, 0.0)
    fast = kept_by(adapter, DECODE, chats, 0.0)
    slow = kept_by(adapter, DECODE, chats, 0.0, backend="emulate")
    assert torch.equal(fast.ids, slow.ids)
    assert (fast.logits - slow.logits).abs().max() < 1e-9 * slow.logits.abs().max()
    # The prefill and the first step are those of the plain model, bit by bit; the second step is not.
    assert torch.equal(fast.logits[:, :2], plain.logits[:, :2])
    assert (fast.logits[:, 2] - plain.logits[:, 2]).abs().max() > 1e-3
    released = kept_by(adapter, replace(DECODE, reading="official"), chats, 0.0)
    assert torch.equal(released.logits[:, 0], plain.logits[:, 0])
    assert (released.logits[:, 1] - plain.logits[:, 1]).abs().max() > 1e-3
    for row, chat in enumerate(chats):
        single = kept_by(adapter, DECODE, [chat], 0.0)
        record = fast.records[row]
        assert (single.logits[0] - fast.logits[row]).abs().max() < 1e-6
        share = math.floor(0.3 * record.visual + 1e-9)
        assert single.records[0].attended == record.attended == (record.visual + share) / 2


# ---------------------------------------------------------------- runs


@pytest.mark.slow
def test_a_row_says_what_steps_attended_to(capsys, tmp_path: Path):
    import run

    argv = ("method=dycoke_decode", "method.params.P=0.5", "limit=2", "ratio=0.9")
    where = (f"store={tmp_path}", "model=seedling", "benchmark=seedling_caption")
    assert run.main([*where, "json=true", *argv]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (row["ratio"], row["extra"]["sites"]) == (0.0, [])
    visual = row["tokens"]["visual"]
    assert row["tokens"]["kept_final"] == visual
    assert visual / 2 < row["extra"]["decode_attended"] < visual
    assert "temporal=False" in row["extra"]["label"]
