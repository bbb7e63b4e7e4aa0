"""Tasks of a new user in a clone: the lines that are typed, and what a person looks for afterwards."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from espalier.harness.paths import ROOT
from espalier.harness.seedling.scene_benchmarks import sample_scene, samples
from tests.forks import Forks

pytestmark = pytest.mark.slow

METHOD = """
from dataclasses import dataclass

import torch

from espalier.methods.base import Plan, Site, TokenReducer, View


@dataclass(frozen=True)
class Shortest(TokenReducer):
    \"""Keeps the tokens of the smallest norm.\"""

    p: float = 2.0

    def sites(self, depth: int) -> tuple[Site, ...]:
        return (Site("prefix"),)

    def plan(self, view: View, keep: int) -> Plan:
        norms = view.tokens.norm(p=self.p, dim=-1)
        return Plan(norms.argsort(dim=1, stable=True)[:, :keep].sort(dim=1).values)
"""


class Shell:
    """Lines that are typed in the repository, with a folder of the user's: `$HERE`.

    Args:
        folder: of the user's.
        python: what starts with `python` in a line.
    """

    def __init__(self, folder: Path, python: Forks) -> None:
        self.folder, self.python = folder, python

    def __call__(self, line: str) -> str:
        """Type a line; return what it prints."""
        wide = {**os.environ, "COLUMNS": "160"}
        return self.python.typed(line.replace("$HERE", str(self.folder)), wide)

    def keys(self, method: str) -> list[str]:
        """Return the keys of a method's runs in the store, the highest ratio first."""
        rows = [json.loads(path.read_bytes()) for path in self.folder.glob("store/runs/*/row.json")]
        rows.sort(key=lambda row: -row["ratio"])
        return [row["run_key"] for row in rows if row["method"] == method]


@pytest.fixture
def shell(tmp_path: Path, python: Forks) -> Shell:
    """With 24 pictures of the user's in a table."""
    with (tmp_path / "my.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["image", "question", "answer"])
        for number, record in enumerate(samples("seedling_vqa", "test", 0, 0, 24)):
            name = f"bild {number}.png"
            sample_scene(record).to_pil().save(tmp_path / name)
            table.writerow([name, record["question"], record["answer"]])
    (tmp_path / "mine.py").write_text(METHOD)
    return Shell(tmp_path, python)


#: The embedded model knows no word of the instruction after questions, which a notice says.
OWN = (
    'benchmark=data "benchmark.path=$HERE/my.csv" "+benchmark.prompt.post_prompt=\'\'" '
    '"store=$HERE/store" engine.paired=0'
)
SHORT = 'limit=4 "store=$HERE/store" engine.paired=0'


def test_own_pictures_become_a_table_for_a_paper_and_broken_samples_are_seen(shell: Shell) -> None:
    shell(f'python run.py -m method=none,random,divprune ratio=0.5,0.95 {OWN} "curves=$HERE/out"')
    latex = next(shell.folder.glob("out*.tex")).read_text()
    assert r"\begin{tabular}" in latex
    for words in ("divprune", "Holm", r"\caption", r"\label"):
        assert words in latex
    (plain,), (pruned, _) = shell.keys("none"), shell.keys("random")
    line = f'{pruned} --against {plain} --pictures "$HERE/broken"'
    where = '--store "$HERE/store" --set "benchmark.path=$HERE/my.csv"'
    text = shell(f"python -m espalier store show {line} {where}")
    assert "broke" in text
    assert (shell.folder / "broken" / "index.html").is_file()


def test_an_own_method_runs_with_its_values_beside_baselines(shell: Shell) -> None:
    text = shell(
        'python run.py -m "method=none,random,$HERE/mine.py:Shortest" method.params.p=1,2 ratio=0.9 '
        f"benchmark=seedling_rec {SHORT}"
    )
    assert len(shell.keys("none")) == len(shell.keys("random")) == 1
    assert len(list(shell.folder.glob("store/runs/*/row.json"))) == 4
    assert "p=1" in text


def test_a_run_goes_on_after_an_interruption(shell: Shell) -> None:
    line = (
        "python run.py method=fastv ratio=0.9 benchmark=seedling_rec limit=200 engine.batch_size=1 "
        'engine.paired=0 "store=$HERE/store" json=true'
    )
    # A shell ignores Ctrl-C in what it starts in the background, such as these tests.
    process = subprocess.Popen(
        ["bash", "-c", f"exec {line}"],
        cwd=ROOT,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HERE": str(shell.folder),
        },
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 600
    journals = list[Path]()
    while time.monotonic() < deadline and process.poll() is None:
        journals = list(shell.folder.glob("store/runs/*/journal.jsonl"))
        if journals and journals[0].read_bytes().count(b"\n") >= 4:
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert b"finished samples are kept" in errors
    row = json.loads(next(text for text in shell(line).splitlines() if text.startswith("{")))
    assert row["n_samples"] == 200
    assert 0 < row["extra"]["resumed_samples"] < 200


def test_a_sweep_on_a_cluster_is_planned(shell: Shell) -> None:
    text = shell(
        "python run.py -m +experiment=d2pruner_table1 method=none,fastv cluster=slurm --dry"
    )
    assert "54 cells of 2 models" in text
    assert re.search(r"A100: [\d.,]+ to [\d.,]+ GPU-hours", text)


def test_a_draft_proposes_words(shell: Shell) -> None:
    text = shell(f"python run.py method=parallelvlm ratio=0.9 benchmark=seedling_caption {SHORT}")
    assert "draft sees" in text
    assert "tokens a round" in text or "accepted" in text
