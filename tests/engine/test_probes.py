"""Signals equal the values of eager attention, without eager attention running."""

from __future__ import annotations

import pytest
import torch

from espalier.harness.cost.budget import Budget
from espalier.harness.engine.attention_probe import (
    mean_logits,
    received_mean,
    received_unmasked,
    word_rows,
)
from espalier.harness.engine.prompt import idle
from espalier.harness.engine.session import Session
from espalier.harness.errors import UserError
from espalier.methods.base import MethodError, Need, Site
from tests.engine.test_session import IMAGE_ID
from tests.families import FAMILIES
from tests.family_runs import ONE_TOKEN
from tests.tiny import CHATS, Recorder, chat, load_tiny, save_tiny

#: Of the tiny models' tokenizer.


def record(adapter, recorder, chats, ratio=0.0, **options):
    with Session(adapter, recorder, Budget("kept", ratio), **options) as session:
        session.generate(adapter.encode(chats), **ONE_TOKEN)
    return recorder.views


def attentions(eager, chats):
    """Return the text stack's maps (layers, B, H, L, L) and the positions that generate would use."""
    inputs = eager.encode(chats)
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with torch.inference_mode():
        out = eager.model(**inputs, position_ids=positions, output_attentions=True)
    return inputs, out.attentions


def test_an_explicit_layer_is_honoured(single, eager):
    need = Need("last_attention", layer=0)
    views = record(single, Recorder((Site("layer", 3),), (need,)), CHATS[:1])
    inputs, maps = attentions(eager, CHATS[:1])
    visual = inputs["input_ids"][0] == IMAGE_ID
    expected = maps[0][0, :, -1, visual].mean(0)
    assert (views[0].signals["last_attention@0"][0] - expected).abs().max() <= 5e-6


def test_probes_equal_whole_maps_written_out():
    """Grouped heads, and a second row with padding: the mean attention of the real queries that may see a key."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 11, 8, generator=generator, dtype=torch.float64)
    key = torch.randn(2, 2, 11, 8, generator=generator, dtype=torch.float64)
    valid = torch.ones(2, 11, dtype=torch.bool)
    valid[1, :4] = False
    logits = 0.3 * query @ key.repeat_interleave(2, 1).transpose(2, 3)
    visible = torch.ones(11, 11, dtype=torch.bool).tril() & valid[:, None, None]
    maps = logits.masked_fill(~visible, -1e30).softmax(-1).mean(1)
    for row, first in ((0, 0), (1, 4)):
        for slot in range(first, 11):
            mean = received_mean(query, key, 0.3, valid, block=3)[row, slot]
            torch.testing.assert_close(mean, maps[row, slot:, slot].mean())
    query_slots = torch.tensor([[2, 10], [7, -1]])
    rows = word_rows(query, key, 0.3, valid, query_slots, block=1)
    torch.testing.assert_close(rows[0], maps[0, [2, 10]])
    torch.testing.assert_close(rows[1], torch.stack([maps[1, 7], torch.zeros(11).double()]))
    torch.testing.assert_close(mean_logits(query, key, 0.3), logits.mean((1, 2)))
    everywhere = received_unmasked(query, key, 0.3, block=3)
    torch.testing.assert_close(everywhere, logits.softmax(-1).mean((1, 2)))


def test_blocks_that_idled_have_the_forward_that_they_had():
    """Also a forward set on the instance, as by accelerate's hooks."""
    plain, hooked = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    hooked.forward = lambda hidden: hidden + 1
    states = torch.ones(1, 2)
    before = plain(states)
    with idle([plain, hooked]):
        assert plain(states) is states
        assert hooked(states) is states
    assert torch.equal(plain(states), before)
    assert torch.equal(hooked(states), states + 1)
    assert "forward" not in vars(plain)


def test_padded_batch_gives_the_signals_of_single_rows(single):
    needs = tuple(map(Need, ("last_attention", "mean_attention", "cls_attention", "tower_keys")))
    batch = record(single, Recorder(wants=needs), CHATS)
    together = {}
    for view in batch:  # one view for each token count
        for position, row in enumerate([1] if view.tokens.shape[1] == 32 else [0, 2]):
            together[row] = {key: value[position] for key, value in view.signals.items()}
    for row, row_chat in enumerate(CHATS):
        alone = record(single, Recorder(wants=needs), [row_chat])[0].signals
        for need in needs:
            assert torch.allclose(together[row][need.key], alone[need.key][0], atol=5e-6)


def test_signals_after_an_earlier_drop_see_only_what_is_left(single):
    """The second site's row comes from a layer with half of the tokens dropped; emulation agrees."""
    where = (Site("layer", 1), Site("layer", 3))
    fast = record(single, Recorder(where), CHATS[:1], ratio=0.5)
    slow = record(single, Recorder(where), CHATS[:1], ratio=0.5, backend="emulate")
    assert fast[1].tokens.shape == slow[1].tokens.shape
    assert fast[1].tokens.shape[1] < 16
    difference = fast[1].signals["last_attention"] - slow[1].signals["last_attention"]
    assert difference.abs().max() <= 5e-6
    assert torch.equal(fast[1].grid, slow[1].grid)
    assert (fast[1].tokens - slow[1].tokens).abs().max() <= 2e-5 * slow[1].tokens.abs().max()


def test_tower_signals_equal_eager(single, eager):
    needs = (Need("cls_attention"), Need("tower_keys"))
    views = record(single, Recorder((Site("vision"),), needs), CHATS[:1])
    inputs = eager.encode(CHATS[:1])
    captured = {}
    feature = eager.tower.encoder.layers[
        1
    ]  # hidden_states[-2] of three layers is the output of layer 1
    handle = feature.self_attn.k_proj.register_forward_hook(
        lambda module, args, output: captured.update(key=output)
    )
    with torch.inference_mode():
        maps = eager.tower(inputs["pixel_values"], output_attentions=True).attentions
    handle.remove()
    expected = maps[1][0, :, 0, 1:].mean(0)
    assert (views[0].signals["cls_attention"][0] - expected).abs().max() <= 5e-6
    keys = captured["key"][0, 1:].view(16, 4, 8).mean(1)
    assert (views[0].signals["tower_keys"][0] - keys).abs().max() <= 5e-6


def test_tower_signals_follow_their_own_image(single):
    """Two images in one row: its signals are those of the single images, concatenated."""
    needs = (Need("cls_attention"),)
    two_images = record(single, Recorder((Site("vision"),), needs), [chat("w1", 1, 2)])[0]
    one_image = record(single, Recorder((Site("vision"),), needs), [chat("w1", 1)])[0]
    two = record(single, Recorder((Site("vision"),), needs), [chat("w1", 2)])[0]
    expected = torch.cat([one_image.signals["cls_attention"], two.signals["cls_attention"]], 1)
    assert torch.allclose(two_images.signals["cls_attention"], expected, atol=1e-6)
    assert two_images.grid[0, :, 0].tolist() == [0] * 16 + [1] * 16


def test_watching_leaves_the_logits_alone(single):
    needs = tuple(map(Need, ("last_attention", "mean_attention", "cls_attention", "tower_keys")))
    inputs = single.encode(CHATS)
    generation = {"max_new_tokens": 4, "do_sample": False, "output_logits": True}
    with torch.inference_mode():
        plain = single.model.generate(**inputs, **generation, return_dict_in_generate=True)
    with Session(single, Recorder(wants=needs), Budget("kept", 0.0)) as session:
        watched = session.generate(inputs, **generation)
    assert torch.equal(watched.logits, torch.stack(plain.logits, 1))


def test_eager_attention_is_refused_for_probes(eager):
    with pytest.raises(UserError, match=r"model\.attention='eager'"):
        Session(eager, Recorder(), Budget("kept", 0.5))


def test_a_missing_prior_is_refused(single):
    with pytest.raises(MethodError, match="calibrat"):
        Session(single, Recorder(wants=(Need("prior"),)), Budget("kept", 0.5))


class Drawer(Recorder):
    """A recorder that declares that it draws."""

    draws = True


def test_generators_depend_on_run_seed_and_sample_alone(single):
    def draws(samples, seed=0):
        with Session(single, recorder := Drawer(), Budget("kept", 0.0), seed=seed) as session:
            session.generate(single.encode([CHATS[0]] * len(samples)), samples, **ONE_TOKEN)
        return [torch.rand(3, generator=g).tolist() for v in recorder.views for g in v.generators]

    first = draws(["a", "b"])
    assert first == [draws(["a"])[0], draws(["b"])[0]]
    assert first[0] != first[1]
    assert draws(["a"], seed=1)[0] != first[0]


def test_two_sites_share_a_tower_signal_that_comes_in_parts(tmp_path):
    """Qwen's tower calls its attention once an image; a signal read by both sites is captured once."""
    family = FAMILIES["qwen2_vl"]
    adapter = load_tiny(family.spec, save_tiny(family.spec, tmp_path), "float32")
    two = next(
        family_chat
        for family_chat in family.chats
        if sum(p["type"] == "image" for p in family_chat[0]["content"]) == 2
    )
    places = (Site("prefix"), Site("layer", 2))
    views = record(adapter, Recorder(places, (Need("cls_attention"),)), [two])
    plain = record(adapter, Recorder(places[:1], (Need("cls_attention"),)), [two])
    for view in views:
        assert torch.equal(view.signals["cls_attention"], plain[0].signals["cls_attention"])
