"""The project beside what a user would pick instead: `python -m lab.bench.peer_bench --peers PYTHON`.

The same weights (the embedded model), questions and greedy answers, one at a time, on one thread: transformers'
`generate`, presses of kvpress with the rule and the number of entries of a method, and lmms-eval's own loop, in turns.
`PYTHON` is an interpreter with kvpress; lmms-eval's model class imports `decord`, which may lie in a folder of
PYTHONPATH. `--write FOLDER` writes `peers.md` and `peers.json` there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

from espalier.harness.paths import ROOT
from espalier.harness.reports.printed_text import markdown_table
from espalier.harness.seedling.scene_benchmarks import sample_scene, samples
from lab.bench.bench_page import THREADS, Bench, measured_on, printed_page
from lab.bench.peer_sides import KEPT, NEW_TOKENS, PRESSES

WEIGHTS = ROOT / "harness" / "seedling" / "weights" / "seedling"

#: With presses, and with methods of the same rule.
SIDES = ("espalier", "kvpress")
OWN = ("transformers", "espalier", *(f"espalier {name}" for name in PRESSES))
PEERS = ("transformers", *(f"kvpress {name}" for name in PRESSES))
RUNS = ("lmms-eval", "espalier-run")

VERSIONS = "import importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in %r), sep=', ')"


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of each turn of each side, after one that is not counted."""
    python, peers_python = sys.executable, options.peers
    sides = [(python, name) for name in (*OWN, *RUNS)] + [(peers_python, name) for name in PEERS]
    figures: dict[str, list[Any]] = {}
    with TemporaryDirectory() as folder:
        write_questions(Path(folder), options.limit)
        processes = {path: started(path, folder) for path in (python, peers_python)}
        for _ in range(options.turns + 1):
            for path, name in sides:
                title = f"{name} (peers)" if (path, name) == (peers_python, PEERS[0]) else name
                figures.setdefault(title, []).append(turn_of(processes[path], name))
        for process in processes.values():
            process.communicate()
    alike = {
        name: equal_slots(*(figures[f"{side} {name}"][0].pop("kept") for side in SIDES))
        for name in PRESSES
    }
    for turn in (turn for turns in figures.values() for turn in turns):
        turn.pop("kept", None)
    packages = {python: ("transformers", "lmms_eval"), peers_python: ("transformers", "kvpress")}
    return {
        "limit": options.limit,
        "versions": [
            subprocess.check_output([path, "-c", VERSIONS % (names,)], text=True).strip()
            for path, names in packages.items()
        ],
        "alike": alike,
        "sides": {title: turns[1:] for title, turns in figures.items()},
    }


def write_questions(folder: Path, count: int) -> None:
    """Write pictures by number and their questions, all of one length: a share is then the same count everywhere."""
    scenes = samples("seedling_rec", "test", 0, 0, 20 * count)
    by_length = Counter(len(record["question"].split()) for record in scenes)
    words = max(by_length, key=by_length.__getitem__)
    records = [record for record in scenes if len(record["question"].split()) == words][:count]
    for number, record in enumerate(records):
        sample_scene(record).to_pil().save(folder / f"{number}.png")
    texts = json.dumps([record["question"] for record in records])
    (folder / "questions.json").write_text(texts)


def started(python: str, folder: str) -> subprocess.Popen[str]:
    """Start an interpreter that waits for names of sides."""
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return subprocess.Popen(
        [python, str(Path(__file__).with_name("peer_sides.py")), str(WEIGHTS), folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


def turn_of(process: subprocess.Popen[str], side: str) -> dict[str, Any]:
    """Return the figures of one turn of a side."""
    assert process.stdin is not None
    assert process.stdout is not None
    print(side, file=process.stdin, flush=True)
    figures: dict[str, Any] = json.loads(process.stdout.readline())
    return figures


def spread(turns: Sequence[Mapping[str, Any]], name: str) -> str:
    """Return the median of a figure over turns, with the least and the greatest."""
    values = [turn[name] for turn in turns if name in turn]
    return f"{median(values):.1f} [{min(values):.1f}, {max(values):.1f}]" if values else "-"


def equal_slots(first: Sequence[Sequence[Any]], second: Sequence[Sequence[Any]]) -> float:
    """Return the mean share of a head's slots that two sides both keep."""
    pairs = [pair for rows in zip(first, second, strict=True) for pair in zip(*rows, strict=True)]
    return fmean(len(set(kept) & set(peer_kept)) / len(kept) for kept, peer_kept in pairs)


def equal_answers(sides: Mapping[str, Any], press_name: str) -> int:
    """Return the number of answers that a press and its method both give."""
    answers = (sides[f"{side} {press_name}"][0]["answers"] for side in SIDES)
    return sum(map(str.__eq__, *answers))


def page(result: Mapping[str, Any]) -> str:
    """Return the table, and what agrees."""
    sides, plain = result["sides"], result["sides"][OWN[0]][0]["answers"]
    columns = ("per_second", "prefill_ms", "decode_ms", "peak_mib")
    rows = [[title, *(spread(turns, name) for name in columns)] for title, turns in sides.items()]
    unreduced = sum(sides[name][0]["answers"] == plain for name in (OWN[1], f"{PEERS[0]} (peers)"))
    lines = [
        f"- {name}: {share:.2%} of a head's slots are the same, {equal_answers(sides, name)} of "
        f"{result['limit']} answers"
        for name, share in result["alike"].items()
    ]
    scores = ", ".join(f"{name} {sides[name][0]['score']:g}" for name in RUNS)
    return "\n".join(
        [
            "# The project beside its peers",
            "",
            f"`make bench-peers` on {measured_on(result['conditions'], THREADS)}; here {result['versions'][0]}, peers "
            f"{result['versions'][1]}. {result['limit']} questions of `seedling_rec`, greedy, at most {NEW_TOKENS} "
            f"tokens, one at a time; presses keep {KEPT} entries of every layer and head. Medians of turns, least and "
            "greatest.",
            "",
            markdown_table(
                ["side", "answers/s", "prefill ms", "decode ms a token", "peak MiB"], rows
            ),
            f"- without a method: {unreduced} of 2 other sides give every answer of transformers",
            *lines,
            f"- scores of the benchmark: {scores}",
        ]
    )


BENCH = Bench(
    "peer_bench",
    measure,
    printed_page(page),
    page,
    {
        "--peers": {"required": True, "help": "an interpreter with kvpress"},
        "--limit": {"type": int, "default": 24, "help": "questions"},
        "--turns": {"type": int, "default": 3, "help": "of each side"},
    },
    name="peers",
    one_thread=True,
)
main = BENCH.main


if __name__ == "__main__":
    sys.exit(main())
