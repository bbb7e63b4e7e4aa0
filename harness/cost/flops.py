"""Exact FLOPs of one prefill, from architecture facts and token counts.

The exact count takes one multiply-add as two FLOPs and counts every matrix product that runs for one sample; norms,
activations, softmax, rotary embedding and additions are left out, as are the convolutions (they split images into
patches; Molmo2's linear map of patches is one; those of SAM's neck, and GLM's, which merges patches, are 1 % of it).
For n tokens, width d, q = heads x head_dim, kv = kv_heads x head_dim, MLP width m (of all experts that one token goes
through), e experts:

| term                 | FLOPs of one layer                                                  |
| -------------------- | ------------------------------------------------------------------- |
| query and output     | 4 n d q                                                             |
| key and value        | 4 n d kv (grouped heads at their real size); 2 if keys are values    |
| scores and averaging | 4 p q over p token pairs: n (n + 1) / 2 if causal, n^2 if not, the   |
|                      | sum over images, frames or windows in a tower; as the masks show    |
|                      | where visual tokens see one another or layers slide                 |
| MLP                  | 2 n d m for each of its matrices: 3 if gated, 2 if not              |
| router               | 2 n d e                                                             |
| output gate          | 2 n d q: full layers between linear ones alone                      |
| linear attention     | 2 n d (2 h_k d_k + 3 h_v d_v + 2 h_v), and the gated delta rule in   |
|                      | chunks of c = 64: h_v n' (4 c d_k + 2 c d_v + 6 d_k d_v), n' = n up  |
|                      | to whole chunks; without its triangular solves, as in torch's count |
| relative positions   | 2 n q (rows + columns that a token sees): SAM alone                  |

| component   | content                                                                      |
| ----------- | ---------------------------------------------------------------------------- |
| `tower`     | the layers that run of the vision tower and of its stem, and the step that   |
|             | joins tokens between them; layers after the one that is read run, and count, |
|             | only if a method reads them                                                  |
| `projector` | its linear maps, on every unit that goes through it, and those of DeepStack's |
|             | projectors, through which every unit goes once; attention that pools patches |
| `text`      | every decoder layer on the tokens that enter it                              |
| `head`      | the output head at the last position, all that generation needs              |

The "FLOPs" that papers print are different counts. The two are never mixed: rows hold them separately as
`prefill_exact` and `paper`.

A paper's count of a prefill is of decoder layers alone, full-width keys, every pair of tokens. Of a layer on n tokens,
width d, MLP width m (of all experts that one token goes through, m_0 in layer 0 if it differs):

| paper      | one layer                   | equations    | counts                                               |
| ---------- | --------------------------- | ------------ | ---------------------------------------------------- |
| `d2pruner` | 4 n d^2 + 2 n^2 d + 2 n d m | of FastV     | multiply-adds, a two-matrix MLP (arXiv 2403.06764)   |
| `d3tom`    | 4 n d^2 + 2 n^2 d + 3 n d m | (13), (22)   | multiply-adds, a three-matrix MLP                    |
| `rtprune`  | 8 n d^2 + 4 n^2 d + 6 n d m | (20) to (24) | two FLOPs a multiply-add; m_0 dense, m = k m_e + m_s |

Routers are never counted, grouped keys are counted as if they were not grouped, and masked pairs are counted. The two
other papers print no FLOPs: AirCache does not change the prefill, and ParallelVLM measures times.

The count of `d3tom` (AAAI 2026, arXiv 2511.12280, equations 12 to 26) is of a denoising run: a sum over its T steps,
of which the first keeps all tokens for methods that need deciders, and for FastV, but not for the others. Visual tokens
are counted as fractions, as in the printed figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from espalier.harness.cost.facts import ModelFacts, StackFacts, WideFacts, Work

#: Where a layer's heads are stated.
Heads = StackFacts | WideFacts

#: Tokens of a chunk in which linear layers run (transformers, and the kernels of flash-linear-attention).
CHUNK = 64


@dataclass(frozen=True)
class Components:
    """Exact FLOPs of one prefill by part of the model."""

    tower: int
    projector: int
    text: int
    head: int

    @property
    def language(self) -> int:
        """FLOPs of the language model: decoder layers and head, as the papers delimit prefill."""
        return self.text + self.head

    @property
    def total(self) -> int:
        """FLOPs from pixels to the first token."""
        return self.tower + self.projector + self.language


@dataclass(frozen=True)
class SampleFlops:
    """One sample's prefill as it ran and with every token: the exact count, and every paper's count."""

    exact: Components
    exact_full: Components
    paper: Mapping[str, float]
    paper_full: Mapping[str, float]

    @property
    def share_of_full(self) -> float:
        """Exact language-model FLOPs over those of the same sample without reduction."""
        return self.exact.language / self.exact_full.language


def layer_flops(
    stack: StackFacts,
    tokens: int,
    causal: bool | None = None,
    first: bool = False,
    part: Heads | None = None,
) -> int:
    """Return the exact FLOPs of one layer on `tokens` tokens that all attend to each other.

    `causal=None` means the stack's own attention; `causal=False` counts every pair, as a fused kernel's mask is
    invisible to profilers that count whole products. `first` selects layer 0, `part` has a layer's heads where layers
    differ.
    """
    masked = stack.causal if causal is None else causal
    n_pairs = tokens * (tokens + 1) // 2 if masked else tokens * tokens
    return _linear(stack, first, part) * tokens + _pair(stack, part) * n_pairs


def linear_layer_flops(stack: StackFacts, tokens: int) -> int:
    """Return the exact FLOPs of one layer of linear attention on `tokens` tokens."""
    chunks = -(-tokens // CHUNK)
    return _linear_maps(stack) * tokens + _delta_rule(stack) * CHUNK * chunks


def linear_cost(stack: StackFacts) -> float:
    """Return the FLOPs that a layer of linear attention spends on each token of whole chunks; 0 if there is none."""
    return 0.0 if stack.linear is None else float(_linear_maps(stack) + _delta_rule(stack))


def quadratic(stack: StackFacts, first: bool = False) -> tuple[float, float]:
    """Return (a, b) such that one layer (layer 0 if `first`) costs `a n + b n^2` FLOPs under the stack's own mask.

    It is a full layer, or the mean layer where the heads differ; `linear_cost` has those of linear attention.
    """
    parts = [stack.heads_of(layer) for layer in range(stack.layers if stack.wide else 1)]
    linear = fmean(_linear(stack, first, part) for part in parts)
    pair = fmean(_pair(stack, part) for part in parts)
    return (linear + pair / 2, pair / 2) if stack.causal else (float(linear), float(pair))


def tower_flops(facts: ModelFacts, work: Work) -> int:
    """Return the exact FLOPs of the layers before the projector."""
    tower = facts.tower
    total = _encoder(tower, work.tokens, work.pairs, work.window_pairs)
    total += _linear(tower) * work.extra_tokens + _pair(tower) * work.extra_pairs
    total -= (_linear(tower) - mlp_flops(tower)) * work.spared_attention + mlp_flops(
        tower
    ) * work.spared_mlp
    total -= _pair(tower) * work.spared_pairs
    if facts.stem is not None:
        total += _stem_flops(facts.stem, work)
    if facts.stem is not None and facts.stem_joins:
        total += (_linear(facts.stem) - mlp_flops(facts.stem)) * work.stem_tokens
        total += _pair(facts.stem) * facts.stem_joins * work.stem_tokens
        total += 2 * facts.join_entries * work.tokens
    return total


def _stem_flops(stem: StackFacts, work: Work) -> int:
    """Count SAM, with windows padded at the border and relative positions in its attention.

    Those are two more products: of each query with a vector for every row, and for every column, that it sees.
    """
    total = _encoder(stem, work.stem_tokens, work.stem_pairs, work.stem_window_pairs)
    padding = work.stem_window_tokens - work.stem_tokens
    total += stem.window_layers * (_linear(stem) - mlp_flops(stem)) * padding
    lines = (stem.layers - stem.window_layers) * work.stem_lines
    lines += stem.window_layers * work.stem_window_lines
    return total + 2 * stem.heads * stem.head_dim * lines


def _encoder(stack: StackFacts, tokens: int, pairs: int, window_pairs: int) -> int:
    """Count a stack from its attended pairs: `window_layers` of its layers attend only inside windows."""
    attended = (stack.layers - stack.window_layers) * pairs + stack.window_layers * window_pairs
    return stack.layers * _linear(stack) * tokens + _pair(stack) * attended


def projector_flops(facts: ModelFacts, units: int, repeated: int = 0, pooled: int = 0) -> int:
    """Return the exact FLOPs of the projectors' linear maps on `units` units, plus `repeated` units projected twice.

    Merged units go through the projector a second time, but not through those of DeepStack. Each of the `pooled`
    patches costs a key and a value of the first map's shape, and a score and an average of its width.
    """
    passes = units * (1 + len(facts.deepstack)) + repeated
    attention = 4 * pooled * (facts.projector[0] + 1) * facts.projector[1]
    return 2 * passes * facts.projector_entries + attention


def text_flops(
    facts: ModelFacts,
    entering: Sequence[int],
    n_text: int,
    causal: bool | None = None,
    pairs: Sequence[int] = (),
) -> int:
    """Return the exact FLOPs of the decoder layers, layer l entered by `entering[l]` tokens.

    `pairs` are the attended pairs of each layer, where its mask is not the stack's own.
    """
    text = facts.text
    if pairs:
        linear = sum(
            attending_flops(text, n, visual + n_text, 0) for n, visual in enumerate(entering)
        )
        return linear + sum(
            attending_flops(text, n, 0, attended) for n, attended in enumerate(pairs)
        )
    return sum(
        linear_layer_flops(text, visual + n_text)
        if text.is_linear(layer)
        else layer_flops(text, visual + n_text, causal, layer == 0, text.heads_of(layer))
        for layer, visual in enumerate(entering)
    )


def attending_flops(stack: StackFacts, layer: int, tokens: int, pairs: int) -> int:
    """Return the exact FLOPs of a decoder layer on `tokens` tokens with so many attended pairs."""
    part = stack.heads_of(layer)
    return _linear(stack, layer == 0, part) * tokens + _pair(stack, part) * pairs


def cached_prompt_flops(
    facts: ModelFacts, entries: Sequence[int], n_text: int, queries: int, part: int = 0
) -> int:
    """Return the exact FLOPs of `queries` new tokens that attend to a cached prompt and to each other.

    Args:
        facts: the model.
        entries: visual entries that each decoder layer attends to.
        n_text: other entries of the prompt.
        queries: tokens that run.
        part: those of them that run in each layer but the first, where of the others only values are computed; 0:
            all.
    """
    stack, total = facts.text, 0
    values = 2 * stack.hidden * stack.kv_heads * stack.head_dim
    for layer, visual in enumerate(entries):
        running = part if part and layer else queries
        pairs = _pair(stack) * (visual + n_text + queries)
        total += running * (_linear(stack, first=layer == 0) + pairs)
        total += (queries - running) * values
    return total


def head_flops(facts: ModelFacts, positions: int = 1) -> int:
    """Return the exact FLOPs of the output head at `positions` positions."""
    return 2 * positions * facts.text.hidden * facts.vocabulary


def sample_flops(
    facts: ModelFacts,
    entering: Sequence[int],
    n_visual: int,
    n_text: int,
    work: Work,
    pairs: Sequence[int] = (),
    full_pairs: Sequence[int] = (),
) -> SampleFlops:
    """Count one sample's prefill.

    Args:
        facts: the model.
        entering: visual tokens that entered each decoder layer.
        n_visual: visual tokens before any reduction.
        n_text: other tokens of the prompt.
        work: work before the decoder; units that went through the projector twice count twice.
        pairs: attended pairs of each decoder layer, where masks are not the stack's own.
        full_pairs: the same before any reduction.
    """
    full, head = (n_visual,) * len(entering), head_flops(facts)
    untouched = work.untouched()

    def components(counts: Sequence[int], work: Work, pairs: Sequence[int]) -> Components:
        projector = projector_flops(facts, work.units, work.reprojected, work.pooled)
        text = text_flops(facts, counts, n_text, pairs=pairs)
        return Components(tower_flops(facts, work), projector, text, head)

    return SampleFlops(
        exact=components(entering, work, pairs),
        exact_full=components(full, untouched, full_pairs),
        paper=counts_of(facts.text, [visual + n_text for visual in entering]),
        paper_full=counts_of(facts.text, [visual + n_text for visual in full]),
    )


def flops_block(samples: Iterable[SampleFlops]) -> dict[str, Any]:
    """Return the `flops` block of a row: means over samples, shares as ratios of those means.

    `prefill_exact` is the language model's exact count; tower and projector are separate entries. `prefill_paper` and
    its share are FastV's and D2Pruner's; `paper` has every paper's count.
    """
    counted = list(samples)
    language = fmean(s.exact.language for s in counted)
    total = fmean(s.exact.total for s in counted)
    paper = {name: fmean(s.paper[name] for s in counted) for name in PAPERS}
    paper_full = {name: fmean(s.paper_full[name] for s in counted) for name in PAPERS}
    return {
        "prefill_exact": language,
        "prefill_paper": paper["d2pruner"],
        "share_of_full": language / fmean(s.exact_full.language for s in counted),
        "tower": fmean(s.exact.tower for s in counted),
        "projector": fmean(s.exact.projector for s in counted),
        "share_with_tower": total / fmean(s.exact_full.total for s in counted),
        "share_of_full_paper": paper["d2pruner"] / paper_full["d2pruner"],
        "paper": paper,
        "paper_full": paper_full,
    }


def _linear(stack: StackFacts, first: bool = False, part: Heads | None = None) -> int:
    """Return the FLOPs that one layer, with the heads of `part`, spends on each token."""
    part = part or stack
    queries, keys = stack.heads * part.head_dim, part.kv_heads * part.head_dim
    maps = 2 if isinstance(part, WideFacts) else 4  # keys that are values too have one map
    dense = first and stack.first_intermediate is not None
    width = stack.first_intermediate if dense else stack.intermediate
    assert width is not None  # implied by `dense`
    router = 0 if dense else stack.experts
    gate = 0 if stack.linear is None else 2 * queries
    return stack.hidden * (4 * queries + maps * keys + 2 * router + gate) + mlp_flops(stack, width)


def _linear_maps(stack: StackFacts) -> int:
    """Return the FLOPs that the maps of a layer of linear attention, and its MLP, spend on each token."""
    assert stack.linear is not None
    part = stack.linear
    keys, values = part.key_heads * part.key_dim, part.value_heads * part.value_dim
    maps = 2 * keys + 3 * values + 2 * part.value_heads + stack.experts
    return 2 * stack.hidden * maps + mlp_flops(stack)


def _delta_rule(stack: StackFacts) -> int:
    """Return the FLOPs that a layer's gated delta rule spends on each token of a chunk."""
    assert stack.linear is not None
    heads, keys, values = stack.linear.value_heads, stack.linear.key_dim, stack.linear.value_dim
    return heads * (CHUNK * (4 * keys + 2 * values) + 6 * keys * values)


def mlp_flops(stack: StackFacts, width: int | None = None) -> int:
    """Return the exact FLOPs that one layer's MLP, `width` wide, spends on each token."""
    width = stack.intermediate if width is None else width
    return 2 * (3 if stack.gated else 2) * stack.hidden * width


def _pair(stack: StackFacts, part: Heads | None = None) -> int:
    """Return the FLOPs that one layer, with the heads of `part`, spends on each pair of tokens that attend."""
    return 4 * stack.heads * (part or stack).head_dim


def attention_macs(hidden: int, tokens: float, keys: float | None = None) -> float:
    """Return 4 n d^2 + 2 n k d, the multiply-adds of one layer's attention; k is n unless other keys were cached."""
    return 4 * tokens * hidden**2 + 2 * tokens * (tokens if keys is None else keys) * hidden


def mlp_macs(hidden: int, intermediate: int, tokens: float, matrices: int) -> float:
    """Return the multiply-adds of one layer's MLP."""
    return matrices * tokens * hidden * intermediate


#: For each layer: tokens that enter it, words included, or keys that they attend to.
Counts = Sequence[float]


def d2pruner(stack: StackFacts, tokens: Counts, keys: Counts | None = None) -> float:
    """Return the count of D2Pruner (arXiv 2512.19443, Table 4) and FastV."""
    return _macs(stack, tokens, keys, matrices=2)


def d3tom(stack: StackFacts, tokens: Counts, keys: Counts | None = None) -> float:
    """Return the count of D3ToM (arXiv 2511.12280, equations 13 and 22) for one forward pass."""
    return _macs(stack, tokens, keys, matrices=3)


def rtprune(stack: StackFacts, tokens: Counts, keys: Counts | None = None) -> float:
    """Return the count of RTPrune (arXiv 2605.00392, equations 20 to 25); layer 0 has its own width."""
    return 2 * _macs(stack, tokens, keys, matrices=3, first=stack.first_intermediate)


def _macs(
    stack: StackFacts, tokens: Counts, keys: Counts | None, matrices: int, first: int | None = None
) -> float:
    """Return the multiply-adds of all layers; `first` is the MLP width of layer 0, where it counts."""
    widths = [first or stack.intermediate, *[stack.intermediate] * (len(tokens) - 1)]
    return sum(
        attention_macs(stack.hidden, n, key_count) + mlp_macs(stack.hidden, width, n, matrices)
        for n, key_count, width in zip(tokens, keys or tokens, widths, strict=True)
    )


def split_layer(stack: StackFacts, visual: float, kept: float) -> float:
    """Return what D3ToM's (15) and (16) add to C(n) of the layer inside which tokens merge; usually below 0.

    Its MLP sees only the `kept` visual tokens, and each of the others is compared with each of those.
    """
    dropped = visual - kept
    return 2 * dropped * kept * stack.hidden - mlp_macs(
        stack.hidden, stack.intermediate, dropped, 3
    )


def counts_of(stack: StackFacts, tokens: Counts, keys: Counts | None = None) -> dict[str, float]:
    """Return every paper's count of one forward pass, by the name of the paper's method.

    Args:
        stack: the decoder.
        tokens: entering each layer, words included.
        keys: attended to in each layer, including their own; None: only their own. No paper counts a cache, so this is
            its formula with n^2 read as queries times keys.
    """
    return {name: count(stack, tokens, keys) for name, count in PAPERS.items()}


#: The papers that print FLOPs, by their method's name.
PAPERS: Mapping[str, Callable[[StackFacts, Counts, Counts | None], float]] = {
    "d2pruner": d2pruner,
    "d3tom": d3tom,
    "rtprune": rtprune,
}
