"""Overall scores over benchmarks: UniPruneBench's and EffiVLM-Bench's, of stored results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from espalier.harness.evaluation.samples import Key
from espalier.harness.reports.curves.curve_points import Scores
from espalier.harness.reports.curves.figures import Plot, Series, marker, percent_spot
from espalier.harness.reports.curves.plot_style import COLOURS, INK
from espalier.harness.reports.curves.stored_rows import RunScores, StoredResult
from espalier.harness.reports.protocols.protocol_table import (
    BenchmarkRuns,
    Cell,
    MethodPoint,
    ProtocolTable,
    grouped_runs,
    is_control,
    kept_text,
    nothing_to_show,
)
from espalier.harness.stats import Interval, average_retention, by_unit

#: UniPruneBench's abilities, by the benchmarks of its paper as they are named here.
ABILITIES: Mapping[str, tuple[str, ...]] = {
    "comprehensive": ("mme", "mmbench_en"),
    "mathematics": ("task:mathvista_testmini_format", "mathvision"),
    "reading": ("task:seedbench_2_plus", "task:ocrbench"),
    "instructions": ("task:mia_bench",),
    "knowledge": ("scienceqa_img",),
    "hallucination": ("pope", "task:hallusion_bench_image"),
}

UNIPRUNEBENCH_WORDS = (
    "Mean score over all benchmarks of the selection in percent, and mean share of the unpruned score kept with its "
    "95 % interval, over all and by ability (Peng et al., arXiv 2511.02650); each benchmark has the same weight, its "
    "samples are resampled within it. Only methods with runs on all of these benchmarks have a line.",
    "Not matched: the paper's own overall score, for lack of its formula; VLMEvalKit's prompts and scorers (the "
    "paper's), its judges for MathVista, MIA-Bench and MMBench, its times, and FitPrune, VTW, G-Prune and MustDrop as "
    "that release runs them. Scores outside 0 to 1, as MME's, have their own unit, so the mean over benchmarks is only "
    "printed where all lie within.",
)

EFFIVLM_WORDS = (
    "EffiVLM-Bench's overall scores (Wang et al., arXiv 2506.00479, ACL 2025) over the benchmarks selected: OP, "
    "root mean square of the shares of the unpruned score kept (higher is better); OG, their coefficient of variation "
    "(lower is better); OL, share of answers that are the unpruned model's, to the letter (higher is better); OE, "
    "unpruned over reduced time. OG and shares are in percent.",
    "Not matched: its 17 benchmarks and InternVL2.5-38B, unless they were run; OG there is also over "
    "models, here of each; scores by judges; compression of parameters; OE there is of whole answers, here of the "
    "first token, where `engine.paired` measured it. OL needs a run store, since tables have no answers. The "
    "definitions were read in summaries of the paper.",
)


@dataclass
class Standing:
    """What one method at one amount has on the benchmarks of a model.

    Attributes:
        control: whether no paper proposes it.
        pairs: by benchmark, its scores and the unpruned model's by unit of statistics.
        agreeing: by benchmark, whether each answer is the unpruned model's; without benchmarks that lack answers.
        gains: unpruned over reduced time, one for each run that measured it.
    """

    control: bool
    pairs: dict[str, tuple[Scores, Scores]] = field(default_factory=dict)
    agreeing: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    gains: list[float] = field(default_factory=list)

    @property
    def shares(self) -> NDArray[np.float64]:
        """The share of the unpruned score kept on each benchmark."""
        return np.array([ours.mean() / full.mean() for ours, full in self.pairs.values()])


def uniprunebench(results: Sequence[StoredResult]) -> ProtocolTable:
    """Return mean scores and mean retained shares, by ability where the benchmarks are UniPruneBench's.

    Raises:
        UserError: no method ran on all benchmarks together with the unpruned model.
    """
    lines: list[Mapping[str, Cell]] = []
    standings = _standings(results)
    present = {name for *_, standing in standings for name in standing.pairs}
    abilities = {
        ability: members
        for ability, names in ABILITIES.items()
        if (members := [name for name in names if name in present])
    }
    for model, point, standing in standings:
        scores = [float(ours.mean()) for ours, _ in standing.pairs.values()]
        lines.append(
            {
                **_named(model, point, standing),
                "score": fmean(scores) if all(0 <= score <= 1 for score in scores) else None,
                "retained": average_retention([*standing.pairs.values()]),
                **{
                    ability: average_retention([standing.pairs[name] for name in names])
                    for ability, names in abilities.items()
                },
                "benchmarks": len(standing.pairs),
            }
        )
    title = "Scores over benchmarks (UniPruneBench)"
    return ProtocolTable(
        "uniprunebench", title, UNIPRUNEBENCH_WORDS, lines, _plots(lines, ("retained",))
    )


def effivlm(results: Sequence[StoredResult]) -> ProtocolTable:
    """Return the overall performance, generalisation, loyalty and efficiency of each method.

    Raises:
        UserError: as `uniprunebench`.
    """
    lines: list[Mapping[str, Cell]] = []
    for model, point, standing in _standings(results):
        shares = standing.shares
        answered = standing.agreeing.keys() == standing.pairs.keys()
        lines.append(
            {
                **_named(model, point, standing),
                "OP": average_retention([*standing.pairs.values()], combine=_root_mean_square),
                "OG": float(shares.std() / shares.mean()) if len(shares) > 1 else None,
                "OL": average_retention(
                    [
                        (agreement, np.ones_like(agreement))
                        for agreement in standing.agreeing.values()
                    ]
                )
                if answered
                else None,
                "OE": f"{fmean(standing.gains):.2f}x" if standing.gains else None,
                "benchmarks": len(standing.pairs),
            }
        )
    title = "Overall scores (EffiVLM-Bench)"
    return ProtocolTable("effivlm", title, EFFIVLM_WORDS, lines, _plots(lines, ("OP", "OL")))


def _root_mean_square(shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the root mean square over the first axis, benchmarks."""
    combined: NDArray[np.float64] = np.sqrt(np.square(shares).mean(axis=0))
    return combined


def _named(model: str, point: MethodPoint, standing: Standing) -> dict[str, Cell]:
    return {
        "model": model,
        "method": point[0] + " (control)" * standing.control,
        "kept": kept_text(point),
    }


def _standings(
    results: Sequence[StoredResult],
) -> list[tuple[str, MethodPoint, Standing]]:
    """Return the methods with runs on all benchmarks of their model, by model and amount."""
    groups = [group for group in grouped_runs(results) if _scored(group)]
    by_point: dict[tuple[str, MethodPoint], Standing] = {}
    expected: dict[str, int] = {}
    for group in groups:
        label = group.model if group.rule == "kept" else f"{group.model}, budget={group.rule}"
        expected[label] = expected.get(label, 0) + 1
        full = group.unpruned
        assert full is not None  # `_scored`
        reference = _answers(group, [run for run in group.compared.runs if run.method == "none"])
        units = group.compared.units
        for point, runs in group.points.items():
            standing = by_point.setdefault((label, point), Standing(is_control(runs)))
            standing.pairs[group.benchmark] = (
                by_unit(group.scores(runs), units),
                by_unit(full, units),
            )
            answers = _answers(group, runs)
            if reference and answers:
                agreement = [float(answers[key] == reference[key]) for key in group.compared.keys]
                standing.agreeing[group.benchmark] = by_unit(np.array(agreement), units)
            standing.gains += _gains(group, runs)
    standings = [
        (label, point, standing)
        for (label, point), standing in by_point.items()
        if len(standing.pairs) == expected[label]
    ]
    if not standings:
        raise nothing_to_show(
            "uniprunebench and effivlm",
            "a method on every benchmark, and method=none,",
            "-m method=none,random,fastv benchmark=seedling_rec,seedling_vqa ratio=0.9",
        )
    return sorted(standings, key=lambda entry: (entry[0], entry[1][1], -entry[2].shares.mean()))


def _scored(group: BenchmarkRuns) -> bool:
    return group.unpruned is not None and bool(group.unpruned.mean() > 0)


def _answers(group: BenchmarkRuns, runs: Iterable[RunScores]) -> dict[Key, str]:
    """Return the answers of the first run; none of tables, which have only scores."""
    first = next(iter(runs))
    return {
        (entry["task"], entry["doc_id"]): entry["answer"]
        for entry in group.result(first).journal()
        if "answer" in entry
    }


def _gains(group: BenchmarkRuns, runs: Iterable[RunScores]) -> list[float]:
    """Return how many times as fast the first token of each run came, where that was measured in pairs."""
    speedups = (group.result(run).row["extra"].get("speedup") or {} for run in runs)
    return [speedup["first_token"]["ratio"] for speedup in speedups if speedup.get("first_token")]


def _plots(lines: Sequence[Mapping[str, Cell]], columns: Sequence[str]) -> list[Plot]:
    """Return a plot for each model and amount, with a mark for each column; methods by the first one."""
    values: dict[str, list[float]] = {}
    for line in lines:
        cell = line[columns[0]]
        assert isinstance(cell, Interval)  # every method of a standing has shares
        values.setdefault(str(line["method"]), []).append(cell.value)
    rows = {name: row for row, name in enumerate(sorted(values, key=lambda n: -fmean(values[n])))}
    plots = []
    for title in dict.fromkeys((line["model"], line["kept"]) for line in lines):
        part = [line for line in lines if (line["model"], line["kept"]) == title]
        series = [
            Series(
                column,
                [
                    percent_spot(rows[str(line["method"])], cell)
                    for line in part
                    if isinstance(cell := line[column], Interval)
                ],
                marker("os"[place], color=(INK, COLOURS[1])[place], zorder=4),
                key=len(columns) > 1,
            )
            for place, column in enumerate(columns)
        ]
        ticks: dict[float, str] = {row: name for name, row in rows.items()}
        plots.append(Plot("dots", f"{title[0]}, {title[1]}", series, values="percent", ticks=ticks))
    return plots
