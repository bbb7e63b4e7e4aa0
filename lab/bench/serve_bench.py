"""Times of requests to vLLM under load, with and without methods.

    python -m lab.bench.serve_bench backend.python=/envs/vllm/bin/python model=llava15_7b method=divprune ratio=0.75
    python -m lab.bench.serve_bench -m backend.python=/envs/vllm/bin/python method=random,divprune ratio=0.75 --narrow
    python -m lab.bench.serve_bench -m backend.python=/envs/vllm/bin/python model=qwen2_5_vl_7b method=evs ratio=0.5 \
      --frames 8 backend.pruning=espalier,vllm

Each engine life has one method; lives of the unpruned model and of every method take turns, and the order changes each
time. In a life, first 1 and then each number of `--in-flight` requests are in flight (closed loop), and each answer is
followed by the next request at once: ten for each in flight, at least `--requests`. Rates and times leave out ramp-up
(the first answers, as many as are in flight) and drain (after the last request is sent). Then requests arrive by a
Poisson process (open loop) for `--seconds`, at `--load` times the requests a second that the first unpruned life
reached. Each request has a picture of its own, or a video of `--frames` frames, and each answer `--tokens` tokens.

Goodput is the largest tested rate at which 90 % of the requests get their first token within `--limit` milliseconds.

Everything else is a config override as for `espalier run`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from scipy import stats

from espalier.harness.config.build_spec import build_spec
from espalier.harness.config.compose import Command, read_command
from espalier.harness.errors import EngineEnded, UserError
from espalier.harness.evaluation.synthetic_prompts import EDGE, QUESTION, words
from espalier.harness.media.frames import Clip
from espalier.harness.reports.curves.figures import Plot, Series, Spot, draw, line_look, looks, save
from espalier.harness.runs.environment import device_name
from espalier.harness.runs.served.backend_check import check_backend
from espalier.harness.runs.served.engine_pool import code_folder, engine_arguments, model_folder
from espalier.harness.runs.served.engine_process import EngineProcess
from espalier.harness.specs.catalogue import build_method
from espalier.harness.specs.commands import PlainParser, command, print_error
from espalier.harness.specs.hub_cache import go_offline
from espalier.harness.specs.run_spec import PRUNERS
from espalier.harness.stats import Interval, ratio_interval
from espalier.harness.store.files import durable
from espalier.methods.base import TokenReducer
from espalier.serve.load import Load
from espalier.serve.setting import Setting
from lab.bench.load_clients import steady

if TYPE_CHECKING:
    from espalier.harness.runs.served.served_session import ServedPrompt
    from espalier.harness.specs.run_spec import ModelSpec, RunSpec

#: `--narrow`: random weights, few layers, and this width everywhere. Heads have the channels that three axes of
#: positions share in the releases.
WIDTH = 256
NARROW = (
    *("model.weights=random", "model.dtype=float32", "model.scale.layers=2"),
    "model.scale.tower_layers=1",
    f"++model.facts.text={{hidden: {WIDTH}, intermediate: 688, heads: 2, kv_heads: 2, head_dim: 128}}",
    f"++model.facts.tower={{hidden: {WIDTH}, intermediate: 1024, heads: 4, kv_heads: 4, head_dim: 64}}",
)

#: Of the videos.
FRAMES_A_SECOND = 2.0

#: Share of requests that must be in time; limit in multiples of the unpruned model's with 1 in flight.
IN_TIME, PATIENCE = 0.9, 4.0

#: Requests of a closed loop for each in flight, at least.
ROUNDS = 10

#: Requests from which a 99th percentile is more than its slowest few, and lives from which an interval is shown.
MANY, FEWEST_LIVES = 500, 3


@dataclass(frozen=True)
class Side:
    """What an engine life serves.

    Attributes:
        name: of its rows.
        spec: the run that describes it.
        setting: what is removed of every picture.
    """

    name: str
    spec: RunSpec
    setting: Setting


@dataclass
class Loads:
    """The loads of every life; those of the open loop follow from the first life.

    Attributes:
        in_flight: numbers of requests at a time; 1 is always among them.
        shares: rates as shares of the largest rate of the first life.
        requests: fewest requests of a closed loop.
        seconds: of arrivals in an open loop, at least.
        tokens: of an answer.
        limit: seconds to the first token that count as in time; None: PATIENCE times the unpruned model's with 1 in
            flight.
        rates: arrivals a second.
    """

    in_flight: Sequence[int]
    shares: Sequence[float]
    requests: int
    seconds: float
    tokens: int
    limit: float | None = None
    rates: list[float] = field(default_factory=list)

    def closed(self) -> Iterator[dict[str, Any]]:
        """Yield the loads with a number of requests in flight."""
        for number in sorted({1, *self.in_flight}):
            yield {"in_flight": number, "requests": max(self.requests, ROUNDS * number)}

    def arrivals(self, load: Mapping[str, Any]) -> int:
        """Return the number of requests with which a load's arrivals last long enough."""
        number: int = math.ceil(load["rate"] * self.seconds)
        while Load(**load, requests=number).arrivals()[-1] < self.seconds:
            number += 1
        return number

    def settle(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take rates and limit from the closed loops of the first life, unless they are known."""
        if not self.rates:
            capacity = max(row["requests_per_second"] for row in rows)
            self.rates = [share * capacity for share in self.shares]
        if self.limit is None:
            self.limit = PATIENCE * rows[0]["first_ms"] / 1e3


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table and the sentence, and write rows, those of each life at its end, and the picture.

    Returns 2 for bad input, else 0.
    """
    options, overrides = _options(argv)
    go_offline()
    sides, folder, frames = _sides(options, overrides), options.write, options.frames
    loads = Loads(
        options.in_flight,
        options.load,
        options.requests,
        options.seconds,
        options.tokens,
        options.limit,
    )
    spec, rows = sides[0].spec, pd.DataFrame()
    path = folder / (f"serve_{spec.model.name}" + (f"_{frames}_frames" if frames else ""))
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        for life in measure(sides, loads, options.lives, frames):
            rows = pd.concat([rows, pd.DataFrame(life)])
            durable.replace(path.with_suffix(".csv"), rows.to_csv(index=False).encode())
    except EngineEnded as error:
        return print_error(error)
    lines = write(rows, path, device_name(spec.model.device))
    Console(soft_wrap=True).print("\n".join(lines), markup=False, highlight=False)
    return 0


def measure(
    sides: Sequence[Side], loads: Loads, lives: int, frames: int | None = None
) -> Iterator[list[dict[str, Any]]]:
    """Yield a row for each load, life by life, of videos with so many frames or, without, of pictures.

    Raises:
        UserError: the engine refuses the model or a method.
        EngineEnded: the engine's process has ended.
    """
    # Imports transformers, which takes seconds.
    from espalier.harness.models.build_adapter import load_adapter_without_weights
    from espalier.harness.runs.served.served_session import served_prompt

    spec = sides[0].spec
    adapter = load_adapter_without_weights(spec.model)
    medium: dict[str, Any] = {"type": "image", "image": Image.new("RGB", (EDGE, EDGE))}
    if frames is not None:
        medium = {"type": "video", "video": blank_clip(frames)}
    chat = [{"role": "user", "content": [medium, {"type": "text", "text": words(QUESTION)}]}]
    prompt: ServedPrompt = served_prompt(adapter, chat)
    with TemporaryDirectory(prefix="espalier-engine-") as place:
        folder = model_folder(Path(place) / "model", spec.model, adapter)
        configuration = adapter.model.config
        assert spec.backend.python is not None  # checked
        code = code_folder(Path(place) / "code")
        with closing(EngineProcess(spec.backend.python, code, "lab.bench.load_clients")) as engine:
            for life in range(lives):
                # The unpruned model goes first in the first life, which the rates come from.
                for side in sides[:: -1 if life % 2 else 1]:
                    values = side.setting.values
                    engine.load(engine_arguments(side.spec, folder, configuration, values))
                    yield _life(engine, side, life, prompt, loads)


def blank_clip(frames: int) -> Clip:
    """Return a video of black frames."""
    places = tuple(range(frames))
    return Clip(
        frames=np.zeros((frames, EDGE, EDGE, 3), np.uint8),
        indices=places,
        timestamps=tuple(place / FRAMES_A_SECOND for place in places),
        fps=FRAMES_A_SECOND,
        total_frames=frames,
        duration=frames / FRAMES_A_SECOND,
    )


def _life(
    engine: EngineProcess, side: Side, life: int, prompt: ServedPrompt, loads: Loads
) -> list[dict[str, Any]]:
    """Return the rows of one engine life."""
    numbers = iter(range(0, sys.maxsize, 10**6))
    # Imported here: it needs torch, which takes seconds.
    from espalier.harness.runs.served.served_session import kept_of

    counts = [kept_of(side.setting, side.spec.budget, count) for count in prompt.visual]
    head = {"prompt": prompt.ids, "edge": EDGE, "tokens": loads.tokens}
    head["video"] = video = prompt.media[0].get("metadata")

    def row(load: Mapping[str, Any], limit: float | None = None) -> dict[str, Any]:
        load = {**head, **load, "first": next(numbers)}
        requests = load.get("requests") or loads.arrivals(load)
        reply = engine.exchange({"load": {**load, "requests": requests}})
        figures = summary(reply, prompt.text + sum(counts), load.get("in_flight"), limit)
        entry = {
            "model": title(side.spec.model),
            "method": side.name,
            "ratio": side.setting.ratio,
            "life": life,
            "frames": None if video is None else len(video["frames_indices"]),
            "in_flight": load.get("in_flight"),
            "rate": load.get("rate"),
            **figures,
        }
        line = {name: entry[name] for name in ("method", "life", "in_flight", "rate", "first_ms")}
        print(" ".join(f"{name}={value}" for name, value in line.items()), file=sys.stderr)
        return entry

    row({"in_flight": 2, "requests": 2 * ROUNDS})  # warm-up
    rows = [row(load) for load in loads.closed()]
    loads.settle(rows)
    rows += [row({"rate": rate}, loads.limit) for rate in loads.rates]
    return rows


def title(model: ModelSpec) -> str:
    """Return a model's name, with its depth and width if its weights are random."""
    if model.weights != "random":
        return model.name
    text = model.facts.text
    return f"{model.name} (random weights, {text.layers} layers of {text.hidden})"


def summary(
    reply: Mapping[str, Any], prompt: int, in_flight: int | None, limit: float | None
) -> dict[str, Any]:
    """Return the figures of a load.

    Times are those of the answers between ramp-up and drain; in an open loop of all answers, since the slowest are the
    last ones. Cache, encoder and other programs are those of the whole load.

    Args:
        reply: of `lab.bench.load_clients`.
        prompt: tokens that each prompt must have.
        in_flight: requests at a time; None: an open loop.
        limit: seconds to the first token that count as in time.

    Raises:
        UserError: the engine read another number of tokens.
    """
    requests, selection = reply["requests"], reply["selection"]
    lengths = {entry["prompt"] for entry in requests}
    if lengths != {prompt}:
        raise UserError(f"backend=vllm read prompts of {lengths} tokens; expected: {prompt}")
    kept, begin, last = steady(requests, in_flight)
    timed = kept if in_flight else requests
    first = np.array([entry["first"] for entry in timed])
    end = np.array([entry["end"] for entry in timed])
    gaps = np.concatenate([entry["gaps"] for entry in timed])
    inside = sum(
        min(entry["sent"] + entry["end"], last) - max(entry["sent"], begin)
        for entry in requests
        if entry["sent"] + entry["end"] > begin
    )

    def tail(values: NDArray[np.float64]) -> float:
        return 1e3 * float(np.quantile(values, 0.99)) if len(timed) >= MANY else math.nan

    count, seconds = len(requests), last - begin
    return {
        "requests": count,
        "timed": len(timed),
        "seconds": seconds,
        "mean_in_flight": inside / seconds,
        "prompt_tokens": prompt,
        "first_ms": 1e3 * float(np.median(first)),
        "first_p99_ms": tail(first),
        "gap_ms": 1e3 * fmean(gaps) if len(gaps) else math.nan,
        "end_ms": 1e3 * float(np.median(end)),
        "end_p99_ms": tail(end),
        "requests_per_second": len(kept) / seconds,
        "blocks_mean": reply["blocks"]["mean"],
        "blocks_peak": reply["blocks"]["peak"],
        "encoder_ms": 1e3 * reply["encoder"] / count,
        "selection_ms": math.nan if selection is None else 1e3 * selection / count,
        "in_time": math.nan if limit is None else float((first <= limit).mean()),
        "limit_ms": math.nan if limit is None else 1e3 * limit,
        "others": reply["others"],
        "load_average": reply["load_average"],
    }


def _sides(options: argparse.Namespace, overrides: Sequence[str]) -> list[Side]:
    """Return the unpruned model, then each cell of the command; all is checked before an engine starts."""
    # Imported here: it needs torch, which takes seconds.
    from espalier.harness.runs.served.served_session import setting_of

    request = read_command(["backend=vllm", *overrides])
    if not request.cells:
        raise UserError(f"{' '.join(overrides)} prints information only; valid: overrides of runs")
    if options.narrow:
        request = read_command(["backend=vllm", *narrow(request), *overrides])
    sides = []
    for cell in request.cells:
        spec = build_spec(cell, folders=request.folders)
        method = build_method(spec.method.name, spec.method.params)
        check_backend(spec, method, loads=True)
        assert isinstance(method, TokenReducer)  # checked
        name = f"{spec.method.title}{' of vLLM' if spec.backend.built_in else ''}"
        sides.append(Side(name, spec, setting_of(spec, method)))
    if any(side.spec.model != sides[0].spec.model for side in sides):
        raise UserError(
            "python -m lab.bench.serve_bench loads one model; valid: one command for each model"
        )
    acting = [side for side in sides if side.setting.method != "none"]
    if not acting:
        raise UserError("method='none' is always measured; valid: method=<a method that is served>")
    blind = [side for side in acting if side.setting.reducer.needs_frames()]
    if blind and options.frames is None:
        raise UserError(f"method={blind[0].name!r} compares frames; valid: --frames=<a number>")
    first = sides[0].spec
    plain = replace(
        first,
        backend=replace(first.backend, pruning=PRUNERS[0]),
        budget=replace(first.budget, down=False),
    )
    return [Side(PLAIN, plain, Setting(seed=plain.seed)), *acting]


def narrow(command: Command) -> list[str]:
    """Return overrides that narrow the model of a command's first cell, its projector included."""
    facts = build_spec(command.cells[0], folders=command.folders).model.facts
    text, tower = facts.text.hidden, facts.tower.hidden
    widths = [WIDTH if size == text else size // tower * WIDTH for size in facts.projector]
    return [*NARROW, f"++model.facts.projector={widths}"]


def _options(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = PlainParser(
        prog="python -m lab.bench.serve_bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for name, keywords in OPTIONS.items():
        parser.add_argument(name, **keywords)
    options, overrides = parser.parse_known_args(argv)
    options.limit = None if options.limit is None else options.limit / 1e3
    return options, overrides


def _numbers(kind: type, single: bool = False) -> Any:
    """Return a reader of numbers above zero with commas between them, or of a single one."""

    def read(text: str) -> Any:
        try:
            values = [kind(part) for part in text.split(",")]
        except ValueError:
            values = []
        if not values or min(values) <= 0 or (single and len(values) > 1):
            raise argparse.ArgumentTypeError(f"{text!r}; valid: numbers above 0, as in 1,4,16")
        return values[0] if single else values

    return read


OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "--in-flight": {
        "type": _numbers(int),
        "default": [1, 4, 16, 64],
        "help": "default: 1,4,16,64; 1 is always measured",
    },
    "--load": {
        "type": _numbers(float),
        "default": [0.5, 0.8, 1.2, 2.0],
        "help": "default: 0.5,0.8,1.2,2",
    },
    "--lives": {
        "type": _numbers(int, True),
        "default": 3,
        "help": "engine lives of each side; default: 3, and fewer give no intervals",
    },
    "--requests": {
        "type": _numbers(int, True),
        "default": 100,
        "help": "fewest of a closed loop; default: 100",
    },
    "--seconds": {
        "type": _numbers(float, True),
        "default": 60.0,
        "help": "of arrivals at each rate; default: 60",
    },
    "--tokens": {"type": _numbers(int, True), "default": 16, "help": "of each answer; default: 16"},
    "--frames": {
        "type": _numbers(int, True),
        "help": "of a video in each request; default: a picture",
    },
    "--limit": {
        "type": _numbers(float, True),
        "help": "ms; default: 4 times the unpruned model's with 1 in flight",
    },
    "--narrow": {"action": "store_true", "help": "random weights in few and narrow layers"},
    "--write": {
        "type": Path,
        "default": Path("results/serving"),
        "help": "default: results/serving",
    },
}


#: Name of the unpruned model in rows.
PLAIN = "none"

#: What is compared: column, title, and whether more is better.
COMPARED = (
    ("first_ms", "first token", False),
    ("end_ms", "whole answer", False),
    ("requests_per_second", "requests a second", True),
)

#: Of an interval of gains: below 1, around it, above it.
VERDICTS = ("slower", "no difference shown", "faster")

#: Columns about other programs on the machine.
BESIDE = ("others", "load_average")

#: Columns of the table, and how they are printed.
SHOWN = {
    "timed": ("requests timed", "{:.0f}"),
    "mean_in_flight": ("in flight", "{:.1f}"),
    "first_ms": ("first token, ms", "{:.0f}"),
    "first_p99_ms": (f"99 % (from {MANY} requests)", "{:.0f}"),
    "gap_ms": ("between tokens, ms", "{:.1f}"),
    "end_ms": ("answer, ms", "{:.0f}"),
    "requests_per_second": ("requests/s", "{:.2f}"),
    "blocks_peak": ("cache blocks", "{:.0f}"),
    "encoder_ms": ("encoder, ms", "{:.1f}"),
    "share": ("of it selection", "{:.0%}"),
}


def write(rows: pd.DataFrame, path: Path, device: str) -> list[str]:
    """Write `<path>.md`, `.png` and `.svg`; return the lines of the page.

    Args:
        rows: one for each life and load.
        path: of the files, without suffix.
        device: name of the machine's device.

    Raises:
        StoreLost: the disk is full or cannot be written.
    """
    lines = page(rows, device)
    durable.replace(path.with_suffix(".md"), ("\n".join(lines) + "\n").encode())
    save(picture(rows, device), path)
    return lines


def page(rows: pd.DataFrame, device: str) -> list[str]:
    """Return the sentences and the table, in Markdown; cells without a figure are empty."""
    lines = [f"{subject(rows)} in vLLM on {device}, {conditions(rows)}.", ""]
    lines += [f"- {sentence(rows, method)}" for method in methods(rows)]
    heads = ["load", "method", *(title for title, _ in SHOWN.values()), "in time"]
    lines += ["", f"| {' | '.join(heads)} |", f"| --- | --- |{' ---: |' * (len(SHOWN) + 1)}"]
    for load, part in _by_load(rows):
        for method in (PLAIN, *methods(rows)):
            figures = part[part.method == method]
            means = figures.mean(numeric_only=True, skipna=False)
            means["share"] = means.selection_ms / max(means.encoder_ms, 1e-9)
            cells = [
                "" if pd.isna(means[name]) else form.format(means[name])
                for name, (_, form) in SHOWN.items()
            ]
            cells.append(in_words(in_time(figures)) if figures.rate.notna().all() else "")
            lines.append(f"| {load} | `{method}` | {' | '.join(cells)} |")
    return lines


def conditions(rows: pd.DataFrame) -> str:
    """Return how the rows were measured: lives, loads, and what else ran on the machine."""
    lives = rows.life.nunique()
    parts = [
        f"{lives} engine {'life' if lives == 1 else 'lives'} of each in turns, medians of a load, means over lives",
        f"closed loops of at least {ROUNDS} requests for each in flight, without ramp-up and drain",
    ]
    open_loop = rows[rows.rate.notna()]
    if len(open_loop):
        parts.append(
            f"Poisson arrivals for at least {math.floor(open_loop.seconds.min())} s a rate"
        )
    if lives >= FEWEST_LIVES:
        parts.append(
            "in brackets 95 % intervals over lives, of shares at least a life's binomial one"
        )
    # Processor seconds of all programs but the engine may come out a tick below zero.
    busy, average = (
        f"{max(rows[name].min(), 0):.1f} to {max(rows[name].max(), 0):.1f}" for name in BESIDE
    )
    parts.append(
        f"other programs kept {busy} processors busy (load average with the engine's own: {average})"
    )
    return "; ".join(parts)


def subject(rows: pd.DataFrame) -> str:
    """Return the model, and the frames of its videos if they are no pictures."""
    model, frames = rows.model.iloc[0], rows.frames.iloc[0] if "frames" in rows else None
    return str(model) if pd.isna(frames) else f"{model}, videos of {frames:.0f} frames,"


def sentence(rows: pd.DataFrame, method: str) -> str:
    """Return what speaks against a method, then what is open, then what speaks for it.

    Gains are those with 1 and with most requests in flight, losses those of every closed loop.
    """
    closed = rows[rows.in_flight.notna()]
    verdicts: dict[str, list[str]] = {name: [] for name in VERDICTS}
    for number, part in closed.groupby("in_flight"):
        intervals = {
            title: gain(part, method, column, rising) for column, title, rising in COMPARED
        }
        for name, texts in verdicts.items():
            factors = [
                f"{title} {in_words(interval, 'x')}"
                for title, interval in intervals.items()
                if verdict(interval) == name
            ]
            if factors and (name == VERDICTS[0] or number in (1, closed.in_flight.max())):
                texts.append(f"with {number:.0f} in flight {', '.join(factors)}")
    slower, undecided, faster = (
        [f"{name} {', '.join(texts)}"] if texts else [] for name, texts in verdicts.items()
    )
    shares = selection_shares(rows[rows.method == method])
    if len(shares):
        low, high = f"{100 * shares.min():.0f}", f"{100 * shares.max():.0f}"
        share = low if low == high else f"{low} to {high}"
        slower.append(f"choosing takes {share} % of the encoder's time")
    if rows.rate.notna().any():
        (ours, rate), (theirs, plain_rate) = (goodput(rows, name) for name in (method, PLAIN))
        text = f"goodput within {rows.limit_ms.max():.0f} ms {rate} against {plain_rate} requests a second"
        (slower if ours < theirs else faster).append(text)
    tokens = " and ".join(
        f"{rows[rows.method == name].prompt_tokens.iloc[0]:,}" for name in (PLAIN, method)
    )
    ratio = rows[rows.method == method].ratio.iloc[0]
    head = f"`{method}` at {ratio:g} (prompts of {tokens} tokens): "
    return head + "; ".join([*slower, *undecided, *faster]) + "."


def verdict(interval: Interval) -> str:
    """Return on which side of 1 an interval lies, or the value of a few lives, which has none."""
    low, high = (
        (interval.value, interval.value)
        if math.isnan(interval.low)
        else (interval.low, interval.high)
    )
    return VERDICTS[0 if high < 1 else 2 if low > 1 else 1]


def selection_shares(rows: pd.DataFrame) -> pd.Series:
    """Return the share of the encoder's time that choosing takes, load by load; vLLM does not time its own."""
    loads = rows.fillna({"in_flight": 0, "rate": 0}).groupby(["in_flight", "rate"])
    sums = loads[["selection_ms", "encoder_ms"]].sum(min_count=1).dropna()
    return sums.selection_ms / sums.encoder_ms


def gain(rows: pd.DataFrame, method: str, column: str, rising: bool) -> Interval:
    """Return how many times better a method is than the unpruned model at one load, over pairs of lives."""
    plain, reduced = (
        rows[rows.method == name].sort_values("life")[column].to_numpy() for name in (PLAIN, method)
    )
    interval = ratio_interval(reduced, plain) if rising else ratio_interval(plain, reduced)
    if len(plain) < FEWEST_LIVES:
        return Interval(interval.value, math.nan, math.nan)
    return interval


def goodput(rows: pd.DataFrame, method: str) -> tuple[float, str]:
    """Return the largest tested rate with enough requests in time, 0 if there is none, and its text.

    The ends are the largest rates with enough requests at the lower and at the upper end of their share.
    """
    open_loop = rows[rows.rate.notna() & (rows.method == method)]
    shares = {float(rate): in_time(part) for rate, part in open_loop.groupby("rate")}
    value, low, high = (
        max((rate for rate, share in shares.items() if getattr(share, end) >= IN_TIME), default=0.0)
        for end in ("value", "low", "high")
    )
    few = open_loop.life.nunique() < FEWEST_LIVES
    text = in_words(Interval(value, math.nan, math.nan) if few else Interval(value, low, high))
    if not value:
        return value, f"below {min(shares):.2f}{text[4:]}"
    return value, f"at least {text}" if value == max(shares) else text


def in_time(rows: pd.DataFrame) -> Interval:
    """Return the share of requests in time at one rate, mean over lives.

    The interval is the wider one of Student's over lives and Wilson's of the count of one life. Requests of a queue
    depend on each other, so that the second one alone is too narrow.
    """
    shares, lives = rows.in_time, len(rows)
    mean = float(shares.mean())
    if lives < FEWEST_LIVES:
        return Interval(mean, math.nan, math.nan)
    count = int(rows.timed.min())
    ends = stats.binomtest(round(mean * count), count).proportion_ci(method="wilson")
    half = float(stats.t.ppf(0.975, lives - 1) * shares.std()) / math.sqrt(lives)
    low, high = min(ends.low, max(mean - half, 0)), max(ends.high, min(mean + half, 1))
    return Interval(mean, float(low), float(high))


def in_words(interval: Interval, unit: str = "") -> str:
    """Return a figure with its interval, two decimals each; a few lives have none."""
    ends = "" if math.isnan(interval.low) else f" [{interval.low:.2f}, {interval.high:.2f}]"
    return f"{interval.value:.2f}{unit}{ends}"


def methods(rows: pd.DataFrame) -> list[str]:
    """Return the names of the methods that remove tokens."""
    return [name for name in rows.method.unique() if name != PLAIN]


def picture(rows: pd.DataFrame, device: str) -> Figure:
    """Return the figure: gains over requests in flight, and the wait for the first token over arrivals."""
    closed, open_loop = rows[rows.in_flight.notna()], rows[rows.rate.notna()]
    names = methods(rows)
    styles = looks([(name, name == "random") for name in names] + [(PLAIN, True)])
    levels = {float(number): f"{number:.0f}" for number in sorted(closed.in_flight.unique())}
    plots = [
        Plot(
            "curve",
            title,
            [
                Series(
                    name, [*_gains(closed, name, column, rising)], line_look(styles[name]), key=True
                )
                for name in names
            ],
            places="requests in flight",
            values="times the unpruned model (log scale)",
            ticks=levels,
            log=True,
            log_values=True,
            shift=0.06,
            level=("equal", Interval(1.0, 1.0, 1.0)),
        )
        for column, title, rising in COMPARED
    ]
    if len(open_loop):
        waits = [
            Series(title, [*_waits(open_loop, name)], line_look(styles[name]), key=True)
            for name, title in ((PLAIN, "none (unpruned)"), *zip(names, names, strict=True))
        ]
        plots.append(
            Plot(
                "curve",
                "wait for the first token",
                waits,
                places="arrivals a second (Poisson)",
                values="ms, mean and range of lives (log scale)",
                log_values=True,
            )
        )
    heading = f"vLLM: {subject(rows).rstrip(',')}"
    # A figure's foot is one line long.
    lives, *_, busy = conditions(rows).split("; ")
    spread = ", 95 % intervals of gains" if rows.life.nunique() >= FEWEST_LIVES else ""
    foot = f"{device}, {lives.partition(',')[0]}{spread}; {busy.partition(' (')[0]}."
    return draw(plots, heading, foot)


def _gains(rows: pd.DataFrame, method: str, column: str, rising: bool) -> Iterator[Spot]:
    for number, part in rows.groupby("in_flight"):
        interval = gain(part, method, column, rising)
        ends = (None, None) if math.isnan(interval.low) else (interval.low, interval.high)
        yield Spot(float(number), interval.value, *ends)


def _waits(rows: pd.DataFrame, method: str) -> Iterator[Spot]:
    for rate, part in rows[rows.method == method].groupby("rate"):
        waits: Sequence[float] = part.first_ms.tolist()
        yield Spot(float(rate), sum(waits) / len(waits), min(waits), max(waits))


def _by_load(rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    for number, part in rows[rows.in_flight.notna()].groupby("in_flight"):
        yield f"{number:.0f} in flight", part
    for rate, part in rows[rows.rate.notna()].groupby("rate"):
        yield f"{rate:.2f} a second", part


if __name__ == "__main__":
    sys.exit(main())
