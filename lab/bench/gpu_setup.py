"""Settings of the GPU benchmark: the device, the models, and the repetitions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from espalier.harness.decoding.speculative.state_machine import DrafterLost
from espalier.harness.errors import UserError
from lab.bench.bench_setup import Figure

#: Faults of the machine: full memory, drivers and kernels, missing packages, a draft process that ends, and
#: refusals by the harness (a model that cannot fit). Anything else is a bug in the benchmark.
FAULTS = (RuntimeError, MemoryError, OSError, ImportError, DrafterLost, UserError)


@dataclass(frozen=True)
class Note:
    """A remark on the figures: omissions with their reason, or failures."""

    text: str
    failed: bool = False


#: Output of a part, yielded as soon as available.
Found = Iterator[Figure | Note]

RANDOM = ("model.weights=random", "model.dtype=bfloat16")


@dataclass(frozen=True)
class GpuPlan:
    """One run of the benchmark; the defaults take less than ten minutes on a data-centre GPU.

    Attributes:
        device: device of everything else.
        second: a second GPU for drafts, or None.
        target: overrides for the large model.
        draft: overrides for its draft.
        ratio: share of visual tokens dropped.
        rounds: timed prefills, and pairs of calls with and without a session.
        tokens: new tokens per timed answer.
        answers: timed answers, and counted answers of the embedded pair per kind.
        sizes: of selections: visual tokens, width, tokens per kept token, rounds.
        methods: names in conf/method of timed selections; None: all.
        longest: largest quadratic estimate in seconds for trying a selection at a larger size.
        kinds: kinds of answers of the embedded pair (`lab.bench.speculative_bench`).
        decoders: overrides of their decoders: sequential, parallel, and parallel with a pruned draft.
        visual: visual tokens before timed single steps.
        copied: bytes of a copy that measures bandwidth.
    """

    device: str = "cuda:0"
    second: str | None = None
    target: tuple[str, ...] = ("model=llava_ov_7b", *RANDOM)
    draft: tuple[str, ...] = ("model=llava_ov_0_5b", *RANDOM)
    ratio: float = 0.9
    rounds: int = 8
    tokens: int = 64
    answers: int = 12
    sizes: tuple[tuple[int, int, int, int], ...] = (
        (576, 4096, 9, 9),
        (2880, 4096, 9, 5),
        (25088, 1024, 10, 3),
    )
    methods: tuple[str, ...] | None = None
    longest: float = 10.0
    kinds: tuple[str, ...] = ("captions", "long")
    decoders: tuple[tuple[str, ...], ...] = (
        ("method=vanilla_sd", "method.params.gamma=3"),
        ("method=pearl",),
        ("method=parallelvlm", "ratio=0.5"),
    )
    visual: int = 25088
    copied: int = 2**30

    def counts(self) -> dict[str, Any]:
        """Return the plan as the page states it."""
        sizes = "; ".join(f"{n:,} of width {d:,}, {r} rounds" for n, d, _, r in self.sizes)
        return {
            "models": f"`{' '.join(self.target)}` and as its draft `{' '.join(self.draft)}`",
            "prefill and machinery": f"{self.rounds} rounds at ratio {self.ratio}, one more not counted",
            "decode": f"{self.answers} answers of {self.tokens} tokens",
            "selection": f"{sizes}, fp32; nothing that would take more than {self.longest:g} s",
            "embedded pair": f"{self.answers} answers of each kind, warm-up not counted",
            "single steps": f"medians, after {self.visual:,} visual tokens",
        }


def tried(label: str, outcomes: Found) -> Found:
    """Yield all figures; a fault ends them with a note."""
    try:
        yield from outcomes
    except FAULTS as error:
        words = " ".join(str(error).split())
        yield Note(f"{label}: {type(error).__name__}: {words}", failed=True)


#: For testing the benchmark without a GPU: every part in seconds, on the embedded models.
SMALL = GpuPlan(
    device="cpu",
    target=("model=seedling",),
    draft=("model=seedling_draft",),
    ratio=0.5,
    rounds=2,
    tokens=4,
    answers=1,
    sizes=((36, 96, 9, 2), (64, 96, 9, 2)),
    methods=("divprune", "fastv_official", "none", "random_layer2"),
    kinds=("captions",),
    decoders=(("method=parallelvlm", "ratio=0.5"),),
    visual=60,
    copied=2**20,
)
