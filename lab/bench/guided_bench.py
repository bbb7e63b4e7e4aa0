"""Which visual tokens a video draft model needs: `make bench-guided`, lab/measured/guided.md.

The embedded video model captions held-out clips from all visual tokens. Its draft then sees a chosen part of the
tokens and predicts each word of the caption from the words before it. The share that it predicts
like the target is the acceptance rate of a first drafted token, independent of time and window. Each
subset is tested at its original positions and with gaps closed. Words are grouped by kind, and the first wrong word
of each caption is recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from rich.progress import track
from torch import Tensor

from espalier.harness.config.build_spec import specs_of
from espalier.harness.cost.budget import Budget
from espalier.harness.decoding.speculative.drafts import Draft
from espalier.harness.decoding.speculative.guidance import Guidance, GuidedReducer
from espalier.harness.errors import UserError
from espalier.harness.seedling.video.clip_benchmarks import sample_clip, samples
from espalier.methods.base import Need, Plan, Site, TokenReducer, View
from espalier.methods.uvprune import Criterion, UVPrune
from lab.bench.bench_page import bench_command, parser
from lab.bench.clip_subsets import SeenClip, clip_subsets
from lab.bench.guided_words import CaptionRecord, Setting
from lab.bench.speculative_bench import FIRST_CLIP, clip_chat
from lab.training.clip_features import acts_of, owners_of

if TYPE_CHECKING:
    from espalier.harness.decoding.speculative.cached_model import CachedModel, Prefill
    from espalier.harness.models.adapter import Adapter
    from espalier.harness.models.chat_media import Chat

Places = Literal["original", "renumbered"]
PLACES: tuple[Places, ...] = ("original", "renumbered")
RATIOS = (0.5, 0.75, 0.9, 0.95, 0.98)
#: Layers before which the target selects tokens, including the depth-scaled default.
LAYERS = (2, 4, 6)
LIMIT, CHUNK = 512, 64


@dataclass(frozen=True)
class Rules(TokenReducer):
    """Keeps all tokens and stores the scores of every criterion in `signals`."""

    rules: dict[str, UVPrune]
    signals: dict[str, Tensor]

    @property
    def adaptive(self) -> bool:
        """Ignore the requested count and keep all."""
        return True

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the distinct sites of all rules."""
        sites = {site: None for rule in self.rules.values() for site in rule.sites(depth)}
        return tuple(sorted(sites, key=lambda site: site.layer))

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the signals that the site's rules read."""
        wanted = (need for _, rule in self._at(site) for need in rule.needs(site))
        return tuple(dict.fromkeys((Need("projected"), *wanted)))

    def plan(self, view: View, keep: int) -> Plan:
        """Keep all tokens of one prompt."""
        del keep
        self.signals["features"] = view.signals["projected"][0].clone()
        for name, rule in self._at(view.site):
            self.signals[name] = rule.scores(view)[0].clone()
        return Plan(torch.arange(view.tokens.shape[1])[None])

    def _at(self, site: Site) -> Iterator[tuple[str, UVPrune]]:
        return ((name, rule) for name, rule in self.rules.items() if site.layer == rule.L)


def rules() -> dict[str, UVPrune]:
    """Return UV-Prune's criteria at the default layer, and its default criterion at later layers."""
    criteria: dict[str, Criterion] = {
        "UV-Prune": "similarity_variation",
        "similarity": "similarity",
        "attention variation": "attention_variation",
        "attention": "attention",
    }
    by_criterion = {name: UVPrune(LAYERS[0], criterion) for name, criterion in criteria.items()}
    return by_criterion | {f"UV-Prune, layer {layer}": UVPrune(layer) for layer in LAYERS[1:]}


def measured(target: Adapter, draft: Adapter, clips: int, frames: int) -> Iterator[CaptionRecord]:
    """Yield captions one by one. Cost: about ten seconds each on a core."""
    clip_samples = samples("seedling_video_caption", "test", 0, FIRST_CLIP, clips, frames)
    for number, sample in enumerate(track(clip_samples, disable=not sys.stderr.isatty())):
        yield _caption_record(target, draft, sample, torch.Generator().manual_seed(number))


def _caption_record(
    target: Adapter, draft: Adapter, sample: dict[str, Any], generator: torch.Generator
) -> CaptionRecord:
    clip = sample_clip(sample)
    chat: Chat = clip_chat(clip, sample["question"])
    signals: dict[str, Tensor] = {}
    caption = _answer(_side(target, chat, Rules(rules(), signals)))
    owner = owners_of(clip)
    clip_tokens = SeenClip(
        len(owner),
        signals.pop("features"),
        signals | {"UV-Prune, sign turned": -signals["UV-Prune"]},
        torch.from_numpy(owner.ravel() >= 0),
        torch.from_numpy(acts_of(clip, owner).ravel() > 0),
    )
    right: dict[Setting, list[bool]] = {}
    shares: dict[tuple[str, float], tuple[float, float]] = {}
    count = len(clip_tokens.features)
    prompt = _prompt(draft, chat)
    for ratio in (0.0, *RATIOS):
        keep = round(count * (1 - ratio))
        all_tokens = {"everything": torch.arange(count)}
        for name, kept in (
            clip_subsets(clip_tokens, keep, generator) if ratio else all_tokens
        ).items():
            shares[name, ratio] = clip_tokens.shares(kept)
            for places in PLACES if ratio else PLACES[:1]:
                side = _side(draft, prompt, GuidedReducer(lambda: Guidance(kept, count)), places)  # noqa: B023
                predicted = side.rows([], Draft(tuple(caption)))[:-1]
                right[name, ratio, places] = [
                    int(token) == target_token
                    for token, target_token in zip(predicted, caption, strict=True)
                ]
    return CaptionRecord(caption, right, shares)


def _answer(side: CachedModel) -> list[int]:
    """Return the greedy answer, with the end of sequence."""
    ends = side.adapter.model.generation_config.eos_token_id
    answer: list[int] = []
    while len(answer) < LIMIT and ends not in answer:
        answer += side.draft(answer, CHUNK).tokens
    return answer[: answer.index(ends) + 1] if ends in answer else answer[:LIMIT]


def _prompt(adapter: Adapter, chat: Chat) -> Any:
    """Return the decoder's input, so the tower runs once for all subsets."""
    # The engine imports transformers, after main has set it offline.
    from espalier.harness.engine.session import Session
    from espalier.methods.none import NoReduction

    with Session(adapter, NoReduction(), Budget("kept", 0.0), timed=False) as session:
        return session.prompt(adapter.encode([chat]))


def _side(
    adapter: Adapter, prompt: Any, method: TokenReducer, places: Places = "original"
) -> CachedModel:
    """Return a model that answers a chat, or a prompt from an earlier run."""
    # As above.
    from espalier.harness.decoding.speculative.cached_model import CachedModel
    from espalier.harness.decoding.speculative.samplers import resolved_config, sampler_of
    from espalier.harness.engine.session import Session

    inputs = adapter.encode([prompt]) if isinstance(prompt, list) else prompt
    ids = inputs["input_ids"] if isinstance(prompt, list) else torch.zeros(1, 1, dtype=torch.long)
    config = resolved_config(adapter, {"max_new_tokens": LIMIT, "do_sample": False})

    def prefill(cache: Any) -> tuple[Tensor, Tensor]:
        with Session(
            adapter, method, Budget("kept", 0.0), positions=places, timed=False
        ) as session:
            return session.prefill(inputs, cache)

    run: Prefill = prefill
    return CachedModel(adapter, sampler_of(adapter, config, ids), LIMIT + CHUNK, run)


@bench_command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, print the table and write the page if requested; return 0, or 2 for bad input."""
    arguments = parser("guided")
    arguments.add_argument("--clips", type=int, default=40)
    arguments.add_argument("--frames", type=int, default=112)
    arguments.add_argument(
        "--write", type=Path, help="folder for the page, its figures and its picture"
    )
    options = arguments.parse_args(argv)
    if options.clips < 2 or not 8 <= options.frames <= 112:
        raise UserError("--clips is 2 or more, --frames 8 to 112")
    # Plotting takes half a second to import, which is not needed to refuse bad input.
    from lab.bench.guided_page import page, write_page

    target, draft = (_loaded(name) for name in ("seedling_video", "seedling_video_draft"))
    captions = list(measured(target, draft, options.clips, options.frames))
    print(page(captions, options.frames))
    if options.write is not None:
        write_page(captions, options.frames, options.write)
    return 0


def _loaded(name: str) -> Adapter:
    # transformers takes seconds to import, which is not needed to refuse bad input.
    from espalier.harness.models.build_adapter import load_adapter

    return load_adapter(specs_of(f"model={name}", "method=none", "ratio=0")[0].model)


if __name__ == "__main__":
    sys.exit(main())
