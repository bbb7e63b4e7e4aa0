"""`ls`, `gc`, `verify`: the content of a store, removable files, faults; and rows of older versions."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from espalier.harness.cli.store import main
from espalier.harness.store import SCHEMA, Store
from espalier.harness.store.answer_digest import digest_of
from espalier.harness.store.exports import dated_rows, read_scores
from espalier.harness.store.files.lease import file_time
from espalier.harness.store.row_text import FOOTNOTE
from espalier.harness.store.run_entries import (
    UNFINISHED,
    RunEntry,
    entries,
    select_runs,
    table_cells,
)
from espalier.harness.store.schema import upgraded
from tests.refused import refused
from tests.runs.terminal import on_terminal

DAY = 86_400.0


def add(root: Path, key: str, scores: list[float], **fields: Any) -> dict[str, Any]:
    """Store a finished run, as the harness does."""
    run = Store(root).run(key)
    run.describe({"cell": {}})
    answers = {("t", number): f"answer {number}" for number in range(len(scores))}
    for (task, number), answer in answers.items():
        run.journal.append({"task": task, "doc_id": number, "answer": answer})
    run.journal.append(
        *({"task": "t", "doc_id": n, "scores": {"acc": score}} for n, score in enumerate(scores))
    )
    row = {
        **{"schema": SCHEMA, "status": "done", "run_key": key, "model": "m", "method": "fastv"},
        **{"benchmark": "b", "ratio": 0.5, "n_samples": len(scores)},
        "metrics": {"acc": {"value": sum(scores) / len(scores), "stderr": None}},
        "tokens": dict.fromkeys(("visual", "requested_keep", "kept_final", "layer_average"), 1),
        "flops": {"prefill_exact": 1, "share_of_full": 1},
        "time": dict.fromkeys(("vision_ms", "select_ms", "prefill_ms", "decode_ms_per_token")),
        "memory": {"kv_bytes": 1, "peak_bytes": 1},
        "extra": {
            "headline": "acc",
            "label": "",
            "failures": [],
            "aggregation": {"acc": {"how": "mean"}},
            "answers": digest_of(answers),
            "environment": {"commit": "c1"},
        },
        **fields,
    }
    run.commit(row)
    return row


def run_cli(
    capsys: pytest.CaptureFixture[str], *argv: object, main: Callable[[list[str]], int] = main
) -> tuple[int, list[str], list[str]]:
    """Return the exit code of a command, and the lines of its standard output and error."""
    capsys.readouterr()
    code = main([str(argument) for argument in argv])
    captured = capsys.readouterr()
    return code, captured.out.splitlines(), captured.err.splitlines()


def age(path: Path, days: float) -> None:
    moment = file_time(path.parent) - days * DAY
    os.utime(path, (moment, moment))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    root = tmp_path / "store"
    add(root, "aaaaaaaaaaaaaaaa", [1, 0])
    add(root, "bbbbbbbbbbbbbbbb", [1, 1], method="none", ratio=0.0)
    return root


# ---------------------------------------------------------------- ls


def test_ls_lists_runs_of_every_state(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Store(store).run("cccccccccccccccc").journal.append({"task": "t", "doc_id": 0, "answer": "x"})
    (Store(store).run("dddddddddddddddd").path / "failed.json").write_text(
        '{"cause": "no memory left"}'
    )
    (Store(store).run("eeeeeeeeeeeeeeee").path / "row.json").write_text("{")
    with Store(store).run("ffffffffffffffff").claim(0) as claimed:
        assert claimed
        code, out, err = run_cli(capsys, "ls", "--store", store)
    states = {line.split()[0]: line.split()[1] for line in out[1:]}
    assert code == 0
    assert states == {
        **{
            "aaaaaaaaaaaaaaaa": "done",
            "bbbbbbbbbbbbbbbb": "done",
            "cccccccccccccccc": "unfinished",
        },
        **{
            "dddddddddddddddd": "failed",
            "eeeeeeeeeeeeeeee": "damaged",
            "ffffffffffffffff": "running",
        },
    }
    assert any("acc 0.500" in line for line in out)
    assert any("no memory left" in line for line in out)
    assert err[-1].startswith("6 runs: 2 done, 1 damaged, 1 running, 1 failed, 1 unfinished")


def test_ls_names_runs_apart_that_differ_in_their_prompt_alone(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = add(store, "cccccccccccccccc", [1, 0])
    prompt = {"post_prompt": ""}
    settings = row.get("settings", {}) | {"benchmark": {"prompt": prompt}, "model": {}}
    Store(store).run("cccccccccccccccc").commit(row | {"settings": settings})
    _, out, _ = run_cli(capsys, "ls", "--store", store)
    methods = {line.split()[0][0]: line for line in out[1:]}
    assert 'fastv benchmark.prompt={"post_prompt": ""}' in methods["c"]
    assert "prompt" not in methods["a"] + methods["b"]


@pytest.mark.slow
def test_ls_fits_a_terminal_of_80_columns_and_loses_nothing(store: Path) -> None:
    long = {"model": "llava_onevision1_5_8b", "benchmark": "longvideobench_describe"}
    add(store, "cccccccccccccccc", [1, 0], n_samples=100, **long)
    row = add(store, "dddddddddddddddd", [1, 0])
    marked = {"extra": row["extra"] | {"unparsed": 2}}
    Store(store).run("dddddddddddddddd").commit(row | marked)
    (Store(store).run("eeeeeeeeeeeeeeee").path / "failed.json").write_text(
        '{"cause": "no memory left on any of the cards that the command has, and none on the host"}'
    )
    shown = on_terminal("-m", "espalier", "store", "ls", "--store", str(store))
    assert max(map(len, shown.lines)) <= 80
    text = " ".join(shown.text.split())
    assert "…" not in text
    assert FOOTNOTE in text
    for word in (*long.values(), "acc 0.500", "eeeeeeee: no memory left on any", "the host"):
        assert word in text
    some = on_terminal("-m", "espalier", "store", "ls", "--store", str(store), "--model", "m")
    assert "status done, model m, benchmark b, n 2" in some.text
    shown_keys = [line[:8] for line in some.lines if line[:1] and line[:1] in "abcd"]
    assert shown_keys == ["a" * 8, "b" * 8, "d" * 8]


def test_ls_chooses(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    age(store / "runs" / "aaaaaaaaaaaaaaaa" / "row.json", 3)
    for options, keys in (
        (("--method", "none"), ["bbbbbbbbbbbbbbbb"]),
        (("--days", 1), ["bbbbbbbbbbbbbbbb"]),
        (("--status", "done"), ["aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb"]),
        (("--status", "failed"), []),
    ):
        _, out, _ = run_cli(capsys, "ls", "--store", store, *options)
        assert [line.split()[0] for line in out[1:]] == keys
    code, _, (line,) = run_cli(capsys, "ls", "--store", store, "--method", "fastw")
    assert (code, line) == (
        2,
        "error: --method='fastw' is unknown (did you mean fastv?); valid: fastv, none",
    )
    code, _, (line,) = run_cli(capsys, "ls", "--store", store / "nowhere")
    assert code == 2
    assert "is not a store" in line


def test_ages_are_in_the_largest_unit_and_select_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1e9)
    ages = {59: "59 s", 60: "1 min", 3599: "60 min", 3600: "1 h", DAY - 1: "24 h", DAY: "1 d"}
    runs = [
        RunEntry(Path("aaaaaaaaaaaaaaaa"), UNFINISHED, {}, 1e9 - seconds)
        for seconds in (*ages, DAY + 0.5)
    ]
    assert [table_cells(run)[8] for run in runs] == [*ages.values(), "1 d"]
    assert select_runs(runs, {}, None, 1.0) == runs[-2::-1]


def test_ls_shows_a_label_after_the_method(store: Path) -> None:
    row = add(store, "cccccccccccccccc", [1])
    Store(store).run("cccccccccccccccc").commit(row | {"extra": row["extra"] | {"label": "K=3"}})
    methods = {run.key: table_cells(run)[3] for run in entries(store)}
    assert methods == {
        "aaaaaaaaaaaaaaaa": "fastv",
        "bbbbbbbbbbbbbbbb": "none",
        "cccccccccccccccc": "fastv K=3",
    }


def test_the_index_is_not_trusted_over_the_files(store: Path) -> None:
    assert [entry.key for entry in entries(store)] == ["aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb"]
    add(store, "aaaaaaaaaaaaaaaa", [1, 1, 1, 0])
    assert entries(store)[0].summary["value"] == 0.75
    shutil.rmtree(store / "runs" / "bbbbbbbbbbbbbbbb")
    add(store, "cccccccccccccccc", [1])
    assert [entry.key for entry in entries(store)] == ["aaaaaaaaaaaaaaaa", "cccccccccccccccc"]
    assert [entry.key for entry in entries(store, only={"cccccccccccccccc", "zz"})] == [
        "cccccccccccccccc"
    ]


# ---------------------------------------------------------------- gc


def test_gc_lists_and_removes_what_nobody_needs(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = store / "runs"
    fresh = runs / "aaaaaaaaaaaaaaaa" / f".row.json-0000000a-{'0' * 32}"
    dead = runs / "aaaaaaaaaaaaaaaa" / f".row.json-0000000a-{'1' * 32}"
    forced = runs / "bbbbbbbbbbbbbbbb" / "forced.jsonl"
    old, young = (
        Store(store).run("cccccccccccccccc").path,
        Store(store).run("dddddddddddddddd").path,
    )
    for path in (fresh, dead, forced, old / "journal.jsonl", young / "journal.jsonl"):
        path.write_text("x")
    for path in (dead, forced, old):
        age(path, 40)
    before = sorted(store.rglob("*"))
    code, out, (stays, line) = run_cli(capsys, "gc", "--store", store)
    assert code == 0
    assert [text.partition(":")[0] for text in out] == [str(dead), str(forced), str(old)]
    assert stays == "stays: 3 runs: 2 done, 1 unfinished"
    assert line == f"3 may go, 3 bytes; --yes moves them to {store / '.trash'}"
    assert [path for path in sorted(store.rglob("*")) if path.name != "index.duckdb"] == before
    run_cli(capsys, "gc", "--store", store, "--yes")
    assert not any(path.exists() for path in (dead, forced, old))
    assert fresh.exists()
    assert (young / "journal.jsonl").exists()
    assert len(Store(store).rows()) == 2
    trash = next((store / ".trash").iterdir())
    moved = sorted(path.relative_to(trash) for path in trash.rglob("*") if path.is_file())
    assert moved == sorted(
        path.relative_to(store) for path in (dead, forced, old / "journal.jsonl")
    )


def test_gc_removes_rows_of_other_code_when_asked_and_leaves_what_runs(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add(store, "cccccccccccccccc", [1], extra={"failures": [], "environment": {"commit": "c2"}})
    running = Store(store).run("dddddddddddddddd")
    running.journal.append({})
    age(running.path, 99)
    with running.claim(0):
        age(running.path, 99)
        run_cli(capsys, "gc", "--store", store, "--keep-code", "c2", "--yes", "--days", 0)
    assert [row["run_key"] for row in Store(store).rows()] == ["cccccccccccccccc"]
    assert sorted(path.name for path in (store / "runs").iterdir()) == [
        "cccccccccccccccc",
        "dddddddddddddddd",
    ]


# ---------------------------------------------------------------- verify


def test_a_whole_store_is_whole(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, (line,) = run_cli(capsys, "verify", "--store", store)
    assert (code, out, line) == (0, [], "2 runs: 2 done; nothing wrong")


def test_verify_puts_damaged_lines_aside(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = store / "runs" / "aaaaaaaaaaaaaaaa" / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b"{damaged\n", b"[7]\n", *lines[2:], b'{"torn']))
    code, (line,), _ = run_cli(capsys, "verify", "--store", store, "--dry")
    assert code == 1
    assert line == f"{path}: 2 damaged lines; without --dry they go to journal.jsonl.damaged"
    run_cli(capsys, "verify", "--store", store)
    aside = path.with_name("journal.jsonl.damaged")
    assert aside.read_bytes() == b"{damaged\n[7]\n"
    assert path.read_bytes() == b"".join([*lines, b'{"torn'])
    path.write_bytes(path.read_bytes() + b"\nnull\n")
    run_cli(capsys, "verify", "--store", store)
    assert aside.read_bytes() == b'{damaged\n[7]\n{"torn\nnull\n'
    assert run_cli(capsys, "verify", "--store", store)[0] == 0


def test_verify_sees_what_a_row_is_not_of(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = store / "runs"
    for key in ("aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb"):
        path = runs / key / "journal.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        if key == "aaaaaaaaaaaaaaaa":
            lines[0]["answer"] = "another"
            lines[2]["scores"]["acc"] = 0.5
        else:
            lines = [line for line in lines if line["doc_id"] == 0]
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    add(store, "cccccccccccccccc", [1])
    (runs / "cccccccccccccccc" / "row.json").write_text('{"schema": 99}')
    code, out, (line,) = run_cli(capsys, "verify", "--store", store)
    assert code == 1
    assert (
        out[0]
        == f"{runs}/aaaaaaaaaaaaaaaa: the answers in the journal are not those that the row is of"
    )
    assert out[1] == f"{runs}/aaaaaaaaaaaaaaaa: acc is 0.5 in the row, 0.25 by the journal's scores"
    assert out[2] == f"{runs}/bbbbbbbbbbbbbbbb: the journal has 1 answers, the row is of 2"
    assert "schema 99; this version reads 1 to" in out[3]
    assert line.endswith("4 wrong")


# ---------------------------------------------------------------- versions, export


def first(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as the first version of the layout had it."""
    settings = {"model": {"facts": {"signals": ["a"], "depth": 2}}, "draft": None, "engine": {}}
    extra = {name: value for name, value in row["extra"].items() if name != "answers"}
    return {**row, "schema": 1, "extra": extra, "settings": settings}


def test_a_row_of_an_older_version_is_lifted_and_its_file_left_alone(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Store(store).run("aaaaaaaaaaaaaaaa")
    row = run.row()
    old = first(row)
    (run.path / "row.json").write_text(json.dumps(old))
    written = (run.path / "row.json").read_bytes()
    lifted = run.row()
    assert lifted == {
        **old,
        "schema": SCHEMA,
        "extra": {**old["extra"], "answers": None},
        "settings": {"model": {"facts": {"depth": 2}}, "draft": None, "engine": {}},
    }
    assert upgraded(lifted) == lifted
    # A reader of any command takes it, and none writes it.
    assert run_cli(capsys, "ls", "--store", store)[0] == 0
    assert run_cli(capsys, "verify", "--store", store)[0] == 0
    run_cli(capsys, "export", tmp_path / "tables", "--store", store)
    assert sorted(row["schema"] for _, row in dated_rows(tmp_path / "tables")) == [SCHEMA] * 2
    assert (run.path / "row.json").read_bytes() == written


@pytest.mark.parametrize(
    ("schema", "word"), [(SCHEMA + 1, f"schema {SCHEMA + 1}; "), (0, "schema 0")]
)
def test_a_version_that_nobody_knows_is_refused_by_name(schema: int, word: str) -> None:
    with pytest.raises(ValueError, match=f"{word}.*reads 1 to {SCHEMA}"):
        upgraded({"schema": schema})


def test_tables_of_an_export_are_never_half_there(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from espalier.harness.store.exports import write_tables
    from espalier.harness.store.files import durable

    folder = tmp_path / "tables"
    write_tables(store, folder)
    add(store, "cccccccccccccccc", [1])
    plain = durable.replace

    def between(path: Path, content: bytes) -> None:
        plain(path, content)
        if path.name == "samples.parquet":
            # Scores are there before their rows: a reader is refused, and reads no run without its scores.
            keys = [row["run_key"] for _, row in dated_rows(folder)]
            refusal = refused(read_scores, folder, keys)
            assert "run cccccccccccccccc is not in rows.parquet" in refusal

    with monkeypatch.context() as patch:
        patch.setattr(durable, "replace", between)
        write_tables(store, folder)
    assert len(dated_rows(folder)) == 3
    assert sorted(path.name for path in folder.iterdir()) == ["rows.parquet", "samples.parquet"]
