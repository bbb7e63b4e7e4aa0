"""Every check of a single config value at its borders: the last value on either side, and values of another kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from espalier.harness.errors import UserError
from espalier.harness.kinds.checks import generation_check as generation
from espalier.harness.kinds.checks.generation_check import VALUES, Valid, check_settings
from espalier.harness.specs import value_checks as fields

NAN, INF = float("nan"), float("inf")
KEY = "engine.key"

#: A check, values that it lets pass as they are, and values that it refuses.
CHECKS: Sequence[tuple[Callable[[str, Any], Any], Sequence[Any], Sequence[Any]]] = (
    (lambda k, v: fields.choice(k, v, ("a", "b")), ["a", "b"], ["c", "", None, 1]),
    (fields.text, ["a"], ["", None, 1, True]),
    (fields.optional_text, ["a", None], ["", 1]),
    (fields.flag, [True, False], [0, 1, "true", None]),
    (lambda k, v: fields.integer(k, v, 2), [2, 3], [1, 2.0, "2", True, None]),
    (lambda k, v: fields.integer(k, v, 0), [0, 1], [-1, False]),
    (lambda k, v: fields.optional_integer(k, v, 1, 8), [None, 1, 8], [0, 9, True, 1.0, "1"]),
    (lambda k, v: fields.batch_size(k, v, 99), [1, 7], [0, -1, True, 1.5, "one", None]),
    (lambda k, v: fields.count_or_auto(k, v, 99), [0, 7], [-1, False, 0.5, "one", None]),
    (fields.positive, [1e-9, 2, 2.5], [0, -1, NAN, INF, True, "1", None]),
    (fields.size, [0, 17], [-1, True, 1.5, "1", "1 TiB", "-1GiB", "", None]),
    (fields.ratio, [0, 0.999], [1, -0.001, NAN, INF, True, "0", None]),
    (fields.draft_ratio, [0, 0.5, 1], [1.001, -0.001, NAN, INF, True, "0", None]),
)


@pytest.mark.parametrize("check", CHECKS)
def test_borders(
    check: tuple[Callable[[str, Any], Any], Sequence[Any], Sequence[Any]],
) -> None:
    holds, good, bad = check
    for value in good:
        assert holds(KEY, value) == value
    for value in bad:
        with pytest.raises(UserError, match=f"^{KEY}") as error:
            holds(KEY, value)
        assert "\n" not in str(error.value)


def test_words_stand_for_numbers() -> None:
    assert fields.batch_size(KEY, "auto", 99) == fields.count_or_auto(KEY, "auto", 99) == 99
    sizes = {"1GiB": 2**30, "1.5 MiB": 3 * 2**19, "2GB": 2 * 10**9, "3 MB": 3 * 10**6}
    assert {text: fields.size(KEY, text) for text in sizes} == sizes


def test_tables_and_names() -> None:
    assert fields.table(KEY, None) == {}
    assert fields.table(KEY, {1: "x"}) == {"1": "x"}
    assert fields.names(KEY, ["a", "b"]) == ("a", "b")
    assert fields.names(KEY, [], empty=True) == ()
    for wrong in ([], "a", ["a", ""], ["a", 1], None):
        with pytest.raises(UserError, match=KEY):
            fields.names(KEY, wrong)
    with pytest.raises(UserError, match=KEY):
        fields.table(KEY, [1])


def test_a_table_has_all_of_its_keys_and_no_other() -> None:
    fields.only_known("engine", {"a": 1, "b": 2}, ("a", "b"))
    with pytest.raises(UserError, match=r"^config key engine\.b is missing$"):
        fields.only_known("engine", {"a": 1}, ("a", "b"))
    with pytest.raises(UserError, match=r"^engine\.seeds is .*did you mean engine\.seed\?"):
        fields.only_known("engine", {"seed": 1, "seeds": 2}, ("seed",))


#: By the name of a kind of setting: values that pass, and values that do not.
KINDS: dict[str, tuple[Sequence[Any], Sequence[Any]]] = {
    "COUNT": ([1, 7], [0, -1, 1.0, True, "1"]),
    "COUNT_OR_NONE": ([0, 7], [-1, 0.0, False, "0"]),
    "FLAG": ([True, False], [0, 1, "true"]),
    "TEXTS": (["a", "", ["a", "b"], []], [1, ["a", 1], {"a": 1}]),
    "NUMBER": ([0, -1.5], [NAN, INF, True, "1"]),
    "POSITIVE": ([1e-9, 3], [0, -1, NAN, INF, True]),
    "FROM_ZERO": ([0, 0.0, 3], [-1e-9, NAN, INF, False]),
    "SHARE": ([1e-9, 1], [0, 1.001, NAN, True]),
    "SHARE_FROM_ZERO": ([0, 1], [-1e-9, 1.001, NAN, False]),
    "BELOW_ONE": ([0, 0.999], [1, -1e-9, NAN, False]),
    "SCHEDULE": (["linear", "shift", "cosine", "maskgit"], ["square", 1, True, ["linear"]]),
    "STOPPING": ([True, False, "never"], ["always", 1, 0]),
}

#: Which setting is of which kind, as the library documents them; those of denoised answers are the harness's own.
OF_KIND = {
    "COUNT": "max_new_tokens max_length num_beams num_beam_groups num_return_sequences steps block_length",
    "COUNT_OR_NONE": (
        "min_new_tokens min_length top_k no_repeat_ngram_size encoder_no_repeat_ngram_size"
    ),
    "FLAG": "do_sample use_cache renormalize_logits remove_invalid_values prefix_cache",
    "TEXTS": "until stop_strings",
    "NUMBER": "length_penalty guidance_scale",
    "POSITIVE": "max_time repetition_penalty encoder_repetition_penalty shift",
    "FROM_ZERO": "temperature diversity_penalty",
    "SHARE": "top_p top_h typical_p",
    "SHARE_FROM_ZERO": "min_p",
    "BELOW_ONE": "epsilon_cutoff eta_cutoff",
    "SCHEDULE": "schedule",
    "STOPPING": "early_stopping",
}


@pytest.mark.parametrize("kind", KINDS)
def test_borders_of_generation_settings(kind: str) -> None:
    valid: Valid = getattr(generation, kind)
    good, bad = KINDS[kind]
    assert [value for value in good if not valid.holds(value)] == []
    assert [value for value in bad if valid.holds(value)] == []


def test_every_setting_is_of_its_kind() -> None:
    kinds = {name: kind for kind, names in OF_KIND.items() for name in names.split()}
    assert set(kinds) == set(VALUES)
    assert {
        name for name in VALUES if VALUES[name] is not getattr(generation, kinds[name])
    } == set()


def test_the_least_tokens_may_be_as_many_as_the_most() -> None:
    check_settings("generation", {"min_new_tokens": 4, "max_new_tokens": 4, "top_p": None})
    for wrong in ({"min_new_tokens": 5, "max_new_tokens": 4}, {"top_p": 0}, {"nosuch": 1}):
        with pytest.raises(UserError, match=r"^generation"):
            check_settings("generation", wrong)
