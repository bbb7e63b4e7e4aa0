"""Rows mirrored in Weights & Biases: trouble there costs a line and a bounded time, never a row."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from espalier.harness.cli import wandb as wandb_sync
from espalier.harness.cli.wandb import records
from espalier.harness.errors import UserError
from espalier.harness.runs import wandb_log
from espalier.harness.runs.wandb_log import MirrorMark
from espalier.harness.store import Store
from tests.runs.helpers import Bench, Outcome, make_bench

wandb = pytest.importorskip("wandb")

from espalier.harness.runs.wandb_content import answers  # noqa: E402


class Undrawn(Bench):
    """A bench that logs no pictures: its model draws nothing."""

    def __call__(self, *argv: str) -> Outcome:
        if "log=wandb" not in argv:
            return super().__call__(*argv)
        done = super().__call__(*argv, "log.pictures=0")
        wandb.teardown()  # its process writes the ends of files after `finish` returns
        return done


@pytest.fixture
def bench(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Bench:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    for name in ("DATA", "CACHE", "CONFIG"):
        monkeypatch.delenv(f"WANDB_{name}_DIR", raising=False)
    made = make_bench(tmp_path / "store", capsys, monkeypatch)
    return Undrawn(made.store, capsys, made.fake)


@pytest.fixture
def silent_server() -> Iterator[str]:
    """A server that takes connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.slow
def test_wandb_run_is_written_offline_after_the_row(bench: Bench) -> None:
    done = bench.success("method=fastv", "log=wandb")
    assert Store(bench.store).run(done.last["run_key"]).row() is not None
    (file,) = bench.store.glob("wandb/offline-run-*/*.wandb")
    logged = {record.WhichOneof("record_type"): record for record in records(file)}
    assert logged["run"].run.run_id == done.last["run_key"]
    config = {item.key: json.loads(item.value_json) for item in logged["run"].run.config.update}
    cell = {name: done.last[name] for name in ("model", "method", "benchmark", "ratio", "seed")}
    assert {name: config[name] for name in cell} == cell
    assert exit_of(file) == 0
    *progress, last = steps_of(file)
    metrics = done.last["metrics"]
    assert {
        f"metrics/{name}": values["value"] for name, values in metrics.items()
    }.items() <= last.items()
    assert {
        f"stderr/{name}": values["stderr"] for name, values in metrics.items()
    }.items() <= last.items()
    assert [step["progress/samples"] for step in progress] == [1, 2, 3]
    assert progress[-1]["progress/share"] == 1
    assert logged["artifact"].artifact.name == f"row-{done.last['run_key']}"
    # Nothing lies outside, so that the folder can be moved.
    assert all(
        str(bench.store) in entry.local_path
        for entry in logged["artifact"].artifact.manifest.contents
    )
    assert "WANDB_DATA_DIR" not in os.environ
    # Where rows are mirrored does not change them: the same key is found with another log.
    assert bench("method=fastv", "log=none").last["status"] == "cached"


def exit_of(file: Path) -> int:
    """Return the exit code of a run, once wandb's service, a process of its own, has written it."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        for record in records(file):
            if record.HasField("exit"):
                return int(record.exit.exit_code)
        time.sleep(0.1)
    raise AssertionError(f"{file} has no end")


def steps_of(file: Path) -> list[dict[str, Any]]:
    """Return the values of each logged step."""
    return [
        {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        for record in records(file)
        if record.WhichOneof("record_type") == "history"
    ]


@pytest.mark.slow
def test_a_run_that_fails_ends_as_failed_and_is_opened_again(bench: Bench) -> None:
    bench.fake.stop_after, bench.fake.error = 2, lambda: UserError("no more of it")
    done = bench("method=fastv", "log=wandb")
    assert done.code == 2
    assert "log=wandb" not in done.err
    (torn,) = bench.store.glob("wandb/offline-run-*/*.wandb")
    assert exit_of(torn) == 1
    assert [step["progress/samples"] for step in steps_of(torn)] == [1, 2]
    assert not MirrorMark.all(bench.store)
    assert bench("method=fastv", "log=wandb").code == 0
    (whole,) = bench.store.glob("wandb/offline-run-*/*.wandb")
    assert exit_of(whole) == 0
    assert [step.get("progress/samples") for step in steps_of(whole)] == [3, None]


@pytest.mark.slow
def test_a_sweep_has_a_table_of_its_rows(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ("-m", "method=none,fastv", "ratio=0.5", "log=wandb")
    rows = {row["method"]: row for row in bench(*sweep).rows}
    (file,) = bench.store.glob("wandb/offline-run-*/run-sweep_*.wandb")
    (run_record,) = [record.run for record in records(file) if record.HasField("run")]
    assert run_record.job_type == "comparison"
    assert run_record.run_group == MirrorMark.all(bench.store)[0].read()["group"]
    (table,) = file.parent.glob("files/media/table/comparison_*.json")
    content = json.loads(table.read_bytes())
    lines = [dict(zip(content["columns"], line, strict=True)) for line in content["data"]]
    assert [line["method"] for line in lines] == ["none", "fastv"]
    for line in lines:
        row = rows[line["method"]]
        assert line["value"] == row["metrics"][line["metric"]]["value"]
        assert line["stderr"] == row["metrics"][line["metric"]]["stderr"]
        assert line["tokens/kept_final"] == row["tokens"]["kept_final"]
    # Logged once, listed for upload, and anew if a row is.
    assert wandb_sync.main(["--store", str(bench.store), "--dry"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("3 runs to upload")
    bench(*sweep)
    assert list(bench.store.glob("wandb/offline-run-*/run-sweep_*.wandb")) == [file]


def test_trouble_with_wandb_is_a_line_and_the_sweep_goes_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**options: Any) -> None:
        raise wandb.errors.CommError("no such entity\nand more of it")

    monkeypatch.setattr(wandb, "init", fail)
    monkeypatch.setattr(wandb_log, "check", lambda options: None)
    done = bench("-m", "method=none,fastv", "ratio=0.5", "log=wandb")
    assert done.code == 0
    lines = [line for line in done.err.splitlines() if line.startswith("log=wandb")]
    *of_runs, of_sweep = lines
    assert len(of_runs) == 2
    assert all("CommError: no such entity; its row is in the store" in line for line in of_runs)
    assert of_sweep == "log=wandb: the sweep was not compared: CommError: no such entity"
    assert len(Store(bench.store).rows()) == 2


def test_a_key_that_a_server_repeats_is_in_no_line_and_no_log(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = 'wb"0123456789/abcdef'
    monkeypatch.setenv("WANDB_API_KEY", key)

    def fail(**options: Any) -> None:
        logs = bench.store / "wandb" / f"run-20260101_000000-{options['id']}" / "logs"
        logs.mkdir(parents=True)
        for log in (logs / "debug-internal.log", bench.store / "wandb" / "debug.log"):
            log.write_text(f"401: {json.dumps({'message': key})}\nnext\n")
        raise wandb.errors.CommError(f"\x1b[2J bad key {json.dumps(key)}")

    monkeypatch.setattr(wandb, "init", fail)
    monkeypatch.setattr(wandb_log, "check", lambda options: None)
    monkeypatch.setattr(wandb_log, "mode", lambda: "online")
    done = bench("method=none", "ratio=0.5", "log=wandb")
    assert 'CommError: \\x1b[2J bad key "***"; its row is in the store' in done.err
    for log in bench.store.rglob("debug*.log"):
        assert log.read_text() == '401: {"message": "***"}\nnext\n'
    for text in (key, json.dumps(key)[1:-1]):
        assert text not in done.err + done.out
        assert not any(
            text.encode() in file.read_bytes() for file in bench.store.rglob("*") if file.is_file()
        )


def test_a_key_without_a_server_that_answers_means_offline_within_seconds(
    silent_server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", silent_server)
    monkeypatch.setattr(wandb_log, "ANSWER", 0.2)
    started = time.perf_counter()
    assert [wandb_log.mode() for _ in range(3)] == ["offline"] * 3
    assert time.perf_counter() - started < 30
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{silent_server} does not respond" in line
    monkeypatch.delenv("WANDB_API_KEY")
    assert wandb_log.mode() == "offline"
    assert capsys.readouterr().err == ""


def folders(bench: Bench) -> list[Path]:
    return sorted(bench.store.glob("wandb/offline-run-*"))


@pytest.mark.slow
def test_a_run_is_logged_once_however_often_it_is_asked_for(bench: Bench) -> None:
    first = bench("method=fastv", "log=none").last
    assert not folders(bench)
    # Killed between row and mirror looks like this; the same command writes the mirror of a stored row.
    key = first["run_key"]
    torn = bench.store / f"wandb/offline-run-20260101_000000-{key}"
    torn.mkdir(parents=True)
    (torn / f"run-{key}.wandb").write_bytes(b":W&B\xe1\xbe\x00torn")
    assert bench("method=fastv", "log=wandb").last["status"] == "cached"
    (folder,) = folders(bench)
    assert folder != torn
    assert bench("method=fastv", "log=wandb").last["status"] == "cached"
    assert folders(bench) == [folder]
    # A row that was made again takes the place of the old one.
    bench("method=fastv", "log=wandb", "force=true")
    assert len(folders(bench)) == 1
    row = Store(bench.store).run(key).row()
    assert row is not None
    assert MirrorMark.of(bench.store, key).matches(row)


@pytest.mark.slow
def test_cells_of_a_sweep_share_a_group_that_lasts(bench: Bench) -> None:
    sweep = ("-m", "method=none,fastv", "ratio=0.5")
    bench(*sweep, "log=wandb")
    groups = {str(mark.read()["group"]) for mark in MirrorMark.all(bench.store)}
    assert len(groups) == 1
    usual = ("limit=3", *sweep[1:])
    assert wandb_log.group_of(["-m", *usual, "log=none", "force=true"]) in groups
    assert wandb_log.group_of(["-m", *usual[:-1], "ratio=0.9"]) not in groups


@pytest.mark.slow
def test_rows_come_back_from_the_offline_files_alone(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [bench(f"method={name}", "log=wandb").last["run_key"] for name in ("none", "fastv")]
    want = {key: (bench.store / "runs" / key / "row.json").read_bytes() for key in keys}
    # Carried elsewhere, read-only, and the store is lost.
    elsewhere = tmp_path / "elsewhere"
    shutil.move(bench.store / "wandb", elsewhere)
    shutil.rmtree(bench.store)
    store = tmp_path / "rebuilt"
    flags = ["--rebuild", str(elsewhere), "--store", str(store)]
    assert wandb_sync.main(flags) == 0
    assert "2 of 2 rows rebuilt" in capsys.readouterr().out
    for key in keys:
        assert (store / "runs" / key / "row.json").read_bytes() == want[key]
        assert json.loads((store / "runs" / key / "spec.json").read_bytes())
    assert wandb_sync.main(flags) == 0
    assert "0 of 2 rows rebuilt" in capsys.readouterr().out
    # A file that is not the one that was logged is never a row.
    for path in (elsewhere / "data/artifacts/staging").iterdir():
        path.write_bytes(path.read_bytes().replace(b'"ratio"', b'"ratia"'))
    assert wandb_sync.main(["--rebuild", str(elsewhere), "--store", str(tmp_path / "third")]) == 2
    assert "has changed since it was logged" in capsys.readouterr().err


def test_what_would_be_uploaded_is_listed_and_a_server_that_takes_nothing_is_not_believed(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    key = bench("method=fastv", "log=wandb").last["run_key"]
    flags = ["--store", str(bench.store)]
    assert wandb_sync.main([*flags, "--dry"]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{key}: offline-run-")
    assert last.startswith("1 runs to upload")
    assert wandb_sync.main(flags) == 2
    assert "WANDB_API_KEY is not set" in capsys.readouterr().err

    there: dict[str, Any] = {}

    class Run:
        summary: Any = there

        def logged_artifacts(self) -> list[Any]:
            return [wandb.Artifact(f"row-{key}", type="row")]

    class Api:
        def __init__(self, timeout: int) -> None:
            pass

        def run(self, path: str) -> Run:
            assert path == f"espalier/{key}"
            return Run()

    # The library says that it is done, and nothing is there.
    monkeypatch.setattr(wandb_sync, "mode", lambda: "online")
    monkeypatch.setattr(wandb_sync.subprocess, "run", lambda command, **more: command)
    monkeypatch.setattr(wandb, "Api", Api)
    assert wandb_sync.main(flags) == 1
    assert f"{key}: not uploaded: read back with other metrics" in capsys.readouterr().out
    row = Store(bench.store).run(key).row()
    metrics = {f"metrics/{name}": values["value"] for name, values in row["metrics"].items()}
    there |= {"run_key": key, **metrics}
    assert wandb_sync.main(flags) == 0
    assert wandb_sync.main([*flags, "--dry"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("0 runs to upload")


def test_the_table_of_answers_is_capped_and_has_their_scores() -> None:
    entries: list[dict[str, Any]] = [
        {"task": "t", "doc_id": n, "answer": f"a{n}", "asked": {"question": "q", "target": n}}
        for n in range(9)
    ]
    entries += [{"task": "t", "doc_id": n, "scores": {"right": float(n)}} for n in range(9)]
    table = answers(reversed(entries), 3)
    assert table.columns == ["task", "doc_id", "question", "target", "answer", "right"]
    assert [line[1:] for line in table.data] == [
        [n, "q", str(n), f"a{n}", float(n)] for n in range(3)
    ]
