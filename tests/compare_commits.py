"""Do two commits give the same answers? `python -m tests.compare_commits OLD [NEW]` runs the same cells on both.

Every method file on one of the five embedded benchmarks, position policies and the slow reference (with `--families`,
tiny checkpoints of three families, too) are run in a work tree of each commit, each with a store of its own. Then
answers, token counts and metrics are compared byte for byte, whatever became of run keys, rows and times. The exit code
says whether all are equal. About 12 minutes on one core with the default of 10 samples.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from espalier.harness.store.schema import upgraded

ROOT = Path(__file__).resolve().parents[1]

BENCHMARKS = tuple(f"seedling_{name}" for name in ("rec", "caption", "ocr", "vqa", "exist"))

#: Config file of the model whose place each tiny checkpoint takes.
FAMILIES = {
    "llava_next": "llava_next_7b",
    "qwen2_5_vl": "qwen2_5_vl_7b",
    "internvl": "internvl2_8b",
}
FAMILY_METHODS = ("none", "random", "divprune", "visionzip", "fastv", "pyramiddrop")

#: What identifies a cell on both sides; rows that agree in all of it are paired in the order in which they ran.
IDENTITY = ("model", "benchmark", "method", "variant", "ratio", "budget_rule", "seed", "n_samples")

COUNTS = ("visual", "text", "requested", "kept", "entering", "kv_entries", "kv_bytes", "new_tokens")

Cell = dict[str, Any]


def main() -> int:
    """Run both commits and print every cell that differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("old", help="a commit")
    parser.add_argument("new", nargs="?", default="HEAD")
    parser.add_argument("--limit", type=int, default=10, help="samples of a cell")
    parser.add_argument("--families", action="store_true", help="tiny checkpoints, too")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        methods = sorted(methods_of(chosen.old))
        names = [names_in(commit, methods, chosen.old) for commit in (chosen.old, chosen.new)]
        checkpoints = save_families(folder) if chosen.families else []
        old, new = (
            run_all(
                commit,
                [
                    *embedded_commands(listed, chosen.limit),
                    *family_commands(checkpoints, names_in(commit, FAMILY_METHODS, chosen.old)),
                ],
                folder,
            )
            for commit, listed in zip((chosen.old, chosen.new), names, strict=True)
        )
    return report(old, new)


def methods_of(commit: str) -> set[str]:
    """Return the names of a commit's method files."""
    call = ["git", "-C", str(ROOT), "ls-tree", "--name-only", commit, "conf/method/"]
    listed = subprocess.run(call, check=True, capture_output=True, text=True).stdout
    return {Path(line).stem for line in listed.splitlines()}


def names_in(commit: str, methods: Sequence[str], old: str) -> list[str]:
    """Return what each method file of an old commit is called in another: `elastic_paper` where it has variants."""
    renamed = []
    for name in methods:
        place = f"conf/method/{name}.yaml"
        variants = _show(commit, place).partition("\nvariants:")[1]
        variant = _show(old, place).partition("\nvariant: ")[2].partition("\n")[0].partition(" ")[0]
        renamed.append(f"{name}_{variant}" if variants and commit != old else name)
    return renamed


def _show(commit: str, path: str) -> str:
    """Return a file of a commit; "" if it is not there."""
    call = ["git", "-C", str(ROOT), "show", f"{commit}:{path}"]
    return subprocess.run(call, check=False, capture_output=True, text=True).stdout


def embedded_commands(methods: Sequence[str], limit: int) -> Iterator[list[str]]:
    """Yield sweeps that run each method file once, on benchmarks in turn, and some settings of the engine."""
    common = [f"limit={limit}", "refused=skip", "engine.transport=sequential"]
    for place, benchmark in enumerate(BENCHMARKS):
        names = ",".join(methods[place :: len(BENCHMARKS)])
        yield ["-m", f"benchmark={benchmark}", f"method={names}", "ratio=0.75", *common]
    yield ["-m", "benchmark=seedling_caption", "method=fastv,divprune", "ratio=0,0.9", *common]
    for setting in ("engine.positions=renumbered", "engine=emulate", "budget=flops", "seed=3"):
        method = "method=divprune" if "renumbered" in setting else "method=divprune,random_layer2"
        yield ["-m", "benchmark=seedling_rec", method, "ratio=0.75", setting, *common]


def family_commands(
    checkpoints: Sequence[Sequence[str]], methods: Sequence[str]
) -> Iterator[list[str]]:
    """Yield a sweep over each tiny checkpoint."""
    extras = ["ratio=0.5", "refused=skip", "engine.batch_size=2"]
    for checkpoint in checkpoints:
        yield ["-m", *checkpoint, f"method={','.join(methods)}", *extras]


def save_families(folder: Path) -> list[list[str]]:
    """Save a tiny checkpoint of each family and a benchmark of pictures; return the overrides that choose them."""
    from tests.families import FAMILIES as TINY
    from tests.tasks.media_tasks import benchmark, tiny_model, write_benchmark
    from tests.tiny import picture, save_tiny

    sizes = [(50, 40), (28, 56), (60, 30), (56, 25), (64, 36)]
    paths = [folder / f"p{number}.png" for number in range(len(sizes))]
    for number, (path, size) in enumerate(zip(paths, sizes, strict=True)):
        picture(number, *size).save(path)
    docs = [(f"w{number} w{number + 3}", [str(path)]) for number, path in enumerate(paths)]
    task = write_benchmark(folder / "tasks", "pictures", docs, by_hand=False)
    checkpoints = []
    for family, config in FAMILIES.items():
        spec = TINY[family].spec
        model = tiny_model(config, spec, save_tiny(spec, folder / "models" / family))
        checkpoints.append([*model, *benchmark(task, "pictures")])
    return checkpoints


def run_all(commit: str, commands: Sequence[Sequence[str]], folder: Path) -> list[Cell]:
    """Run the commands in a work tree of the commit and return what each finished cell gave."""
    number = len(list(folder.iterdir()))
    tree, store = folder / f"tree-{number}", folder / f"store-{number}"
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
    try:
        return [cell for command in commands for cell in run_one(tree, store, command)]
    finally:
        subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def run_one(tree: Path, store: Path, command: Sequence[str]) -> Iterator[Cell]:
    """Run one sweep and yield its cells."""
    call = [sys.executable, "run.py", f"store={store}", "json=true", *command]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    done = subprocess.run(call, cwd=tree, env=env, capture_output=True, text=True, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not rows:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    for row in rows:
        journal = store / "runs" / row["run_key"] / "journal.jsonl"
        entries = [json.loads(line) for line in journal.read_text().splitlines()]
        samples = {
            f"{entry['task']}/{entry['doc_id']}": {
                "answer": entry["answer"],
                **{name: entry["record"][name] for name in COUNTS if counts(entry, name)},
            }
            for entry in entries
            if "answer" in entry
        }
        yield {
            # In today's words: a commit may name variants otherwise.
            "identity": tuple(upgraded(row)[name] for name in IDENTITY),
            "metrics": row["metrics"],
            "samples": samples,
        }


def counts(entry: Cell, name: str) -> bool:
    """Say whether a number must be the same: a decoder's cache has room for a window that follows measured times."""
    return name != "kv_bytes" or entry["record"].get("decoding") is None


def report(old: Sequence[Cell], new: Sequence[Cell]) -> int:
    """Print cells that differ or exist once only; return 0 if there are none."""
    ours, theirs = numbered(old), numbered(new)
    wrong = 0
    for identity in sorted(ours.keys() | theirs.keys(), key=str):
        name = " ".join(map(str, identity))
        if identity not in ours or identity not in theirs:
            print(f"only in {'old' if identity in ours else 'new'}: {name}")
            wrong += 1
            continue
        before, after = ours[identity], theirs[identity]
        differing = [
            key for key, answer in before["samples"].items() if answer != after["samples"].get(key)
        ]
        if differing or before["metrics"] != after["metrics"]:
            print(
                f"differs: {name}: {len(differing)} of {len(before['samples'])} samples; {differing[:3]}"
            )
            wrong += 1
    answers = sum(len(cell["samples"]) for cell in theirs.values())
    print(f"{len(theirs)} cells, {answers} answers; {wrong} cells differ")
    return 1 if wrong else 0


def numbered(cells: Sequence[Cell]) -> dict[tuple[Any, ...], Cell]:
    """Index cells by identity and by how often it came before."""
    seen: Counter[tuple[Any, ...]] = Counter()
    cells_by_identity = {}
    for cell in cells:
        seen[cell["identity"]] += 1
        cells_by_identity[(*cell["identity"], seen[cell["identity"]])] = cell
    return cells_by_identity


if __name__ == "__main__":
    sys.exit(main())
