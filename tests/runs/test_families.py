"""run.py on tiny checkpoints of every kind of model, over benchmarks of pictures and videos made here."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

import run
from espalier.harness.cli.calibrate import main as calibrate
from espalier.harness.cost.facts import SUBSTITUTES
from espalier.harness.errors import UserError
from espalier.harness.models.chat_media import media_of
from espalier.harness.runs.runner import Runner
from espalier.harness.specs.run_spec import MethodSpec, RunSpec, VideoSpec
from espalier.harness.store import Store
from tests import commands
from tests.families import FAMILIES
from tests.families.qwen import write_clip
from tests.runs.helpers import Outcome
from tests.tasks.media_tasks import STEPS, benchmark, tiny_model, write_benchmark
from tests.tiny import DEPTH, picture, save_tiny

METHODS = ("none", "random", "divprune", "visionzip", "fastv")

#: Family, config file and benchmark. Frames of a video differ in number where the model takes that.
MODELS = {
    "llava_next": ("llava_next_7b", "pictures"),
    "onevision_image": ("llava_ov_7b", "both"),
    "llava_video": ("llava_video_7b", "clips"),
    "qwen2_5_vl": ("qwen2_5_vl_7b", "both"),
    "qwen3_vl": ("qwen3_vl_8b", "both"),
    "internvl": ("internvl2_8b", "both"),
    "deepseek_ocr_gundam": ("deepseek_ocr_gundam", "pictures"),
}

CHOICES = {family: choice for family, (choice, _) in MODELS.items()} | {"llava": "llava15_7b"}
Command = Callable[..., Outcome]
Overrides = Callable[..., tuple[str, ...]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="module", autouse=True)
def data_cache(root: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", str(root / "cache"))
        yield


@pytest.fixture(scope="module")
def media(root: Path) -> Path:
    """Pictures and videos of other shapes and lengths; a broken one of each kind."""
    folder = root / "media"
    folder.mkdir()
    for number, size in enumerate([(50, 40), (28, 56), (60, 30), (56, 25), (64, 36)]):
        picture(number, *size).save(folder / f"p{number}.png")
    for number, (frames, *size) in enumerate([(5, 42, 56), (40, 28, 42), (12, 56, 28)]):
        write_clip(folder / f"v{number}.mp4", frames, *size)
    return folder


@pytest.fixture(scope="module")
def tasks(root: Path, media: Path) -> Path:
    """Three benchmarks: pictures by lmms-eval's own chats, videos by handwritten ones, and both in one."""

    def docs(*lines: str) -> list[tuple[str, list[str]]]:
        split = [line.split("|") for line in lines]
        return [(text, [str(media / name) for name in names.split()]) for text, names in split]

    pictures = ("w1 w2|p0.png", "w3|p1.png p2.png", "w4 w5 w6|p3.png", "w7|p4.png", "w8 w9|p0.png")
    clips = ("w1 w2 w3|v0.mp4", "w4|v1.mp4", "w5 w6|v2.mp4", "w7|v1.mp4 v0.mp4")
    mixed = (
        "w1 w2|v2.mp4",
        "w3 w4 w5|p0.png",
        "w6|p1.png p3.png",
        "w7 w8|v0.mp4",
        "w9|v1.mp4 p2.png",
    )
    for name, lines in {"pictures": pictures, "clips": clips, "both": mixed}.items():
        write_benchmark(root / "tasks" / name, name, docs(*lines), by_hand=name == "clips")
    return root / "tasks"


@pytest.fixture(scope="module")
def checkpoint(root: Path) -> Callable[[str], Path]:
    @cache
    def saved(name: str) -> Path:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return save_tiny(FAMILIES[name].spec, root / "models" / name)

    return saved


@pytest.fixture(scope="module")
def model_of(checkpoint: Callable[[str], Path]) -> Overrides:
    """Returns overrides that run a config file of conf/model on a tiny checkpoint of a family."""

    def overrides(family: str, **changes: Any) -> tuple[str, ...]:
        spec = FAMILIES[family].spec
        spec = replace(spec, video=replace(spec.video, **changes))
        return (*tiny_model(CHOICES[family], spec, checkpoint(family)),)

    return overrides


@pytest.fixture
def command(root: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    def call(*argv: str, store: str = "store") -> Outcome:
        capsys.readouterr()
        code = run.main([f"store={root / store}", "engine.warmup=0", "json=true", *argv])
        return Outcome(code, *capsys.readouterr())

    return call


def written(
    root: Path, name: str, docs: list[tuple[str, list[str]]], by_hand: bool
) -> tuple[str, ...]:
    """Write a benchmark of texts, each with names of files; return the overrides that select it."""
    paths = [(text, [str(root / "media" / name) for name in names]) for text, names in docs]
    folder = write_benchmark(root / "tasks" / name, name, paths, by_hand=by_hand)
    return (*benchmark(folder, name),)


def in_one_batch_and_alone(base: RunSpec, size: int) -> list[dict[str, Any]]:
    """Return the rows of a run with all samples in one batch, and one by one."""
    engines = [replace(base.engine, batch_size=batch_size) for batch_size in (size, 1)]
    return rows_of([replace(base, engine=engine) for engine in engines])


def rows_of(specs: Sequence[RunSpec]) -> list[dict[str, Any]]:
    """Run cells and return their rows."""
    runner = Runner(out=StringIO())
    runner.admit(specs)
    for cell in runner.admitted:
        runner.run(cell)
    return runner.rows


def answers(root: Path, row: dict[str, Any], store: str = "store") -> dict[int, str]:
    entries = Store(root / store).run(row["run_key"]).journal.entries()
    return {entry["doc_id"]: entry["answer"] for entry in entries if "answer" in entry}


def spec_of(root: Path, *argv: str) -> RunSpec:
    return commands.spec_of(f"store={root / 'store'}", "engine.warmup=0", *argv)


@pytest.mark.sampled(36)
@pytest.mark.parametrize("family", MODELS)
def test_every_method_runs_and_no_answer_depends_on_the_batch(
    family: str, root: Path, tasks: Path, model_of: Overrides
) -> None:
    name, facts = MODELS[family][1], FAMILIES[family].spec.facts
    spec = spec_of(root, *model_of(family), *benchmark(tasks / name, name), "ratio=0.5")
    sizes = [*((method, 3) for method in METHODS), ("visionzip", 1), ("fastv", 1)]
    rows = rows_of(
        [
            replace(spec, method=MethodSpec(method), engine=replace(spec.engine, batch_size=size))
            for method, size in sizes
        ]
    )
    together, alone = rows[: len(METHODS)], rows[len(METHODS) :]
    n = len((tasks / name / f"{name}.jsonl").read_text().splitlines())
    for row in together:
        method, tokens, extra = row["method"], row["tokens"], row["extra"]
        assert (row["status"], row["n_samples"], extra["failures"]) == ("done", n, [])
        assert row["metrics"]["mark"]["value"] == sum(k**2 for k in range(n)) / n
        assert row["flops"]["tower"] > 0
        assert row["flops"]["projector"] > 0
        assert tokens["positions"] >= tokens["visual"] > 0
        assert extra["new_tokens"] == STEPS
        share = 1.0 if method == "none" else 0.5
        assert tokens["kept_final"] == tokens["requested_keep"]
        assert abs(extra["achieved"]["kept"] - share * tokens["visual"]) <= 0.5
        entered = (2 * tokens["visual"] + 3 * tokens["kept_final"]) / DEPTH
        expected = entered if method == "fastv" else tokens["kept_final"]
        assert tokens["layer_average"] == pytest.approx(expected)
        stands_in = method == "visionzip" and facts.class_attention != "token"
        substitutes = {"cls_attention": SUBSTITUTES[facts.class_attention]} if stands_in else {}
        assert extra["substitutes"] == substitutes
    results = {row["method"]: (answers(root, row), row["tokens"]) for row in together}
    assert len(set(results["none"][0].values())) > 1
    assert len({tuple(texts.values()) for texts, _ in results.values()}) > 1
    for row in alone:
        assert row["extra"]["batch_size"] == 1
        assert (answers(root, row), row["tokens"]) == results[row["method"]]


@pytest.mark.slow
def test_a_sweep_over_budget_rules_meets_each_of_them(
    command: Command, tasks: Path, model_of: Overrides
) -> None:
    rules = ("kept", "average", "flops")
    setting = ("method=fastv", "ratio=0.5", f"budget={','.join(rules)}")
    done = command("-m", *model_of("onevision_image"), *benchmark(tasks / "both", "both"), *setting)
    assert done.code == 0, done.err
    assert [row["budget_rule"] for row in done.rows] == list(rules)
    for row in done.rows:
        achieved = row["extra"]["achieved"][row["budget_rule"]]
        assert abs(achieved - 0.5 * row["tokens"]["visual"]) <= 1
    kept = [row["tokens"]["kept_final"] for row in done.rows]
    assert kept[0] > max(kept[1:])


@pytest.mark.slow
def test_broken_samples_are_named_and_only_the_others_are_scored(
    command: Command, root: Path, media: Path, model_of: Overrides
) -> None:
    (media / "torn.png").write_bytes((media / "p0.png").read_bytes()[:-2000])
    (media / "torn.mp4").write_bytes((media / "v1.mp4").read_bytes()[:-3000])
    write_clip(media / "short.mp4", 2, 28, 28)
    refusals = {
        1: "torn.png' cannot be read as an image: image file is truncated",
        2: "gone.png' does not exist",
        4: "torn.mp4' cannot be opened",
        5: "short.mp4' has 2 frames, fewer than 3",
        6: "the chat holds no image and no video",
        7: "tokens, model='llava_ov_7b' takes fewer than 32768",
    }
    docs = [
        ("fine", ["p0.png"]),
        ("torn picture", ["torn.png"]),
        ("missing picture", ["gone.png"]),
        ("fine", ["v0.mp4"]),
        ("torn video", ["torn.mp4"]),
        ("short video", ["short.mp4"]),
        ("nothing to see", []),
        ("too long" * 4100, ["p1.png"]),
        ("fine", ["v1.mp4"]),
    ]
    run_it = (
        *model_of("onevision_image", short="error"),
        *written(root, "broken", docs, by_hand=True),
        *("model.media=required", "benchmark.media=optional"),
        *("method=random", "ratio=0.5", "engine.batch_size=3"),
    )
    failed = command(*run_it)
    assert (failed.code, failed.rows) == (1, [])
    assert len([line for line in failed.err.splitlines() if line.startswith("error:")]) == 1
    done = command(*run_it, f"engine.max_errors={len(refusals)}")
    assert done.code == 0, done.err
    row = done.last
    assert (row["status"], row["n_samples"]) == ("resumed", 3)
    # Of documents 0, 3 and 8.
    assert row["metrics"]["mark"]["value"] == (0 + 9 + 64) / 3
    failures = row["extra"]["failures"]
    assert len(failures) == len(refusals)
    for failure, (number, words) in zip(failures, refusals.items(), strict=True):
        assert failure.startswith(f"broken/{number}: UserError: ")
        assert words in failure
    assert all(failure in failed.err for failure in failures[:3])
    assert "6 of 9 samples failed" in failed.err
    # With as many errors allowed the stored row stands; with fewer, the failed samples are tried again.
    assert command(*run_it, "engine.max_errors=6").last["status"] == "cached"
    assert command(*run_it, "engine.max_errors=5").code == 1
    picture(1).save(media / "gone.png")
    mended = command(*run_it, "engine.max_errors=5")
    assert mended.last["n_samples"] == 4
    assert mended.last["extra"]["resumed_samples"] == 3


@pytest.mark.slow
def test_short_videos_marks_in_texts_and_samples_without_a_picture_are_answered(
    root: Path, media: Path, model_of: Overrides
) -> None:
    write_clip(media / "blink.mp4", 2, 42, 42)
    docs = [
        ("short video", ["blink.mp4"]),
        ("nothing to see", []),
        ("of <image> and <image> which", ["p0.png", "p1.png"]),
        ("too few <image> marks", ["p1.png", "p2.png"]),
        ("fine", ["p0.png"]),
    ]
    bench = (*written(root, "odd", docs, by_hand=True), "benchmark.media=optional")
    for family in ("onevision_image", "qwen2_5_vl"):
        base = spec_of(root, *model_of(family), *bench, "method=fastv", "ratio=0.5")
        together, alone = in_one_batch_and_alone(base, 5)
        assert together["extra"]["failures"] == alone["extra"]["failures"] == []
        assert answers(root, together) == answers(root, alone)
        entries = Store(root / "store").run(together["run_key"]).journal.entries()
        records = {e["doc_id"]: e["record"] for e in entries if "record" in e}
        assert [records[n]["visual"] > 0 for n in range(len(docs))] == [True, False, *3 * [True]]
        blind = records[1]
        assert (blind["kept"], blind["requested"], set(blind["entering"])) == ([0], [0], {0})
        assert (blind["special"], blind["kv_entries"], set(blind["work"])) == (0, 0, {0})


def test_videos_of_other_lengths_are_answered_one_by_one_where_the_model_cannot_stack_them(
    root: Path, media: Path, model_of: Overrides
) -> None:
    write_clip(media / "brief.mp4", 2, 42, 42)
    docs = [("w1", ["v0.mp4"]), ("w2 w3", ["brief.mp4"]), ("w4", ["v1.mp4"])]
    bench = written(root, "lengths", docs, by_hand=False)
    model = model_of("onevision_image", short="all")
    base = spec_of(root, *model, *bench, "method=random", "ratio=0.5")
    together, alone = in_one_batch_and_alone(base, 3)
    assert together["extra"]["failures"] == []
    assert answers(root, together) == answers(root, alone)
    # Two frames of four tokens and three of them, newlines aside.
    assert together["tokens"]["visual"] == (12 + 8 + 12) / 3


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (
            {"type": "video", "video": "v.mp4", "video_start": 2.5},
            "video_start=2.5 of a video",
        ),
        (
            {"type": "video", "video": {"url": "v.mp4", "video_end": 9}},
            "video_end=9 of a video",
        ),
        ({"type": "video", "video": [1, 2]}, "video=list cannot be opened"),
        ({"type": "audio", "audio": "a.wav"}, "audio in a chat; valid: image, video, text"),
    ],
)
def test_media_that_would_be_shown_otherwise_than_asked_are_refused(
    part: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=f"^chat 4 of the batch: {re.escape(words)}"):
        media_of(4, [{"role": "user", "content": [part]}], VideoSpec())


@pytest.mark.slow
def test_the_prompts_that_a_task_has_for_a_family_are_used(
    root: Path, tasks: Path, model_of: Overrides
) -> None:
    line = (*model_of("qwen2_5_vl"), *benchmark(tasks / "pictures", "pictures"), "method=none")
    templates = ("default", "qwen2_5_vl", "llava_vid")
    rows = rows_of([spec_of(root, *line, f"model.template={template}") for template in templates])
    plain, qwen, llava = (row["extra"]["text_tokens"] for row in rows)
    assert (qwen, llava) == (plain + len("Q: "), plain)


@pytest.mark.slow
def test_generation_settings_of_the_model_reach_it_and_the_checkpoint_s_do_not(
    root: Path, tasks: Path, checkpoint: Callable[[str], Path]
) -> None:
    folder = root / "models" / "sampling"
    shutil.copytree(checkpoint("llava"), folder)
    settings = json.loads((folder / "generation_config.json").read_text())
    settings |= {"do_sample": True, "temperature": 0.1, "top_p": 0.001, "repetition_penalty": 9.0}
    (folder / "generation_config.json").write_text(json.dumps(settings))

    def answered(path: Path, **generation: float) -> dict[int, str]:
        model = tiny_model("llava15_7b", FAMILIES["llava"].spec, path)
        extra = [f"++model.generation.{key}={value}" for key, value in generation.items()]
        task = benchmark(tasks / "pictures", "pictures")
        (row,) = rows_of([spec_of(root, *model, *task, "method=none", *extra)])
        return answers(root, row)

    plain = answered(checkpoint("llava"))
    assert answered(folder) == plain
    penalised = answered(checkpoint("llava"), repetition_penalty=9.0)
    assert penalised != plain
    assert answered(folder, repetition_penalty=9.0) == penalised
    unlike = answered(checkpoint("llava"), no_repeat_ngram_size=1)
    assert all(len(set(answer)) == STEPS for answer in unlike.values())
    assert any(len(set(answer)) < STEPS for answer in plain.values())


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava_video"])
def test_random_weights_give_a_row_without_scores(
    family: str, command: Command, tasks: Path
) -> None:
    choice, name = MODELS[family]
    done = command(
        *tiny_model(choice, FAMILIES[family].spec, None),
        *benchmark(tasks / name, name),
        "model.weights=random",
        "model.scale.layers=1",
        "model.scale.tower_layers=1",
        "method=uniform",
        "ratio=0.5",
    )
    assert done.code == 0, done.err
    row = done.last
    assert row["metrics"] == {"mark": {"value": None, "stderr": None}}
    assert row["extra"]["environment"]["layers"] == [1, 1]
    assert row["tokens"]["layer_average"] == row["tokens"]["kept_final"]


@pytest.mark.slow
def test_a_prior_is_measured_and_used_where_views_differ_in_shape(
    command: Command, root: Path, media: Path, tasks: Path, model_of: Overrides
) -> None:
    model = model_of("llava_next")
    task = (*benchmark(tasks / "pictures", "pictures"), "method=d2pruner", "ratio=0.5")
    missing = command(*model, *task)
    assert missing.code == 2
    assert "python -m espalier calibrate method=d2pruner model=llava_next_7b layer=1" in missing.err
    folder = root / "photos"
    folder.mkdir()
    for number in range(3):
        shutil.copy(media / f"p{number}.png", folder)
    argv = [*model, "method=d2pruner", f"images_dir={folder}", "images=3", "batch_size=2"]
    assert calibrate([*argv, f"store={root / 'store'}"]) == 0
    made = json.loads((root / "store/calibration/llava_next_7b_layer1.json").read_text())
    # Each picture has a global view of 4 x 4 patches and a plane of its crops, and each of these a map of its own.
    assert (made["images"], made["maps"]) == (3, [3, 3])
    assert made["grids"][0] == [4, 4]
    done = command(*model, *task, "engine.batch_size=3")
    assert done.code == 0, done.err
    alone = command(*model, *task, "engine.batch_size=1")
    assert answers(root, done.last) == answers(root, alone.last)


def test_a_video_for_a_model_of_images_is_refused_as_such(
    command: Command, tasks: Path, model_of: Overrides
) -> None:
    model = model_of("deepseek_ocr_gundam")
    done = command(*model, *benchmark(tasks / "clips", "clips"), "method=none")
    assert (done.code, done.out) == (2, "")
    assert "model='deepseek_ocr_gundam' takes images only" in done.err
