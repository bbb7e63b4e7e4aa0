"""What `python -m espalier benchmarks check` says of data that are there, that are not, and that have changed."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from espalier.harness.cli.benchmarks import main
from espalier.harness.config.group_table import listing
from espalier.harness.tools.benchmarks.benchmark_check import check
from espalier.harness.tools.doctor.machine_report import Finding
from tests.benchmarks.runs import Repositories


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


@pytest.fixture
def copy(repositories: Repositories, tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that copies a benchmark's data set, to be damaged."""

    def copied(name: str) -> Path:
        return Path(shutil.copytree(repositories(name), tmp_path / "copy"))

    return copied


def edited(root: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    """Write the one parquet file below a folder anew."""
    (file,) = root.rglob("*.parquet")
    pq.write_table(change(pq.read_table(file)), file)


def test_list_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert (main(["list"]), capsys.readouterr().out) == (0, listing("benchmark"))


@pytest.mark.slow
def test_every_step_says_what_it_saw(
    repositories: Repositories, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "pope", "--path", str(repositories("pope"))]) == 0
    lines = capsys.readouterr().out.splitlines()
    words = [line.split(maxsplit=3) for line in lines[:3]]
    assert [line_words[:3] for line_words in words] == [
        ["pope", "data", "ok"],
        ["pope", "rows", "ok"],
        ["pope", "answers", "ok"],
    ]
    assert "lmms-lab-encoder/POPE, split test" in words[0][3]
    assert "picture 96x96" in words[1][3]
    assert words[2][3].startswith("2 samples by seedling (not a result): pope_f1_mean")
    assert lines[3].split()[:2] == ["pope", "prompt"]
    assert lines[3].endswith("ASSISTANT:'")


@pytest.mark.slow
def test_a_benchmark_of_the_clock_is_not_asked_about_empty_answers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    short = ["benchmark.prompt_tokens=300", "benchmark.new_tokens=4"]
    assert main(["check", "latency", *short]) == 0
    assert "2 samples by seedling (not a result): throughput " in capsys.readouterr().out


def test_videos_are_shown_to_a_tiny_model(repositories: Repositories) -> None:
    findings, prompt = check("videomme", repositories("videomme"))
    assert [finding.status for finding in findings] == ["ok", "ok", "ok"]
    assert "video of 4.0 s" in by_name(findings)["rows"].detail
    assert by_name(findings)["answers"].detail.startswith("2 samples by tiny_video")
    assert "<|video_pad|>" in prompt


def test_another_number_of_rows_than_the_file_says_is_told(repositories: Repositories) -> None:
    findings, _ = check("videomme", repositories("videomme"))
    assert findings[0].detail.endswith("3 rows (the benchmark's file states 2700)")


@pytest.mark.parametrize(
    ("name", "column", "place"),
    [
        # What the question, the target and the scorer read, each by another way.
        ("videomme", "options", "data set 'lmms-eval/Video-MME', split 'test'"),
        ("videomme", "answer", "lmms-eval/Video-MME, split test"),
        ("mlvu", "task_type", "sy1998/MLVU_dev, split test, row 0"),
        ("pope", "question", "data set 'lmms-lab-encoder/POPE', split 'test'"),
    ],
)
def test_a_column_that_is_gone_is_named(
    copy: Callable[[str], Path], name: str, column: str, place: str
) -> None:
    root = copy(name)
    edited(root, lambda table: table.drop_columns([column]))
    findings, prompt = check(name, root)
    assert findings[-1].status == "failed"
    assert findings[-1].name in ("data", "rows")
    assert place in findings[-1].detail
    assert re.search(rf"(no column |KeyError: ){column!r}", findings[-1].detail)
    assert prompt is None


def half_a_picture(root: Path) -> None:
    def damage(table: pa.Table) -> pa.Table:
        pictures = table["image"].to_pylist()
        pictures[1]["bytes"] = pictures[1]["bytes"][:40]
        place = table.schema.get_field_index("image")
        kind = table.schema.field(place)
        return table.set_column(place, kind, pa.array(pictures, type=kind.type))

    edited(root, damage)


def folder_of_frames(root: Path) -> None:
    clip = root / "OpenGVLab/MVBench/ssv2_video_mp4/v0.mp4"
    clip.unlink()
    clip.mkdir()
    (clip / "00001.jpg").write_bytes(b"frame")


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("pope", half_a_picture, ("lmms-lab-encoder/POPE, split test, row 1",)),
        (
            "mlvu",
            lambda root: (root / "sy1998/MLVU_dev/video_part_1.zip").unlink(),
            ("sy1998/MLVU_dev, split test, row ", ".mp4' does not exist"),
        ),
        ("mvbench", folder_of_frames, ("is a folder of frames",)),  # refused, not shuffled
    ],
)
def test_a_picture_or_video_that_cannot_be_read_is_named(
    copy: Callable[[str], Path], name: str, damage: Callable[[Path], None], words: tuple[str, ...]
) -> None:
    root = copy(name)
    damage(root)
    findings, _ = check(name, root)
    assert (findings[-1].name, findings[-1].status) == ("rows", "failed")
    assert all(word in findings[-1].detail for word in words)


def test_data_that_are_not_there_fail_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "somebody/else").mkdir(parents=True)
    assert main(["check", "videomme", "--path", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.split()[:3] == ["videomme", "data", "failed"]
    assert "lmms-eval/Video-MME" in line


def test_a_checkpoint_that_is_not_here_is_told(
    repositories: Repositories, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    findings, _ = check("pope", repositories("pope"), ["model=llava15_7b"])
    finding = by_name(findings)["checkpoint"]
    assert finding.status == "failed"
    assert "llava-hf/llava-1.5-7b-hf is not in the cache" in finding.detail
    assert "prefetch pope model=llava15_7b" in finding.detail
    # The benchmark itself is looked at all the same.
    assert by_name(findings)["answers"].status == "ok"


@pytest.mark.slow
def test_a_checkpoint_is_read_to_its_last_header(
    repositories: Repositories, tmp_path: Path
) -> None:
    from tests.tiny import save_llava

    folder = save_llava(tmp_path / "model")
    chosen = ["model=llava15_7b", f"model.path={folder}"]
    findings, _ = check("pope", repositories("pope"), chosen)
    assert by_name(findings)["checkpoint"].detail == f"{folder}: whole"
    (weights,) = folder.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    findings, _ = check("pope", repositories("pope"), chosen)
    assert by_name(findings)["checkpoint"].status == "failed"
    assert "is damaged" in by_name(findings)["checkpoint"].detail


def test_a_scorer_that_needs_java_is_not_asked_without(
    repositories: Repositories, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    findings, _ = check("videomme", repositories("videomme"), ["benchmark.needs=[java]"])
    assert by_name(findings)["answers"].status == "not here"
    assert "Java" in by_name(findings)["answers"].detail


def test_a_metric_that_is_no_number_fails(
    repositories: Repositories, monkeypatch: pytest.MonkeyPatch
) -> None:
    from espalier.harness.tools.benchmarks import benchmark_check as module

    real = module.evaluate

    def broken(*args: object, **more: object) -> object:
        done = real(*args, **more)
        done.metrics["accuracy"]["value"] = float("nan")
        return done

    monkeypatch.setattr(module, "evaluate", broken)
    findings, _ = check("videomme", repositories("videomme"))
    assert by_name(findings)["answers"].status == "failed"
    assert "no number: accuracy" in by_name(findings)["answers"].detail


def test_all_goes_on_behind_one_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "espalier.harness.cli.benchmarks.choices", lambda group: ["mlvu", "seedling_vqa"]
    )
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    assert main(["check", "all"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[:-1]] == [
        ["mlvu", "data", "failed"],
        ["seedling_vqa", "data", "ok"],
        ["seedling_vqa", "rows", "ok"],
        ["seedling_vqa", "answers", "ok"],
    ]
    assert lines[-1] == "1 of 2 benchmarks can run here"


@pytest.mark.slow
def test_prompts_are_compared_with_the_originals_token_by_token(
    repositories: Repositories, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from espalier.harness.models.llava import LlavaAdapter
    from tests.tiny import save_llava

    folder = save_llava(tmp_path / "model")
    chosen = ["model=llava15_7b", f"model.path={folder}", "model.dtype=float32"]
    findings, prompt = check("pope", repositories("pope"), chosen)
    finding = by_name(findings)["tokens"]
    assert finding.status == "ok", finding.detail
    assert finding.detail.startswith("3 prompts of ")
    assert "tokens as in the original" in finding.detail
    # The frame of LLaVA's own code, not that of the embedded model.
    assert prompt.startswith("A chat between a curious user")
    # A tokenizer that would begin each piece anew makes other ids.
    data = replace(LlavaAdapter.data, placeholders=("<image>", "USER"))
    monkeypatch.setattr(LlavaAdapter, "data", data)
    findings, _ = check("pope", repositories("pope"), chosen)
    assert "prompt 0 differs from the original's, token " in by_name(findings)["tokens"].detail
