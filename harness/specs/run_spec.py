"""The frozen description of one run: plain data, which harness/config builds from a command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, get_args

from espalier.harness.cost.facts import ModelFacts
from espalier.harness.media import frame_rules as rules
from espalier.harness.media.images import TRANSPARENCY
from espalier.harness.specs.judge_spec import JudgeSpec
from espalier.harness.store.files.lease import USUAL, Terms

if TYPE_CHECKING:
    # Brings in torch, seconds that a mistake in a config need not wait for.
    from espalier.harness.cost.budget import Budget
    from espalier.harness.specs.benchmark_spec import BenchmarkSpec

DTYPES = ("float32", "float16", "bfloat16")
ATTENTIONS = ("sdpa", "eager", "flash_attention_2")
WEIGHTS = ("trained", "random")
VIDEO_RULES = rules.NAMES
SHORT_VIDEOS = rules.SHORT
MEDIA = ("optional", "required")
#: `model.boxes`: how a model writes a box; tasks/rec/boxes.py reads them.
BOXES = ("unit", "square", "pixels", "thousand", "tagged")
TRANSPORTS = ("auto", "sequential", "processes", "threads")
#: `engine.backend`: tokens leave, or the slow reference hides them.
Backend = Literal["drop", "emulate"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
#: `engine.share`: what cells of a sweep that differ only in method and ratio do once for all of them.
SHARES = ("none", "prefix")
#: `engine.positions`: a policy (`Positions` of methods/base.py), or whatever the method's released code does.
#: Who says ordinary answers: the engine's own loop, or the library's `generate`.
DecodeLoop = Literal["loop", "generate"]
DECODE_LOOPS: tuple[DecodeLoop, ...] = get_args(DecodeLoop)

PositionPolicy = Literal["original", "renumbered", "method"]
POSITIONS: tuple[PositionPolicy, ...] = get_args(PositionPolicy)
#: `engine.separators`: newline and separator tokens of pictures stay, or may go like any visual token.
Separators = Literal["keep", "candidates"]
SEPARATORS: tuple[Separators, ...] = get_args(Separators)
#: Stands for `engine.batch_size=auto`: the largest batch that fits.
AUTO_BATCH = 0
#: Stands for `engine.paired=auto`: as much as costs under a tenth of the run.
AUTO_PAIRS = -1
#: Stands for `engine.prefetch=auto`: where the model leaves cores free to read ahead.
AUTO_PREFETCH = -1
#: `model.prompt` where nothing is said: the evaluation of the model's authors, or of the papers that these rely on.
ORIGINAL = "original"
#: Stands for the chat template that lies beside the checkpoint (`model.conversation`).
CHECKPOINT = "checkpoint"
LOGS = ("none", "wandb")
REFUSED = ("error", "skip")
VARIANTS = ("paper", "official")
DEVICES = ("auto", "cpu", "cuda")
DEVICE_MAPS = ("auto",)


@dataclass(frozen=True)
class VideoSpec:
    """How many frames of a video the model sees, by which rule, and what to do with a video that has fewer.

    `rate` is frames per second of video, for rules that go by the clock. The rules stand in harness/media/frames.py.
    """

    frames: int = 32
    rule: str = "uniform"
    short: str = "repeat"
    rate: float = 2.0


@dataclass(frozen=True)
class PromptSpec:
    """The set of prompts that a model is evaluated with, beside what other fields of its spec hold of it.

    Attributes:
        name: of the set (`model.prompt`).
        join: how several pictures stand in a turn (`model.join`); None: as the family has them.
        words: under which names of `benchmark.texts` the set's questions stand, the first that is there.
        text: what replaces the question where a benchmark has no text; None: nothing.
        generation: settings of the original evaluation that go before the task's own.
    """

    name: str = ORIGINAL
    join: str | None = None
    words: tuple[str, ...] = ()
    text: str | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)


#: Tokens of a prompt's words, and of an answer, where nothing states them.
WORDS, ANSWER = 1024, 512

#: Tokens of a video's frame, for which a card keeps room: SigLIP's 27 x 27 patches pooled by two are 196.
FRAME = 256

#: Tokens of the longest prompt where no benchmark says.
LONGEST_PROMPT = 4096


@dataclass(frozen=True)
class ModelSpec:
    """Which model, in which precision, where.

    Attributes:
        path: a local checkpoint directory; goes before `hub` (an id) and `revision`.
        weights: `random` builds the architecture without a checkpoint, for timing; its row carries no accuracy.
        device_map: `auto` spreads the layers over the visible GPUs, then over memory; None keeps the model on `device`.
            Random weights are always built on `device`.
        max_memory: bytes that `device_map` may take of each card (by its number) and of `cpu`; empty: what is free.
        spared_card: a card on which a draft is to live, that `device_map` leaves free where there are others.
        offload: whether `device_map` may leave layers in the host's memory, from where each token copies them.
        longest: tokens of the longest prompt and answer, for which cards keep room; no part of what the model is.
        facts: sizes, with `model.scale` applied.
        check_weights: whether tensors are searched for NaN and infinite values before loading; None: small ones.
        template: family whose prompts a task gives, where it has some for that family (lmms_eval_specific_kwargs).
        conversation: frame of prompts (harness/models/conversations.py); None: the family's, `checkpoint`: its own.
        prompt: the set of prompts in use; what it says of frames, pixels and generation stands in those fields.
        template_sha256: of the chat template beside the released weights; None: not known.
        transparency: of pictures, one of TRANSPARENCY: `drop` takes the colours under it, `white` lays them on white.
        media: `required` refuses samples without picture and video; otherwise they are answered as texts.
        conversion: command that makes a loadable checkpoint from the original release; None: it loads as released.
        processor: settings of the image processor that differ from the checkpoint's.
        architecture: what the configuration needs beside the facts, in transformers' words; `processor` is a folder
            whose processor stands beside random weights, in place of one that reads bytes.
        drafts: names of models with the same tokens that may draft for this one, the usual one first.
        boxes: how it was taught to write boxes, which decides how a task asks for them and reads them.
    """

    name: str
    adapter: str
    path: Path | None
    hub: str | None
    revision: str | None
    dtype: str
    attention: str
    weights: str
    device: str
    facts: ModelFacts
    device_map: str | None = None
    max_memory: Mapping[str, int] = field(default_factory=dict)
    spared_card: int | None = None
    offload: bool = False
    longest: int = field(default=LONGEST_PROMPT, compare=False, repr=False)
    check_weights: bool | None = None
    template: str | None = None
    conversation: str | None = None
    conversion: str | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)
    processor: Mapping[str, Any] = field(default_factory=dict)
    video: VideoSpec = VideoSpec()
    transparency: str = TRANSPARENCY[0]
    media: str = "optional"
    architecture: Mapping[str, Any] = field(default_factory=dict)
    drafts: tuple[str, ...] = ()
    boxes: str = "unit"
    prompt: PromptSpec = PromptSpec()
    template_sha256: str | None = None


@dataclass(frozen=True)
class CompressorSpec:
    """Which cache compressor stands behind a method that drops tokens, and the share of entries that it evicts."""

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)
    ratio: float = 0.5


@dataclass(frozen=True)
class MethodSpec:
    """Which method, which reading of its paper, and the hyper-parameters that differ from its defaults.

    `draft` is the model that drafts, None where the method needs none; `compressor` evicts cache entries of what the
    method has left, None where nothing does.
    """

    name: str
    variant: str = "paper"
    params: Mapping[str, Any] = field(default_factory=dict)
    draft: ModelSpec | None = None
    compressor: CompressorSpec | None = None

    @property
    def title(self) -> str:
        """What rows call it: its name, and behind a plus that of its compressor."""
        return self.name if self.compressor is None else f"{self.name}+{self.compressor.name}"


@dataclass(frozen=True)
class EngineSpec:
    """How the run is carried out.

    `batch_size=AUTO_BATCH` is the largest that fits. `positions` is the position policy of kept tokens (`method`: as
    the method's released code does). `separators` says whether newline and separator tokens of pictures may go, too.
    `decode` is whose loop says answers: the engine's own, or the library's
    `generate`, which beams always take. `threads=None` leaves torch's default. Up to `max_errors` failed samples are
    left out and counted; one more fails the run. `warmup` is the number of untimed batches before the first, `prefetch`
    that of batches read while the model answers the one before (0: none; AUTO_PREFETCH: as the machine allows).

    Of speculative decoding: `transport` is how draft and target run beside each other, `patience` the seconds to wait
    for the draft, `compare` decodes every answer plainly too, and `graphs` records steps of one token as CUDA graphs
    (None: where that can be done). `rescore` lets the whole model judge the answers of a method that drops tokens, and
    `paired` is the number of samples that it answers beside that method, in turns, after the run: the row's speed-up
    (0: none; AUTO_PAIRS: as many as a tenth of the run pays for). `share=prefix` lets cells that differ only in method
    and ratio run in one pass, up to where they part; their rows then have no times.
    """

    backend: Backend = "drop"
    batch_size: int = 8
    positions: PositionPolicy = "original"
    separators: Separators = "keep"
    decode: DecodeLoop = "loop"
    threads: int | None = None
    max_errors: int = 0
    warmup: int = 1
    prefetch: int = 0
    transport: str = "auto"
    patience: float = 30.0
    compare: bool = True
    graphs: bool | None = False
    rescore: bool = False
    paired: int = 0
    share: str = "none"


class Asked(Protocol):
    """What answering takes of a run, whoever asks: a RunSpec has it, and so has an AnswerSpec."""

    @property
    def model(self) -> ModelSpec: ...  # noqa: D102
    @property
    def method(self) -> MethodSpec: ...  # noqa: D102
    @property
    def budget(self) -> Budget: ...  # noqa: D102
    @property
    def engine(self) -> EngineSpec: ...  # noqa: D102
    @property
    def seed(self) -> int: ...  # noqa: D102


@dataclass(frozen=True)
class AnswerSpec:
    """Answers of one model under one method, without a benchmark to score them or a store to keep them."""

    model: ModelSpec
    method: MethodSpec
    budget: Budget
    engine: EngineSpec = EngineSpec()
    seed: int = 0


@dataclass(frozen=True)
class RunSpec:
    """One cell of a table: everything that run.py needs to know.

    `curves` is where the retention curves of all rows of a command line go, a path without suffix; None: nowhere.
    `report` is the folder for a table and a picture of each benchmark with every method against random; None: none.
    `refused=skip` leaves out cells of a sweep that cannot run and says so; `error` runs none if one cannot.
    `lease` says how long a command that computes a cell may be silent before one of another machine takes it over.
    `log_samples` is how many answers the log shows. `json` says whether rows are printed as JSON; None: unless standard
    output is a terminal.
    """

    model: ModelSpec
    method: MethodSpec
    benchmark: BenchmarkSpec
    budget: Budget
    engine: EngineSpec
    seed: int
    force: bool
    log: str
    store: Path
    offline: bool = True
    curves: Path | None = None
    report: Path | None = None
    refused: str = "error"
    json: bool | None = None
    log_options: Mapping[str, Any] = field(default_factory=dict)
    log_samples: int = 0
    judge: JudgeSpec = field(default_factory=JudgeSpec)
    lease: Terms = USUAL

    @property
    def generation(self) -> dict[str, Any]:
        """Settings of `generate` that the model and the benchmark give together; a task may add its own."""
        return {**self.model.generation, **self.benchmark.generation}


#: What a kind of method settles comes back as what it was: a run, or answers alone.
Settled = TypeVar("Settled", AnswerSpec, RunSpec)
