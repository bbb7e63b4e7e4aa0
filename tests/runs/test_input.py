"""Bad input: exit 2 and exactly one line that names the config key and what would be valid, before anything runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import espalier.harness.evaluation.evaluate
from espalier.harness.paths import ROOT
from espalier.harness.store.files.folder_checks import check_folder
from tests.arithmetic import sums, write_task
from tests.runs.helpers import Bench, make_bench

WEIGHTS = ROOT / "harness/seedling/weights/seedling"

#: Command line, then words that the line must hold.
BAD: list[tuple[str, tuple[str, ...]]] = [
    ("method=fastw", ("method", "'fastw'", "did you mean fastv?", "divprune")),
    ("model=seedlin", ("model", "did you mean seedling?", "llava15_7b")),
    ("benchmark=seedling_rek", ("benchmark", "did you mean seedling_rec?", "seedling_caption")),
    ("budget=flop", ("budget", "did you mean flops?", "average")),
    ("engine=fast", ("engine", "default", "emulate")),
    ("log=tensorboard", ("log", "none", "wandb")),
    ("+experiment=quick", ("experiment", "quickstart")),
    ("method=null", ("method", "none")),
    ("rato=0.5", ("rato", "did you mean ratio?", "seed")),
    ("+rato=0.5", ("rato", "did you mean ratio?", "seed")),
    (
        "engine.batchsize=2",
        ("engine.batchsize", "did you mean engine.batch_size?", "engine.threads"),
    ),
    ("seed.x=2", ("seed.x", "seed")),
    ("+model.colour=red", ("model.colour", "model.path")),
    ("method=fastv method.params.k=2", ("method.params.k", "method.params.K")),
    ("method=fastv +method.params.k=2", ("method.params", "'k'", "K")),
    ("method=fastv method.params.K=two", ("method.params.K", "'two'", "integer")),
    ("method=fastv method.params.K=6", ("method.params.K=6", "1 to 5")),
    ("ratio=1", ("ratio=1 ", "[0, 1)")),
    ("ratio=-0.1", ("ratio=-0.1", "[0, 1)")),
    ("ratio=half", ("ratio='half'", "[0, 1)")),
    ("ratio=nan", ("ratio=nan", "[0, 1)")),
    ("ratio=", ("ratio=", "[0, 1)")),
    ("ratio=[0.5]", ("ratio=[0.5]", "[0, 1)")),
    ("ratio", ("'ratio'", "key=value")),
    ("ratio=[", ("'ratio=['", "key=value")),
    ("ratio=0.5,0.9", ("ratio=0.5,0.9", "-m")),
    ("limit=0", ("limit=0", "at least 1")),
    ("limit=-4", ("limit=-4", "at least 1")),
    ("limit=0.5", ("limit=0.5", "at least 1")),
    ("limit=true", ("limit=True", "at least 1")),
    ("seed=-1", ("seed=-1", "at least 0")),
    ("seed=${nothing}", ("seed", "nothing")),
    ("~seed", ("seed", "missing")),
    ("force=maybe", ("force='maybe'", "true or false")),
    ("engine.batch_size=0", ("engine.batch_size=0", "at least 1", "auto")),
    ("engine.batch_size=big", ("engine.batch_size='big'", "at least 1", "auto")),
    ("engine.threads=0", ("engine.threads=0", "at least 1")),
    ("engine.paired=-1", ("engine.paired=-1", "at least 0", "auto")),
    ("engine.paired=some", ("engine.paired='some'", "at least 0", "auto")),
    ("engine.backend=fast", ("engine.backend='fast'", "drop, emulate")),
    ("engine.positions=new", ("engine.positions='new'", "original, renumbered")),
    ("+benchmark.generation.use_cache=false", ("generation.use_cache=False", "True")),
    ("+model.generation.max_new_token=3", ("model.generation", "did you mean max_new_tokens?")),
    ("+model.generation.max_new_tokens=0", ("model.generation.max_new_tokens=0", "at least 1")),
    ("+benchmark.generation.max_new_tokens=1.5", ("max_new_tokens=1.5", "integer")),
    ("+benchmark.generation.max_new_tokens=true", ("max_new_tokens=True", "integer")),
    ("+benchmark.generation.top_p=2", ("benchmark.generation.top_p=2", "(0, 1]")),
    ("+benchmark.generation.top_k=-1", ("top_k=-1", "at least 0")),
    ("+benchmark.generation.min_p=nan", ("min_p=nan", "[0, 1]")),
    ("+benchmark.generation.do_sample=maybe", ("do_sample='maybe'", "true or false")),
    ("+benchmark.generation.temperature=hot", ("temperature='hot'", "at least 0")),
    ("+benchmark.generation.temperature=-1", ("temperature=-1", "at least 0")),
    ("+benchmark.generation.num_beams=0", ("num_beams=0", "at least 1")),
    ("+benchmark.generation.num_beams=two", ("num_beams='two'", "integer")),
    ("model.generation.repetition_penalty=0", ("repetition_penalty=0", "above 0")),
    ("+model.generation.length_penalty=long", ("length_penalty='long'", "number")),
    ("+model.generation.no_repeat_ngram_size=-2", ("no_repeat_ngram_size=-2", "at least 0")),
    ("+benchmark.generation.early_stopping=soon", ("early_stopping='soon'", "never")),
    ("+benchmark.generation.until=[1]", ("generation.until=[1]", "list of strings")),
    (
        "+benchmark.generation={min_new_tokens:9,max_new_tokens:4}",
        ("min_new_tokens=9", "valid: at most 4"),
    ),
    ("model.dtype=int8", ("model.dtype='int8'", "bfloat16, float16, float32")),
    ("model.device=tpu", ("model.device='tpu'", "auto, cpu, cuda")),
    ("model.device=cuda:99", ("model.device='cuda:99'", "valid:")),
    ("model.attention=fast", ("model.attention='fast'", "sdpa")),
    ("model.adapter=lava", ("model.adapter='lava'", "did you mean llava?")),
    ("model.weights=random", ("model.weights='random'", "model.architecture", "valid: trained")),
    ("model.weights=none", ("model.weights='none'", "random, trained")),
    ("model.path=no/such/place", ("model.path", "config.json")),
    ("model.facts.text.layers=null", ("model.facts",)),
    ("budget.rule=most", ("budget.rule='most'", "average, flops, kept")),
    ("budget=average method=fastv ratio=0.9", ("ratio=0.9", "average", "<= ratio <")),
    ("benchmark.task=seedling_rek", ("benchmark.task", "did you mean seedling_rec?")),
    ("benchmark=task:vstar_bnch", ("benchmark='task:vstar_bnch'", "did you mean vstar_bench")),
    ("benchmark.needs=[server]", ("benchmark=seedling_rec", "submission server", "valid: ")),
    ("benchmark.headline=f2 benchmark.kind=quiz", ("headline='f2'", "kind='quiz' is unknown")),
    ("benchmark.headline=f2", ("benchmark.headline='f2'", "acc_at_50")),
    ("benchmark.include_path=no/such", ("benchmark.include_path", "no/such")),
    ("model=llava15_7b offline=false", ("model.dtype='float16' on the CPU", "float32, bfloat16")),
    ("model.attention=flash_attention_2", ("model.attention='flash_attention_2'", "sdpa")),
    ("model.scale.layers=2", ("model.scale.layers=2", "model.weights=random")),
    ("+model.max_memory.0=1GiB", ("model.max_memory", "model.device_map=auto")),
    ("model.device_map=auto +model.max_memory.1=big", ("model.max_memory.1='big'", "GiB")),
    (
        "model.device_map=auto +model.max_memory.gpu=1",
        ("model.max_memory.gpu", "the number of a card, cpu"),
    ),
    ("model.check_weights=often", ("model.check_weights='often'", "true, false or auto")),
    ("model.template=nosuch", ("model.template='nosuch'", "default", "llava_vid", "qwen2_5_vl")),
    ("model.device_map=cyclic", ("model.device_map='cyclic'", "valid: auto")),
    ("model.video.frames=0", ("model.video.frames=0", "at least 1")),
    ("model.video.rate=0", ("model.video.rate=0", "above 0")),
    ("model.video.rule=middle", ("model.video.rule='middle'", "uniform")),
    (
        "model=llava15_7b model.dtype=bfloat16 model.hub=no/such",
        ("model.hub='no/such'", "offline=false"),
    ),
    (
        "method=visionzip model.facts.signals=[last_attention]",
        ("cls_attention", "tower_keys", "seedling", "fastv"),
    ),
    (
        "model=seedling_draft method=visionzip model.facts.signals=[prior]",
        ("cls_attention", "none, ", "pooled, random"),
    ),
    ("-m method=none ratio=0.5,0.9,1.5", ("ratio=1.5", "[0, 1)")),
    ("method=pearl ratio=1.5", ("ratio=1.5", "[0, 1]", "draft")),
    ("method=pearl ratio=1", ("ratio=1 ", "valid: below 1, or method=onsd", "text_only=true")),
    ("-m method=onsd,fastv ratio=1", ("ratio=1 ", "[0, 1)")),
    ("method=fastv method.draft=seedling", ("method.draft is not a config key", "method.params")),
    ("method=std +method.draft=seedling", ("method.draft", "'std' takes no draft model")),
    ("method=pearl method.draft=seedling_drift", ("method.draft=", "did you mean seedling_draft?")),
    ("model=seedling_draft method=pearl", ("method.draft", "seedling_draft names no draft")),
    ("method=pearl method.draft_options={colour:red}", ("method.draft_options.colour", ".dtype")),
    ("method=pearl method.draft_options={dtype:int8}", ("method.draft_options.dtype='int8'",)),
    (
        "method=pearl method.draft_options={path:no/such}",
        ("method.draft_options.path", "config.json"),
    ),
    ("method=pearl method.draft_options=x", ("method.draft_options='x'", "table")),
    ("method=pearl budget=flops", ("budget='flops'", "valid: kept")),
    ("method=pearl engine=emulate", ("engine.backend='emulate'", "valid: drop")),
    ("method=pearl engine.positions=renumbered", ("'renumbered'", "valid: original, method")),
    ("method=pearl +benchmark.generation.num_beams=2", ("num_beams=2", "valid: 1")),
    ("method=pearl method.params.gamma=0", ("method.params.gamma=0", "1 or more")),
    ("method=parallelvlm model.facts.lacking=[text_states]", ("text_states", "pearl")),
    (
        "engine.transport=pigeon",
        ("engine.transport='pigeon'", "auto, processes, sequential, threads"),
    ),
    ("engine.patience=0", ("engine.patience=0", "above 0")),
    ("engine.compare=maybe", ("engine.compare='maybe'", "true or false")),
    ("engine.graphs=maybe", ("engine.graphs='maybe'", "true, false or auto")),
    (
        "method=pearl engine.graphs=true model.device=cpu",
        ("engine.graphs=true", "model.device='cpu' is not a GPU", "valid: false, auto"),
    ),
    ("engine.rescore=1", ("engine.rescore=1", "true or false")),
    ("model.drafts=seedling_draft", ("model.drafts='seedling_draft'", "list of names")),
    ("-m method=none,fastv,nine ratio=0.5", ("'nine'", "divprune")),
    ("-m ratio=interval(0,1)", ("ratio=interval(0,1)", "a,b,c")),
    ("-m ratio=range(1,1)", ("ratio=range(1,1)", "no values", "at least one")),
    ("-m method=glob(zzz*)", ("method=glob(zzz*)", "no values")),
    ("ratio=0.5 ratio=0.9", ("ratio is given twice", "ratio=0.5 and ratio=0.9")),
    ("method=fastv method=none", ("method is given twice", "method=none")),
    ("+benchmark.generation.top_k=3 ++benchmark.generation.top_k=4", ("top_k is given twice",)),
    ("engine.threads=100000", ("engine.threads=100000", "at most")),
    ("curves=figure.png", ("curves=", "path without suffix", "valid:", "figure")),
    ("curves=/dev/null/figure", ("curves", "/dev/null", "Not a directory", "writable")),
    ("report=/dev/null/pages", ("report", "/dev/null", "Not a directory", "writable")),
    ("hydra.run.dir=elsewhere", ("hydra.run.dir=elsewhere", "valid: hydra.mode, ")),
    ("-m hydra.sweeper.max_batch_size=2", ("hydra.sweeper.max_batch_size=2", "hydra.mode, ")),
    ("hydra/launcher=fast", ("hydra/launcher='fast'", "basic")),
    ("--dry-run", ("--dry-run", "key=value")),
    ("--config-name=other", ("--config-name", "key=value")),
]


@pytest.fixture
def bench(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Bench:
    return make_bench(tmp_path / "store", capsys, monkeypatch)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("line", "words"), BAD, ids=[line for line, _ in BAD])
def test_bad_input_ends_with_one_line(bench: Bench, line: str, words: tuple[str, ...]) -> None:
    done = bench(*line.split())
    assert done.code == 2
    assert done.out == ""
    assert len(done.err.splitlines()) == 1, done.err
    assert done.err.startswith("error: ")
    for word in words:
        assert word in done.err
    assert bench.fake.loads == 0
    assert bench.fake.specs == []


def copy_weights(folder: Path) -> Path:
    shutil.copytree(WEIGHTS, folder)
    return folder / "model.safetensors"


@pytest.mark.parametrize("damage", ["cut", "header", "empty", "checksum"])
def test_damaged_weight_file_is_found_before_loading(
    bench: Bench, tmp_path: Path, damage: str
) -> None:
    file = copy_weights(tmp_path / "model")
    content = file.read_bytes()
    if damage == "checksum":
        file.with_name(f"{file.name}.sha256").write_text(f"{'0' * 64}  {file.name}\n")
    else:
        broken = {"cut": content[:-1], "header": content[:8] + b"x" + content[9:], "empty": b""}
        file.write_bytes(broken[damage])
    done = bench("method=none", f"model.path={file.parent}")
    assert done.code == 2
    assert len(done.err.splitlines()) == 1
    assert "model.path" in done.err
    assert "damaged" in done.err
    assert str(file.parent) in done.err
    assert repr(file.name) in done.err
    assert bench.fake.loads == 0


def test_whole_weight_file_passes_with_its_checksum(bench: Bench, tmp_path: Path) -> None:
    import hashlib

    file = copy_weights(tmp_path / "model")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    file.with_name(f"{file.name}.sha256").write_text(f"{digest}  {file.name}\n")
    assert bench("method=none", f"model.path={file.parent}").code == 0


def test_unwritable_store_is_found_before_loading(bench: Bench) -> None:
    bench.store.write_text("a file, not a directory")
    done = bench("method=none")
    assert done.code == 2
    assert len(done.err.splitlines()) == 1
    assert f"store='{bench.store}' cannot be written" in done.err
    assert bench.fake.loads == 0


def test_a_folder_in_the_place_of_a_figure_is_found_before_loading(
    bench: Bench, tmp_path: Path
) -> None:
    (tmp_path / "figure.svg").mkdir()
    done = bench("method=none", f"curves={tmp_path / 'figure'}")
    assert done.code == 2
    assert "figure.svg' is not a file" in done.err
    assert bench.fake.loads == 0


def test_checking_a_folder_makes_nothing(tmp_path: Path) -> None:
    check_folder("report", tmp_path / "not" / "yet")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("lacking", ["metric", "data"])
def test_metrics_and_data_are_checked_before_the_model_loads(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    lacking: str,
) -> None:
    real = espalier.harness.evaluation.evaluate.open_benchmark
    bench = make_bench(tmp_path / "store", capsys, monkeypatch)
    monkeypatch.setattr(espalier.harness.evaluation.evaluate, "open_benchmark", real)
    folder = write_task(tmp_path / "t", sums(3))
    metric = {"metric": "f2", "data": "right"}[lacking]
    if lacking == "data":
        (folder / "sums.jsonl").unlink()
    task = (f"benchmark.include_path={folder}", "benchmark.sources=[]", "benchmark.task=sums")
    done = bench(
        "method=none", *task, f"benchmark.metrics=[{metric}]", f"benchmark.headline={metric}"
    )
    line = done.err.splitlines()[-1]  # lmms-eval warns before
    assert done.code == 2, line
    words = {
        "metric": ("benchmark.metrics", "'f2'", "right"),
        "data": ("'sums'", "cannot be loaded"),
    }
    for word in words[lacking]:
        assert word in line
    assert bench.fake.loads == 0


@pytest.mark.parametrize("setting", ["include_path={}", "sources=[{}]"])
def test_names_that_no_file_can_have_are_refused(bench: Bench, setting: str) -> None:
    done = bench("method=none", "benchmark." + setting.format("x" * 300))
    assert done.code == 2
    assert done.err.startswith(f"error: benchmark.{setting.partition('=')[0]}")
    assert len(done.err.splitlines()) == 1


def test_missing_calibration_prints_the_command(bench: Bench, tmp_path: Path) -> None:
    copy_weights(tmp_path / "model")
    done = bench("method=d2pruner", f"model.path={tmp_path / 'model'}", "model.name=fresh")
    assert done.code == 2
    assert len(done.err.splitlines()) == 1
    assert "python -m espalier calibrate method=d2pruner model=fresh" in done.err


def test_a_bad_cell_stops_a_sweep_before_its_first_cell(bench: Bench) -> None:
    done = bench("-m", "method=none,fastv", "method.params.K=2")
    assert done.code == 2
    assert bench.fake.specs == []


@pytest.mark.parametrize("line", ["method=fastw", "-m method=none ratio=0.5,2"])
def test_bad_input_from_the_shell(tmp_path: Path, line: str) -> None:
    command = [sys.executable, str(ROOT / "run.py"), f"store={tmp_path}", *line.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: ")
