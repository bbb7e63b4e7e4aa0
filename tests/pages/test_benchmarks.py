"""docs/benchmarks.md is what conf/benchmark and the task files say, and misses none of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from espalier.harness.config.group_lists import choices
from espalier.harness.paths import ROOT
from lab.pages import benchmarks_page as benchmarks
from lab.pages.benchmarks_page import FACTS, SCORES, main, page

PAGE = ROOT / "docs" / "benchmarks.md"


@pytest.fixture(scope="module")
def text() -> str:
    """The page, written once."""
    return page()


def rows_of(text: str, name: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith(f"| `{name}` |")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@pytest.mark.slow
def test_the_page_is_what_the_files_say(text: str) -> None:
    assert PAGE.read_text() == text, (
        "python -m lab.pages.benchmarks_page --write docs/benchmarks.md"
    )


@pytest.mark.parametrize("name", choices("benchmark"))
def test_every_benchmark_has_its_rows_and_its_line(text: str, name: str) -> None:
    assert [len(row) for row in rows_of(text, name)] == [len(FACTS), len(SCORES)]
    assert text.count(f"- `{name}`: ") == 1


def test_a_row_says_what_the_data_are_and_how_papers_print_the_score(text: str) -> None:
    facts, scores = rows_of(text, "gqa")
    assert facts[1:6] == [
        "`gqa` (0.0)",
        "16",
        "`lmms-lab-encoder/GQA` (testdev_balanced_instructions)",
        "testdev",
        "12,578",
    ]
    assert scores[1:] == [
        "`exact_match`",
        "accuracy x 100",
        "`unparsed`",
        "text for internvl, text for vlmevalkit, text for vlmevalkit_qwen2_vl",
        "D2Pruner, D3ToM",
    ]
    assert rows_of(text, "textvqa_ocr")[1][4] == "`ocr: true`"
    assert rows_of(text, "pope")[1][3].startswith("`pope_f1_score` (F1 of all questions x 100), ")
    task = rows_of(text, "seedling_vqa")[0][1]
    assert task == "[seedling_vqa](../tasks/seedling/seedling_vqa.yaml) (1.0)"


def test_tasks_of_an_environment_in_the_repository_are_no_links(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(benchmarks, "ROOT", Path("/"))
    assert "site-packages" not in page()


def test_every_key_of_a_file_is_explained(text: str) -> None:
    keys = text[text.index("| key |") :]
    for key in ("kind", "dataset.path", "reported", "needs", "note"):
        assert f"| `{key}` |" in keys


@pytest.mark.slow
def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--write", str(tmp_path / "page.md")]) == 0
    assert main([]) == 0
    assert capsys.readouterr().out == (tmp_path / "page.md").read_text() == page()
