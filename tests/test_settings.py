"""Every kind of setting at its borders: the last value on either side, and values of another type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from espalier.harness.errors import UserError, unknown_name
from espalier.harness.paths import ROOT
from espalier.harness.settings import (
    COMPUTED,
    CacheRatio,
    Count,
    DraftRatio,
    FlagOrAuto,
    Line,
    Memory,
    Names,
    Natural,
    OneOf,
    Positive,
    Ratio,
    Size,
    SomeNames,
    Text,
    at_least,
    at_most,
    check_keys,
    defaults,
    read_section,
    read_value,
    setting_hints,
    table,
)
from espalier.harness.specs.generation import GENERATION, check_settings
from tests.refused import refused

NAN, INF = float("nan"), float("inf")
KEY = "engine.key"

#: An annotation, values that pass as they are, and values that are refused.
BORDERS: Sequence[tuple[Any, Sequence[Any], Sequence[Any]]] = (
    (Annotated[str, OneOf(("a", "b"))], ["a", "b"], ["c", "", None, 1]),
    (Literal["a", "b"], ["a", "b"], ["c", "", None, 1]),
    (Literal[1, 2], [1, 2], [True, 1.0, "1"]),
    (Text, ["a"], ["", None, 1, True]),
    (Text | None, ["a", None], ["", 1]),
    (Line, ["a b"], ["", None, "a\nb", "a\x1b[2J"]),
    (str, ["a", ""], [None, 1]),
    (bool, [True, False], [0, 1, "true", None]),
    (FlagOrAuto, [True, False, "auto"], [0, 1, "true", None]),
    (int, [0, -1], [1.0, "1", True, None]),
    (int | None, [0, None], [1.0, True]),
    (Annotated[int, at_least(2)], [2, 3], [1, 2.0, "2", True, None]),
    (Natural, [0, 1], [-1, False]),
    (Annotated[int, at_least(1), at_most(8)] | None, [None, 1, 8], [0, 9, True, 1.0, "1"]),
    (Count | Literal["auto"], [1, 7, "auto"], [0, -1, True, 1.5, "one", None]),
    (Natural | Literal["auto"], [0, 7, "auto"], [-1, False, 0.5, "one", None]),
    (float, [0, -1.5, INF], [True, "1", None]),
    (Positive, [1e-9, 2, 2.5], [0, -1, NAN, INF, True, "1", None]),
    (Size, [0, 17], [-1, True, 1.5, "1", "1 TiB", "-1GiB", "", None]),
    (Memory, [1, 17], [0, "0GiB", True]),
    (Ratio, [0, 0.999], [1, -0.001, NAN, INF, True, "0", None]),
    (CacheRatio, [0, 0.999], [1, -0.001, NAN]),
    (DraftRatio, [0, 0.5, 1], [1.001, -0.001, NAN, INF, True, "0", None]),
)


@pytest.mark.parametrize(("hint", "good", "bad"), BORDERS)
def test_borders(hint: Any, good: Sequence[Any], bad: Sequence[Any]) -> None:
    for value in good:
        assert read_value(KEY, value, hint) == value
    for value in bad:
        with pytest.raises(UserError, match=f"^{KEY}="):
            read_value(KEY, value, hint)


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (Natural, "must be an integer of at least 0"),
        (Natural | None, "must be an integer of at least 0, or null"),
        (Count | Literal["auto"], "must be an integer of at least 1, or auto"),
        (int | None, "must be an integer or null"),
        (int | Literal["auto", "best"], "must be an integer or one of auto, best"),
        (FlagOrAuto, "must be true, false or auto"),
        (Annotated[int, at_most(8)], "must be at most 8"),
        (Names, "must be a list of names"),
        (tuple[int, ...], "must be a list, each item an integer"),
        (Ratio, "must be a number in [0, 1): the share of visual tokens removed"),
    ],
)
def test_a_line_has_the_words_of_the_annotation(hint: Any, words: str) -> None:
    assert refused(read_value, KEY, "x", hint) == f"{KEY}='x' {words}"


def test_an_integer_beyond_its_range_is_told_the_end_it_missed() -> None:
    hint = Annotated[int, at_least(1), at_most(8)] | None
    for value, words in ((0, "an integer of at least 1, or null"), (9, "at most 8, or null")):
        with pytest.raises(UserError, match=f"^{KEY}={value} must be {words}$"):
            read_value(KEY, value, hint)


def test_values_are_converted() -> None:
    sizes = {"1GiB": 2**30, "1.5 MiB": 3 * 2**19, "2GB": 2 * 10**9, "3 MB": 3 * 10**6}
    assert {text: read_value(KEY, text, Size) for text in sizes} == sizes
    assert read_value(KEY, "a/b", Path) == ROOT / "a/b"
    assert isinstance(read_value(KEY, 1, float), float)
    assert read_value(KEY, [[1], [2, 3]], tuple[tuple[int, ...], ...]) == ((1,), (2, 3))
    assert read_value(KEY, ["a"], frozenset[str]) == {"a"}


def test_tables_and_names() -> None:
    assert (table(KEY, None), table(KEY, {1: "x"})) == ({}, {"1": "x"})
    assert (read_value(KEY, ["a", "b"], SomeNames), read_value(KEY, [], Names)) == (("a", "b"), ())
    for wrong in ([], "a", ["a", ""], ["a", 1], None):
        with pytest.raises(UserError, match=KEY):
            read_value(KEY, wrong, SomeNames)
    for hint in (Mapping[str, Any], Mapping[str, int]):
        with pytest.raises(UserError, match=KEY):
            read_value(KEY, [1], hint)
    with pytest.raises(UserError, match=r"^engine\.key\.a='x' must be an integer$"):
        read_value(KEY, {"a": "x", "b": 1}, Mapping[str, int])


@dataclass(frozen=True)
class Inner:
    size: Count = 1
    names: Names = ()


@dataclass(frozen=True)
class Outer:
    seed: Natural
    inner: Inner
    facts: int = field(default=7, metadata=COMPUTED)
    options: Mapping[str, Any] = field(default_factory=dict)


def test_a_section_becomes_its_dataclass() -> None:
    part = {"seed": 1, "inner": {"size": 2, "names": ["a"]}, "options": None}
    assert read_section(Outer, "outer", part) == Outer(1, Inner(2, ("a",)))
    assert [*setting_hints(Outer)] == ["seed", "inner", "options"]
    assert defaults(Outer) == {"options": {}}


def test_every_mistake_of_a_section_is_in_one_line() -> None:
    part = {"sede": 1, "inner": {"size": 0, "names": "a", "facts": 1}, "options": {}, "facts": 1}
    assert refused(read_section, Outer, "outer", part).split("; ") == [
        "outer.sede is not a config key (did you mean seed?)",
        "outer.facts is not a config key",
        "valid: outer.inner, outer.options, outer.seed",
        "config key outer.seed is missing",
        "outer.inner.facts is not a config key",
        "valid: outer.inner.names, outer.inner.size",
        "outer.inner.size=0 must be an integer of at least 1",
        "outer.inner.names='a' must be a list of names",
    ]


def test_keys_of_a_table_that_need_not_be_complete() -> None:
    check_keys("engine", {"a": 1}, ("a", "b"))
    with pytest.raises(UserError, match=r"^engine\.setting='c' is unknown; valid: a, b$"):
        check_keys("engine", {"c": 1}, ("a", "b"))


#: Settings of one range, values that pass, and values that do not.
RANGES: Sequence[tuple[str, Sequence[Any], Sequence[Any]]] = (
    (
        "max_new_tokens num_beams num_beam_groups num_return_sequences steps block_length max_denoising_steps",
        [1, 7],
        [0, -1, 1.0, True, "1"],
    ),
    (
        "min_new_tokens top_k no_repeat_ngram_size encoder_no_repeat_ngram_size prompt_interval generation_interval "
        "stability_threshold",
        [0, 7],
        [-1, 0.0, False, "0"],
    ),
    (
        "do_sample use_cache renormalize_logits remove_invalid_values prefix_cache block_cache",
        [True, False],
        [0, 1, "true"],
    ),
    ("until stop_words", ["a", "", ["a", "b"], []], [1, ["a", 1], {"a": 1}]),
    ("infill", ["a <mask>", ""], [1, ["a"]]),
    ("length_penalty guidance_scale", [0, -1.5], [NAN, INF, True, "1"]),
    (
        "max_time repetition_penalty encoder_repetition_penalty shift entropy_bound t_max confidence_threshold",
        [1e-9, 3],
        [0, -1, NAN, INF, True],
    ),
    ("temperature diversity_penalty alg_temp t_min", [0, 0.0, 3], [-1e-9, NAN, INF, False]),
    (
        "top_p top_h typical_p step_ratio threshold transfer_ratio eps",
        [1e-9, 1],
        [0, 1.001, NAN, True],
    ),
    ("min_p", [0, 1], [-1e-9, 1.001, NAN, False]),
    ("epsilon_cutoff eta_cutoff", [0, 0.999], [1, -1e-9, NAN, False]),
    (
        "schedule",
        ["linear", "shift", "cosine", "logit_normal", "maskgit", "timesteps", "origin"],
        ["square", 1, True, ["linear"]],
    ),
    ("remasking", ["low_confidence", "random", "entropy", "margin"], ["high", 1, ["random"]]),
    ("stop", ["cut", "freeze", "none"], ["never", False, ["cut"]]),
    ("early_stopping", [True, False, "never"], ["always", 1, 0]),
    ("thinking", ["strip", "keep", "off", "budget:16"], ["budget:15", "on", True]),
)


@pytest.mark.parametrize(("names", "good", "bad"), RANGES)
def test_borders_of_generation_settings(
    names: str, good: Sequence[Any], bad: Sequence[Any]
) -> None:
    for name in names.split():
        for value in (*good, None):
            check_settings("model.generation", {name: value})
        for value in bad:
            with pytest.raises(UserError, match=rf"^model\.generation\.{name}"):
                check_settings("model.generation", {name: value})


def test_every_generation_setting_has_a_range_or_is_checked_by_the_library() -> None:
    ranged = {name for names, _, _ in RANGES for name in names.split()}
    assert ranged == {name for name, field in GENERATION.items() if field.hint not in (None, Any)}


def test_the_least_tokens_may_be_as_many_as_the_most() -> None:
    check_settings("generation", {"min_new_tokens": 4, "max_new_tokens": 4, "top_p": None})
    for wrong in ({"min_new_tokens": 5, "max_new_tokens": 4}, {"top_p": 0}, {"nosuch": 1}):
        with pytest.raises(UserError, match=r"^generation"):
            check_settings("generation", wrong)


def test_a_text_in_place_of_null_or_true_is_not_listed_as_what_it_is_refused_for() -> None:
    line = "model.join='null' is a text; valid: media_first, null without quotes"
    assert str(unknown_name("model.join", "null", ("media_first", "null"))) == line
