"""Decoding steps that attend to part of the cache are exact: compared with full forwards, emulation, single rows."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from espalier.harness.cost.budget import Budget
from espalier.harness.engine.session import Session
from espalier.harness.errors import UserError
from espalier.methods.base import (
    Attended,
    MethodError,
    Need,
    Plan,
    PlanError,
    Site,
    TokenReducer,
    View,
)
from tests.engine.decode_oracle import step_logits
from tests.families import FAMILIES
from tests.family_runs import answered, generation, span
from tests.tiny import DEPTH, Scatter

NAMES = (
    *("llava", "llava_next", "qwen2_5_vl", "qwen2_vl_video", "qwen3_vl"),
    *("qwen3_vl_moe", "glm4v"),
    *("onevision_video", "internvl", "paddleocr_vl", "hunyuan_ocr", "molmo2"),
)
#: Before the decoder, in it below the site at layer 2, above it, and nowhere.
PLACES = [(), ("prefix",), ("vision",), (1,), (3,), (1, 3)]
STEPS = 6


@dataclass(frozen=True)
class Turns(Scatter):
    """Leaves out a third of the entries from the second step on, another third at each step; its state is the step."""

    layer: int = 2

    def decode_site(self, depth: int) -> Site | None:
        return Site("decode", self.layer)

    def needs(self, site: Site) -> tuple[Need, ...]:
        return (Need("last_attention"),) if site.where == "decode" else ()

    def attend(self, view: View, last: Attended | None) -> Attended:
        paid = view.signals["last_attention"]
        assert view.tokens.shape == (*paid.shape, 0)
        if last is None:
            return Attended(None, torch.ones_like(paid))
        step = last.reference + 1
        image, _, row, column = view.grid.unbind(-1)
        return Attended((image + row + 2 * column + step) % 3 > 0, step)


@dataclass(frozen=True)
class Everything(Turns):
    """Attends to all entries, expressed in one of two ways."""

    explicit: bool = False

    def attend(self, view: View, last: Attended | None) -> Attended:
        paid = view.signals["last_attention"]
        return Attended(torch.ones_like(paid, dtype=torch.bool) if self.explicit else None, paid)


def run(adapter, method, chats, ratio=0.6, backend="drop", **changes):
    inputs = adapter.encode(list(chats))
    with Session(adapter, method, Budget("kept", ratio), backend=backend) as session:
        return session.generate(inputs, None, **generation(adapter, inputs, **changes))


@pytest.mark.sampled(48)
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("name", NAMES)
def test_steps_equal_whole_forwards_with_handwritten_masks(load, name, where):
    adapter, eager, sees = load(name), load(name, "float64", "eager"), FAMILIES[name].sees
    method = Turns(where)
    for sample_chat in FAMILIES[name].chats:
        inputs = adapter.encode([sample_chat])
        generated = run(adapter, method, [sample_chat])
        (grid,) = adapter.layout(inputs).grid
        kept = [torch.arange(len(grid))]
        # The same hash of coordinates, among those still alive.
        for count in generated.records[0].kept:
            view = View(Site("prefix"), torch.zeros(1, len(kept[-1]), 0), grid[kept[-1]][None])
            kept.append(kept[-1][method.plan(view, count).kept[0]])
        firsts = [place if isinstance(place, int) else 0 for place in where]
        drops = list(zip(firsts, kept[1:], strict=True))

        def choose(step, paid, grid=grid):
            image, _, row, column = grid.unbind(-1)
            return (image + row + 2 * column + step) % 3 > 0 if step > 1 else paid >= 0

        expected = step_logits(eager, inputs, generated.ids, drops, 2, choose, sees)
        # The models normalise in single precision regardless of their own.
        assert span(generated.logits - expected) < 2e-6 * span(expected)
        assert torch.equal(generated.records[0].origin, kept[-1])
        everything = step_logits(
            eager, inputs, generated.ids, drops, 2, lambda step, paid: paid >= 0, sees
        )
        # The test is not vacuous: the first step attends to all, and later ones do not.
        assert span(generated.logits[:, :2] - everything[:, :2]) < 2e-6 * span(expected)
        assert span(generated.logits[:, 2:] - everything[:, 2:]) > 1e-3


@pytest.mark.sampled(24)
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("name", NAMES)
def test_a_padded_batch_equals_its_rows_and_emulation(load, name, where):
    adapter, chats = load(name), FAMILIES[name].chats
    batch = run(adapter, Turns(where), chats)
    slow = run(adapter, Turns(where), chats, backend="emulate")
    assert torch.equal(batch.ids, slow.ids)
    assert span(batch.logits - slow.logits) < 1e-9 * span(slow.logits)
    for row, row_chat in enumerate(chats):
        single = run(adapter, Turns(where), [row_chat])
        assert torch.equal(batch.ids[row], single.ids[0])
        assert span(batch.logits[row] - single.logits[0]) < 1e-6
        assert batch.records[row].attended == slow.records[row].attended
        assert batch.records[row].attended == single.records[0].attended


@pytest.mark.sampled(18)
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_attending_to_everything_changes_nothing(load, name, explicit):
    adapter, chats = load(name), FAMILIES[name].chats
    ids, logits = answered(adapter, adapter.encode(list(chats)))
    generated = run(adapter, Everything((), explicit=explicit), chats, 0.0)
    assert torch.equal(generated.ids, ids)
    assert torch.equal(generated.logits, logits)
    assert [record.attended for record in generated.records] == [
        r.visual for r in generated.records
    ]


def test_the_cache_keeps_every_entry_and_records_say_what_was_attended_to(load):
    adapter, chats = load("llava"), FAMILIES["llava"].chats[:1]
    generated = run(adapter, Turns(()), chats)
    (record,) = generated.records
    # Columns 0 to 3 of a row of the 4 x 4 grid: steps 2 to 5 leave out 5, 5, 6 and 5 of 16 entries.
    row, column = torch.arange(4).repeat_interleave(4), torch.arange(4).repeat(4)
    attended_counts = [int(((row + 2 * column + step) % 3 > 0).sum()) for step in range(2, STEPS)]
    assert record.attended == (16 + sum(attended_counts)) / (STEPS - 1)
    assert record.kept == record.requested == ()
    assert record.entering == (16,) * DEPTH
    assert generated.cache_lengths == (16 + record.text,) * DEPTH
    plain_record = run(adapter, Scatter(()), chats).records[0]
    assert record.kv_bytes == plain_record.kv_bytes
    assert plain_record.attended is None


def test_an_answer_of_one_token_has_no_steps(load):
    generated = run(load("llava"), Turns(()), FAMILIES["llava"].chats, max_new_tokens=1)
    assert [record.attended for record in generated.records] == [None] * 3


def test_steps_after_the_end_of_an_answer_do_not_count(load, monkeypatch):
    adapter, chats = load("qwen2_5_vl"), FAMILIES["qwen2_5_vl"].chats[:1]
    ids = run(adapter, Turns(()), chats).ids[0].tolist()
    length = next(n for n in range(3, len(ids)) if ids[n - 1] not in ids[: n - 1])
    end = ids[length - 1]
    # The library does not know of this end, so that steps go on after it, as in a batch with longer answers.
    monkeypatch.setattr(type(adapter), "end_ids", (end,))
    generated = run(adapter, Turns(()), chats)
    (record,) = generated.records
    assert record.new_tokens == length < generated.ids.shape[1]
    (grid,) = adapter.layout(adapter.encode(list(chats))).grid
    image, _, row, column = grid.unbind(-1)
    attended_counts = [
        int(((image + row + 2 * column + step) % 3 > 0).sum()) for step in range(2, length)
    ]
    assert record.attended == (record.visual + sum(attended_counts)) / (length - 1)


def test_a_batch_without_dropping_above_a_site_leaves_no_hooks_behind(load):
    adapter, chats = load("llava"), FAMILIES["llava"].chats
    modules = [adapter.decoder, *adapter.decoder.layers, adapter.tower, adapter.projector]
    # The library leaves its own once a caller has asked for hidden states.
    hooks = [(*module._forward_pre_hooks, *module._forward_hooks) for module in modules]
    run(adapter, Turns(("prefix",)), chats)
    with pytest.raises(UserError):
        run(adapter, Turns(()), chats, num_beams=2, output_logits=False)
    assert hooks == [(*module._forward_pre_hooks, *module._forward_hooks) for module in modules]
    ids, logits = answered(adapter, adapter.encode(list(chats)))
    assert torch.equal(run(adapter, Scatter(()), chats).logits, logits)
    assert torch.equal(run(adapter, Scatter(()), chats).ids, ids)


def test_beams_and_eager_attention_are_refused(load):
    chats = FAMILIES["llava"].chats
    with pytest.raises(UserError, match=r"generation\.num_beams=3 .*; valid: 1"):
        run(load("llava"), Turns(()), chats, num_beams=3, output_logits=False)
    with pytest.raises(UserError, match=r"model\.attention='eager'"):
        run(load("llava", "float64", "eager"), Turns(()), chats)


def test_other_signals_are_refused_while_tokens_are_generated(load):
    @dataclass(frozen=True)
    class Curious(Turns):
        def needs(self, site: Site) -> tuple[Need, ...]:
            return (Need("visual_keys"),) if site.where == "decode" else ()

    with pytest.raises(MethodError, match=r"visual_keys.* not available .*; valid: last_attention"):
        Session(load("llava"), Curious(()), Budget("kept", 0.0))


def test_a_decode_site_without_a_choice_is_an_error(load):
    @dataclass(frozen=True)
    class Silent(TokenReducer):
        def sites(self, depth: int) -> tuple[Site, ...]:
            return ()

        def decode_site(self, depth: int) -> Site | None:
            return Site("decode", 2)

        def plan(self, view: View, keep: int) -> Plan:
            raise AssertionError

    with pytest.raises(PlanError, match="Silent has a decode site"):
        run(load("llava"), Silent(), FAMILIES["llava"].chats)
