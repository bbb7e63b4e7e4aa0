"""Overall scores over benchmarks: UniPruneBench's and EffiVLM-Bench's, of stored results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from espalier.harness.reports.curves.comparison import MethodPoint
from espalier.harness.reports.curves.curve_points import Scores
from espalier.harness.reports.curves.figures import COLOURS, Plot, marker
from espalier.harness.reports.curves.stored_rows import RunScores
from espalier.harness.reports.frame import StoredResult
from espalier.harness.reports.protocols.protocol_table import (
    Line,
    ProtocolTable,
    frame_of,
    grouped_runs,
    kept_text,
    method_text,
    nothing_to_show,
    plots_by_method,
)
from espalier.harness.stats import average_retention, by_unit
from espalier.harness.store.answer_digest import Key

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
        heads: the model, the method and what it keeps, by column.
        ratio: share of visual tokens removed.
        pairs: by benchmark, its scores and the unpruned model's by unit of statistics.
        agreeing: by benchmark, whether each answer is the unpruned model's; without benchmarks that lack answers.
        gains: unpruned over reduced time, one for each run that measured it.
    """

    heads: dict[str, str]
    ratio: float
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
    standings = _standings(results)
    present = {name for standing in standings for name in standing.pairs}
    abilities = {
        ability: members
        for ability, names in ABILITIES.items()
        if (members := [name for name in names if name in present])
    }
    lines: list[Line] = []
    for standing in standings:
        scores = [float(ours.mean()) for ours, _ in standing.pairs.values()]
        by_ability = {
            ability: average_retention([standing.pairs[name] for name in names])
            for ability, names in abilities.items()
        }
        lines.append(
            {
                **standing.heads,
                "score": fmean(scores) if all(0 <= score <= 1 for score in scores) else None,
                "retained": average_retention([*standing.pairs.values()]),
                **by_ability,
                "benchmarks": len(standing.pairs),
            }
        )
    title = "Scores over benchmarks (UniPruneBench)"
    frame = frame_of(lines)
    plots = _plots(frame, "retained")
    return ProtocolTable("uniprunebench", title, UNIPRUNEBENCH_WORDS, frame, plots)


def effivlm(results: Sequence[StoredResult]) -> ProtocolTable:
    """Return the overall performance, generalisation, loyalty and efficiency of each method.

    Raises:
        UserError: as `uniprunebench`.
    """
    lines: list[Line] = []
    for standing in _standings(results):
        shares, loyalty = standing.shares, None
        if standing.agreeing.keys() == standing.pairs.keys():
            loyalty = average_retention(
                [(agreement, np.ones_like(agreement)) for agreement in standing.agreeing.values()]
            )
        lines.append(
            {
                **standing.heads,
                "OP": average_retention([*standing.pairs.values()], combine=_root_mean_square),
                "OG": float(shares.std() / shares.mean()) if len(shares) > 1 else None,
                "OL": loyalty,
                "OE": f"{fmean(standing.gains):.2f}x" if standing.gains else None,
                "benchmarks": len(standing.pairs),
            }
        )
    title = "Overall scores (EffiVLM-Bench)"
    frame = frame_of(lines)
    return ProtocolTable("effivlm", title, EFFIVLM_WORDS, frame, _plots(frame, "OP", "OL"))


def _root_mean_square(shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the root mean square over the first axis, benchmarks."""
    return cast("NDArray[np.float64]", np.sqrt(np.square(shares).mean(axis=0)))


def _plots(lines: pd.DataFrame, *columns: str) -> list[Plot]:
    looks = zip(
        columns, (marker("o", zorder=4), marker("s", color=COLOURS[1], zorder=4)), strict=False
    )
    return plots_by_method(lines, ("model", "kept"), dict(looks), "percent")


def _standings(results: Sequence[StoredResult]) -> list[Standing]:
    """Return the methods with runs on all benchmarks of their model, by model and amount."""
    by_point: dict[tuple[str, MethodPoint], Standing] = {}
    benchmarks: Counter[str] = Counter()
    for group in grouped_runs(results):
        full, rule = group.unpruned, group.row["budget_rule"]
        if full is None or not full.mean() > 0:
            continue
        label = group.row["model"] + ("" if rule == "kept" else f", budget={rule}")
        benchmarks[label] += 1
        reference = _answers(next(run for run in group.runs if run.row["method"] == "none"))
        for point, runs in group.points.items():
            heads = {
                "model": label,
                "method": method_text(point, runs),
                "kept": kept_text(point),
            }
            standing = by_point.setdefault((label, point), Standing(heads, point[1]))
            scores = group.scores(runs), full
            ours, theirs = (by_unit(values, group.units) for values in scores)
            standing.pairs[group.row["benchmark"]] = ours, theirs
            answers = _answers(runs[0])
            if reference and answers:
                agreement = np.array([float(answers[key] == reference[key]) for key in group.keys])
                standing.agreeing[group.row["benchmark"]] = by_unit(agreement, group.units)
            speedups = (run.row["extra"].get("speedup") or {} for run in runs)
            # How many times as fast the first token came, where that was measured in pairs.
            standing.gains += [
                speedup["first_token"]["ratio"]
                for speedup in speedups
                if speedup.get("first_token")
            ]
    standings = [
        standing
        for (label, _), standing in by_point.items()
        if len(standing.pairs) == benchmarks[label]
    ]
    if not standings:
        raise nothing_to_show(
            "uniprunebench and effivlm",
            "a method on every benchmark, and method=none,",
            "-m method=none,random,fastv benchmark=seedling_rec,seedling_vqa ratio=0.9",
        )
    return sorted(
        standings, key=lambda entry: (entry.heads["model"], entry.ratio, -entry.shares.mean())
    )


def _answers(run: RunScores) -> dict[Key, str]:
    """Return the answers of a run; none of tables, which have only scores."""
    return {
        (entry["task"], entry["doc_id"]): entry["answer"]
        for entry in run.result.journal()
        if "answer" in entry
    }
