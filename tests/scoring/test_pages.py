"""The files of the benchmarks as samples: what is listed, and damage that is told."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from espalier.harness.errors import UserError
from espalier.harness.evaluation.scoring.documents.omnidoc_page import (
    check_drawing,
    missing_programs,
)
from espalier.harness.evaluation.scoring.page_files import LAYOUTS
from espalier.harness.media import images
from tests.benchmarks.fixtures.ocr import FIXTURES, OCEAN
from tests.benchmarks.hub import picture

PLACES = {
    "omnidocbench": ("annotated_pages", "opendatalab/OmniDocBench", "OmniDocBench.json", ""),
    "olmocr_bench": ("tested_pages", "allenai/olmOCR-bench", "bench_data/old_scans.jsonl", ""),
    "ocean_ocr_document_en": (
        "labelled_pictures",
        "guoxy25/Ocean-OCR",
        "OCR_eval_data/document_en.json",
        "document_en",
    ),
}


def written(tmp_path: Path, name: str) -> tuple[Path, Path, Callable[[], list[dict[str, object]]]]:
    """Return the repository, its main file, and what lists the pages."""
    layout, repository, file, part = PLACES[name]
    FIXTURES[name](tmp_path)
    folder = tmp_path / repository
    return folder, folder / file, lambda: LAYOUTS[layout](folder, part)


def test_pages_of_harder_sets_are_left_out(tmp_path: Path) -> None:
    _, file, listing = written(tmp_path, "omnidocbench")
    assert len(json.loads(file.read_text())) == 4
    assert [row["language"] for row in listing()] == [
        "english",
        "simplified_chinese",
        "en_ch_mixed",
    ]


def test_tests_of_one_page_are_one_sample_and_each_file_has_one_as_a_whole(tmp_path: Path) -> None:
    _, _, listing = written(tmp_path, "olmocr_bench")
    kinds = [[test["type"] for test in json.loads(str(row["tests"]))] for row in listing()]
    assert sorted(kinds) == sorted(
        [
            ["math", "baseline"],
            ["math", "baseline"],
            ["table", "baseline"],
            ["present", "absent", "baseline"],
            ["absent", "baseline"],
            ["order", "baseline"],
            ["present", "baseline"],
        ]
    )


def test_a_page_that_has_its_own_test_as_a_whole_gets_no_second_one(tmp_path: Path) -> None:
    _, file, listing = written(tmp_path, "olmocr_bench")
    page_test = {
        "pdf": "old_scans/1.pdf",
        "page": 1,
        "id": "b",
        "type": "baseline",
        "max_repeats": 50,
    }
    file.write_text(file.read_text() + json.dumps(page_test) + "\n\n")
    tests = [
        test
        for row in listing()
        for test in json.loads(str(row["tests"]))
        if test["pdf"] == page_test["pdf"]
    ]
    assert [(test["type"], test["category"]) for test in tests] == [
        ("present", "old_scans"),
        ("absent", "old_scans"),
        ("baseline", "old_scans"),
    ]


def test_all_parts_of_ocean_ocr_are_listed(tmp_path: Path) -> None:
    for name, part in OCEAN.items():
        FIXTURES[name](tmp_path / part)
        rows = LAYOUTS["labelled_pictures"](tmp_path / part / "guoxy25/Ocean-OCR", part)
        assert all(Path(str(row["image"])).is_file() and row["label"] for row in rows)


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.unlink(), "does not exist"),
        (lambda file: file.write_bytes(file.read_bytes()[:-40]), "damaged"),
        (lambda file: file.write_bytes(b"\xff\xfe\x00"), "damaged"),
        (lambda file: file.write_text('{"a": 1}'), "row 0 has no '(layout_dets|image|pdf)'"),
        (
            lambda file: file.write_text(
                file.read_text()
                .replace('"layout_dets"', '"l"')
                .replace('"pdf"', '"p"')
                .replace('"conversations"', '"c"')
            ),
            "row 0 has no .*changed",
        ),
        (
            lambda file: file.write_text(
                file.read_text().replace(".png", ".gif").replace(".pdf", ".gif")
            ),
            "does not exist",
        ),
    ],
)
def test_damage_is_named_with_its_file(
    tmp_path: Path, name: str, damage: Callable[[Path], object], message: str
) -> None:
    _, file, listing = written(tmp_path, name)
    damage(file)
    with pytest.raises(UserError, match=message) as error:
        listing()
    assert str(tmp_path) in str(error.value)


def test_an_empty_list_of_pages_is_no_benchmark(tmp_path: Path) -> None:
    _, file, listing = written(tmp_path, "omnidocbench")
    file.write_text("[]")
    with pytest.raises(UserError, match="has no page of the benchmark"):
        listing()


def test_pdf_files_without_pictures_need_something_that_renders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _, listing = written(tmp_path, "olmocr_bench")
    for image in (folder / "bench_data/images").rglob("*.png"):
        image.unlink()
    monkeypatch.setattr(images, "renderer", lambda: None)
    with pytest.raises(
        UserError, match="cannot be rendered here; valid: a machine with pdftoppm or pypdfium2"
    ):
        listing()
    monkeypatch.setattr(images, "renderer", lambda: "pdftoppm")
    assert all(str(row["image"]).endswith(".pdf") for row in listing())


def command(folder: Path, script: str) -> None:
    """Write a program of that name which does as told."""
    folder.mkdir(exist_ok=True)
    file = folder / "pdftoppm"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


def test_a_page_is_what_the_renderer_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, source = tmp_path / "drawn.png", tmp_path / "a.pdf"
    picture(3).save(drawn)
    picture(3).save(source, "PDF")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    command(tmp_path / "bin", f'echo "$@" > {tmp_path}/said; cat {drawn}')
    assert list(images.page_image(source, 2, 512).getdata()) == list(Image.open(drawn).getdata())
    assert (tmp_path / "said").read_text().split() == [
        *("-png", "-f", "2", "-l", "2", "-singlefile", "-scale-to", "512", str(source))
    ]
    command(tmp_path / "bin", "echo 'Syntax Error: no trailer' >&2; exit 1")
    with pytest.raises(UserError, match=r"page 2 cannot be rendered: Syntax Error: no trailer"):
        images.page_image(source, 2, 512)
    with pytest.raises(UserError, match="does not exist"):
        images.page_image(tmp_path / "b.pdf", 1, 512)


def test_formulas_cannot_be_drawn_without_tex(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert missing_programs()[:3] == ["xelatex", "magick", "node"]
    with pytest.raises(
        UserError, match=r"benchmark.task='x': formula_cdm needs xelatex, magick, node"
    ):
        check_drawing("benchmark.task='x'")
