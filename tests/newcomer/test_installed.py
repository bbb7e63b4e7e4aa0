"""Tasks of somebody who has just installed the wheel, outside the repository, each in the fewest lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image

from tests.api.test_install import Installed, site, wheel
from tests.forks import Forks

__all__ = ["site", "wheel"]

pytestmark = pytest.mark.slow

SWEEP = ("-m", "method=none,random,fastv", "ratio=0.5,0.9", "benchmark=seedling_vqa", "limit=8")

MINE = """
from dataclasses import dataclass
from espalier.methods.base import Plan, Site, TokenReducer
from espalier.methods.select.topk import top

@dataclass(frozen=True)
class Longest(TokenReducer):
    def sites(self, depth):
        return (Site("prefix"),)
    def plan(self, view, keep):
        return Plan(top(view.tokens.float().norm(dim=-1), keep))
"""


@pytest.fixture(scope="module")
def here(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """The installed commands in the user's folder, which holds the runs of a sweep and a picture."""
    installed = Installed(site, tmp_path_factory.mktemp("user"))
    Image.new("RGB", (96, 96), "white").save(installed.folder / "a.png")
    (installed.folder / "mine.py").write_text(MINE)
    (installed.folder / "my.csv").write_text("image,question,answer\na.png,is there a star ?,no\n")
    with Forks(installed.variables, installed.folder) as python:
        installed.run = lambda *words: python(words)
        installed.espalier("run", *SWEEP, "curves=out/curves", "engine.paired=0", "json=false")
        yield installed


def test_the_rows_as_csv(here: Installed) -> None:
    here.run("-c", "import espalier; espalier.results.load().to_csv('rows.csv')")
    rows = pd.read_csv(here.folder / "rows.csv")
    assert {*rows.method} == {"none", "random", "fastv"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("method=mine.py:Longest ratio=0.9 limit=2", "Longest"),
        ("benchmark=data benchmark.path=my.csv method=fastv keep=64", "data:my"),
        (
            "benchmark=latency method=fastv ratio=0.9 limit=2 benchmark.prompt_tokens=300 "
            "benchmark.new_tokens=4",
            "throughput",
        ),
    ],
    ids=["a method of one's own", "pictures and questions of one's own", "what is saved in time"],
)
def test_a_run(here: Installed, line: str, words: str) -> None:
    assert words in here.espalier("run", *line.split(), "json=false")


def test_a_notebook_is_measured(here: Installed) -> None:
    code = "import espalier; print(espalier.evaluate('seedling', 'fastv', 'seedling_vqa', 0.9, limit=8))"
    assert "cached" in here.run("-c", code)
