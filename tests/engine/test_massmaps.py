"""Head-max attention received: against eager maps, in padded batches, after drops, in blocks."""

from __future__ import annotations

import pytest
import torch

from espalier.harness.engine.signals.decoder_attention import received_max, words_after_image
from espalier.methods.base import Need, Site
from tests.families import FAMILIES
from tests.family_runs import adapter_of, shown
from tests.tiny import CHATS, chat, load_llava

MASSES = ("text_received_max", "visual_received_max", "text_received_peak")
NEEDS = tuple(map(Need, MASSES))
SITES = (Site("layer", 1), Site("layer", 3))


def record(adapter, chats, ratio=0.0, backend="drop"):
    return shown(adapter, SITES, NEEDS, chats, ratio, backend=backend)


@pytest.mark.parametrize("chat", CHATS)
def test_masses_are_column_means_of_the_eager_head_max_map(folder, double, chat):
    eager = load_llava(folder, attention="eager")
    inputs = eager.encode([chat])
    with torch.inference_mode():
        maps = eager.model(**inputs, output_attentions=True).attentions
    visual = eager.layout(inputs).visual[0].tolist()
    words_after = range(max(visual) + 1, inputs["input_ids"].shape[1])
    for view, site in zip(record(double, [chat]), SITES, strict=True):
        largest = maps[site.layer - 1][0].amax(dim=0).tolist()
        for signal, asking in zip(MASSES, (words_after, visual, words_after), strict=True):
            wanted = [sum(largest[q][j] for q in asking) / len(asking) for j in visual]
            if signal == "text_received_peak":
                wanted = [max(largest[q][j] for q in asking) for j in visual]
            values = view.signals[signal][0]
            assert values.dtype == torch.float64
            # Eager attention computes its softmax in fp32 for any dtype of the weights.
            assert (values - torch.tensor(wanted, dtype=torch.float64)).abs().max() < 1e-7


def test_words_between_images_do_not_ask_even_when_the_second_image_lost_much(double):
    """Recorder keeps the first tokens: at ratio 0.75 nothing of the second image is left at the second site."""
    two_images = chat("<image> w1 w2 <image> w3 w4 w5", 0, 1)
    fast, slow = (record(double, [two_images], 0.75, backend) for backend in ("drop", "emulate"))
    assert (fast[1].tokens.shape[1], fast[1].grid[0, :, 0].tolist()) == (8, [0] * 8)
    layout = double.layout(double.encode([two_images]))
    words, last = layout.words[0], int(layout.visual.max())
    between = (words > int(layout.visual[0, 15])) & (words < last)
    assert int(between.sum()) >= 2
    assert torch.equal(words_after_image(layout)[0], words > last)
    for signal in MASSES:
        assert torch.allclose(fast[1].signals[signal], slow[1].signals[signal], atol=1e-12)


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["llava", "llava_next", "qwen2_5_vl", "onevision_video"])
@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_a_padded_batch_gives_the_masses_of_single_rows(name: str, ratio: float):
    adapter, chats = adapter_of(name), FAMILIES[name].chats

    def rows_of(views):
        return [
            (view.site, view.grid[row], torch.stack([view.signals[key][row] for key in MASSES]))
            for view in views
            for row in range(len(view.tokens))
        ]

    together = rows_of(record(adapter, chats, ratio))
    single_rows = [row for row_chat in chats for row in rows_of(record(adapter, [row_chat], ratio))]
    assert len(together) == len(single_rows) == 6
    for site, grid, values in single_rows:
        matches = [v for s, g, v in together if s == site and torch.equal(g, grid)]
        assert min(float((values - match_values).abs().max()) for match_values in matches) < 1e-9


def test_blocks_and_padding_change_nothing():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 11, 8, generator=generator)
    key = torch.randn(2, 2, 11, 8, generator=generator)
    valid = torch.ones(2, 11, dtype=torch.bool)
    valid[1, :4] = False
    slots = torch.tensor([[0, 1, 7, 8, 10], [5, 9, 10, -1, -1]])
    masses = received_max(query, key, 0.3, valid, slots)
    assert torch.allclose(received_max(query, key, 0.3, valid, slots, block=2), masses, atol=1e-7)
    peaks = received_max(query, key, 0.3, valid, slots, peak=True)
    parts = received_max(query, key, 0.3, valid, slots, block=2, peak=True)
    assert torch.allclose(parts, peaks, atol=1e-7)
    assert (peaks >= masses).all()
    for row, query_slots in enumerate(([0, 1, 7, 8, 10], [5, 9, 10])):
        total = [0.0] * 11
        for q in query_slots:
            visible = [j for j in range(q + 1) if valid[row, j]]
            for j in visible:
                heads = []
                for head in range(4):
                    exps = {
                        i: float((query[row, head, q] @ key[row, head // 2, i] * 0.3).exp())
                        for i in visible
                    }
                    heads.append(exps[j] / sum(exps.values()))
                total[j] += max(heads) / len(query_slots)
        assert torch.allclose(masses[row], torch.tensor(total), atol=1e-6)
    assert not received_max(query, key, 0.3, valid, torch.full((2, 3), -1)).any()
