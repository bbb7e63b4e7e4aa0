"""Effect of cache compressors on reading digits in sequence: `python -m lab.bench.evicted_digits ratio=0.9`.

Reads scenes with known digits. First, from runs with the full cache: the attention of the last prompt token
and of each generated digit to the patches of the first four digits. Then for each compressor: the score, how
often the first to fourth digit is right, the share of each digit's patches that is kept (mean over layers), and the
share of the answer's attention to the picture that goes to kept entries. Last, selections that are impossible
before the answer is known: the entries that it attends to, and random ones with and without those of digits.
Every compressor by default; everything else is a config override as for run.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import max_pool2d

from espalier.harness.config.build_spec import specs_of
from espalier.harness.kinds.lookup import label_of
from espalier.harness.kinds.reducer import WHOLE
from espalier.harness.seedling.scene_benchmarks import (
    ocr_metrics,
    sample_objects,
    sample_scene,
    samples,
)
from espalier.harness.tools.calibration.calibration_images import question
from espalier.methods.compressor import CacheCompressor, CacheView
from espalier.methods.none import NoReduction
from espalier.methods.select.attention import rows
from lab.bench.bench_page import bench_command
from lab.bench.object_patches import covered_patches

if TYPE_CHECKING:
    from espalier.harness.models.adapter import Adapter

#: Number of scenes of seedling_ocr, and of digits per scene with separate figures.
FIRST, SCENES, PLACES = 4_000_000, 100, 4
#: Patches along an edge of the embedded model's grid.
SIDE = 12


@dataclass(frozen=True)
class Page:
    """A scene to read: its record, its chat, and for each digit in reading order the patches (V,) that show it."""

    sample: dict[str, Any]
    chat: list[dict[str, Any]]
    digits: tuple[Tensor, ...]


@dataclass(frozen=True)
class FixedScores(CacheCompressor):
    """Ranks by given scores (1, N) of each layer."""

    scores: tuple[Tensor, ...] = ()

    def score(self, view: CacheView) -> Tensor:
        """Return the given scores."""
        return self.scores[view.layer]


@dataclass(frozen=True)
class Reader(CacheCompressor):
    """Records the attention of a prompt's last `count` queries to the candidates, (H, count, N) per layer."""

    count: int = 1
    noted: list[Tensor] = field(default_factory=list)

    def score(self, view: CacheView) -> Tensor:
        """Return zeros."""
        length = view.queries.shape[1]
        last = torch.arange(length - self.count, length)
        attention = torch.cat([*rows(view.queries, view.keys, view.scaling, last)], dim=1)
        self.noted.append(attention[:, :, view.candidates])
        return torch.zeros(1, len(view.candidates))


@dataclass(frozen=True)
class RecordingCompressor(CacheCompressor):
    """Wraps another compressor and records the kept candidates (H, K) of each layer."""

    inner: CacheCompressor = field(default_factory=FixedScores)
    kept: list[Tensor] = field(default_factory=list)

    def score(self, view: CacheView) -> Tensor:
        """Return the wrapped compressor's scores."""
        return self.inner.score(view)

    def allocate(self, scores: Sequence[Tensor], total: int) -> Tensor:
        """Return the wrapped compressor's budgets."""
        return self.inner.allocate(scores, total)

    def keep(self, scores: Tensor, count: int) -> Tensor:
        """Record the wrapped compressor's selection."""
        self.kept.append(self.inner.keep(scores, count))
        return self.kept[-1]

    def merge(self, scores: Tensor, kept: Tensor) -> Tensor | None:
        """Return the wrapped compressor's merge targets."""
        return self.inner.merge(scores, kept)


def pages() -> Iterator[Page]:
    """Yield the scenes."""
    for sample in samples("seedling_ocr", "test", 0, FIRST, SCENES):
        scene = sample_scene(sample)
        boxes = [item.box for item in sample_objects(sample) if item.kind == "digit"]
        digits = tuple(covered_patches([box], SIDE, scene.image.shape[0]) for box in boxes)
        yield Page(sample, question(scene.to_pil(), sample["question"]), digits)


def answered(
    adapter: Adapter,
    page: Page,
    number: int,
    method: CacheCompressor,
    ratio: float,
    prefix: str = "",
) -> str:
    """Return the answer to a page under a compressor, continuing the words `prefix`."""
    # Imports transformers, which takes seconds, after main has set it offline.
    from espalier.harness.engine.eviction import CacheBudget
    from espalier.harness.engine.session import Session

    inputs, tokenizer = dict(adapter.encode([page.chat])), adapter.processor.tokenizer
    if prefix:
        prefix_ids = torch.tensor([tokenizer(prefix, add_special_tokens=False)["input_ids"]])
        inputs["input_ids"] = torch.cat([inputs["input_ids"], prefix_ids], dim=1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    evicting = CacheBudget(method, ratio)
    with Session(adapter, NoReduction(), WHOLE, evicting=evicting, timed=False) as session:
        length = 1 if prefix else 16
        ids = session.generate(inputs, [str(number)], max_new_tokens=length, do_sample=False).ids
    return str(tokenizer.decode(ids[0].tolist(), skip_special_tokens=True)).strip()


def looks(adapter: Adapter, page: Page) -> list[Tensor]:
    """Return per layer the attention (H, 1 + T, N) of the last word and the T true digits to the picture."""
    truth = page.sample["answer"]
    reader = Reader(count=1 + len(truth.split()))
    answered(adapter, page, 0, reader, 0.5, truth)
    return reader.noted


def say_looks(scenes: Sequence[Page], attentions: Sequence[Sequence[Tensor]]) -> None:
    """Print per layer each query's attention to the first digits, mean over heads and scenes."""
    print("attention to digits 1, 2, 3, 4 of the last word, and of the first said digits")
    for layer in range(len(attentions[0])):
        line = []
        for query in range(PLACES):
            paid: list[list[float]] = [[] for _ in range(PLACES)]
            for page, layers in zip(scenes, attentions, strict=True):
                if query < layers[layer].shape[1]:
                    row = layers[layer][:, query].mean(dim=0)
                    for place, patches in enumerate(page.digits[:PLACES]):
                        paid[place].append(float(row[patches].sum()))
            line.append(" ".join(f"{fmean(shares):.2f}" for shares in paid))
        print(f"  layer {layer}: {' | '.join(line)}", flush=True)


def say(
    name: str,
    adapter: Adapter,
    scenes: Sequence[Page],
    attentions: Sequence[Sequence[Tensor]],
    methods: Sequence[CacheCompressor],
    ratio: float,
) -> None:
    """Print one line for a compressor; `methods` has one for each scene."""
    scores, mass = list[float](), list[float]()
    right: list[list[float]] = [[] for _ in range(PLACES)]
    stored: list[list[float]] = [[] for _ in range(PLACES)]
    for number, (page, layers, method) in enumerate(zip(scenes, attentions, methods, strict=True)):
        watched = RecordingCompressor(inner=method)
        answer = answered(adapter, page, number, watched, ratio)
        scores.append(ocr_metrics(page.sample, answer)["one_minus_ned"])
        words, truth = answer.split(), page.sample["answer"].split()
        stays = [
            torch.zeros(len(kept), page.digits[0].numel()).scatter_(1, kept, 1.0)
            for kept in watched.kept
        ]
        for place, patches in enumerate(page.digits[:PLACES]):
            right[place].append(float(words[place : place + 1] == truth[place : place + 1]))
            stored[place].append(fmean(float(kept_mask[:, patches].mean()) for kept_mask in stays))
        mass += [
            float((paid[:, 1:] * kept_mask.unsqueeze(1)).sum() / paid[:, 1:].sum())
            for paid, kept_mask in zip(layers, stays, strict=True)
        ]
    figures = (" ".join(f"{fmean(values):.2f}" for values in table) for table in (right, stored))
    print(f"{name:44}{fmean(scores):.3f}  {'  '.join(figures)}  {fmean(mass):.2f}", flush=True)


@bench_command
def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; return 0, or 2 after one line on standard error."""
    # Imports transformers, which reads the variables above at import time.
    from espalier.harness.models.build_adapter import load_adapter
    from espalier.harness.specs.catalogue import build_method

    overrides = list(sys.argv[1:] if argv is None else argv)
    cells = ["-m", "+experiment=kv", "ratio=0.9", *overrides]
    specs = specs_of(*cells, "benchmark=seedling_ocr")
    adapter = load_adapter(specs[0].model)
    scenes = list(pages())
    attentions = [looks(adapter, page) for page in scenes]
    say_looks(scenes, attentions)
    print(f"{'':44}score  right 1 to 4         left of digits 1 to 4  attention")
    for spec in specs:
        method = build_method(spec.method.name, spec.method.params)
        name = f"{spec.method.name} {label_of(spec)} {spec.budget.ratio:g}"
        if isinstance(method, CacheCompressor):
            say(name, adapter, scenes, attentions, [method] * len(scenes), spec.budget.ratio)
    noise = torch.Generator().manual_seed(0)
    ranks: dict[str, Callable[[Page, Tensor], Tensor]] = {
        "what the answer attends to": lambda page, paid: paid[:, 1:].sum(dim=1).mean(dim=0),
        "random, digits' patches never": lambda page, paid: _drawn(noise, -_digit_mask(page)),
        "random, and their neighbours never": lambda page, paid: _drawn(noise, -_around(page)),
        "random, digits' patches first": lambda page, paid: _drawn(noise, _digit_mask(page)),
    }
    for name, rank in ranks.items():
        ranked = [
            FixedScores(scores=tuple(rank(page, paid).unsqueeze(0) for paid in layers))
            for page, layers in zip(scenes, attentions, strict=True)
        ]
        say(name, adapter, scenes, attentions, ranked, specs[0].budget.ratio)
    return 0


def _drawn(noise: torch.Generator, shift: Tensor) -> Tensor:
    """Return (N,) random scores below 1, shifted."""
    return torch.rand(len(shift), generator=noise) + shift


def _digit_mask(page: Page) -> Tensor:
    """Return (N,): 1.0 where a digit is."""
    return torch.stack(page.digits).any(dim=0).float()


def _around(page: Page) -> Tensor:
    """Return (N,): 1.0 where a digit is, or next to one."""
    return max_pool2d(_digit_mask(page).view(1, SIDE, SIDE), 3, stride=1, padding=1).flatten()


if __name__ == "__main__":
    sys.exit(main())
