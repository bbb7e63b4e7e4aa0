"""The tasks of reading: what is asked, how pages become metrics, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from PIL import Image

from espalier.harness.config.group_lists import read_choice
from espalier.harness.errors import UserError
from espalier.harness.evaluation.lmms_tasks import load_tasks, quiet
from espalier.harness.evaluation.scoring.documents import omnidoc_page
from espalier.harness.evaluation.scoring.documents.omnidoc_page import PageFormula
from espalier.harness.paths import CONF, ROOT
from espalier.harness.specs.benchmark_spec import DatasetSpec
from espalier.tasks.ocr import utils
from tests.benchmarks.fixtures.ocr import ANSWERS, ENGLISH, FIXTURES, OCEAN, PAGES, TESTS
from tests.benchmarks.hub import picture

TASKS = ROOT / "tasks"
REPOSITORIES = {"omnidocbench": "opendatalab/OmniDocBench", "olmocr_bench": "allenai/olmOCR-bench"}


def loaded(tmp_path: Path, name: str) -> Any:
    """Return the task on its fixture."""
    FIXTURES[name](tmp_path)
    folder = tmp_path / REPOSITORIES.get(name, "guoxy25/Ocean-OCR")
    with (
        mock.patch.object(huggingface_hub, "snapshot_download", return_value=str(folder)),
        quiet(),
    ):
        (task,) = load_tasks(name, TASKS).tasks
    return task


def score(task: Any, doc: Any, results: list[Any]) -> dict[str, Any]:
    return dict(type(task).process_results.__wrapped__(task, doc, results))


@pytest.mark.parametrize("name", FIXTURES)
def test_a_page_is_asked_for_as_a_whole(tmp_path: Path, name: str) -> None:
    task = loaded(tmp_path, name)
    (message,) = task.doc_to_messages(task.test_docs()[0])
    assert [part["type"] for part in message["content"]] == ["image", "text"]
    assert isinstance(message["content"][0]["url"], Image.Image)
    assert message["content"][1]["text"] == "<|grounding|>Convert the document to markdown."
    assert task.config.generation_kwargs["max_new_tokens"] == 8192


@pytest.mark.parametrize("name", FIXTURES)
def test_no_answer_raises_and_an_empty_one_is_unparsed(tmp_path: Path, name: str) -> None:
    task = loaded(tmp_path, name)
    doc = task.test_docs()[0]
    empty = score(task, doc, [""])
    assert empty["unparsed"] == 1
    for results in ([None], ["  \n"], ["<|ref|>text<|/ref|><|det|>[[1, 2, 3, 4]]<|/det|>\n"]):
        assert score(task, doc, results) == empty
    perfect = score(task, doc, [ANSWERS[name](doc)])
    assert perfect["unparsed"] == 0
    assert perfect != empty
    assert set(perfect) <= set(task.aggregation())


def test_a_page_is_left_out_of_the_means_of_what_it_has_not() -> None:
    doc = {"annotation": json.dumps(PAGES[1]), "language": "simplified_chinese"}
    scores = utils.omnidocbench(doc, ["nothing of it"])
    assert set(scores) == {
        "text_edit",
        "text_edit_zh",
        "order_edit",
        "overall_formula_edit",
        "unparsed",
    }
    assert scores["overall_formula_edit"] == [0.0, None, None]


def test_a_category_is_the_share_of_its_tests_and_overall_the_mean_of_categories() -> None:
    tests = [
        test | {"category": category}
        for category in ("old_scans", "arxiv_math")
        for test in TESTS[category]
    ]
    page = utils.olmocr_bench({"tests": json.dumps(tests)}, [ENGLISH])
    assert (page["old_scans"], page["arxiv_math_latex"]) == ([2, 2], [0, 1])
    other = utils.olmocr_bench({"tests": json.dumps(tests[:2])}, ["short"])
    assert other["old_scans"] == [1, 2]
    assert utils.aggregate_rate([page["old_scans"], other["old_scans"]]) == 3 / 4
    overall = utils.aggregate_categories([page["overall_latex"], other["overall_latex"]])
    assert overall == pytest.approx((3 / 4 + 0) / 2)


def test_a_repository_that_is_not_here_is_told_in_one_line() -> None:
    def missing(*args: Any, **more: Any) -> str:
        raise LocalEntryNotFoundError("Cannot find it.\nMore of it.")

    with (
        mock.patch.object(huggingface_hub, "snapshot_download", missing),
        quiet(),
        pytest.raises(UserError) as error,
    ):
        load_tasks("ocean_ocr_scene_text", TASKS)
    line = str(error.value)
    assert "\n" not in line
    assert line.startswith(
        "benchmark.task='ocean_ocr_scene_text': guoxy25/Ocean-OCR cannot be had: not on this machine;"
    )
    assert "https://github.com/guoxy25/Ocean-OCR" in line


@pytest.mark.parametrize("name", FIXTURES)
def test_the_revision_that_is_set_is_the_one_that_is_read(tmp_path: Path, name: str) -> None:
    FIXTURES[name](tmp_path)
    data = DatasetSpec(**{**read_choice("benchmark", name)["dataset"], "revision": "a" * 40})
    with (
        mock.patch.object(
            huggingface_hub, "snapshot_download", return_value=str(tmp_path / str(data.path))
        ) as loader,
        quiet(),
    ):
        load_tasks(name, TASKS, pinned=data.pinned)
    assert loader.call_args.args == (data.path,)
    assert loader.call_args.kwargs["revision"] == "a" * 40


def test_a_pdf_page_is_drawn_when_it_is_asked_for(tmp_path: Path) -> None:
    drawn = picture(1)
    with mock.patch.object(utils, "page_image", return_value=drawn) as draw:
        assert utils.doc_to_visual({"image": str(tmp_path / "a.pdf"), "page": 1}) == [drawn]
    draw.assert_called_once_with(tmp_path / "a.pdf", 1, 2048)


def test_the_papers_overall_is_refused_where_formulas_cannot_be_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(omnidoc_page, "missing_programs", lambda: ["xelatex"])
    with quiet(), pytest.raises(UserError, match=r"omnidocbench_cdm.*formula_cdm needs xelatex"):
        load_tasks("omnidocbench_cdm", TASKS)


def test_the_papers_overall_takes_formulas_as_they_are_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pairs: list[PageFormula] = []

    def scores(formulas: Any) -> list[float]:
        pairs.extend(formulas)
        return [0.25, 0.75][: len(formulas)]

    monkeypatch.setattr(utils, "drawn_scores", scores)
    doc = {"annotation": json.dumps(PAGES[2]), "language": "en_ch_mixed"}
    page_scores = utils.omnidocbench_cdm(doc, [ANSWERS["omnidocbench"](doc)])
    assert page_scores["formula_cdm"] == 0.5
    assert page_scores["overall"] == [None, 0.5, None]
    assert ([pair.reference == pair.answer for pair in pairs], len(pairs)) == ([False, False], 2)
    page = {"annotation": json.dumps(PAGES[1]), "language": "simplified_chinese"}
    assert "formula_cdm" not in utils.omnidocbench_cdm(page, ["x"])


def test_every_part_has_its_file() -> None:
    assert {path.stem for path in (CONF / "benchmark").glob("ocean_ocr_*.yaml")} == set(OCEAN)
    assert {path.stem for path in (TASKS / "ocr").glob("*.yaml")} == {*FIXTURES, "omnidocbench_cdm"}
