"""Logits that are not finite fail their sample, and the error names the first such module."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from espalier.harness.cost.budget import Budget
from espalier.harness.decoding.speculative.cached_model import CachedModel
from espalier.harness.decoding.speculative.drafts import EMPTY_DRAFT
from espalier.harness.decoding.speculative.samplers import TokenSampler
from espalier.harness.engine.finite_logits import FiniteLogits, NonFiniteLogits
from espalier.harness.engine.session import Session
from espalier.harness.evaluation.evaluate import SampleErrors, evaluate
from espalier.harness.models.adapter import Adapter
from espalier.harness.models.build_adapter import load_adapter
from espalier.harness.specs.catalogue import build_method
from espalier.harness.store import Journal
from espalier.methods.none import NoReduction
from tests import commands
from tests.tiny import CHATS, DEPTH, Scatter, load_llava

NONE, HALF = Budget("kept", 0.0), Budget("kept", 0.5)
SHORT: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}


def generate(adapter: Adapter, chats: list[Any], **settings: Any) -> Any:
    with Session(adapter, Scatter((2,)), HALF) as session:
        return session.generate(adapter.encode(chats), ["a", "b", "c"][: len(chats)], **settings)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("model.language_model.layers.3.mlp.down_proj", f"decoder layer 3 of {DEPTH}"),
        ("model.vision_tower", "the vision tower"),
        ("model.multi_modal_projector.linear_2", "the projector"),
        ("lm_head", "the output head"),
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_first_module_with_a_value_that_is_not_finite_is_named(
    folder: Path, part: str, name: str, value: float
) -> None:
    adapter = load_llava(folder, "float32")
    module = adapter.model.get_submodule(part)
    weight = next(parameter for parameter in module.parameters() if parameter.dim() >= 2)
    with torch.no_grad():
        weight.flatten()[0] = value
    with pytest.raises(NonFiniteLogits) as caught:
        generate(adapter, CHATS[:1], **SHORT)
    assert str(caught.value) == (
        f"the logits of a hold NaN or infinity in the prefill; they began in {name}"
    )
    hooks = [
        hook for parameter in adapter.model.modules() for hook in parameter._forward_hooks.values()
    ]
    assert not [hook for hook in hooks if hook.__module__.startswith("espalier.harness.")]
    if part != "lm_head":
        with (
            Session(adapter, NoReduction(), NONE) as session,
            pytest.raises(NonFiniteLogits, match=name),
        ):
            session.prefill(adapter.encode(CHATS[:1]), DynamicCache())


def test_overflow_of_half_precision_is_found_as_well(folder: Path) -> None:
    adapter = load_llava(folder, "float16")
    with torch.no_grad():
        adapter.decoder.layers[1].mlp.down_proj.weight.fill_(6e4)
    with pytest.raises(NonFiniteLogits, match=f"decoder layer 1 of {DEPTH}"):
        generate(adapter, CHATS[:1], **SHORT)


def test_the_step_and_the_row_are_those_that_went_wrong(folder: Path) -> None:
    """The prefill is finite everywhere, and only one row ever generates the token with an embedding that is not."""
    adapter = load_llava(folder, "float32")
    ids = generate(adapter, CHATS, **SHORT).ids
    only = [
        (row, step) for row in range(3) for step in range(2) if (ids == ids[row, step]).sum() == 1
    ]
    row, step = only[0]
    with torch.no_grad():
        adapter.model.get_input_embeddings().weight[ids[row, step]] = float("nan")
    with pytest.raises(NonFiniteLogits) as caught:
        generate(adapter, CHATS, **SHORT)
    assert (caught.value.sample, caught.value.step) == ("abc"[row], step + 1)
    assert "every layer of the prefill is finite" in str(caught.value)


def test_processors_may_rule_tokens_out(folder: Path) -> None:
    adapter = load_llava(folder, "float32")
    ruled = {**SHORT, "suppress_tokens": [3, 4], "num_beams": 2}
    assert generate(adapter, CHATS, **ruled).ids.shape[0] == 3


def test_what_stands_behind_an_answers_end_does_not_count() -> None:
    head = nn.Identity()
    finite = FiniteLogits(head)
    for step in range(3):
        logits = torch.zeros(4, 2, 5)
        logits[:, 0] = float("nan")  # of a prompt that is not the last position's
        logits[1, -1, 2] = float("-inf") if step == 2 else 0.0
        head(logits)
    finite.check(["a", "b", "c", "d"], [3, 2, 3, 3], finite.flags(4))
    with pytest.raises(NonFiniteLogits) as caught:
        finite.check(
            ["a", "b"], [3, 3], finite.flags(2)
        )  # two beams each: row 1 is the first sample's
    assert (caught.value.sample, caught.value.step) == ("a", 2)
    finite.close()
    head(torch.full((4, 1, 5), float("nan")))
    finite.check(["a", "b", "c", "d"], [9, 2, 9, 9], finite.flags(4))


def test_windows_of_a_decoder_are_looked_at() -> None:
    """A side with a stack that returns the output of a broken model."""
    first = torch.zeros(7)
    broken = torch.zeros(1, 7)
    broken[0, 3] = float("nan")
    adapter: Any = SimpleNamespace()
    side = CachedModel.__new__(CachedModel)
    side.adapter, side.sampler, side.room = (
        adapter,
        TokenSampler(torch.zeros(1, 2, dtype=torch.long)),
        9,
    )
    side.stack = SimpleNamespace(  # type: ignore[assignment]
        run=lambda *_: broken, cache=SimpleNamespace(cut=lambda n: None), device="cpu"
    )
    side._prefill, side.first, side.fed = None, first, []
    side._rows, side._tree, side._tree_rows, side._sum = {0: 0}, EMPTY_DRAFT, (), torch.zeros(())
    assert side.rows([], EMPTY_DRAFT) == [0]
    with pytest.raises(NonFiniteLogits, match="in decoding step 1"):
        side.rows([5], EMPTY_DRAFT)


# ------------------------------------------------------------------ a whole run


@pytest.mark.parametrize("method", ["method=uniform ratio=0.5", "method=autoregressive"])
def test_a_model_with_a_broken_layer_has_no_score(method: str, journal: Journal) -> None:
    """Such samples used to get the first id as every token, and a score of 0.0."""
    spec = commands.spec_of("limit=2", "model.device=cpu", "engine.warmup=0", *method.split())
    adapter = load_adapter(spec.model)
    with torch.no_grad():
        adapter.decoder.layers[2].self_attn.v_proj.weight[0, 0] = float("nan")
    with pytest.raises(SampleErrors, match="decoder layer 2 of 6") as caught:
        evaluate(spec, adapter, build_method(spec.method.name, spec.method.params), journal)
    assert len(caught.value.failures) == 2
    assert not any("answer" in entry for entry in journal.entries())
