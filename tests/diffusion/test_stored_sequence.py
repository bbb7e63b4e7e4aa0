"""Steps against a stored sequence compared with Fast-dLLM's dual cache and dLLM-Cache, written out.

The loops run one sample, layer by layer and head by head, and share no code with the engine.
"""

from __future__ import annotations

import pytest
import torch

from espalier.harness.cost.budget import Budget
from espalier.harness.cost.flops import head_flops
from espalier.harness.decoding.diffusion.answer_flops import run_flops
from espalier.harness.decoding.diffusion.denoising_record import denoising_records, diffusion_block
from espalier.harness.engine.denoising_steps import DenoisingSession
from espalier.harness.errors import Refused, UserError
from espalier.methods.d3tom import D3ToM
from espalier.methods.fastv import FastV
from espalier.methods.none import NoReduction
from tests.diffusion import models
from tests.diffusion.oracle import mlp, reveal, rotated
from tests.diffusion.prefix_oracle import attended, cosine, projected
from tests.diffusion.test_releases import denoising_of
from tests.tiny import CHATS

LENGTH, BLOCK, STEPS = 12, 4, 9
REVEALS = (2, 1, 1)
CACHES = (
    {"block_cache": True},
    {"prompt_interval": 2},
    {"prompt_interval": 4},
    {"prompt_interval": 4, "generation_interval": 2},
    {"prompt_interval": 6, "generation_interval": 3, "transfer_ratio": 0.5},
)


def answers(adapter, chats=CHATS, method=None, ratio=0.0, **how):
    shape = {"max_new_tokens": LENGTH, "block_length": BLOCK, "stop": "none"}
    steps = {} if "threshold" in how else {"steps": STEPS}
    return models.denoised(adapter, method, ratio, chats, **{**shape, **steps, **how})


class WrittenOut:
    """One sample's sequence; `run` computes some of its places against the keys and values stored of all."""

    def __init__(self, adapter, chat) -> None:
        self.adapter, self.stack = adapter, adapter.model.model.language_model
        with DenoisingSession(adapter, NoReduction(), Budget("kept", 0.0)) as session:
            self.prompt = session.prompt(adapter.encode([chat])).arguments["inputs_embeds"][0]
        heads, size = adapter.facts.text.kv_heads, adapter.facts.text.head_dim
        total = len(self.prompt) + LENGTH
        self.stored = [
            [torch.zeros(2, total, size, dtype=torch.double) for _ in range(heads)]
            for _ in self.stack.layers
        ]
        #: Of each layer, what its attention and its MLP put out for the answer's places.
        self.attention = [torch.zeros(LENGTH, self.prompt.shape[1]).double() for _ in self.stored]
        self.mlp = [states.clone() for states in self.attention]

    @torch.no_grad()
    def run(self, ids, places) -> torch.Tensor:
        """Return logits of the answer at `places` of the sequence, over words that may be said."""
        words = self.adapter.model.get_input_embeddings()(torch.tensor(ids))
        x = torch.cat([self.prompt, words])[places]
        tables = self.stack.rotary_emb(x, torch.tensor([places]))
        for number, (layer, stored) in enumerate(zip(self.stack.layers, self.stored, strict=True)):
            z = layer.input_layernorm(x)
            q, k, v = (projected(layer, z, name) for name in "qkv")
            for head, pair in enumerate(stored):
                pair[0, places], pair[1, places] = rotated(k[head], tables), v[head]
            queries = [rotated(head, tables) for head in q]
            keys, values = ([pair[n] for pair in stored] for n in (0, 1))
            put_out = attended(layer, queries, keys, values)[0]
            x = x + put_out
            added = mlp(layer, x)
            x = x + added
            self.attention[number], self.mlp[number] = put_out[-LENGTH:], added[-LENGTH:]
        return self.logits(x)

    @torch.no_grad()
    def run_changed(self, ids, count) -> torch.Tensor:
        """Return logits of the answer; `count` of its places run in every layer but the first (dLLM-Cache)."""
        n_prompt, every = len(self.prompt), range(LENGTH)
        places = [n_prompt + place for place in every]
        x = self.adapter.model.get_input_embeddings()(torch.tensor(ids))
        tables = self.stack.rotary_emb(x, torch.tensor([places]))
        for number, (layer, stored) in enumerate(zip(self.stack.layers, self.stored, strict=True)):
            z = layer.input_layernorm(x)
            q, k, v = (projected(layer, z, name) for name in "qkv")
            former = torch.cat([pair[1, places] for pair in stored], 1)
            new = torch.cat(v, 1)
            likeness = [cosine(new[place], former[place]) for place in every]
            some = sorted(every, key=lambda place: likeness[place])[: count if number else LENGTH]
            for head, pair in enumerate(stored):
                pair[0, [places[p] for p in some]] = rotated(k[head], tables)[some]
                pair[1, places] = v[head]
            keys, values = ([pair[n] for pair in stored] for n in (0, 1))
            queries = [rotated(head, tables)[some] for head in q]
            self.attention[number][some] = attended(layer, queries, keys, values)[0]
            x = x + self.attention[number]
            self.mlp[number][some] = mlp(layer, x)[some]
            x = x + self.mlp[number]
        return self.logits(x)

    def logits(self, x) -> torch.Tensor:
        return self.stack.norm(x) @ self.adapter.model.lm_head.weight.T


def written_out(
    adapter, chat, block_cache=False, prompt_interval=1, generation_interval=1, transfer_ratio=0.25
):
    """Return the answer's words, and how many places of the sequence ran at each step."""
    sequence, ids, sizes = WrittenOut(adapter, chat), [models.MASK] * LENGTH, []
    n_prompt, step = len(sequence.prompt), 0
    #: Logits of every position, each of the last step in which it ran.
    latest = torch.zeros(n_prompt + LENGTH, adapter.facts.vocabulary, dtype=torch.double)
    first = n_prompt - adapter.facts.diffusion.shifted
    for start in range(0, LENGTH, BLOCK):
        for in_block, count in enumerate(REVEALS):
            whole = in_block == 0 if block_cache else step % prompt_interval == 0
            some = range(start, start + BLOCK) if block_cache else range(LENGTH)
            places = range(n_prompt + LENGTH) if whole else [n_prompt + place for place in some]
            if step % generation_interval:
                latest[list(places)] = sequence.run_changed(ids, int(LENGTH * transfer_ratio))
            else:
                latest[list(places)] = sequence.run(ids, list(places))
            sizes.append(0 if whole else len(places))
            reveal(ids, latest[first : first + LENGTH], range(start, start + BLOCK), count)
            step += 1
    return ids, sizes


@pytest.mark.sampled(24)
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("cache", CACHES)
def test_an_answer_is_that_of_the_loop_written_out(folder, cache, shifted) -> None:
    """In a batch of prompts of different lengths, and alone; `shifted`: each position predicts the next token."""
    adapter = models.load(folder, shifted=shifted)
    together = answers(adapter, **cache)
    for row, chat in enumerate(CHATS):
        expected, sizes = written_out(adapter, chat, **cache)
        alone = answers(adapter, [chat], **cache)
        assert alone.ids[0].tolist() == together.ids[row].tolist() == expected
        (denoising,) = denoising_records([together.records[row]])
        assert (list(denoising.windows), denoising.path) == (sizes, "stored")
    assert diffusion_block(together.records)["path"] == "stored"


@pytest.mark.slow
def test_a_stored_sequence_is_an_approximation(adapter) -> None:
    """Some logits differ from those of whole steps; at an interval of 1 none do."""
    whole = answers(adapter, output_logits=True)
    for cache in CACHES:
        assert (
            answers(adapter, output_logits=True, **cache).logits - whole.logits
        ).abs().max() > 1e-6
    same = answers(adapter, output_logits=True, prompt_interval=1)
    assert torch.equal(same.ids, whole.ids)
    assert (same.logits - whole.logits).abs().max() < 1e-10


def test_with_every_place_a_part_is_the_whole_answer(adapter) -> None:
    """At an interval of generations of 1 no step runs a part."""
    whole = answers(adapter, output_logits=True, prompt_interval=4)
    for more in ({"generation_interval": 2, "transfer_ratio": 1.0}, {"generation_interval": 1}):
        same = answers(adapter, output_logits=True, prompt_interval=4, **more)
        assert torch.equal(same.ids, whole.ids)
        assert (same.logits - whole.logits).abs().max() < 1e-10


@pytest.mark.sampled
@pytest.mark.parametrize("cache", CACHES)
def test_what_a_reducer_drops_stays_away_until_the_next_whole_step(adapter, cache) -> None:
    method = FastV(K=2)
    together = answers(adapter, method=method, ratio=0.5, output_logits=True, **cache)
    for row, chat in enumerate(CHATS):
        alone = answers(adapter, [chat], method, 0.5, output_logits=True, **cache)
        assert (together.logits[row] - alone.logits[0]).abs().max() < 1e-10
        denoising = together.records[row].denoising
        assert denoising == alone.records[0].denoising
        n = together.records[row].visual
        assert denoising["kept"] == [[n // 2]] * STEPS
        assert together.records[row].kv_entries == 2 * n + 3 * (n // 2)


def test_flops_of_a_window_are_those_of_its_places(adapter) -> None:
    """Per layer and place: linear maps of one token, and an attention to every token."""
    record = answers(adapter, CHATS[:1], block_cache=True).records[0]
    (denoising,) = denoising_records([record])
    whole = run_flops(NoReduction(), adapter.facts, answers(adapter, CHATS[:1]).records[0])
    counted = run_flops(NoReduction(), adapter.facts, record)
    assert counted.exact == counted.exact_full
    head = sum(head_flops(adapter.facts, scored) for scored in denoising.scored)
    tokens = record.visual + record.text + LENGTH
    share = sum(window / tokens if window else 1 for window in denoising.windows) / STEPS
    decoder = whole.exact.language - head
    assert counted.exact.language - head == pytest.approx(share * decoder, rel=1e-12)


def test_flops_of_a_part_are_those_of_its_places_and_of_all_values(adapter) -> None:
    how = {"prompt_interval": 3, "generation_interval": 3, "transfer_ratio": 0.5}
    record = answers(adapter, CHATS[:1], **how).records[0]
    (denoising,) = denoising_records([record])
    assert (denoising.windows, denoising.parts) == ((0, 12, 12) * 3, (0, 6, 6) * 3)
    stack, tokens = adapter.facts.text, record.visual + record.text + LENGTH
    per_layer = stack.hidden * stack.head_dim * (4 * stack.heads + 4 * stack.kv_heads)
    per_layer += 6 * stack.hidden * stack.intermediate + 4 * stack.heads * stack.head_dim * tokens
    values = 2 * stack.hidden * stack.kv_heads * stack.head_dim
    part = 12 * per_layer + (stack.layers - 1) * (6 * per_layer + 6 * values)
    whole = stack.layers * tokens * per_layer
    head = sum(head_flops(adapter.facts, scored) for scored in denoising.scored)
    counted = run_flops(NoReduction(), adapter.facts, record).exact
    assert counted.language - head == 3 * whole + 6 * part


def test_planned_windows_are_those_that_run(adapter) -> None:
    shape = ("model=seedling_diffusion", "benchmark=seedling_vqa", "+benchmark.generation.steps=8")
    block = denoising_of(
        *shape, "+benchmark.generation.block_length=8", "+benchmark.generation.block_cache=true"
    )
    assert block.windows == (0, 8, 8, 8) * 2
    interval = denoising_of(*shape, "+benchmark.generation.prompt_interval=3")
    assert interval.windows == (0, 16, 16) * 2 + (0, 16)
    part = denoising_of(
        *shape,
        "+benchmark.generation.prompt_interval=4",
        "+benchmark.generation.generation_interval=2",
    )
    assert (part.windows, part.parts) == ((0, 16, 16, 16) * 2, (0, 4, 0, 4) * 2)


def test_what_a_stored_sequence_cannot_do_is_refused(adapter) -> None:
    with pytest.raises(Refused, match=r"prompt_interval=2 leaves no states .* for D3ToM"):
        answers(adapter, method=D3ToM(K=1), ratio=0.5, prompt_interval=2)
    with pytest.raises(Refused, match=r"threshold=0.5: .* valid: engine.batch_size=1"):
        answers(adapter, block_cache=True, threshold=0.5)
    with pytest.raises(UserError, match=r"block_cache=true with generation.prefix_cache=true"):
        answers(adapter, block_cache=True, prefix_cache=True)
    for line, how in {
        "generation_interval=3 does not divide generation.prompt_interval=4": {
            "prompt_interval": 4,
            "generation_interval": 3,
        },
        "transfer_ratio=0.05 leaves none of 12 places": {
            "prompt_interval": 4,
            "generation_interval": 2,
            "transfer_ratio": 0.05,
        },
        "generation_interval=2 changes nothing without a prompt_interval": {
            "generation_interval": 2,
            "block_cache": True,
        },
        "transfer_ratio=0.5 changes nothing without a generation_interval": {
            "transfer_ratio": 0.5,
            "prompt_interval": 2,
        },
    }.items():
        with pytest.raises(UserError, match=line):
            answers(adapter, **how)
    alone = answers(adapter, CHATS[:1], block_cache=True, threshold=0.02)
    assert len(alone.records[0].denoising["kept"]) <= LENGTH
