"""Signals of the prompt's words, and of visual tokens dropped since, compared with the plain model."""

from __future__ import annotations

import pytest
import torch

from espalier.harness.engine.attention_probe import attention_rows, word_rows
from espalier.methods.base import Need, Site
from tests.family_runs import shown
from tests.tiny import CHATS

NAMES = (
    "text_attention",
    "text_keys",
    "text_embeddings",
    "text_normed",
    "normed",
    "all_projected",
    "all_positions",
    "text_positions",
    "visual_positions",
)
NEEDS = tuple(map(Need, NAMES))
BEFORE_2 = (Site("layer", 2),)


def record(adapter, chats, where=BEFORE_2, ratio=0.0, **options):
    return shown(adapter, where, NEEDS, chats, ratio, **options)


def close(signal, wanted):
    return (signal - wanted).abs().max() <= 2e-5 * wanted.abs().max()


@pytest.mark.parametrize("chat", CHATS)
def test_signals_equal_what_the_plain_model_computes(single, eager, chat):
    signals = {key: value[0] for key, value in record(single, [chat])[0].signals.items()}
    inputs = eager.encode([chat])
    with torch.inference_mode():
        out = eager.model(**inputs, output_attentions=True, output_hidden_states=True)
    layout = eager.layout(inputs)
    visual, words = layout.visual[0], layout.words[0]
    rows = out.attentions[1][0].mean(0)[words]
    entering = out.hidden_states[2][0]
    assert close(signals["text_attention"], rows[:, visual])
    assert close(signals["text_keys"], out.past_key_values.layers[1].keys[0][:, words])
    assert close(signals["text_embeddings"], out.hidden_states[0][0, words])
    assert close(signals["all_projected"], out.hidden_states[0][0, visual])
    assert close(signals["normed"], eager.decoder.norm(entering[visual]))
    assert close(signals["text_normed"], eager.decoder.norm(entering[words]))
    assert torch.equal(signals["all_positions"], visual)
    # Words before the image see none of its tokens, the others see all.
    assert (words < visual.min()).any()
    assert not signals["text_attention"][words < visual.min()].any()
    assert (signals["text_attention"][words > visual.max()] > 0).all()


def test_a_padded_batch_gives_the_signals_of_single_rows(single):
    # The method plans once for each token count: rows 0 and 2 hold one image, row 1 two.
    views = {view.tokens.shape[1]: view for view in record(single, CHATS)}
    for row, (n_tokens, place) in enumerate([(16, 0), (32, 0), (16, 1)]):
        together = {key: value[place] for key, value in views[n_tokens].signals.items()}
        alone = {key: value[0] for key, value in record(single, [CHATS[row]])[0].signals.items()}
        n_words = len(alone["text_positions"])
        for name in NAMES:
            axis = 1 if name == "text_keys" else 0
            real = 16 * len(CHATS[row][0]["content"][:-1]) if name.startswith("all_") else n_words
            part, filler = together[name], together[name][:0]
            if name not in ("normed", "visual_positions"):
                filler = part.narrow(axis, real, part.shape[axis] - real)
                part = part.narrow(axis, 0, real)
            assert close(part, alone[name])
            assert (filler == (-1 if name in ("all_positions", "text_positions") else 0)).all()
    assert {view.signals["all_positions"].shape[1] for view in views.values()} == {32}


@pytest.mark.parametrize("chats", [CHATS[:1], CHATS])
def test_a_later_site_reads_what_is_left_and_remembers_what_was_dropped(single, chats):
    where = (Site("layer", 1), Site("layer", 3))
    fast = record(single, chats, where, 0.5)
    slow = record(single, chats, where, 0.5, backend="emulate")
    assert len(fast) == len(slow)
    for a, b in zip(fast, slow, strict=True):
        for name in NAMES:
            assert close(a.signals[name], b.signals[name])
    first, second = fast[0].signals, fast[len(fast) // 2].signals
    assert torch.equal(first["all_projected"], second["all_projected"])
    assert torch.equal(first["all_positions"], second["all_positions"])
    assert second["text_attention"].shape[2] * 2 == first["text_attention"].shape[2]
    assert not torch.equal(first["text_normed"], second["text_normed"])


def test_blocks_of_words_change_nothing():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 11, 8, generator=generator)
    key = torch.randn(2, 2, 11, 8, generator=generator)
    valid = torch.ones(2, 11, dtype=torch.bool)
    valid[1, :4] = False
    words = torch.tensor([[0, 1, 7, 8, 10], [4, 9, 10, -1, -1]])
    rows = word_rows(query, key, 0.3, valid, words)
    assert torch.allclose(word_rows(query, key, 0.3, valid, words, block=2), rows, atol=1e-7)
    for row in range(2):
        for place, word in enumerate(words[row].tolist()):
            if word < 0:
                assert not rows[row, place].any()
                continue
            visible = valid[row].clone()
            visible[word + 1 :] = False
            row_slice = slice(row, row + 1)
            wanted = attention_rows(query[row_slice, :, [word]], key[row_slice], 0.3, visible)[0, 0]
            assert torch.allclose(rows[row, place], wanted, atol=1e-7)
