"""The frozen description of one run: plain data, which harness/config builds from a command line."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args

from espalier.harness.cost.facts import ModelFacts
from espalier.harness.cost.meters import Metered
from espalier.harness.errors import NotCached, Refused, UserError
from espalier.harness.media import TRANSPARENCY
from espalier.harness.media import frame_rules as rules
from espalier.harness.settings import (
    ANY_ENGINE,
    BY_METHOD,
    COMPUTED,
    COST,
    OMITTED,
    OPEN,
    PLUS,
    STATED,
    By,
    Count,
    FlagOrAuto,
    Names,
    Natural,
    OneOf,
    Positive,
    Size,
    Text,
    at_least,
    at_most,
    read_value,
    setting_hints,
    table,
)
from espalier.harness.specs.judge_spec import JudgeSpec
from espalier.harness.store.files.lease import DEFAULT_TERMS, Terms

if TYPE_CHECKING:
    # Brings in torch, seconds that a mistake in a config need not wait for.
    from espalier.harness.cost.budget import Budget
    from espalier.harness.specs.benchmark_spec import BenchmarkSpec


#: The harness's own engine, and programs that a plug-in of this package runs in.
TRANSFORMERS, VLLM = PROGRAMS = ("transformers", "vllm")

#: Which code prunes in vLLM: that of methods/, or vLLM's own of the same name.
PRUNERS = ("espalier", "vllm")


def _read_url(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value.startswith(("http://", "https://")):
        raise UserError(
            f"{key}={value!r}; valid: the address of a server, as in http://localhost:8000"
        )
    return value.rstrip("/").removesuffix("/v1")


@dataclass(frozen=True)
class BackendSpec:
    """Which program computes the answers.

    Attributes:
        name: one of PROGRAMS.
        python: interpreter of an environment with vLLM.
        url: address of a server of vLLM, in place of `python`.
        tensor_parallel: cards that each layer is divided over.
        pipeline_parallel: groups of cards that hold some layers each.
        pruning: one of PRUNERS.
        options: further arguments of `vllm.LLM`.
    """

    name: Annotated[str, OneOf(PROGRAMS)] = TRANSFORMERS
    python: Path | None = None
    url: Annotated[str, By(_read_url)] | None = None
    tensor_parallel: Count = 1
    pipeline_parallel: Count = 1
    pruning: Annotated[str, OneOf(PRUNERS)] = PRUNERS[0]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def served(self) -> bool:
        """Whether another program than the harness answers."""
        return self.name != TRANSFORMERS

    @property
    def built_in(self) -> bool:
        """Whether vLLM's own code prunes."""
        return self.served and self.pruning == VLLM


DTYPES = ("float32", "float16", "bfloat16")
ATTENTIONS = ("sdpa", "eager", "flash_attention_2")
#: `model.boxes`: how a model writes a box; tasks/rec/boxes.py reads them.
BOXES = ("unit", "square", "pixels", "thousand", "tagged")
#: `engine.backend`: tokens leave, or the slow reference hides them.
Backend = Literal["drop", "emulate"]
#: `engine.decode`: the loop that generates ordinary answers, the engine's own or the library's `generate`.
DecodeLoop = Literal["loop", "generate"]
#: `engine.positions`: a policy (`Positions` of methods/base.py), or that of the method's released code.
PositionPolicy = Literal["original", "renumbered", "method"]
POSITIONS: tuple[PositionPolicy, ...] = get_args(PositionPolicy)
#: `engine.separators`: newline and separator tokens of pictures stay, or may go like any visual token.
Separators = Literal["keep", "candidates"]
#: `engine.scope`: a method chooses among all visual tokens of a prompt, or in each picture and video by itself.
Scope = Literal["prompt", "item"]
Auto = Literal["auto"]
#: Default of `model.prompt`: the evaluation of the model's authors, or of the papers that these rely on.
ORIGINAL = "original"
#: The chat template in the folder of the checkpoint (`model.conversation`).
CHECKPOINT = "checkpoint"
VARIANTS = ("paper", "official")


@dataclass(frozen=True)
class VideoSpec:
    """How many frames of a video the model sees, by which rule, and what to do with a video that has fewer.

    `rate` is frames per second of video, for rules that use time. The rules are in harness/media/frames.py.
    """

    frames: Count = 32
    rule: Annotated[str, OneOf(rules.NAMES)] = "uniform"
    short: Annotated[str, OneOf(rules.SHORT)] = "repeat"
    rate: Positive = 2.0


@dataclass(frozen=True)
class PromptSpec:
    """The set of prompts that a model is evaluated with; other fields of its spec hold the rest.

    Attributes:
        name: of the set (`model.prompt`).
        join: order of several pictures in a turn (`model.join`); None: as the family has them.
        words: names of the set's questions in `benchmark.texts`; the first that exists is used.
        text: what replaces the question where a benchmark has no text; None: nothing.
        generation: settings of the original evaluation that go before the task's own.
    """

    name: str = ORIGINAL
    join: str | None = None
    words: tuple[str, ...] = field(default=(), metadata=OMITTED)
    text: str | None = field(default=None, metadata=OMITTED)
    generation: Mapping[str, Any] = field(default_factory=dict, metadata=OMITTED)


#: Tokens of a prompt's words, and of an answer, where nothing states them.
WORDS, ANSWER = 1024, 512
#: Tokens of a video's frame, for which a card keeps memory free: SigLIP's 27 x 27 patches pooled by two are 196.
FRAME = 256

#: Tokens of the longest prompt where no benchmark states it.
LONGEST_PROMPT = 4096


def _read_device(key: str, value: Any) -> str:
    name, _, index = str(value).partition(":")
    if name not in ("auto", "cpu", "cuda") or (
        index and not (name == "cuda" and index.isdecimal())
    ):
        raise UserError(f"{key}={value!r} is unknown; valid: auto, cpu, cuda, cuda:<index>")
    if name == "cpu":
        return "cpu"
    # Takes seconds, which a mistake in a config need not wait for.
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    present = torch.cuda.device_count()
    if int(index or 0) >= present:
        raise UserError(
            f"{key}={value!r}: this machine has {present} CUDA devices; valid: auto, cpu"
        )
    return str(value)


def _read_max_memory(key: str, value: Any) -> dict[str, int]:
    sizes = table(key, value)
    for place in sizes:
        if place != "cpu" and not place.isdecimal():
            raise UserError(f"{key}.{place}: no such place; valid: the number of a card, cpu")
    return {place: read_value(f"{key}.{place}", size, Size) for place, size in sizes.items()}


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
        parallel: what several processes share: `data`, the samples; `tensor`, the matrices of every layer.
        longest: tokens of the longest prompt and answer, for which cards keep memory free; no part of the model.
        facts: sizes, with `model.scale` applied.
        check_weights: whether tensors are searched for NaN and infinite values before loading; `auto`: small files.
        template: family that selects among a task's prompts (lmms_eval_specific_kwargs).
        conversation: frame of prompts (harness/models/conversations.py); None: the family's, `checkpoint`: its own.
        prompt: the prompt set in use; its frames, pixels and generation settings are in those fields.
        template_sha256: of the chat template released with the weights; None: not known.
        transparency: of pictures, one of TRANSPARENCY: `drop` takes the colours under it, `white` lays them on white.
        media: `required` refuses samples without picture and video; otherwise they are answered as texts.
        conversion: command that makes a loadable checkpoint from the original release; None: it loads as released.
        processor: settings of the image processor that differ from the checkpoint's.
        architecture: configuration keys beyond the facts, as transformers names them; `processor`: folder of the
            processor used with random weights in place of one that reads bytes.
        drafts: names of models with the same tokens that may draft for this one, the usual one first.
        boxes: the format of boxes in its training, in which tasks request and parse them.
        in_memory: digest of weights that the caller holds in memory; None: they come from a checkpoint.
        closed_vocabulary: whether it knows only the words of its own scenes, so that published benchmarks are refused.
    """

    name: Text = field(metadata=OMITTED)
    adapter: Text
    path: Path | None = field(metadata=OMITTED)
    hub: Text | None = field(metadata=OMITTED)
    revision: Text | None
    dtype: Annotated[str, OneOf(DTYPES)] = field(metadata=OPEN)
    attention: Annotated[str, OneOf(ATTENTIONS)] = field(metadata=OPEN)
    weights: Annotated[str, OneOf(("trained", "random"))]
    device: Annotated[str, By(_read_device)] = field(metadata=OPEN)
    facts: ModelFacts = field(metadata={**COMPUTED, **OPEN})
    device_map: Annotated[str, OneOf(("auto",))] | None = field(
        default=None, metadata={**OPEN, **STATED}
    )
    max_memory: Annotated[Mapping[str, int], By(_read_max_memory)] = field(
        default_factory=dict, metadata={**OPEN, **STATED}
    )
    spared_card: int | None = field(default=None, metadata={**COMPUTED, **OPEN, **STATED})
    offload: bool = field(default=False, metadata=OPEN)
    parallel: Annotated[str, OneOf(("data", "tensor"))] = field(default="data", metadata=OPEN)
    longest: int = field(
        default=LONGEST_PROMPT, compare=False, repr=False, metadata={**COMPUTED, **OMITTED}
    )
    check_weights: FlagOrAuto = field(default="auto", metadata=OMITTED)
    template: Text | None = field(default=None, metadata=STATED)
    conversation: Text | None = field(default=None, metadata=STATED)
    conversion: Text | None = field(default=None, metadata=OMITTED)
    generation: Mapping[str, Any] = field(default_factory=dict, metadata=STATED)
    processor: Mapping[str, Any] = field(default_factory=dict, metadata=STATED)
    video: VideoSpec = field(default=VideoSpec(), metadata=STATED)
    transparency: Annotated[str, OneOf(TRANSPARENCY)] = TRANSPARENCY[0]
    media: Annotated[str, OneOf(("optional", "required"))] = field(
        default="optional", metadata=STATED
    )
    architecture: Mapping[str, Any] = field(default_factory=dict, metadata={**OPEN, **STATED})
    drafts: Names = field(default=(), metadata=OMITTED)
    boxes: Annotated[str, OneOf(BOXES)] = field(default="unit", metadata=OMITTED)
    prompt: PromptSpec = field(default_factory=PromptSpec, metadata={**COMPUTED, **OMITTED})
    template_sha256: Text | None = field(default=None, metadata=OMITTED)
    in_memory: str | None = field(default=None, metadata={**COMPUTED, **OMITTED})
    closed_vocabulary: bool = field(default=False, metadata=OMITTED)


#: Keys of the config section `model`, those that become no field of a ModelSpec as they are first.
MODEL_KEYS = (
    *("facts", "scale", "prompt", "prompts", "join", "resources"),
    *setting_hints(ModelSpec),
)


@dataclass(frozen=True)
class CompressorSpec:
    """The cache compressor that runs after a method that drops tokens, and the share of entries that it evicts.

    `code` is the place of a user's class, None for a file in methods/.
    """

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)
    ratio: float = 0.5
    code: str | None = None


@dataclass(frozen=True)
class MethodSpec:
    """Which method, which reading of its paper, and the hyper-parameters that differ from its defaults.

    `variants` are the hyper-parameters that each of its readings sets, empty for a method with one reading.
    `draft` is the model that drafts, None where the method needs none; `compressor` evicts cache entries of what the
    method has left, None where nothing does. `code` is the place of a user's class, None for a file in methods/.
    """

    name: str
    variant: str = "paper"
    params: Mapping[str, Any] = field(default_factory=dict)
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    draft: ModelSpec | None = None
    compressor: CompressorSpec | None = None
    code: str | None = None

    @property
    def title(self) -> str:
        """Its name in rows: the method's, and after a plus its compressor's."""
        return self.name if self.compressor is None else f"{self.name}{PLUS}{self.compressor.name}"


@dataclass(frozen=True)
class EngineSpec:
    """How a run is computed: `make docs` writes conf/engine/default.yaml from these lines and defaults.

    Attributes:
        backend: drop, or emulate: the slow reference, which masks tokens
        batch_size: samples in a batch; auto: the largest of 1, 2, 4, ... 64 that fits, found by trial
        positions: position ids of kept tokens; renumbered: gaps are closed after every site; method: as in the
            released code
        separators: candidates: newline and separator tokens of pictures may be dropped too, as in papers that count
            all positions
        scope: of methods that act before the decoder; item: they choose in each picture and video by itself, as with
            backend=vllm; prompt: in all together
        decode: loop that generates answers: loop (the engine's) or generate (the library's, always used for beam
            search)
        threads: null: torch's default; at most the machine's cores, since thousands crash the process
        max_errors: failed samples that are skipped and counted; one more fails the run, and its answers are kept
        warmup: untimed batches before the first
        prefetch: batches prepared while the model generates; 0: sequential; auto: 2 for a model on an accelerator,
            else 0
        transport: of speculative decoding: sequential: draft, then verify; processes, threads: in parallel; auto: the
            best available
        patience: of speculative decoding: seconds to wait for a draft (20 times that for its prefill); then the target
            continues alone
        compare: of speculative decoding: also decode every answer without a draft, for the speed-up and the first
            different token
        graphs: of speculative decoding: true: single-token steps run as CUDA graphs; auto: where possible. Not
            measured on a GPU yet
        rescore: of methods that drop tokens: true: the unreduced model reports which tokens of an answer it would have
            accepted
        paired: samples repeated after the run with and without reduction, alternating on equal batches, for the row's
            speed-up; 0: none; auto: at most 32, as many as take less than a tenth of the run, or none
        share: prefix: cells of a sweep that differ only in method and ratio share reading, tower and first layers;
            such rows have the same answers and counts, but no times (docs/scale.md)
        kept: true: the journal has the tokens that each answer keeps, for `espalier report --protocol kept`
        energy: true: joules of every answer, by the counters of NVIDIA GPUs (Volta or later)
    """

    backend: Annotated[Backend, OneOf(get_args(Backend))] = field(
        default="drop", metadata=BY_METHOD
    )
    batch_size: Count | Auto = field(default=8, metadata={**COST, **BY_METHOD, **ANY_ENGINE})
    positions: Annotated[PositionPolicy, OneOf(POSITIONS)] = field(
        default="original", metadata={**OPEN, **BY_METHOD, **ANY_ENGINE}
    )
    separators: Annotated[Separators, OneOf(get_args(Separators))] = field(
        default="keep", metadata=BY_METHOD
    )
    scope: Annotated[Scope, OneOf(get_args(Scope))] = field(default="prompt", metadata=ANY_ENGINE)
    decode: Annotated[DecodeLoop, OneOf(get_args(DecodeLoop))] = field(
        default="loop", metadata=BY_METHOD
    )
    threads: Annotated[int, at_least(1), at_most(os.cpu_count() or 1)] | None = field(
        default=None, metadata={**OMITTED, **ANY_ENGINE}
    )
    max_errors: Natural = field(default=0, metadata={**OMITTED, **ANY_ENGINE})
    warmup: Natural = field(default=1, metadata={**COST, **STATED, **ANY_ENGINE})
    prefetch: Natural | Auto = field(default="auto", metadata={**OMITTED, **ANY_ENGINE})
    transport: Annotated[str, OneOf(("auto", "sequential", "processes", "threads"))] = field(
        default="auto", metadata={**OPEN, **BY_METHOD, **ANY_ENGINE}
    )
    patience: Positive = field(default=30, metadata={**OMITTED, **ANY_ENGINE})
    compare: bool = field(default=True, metadata={**COST, **BY_METHOD, **ANY_ENGINE})
    graphs: FlagOrAuto = field(default=False, metadata={**BY_METHOD, **ANY_ENGINE})
    rescore: bool = field(default=False, metadata={**COST, **BY_METHOD})
    paired: Natural | Auto = field(default="auto", metadata={**OMITTED, **ANY_ENGINE})
    share: Annotated[str, OneOf(("none", "prefix"))] = field(default="none", metadata=OMITTED)
    kept: bool = field(default=False, metadata={**COST, **ANY_ENGINE})
    energy: Annotated[bool, Metered("J", "energy of the GPUs")] = field(
        default=False, metadata=COST
    )

    @property
    def meters(self) -> tuple[str, ...]:
        """Names of the meters that are on."""
        return tuple(name for name in METERS if getattr(self, name))


#: The engine settings that turn on meters.
METERS: Mapping[str, Metered] = {
    name: mark
    for name, hint in setting_hints(EngineSpec).items()
    for mark in get_args(hint)
    if isinstance(mark, Metered)
}


@dataclass(frozen=True)
class AnswerSpec:
    """Answers of one model under one method, without a benchmark to score them or a store to keep them."""

    model: ModelSpec
    method: MethodSpec
    budget: Budget
    engine: EngineSpec = EngineSpec()
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Settings of a run at the top level of the config.

    Attributes:
        force: whether a stored result is computed again.
        store: folder of results, journals and leases.
        offline: whether nothing is downloaded.
        curves: path without suffix for the retention curves of all rows of a command; None: no curves.
        report: folder for a table and a figure of each benchmark, every method against random; None: no report.
        refused: `skip` leaves out and reports cells of a sweep that cannot run; `error` runs no cell if one cannot.
        json: whether rows are printed as JSON; `auto`: unless standard output is a terminal.
    """

    seed: Natural
    force: bool
    store: Path
    offline: bool = False
    curves: Path | None = None
    report: Path | None = None
    refused: Annotated[str, OneOf(("error", "skip"))] = "error"
    json: FlagOrAuto = False


@dataclass(frozen=True)
class RunSpec(RunOptions):
    """One cell of a table: everything that run.py needs to know.

    `lease` sets how long a command may be silent before one on another machine takes over its cell. `log_samples` is
    the number of answers that the log shows.
    """

    model: ModelSpec
    method: MethodSpec
    benchmark: BenchmarkSpec
    budget: Budget
    engine: EngineSpec
    log: str
    backend: BackendSpec = field(default_factory=BackendSpec)
    log_options: Mapping[str, Any] = field(default_factory=dict)
    log_samples: int = 0
    log_pictures: int = 0
    judge: JudgeSpec = field(default_factory=JudgeSpec)
    lease: Terms = DEFAULT_TERMS

    @property
    def classes(self) -> tuple[str | None, ...]:
        """Places of its methods' classes (None: a file in methods/), and names or places of its model families."""
        parts, models = (self.method, self.method.compressor), (self.model, self.method.draft)
        places = [part.code for part in parts if part is not None]
        return (*places, *(model.adapter for model in models if model is not None))

    @property
    def generation(self) -> dict[str, Any]:
        """Settings of `generate` that the model and the benchmark give together; a task may add its own."""
        return {**self.model.generation, **self.benchmark.generation}


#: The part of a run that answering needs.
AnswerRequest = AnswerSpec | RunSpec

#: What a kind of method settles comes back as what it was: a run, or answers alone.
Settled = TypeVar("Settled", AnswerSpec, RunSpec)


#: A key of the model section in an error line; neither `model.safetensors` nor a directory of that name.
_KEY = re.compile(rf"(?<![\w./-])model\.(?=(?:{'|'.join(MODEL_KEYS)})\b)")

_NAME = re.compile(r"(?<![\w./-])model=")


@contextmanager
def in_words_of_the_draft() -> Iterator[None]:
    """Reword the errors of a model's checks for the draft: `model.path` becomes `method.draft_options.path`."""
    try:
        yield
    except UserError as error:
        line = _NAME.sub("method.draft=", _KEY.sub("method.draft_options.", str(error)))
        kinds = (kind for kind in (Refused, NotCached) if isinstance(error, kind))
        raise next(kinds, UserError)(line) from error
