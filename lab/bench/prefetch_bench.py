"""Time hidden by prefetching: `python -m lab.bench.prefetch_bench` (`make bench-feeding`).

Complete evaluations on 12-megapixel pictures and mp4 files, with `engine.prefetch=0` and 2 in turns. The model has a
real architecture with small widths and random weights, and runs on one core, as a model on an accelerator leaves the
others free; its answers take a little longer than the reading. The hidden share is

    share = (seconds in turn - seconds ahead) / seconds of reading and preprocessing in turn,

which cannot include the first batch.

`--write FOLDER` writes bench_feeding.md and .json there. A table comes first; the last line of stdout is one JSON
object.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from scipy import stats

from espalier.harness.store import Store
from lab.bench.bench_page import CORES, LOAD, Bench, choose, measured_on, verdict
from lab.bench.bench_setup import Setup, reducer
from lab.bench.prefetch_files import write_benchmark, write_pictures, write_videos

if TYPE_CHECKING:
    from espalier.harness.evaluation.evaluate import Evaluation

#: Prefetched batches, target for the hidden share, and duration of answers relative to reading.
AHEAD, TARGET, LONGER = 2, 0.9, 1.3
#: Widths of the decoder and tower that replace those of 7 billion parameters.
NARROW = (
    *("model.weights=random", "model.dtype=float32", "model.scale.layers=2"),
    "model.scale.tower_layers=1",
    "++model.facts.text={hidden: 256, intermediate: 688, heads: 4, kv_heads: 4, head_dim: 64}",
    "++model.facts.tower={hidden: 256, intermediate: 1024, heads: 4, kv_heads: 4, head_dim: 64}",
    "++model.facts.projector=[256, 256, 256]",
)


@dataclass(frozen=True)
class FileSide:
    """Files to read and the model.

    Attributes:
        kind: name of the medium in a chat.
        write: function that writes a number of files into a folder.
        overrides: config overrides, the model first.
    """

    kind: str
    write: Callable[[Path, int], list[Path]]
    overrides: tuple[str, ...]


SIDES: Mapping[str, FileSide] = {
    "pictures": FileSide(
        "image",
        write_pictures,
        ("model=llava15_7b", *NARROW),
    ),
    "videos": FileSide(
        "video",
        write_videos,
        ("model=llava_ov_7b", *NARROW, "model.video.frames=8"),
    ),
}


@dataclass(frozen=True)
class PrefetchRow:
    """One kind of file.

    Attributes:
        name: name of the kind.
        files: files per evaluation, each in its own batch.
        rounds: evaluations per way.
        new_tokens: tokens per answer.
        reading: seconds of reading and preprocessing one file, in turn; `ahead`: in the thread parallel to the model.
        answering: seconds of answering it, in turn.
        in_turn, ahead: mean seconds per evaluation.
        share: hidden share of the reading, mean over rounds and 95 % interval (Student's t).
        waited: mean seconds that an answer still waited.
        equal: whether all evaluations gave byte-identical answers.
    """

    name: str
    files: int
    rounds: int
    new_tokens: int
    reading: tuple[float, float]
    answering: float
    in_turn: float
    ahead: float
    share: tuple[float, float, float]
    waited: float
    equal: bool

    @property
    def met(self) -> bool:
        """Whether the share reaches the target, and answers are the same."""
        return self.equal and self.share[0] >= TARGET


class Evaluations:
    """Complete evaluations of one side on files in a folder.

    Args:
        name: of the side.
        folder: folder for the files.
        files: number of files.
    """

    def __init__(self, name: str, folder: Path, files: int) -> None:
        side = SIDES[name]
        model, *overrides = side.overrides
        written = write_benchmark(
            folder / name, f"feeding_{name}", side.kind, side.write(folder, files)
        )
        common = ("method=none", "ratio=0", "engine.batch_size=1", "engine.paired=0")
        setup_overrides = (*overrides, *written, *common, "model.device=cpu")
        self._setup = Setup(model=model.partition("=")[2], overrides=setup_overrides)
        self._folder = folder
        self._done = 0

    def run(self, ahead: int, tokens: int) -> Evaluation:
        """Evaluate once, with answers of a given number of tokens."""
        # Imports transformers and lmms-eval, after main has set them offline.
        from espalier.harness.evaluation.evaluate import evaluate

        lengths = (f"+benchmark.generation.{key}_new_tokens={tokens}" for key in ("min", "max"))
        spec = self._setup.spec(f"engine.prefetch={ahead}", *lengths)
        self._done += 1
        journal = Store(self._folder / "store").run(f"{spec.benchmark.name}_{self._done}").journal
        return evaluate(spec, self._setup.adapter, reducer(spec), journal)


def row_of(name: str, folder: Path, files: int, rounds: int) -> PrefetchRow:
    """Find a length of answers that takes a little longer than the reading, then evaluate both ways in turns."""
    evaluations = Evaluations(name, folder, files)
    tokens = _length(evaluations)
    turns: dict[int, list[Evaluation]] = {0: [], AHEAD: []}
    for number in range(rounds):
        for ahead in list(turns)[:: 1 if number % 2 else -1]:
            turns[ahead].append(evaluations.run(ahead, tokens))
            print(f"{name} prefetch={ahead}: {turns[ahead][-1].seconds:.2f} s", flush=True)
    plain, fed = turns.values()
    shares = [
        (turn.seconds - fed_turn.seconds) / (files * _ms(turn)["took"] / 1e3)
        for turn, fed_turn in zip(plain, fed, strict=True)
    ]
    reading = fmean(_ms(turn)["took"] / 1e3 for turn in plain)
    in_turn = fmean(turn.seconds for turn in plain)
    return PrefetchRow(
        name=name,
        files=files,
        rounds=rounds,
        new_tokens=tokens,
        reading=(reading, fmean(_ms(turn)["took"] / 1e3 for turn in fed)),
        answering=in_turn / files - reading,
        in_turn=in_turn,
        ahead=fmean(turn.seconds for turn in fed),
        share=_interval(shares),
        waited=fmean(_ms(turn)["waited"] / 1e3 for turn in fed),
        equal=len({_answers(turn) for turn in (*plain, *fed)}) == 1,
    )


def _length(evaluations: Evaluations) -> int:
    """Return the answer length that takes `LONGER` times the reading of its file, from two evaluations."""
    few, many = 8, 40
    runs = {tokens: evaluations.run(0, tokens) for tokens in (few, many)}
    answer = {n: run.seconds / run.n_samples - _ms(run)["took"] / 1e3 for n, run in runs.items()}
    token = max((answer[many] - answer[few]) / (many - few), 1e-4)
    wanted = LONGER * _ms(runs[many])["took"] / 1e3
    return max(few, round(few + (wanted - answer[few]) / token))


def _ms(done: Evaluation) -> Mapping[str, float]:
    assert done.reading_ms is not None  # no answers from a journal here
    return done.reading_ms


def _answers(done: Evaluation) -> tuple[str | None, ...]:
    return tuple(sample.raw for sample in done.samples)


def _interval(values: Sequence[float]) -> tuple[float, float, float]:
    middle, error = fmean(values), float(stats.sem(values))
    low, high = stats.t.interval(0.95, len(values) - 1, middle, error)
    return middle, float(low), float(high)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each kind of file."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_DATASETS_CACHE"] = f"{folder}/cache"
        rows = [
            row_of(name, Path(folder), options.files, options.rounds)
            for name in choose(options.only, SIDES)
        ]
    return {"rows": [asdict(row) | {"met": row.met} for row in rows]}


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table in Markdown."""
    lines = [
        "| files | answers of | reading a file | beside the model | answering it | all in turn | read ahead "
        "| hidden of the reading | |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- | --- |",
    ]
    for row in rows:
        first, ahead = row["reading"]
        share = "{:.3f} [{:.3f}, {:.3f}]".format(*row["share"])
        lines.append(
            f"| {row['files']} {row['name']} | {row['new_tokens']} tokens | {first:.3f} s | {ahead:.3f} s "
            f"| {row['answering']:.3f} s | {row['in_turn']:.2f} s | {row['ahead']:.2f} s | {share} "
            f"| {verdict(row['met'])} |"
        )
    return lines


def page(result: Mapping[str, Any]) -> str:
    """Return the page in Markdown."""
    machine = measured_on(result["conditions"], f"{CORES}, one of them for the model", LOAD)
    rounds = min(row["rounds"] for row in result["rows"])
    lines = [
        "# Reading ahead: the share that answers hide",
        "",
        f"Written by `make bench-feeding` on {machine}. JPEGs of "
        "12 megapixels and mp4 files of ten seconds (1280 x 720, 8 frames of each), one a batch, through whole "
        f"evaluations with `engine.prefetch=0` and {AHEAD} in turns, {rounds} rounds. The models have the shapes of "
        "LLaVA-1.5 and LLaVA-OneVision at small widths, with random weights; answers are as long as takes a little "
        "longer than the reading. Seconds are means; the share hidden is what reading ahead saves over what reading "
        f"takes, mean and 95 % interval (Student's t over rounds). To be met: {TARGET}, with equal answers; of n files "
        "no answer hides the reading of the first, so (n - 1) / n is the maximum.",
        "",
        *table(result["rows"]),
    ]
    return "\n".join(lines)


BENCH = Bench(
    "prefetch_bench",
    measure,
    lambda result: print("\n".join(table(result["rows"]))),
    page,
    {
        "--files": {"type": int, "default": 40, "help": "files of each kind"},
        "--rounds": {"type": int, "default": 6, "help": "evaluations per way"},
        "--only": {"help": f"comma-separated kinds: {', '.join(SIDES)}"},
    },
    name="bench_feeding",
    one_thread=True,
)
main = BENCH.main


if __name__ == "__main__":
    sys.exit(main())
