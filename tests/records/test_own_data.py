"""Records of every kind of data file, of folders and of tables in memory; every mistake is one line with its place."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import pandas as pd
import pytest
from PIL import Image

from espalier.harness.errors import UserError
from espalier.harness.specs.records.own_data import read_records, save_records, table_of
from espalier.harness.specs.records.record import RecordSettings, RecordTable
from espalier.harness.store.files.digests import Digests
from tests.refused import refused

PLAIN = RecordSettings()
QUESTION = RecordSettings(question="what is it ?")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    place = tmp_path / "my data, 100% = {new}"
    (place / "sub").mkdir(parents=True)
    for number, name in enumerate(("a.png", "b.png", "sub/c d,e=f.png")):
        Image.new("RGB", (8, 6), (60 * number, 0, 0)).save(place / name)
    return place


def written(folder: Path, name: str, text: str | bytes) -> Path:
    file = folder / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def encoded(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode()


def refusal(path: Path, settings: RecordSettings = PLAIN) -> str:
    line = refused(read_records, path, settings)
    assert line.startswith("benchmark.")
    assert "valid:" in line
    return line


ROWS = [
    {"image": "a.png", "question": "how many ?", "answer": 2},
    {"image": "sub/c d,e=f.png", "question": "a, or\nb ?", "answer": "b"},
]


def as_file(folder: Path, ending: str) -> Path:
    frame = pd.DataFrame(ROWS).astype(str)
    file = folder / f"rows{ending}"
    match ending:
        case ".jsonl":
            file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        case ".json":
            file.write_text(json.dumps(ROWS))
        case ".parquet":
            frame.to_parquet(file)
        case _:
            frame.to_csv(file, index=False, sep="," if ending == ".csv" else "\t")
    return file


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv", ".tsv", ".parquet"])
def test_every_format_holds_the_same_records(folder: Path, ending: str) -> None:
    table = read_records(as_file(folder, ending), PLAIN)
    assert (table.name, table.score) == ("rows", "exact")
    assert [record.question for record in table.records] == ["how many ?", "a, or\nb ?"]
    assert [record.answers for record in table.records] == [("2",), ("b",)]
    assert table.records[1].media[0].path == folder / "sub/c d,e=f.png"
    assert table.digest(Digests()) == table_of(ROWS, folder).digest(Digests())


def test_several_pictures_choices_and_answers(folder: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"images": ["a.png", "b.png"], "choices": ["red", "blue"], "answer": "blue"},
        {"images": '["b.png"]', "choices": '["1", "2", "3"]', "answer": "(c)"},
    ]
    table = table_of([row | {"question": "q", "category": "x"} for row in rows], folder)
    assert [len(record.media) for record in table.records] == [2, 1]
    assert table.records[1].choices == ("1", "2", "3")
    assert (table.score, table.categories) == ("choice", ("x",))
    numbered = {"image_2": "b.png", "image_1": "a.png", "question": "q", "answers": ["x", "y"]}
    (record,) = table_of([numbered], folder).records
    assert [medium.path and medium.path.name for medium in record.media] == ["a.png", "b.png"]
    assert record.answers == ("x", "y")


def test_a_table_of_vlmevalkit_works_as_it_is(folder: Path) -> None:
    head = "index\timage\tquestion\thint\tA\tB\tC\tanswer\tcategory\n"
    text = f"7\t{encoded(folder / 'a.png')}\twhich ?\t\tx\ty\t\tB\tone\n8\t7\twhat ?\tlook\tx\ty\tz\tC\ttwo\n"
    first, second = read_records(written(folder, "bench.tsv", head + text), PLAIN).records
    assert (first.id, first.choices, first.answers) == ("7", ("x", "y"), ("B",))
    assert (second.question, second.media) == ("look\nwhat ?", first.media)
    assert first.media[0].content == (folder / "a.png").read_bytes()


def test_a_folder_has_a_data_file_or_a_question_for_each_picture(folder: Path) -> None:
    table = read_records(folder, QUESTION)
    assert [record.id for record in table.records] == ["a.png", "b.png", "sub/c d,e=f.png"]
    assert table.score == "none"
    assert "no data file" in refusal(folder)
    written(folder, "metadata.csv", "file_name,question,answer\na.png,is it red ?,no\n")
    table = read_records(folder, PLAIN)
    assert (table.name, table.score) == (folder.name, "yes_no")


def test_pictures_of_the_memory_and_of_files_are_one_key(folder: Path, tmp_path: Path) -> None:
    picture = Image.open(folder / "a.png")
    rows = [
        {"image": picture, "question": "q", "answer": 1.0},
        {"image": np.asarray(picture), "question": "q", "answer": None},
    ]
    with pytest.raises(UserError, match=r"^benchmark: row 1: no answer; valid: a text"):
        table_of(rows, folder)
    rows[1]["answer"] = True
    frame = pd.DataFrame(rows)
    saved = save_records(frame, folder, tmp_path / "saved", name="mine")
    assert saved == save_records(rows, folder, tmp_path / "saved", name="mine")
    table = read_records(saved, PLAIN)
    assert table.name == "mine"
    assert [record.answers for record in table.records] == [("1",), ("yes",)]
    assert table.digest(Digests()) == table_of(frame, folder).digest(Digests())
    first, second = table.records
    assert first.media == second.media


def test_a_changed_picture_changes_the_digest_and_a_moved_folder_does_not(folder: Path) -> None:
    before = table_of(ROWS, folder).digest(Digests())
    moved = folder.rename(folder.with_name("moved"))
    assert table_of(ROWS, moved).digest(Digests()) == before
    Image.new("RGB", (8, 6), "green").save(moved / "a.png")
    assert table_of(ROWS, moved).digest(Digests()) != before


def score_of(folder: Path, *rows: dict[str, Any], **settings: Any) -> RecordTable:
    media = {"image": "a.png", "question": "q"}
    return table_of([media | row for row in rows], folder, RecordSettings(**settings))


def test_the_score_follows_the_columns_unless_it_is_chosen(folder: Path) -> None:
    assert score_of(folder, {"answer": "Yes."}, {"answer": "no"}).score == "yes_no"
    assert score_of(folder, {"answer": "yes"}, {"answer": "maybe"}).score == "exact"
    chosen = score_of(folder, {"answer": "1,200 kg"}, score="number")
    assert (chosen.score, chosen.reason) == ("number", "")
    assert score_of(folder, {}, score="none").score == "none"


@pytest.mark.parametrize(
    ("rows", "settings", "words"),
    [
        ([{}], {}, "no column answer or answers"),
        ([{"answr": "x"}], {}, r"did you mean answr\?"),
        (
            [{"answer": "D", "choices": ["x", "y"]}],
            {},
            r"'D' is none of the choices; valid: A \(x\)",
        ),
        ([{"answer": "x", "choices": "x or y"}], {}, "choices 'x or y' are no list"),
        ([{"answer": "x", "choices": ["x"]}], {}, "1 choices"),
        ([{"answer": "A", "choices": ["x", "y"]}, {"answer": "x"}], {}, "row 1: no choices"),
        ([{"answer": "two"}], {"score": "number"}, "'two' is no number"),
        ([{"answer": "maybe"}], {"score": "yes_no"}, "'maybe'; valid: yes or no"),
        (
            [{"answer": "x", "id": 1}, {"answer": "x", "id": 1}],
            {},
            "row 1: id '1' is also that of row 0",
        ),
        ([{"answer": "x", "id": ""}], {}, "row 0: no id"),
        ([{"answer": "x", "index": 1}, {"answer": "x", "index": None}], {}, "row 1: no id"),
        ([{"answer": "x", "id": "a"}, {"answer": "x"}], {}, "row 1: no id"),
        ([{"answer": "x", "answers": ["x"]}], {}, "the columns answer and answers"),
        ([{"answer": "x", "images": ["b.png"]}], {}, "pictures in several columns"),
        ([{"answer": "x", "image": None}], {}, "no picture and no video"),
        ([{"answer": "x", "image": "https://a.b/c.png"}], {}, "is an address"),
        ([{"answer": "x", "image": "sub"}], {}, "is a folder"),
        ([{"answer": "x", "image": np.zeros((2, 2))}], {}, "an array of float64"),
        ([{"answer": "x", "image": 3}], {}, "image is of type int"),
        ([{"answer": "x", "image": "A" * 70}], {}, "is no whole base64"),
        ([{"answer": "x", "image": "A" * 72}], {}, "cannot be opened as a picture"),
        ([{"answer": "x", "image": "a" * 72 + ".png"}], {}, "does not exist"),
        ([{"answer": "x", "question": ""}], {}, "no question"),
        ([{"answer": "x", "question": {"text": "q"}}], {}, "question .* is a table"),
        ([{"answer": "x", "question": ["q"]}], {}, "question .* is a list"),
        ([{"answer": "x", "id": {"a": 1}}], {}, "row 0: id .* is a table"),
        ([{"answer": "x", "category": ["a"]}], {}, "category .* is a list"),
        ([{"answer": "x", "hint": np.array(["a"])}], {}, "hint .* is a list"),
        ([{"answer": {"text": "x"}}], {}, "answer .* is a table"),
        ([{"answers": [{"text": "x"}]}], {}, "answer .* is a table"),
        ([{"answer": "x", "choices": [["x"], ["y"]]}], {}, "choice .* is a list"),
        ([{"answer": "x", "image": {"src": "a.png"}}], {}, "image is a table of src"),
        ([{"answer": "x", "image": "/dev/zero"}], {}, "is no file and leads to none"),
        ([{"answer": "x", " id": 1}], {}, "the column ' id'; valid: 'id'"),
        (
            [{"answer": "x", "category": "a b"}, {"answer": "x", "category": "a_b"}],
            {},
            "metrics of one name",
        ),
    ],
)
def test_a_wrong_record_is_one_line_with_its_row(
    folder: Path, rows: list[dict[str, Any]], settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words) as info:
        score_of(folder, *rows, **settings)
    assert "valid:" in str(info.value)


def test_the_first_mistakes_are_named_and_the_others_counted(folder: Path) -> None:
    lines = ["image,question,answer", *(f"{n}.png,q,x" for n in range(5)), "a.png,q,x"]
    line = refusal(written(folder, "many.csv", "\n".join(lines)))
    assert line.count("does not exist") == 3
    assert "line 2: image '0.png' does not exist in" in line
    assert line.endswith("and 2 more mistakes")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", b"", "is empty"),
        ("a.csv", b"image,question,answer\n", "has no records"),
        (
            "a.csv",
            b"image,question,answer\na.png,q,x\na.png,q\n\na.png,q,x,y\n",
            "line 3: 2 fields",
        ),
        ("a.csv", b'image,question,answer\na.png,"q\nq",x\na.png,q\n', "line 4: 2 fields"),
        ("a.csv", b"image,image\na.png,b.png\n", "the column 'image' twice"),
        ("a.csv", b"image,question\ra.png,q\r", "a carriage return alone"),
        ("a.csv", b"image,question" + b"n" * 200_000 + b"\na.png,q\n", "line 1 cannot be read"),
        ("a.csv", b"Image,question\na.png,q\n", "did you mean Image?"),
        ("a.csv", "image,question,answer\na.png,q,x\n".encode("utf-16"), "is UTF-16"),
        ("a.csv", "image,question,answer\na.png,q,x\n".encode("utf-32"), "is UTF-32"),
        ("a.csv", b"image;question;answer\na.png;q;x\n", "between semicolons; valid: commas"),
        ("a.tsv", b"image,question,answer\na.png,q,x\n", "between commas; valid: tabs"),
        (
            "a.csv",
            "image,question\na.png,\xe9\n".encode("latin1"),
            "line 2 is not UTF-8 (byte 0xe9)",
        ),
        ("a.jsonl", b'{"image": "a.png"}\n{"image": \n', "line 2: no JSON"),
        ("a.jsonl", b"[1]\n", "line 1: list in place of a table"),
        ("a.json", b'{"image": []}', "holds no list"),
        ("a.parquet", b"PAR1 and no more", "cannot be read"),
        ("a.zip", b"PK\x03\x04", "is an archive (zip)"),
        ("a.csv", b"PK\x03\x04....", "is an archive (zip)"),
        ("a.xlsx", b"PK\x03\x04", "is a spreadsheet"),
        ("a.txt", b"x", "ends in '.txt'"),
        ("a", b"x", "has no ending"),
    ],
)
def test_a_wrong_file_is_one_line(folder: Path, name: str, content: bytes, words: str) -> None:
    assert words in refusal(written(folder, name, content))


def test_a_video_without_frames_is_named_with_its_line(folder: Path) -> None:
    with av.open(str(folder / "clip.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=2)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        frame = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")
        container.mux([*stream.encode(frame), *stream.encode()])
    file = written(folder, "clip.csv", "video,question,answer\nclip.mp4,q,x\n")
    assert len(read_records(file, PLAIN).records) == 1
    content = bytearray((folder / "clip.mp4").read_bytes())
    # The number of samples in the tables of sizes and of times.
    for name, offset in ((b"stsz", 12), (b"stts", 8)):
        place = content.index(name) + offset
        content[place : place + 4] = bytes(4)
    written(folder, "none.mp4", bytes(content))
    line = refusal(written(folder, "none.csv", "video,question,answer\nnone.mp4,q,x\n"))
    assert "line 2: video" in line
    assert "has no frames" in line


def test_a_picture_is_checked_by_its_header(folder: Path) -> None:
    written(folder, "empty.png", b"")
    written(folder, "text.png", b"no picture")
    broken = "image,question,answer\nempty.png,q,x\ntext.png,q,x\n"
    written(folder, "no.mp4", b"no video")
    clip = "video,question,answer\nno.mp4,q,x\n"
    for text, words in (
        (broken, ("line 2: image", "it is empty", "line 3: image")),
        (clip, ("line 2: video", "cannot be opened: Invalid data")),
    ):
        line = refusal(written(folder, "broken.csv", text))
        assert [word for word in words if word not in line] == []


@pytest.mark.parametrize(
    ("path", "settings", "words"),
    [
        ("none.csv", PLAIN, "does not exist"),
        ("bare", QUESTION, "has no pictures and no videos"),
        ("several", PLAIN, "several data files: one.csv, two.csv"),
        ("several/one.csv", QUESTION, "has a column question"),
    ],
)
def test_missing_places_and_folders_without_pictures(
    folder: Path, path: str, settings: RecordSettings, words: str
) -> None:
    (folder / "bare").mkdir()
    (folder / "several").mkdir()
    for name in ("one.csv", "two.csv"):
        written(folder, f"several/{name}", "image,question,answer\n../a.png,q,x\n")
    assert words in refusal(folder / path, settings)


@pytest.mark.parametrize("ending", ["png", "jpg", "webp", "gif", "tiff", "bmp"])
def test_a_picture_that_ends_too_early_is_named_with_its_line(folder: Path, ending: str) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8)
    Image.fromarray(noise).save(folder / f"whole.{ending}")
    whole = (folder / f"whole.{ending}").read_bytes()
    for name, content in ((f"cut.{ending}", whole[:-400]), (f"long.{ending}", whole + b"x" * 200)):
        written(folder, name, content)
    line = refusal(written(folder, "a.csv", f"image,question,answer\ncut.{ending},q,x\n"))
    assert f"line 2: image '{folder}/cut.{ending}' cannot be opened as a picture" in line
    rows = f"image,question,answer\nwhole.{ending},q,x\nlong.{ending},q,x\n"
    assert len(read_records(written(folder, "b.csv", rows), PLAIN).records) == 2
    encoded_cut = base64.b64encode(whole[:-400]).decode()
    cut = written(folder, "c.csv", f"image,question,answer\n{encoded_cut},q,x\n")
    assert "cannot be opened as a picture" in refusal(cut)
