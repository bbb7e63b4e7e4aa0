"""`keep` from Python: every kind of method on the embedded models keeps the number that was set or states why not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import espalier
from espalier.harness.errors import tell_once
from espalier.harness.specs.catalogue import names_of
from espalier.methods.base import TokenReducer
from espalier.methods.compressor import CacheCompressor
from tests.methods.engine import COUNTS
from tests.refused import refused

COUNT, ALL = 20, 144

#: What a refusal says that a method can reach.

#: Without the one that compares the frames of a video, which tests/methods/test_matrix.py has.
REDUCERS = [name for name in names_of(TokenReducer) if name not in ("none", "dycoke")]


def ask(model: espalier.Model, method: str, scene: tuple[Any, str], **how: Any) -> espalier.Answer:
    with espalier.apply(model, method, **how) as applied:
        answer: espalier.Answer = applied.ask(*scene, max_new_tokens=2)
    return answer


def check_reducer(model: espalier.Model, name: str, scene: tuple[Any, str]) -> None:
    """A count stays, or the line names those that can; more than there are keeps all."""
    try:
        assert ask(model, name, scene, keep=COUNT).kept == COUNT
    except espalier.UserError as error:
        line = str(error)
        assert "\n" not in line
        if COUNTS.search(line):
            ((low, high),) = COUNTS.findall(line)
            assert not int(low) <= COUNT <= int(high)
            assert ask(model, name, scene, keep=int(low)).kept == int(low)
        else:  # not on this model, whatever the budget
            assert line in refused(ask, model, name, scene, ratio=0.5)
            return
    assert ask(model, name, scene, keep=100_000).kept == ALL


@pytest.mark.slow
@pytest.mark.parametrize("name", REDUCERS)
def test_a_reducer_keeps_the_count(
    model: espalier.Model, scene: tuple[Image.Image, str], name: str
) -> None:
    check_reducer(model, name, scene)


def test_a_reducer_keeps_the_count_of_each_sample(
    model: espalier.Model, scene: tuple[Image.Image, str]
) -> None:
    for name in ("fastv", "tome"):
        check_reducer(model, name, scene)
    image, question = scene
    with espalier.apply(model, "divprune", keep=200) as applied:
        answers = applied.ask_many([(image, question), ([image, image], question), (None, "w")])
    assert [(answer.visual, answer.kept) for answer in answers] == [(144, 144), (288, 200), (0, 0)]
    assert [answer.ratio for answer in answers] == [0, 1 - 200 / 288, 0]
    assert "kept 200 tokens" in repr(applied)


def test_a_count_is_what_the_rule_counts(
    model: espalier.Model, scene: tuple[Image.Image, str]
) -> None:
    answer = ask(model, "fastv", scene, keep=100, budget="average")
    # The first two of six layers see every token.
    assert sum(answer.record.entering) / 6 == pytest.approx(100, abs=1)
    assert answer.kept == 78


def test_a_share_is_the_ratio(model: espalier.Model, scene: tuple[Image.Image, str]) -> None:
    by_share, by_ratio = (
        ask(model, "fastv", scene, **how) for how in ({"keep": "25%"}, {"ratio": 0.75})
    )
    assert (by_share.kept_indices, len(by_share.kept_indices)) == (by_ratio.kept_indices, 36)


@pytest.mark.parametrize(
    "name",
    ["snapkv", *(pytest.param(n, marks=pytest.mark.slow) for n in names_of(CacheCompressor))],
)
def test_a_compressor_keeps_the_entries_of_each_layer(
    model: espalier.Model, scene: tuple[Image.Image, str], name: str
) -> None:
    assert ask(model, name, scene, keep=COUNT, variant="paper").record.kv_entries == COUNT * 6
    assert ask(model, name, scene, keep=100_000, variant="paper").record.kv_entries == ALL * 6


@pytest.mark.slow
def test_a_stack_counts_tokens_of_the_reducer_and_a_draft_sees_the_count(
    model: espalier.Model, scene: tuple[Image.Image, str]
) -> None:
    answer = ask(model, "divprune", scene, keep=50, compressor="aircache", cache_ratio=0.5)
    assert (answer.kept, answer.cache) == (50, 0.5)
    assert ask(model, "specvlm_sd", scene, keep=COUNT).decoding.draft_visual == COUNT


def test_a_denoiser_keeps_the_count_after_the_first_step(
    denoising: espalier.Model, scene: tuple[Image.Image, str]
) -> None:
    for name, expected in (("d3tom", [ALL, COUNT, COUNT]), ("fastv", [COUNT] * 3)):
        with espalier.apply(denoising, name, keep=COUNT) as applied:
            answer = applied.ask(*scene, max_new_tokens=6, steps=3)
        assert [len(step) for step in answer.kept_by_step] == expected
    for name in ("d3tom_t", "pyramiddrop_denoising"):
        with pytest.raises(
            espalier.UserError, match=r"^keep=20 cannot be followed .* valid: ratio="
        ):
            espalier.apply(denoising, name, keep=COUNT)
    with pytest.raises(espalier.UserError, match=r"^keep=20 with budget='average'.* valid: kept"):
        espalier.apply(denoising, "d3tom", keep=COUNT, budget="average")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"keep": 0}, "keep=0 must be a number of visual tokens"),
        ({"keep": np.array([1, 2])}, "keep=array([1, 2]) must be a number of visual tokens"),
        ({"keep": torch.ones(1, 1)}, "must be a number of visual tokens"),
        ({"keep": np.arange(0)}, "must be a number of visual tokens"),
        ({"keep": 10**23}, "at most 100,000,000 tokens"),
        ({"keep": "1e-9%"}, "keep='1e-9%' must be"),
        ({"keep": "1e-9%"}, "above 0% up to 100% without an exponent"),
        ({"keep": "110%"}, "keep='110%' must be"),
        (
            {"keep": 64, "ratio": 0.9},
            "ratio=0.9 and keep=64 both set the budget; valid: one of them",
        ),
        ({"keep": 3, "budget": "average"}, "reaches 49 <= keep <= 144"),
        ({"tokens": 64}, "tokens=64 is no argument and no hyper-parameter of method 'fastv'"),
        ({"kept": 64}, "(did you mean keep=64?)"),
        (
            {"method": "snapkv", "keep": COUNT, "scope": "prompt"},
            "keep=20 counts visual entries, and method='snapkv' evicts text as well",
        ),
        ({"keep_ratio": 0.1}, "(did you mean keep='10%'?)"),
        ({"compresor": "h2o", "keep": 9}, "(did you mean compressor='h2o'?)"),
    ],
)
def test_a_mistake_is_one_line(model: espalier.Model, how: dict[str, Any], words: str) -> None:
    assert words in refused(espalier.apply, model, **{"method": "fastv", **how})


@pytest.mark.parametrize(
    ("how", "words"),
    [
        *(({"keep": keep}, "64 tokens") for keep in (64, np.int64(64), np.array(64))),
        ({"keep": torch.tensor(64), "seed": np.int64(3)}, "64 tokens"),
        ({"ratio": np.float64(0.5)}, "ratio 0.5"),
        ({"ratio": torch.tensor(0.5)}, "ratio 0.5"),
    ],
)
def test_numbers_of_other_libraries_are_numbers(
    model: espalier.Model, how: dict[str, Any], words: str
) -> None:
    assert words in repr(espalier.apply(model, "divprune", **how))


def test_more_than_there_is_is_told(
    model: espalier.Model,
    scene: tuple[Any, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    tell_once.cache_clear()
    line = "keep=640: a question has 144 visual tokens, and keeps all"
    assert ask(model, "divprune", scene, keep=640).kept == ALL
    assert line in capsys.readouterr().err
    assert ask(model, "divprune", scene, keep=ALL).kept == ALL
    assert capsys.readouterr().err == ""
