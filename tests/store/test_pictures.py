"""`store show --pictures`: the kept tokens of stored samples, drawn from a real run made again from its row."""

from __future__ import annotations

import json
import os
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import espalier
import run
from espalier.harness.cli import report
from espalier.harness.cli.store import main
from espalier.harness.evaluation.evaluate import open_benchmark
from espalier.harness.runs.admission import admit
from espalier.harness.runs.model_pool import Pool
from espalier.harness.runs.sample_pictures import draw_samples
from espalier.harness.runs.stored_pictures import job_of_row
from espalier.harness.seedling.scene_benchmarks import sample_scene
from espalier.harness.store import Store
from espalier.harness.store.answer_view import answer_lines
from espalier.harness.store.files.digests import Digests
from espalier.harness.store.stored_answers import StoredAnswer
from espalier.methods.fastv import FastV
from tests import commands
from tests.plugins.packages import method as code_of
from tests.refused import refused

SETTINGS = (
    *("benchmark=seedling_vqa", "limit=4", "json=false", "engine.batch_size=3"),
    *("model.generation.repetition_penalty=1.1", "seed=3"),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a pruned run, whose sample 3 is wrong, and the unpruned model's."""
    store = tmp_path_factory.mktemp("made")
    logged = ("log=wandb", "log.pictures=2") if find_spec("wandb") else ()
    argv = ["-m", "method=fastv,none", "ratio=0.95", *SETTINGS, *logged, f"store={store}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WANDB_API_KEY", raising=False)
        assert run.main(argv) == 0
    return store


def row_of(store: Path, method: str) -> dict[str, Any]:
    (row,) = [row for row in Store(store).rows() if row["method"] == method]
    return dict(row)


@pytest.mark.slow
def test_a_job_is_made_again_from_its_row_alone(made: Path) -> None:
    for method in ("fastv", "none"):
        row = row_of(made, method)
        assert job_of_row(row, made).key == row["run_key"]
    row = json.loads(json.dumps(row_of(made, "fastv")))
    row["settings"]["method"]["params"]["K"] = 3
    assert job_of_row(row, made).method == FastV(K=3)


@pytest.mark.slow
def test_a_report_draws_the_samples_that_a_run_broke(made: Path, tmp_path: Path) -> None:
    argv = [str(made), "--no-overlays", "--broken", "2", "--out", str(tmp_path / "page.html")]
    assert report.main(argv) == 0
    held = re.search(r'id="data">(.*?)</script>', (tmp_path / "page.html").read_text(), re.DOTALL)
    pages = json.loads(held[1])["broken"] if held else {}
    key = row_of(made, "fastv")["run_key"]
    assert pages == {
        key: {
            "page": f"page-broken/{key}/index.html",
            "words": f"1 of 1 samples that broke, run {key}",
        }
    }
    page = (tmp_path / pages[key]["page"]).read_text()
    assert "seedling_vqa/3" in page
    assert page.count("<img") == 1


@pytest.mark.parametrize(
    "argv",
    [
        ("method=divprune", "compressor=aircache", "compressor.ratio=0.6", "ratio=0.5"),
        ("method=fastv", "keep=14", "budget.rule=kept", "method.variant=official"),
    ],
)
def test_stacks_and_counts_are_made_again(tmp_path: Path, argv: tuple[str, ...]) -> None:
    job = admit(
        commands.spec_of(*argv, "benchmark=seedling_vqa", "limit=4", f"store={tmp_path}"),
        Digests(),
        places=False,
    )
    assert job_of_row({"run_key": job.key, **job.outline()}, tmp_path).key == job.key


def row_of_line(*argv: str) -> dict[str, Any]:
    """The row of a run, as far as it is known before it runs."""
    job = admit(commands.spec_of(*argv), Digests(), places=False)
    plugins = [{"digest": digest} for digest in job.parts.get("plugins", ())]
    outline = job.outline()
    row = {"run_key": job.key, **outline, "extra": {**outline["extra"], "plugins": plugins}}
    return dict(json.loads(json.dumps(row)))


#: Code that leaves a file where it is imported.
TRACE = "\nfrom pathlib import Path; Path({!r}).touch()\n"


@pytest.fixture
def coded(tmp_path: Path) -> tuple[dict[str, Any], Path]:
    """A row of a user's method, and its file, which has changed since."""
    file = tmp_path / "mine.py"
    file.write_text(code_of(), encoding="utf-8")
    row = row_of_line(f"method={file}:FirstTokens", "benchmark=seedling_vqa", "limit=1")
    row["extra"]["code"] = {"FirstTokens": f"{file}:FirstTokens"}
    return row, file


def test_code_of_a_row_runs_while_it_has_the_digest_of_the_row(
    coded: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    row, file = coded
    assert job_of_row(row, tmp_path).key == row["run_key"]
    mark = tmp_path / "imported"
    with file.open("a", encoding="utf-8") as stream:
        stream.write(TRACE.format(str(mark)))
    with pytest.raises(espalier.UserError, match=r"has changed since.*--set method="):
        job_of_row(row, tmp_path)
    assert not mark.exists()
    job_of_row(row, tmp_path, [f"method={file}:FirstTokens"])
    assert mark.exists()


@pytest.mark.parametrize(
    "place", ["{other}:FirstTokens", "mine.py:FirstTokens", "~/mine.py:FirstTokens", "{gone}:F", 5]
)
def test_code_without_a_digest_in_the_row_is_not_imported(
    coded: tuple[dict[str, Any], Path],
    place: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row, file = coded
    other, mark = tmp_path / "other.py", tmp_path / "imported"
    other.write_text(code_of("FirstTokens") + TRACE.format(str(mark)), encoding="utf-8")
    monkeypatch.chdir(file.parent)
    if isinstance(place, str):
        place = place.format(other=other, gone=tmp_path / "gone.py")
    row["extra"]["code"] = {"FirstTokens": place}
    assert "not imported" in refused(job_of_row, row, tmp_path)
    del row["extra"]["plugins"]
    row["extra"]["code"] = {"FirstTokens": f"{file}:FirstTokens"}
    assert "not imported" in refused(job_of_row, row, tmp_path)
    assert not mark.exists()


@pytest.fixture(scope="module")
def plain_row() -> dict[str, Any]:
    return row_of_line("method=fastv", "benchmark=seedling_vqa", "limit=1")


#: Texts that a command line would read as something else.
TEXTS = (
    *("x y=1", "fastv,none", "${oc.env:HOME}", '"quoted"', "[1]", "{a: 1}", "+x.y=1", ""),
    *(
        "../method/fastv",
        "mine.py:FirstTokens",
        "task:../x",
        "data:x",
        "checkpoint:%2Ftmp",
        "glob(*)",
    ),
)


@pytest.mark.sampled
@pytest.mark.parametrize("key", ["model", "benchmark", "method", "variant", "budget_rule", "seed"])
def test_a_name_in_a_row_is_no_command_line(
    plain_row: dict[str, Any], tmp_path: Path, key: str
) -> None:
    for text in TEXTS:
        assert os.environ["HOME"] not in refused(job_of_row, {**plain_row, key: text}, tmp_path)


@pytest.mark.slow
def test_a_setting_in_a_row_is_a_value(plain_row: dict[str, Any], tmp_path: Path) -> None:
    row = json.loads(json.dumps(plain_row))
    for text in TEXTS:
        generation = row["settings"]["model"]["generation"] | {"until": [f"{text}."]}
        row["settings"]["model"]["generation"] = generation
        row["settings"]["benchmark"]["prompt"] = {"words": text}
        spec = job_of_row(row, tmp_path).spec
        assert spec.benchmark.prompt == {"words": text}
        assert spec.model.generation == generation


def test_a_run_on_own_data_needs_its_place_and_its_content(tmp_path: Path) -> None:
    for number in range(2):
        Image.new("RGB", (32, 32)).save(tmp_path / f"{number}.png")
    data = tmp_path / "own, data.csv"
    lines = ["image,question,answer", "0.png,which ?,red", "1.png,which ?,blue"]
    data.write_text("\n".join(lines), encoding="utf-8")
    place = f"benchmark.path='{data}'"
    row = row_of_line("benchmark=data", place, "benchmark.score=contains", "method=none")
    assert row["benchmark"] == "data:own, data"
    assert "valid: --set benchmark.path=" in refused(job_of_row, row, tmp_path)
    assert job_of_row(row, tmp_path, [place]).key == row["run_key"]
    data.write_text("\n".join([*lines[:2], "1.png,which ?,green"]), encoding="utf-8")
    assert "benchmark.data differ" in refused(job_of_row, row, tmp_path, [place])


def test_a_task_of_the_library_is_made_again(tmp_path: Path) -> None:
    override = "model.closed_vocabulary=false"
    row = row_of_line("benchmark=task:ai2d", "method=none", "limit=1", override)
    assert job_of_row(row, tmp_path, [override]).key == row["run_key"]


def test_answers_name_the_files_of_own_pictures() -> None:
    media = [{"from": "json/test/7#0", "path": "/own/a.png"}, {"from": "json/test/7#1"}]
    answer = StoredAnswer(("t", 7), "a", {"media": media}, 1.0, 1.0, ("t", 7))
    assert answer_lines([answer])[1][0][-1] == "/own/a.png, json/test/7#1"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("model", "revision"), "another"),
        (("engine", "unheard"), 1),
        (("method", "params", "J"), 1),
    ],
)
def test_a_setting_that_cannot_be_made_again_is_named(
    made: Path, path: tuple[str, ...], value: Any
) -> None:
    row = json.loads(json.dumps(row_of(made, "fastv")))
    block = row["settings"]
    for name in path[:-1]:
        block = block[name]
    block[path[-1]] = value
    assert path[-1] in refused(job_of_row, row, made)


@pytest.mark.slow
def test_the_kept_tokens_are_those_of_the_method(made: Path) -> None:
    job = job_of_row(row_of(made, "fastv"), made)
    adapter = Pool().adapter(job.spec.model)
    task = job.spec.benchmark.task
    pictures = list(draw_samples(job.spec, job.method, adapter, [(task, 3), (task, 1)]))
    assert [picture.file for picture in pictures] == [f"{task}-1.png", f"{task}-3.png"]
    model = espalier.load("seedling", device="cpu")
    documents = open_benchmark(job.spec).tasks[0].eval_docs
    with espalier.apply(model, "fastv", ratio=0.95) as pruned:
        for picture in pictures:
            assert picture.drawing is not None
            document = documents[picture.key[1]]
            scene = sample_scene(document).to_pil()
            answer = pruned.ask(scene, document["question"], repetition_penalty=1.1)
            assert picture.answer == answer.text
            drawn, shown = (
                figure.axes[0].images[0].get_array() for figure in (picture.drawing, answer.show())
            )
            np.testing.assert_array_equal(drawn, shown)


@pytest.mark.slow
def test_the_worst_samples_and_the_running_score_are_in_the_mirror(made: Path) -> None:
    wandb = pytest.importorskip("wandb")
    from espalier.harness.cli.wandb import records

    wandb.teardown()  # its process writes the ends of files after `finish` returns

    row = row_of(made, "fastv")
    (file,) = made.glob(f"wandb/offline-run-*/run-{row['run_key']}.wandb")
    steps = [
        {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        for record in records(file)
        if record.HasField("history")
    ]
    assert [step.get("progress/samples") for step in steps] == [0, 3, 4, None]
    assert [step.get("progress/accuracy") for step in steps] == [None, 1.0, 0.75, None]
    assert steps[-1]["metrics/accuracy"] == 0.75 == row["metrics"]["accuracy"]["value"]
    assert steps[-1]["pictures/captions"] == ["seedling_vqa-3.png"]  # the others are right
    names = steps[-1]["pictures/filenames"]
    assert all((file.parent / "files" / name).stat().st_size > 1000 for name in names)


@pytest.mark.slow
def test_wrong_samples_are_drawn_into_a_folder_with_a_page(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key, other = (row_of(made, method)["run_key"] for method in ("fastv", "none"))
    folder = tmp_path / "new" / "pictures"
    command = ["show", key[:8], "--store", str(made), "--pictures", str(folder)]
    assert main([*command, "--wrong"]) == 0
    page = (folder / "index.html").read_text(encoding="utf-8")
    names = re.findall(r'<img src="([^"]+)"', page)
    assert names == ["seedling_vqa-3.png"]
    assert (folder / names[0]).stat().st_size > 1000
    assert "how many shapes are there ?" in page
    assert "1 samples drawn in" in capsys.readouterr().err
    # Against the unpruned model: what broke, with both answers.
    assert main([*command, "--against", other]) == 0
    page = (folder / "index.html").read_text(encoding="utf-8")
    assert re.findall(r'<img src="([^"]+)"', page) == ["seedling_vqa-3.png"]
    assert "<dt>answer against</dt><dd>2</dd>" in page
    # Nothing broke the other way.
    command[1] = other
    assert main([*command, "--against", key]) == 0
    assert "no sample to draw" in capsys.readouterr().err


@pytest.mark.slow
def test_a_folder_that_is_a_file_and_stray_overrides_are_refused(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    command = ["show", row_of(made, "fastv")["run_key"], "--store", str(made)]
    for arguments, words in (
        (["--pictures", str(tmp_path / "file")], "cannot be written"),
        (["--set", "model.path=/x"], "is for --pictures"),
        (["--pictures", str(tmp_path / "new"), "--set", "modle.path=/x"], "modle"),
    ):
        assert main([*command, *arguments]) == 2
        assert words in capsys.readouterr().err


def test_runs_are_removed_by_key_into_the_trash(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    shutil.copytree(made, store)
    key, other = (row_of(made, method)["run_key"] for method in ("fastv", "none"))
    command = ["rm", key[:9], key, "--store", str(store)]
    assert main(command) == 0
    assert "1 may go" in capsys.readouterr().err
    assert (store / "runs" / key / "row.json").is_file()
    assert main([*command, "--yes"]) == 0
    assert [row["run_key"] for row in Store(store).rows()] == [other]
    (moved,) = store.glob(f".trash/*/runs/{key}")
    assert (moved / "row.json").is_file()
    assert main([*command, "--yes"]) == 2
    assert f"key='{key[:9]}': no run of 1" in capsys.readouterr().err
    # Moved back, it is in the store again.
    shutil.move(moved, store / "runs" / key)
    assert len(Store(store).rows()) == 2
