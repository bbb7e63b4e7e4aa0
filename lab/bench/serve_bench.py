"""Times of requests to vLLM under load, with and without methods.

    python -m lab.bench.serve_bench backend.python=/envs/vllm/bin/python model=llava15_7b method=divprune ratio=0.75
    python -m lab.bench.serve_bench -m backend.python=/envs/vllm/bin/python method=random,divprune ratio=0.75 --narrow
    python -m lab.bench.serve_bench -m backend.python=/envs/vllm/bin/python model=qwen2_5_vl_7b method=evs ratio=0.5 \
      --frames 8 backend.pruning=espalier,vllm

Each engine life has one method; lives of the unpruned model and of every method take turns, and the order changes each
time. In a life, at most `--in-flight` requests are in flight (closed loop), one number after another, `--requests` in
all or, where that is not enough, one burst of that number; then requests arrive by a Poisson process (open loop) at
`--load` times the requests a second that the first unpruned life reached. Each request has a picture of its own, or a
video of `--frames` frames, and each answer `--tokens` tokens.

Goodput is the largest tested rate at which 90 % of the requests get their first token within `--limit` milliseconds.

Everything else is a config override as for `espalier run`.
"""

from __future__ import annotations

import argparse
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
from PIL import Image
from rich.console import Console

from espalier.harness.config.build_spec import build_spec
from espalier.harness.config.compose import read_command
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
from espalier.serve.setting import Setting

if TYPE_CHECKING:
    from espalier.harness.runs.served.served_session import ServedPrompt
    from espalier.harness.specs.run_spec import RunSpec

#: `--narrow`: random weights, few and narrow layers, so that processors of a laptop serve a model's prompts.
NARROW = (
    *("model.weights=random", "model.dtype=float32", "model.scale.layers=2"),
    "model.scale.tower_layers=1",
    "++model.facts.text={hidden: 256, intermediate: 688, heads: 4, kv_heads: 4, head_dim: 64}",
    "++model.facts.tower={hidden: 256, intermediate: 1024, heads: 4, kv_heads: 4, head_dim: 64}",
    "++model.facts.projector=[256, 256, 256]",
)

#: Of the videos.
FRAMES_A_SECOND = 2.0

#: Share of requests that must be in time; limit in multiples of the unpruned model's at the fewest in flight.
IN_TIME, PATIENCE = 0.9, 4.0


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
        in_flight: numbers of requests at a time.
        shares: rates as shares of the largest rate of the first life.
        requests: fewest requests of a load.
        tokens: of an answer.
        limit: seconds to the first token that count as in time; None: PATIENCE times the unpruned model's at the
            fewest in flight.
        rates: arrivals a second.
    """

    in_flight: Sequence[int]
    shares: Sequence[float]
    requests: int
    tokens: int
    limit: float | None = None
    rates: list[float] = field(default_factory=list)

    def closed(self) -> Iterator[dict[str, Any]]:
        """Yield the loads with a number of requests in flight; as many as there are requests start at once."""
        for number in self.in_flight:
            yield {"in_flight": number, "requests": max(self.requests, number)}

    def open(self) -> Iterator[dict[str, Any]]:
        """Yield the loads with a rate of arrivals."""
        for rate in self.rates:
            yield {"rate": rate, "requests": self.requests}

    def settle(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take rates and limit from the rows of the first life, unless they are known."""
        if not self.rates:
            capacity = max(row["requests_per_second"] for row in rows)
            self.rates = [share * capacity for share in self.shares]
        if self.limit is None:
            lightest = min(rows, key=lambda row: row["in_flight"])
            self.limit = PATIENCE * lightest["first_ms"] / 1e3


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table and the sentence, and write rows and picture; return 2 for bad input, else 0."""
    options, overrides = _options(argv)
    go_offline()
    sides, folder, frames = _sides(options, overrides), options.write, options.frames
    loads = Loads(options.in_flight, options.load, options.requests, options.tokens, options.limit)
    try:
        rows = measure(sides, loads, options.lives, frames)
    except EngineEnded as error:
        return print_error(error)
    spec = sides[0].spec
    devices = device_name(spec.model.device)
    name = f"serve_{spec.model.name}" + (f"_{frames}_frames" if frames else "")
    lines = write(pd.DataFrame(rows), folder / name, devices)
    Console(soft_wrap=True).print("\n".join(lines), markup=False, highlight=False)
    return 0


def measure(
    sides: Sequence[Side], loads: Loads, lives: int, frames: int | None = None
) -> list[dict[str, Any]]:
    """Return a row for each life and load, of videos with so many frames or, without, of pictures.

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
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory(prefix="espalier-engine-") as place:
        folder = model_folder(Path(place) / "model", spec.model, adapter)
        configuration = adapter.model.config
        assert spec.backend.python is not None  # checked
        code = code_folder(Path(place) / "code")
        with closing(EngineProcess(spec.backend.python, code, "load")) as engine:
            for life in range(lives):
                # The unpruned model goes first in the first life, which the rates come from.
                for side in sides[:: -1 if life % 2 else 1]:
                    values = side.setting.values
                    engine.load(engine_arguments(side.spec, folder, configuration, values))
                    rows += _life(engine, side, life, prompt, loads)
    return rows


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

    def row(load: Mapping[str, Any]) -> dict[str, Any]:
        reply = engine.exchange({"load": {**head, **load, "first": next(numbers)}})
        return {
            "model": side.spec.model.name,
            "method": side.name,
            "ratio": side.setting.ratio,
            "life": life,
            "frames": None if video is None else len(video["frames_indices"]),
            "in_flight": load.get("in_flight"),
            "rate": load.get("rate"),
            **summary(reply, prompt.text + sum(counts), loads.limit),
        }

    row({"in_flight": 2, "requests": 4})  # warm-up
    rows = [row(load) for load in loads.closed()]
    loads.settle(rows)
    rows += [row(load) for load in loads.open()]
    for entry in rows:
        line = {name: entry[name] for name in ("method", "life", "in_flight", "rate", "first_ms")}
        print(" ".join(f"{name}={value}" for name, value in line.items()), file=sys.stderr)
    return rows


def summary(reply: Mapping[str, Any], prompt: int, limit: float | None) -> dict[str, Any]:
    """Return the figures of a load.

    Args:
        reply: of `espalier.serve.load`.
        prompt: tokens that each prompt must have.
        limit: seconds to the first token that count as in time.

    Raises:
        UserError: the engine read another number of tokens.
    """
    requests, seconds = reply["requests"], reply["seconds"]
    lengths = {entry["prompt"] for entry in requests}
    if lengths != {prompt}:
        raise UserError(f"backend=vllm read prompts of {lengths} tokens; expected: {prompt}")
    first = np.array([entry["first"] for entry in requests])
    end = np.array([entry["end"] for entry in requests])
    gaps = np.concatenate([entry["gaps"] for entry in requests])
    count = len(requests)
    return {
        "requests": count,
        "seconds": seconds,
        "prompt_tokens": prompt,
        "first_ms": 1e3 * float(np.median(first)),
        "first_p99_ms": 1e3 * float(np.quantile(first, 0.99)),
        "gap_ms": 1e3 * fmean(gaps) if len(gaps) else None,
        "gap_p99_ms": 1e3 * float(np.quantile(gaps, 0.99)) if len(gaps) else None,
        "end_ms": 1e3 * float(np.median(end)),
        "end_p99_ms": 1e3 * float(np.quantile(end, 0.99)),
        "requests_per_second": count / seconds,
        "tokens_per_second": (count + len(gaps)) / seconds,
        "blocks_mean": reply["blocks"]["mean"],
        "blocks_peak": reply["blocks"]["peak"],
        "encoder_ms": 1e3 * reply["encoder"] / count,
        "selection_ms": None if reply["selection"] is None else 1e3 * reply["selection"] / count,
        "in_time": None if limit is None else float((first <= limit).mean()),
        "limit_ms": None if limit is None else 1e3 * limit,
    }


def _sides(options: argparse.Namespace, overrides: Sequence[str]) -> list[Side]:
    """Return the unpruned model, then each cell of the command; all is checked before an engine starts."""
    # Imported here: it needs torch, which takes seconds.
    from espalier.harness.runs.served.served_session import setting_of

    request = read_command(["backend=vllm", *(NARROW if options.narrow else ()), *overrides])
    if request is None:
        raise UserError(f"{' '.join(overrides)} prints information only; valid: overrides of runs")
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
        "help": "default: 1,4,16,64",
    },
    "--load": {
        "type": _numbers(float),
        "default": [0.5, 0.8, 1.2, 2.0],
        "help": "default: 0.5,0.8,1.2,2",
    },
    "--lives": {
        "type": _numbers(int, True),
        "default": 3,
        "help": "engine lives of each side; default: 3",
    },
    "--requests": {
        "type": _numbers(int, True),
        "default": 32,
        "help": "fewest of a load; default: 32",
    },
    "--tokens": {"type": _numbers(int, True), "default": 16, "help": "of each answer; default: 16"},
    "--frames": {
        "type": _numbers(int, True),
        "help": "of a video in each request; default: a picture",
    },
    "--limit": {
        "type": _numbers(float, True),
        "help": "ms; default: 4 times the unpruned model's at the fewest in flight",
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

#: Requests of a load from which a 99th percentile is more than its slowest requests.
MANY = 100

#: What is compared: column, title, and whether more is better.
COMPARED = (
    ("first_ms", "first token", False),
    ("end_ms", "whole answer", False),
    ("requests_per_second", "requests a second", True),
)

#: Columns of the table, and how they are printed.
SHOWN = {
    "first_ms": ("first token, ms", "{:.0f}"),
    "first_p99_ms": ("99 %", "{:.0f}"),
    "gap_ms": ("between tokens, ms", "{:.1f}"),
    "end_ms": ("answer, ms", "{:.0f}"),
    "requests_per_second": ("requests/s", "{:.2f}"),
    "blocks_peak": ("cache blocks", "{:.0f}"),
    "encoder_ms": ("encoder, ms", "{:.1f}"),
    "share": ("of it selection", "{:.0%}"),
}


def write(rows: pd.DataFrame, path: Path, device: str) -> list[str]:
    """Write `<path>.csv`, `.md`, `.png` and `.svg`; return the lines of the page.

    Args:
        rows: one for each life and load.
        path: of the files, without suffix.
        device: name of the machine's device.

    Raises:
        StoreLost: the disk is full or cannot be written.
    """
    lines = page(rows, device)
    path.parent.mkdir(parents=True, exist_ok=True)
    durable.replace(path.with_suffix(".csv"), rows.to_csv(index=False).encode())
    durable.replace(path.with_suffix(".md"), ("\n".join(lines) + "\n").encode())
    save(picture(rows, device), path)
    return lines


def page(rows: pd.DataFrame, device: str) -> list[str]:
    """Return the sentences and the table, in Markdown."""
    lives = rows.life.nunique()
    spread = "; gains with 95 % intervals over pairs of lives" if lives > 1 else ""
    lines = [
        f"{subject(rows)} in vLLM on {device}, {engine_lives(lives)} of each, medians of a "
        f"load, means over lives{spread}.",
        "",
    ]
    lines += [f"- {sentence(rows, method)}" for method in methods(rows)]
    heads = ["load", "method", *(title for title, _ in SHOWN.values())]
    lines += ["", f"| {' | '.join(heads)} |", f"| --- | --- |{' ---: |' * len(SHOWN)}"]
    for load, part in _by_load(rows):
        for method in (PLAIN, *methods(rows)):
            figures = part[part.method == method]
            means = figures.mean(numeric_only=True)
            means["share"] = figures.selection_ms.sum() / max(figures.encoder_ms.sum(), 1e-9)
            if figures.selection_ms.isna().any():
                means["share"] = None  # vLLM does not time its own
            if figures.requests.min() < MANY:
                means["first_p99_ms"] = None
            values = {name: (means[name], form) for name, (_, form) in SHOWN.items()}
            cells = ["-" if pd.isna(v) else form.format(v) for v, form in values.values()]
            lines.append(f"| {load} | `{method}` | {' | '.join(cells)} |")
    return lines


def subject(rows: pd.DataFrame) -> str:
    """Return the model, and the frames of its videos if they are no pictures."""
    model, frames = rows.model.iloc[0], rows.frames.iloc[0] if "frames" in rows else None
    return str(model) if pd.isna(frames) else f"{model}, videos of {frames:.0f} frames,"


def sentence(rows: pd.DataFrame, method: str) -> str:
    """Return a method's gains at the smallest and largest closed load, what gets worse, its price, and goodputs."""
    closed = rows[rows.in_flight.notna()]
    ends = sorted({closed.in_flight.min(), closed.in_flight.max()})
    loads = [closed[closed.in_flight == number] for number in ends]
    gains = {
        title: [gain(part, method, column, rising) for part in loads]
        for column, title, rising in COMPARED
    }
    names = [load_name(part) for part in loads]
    tokens = " and ".join(
        f"{rows[rows.method == name].prompt_tokens.iloc[0]:,}" for name in (PLAIN, method)
    )
    parts = [
        f"`{method}` at {rows[rows.method == method].ratio.iloc[0]:g} (prompts of {tokens} tokens), "
        f"{' and '.join(names)}: "
        + ", ".join(f"{title} {' and '.join(map(factor, gains[title]))}" for title in gains)
    ]
    worse = [
        f"{title}, {name}"
        for title, intervals in gains.items()
        for name, interval in zip(names, intervals, strict=True)
        if upper_end(interval) < 1
    ]
    if worse:
        parts.append(f"slower than unpruned: {'; '.join(worse)}")
    shares = selection_shares(rows[rows.method == method])
    if len(shares):
        low, high = f"{100 * shares.min():.0f}", f"{100 * shares.max():.0f}"
        parts.append(
            f"choosing takes {low if low == high else f'{low} to {high}'} % of the encoder's time"
        )
    if rows.rate.notna().any():
        limit = rows.limit_ms.dropna().iloc[0]
        rates = " against ".join(goodput(rows, name) for name in (method, PLAIN))
        parts.append(f"goodput within {limit:.0f} ms: {rates} requests a second")
    return "; ".join(parts) + "."


def load_name(part: pd.DataFrame) -> str:
    """Return what a closed load is by its rows: no request of a burst takes the place of one that has ended."""
    number, requests = part.in_flight.iloc[0], part.requests.min()
    if is_burst(part):
        return f"a burst of {requests:.0f}"
    return f"{requests:.0f} requests with {number:.0f} in flight"


def is_burst(part: pd.DataFrame) -> bool:
    """Return whether all requests of a closed load start at once."""
    return bool(part.requests.min() <= part.in_flight.iloc[0])


def upper_end(interval: Interval) -> float:
    """Return the upper end of an interval, or the value of a single pair, which has no interval."""
    return interval.value if interval.high != interval.high else interval.high


def selection_shares(rows: pd.DataFrame) -> pd.Series:
    """Return the share of the encoder's time that choosing takes, load by load; vLLM does not time its own."""
    loads = rows.fillna({"in_flight": 0, "rate": 0}).groupby(["in_flight", "rate"])
    sums = loads[["selection_ms", "encoder_ms"]].sum(min_count=1).dropna()
    return sums.selection_ms / sums.encoder_ms


def engine_lives(number: int) -> str:
    """Return a number of engine lives in words."""
    return f"{number} engine {'life' if number == 1 else 'lives'}"


def gain(rows: pd.DataFrame, method: str, column: str, rising: bool) -> Interval:
    """Return how many times better a method is than the unpruned model at one load, over pairs of lives."""
    plain, reduced = (
        rows[rows.method == name].sort_values("life")[column].to_numpy() for name in (PLAIN, method)
    )
    return ratio_interval(reduced, plain) if rising else ratio_interval(plain, reduced)


def goodput(rows: pd.DataFrame, method: str) -> str:
    """Return the largest rate with enough requests in time, over lives.

    `below` where even the smallest tested rate is too much, `at least` where no tested rate is.
    """
    open_loop = rows[rows.rate.notna() & (rows.method == method)]
    best, passed = [], 0
    for _, life in open_loop.groupby("life"):
        rate = 0.0
        for row in life.sort_values("rate").itertuples():
            if row.in_time < IN_TIME:
                break
            rate = float(row.rate)
        else:
            passed += 1
        best.append(rate)
    low, high = (
        f"{rate:.2f}" if rate else f"below {open_loop.rate.min():.2f}"
        for rate in (min(best), max(best))
    )
    spread = low if low == high else f"{low} to {high}"
    return f"at least {spread}" if passed == len(best) else spread


def factor(interval: Interval) -> str:
    """Return a factor with its interval; a single pair has none."""
    ends = f" [{interval.low:.2f}, {interval.high:.2f}]" if interval.low == interval.low else ""
    return f"{interval.value:.2f}x{ends}"


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
                values="ms, median (log scale)",
                log_values=True,
            )
        )
    title = f"{subject(rows)} in vLLM: gain against load"
    lives = rows.life.nunique()
    spread = ", 95 % intervals over pairs of lives" if lives > 1 else ""
    bursts = [part.in_flight.iloc[0] for _, part in closed.groupby("in_flight") if is_burst(part)]
    burst = (
        f" {', '.join(f'{number:.0f}' for number in bursts)} in flight: one burst."
        if bursts
        else ""
    )
    foot = f"{device}; {engine_lives(lives)} of each in turns{spread}.{burst}"
    return draw(plots, title, foot)


def _gains(rows: pd.DataFrame, method: str, column: str, rising: bool) -> Iterator[Spot]:
    for number, part in rows.groupby("in_flight"):
        interval = gain(part, method, column, rising)
        ends = (interval.low, interval.high) if interval.low == interval.low else (None, None)
        yield Spot(float(number), interval.value, *ends)


def _waits(rows: pd.DataFrame, method: str) -> Iterator[Spot]:
    for rate, part in rows[rows.method == method].groupby("rate"):
        waits: Sequence[float] = part.first_ms.tolist()
        yield Spot(float(rate), sum(waits) / len(waits), min(waits), max(waits))


def _by_load(rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    for _, part in rows[rows.in_flight.notna()].groupby("in_flight"):
        yield load_name(part), part
    for rate, part in rows[rows.rate.notna()].groupby("rate"):
        yield f"{rate:.2f} a second", part


if __name__ == "__main__":
    sys.exit(main())
