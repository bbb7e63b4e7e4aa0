"""Draw the pictures of README.md, docs/ and lab/measured: `python -m lab.pages.pictures`, or some of them by name.

The README's are of an answer of the embedded model and of the demo rows. The others are of the tables in lab/measured,
which hold what their commands measured, so that a change of style needs no new runs. Further pictures have commands of
their own:

    docs/figures/attention.png               python -m lab.pages.gaze_pictures
    docs/figures/seedling_video_clip.png     python -m lab.pages.clip_sheet 8 --write ...
    lab/measured/diffusion/steps.png         python -m lab.pages.denoising_page --write lab/measured/diffusion
    lab/measured/speculative/guided.png      make bench-guided
    lab/measured/speculative/ratio.png       python -m espalier.harness.reports.curves.decoder_report
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure

import espalier
from espalier import results
from espalier.harness.paths import DEMO, ROOT
from espalier.harness.reports.curves.diffusion_report import draw_steps
from espalier.harness.reports.curves.figures import STYLE
from espalier.harness.specs.commands import command
from espalier.harness.stats import Interval
from lab.pages.picture_grid import Estimate, GridPanel, Mark, PictureGrid, draw_grid
from lab.pages.picture_tables import PageTable, demo_gains, gains, interval_of, scores, tables_with

MEASURED = ROOT / "lab" / "measured"
#: Dots per inch: 1,400 pixels across, shown at 700.
RESOLUTION = 200

#: Titles of panels, by benchmark.
TITLES = {
    "seedling_caption": "objects named",
    "seedling_ocr": "digits read",
    "seedling_rec": "boxes right",
    "seedling_exist": "yes or no",
    "seedling_vqa": "short answers",
    "seedling_video_caption": "events told",
    "seedling_video_qa": "questions",
    "seedling_video_find": "moments and boxes",
}
#: Display names, by name of the curve or of the row, in the order of pictures; a method alone is its default reading.
NAMES = {
    "d2pruner": "D²Pruner",
    "divprune": "DivPrune",
    "dycoke paper": "DyCoke\n(paper)",
    "fastv official": "FastV",
    "uvprune": "UV-Prune",
    "visionzip paper": "VisionZip\n(paper)",
    "aircache": "AirCache",
    "elastic_paper": "Elastic Cache\n(paper)",
    "h2o_paper": "H2O\n(paper)",
    "prefixkv_paper": "PrefixKV\n(paper)",
    "pyramidkv_paper": "PyramidKV\n(paper)",
    "snapkv_paper": "SnapKV\n(paper)",
    "uniform": "uniform\n(control)",
    "pooled": "pooled\n(control)",
    "random": "random\n(control)",
    "uniform_kv": "uniform\n(control)",
    "recent_kv": "most recent\n(control)",
}
#: Shares kept that the picture of merging shows.
MERGED = ("100 %", "50 %", "25 %", "10 %")
TESTED = {
    Mark.BETTER: "better than random",
    Mark.WORSE: "worse",
    Mark.OPEN: "no difference detected",
}
GAINS = (
    "points of score above {floor}, with 95 % intervals; left: {of} kept\n"
    "colours: paired test, p < 0.05 after Holm's correction over a benchmark, which intervals do not have"
)
DROPPED = GAINS.format(floor="dropping at random in the same place", of="visual tokens")


def beats_random() -> Figure:
    """Draw the README's picture: which methods beat random dropping, on which benchmark, at which share kept."""
    points = results.compare(DEMO)
    panels = [
        GridPanel(
            f"{TITLES[str(benchmark)]}, n = {of_benchmark.n_samples.iloc[0]}",
            demo_gains(of_benchmark, NAMES),
        )
        for benchmark, of_benchmark in points.groupby("benchmark")
    ]
    title = "Which methods beat random dropping? (embedded model)"
    return draw_grid(PictureGrid(title, DROPPED, panels, TESTED, zero=True))


def beats_random_of_500() -> Figure:
    """Draw the same of the five benchmarks with 500 samples."""
    tables = tables_with(MEASURED / "figures/seedling.md", "Points above random dropping")
    panels = [
        GridPanel(TITLES[_benchmark(table)], _renamed(gains(table, table.columns)))
        for table in tables
    ]
    title = "Which methods beat random dropping? (embedded model, n = 500)"
    return draw_grid(PictureGrid(title, DROPPED, panels, TESTED, zero=True))


def video_scores() -> Figure:
    """Draw the scores of methods on videos."""
    page = MEASURED / "figures/seedling_video.md"
    panels = []
    for table in tables_with(page, "Score in percent"):
        full = dict(table.lines)["unpruned"][0]
        value, *ends = map(float, re.findall(r"[\d.]+", full))
        n_samples = table.heading.split(", ")[1].removesuffix(" samples")
        title = f"{TITLES[_benchmark(table)]}, n = {n_samples}"
        rows = scores(table, table.columns, ("random", "uniform"))
        panels.append(GridPanel(title, _renamed(rows), value, (ends[0], ends[1])))
    return draw_grid(
        PictureGrid(
            "How much of a video must be kept? (embedded model)",
            "score in percent, with 95 % intervals; left: visual tokens kept",
            panels,
            {Mark.METHOD: "method", Mark.OPEN: "control"},
            "unpruned, with its interval",
        )
    )


def cache_gains() -> Figure:
    """Draw the gains of cache compressors over random entries, of a page of lab/measured."""
    panels = []
    for table in tables_with(MEASURED / "kv" / "README.md", "with the whole cache."):
        n_samples = re.findall(r"on (\d+) samples", table.text)[0]
        title = f"{TITLES[_benchmark(table)]}, n = {n_samples}"
        panels.append(GridPanel(title, _renamed(gains(table, table.columns))))
    return draw_grid(
        PictureGrid(
            "Which compressors beat random entries? (embedded model)",
            GAINS.format(floor="keeping random entries", of="visual cache entries"),
            panels,
            TESTED,
            zero=True,
        )
    )


def decoders() -> Figure:
    """Draw the measured and the predicted speed-up of speculative decoders."""
    panels = []
    for table in tables_with(MEASURED / "speculative/README.md", "as draft;"):
        if not table.heading.startswith("seedling_"):
            continue
        place = {name: number for number, name in enumerate(table.columns)}
        rows = {
            (name, ""): [
                Estimate(float(cells[place["predicted"]]), None, Mark.SECOND),
                Estimate(float(cells[place["decode"]]), None, Mark.METHOD),
            ]
            for name, cells in table.lines
            if cells[place["decode"]] != "-"
        }
        panels.append(GridPanel(TITLES[_benchmark(table)], rows, 1.0))
    meanings = {
        Mark.METHOD: "measured decoding",
        Mark.SECOND: "predicted by acceptance and single forwards",
    }
    unit = "times as fast as plain decoding; n = 40 answers each, no interval was recorded"
    title = "How much faster do decoders generate? (embedded pair)"
    return draw_grid(PictureGrid(title, unit, panels, meanings, "as fast as plain decoding"))


def merging() -> Figure:
    """Draw D3ToM's score by steps and share kept, next to the FLOPs of an answer, as its report does."""
    frames = {}
    for table in tables_with(MEASURED / "diffusion/README.md", "seedling_"):
        cells = [
            (int(steps), 1 - float(share.split()[0]) / 100, *cell.split("; "))
            for steps, row in table.lines
            for share, cell in zip(table.columns, row, strict=True)
            if cell.count("; ") == 2 and share in MERGED
        ]
        frame = pd.DataFrame(cells, columns=["steps", "ratio", "score", "flops", "ms"])
        if len(frame):
            frame["score"] = frame.score.map(_percent_interval)
            frame["flops"] = frame.flops.map(float) * 1e9
            named = {"metric": TITLES[_benchmark(table)], "n_samples": 40}
            frames[_benchmark(table)] = frame.assign(**named)
    return draw_steps(frames, "D3ToM (paper)")


def _percent_interval(text: str) -> Interval:
    parsed = interval_of(text)
    assert parsed is not None  # the page is written by its report
    value, (low, high) = parsed
    return Interval(value / 100, low / 100, high / 100)


#: Number of the validation scene in README.md: its question is about one object, and DivPrune keeps a token of that.
SHOWN = 8


def pruned() -> Figure:
    """Draw what DivPrune leaves of a picture, as `answer.show()` does."""
    # Imports torch, which the other pictures do not need.
    from espalier.harness.seedling.scene_benchmarks import sample_scene, samples

    sample = samples("seedling_vqa", "val", 0, 9_000_000, SHOWN + 1)[SHOWN]
    with espalier.apply(espalier.load("seedling"), "divprune", ratio=0.9) as model:
        answer = model.ask(sample_scene(sample).to_pil(), sample["question"])
    assert answer.text == sample["answer"]
    figure: Figure = answer.show()
    return figure


#: Paths without suffix, what draws them, and their suffixes.
PICTURES: Mapping[str, tuple[Callable[[], Figure], tuple[str, ...]]] = {
    "docs/figures/pruned": (pruned, ("png",)),
    "docs/figures/beats_random": (beats_random, ("png",)),
    "docs/figures/seedling": (beats_random_of_500, ("png",)),
    "docs/figures/seedling_video": (video_scores, ("png",)),
    "lab/measured/kv/curves": (cache_gains, ("png", "svg")),
    "lab/measured/diffusion/merging": (merging, ("png", "svg")),
    "lab/measured/speculative/decoders": (decoders, ("png", "svg")),
}


def _benchmark(table: PageTable) -> str:
    """Return the first word of a table's heading."""
    return table.heading.replace(":", " ").replace(",", " ").split()[0]


def _renamed(
    rows: Mapping[tuple[str, str], list[Estimate]],
) -> dict[tuple[str, str], list[Estimate]]:
    """Return the rows with a display name, in the order of `NAMES`."""
    return {
        (display, share): estimates
        for name, display in NAMES.items()
        for (row_name, share), estimates in rows.items()
        if row_name == name
    }


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Write pictures; exit code 2 and one line if that fails."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.pages.pictures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = {Path(path).parent.name + "/" + Path(path).name: path for path in PICTURES}
    parser.add_argument("names", nargs="*", choices=[*names, []], help="pictures (default: all)")
    parser.add_argument("--out", type=Path, default=ROOT, help="root folder of the written files")
    options = parser.parse_args(argv)
    for path in [names[name] for name in options.names] or PICTURES:
        draw, suffixes = PICTURES[path]
        for suffix in suffixes:
            target = options.out / f"{path}.{suffix}"
            target.parent.mkdir(parents=True, exist_ok=True)
            with rc_context(STYLE):
                # Without a date, and with the fixed salt of the style, equal data gives equal bytes.
                metadata = {"Date": None} if suffix == "svg" else None
                draw().savefig(target, dpi=RESOLUTION, metadata=metadata)
            print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
