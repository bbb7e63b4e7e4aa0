"""Read the files of OCR benchmarks as samples: the picture of a page, and the data that score an answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from espalier.harness.errors import UserError, foreign
from espalier.harness.media import images

Row = dict[str, Any]

#: Files of unit tests, by category.
UNIT_TESTS = (
    "arxiv_math",
    "old_scans_math",
    "table_tests",
    "old_scans",
    "headers_footers",
    "multi_column",
    "long_tiny_text",
)
BASELINE = "baseline"
#: The base set of 1,355 pages, in releases with further sets.
SUBSET = "v1.5"

#: Remedy of a damaged file.
RELEASED = "the file as released"


def annotated_pages(folder: Path, part: str) -> list[Row]:
    """Return the pages of OmniDocBench v1.5; `annotation` has the page's annotation as JSON.

    Raises:
        UserError: a file is missing or has another form.
    """
    file = folder / "OmniDocBench.json"
    rows = []
    for number, page in enumerate(_json(file)):
        _need(file, number, page, ("layout_dets", "extra", "page_info"))
        attributes = page["page_info"].get("page_attribute", {})
        if attributes.get("subset", SUBSET) != SUBSET:
            continue
        name = Path(page["page_info"]["image_path"]).name
        image = _existing(file, number, folder / "images" / name)
        rows.append(
            {
                "image": str(image),
                "language": attributes.get("language", ""),
                "annotation": json.dumps(page, ensure_ascii=False),
            }
        )
    return _nonempty(file, rows)


def tested_pages(folder: Path, part: str) -> list[Row]:
    """Return the pages of olmOCR-Bench with unit tests; `tests` has them as JSON, each with its `category`.

    A PDF file without a baseline test of its first page gets one, as in the released evaluation. A page is rendered
    from its PDF file, unless the picture `bench_data/images/<file>_pg<page>.png` exists.

    Raises:
        UserError: a file is missing or has another form, or this machine cannot render a PDF file.
    """
    data = folder / "bench_data"
    tests_of: dict[tuple[str, int], list[Row]] = {}
    for category in UNIT_TESTS:
        file = data / f"{category}.jsonl"
        for number, test in enumerate(_json_lines(file)):
            _need(file, number, test, ("pdf", "page", "id", "type"))
            tests_of.setdefault((test["pdf"], test["page"]), []).append(
                test | {"category": category}
            )
    tested = {
        test["pdf"] for tests in tests_of.values() for test in tests if test["type"] == BASELINE
    }
    for name in dict.fromkeys(name for name, _ in tests_of if name not in tested):
        baseline = {"id": f"{name}_{BASELINE}", "type": BASELINE, "pdf": name, "page": 1}
        tests_of.setdefault((name, 1), []).append(baseline | {"category": BASELINE})
    rows = []
    for (name, page), tests in tests_of.items():
        image = data / "images" / f"{name.removesuffix('.pdf')}_pg{page}.png"
        source = image if image.is_file() else data / "pdfs" / name
        if not source.is_file():
            raise UserError(f"{str(source)!r} does not exist; {tests[0]['id']!r} is a test of it")
        if source.suffix == ".pdf" and images.renderer() is None:
            raise UserError(
                f"{str(source)!r} cannot be rendered here; valid: a machine with {' or '.join(images.RENDERERS)}, or "
                f"the page as {str(image)!r}"
            )
        rows.append(
            {
                "image": str(source),
                "page": page,
                "tests": json.dumps(tests, ensure_ascii=False),
            }
        )
    return _nonempty(data, rows)


def labelled_pictures(folder: Path, part: str) -> list[Row]:
    """Return the pictures of one part of Ocean-OCR's benchmark; `label` is the text in a picture.

    Raises:
        UserError: a file is missing or has another form.
    """
    data = folder / "OCR_eval_data"
    file = data / f"{part}.json"
    rows = []
    for number, entry in enumerate(_json(file)):
        _need(file, number, entry, ("image", "conversations"))
        with foreign(f"{str(file)!r}, row {number}: no text after the question", RELEASED):
            label = entry["conversations"][1]["value"]
        image = _existing(file, number, data / part / entry["image"])
        rows.append({"image": str(image), "label": label})
    return _nonempty(file, rows)


#: Readers of data sets by the layout of their files.
LAYOUTS: dict[str, Callable[[Path, str], list[Row]]] = {
    "annotated_pages": annotated_pages,
    "tested_pages": tested_pages,
    "labelled_pictures": labelled_pictures,
}


def _json(file: Path) -> list[Any]:
    text = _text(file)
    with foreign(f"{str(file)!r} is damaged", RELEASED):
        return list(json.loads(text))


def _json_lines(file: Path) -> Iterable[Any]:
    for number, line in enumerate(_text(file).splitlines()):
        if line.strip():
            with foreign(f"{str(file)!r}, row {number} is damaged", RELEASED):
                test = json.loads(line)
            yield test


def _text(file: Path) -> str:
    if not file.is_file():
        raise UserError(f"{str(file)!r} does not exist; valid: the data set's repository, whole")
    with foreign(f"{str(file)!r} is damaged", RELEASED):
        return file.read_text(encoding="utf-8")


def _need(file: Path, number: int, row: Any, names: Iterable[str]) -> None:
    missing = [name for name in names if not isinstance(row, Mapping) or name not in row]
    if missing:
        raise UserError(f"{str(file)!r}, row {number} has no {missing[0]!r}; its columns changed")


def _existing(file: Path, number: int, image: Path) -> Path:
    if not image.is_file():
        raise UserError(f"{str(file)!r}, row {number}: its picture {str(image)!r} does not exist")
    return image


def _nonempty(file: Path, rows: list[Row]) -> list[Row]:
    if not rows:
        raise UserError(f"{str(file)!r} has no page of the benchmark; valid: {RELEASED}")
    return rows
