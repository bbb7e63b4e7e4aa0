"""Fitting FitPrune: masses, what an alpha removes, FLOPs, the bisection, and all of it against a decoder by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.harness.cli.calibrate import main, read_request
from espalier.harness.config.build_spec import build_spec
from espalier.harness.config.compose import read_command
from espalier.harness.cost.budget import Budget
from espalier.harness.cost.facts import StackFacts
from espalier.harness.engine.artifacts import with_scheme
from espalier.harness.engine.session import Session
from espalier.harness.models.adapter import Adapter
from espalier.harness.tools.calibration.calibration_images import ImageDigest, question
from espalier.harness.tools.calibration.fitprune_fit import (
    ALPHAS,
    MassRecorder,
    Thinning,
    Trace,
    expendable,
    fit,
    forecast,
    layer_flops,
    shares,
    smallest_reaching,
    trace,
)
from espalier.methods.fitprune import FitPrune
from tests import tiny

STACK = StackFacts(4, 8, 20, 2, 2, 4, gated=True, causal=True)

# ---------------------------------------------------------------- what may go


def slow_expendable(attention: list[float], mass: float, alpha: float) -> set[int]:
    """Remove the least one by one until too little would be left."""
    waiting = sorted(range(len(attention)), key=lambda j: (attention[j], -j))
    gone: set[int] = set()
    for j in waiting:
        left = math.fsum(a for i, a in enumerate(attention) if i not in gone and i != j)
        if left < (1 - alpha) * mass:
            break
        gone.add(j)
    return gone


@pytest.mark.parametrize("alpha", [0.0, 0.05, 0.3, 0.77, 1.0])
def test_the_longest_beginning_equals_the_slow_one(alpha: float):
    attention = torch.rand(6, 30, generator=torch.Generator().manual_seed(0)) ** 4
    attention[3] = attention[3].round(decimals=1)  # ties and zeros
    mass = attention.double().sum(1) * torch.tensor([1, 1, 0.8, 1, 1.3, 5])
    removable = expendable(attention, mass, alpha)
    for row in range(6):
        wanted = slow_expendable(attention[row].double().tolist(), float(mass[row]), alpha)
        assert set(removable[row].nonzero().flatten().tolist()) == wanted
    assert removable.all() == (alpha == 1)


def test_a_worked_example():
    attention = torch.tensor([[0.4, 0.1, 0.2, 0.3]])
    mass = torch.tensor([1.0])
    assert expendable(attention, mass, 0.25).tolist() == [[False, True, False, False]]
    assert expendable(attention, mass, 0.35).tolist() == [[False, True, True, False]]
    # What the reference mass has lost already no longer may go.
    assert not expendable(attention, torch.tensor([1.25]), 0.2).any()
    # Of equal tokens the higher index goes first.
    assert expendable(torch.full((1, 4), 0.25), mass, 0.5).tolist() == [[False, False, True, True]]


# ---------------------------------------------------------------- a decoder by hand


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_llava(tmp_path_factory.mktemp("tiny"))


def by_hand(
    eager: Adapter,
    chat: list[dict[str, Any]],
    alpha: float | None,
    masses: list[tuple[float, float]],
) -> tuple[list[int], torch.Tensor]:
    """Run the decoder layer by layer and drop inside each layer, between attention and feed-forward.

    With `alpha=None` nothing goes and the masses are noted. Returns the visual tokens that enter each layer, and the
    logits of the last position.
    """
    inputs = eager.encode([chat])
    caught: dict[str, Any] = {}

    def catch(module: Any, args: Any, kwargs: Any) -> None:
        caught.setdefault("hidden", args[0])
        caught.setdefault("rotary", kwargs["position_embeddings"])

    handle = eager.decoder.layers[0].register_forward_pre_hook(catch, with_kwargs=True)
    with torch.inference_mode():
        eager.model(**inputs)
    handle.remove()
    image = (inputs["input_ids"][0] == 3).nonzero().flatten().tolist()
    alive = list(range(inputs["input_ids"].shape[1]))
    hidden, rotary = caught["hidden"], caught["rotary"]
    entering = []
    for number, layer in enumerate(eager.decoder.layers):
        n = len(alive)
        entering.append(sum(place in image for place in alive))
        mask = torch.full((1, 1, n, n), torch.finfo(hidden.dtype).min, dtype=hidden.dtype).triu(1)
        with torch.inference_mode():
            attended, weights = layer.self_attn(
                hidden_states=layer.input_layernorm(hidden),
                position_embeddings=tuple(table[:, alive] for table in rotary),
                attention_mask=mask,
            )
        hidden = hidden + attended
        largest = weights[0].amax(dim=0).double().tolist()
        visual = [i for i, place in enumerate(alive) if place in image]
        words = [i for i, place in enumerate(alive) if place > max(image)]
        c = [sum(largest[q][j] for q in words) / len(words) for j in visual]
        s = [sum(largest[q][j] for q in visual) / len(visual) for j in visual]
        if alpha is None:
            masses.append((sum(c), sum(s)))
        else:
            gone = slow_expendable(c, masses[number][0], alpha)
            gone &= slow_expendable(s, masses[number][1], alpha)
            if len(gone) == len(visual):
                gone.remove(max(gone, key=lambda i: c[i] * s[i]))
            dropped = {visual[i] for i in gone}
            stay = [i for i in range(n) if i not in dropped]
            hidden, alive = hidden[:, stay], [alive[i] for i in stay]
        with torch.inference_mode():
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    with torch.inference_mode():
        logits = eager.model.lm_head(eager.decoder.norm(hidden[:, -1]))
    return entering, logits


@pytest.mark.sampled(18)
@pytest.mark.parametrize("alpha", [0.02, 0.2, 0.5, 0.9, 1.0])
def test_each_alpha_equals_a_decoder_that_drops_inside_its_layers(folder: Path, alpha: float):
    """Dropping before the next layer changes neither what is removed nor what the model says."""
    adapter, eager = tiny.load_llava(folder), tiny.load_llava(folder, attention="eager")
    for seed, prompt in ((0, "w1 w2"), (1, "w3"), (2, "w4 w5 w6 w7 w8")):
        image = tiny.picture(seed)
        chat = question(image, prompt)
        masses: list[tuple[float, float]] = []
        full, _ = by_hand(eager, chat, None, masses)
        assert full == [16] * tiny.DEPTH
        wanted, logits = by_hand(eager, chat, alpha, masses)

        seen = ImageDigest()
        (removed,) = trace(adapter, [image], prompt, (alpha,), seen)[alpha]
        assert list(removed) == wanted
        assert seen.n_images == 1

        recorder = MassRecorder()
        for method in (recorder, Thinning(alpha=alpha, masses=recorder.masses)):
            with Session(adapter, method, Budget("kept", 0.0)) as session:
                done = session.generate(
                    adapter.encode([chat]), max_new_tokens=1, do_sample=False, output_logits=True
                )
        assert (done.logits[0, 0] - logits[0]).abs().max() < 1e-5 * logits.abs().max()
        for layer, (from_words, from_image) in recorder.masses.items():
            assert float(from_words) == pytest.approx(masses[layer - 1][0], rel=1e-5)
            assert float(from_image) == pytest.approx(masses[layer - 1][1], rel=1e-5)


@pytest.mark.slow
def test_a_larger_alpha_removes_more(folder: Path):
    adapter = tiny.load_llava(folder)
    images = [tiny.picture(seed) for seed in range(3)]
    traces = trace(adapter, images, "w1 w2", ALPHAS, ImageDigest())
    scheme = shares([traces[alpha] for alpha in ALPHAS])
    assert FitPrune(scheme).sites(tiny.DEPTH)
    last = [row[-1] for row in scheme]
    assert last == sorted(last, reverse=True)
    assert last[0] > 0.6 > 0.2 > last[-1]


# ---------------------------------------------------------------- plain numbers


def test_the_flops_of_a_layer():
    """3 n d^2 + 2 n^2 d before something goes, k d^2 + 3 k d m behind."""
    assert layer_flops(10, 7, STACK) == 3 * 10 * 64 + 2 * 100 * 8 + 7 * 64 + 3 * 7 * 8 * 20
    whole = (20,) * 4
    assert forecast(whole, 0, STACK) == forecast(whole, 3, STACK) == 4 * layer_flops(20, 20, STACK)
    thinned = (20, 12, 6, 6)
    wanted = layer_flops(20, 12, STACK) + layer_flops(12, 6, STACK) + 2 * layer_flops(6, 6, STACK)
    assert forecast(thinned, 2, STACK) == forecast(thinned, 3, STACK) == wanted


#: Tokens that FitPrune's released schedules for LLaVA-1.5-7B remove inside each layer, by the share of FLOPs in percent
#: that they are named after, and where they stand.
RELEASED = Path(__file__).parent / "published" / "fitprune_llava15.csv"


def released() -> dict[int, list[int]]:
    lines = [line for line in RELEASED.read_text().splitlines() if not line.startswith("#")]
    rows = [[int(cell) for cell in line.split(",")] for line in lines[1:]]
    return {percent: removed for percent, *removed in rows}


@pytest.mark.sampled
@pytest.mark.parametrize("percent", sorted(released()))
def test_released_schedules_save_their_share_of_the_visual_tokens_flops(percent: int):
    """Their counts are means rounded down, so that the share lies between what they and one more in each layer save.

    Those of 10 and 20 % save less, as what is released is the last alpha tried, reached or not.
    """
    stack = build_spec(read_command(["model=llava15_7b"]).cells[0]).model.facts.text
    removed = released()[percent]

    def saved(more: int, words: int = 0) -> float:
        entering = [576]
        for count in removed[:-1]:
            entering.append(max(0, entering[-1] - count - more))
        trace = tuple(count + words for count in entering)
        return 1 - forecast(trace, stack.layers - 1, stack) / forecast(trace, 0, stack)

    assert saved(0) < percent / 100
    assert (percent / 100 < saved(1)) == (percent >= 30)
    assert saved(1, words=64) < percent / 100  # and not with the words of a short prompt


def slow_fit(ratio: float, traces: list[Trace]) -> tuple[bool, list[int]]:
    """Go through the layers as the released code does, all images in step."""
    depth = len(traces[0])
    alive = [t[0] for t in traces]
    used = [0] * len(traces)
    target = (1 - ratio) * sum(depth * layer_flops(n, n, STACK) for n in alive) / len(traces)
    removed = [0] * depth
    for layer in range(depth):
        rest = [(depth - layer) * layer_flops(n, n, STACK) for n in alive]
        if sum(map(sum, zip(used, rest, strict=True))) / len(traces) <= target:
            return True, removed
        if layer == depth - 1:
            break
        total = 0
        for i, t in enumerate(traces):
            n, k = t[layer], t[layer + 1]
            used[i] += layer_flops(n, k, STACK)
            alive[i] = k
            total += n - k
        removed[layer] = total // len(traces)
    return False, removed


def made_up(alpha: float) -> list[Trace]:
    """Three images that lose more the larger alpha is, in steps."""
    traces = []
    for image, size in enumerate((40, 52, 61)):
        left = [max(1, round(size * (1 - alpha * step / 3) ** (1 + image))) for step in range(4)]
        traces.append(tuple(left))
    return traces


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.35, 0.5, 0.62, 0.99])
def test_the_bisection_equals_the_slow_one(ratio: float):
    low, high, tried = 0.0, 1.0, []
    while high - low > 0.01:
        tried.append((low + high) / 2)
        low, high = (
            (low, tried[-1]) if slow_fit(ratio, made_up(tried[-1]))[0] else (tried[-1], high)
        )
    alphas: list[float] = []

    def traces_at(alpha: float) -> list[Trace]:
        alphas.append(alpha)
        return made_up(alpha)

    smallest, last = smallest_reaching(ratio, traces_at, STACK)
    assert alphas == [*tried, high, tried[-1]]
    assert set(tried[:4]) <= set(ALPHAS)
    for result, alpha in ((smallest, high), (last, tried[-1])):
        assert result.alpha == alpha
        assert (result.reached, list(result.removed)) == slow_fit(ratio, made_up(alpha))
        assert result.reached == (result.flops <= 1 - ratio)
    assert smallest.reached == (ratio < 0.9)
    # The last alpha tried need not reach the target; the one below the smallest never does.
    if 0 < ratio < 0.9:
        assert not fit(low, ratio, made_up(low), STACK).reached


def test_the_last_alpha_tried_may_miss_the_target():
    results = [smallest_reaching(ratio / 50, made_up, STACK) for ratio in range(1, 30)]
    assert any(not last.reached for _, last in results)
    assert all(smallest.reached for smallest, _ in results)


def test_rows_are_mean_shares_that_never_rise_with_alpha():
    rows = shares(
        [
            [(10, 8, 6), (20, 20, 10)],
            [(10, 4, 4), (20, 10, 10)],
            [(10, 6, 1), (20, 12, 1)],
        ]
    )
    assert rows == ((0.9, 0.55), (0.45, 0.45), (0.45, 0.075))
    FitPrune(rows)


# ---------------------------------------------------------------- the command


@pytest.mark.slow
def test_fitting_the_seedling_writes_what_a_run_then_finds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    argv = ["method=fitprune", "model=seedling_draft", "images=2", f"store={tmp_path}", "ratio=0.4"]
    assert main(argv) == 0
    path, smallest, last = capsys.readouterr().out.splitlines()
    assert path == str(tmp_path / "calibration/seedling_draft_fitprune.safetensors")
    assert smallest.startswith("smallest alpha that saves 0.4 of the visual tokens' FLOPs: 0.")
    assert last.startswith("last alpha tried, which the released code takes: 0.")
    method = with_scheme(read_request(argv).spec.model, FitPrune(), "fitprune", store=tmp_path)
    assert (len(method.scheme), len(method.scheme[0])) == (15, 1)

    content = Path(path).read_bytes()
    assert main([*argv[:-1], "ratio=0.99"]) == 0
    out = capsys.readouterr().out
    assert "0.99 of the visual tokens' FLOPs: 1, saves 0." in out
    assert "(target missed)" in out
    assert Path(path).read_bytes() == content  # the scheme serves every ratio
