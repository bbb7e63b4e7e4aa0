"""Dropping is exact: compared with the plain model and the slow reference, across batches and beams."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from espalier.harness.engine.engine_guards import check_text_config
from espalier.harness.engine.record import answer_lengths
from espalier.harness.engine.session import Session
from espalier.harness.errors import UserError
from espalier.methods.base import Plan, PlanError
from tests.family_runs import MOST, NONE
from tests.tiny import CHATS, Scatter, chat

#: Of the tiny models' tokenizer.
IMAGE_ID = 3

GENERATION = {
    "max_new_tokens": 6,
    "do_sample": False,
    "output_logits": True,
    "suppress_tokens": [IMAGE_ID],
}
PLACES = [("prefix",), ("vision",), (1,), (2,), (1, 3), ("prefix", 2), (0,)]


def plain(adapter, inputs, **extra):
    with torch.inference_mode():
        out = adapter.model.generate(
            **inputs, **{**GENERATION, **extra}, return_dict_in_generate=True
        )
    return out.sequences[:, inputs["input_ids"].shape[1] :], torch.stack(out.logits, 1)


def run(adapter, method, budget, chats=CHATS, samples=None, **options):
    generation = {**GENERATION, **options.pop("generation", {})}
    with Session(adapter, method, budget, **options) as session:
        return session.generate(adapter.encode(chats), samples, **generation)


@pytest.mark.sampled
@pytest.mark.parametrize("where", PLACES)
def test_merging_without_dropping_is_applied(double, where):
    """At ratio 0 nothing moves, but merged values (here: halved ones) still arrive."""
    fast = run(double, Scatter(where, merge=True), NONE)
    slow = run(double, Scatter(where, merge=True), NONE, backend="emulate")
    _, plain_logits = plain(double, double.encode(CHATS))
    assert torch.equal(fast.ids, slow.ids)
    assert (fast.logits - slow.logits).abs().max() < 1e-9 * slow.logits.abs().max()
    assert (fast.logits[:, 0] - plain_logits[:, 0]).abs().max() > 1e-2


def test_merging_before_the_decoder_computes_the_plan(double):
    """Layer 0 receives the kept tokens' merged values at the kept tokens' positions."""
    captured = {}

    def spy(module, args, kwargs):
        captured.update(hidden=args[0], rotary=kwargs["position_embeddings"])

    inputs = double.encode([chat("w1 w2", 5)])
    handle = double.decoder.layers[0].register_forward_pre_hook(spy, with_kwargs=True)
    generation = {"max_new_tokens": 1, "do_sample": False}
    with Session(double, Scatter(("prefix",)), NONE) as session:
        session.generate(inputs, **generation)
    full = {**captured}
    with Session(double, Scatter(("prefix",), merge=True), MOST) as session:
        record = session.generate(inputs, **generation).records[0]
    handle.remove()
    start = int((inputs["input_ids"][0] == IMAGE_ID).nonzero()[0])
    kept = record.origin.tolist()
    slot = [next((k for k, j in enumerate(kept) if j >= i), len(kept) - 1) for i in range(16)]
    for k, j in enumerate(kept):
        members = [start + i for i in range(16) if slot[i] == k]
        expected = 0.5 * full["hidden"][0, members].sum(0)
        assert torch.allclose(captured["hidden"][0, start + k], expected, rtol=0, atol=1e-9)
        assert torch.equal(captured["rotary"][0][0, start + k], full["rotary"][0][0, start + j])


@pytest.mark.parametrize("where", [("prefix",), ("vision",)])
def test_renumbered_equals_a_prompt_with_fewer_placeholders(double, where):
    """Closing the gaps is the same as feeding only the kept features to a shorter prompt."""
    for row_chat in CHATS:
        inputs = double.encode([row_chat])
        generated = run(double, Scatter(where), MOST, [row_chat], positions="renumbered")
        kept = generated.records[0].origin
        ids = inputs["input_ids"][0]
        visual = (ids == IMAGE_ID).nonzero()[:, 0]
        stays = torch.ones(ids.shape[0], dtype=torch.bool)
        stays[visual] = False
        stays[visual[kept]] = True
        with torch.inference_mode():
            features = double.model.model.get_image_features(
                pixel_values=inputs["pixel_values"]
            ).pooler_output
            embeds = double.model.get_input_embeddings()(ids[stays])[None]
            slots = (ids[stays] == IMAGE_ID).nonzero()[:, 0]
            embeds[0, slots] = torch.cat(list(features))[kept]
            out = double.model.generate(
                inputs_embeds=embeds,
                attention_mask=torch.ones(embeds.shape[:2], dtype=torch.long),
                **GENERATION,
                return_dict_in_generate=True,
            )
        assert torch.equal(generated.ids, out.sequences)
        assert (generated.logits - torch.stack(out.logits, 1)).abs().max() < 1e-6


@pytest.mark.parametrize("where", [("prefix",), ("vision",)])
def test_renumbered_batch_and_emulation_agree(double, where):
    fast = run(double, Scatter(where), MOST, positions="renumbered")
    slow = run(double, Scatter(where), MOST, positions="renumbered", backend="emulate")
    assert torch.equal(fast.ids, slow.ids)
    assert (fast.logits - slow.logits).abs().max() < 1e-6
    for row, row_chat in enumerate(CHATS):
        single = run(double, Scatter(where), MOST, [row_chat], positions="renumbered")
        assert (fast.logits[row] - single.logits[0]).abs().max() < 1e-6


def hooks(model) -> int:
    return sum(
        len(m._forward_pre_hooks) + len(m._forward_hooks) + len(m._forward_hooks_with_kwargs)
        for m in model.modules()
    )


class Broken(Scatter):
    def plan(self, view, keep):
        raise RuntimeError("the method failed")


class Greedy(Scatter):
    def plan(self, view, keep):
        return Plan(torch.arange(keep + 1).expand(view.tokens.shape[0], -1))


class Unsorted(Scatter):
    def plan(self, view, keep):
        return Plan(torch.arange(keep).flip(0).expand(view.tokens.shape[0], -1))


@pytest.mark.parametrize("where", [("prefix",), ("vision",), (2,)])
def test_the_model_is_restored_even_after_an_error(double, where):
    inputs = double.encode(CHATS)
    before_ids, before = plain(double, inputs)
    hooks_before = hooks(double.model)  # the library hooks its tower for hidden states
    with pytest.raises(PlanError, match=r"method Broken.*: the method failed"):
        run(double, Broken(where), MOST)
    assert hooks(double.model) == hooks_before
    run(double, Scatter(where), MOST)
    assert hooks(double.model) == hooks_before
    after_ids, after = plain(double, inputs)
    assert torch.equal(before_ids, after_ids)
    assert torch.equal(before, after)


@pytest.mark.parametrize("method", [Greedy(), Unsorted(), Greedy((2,)), Unsorted((2,))])
def test_a_plan_that_breaks_its_contract_is_an_error(double, method):
    with pytest.raises(PlanError):
        run(double, method, MOST)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("cache_implementation", "static"),
        ("prefill_chunk_size", 8),
        ("use_cache", False),
        ("prompt_lookup_num_tokens", 3),
    ],
)
def test_what_cannot_be_done_right_is_refused(double, argument, value):
    with pytest.raises(UserError, match=rf"generation\.{argument}"):
        run(double, Scatter(), MOST, generation={argument: value})


def test_generate_outside_the_block_is_refused(double):
    session = Session(double, Scatter(), MOST)
    with pytest.raises(RuntimeError, match="outside"):
        session.generate(double.encode(CHATS))


def test_merged_features_are_projected_once_more(double):
    projected = []
    handle = double.projector.linear_1.register_forward_hook(
        lambda module, args, output: projected.append(args[0].shape[:-1].numel())
    )
    pruned = run(double, Scatter(("vision",)), MOST)
    merged = run(double, Scatter(("vision",), merge=True), MOST)
    handle.remove()
    # All four images, and 40 % of 16, 32 and 16 again.
    assert projected == [4 * 16, 4 * 16, 6 + 6, 13]
    assert [record.work.reprojected for record in pruned.records] == [0, 0, 0]
    assert [record.work.reprojected for record in merged.records] == [6, 13, 6]


def test_an_answer_ends_with_its_first_end_token_and_padding_does_not_count():
    """Also if the padding is the end token itself, as in many checkpoints."""
    ids = torch.tensor([[5, 9, 2, 2, 2], [5, 6, 7, 8, 9], [3, 2, 0, 0, 0], [2, 2, 2, 2, 2]])
    assert [answer_lengths(ids, ends) for ends in ((2,), (2, 9), ())] == [
        [3, 5, 2, 1],
        [2, 5, 2, 1],
        [5, 5, 5, 5],
    ]


@pytest.mark.parametrize(
    ("kinds", "window", "layer"),
    [
        (["full_attention", "sliding_attention"], None, 1),
        (["linear_attention"], None, 0),
        (None, 8, 0),
        (None, 16, None),
        (["full_attention"], 8, None),
    ],
)
def test_stacks_with_layers_of_other_kinds_are_refused(
    kinds: list[str] | None, window: int | None, layer: int | None
) -> None:
    config = SimpleNamespace(layer_types=kinds, sliding_window=window, max_position_embeddings=16)
    if layer is None:
        check_text_config(config, "model=x")
    else:
        with pytest.raises(UserError, match=f"model=x: decoder layer {layer} is '[sl]"):
            check_text_config(config, "model=x")
