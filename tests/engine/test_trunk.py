"""Stored layers are equivalent to running them: bit-identical answers, logits and records."""

from __future__ import annotations

from typing import Any

import pytest

from espalier.harness.engine.session import prompt_with_trunk, shared_prompt
from espalier.harness.errors import UserError
from espalier.methods.base import TokenReducer
from tests.engine.test_prompt import answered, method_of, same
from tests.families import FAMILIES
from tests.family_runs import ROWS, Tiny, generation
from tests.tiny import Scatter

#: Scores of words in the layer below, of the last word, rolled out over all earlier layers; states; no signal.
METHODS = ("none", "fastv", "sparsevlm", "pyramiddrop", "divprune")


def trunk_of(tiny: Tiny, prompt: Any, depth: int, **changes: Any) -> Any:
    settings = generation(tiny.adapter, prompt.inputs, **{"max_new_tokens": 3, **changes})
    return prompt_with_trunk(tiny.adapter, prompt, depth, **settings)


@pytest.mark.sampled(48)
@pytest.mark.parametrize("name", list(FAMILIES))
def test_methods_start_behind_layers_that_they_leave_alone(name: str) -> None:
    """Rows of unequal length in one batch, and a single row; the trunk is longer than some of them can use."""
    tiny = Tiny(name, "float32")
    depth = tiny.adapter.facts.text.layers
    names = (
        METHODS if FAMILIES[name].spec.facts.text.linear is None else ("none", "fastv", "divprune")
    )
    methods: list[TokenReducer] = [method_of(label) for label in names]
    methods += [Scatter((2,)), Scatter((1, 3)), Scatter(("prefix",))]
    for rows in (ROWS, (1,)):
        inputs = tiny.inputs(*rows)
        expected = [answered(tiny, method, inputs, *rows) for method in methods]
        prompt = trunk_of(tiny, shared_prompt(tiny.adapter, inputs, methods), depth)
        stored = 0 if prompt.trunk is None else len(prompt.trunk.outputs)
        whole = all(map(tiny.adapter.holds_prompt, range(depth)))
        assert stored == (depth if whole else 0)
        for method, result in zip((*methods, methods[0]), (*expected, expected[0]), strict=True):
            assert same(answered(tiny, method, prompt, *rows), result), method


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_trunk_ends_where_its_room_is_used_up(attention: str) -> None:
    """Layers beyond the trunk run normally; under eager attention queries cannot be read, and none are stored."""
    tiny = Tiny("llava", "float32", attention)
    method = Scatter((3,))
    prompt = shared_prompt(tiny.adapter, tiny.inputs(), [method])
    settings = generation(tiny.adapter, prompt.inputs, max_new_tokens=3)
    short = prompt_with_trunk(tiny.adapter, prompt, 4, room=1, **settings)
    assert (len(short.trunk.outputs), len(short.trunk.heads)) == (1, attention == "sdpa")
    expected = answered(tiny, method, tiny.inputs())
    for start in (short, prompt_with_trunk(tiny.adapter, prompt, 2, **settings)):
        assert same(answered(tiny, method, start), expected)
    assert prompt_with_trunk(tiny.adapter, prompt, 0, **settings) is prompt


def test_a_trunk_of_one_beam_is_not_taken_for_several() -> None:
    tiny = Tiny("llava", "float32")
    prompt = trunk_of(tiny, shared_prompt(tiny.adapter, tiny.inputs()), 2)
    with pytest.raises(UserError, match=r"generation.num_beams: .* 3 rows, got 6"):
        answered(tiny, method_of("none"), prompt, num_beams=2, output_logits=False)
