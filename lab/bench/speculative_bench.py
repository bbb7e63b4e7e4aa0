"""Speed-up of speculative decoding: `python -m lab.bench.speculative_bench` (`make bench-sd`).

One process measures every decoder on the embedded pairs of models, one thread per side. Each answer is also decoded
without a draft just before or after, with the same loop, cache and clock. Three kinds of answers:

    video      all events in 112 frames, up to the end of sequence; the video pair
    captions   every object in one picture, up to the end of sequence
    long       two pictures, as frames of a video, and exactly 160 tokens

Every speed-up has a 95 % bootstrap interval over paired answers; a target is met or missed if the entire interval
agrees. A speed-up with an interval above the bound from its own rounds is marked as not believable.

The cost of the state machine alone is also measured. `--write FOLDER` writes bench_sd.md and .json there; with `--only`
other kinds keep their figures from the folder, and the page lists where each was measured. A table comes first; the
last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from espalier.harness.decoding.speculative.decoding_record import DecodingRecord
from espalier.harness.decoding.speculative.drafts import Draft, Greedy, Row
from espalier.harness.decoding.speculative.speculative_summary import speculative_block
from espalier.harness.decoding.speculative.state_machine import Machine
from espalier.harness.decoding.speculative.transports import SequentialTransport
from espalier.harness.errors import UserError
from espalier.harness.reports.curves.terminal_tables import FIGURES
from espalier.harness.reports.printed_text import markdown_table
from espalier.harness.runs import admission
from espalier.harness.seedling.scene_questions import questions_for
from espalier.harness.seedling.scenes import Scenes
from espalier.harness.seedling.video.clip_benchmarks import in_memory, sample_clip, samples
from espalier.harness.seedling.video.clips import DrawnClip
from espalier.harness.seedling.video.events import MOST_FRAMES
from espalier.harness.store.files.digests import Digests
from espalier.methods.base import Decoder
from lab.bench.bench_page import CORES, LOAD, Bench, conditions, measured_on, printed_page
from lab.bench.bench_setup import Setup
from lab.bench.speculative_goals import targets

#: The first clip of the caption benchmark.
FIRST_CLIP = 6_000_000

SCHEMA = 2

KINDS = ("video", "captions", "long")

#: Decoders by their overrides. Windows of plain speculative decoding around its best one.
SETTINGS: tuple[tuple[str, ...], ...] = (
    ("method=vanilla_sd", "method.params.gamma=2"),
    ("method=vanilla_sd", "method.params.gamma=3"),
    ("method=vanilla_sd", "method.params.gamma=5"),
    ("method=sd_tree",),
    ("method=std", "ratio=0.5"),
    ("method=onsd",),
    ("method=specvlm_sd", "ratio=0.5"),
    ("method=pearl",),
    ("method=parallelvlm", "ratio=0"),
    ("method=parallelvlm", "ratio=0.5", "method.params.guidance=uniform"),
    ("method=parallelvlm", "ratio=0.5"),
    ("method=parallelvlm", "ratio=0.5", "method.params.gamma=best"),
    ("method=parallelvlm", "ratio=0.9"),
    ("method=parallelvlm", "ratio=0.9", "method.params.gamma=best"),
)

#: The same for the video pair, with all ratios of the paper, and evenly spaced tokens for comparison.
VIDEO_SETTINGS: tuple[tuple[str, ...], ...] = (
    ("method=vanilla_sd", "method.params.gamma=3"),
    ("method=vanilla_sd", "method.params.gamma=5"),
    ("method=sd_tree",),
    ("method=std", "ratio=0.9"),
    ("method=specvlm_sd", "ratio=0.9"),
    ("method=pearl",),
    ("method=parallelvlm", "ratio=0"),
    ("method=parallelvlm", "ratio=0.5"),
    ("method=parallelvlm", "ratio=0.9"),
    ("method=parallelvlm", "ratio=0.95"),
    ("method=parallelvlm", "ratio=0.9", "method.params.guidance=uniform"),
)

#: Uncounted warm-up answers to pictures, for kernels, caches and the pipe.
WARMING = 3

#: Counted answers of each kind; fewer in a quick run.
VIDEO, CAPTIONS, LONG = (6, 2), (32, 6), (24, 4)


def clip_chat(clip: DrawnClip, question: str) -> list[dict[str, Any]]:
    """Return a chat with a clip and a question."""
    video = {"type": "video", "video": in_memory(clip)}
    return [{"role": "user", "content": [video, {"type": "text", "text": question}]}]


@dataclass(frozen=True)
class AnswerKind:
    """Answers of one kind.

    Attributes:
        name: name of the kind.
        chats: the chats to answer.
        generation: generation settings.
        settings: decoders by their overrides.
        model: the target, a name in conf/model; empty: from the command line.
        warming: number of uncounted first answers.
    """

    name: str
    chats: Sequence[Any]
    generation: Mapping[str, Any]
    settings: tuple[tuple[str, ...], ...] = SETTINGS
    model: str = ""
    warming: int = 1


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the rows of the requested kinds, and of others those in the folder, with the targets."""
    setup = Setup(model=options.model, quick=options.quick)
    chosen = [kind for kind in kinds(setup) if kind.name in (options.only or KINDS)]
    rows = [row for kind in chosen for row in rows_of(setup, kind)]
    overhead = 1000 * machine_seconds(setup.repeats(20, 5))
    machine = conditions("cpu")
    rows, places = joined(rows, machine, earlier(options.write) if options.only else {})
    return {
        "rows": rows,
        "machine_ms": overhead,
        "targets": targets(rows, overhead),
        "conditions": machine,
        "conditions_of": places,
    }


def earlier(folder: Path | None) -> Mapping[str, Any]:
    """Return the figures in a folder, or an empty mapping.

    Raises:
        UserError: they have another format.
    """
    path = None if folder is None else folder / "bench_sd.json"
    if path is None or not path.exists():
        return {}
    figures: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if figures.get("schema") != SCHEMA:
        raise UserError(
            f"{path}: schema {figures.get('schema')}; valid: {SCHEMA}, or a run without --only"
        )
    return figures


def joined(
    rows: Sequence[dict[str, Any]], machine: Mapping[str, Any], before: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Mapping[str, Any]]]:
    """Return rows, with earlier rows of kinds not measured now, and where each kind was measured.

    Args:
        rows: rows of this run.
        machine: the machine of this run.
        before: earlier figures, or empty.
    """
    fresh = {row["kind"] for row in rows}
    kept = [row for row in before.get("rows", ()) if row["kind"] not in fresh]
    places = before.get("conditions_of", {})
    machines = {kind: machine for kind in fresh}
    machines |= {row["kind"]: places.get(row["kind"], before["conditions"]) for row in kept}
    return sorted([*rows, *kept], key=lambda row: KINDS.index(row["kind"])), machines


def kinds(setup: Setup) -> tuple[AnswerKind, ...]:
    """Return the kinds of answers in :data:`KINDS`, in order."""
    clips, count, longs = (setup.repeats(*answers) for answers in (VIDEO, CAPTIONS, LONG))
    long = {"max_new_tokens": 160, "min_new_tokens": 160, "do_sample": False}
    short = {"max_new_tokens": 160, "do_sample": False}
    full = {"max_new_tokens": 512, "do_sample": False}
    return (
        AnswerKind("video", clip_chats(clips + 1), full, VIDEO_SETTINGS, "seedling_video"),
        AnswerKind(
            "captions",
            [chat_of((index,)) for index in range(count + WARMING)],
            short,
            warming=WARMING,
        ),
        AnswerKind(
            "long", [chat_of((i, i + 1000)) for i in range(longs + WARMING)], long, warming=WARMING
        ),
    )


def clip_chats(count: int) -> list[list[dict[str, Any]]]:
    """Return chats that request all events of held-out clips. Cost: drawing the clips."""
    drawn = samples("seedling_video_caption", "test", 0, FIRST_CLIP, count, MOST_FRAMES)
    return [clip_chat(sample_clip(sample), sample["question"]) for sample in drawn]


def chat_of(scenes: Sequence[int]) -> list[dict[str, Any]]:
    """Return a chat that requests all objects of held-out scenes, one picture per scene."""
    drawn = [Scenes().scene("test", 0, index) for index in scenes]
    images = [{"type": "image", "image": scene.to_pil()} for scene in drawn]
    question = questions_for(drawn[0], {"caption": 1})[0].text
    return [{"role": "user", "content": [*images, {"type": "text", "text": question}]}]


def rows_of(setup: Setup, kind: AnswerKind) -> list[dict[str, Any]]:
    """Measure every decoder on one kind of answers."""
    setup = Setup(kind.model, setup.quick) if kind.model else setup
    rows = []
    for setting in kind.settings:
        print(f"bench-sd: {kind.name} {' '.join(setting)}", file=sys.stderr, flush=True)
        rows.append(row_of(setup, kind, setting))
    return rows


def row_of(setup: Setup, kind: AnswerKind, setting: Sequence[str]) -> dict[str, Any]:
    """Decode all chats of one kind by one decoder and return its figures."""
    # Imports transformers' models, two seconds that --help does not need.
    from espalier.harness.decoding.speculative.speculation import Speculation, with_chats

    job = admission.admit(setup.spec(*setting, "engine.threads=1"), Digests())
    decoder = job.method
    assert isinstance(decoder, Decoder)  # by SETTINGS
    decodings: list[Mapping[str, Any]] = []
    with Speculation(job.spec, setup.adapter, decoder) as pair:
        for number, chat in enumerate(kind.chats):
            inputs = setup.adapter.to_device(with_chats(setup.adapter, [chat]))
            answer = pair.generate(inputs, [str(number)], **kind.generation)
            decodings += [
                record.decoding for record in answer.records if record.decoding is not None
            ]
    block = speculative_block(decodings[kind.warming :], decoder.overlap)
    return {
        "kind": kind.name,
        "method": " ".join(part.removeprefix("method=") for part in setting).replace(
            "method.params.", ""
        ),
        "answers": len(decodings) - kind.warming,
        "tokens": sum(decoding["spent"]["tokens"] for decoding in decodings[kind.warming :]),
        # Seconds of plain decoding and of this decoder per answer, for intervals over pairs.
        "seconds": [
            [plain.total, record.spent.total]
            for record in map(DecodingRecord.from_entry, decodings[kind.warming :])
            if (plain := record.plain) is not None
        ],
        "extra": {"speculative": block},
    }


class Known:
    """Both sides of a run with a known answer, so all time is spent in the state machine."""

    def __init__(self, answer: Sequence[int]) -> None:
        self._answer = tuple(answer)

    def draft(self, tokens: Sequence[int], count: int) -> Draft:
        """Return the next tokens; every seventh token is wrong."""
        start = len(tokens)
        part = self._answer[start : start + count]
        return Draft(tuple(token + (place % 7 == 0) for place, token in enumerate(part, start + 1)))

    def rows(self, tokens: Sequence[int], draft: Draft) -> list[Row]:
        """Return the rows of greedy decoding."""
        start = len(tokens)
        return list(self._answer[start : start + len(draft.tokens) + 1])


def machine_seconds(repeats: int) -> float:
    """Return the seconds of one round with two drafted tokens in which neither side computes anything."""
    answer = [number * 37 % 1009 for number in range(600)]
    times = []
    for _ in range(repeats):
        sides = Known(answer)
        machine = Machine(sides, sides, Greedy(), SequentialTransport(), 2, True)
        start = time.perf_counter()
        trace = machine.run(500)
        times.append((time.perf_counter() - start) / len(trace.rounds))
    return median(times)


PAGE = """# Speculative decoding on the embedded models

Written by `make bench-sd`, one thread a side, fp32, batch 1. Every answer is also decoded plainly, by the same loop,
cache and clock, with the target on the same core; speed-ups are totals over totals, with bootstrap intervals over pairs
of answers. Columns are defined in [speculative.md](../../docs/speculative.md). A draft next to the target has a core of
its own: `per device` divides by the cores used.
"""

#: Description of each kind on the page.
ABOUT = {
    "video": "`video`: seedling_video (8 layers) describes clips of 4,032 visual tokens; its draft has 3 layers.",
    "captions": "`captions`: seedling (6 layers) describes one picture; its draft has 2 layers.",
    "long": "`long`: the same pair generates 160 tokens after two pictures, without an early end.",
}


def tables(result: Mapping[str, Any]) -> str:
    """Return both tables in Markdown."""
    head = ["answers", "method", "n", *FIGURES, "decode, 95 %", "end to end, 95 %", "bound"]
    rows = [
        [
            row["kind"],
            row["method"],
            str(row["answers"]),
            *(text(row) for text in FIGURES.values()),
            *_sure(row),
        ]
        for row in result["rows"]
    ]
    goals = [
        [
            goal["kind"],
            goal["method"],
            goal["what"],
            f"{goal['value']:.3g}",
            _range(goal["interval"]),
            f"{'>=' if goal['least'] else '<'} {goal['asked']:g}",
            goal["verdict"],
        ]
        for goal in result["targets"]
    ]
    note = f"One round of the state machine alone takes {result['machine_ms']:.3f} ms."
    goal_head = (
        "answers",
        "method",
        "target of parallel decoding",
        "measured",
        "95 %",
        "asked",
        "",
    )
    return f"{markdown_table(head, rows, 'l')}\n{note}\n\n{markdown_table(goal_head, goals, 'l')}"


def _sure(row: Mapping[str, Any]) -> list[str]:
    """Return the intervals of a row's speed-ups, and the bound of the decoding speed-up."""
    block = row["extra"]["speculative"]
    ends = [_range(block[f"speedup_{name}_interval"]) for name in ("decode", "end_to_end")]
    return [*ends, f"{block['speedup_bound']:.2f}"]


def _range(interval: Sequence[float] | None) -> str:
    return "-" if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}"


def page(result: Mapping[str, Any]) -> str:
    """Return the page in Markdown."""
    places = result["conditions_of"]
    about = [
        f"- {remark} On {measured_on(places[kind], CORES, LOAD)}."
        for kind, remark in ABOUT.items()
        if kind in places
    ]
    return "\n".join([PAGE, *about, "", tables(result)])


BENCH = Bench(
    "speculative_bench",
    measure,
    printed_page(tables),
    page,
    {
        "--quick": {"action": "store_true", "help": "few answers"},
        "--only": {
            "choices": KINDS,
            "action": "append",
            "help": "kinds of answers to measure; others keep the folder's figures; default: all",
        },
        "--model": {"default": "seedling", "help": "a name in conf/model, for pictures"},
    },
    name="bench_sd",
    one_thread=True,
    schema=SCHEMA,
)
main = BENCH.main


if __name__ == "__main__":
    sys.exit(main())
