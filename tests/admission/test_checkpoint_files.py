"""Checkpoints with files that are missing, torn, of another kind or content: one line each, and nothing waits."""

from __future__ import annotations

import ast
import builtins
import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub._local_folder import write_download_metadata
from transformers import LlavaForConditionalGeneration

import espalier
from espalier.harness.cli.benchmarks import main as benchmarks
from espalier.harness.errors import UserError
from espalier.harness.kinds import checkpoint_check
from espalier.harness.models.build_adapter import load_adapter
from espalier.harness.models.checkpoint_files import INDEX, check_checkpoint
from espalier.harness.paths import ROOT
from espalier.harness.seedling import weights_dir
from espalier.harness.store.files.digests import Digests
from run import main
from tests.refused import refused
from tests.tiny import LLAVA, save_llava

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_llava(tmp_path_factory.mktemp("tiny"))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def line_of(folder: Path) -> str:
    """What the user reads: the files are looked at first, then the model is loaded."""

    def load() -> None:
        check_checkpoint(folder, Digests())
        load_adapter(replace(LLAVA, path=folder, weights="trained"))

    line = refused(load)
    assert len(line) < 600
    return line


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
        "chat_template.jinja",
    ],
)
def test_a_folder_or_a_pipe_in_place_of_a_file_is_named(
    folder: Path, name: str, make: Callable[[Path], object]
) -> None:
    (folder / name).unlink()
    make(folder / name)
    assert f"{name}' is not a file" in line_of(folder)


#: Files without content (None: missing), and words of the line.
CONTENTS = [
    *(
        (name, content, words)
        for name in ("config", "generation_config", "tokenizer_config", "processor_config")
        for content, words in (
            (b"[1, 2]", f"{name}.json.*holds a list"),
            (b'{"a": ', f"{name}.json.*not parse"),
            (b"\xff\x81", f"{name}.json.*not parse"),
        )
    ),
    ("config", None, "holds no model"),
    ("model.safetensors", None, "holds no model"),
    ("tokenizer_config", None, "has no tokenizer_config.json"),
    ("tokenizer", None, "no usable checkpoint"),
    ("processor_config", None, "no usable checkpoint"),
    ("config", b"{}", "is of type None"),
    ("tokenizer", b"{}", "added_tokens"),
    ("tokenizer_config", b"{}", "neither a padding token nor an end of sequence"),
]


@pytest.mark.parametrize(("name", "content", "words"), CONTENTS)
def test_a_file_that_is_missing_or_no_table_is_one_line(
    folder: Path, name: str, content: bytes | None, words: str
) -> None:
    file = folder / (name if "." in name else f"{name}.json")
    file.unlink(missing_ok=True)
    if content is not None:
        file.write_bytes(content)
    assert re.search(words, line_of(folder))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("text_config",), [1], "text_config"),
        (("text_config", "hidden_size"), "big", "hidden_size"),
        (("text_config", "num_hidden_layers"), 0, "text.layers=5, the loaded model has 0"),
        (("text_config", "model_type"), "nosuch", "nosuch"),
        (("text_config", "hidden_act"), "nosuch", "nosuch"),
        (("vision_config", "num_hidden_layers"), 0, "vision_feature_layer=-2 is not a layer"),
        (("vision_feature_layer",), 99, "vision_feature_layer=99 is not a layer"),
        (("vision_feature_layer",), [-2, -3], "vision_feature_layer=[-2, -3] is not a layer"),
        (("model_type",), "nosuch", "is of type 'nosuch', valid: 'llava'"),
    ],
)
def test_a_configuration_of_no_model_is_one_line(
    folder: Path, place: tuple[str, ...], value: object, words: str
) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    table = config
    for name in place[:-1]:
        table = table[name]
    table[place[-1]] = value
    file.write_text(json.dumps(config))
    assert words in line_of(folder)


def test_other_json_may_hold_what_it_likes(folder: Path) -> None:
    (folder / "trainer_state.json").write_text("[1, 2]")
    check_checkpoint(folder, Digests())


def header_of(file: Path) -> tuple[dict[str, Any], bytes]:
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(file: Path, header: bytes, body: bytes) -> None:
    file.write_bytes(len(header).to_bytes(8, "little") + header + body)


def edited(change: Callable[[dict[str, Any], str], object]) -> Damage:
    """Return a damage of the header, given its table and the name of a tensor with two axes."""

    def damage(folder: Path) -> None:
        file = folder / "model.safetensors"
        header, body = header_of(file)
        name = next(key for key, tensor in header.items() if len(tensor.get("shape", ())) == 2)
        change(header, name)
        with_header(file, json.dumps(header).encode(), body)

    return damage


def more_tensors(folder: Path) -> None:
    file = folder / "model.safetensors"
    header, body = header_of(file)
    header["stray"] = {"dtype": "F32", "shape": [2], "data_offsets": [len(body), len(body) + 8]}
    with_header(file, json.dumps(header).encode(), body + bytes(8))


def settings(name: str, **more: object) -> Damage:
    def damage(folder: Path) -> None:
        file = folder / name
        table = json.loads(file.read_bytes()) if file.exists() else {}
        file.write_text(json.dumps({**table, **more}))

    return damage


NESTED = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda f: with_header(f / "model.safetensors", NESTED, b""), "does not parse"),
        (edited(lambda h, n: h[n].update(data_offsets=["a", "b"])), "does not parse"),
        (edited(lambda h, n: h[n].update(data_offsets=[-4, 0])), "does not parse"),
        (edited(lambda h, n: h[n].update(data_offsets=[0, 4])), "does not parse"),
        (edited(lambda h, n: h[n].update(dtype="Q9")), "does not parse"),
        (edited(lambda h, n: h[n].update(shape="x")), "does not parse"),
        (edited(lambda h, n: h.update({n: None})), "does not parse"),
        (edited(lambda h, n: h[n]["shape"].reverse()), "mismatched keys"),
        (edited(lambda h, n: h.update(other=h.pop(n))), "has no lm_head.weight"),
        (more_tensors, "unexpected keys, the first is stray"),
        (lambda f: with_header(f / "model.safetensors", b"{}", b""), "missing keys"),
        (
            lambda f: (f / "model.safetensors.sha256").write_bytes(bytes(range(256))),
            "its SHA-256 differs from model.safetensors.sha256",
        ),
        (lambda f: (f / "config.json").write_bytes(b'{"a":' * 50_000), "does not parse"),
        (settings("processor_config.json", processor_class="os.system"), "the processor of"),
        (settings("processor_config.json", processor_class=5), "no usable checkpoint"),
        (settings("tokenizer_config.json", tokenizer_class=5), "no usable checkpoint"),
    ],
)
def test_a_checkpoint_of_nonsense_is_one_line_and_nothing_stands_before_it(
    damage: Damage, word: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    damage(folder)
    capfd.readouterr()
    assert word in line_of(folder)
    captured = capfd.readouterr()
    # A run shows no bars of the library (harness/runs/model_pool.py).
    lines = [line for line in captured.err.split("\n") if "Loading weights" not in line]
    assert (captured.out, "".join(lines).strip()) == ("", "")


def test_a_path_that_no_system_takes_is_one_line() -> None:
    with pytest.raises(UserError, match=r"^model\.path='/x+") as caught:
        check_checkpoint(Path("/" + "x" * 5000), Digests())
    assert len(str(caught.value)) < 600


@pytest.fixture
def shards(folder: Path) -> Path:
    """The checkpoint in several weight files, as large releases are."""
    model = LlavaForConditionalGeneration.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="100KB")
    check_checkpoint(folder, Digests())
    return folder


def test_half_a_download_is_named(shards: Path) -> None:
    files = sorted(shards.glob("model-*.safetensors"))
    files[1].unlink()
    line = line_of(shards)
    assert f"half a download, 1 of {len(files)} weight files are missing, the first is" in line
    assert files[1].name in line
    assert "resumes" in line


def test_shards_of_two_releases_are_named(shards: Path) -> None:
    first, second, *_ = sorted(shards.glob("model-*.safetensors"))
    shutil.copy(first, second)
    assert f"shards of two releases, {second.name} and {INDEX} differ in" in line_of(shards)


def test_shards_of_two_commits_are_named_though_their_tensors_are_alike(shards: Path) -> None:
    files = [file.name for file in sorted(shards.glob("model-*.safetensors"))]
    for file in files:
        write_download_metadata(shards, file, "a" * 40, "etag")
    check_checkpoint(shards, Digests())
    write_download_metadata(shards, files[1], "b" * 40, "etag")
    line = line_of(shards)
    assert f"shards of two releases, {files[0]} and {files[1]} were downloaded from" in line


def test_an_index_without_a_map_is_named(shards: Path) -> None:
    (shards / INDEX).write_text("{}")
    assert f"{INDEX} does not name a file for each tensor" in line_of(shards)


def test_a_cached_release_is_whole_where_nothing_may_be_downloaded(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_check, "require_cached", lambda *_: shards)
    next(shards.glob("model-*.safetensors")).unlink()
    spec = replace(LLAVA, hub="some/model", weights="trained", check_weights=False)
    assert "model.hub='some/model': half a download" in refused(
        checkpoint_check.check_model, spec, True, Digests()
    )


# ---------------------------------------------------------------- the same line on every path


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size - 5)


def pointed(name: str) -> Damage:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 12\n"
    return lambda folder: (folder / name).write_text(text)


def halved(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    places = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))


@pytest.mark.sampled(18)
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
            "holds no model but *.bin, pickles of torch",
        ),
        (halved, "half a download, 1 of 2 weight files are missing"),
        (
            cut,
            "its header does not parse (SafetensorError: Error while deserializing header: incomplete metadata",
        ),
        (pointed("model.safetensors"), "is a pointer of Git LFS"),
        (pointed("tokenizer.json"), "is a pointer of Git LFS"),
        (
            settings("adapter_config.json", peft_type="LORA"),
            "holds a LoRA adapter (adapter_config.json) beside the weights",
        ),
        (shutil.rmtree, "it does not exist"),
    ],
)
def test_a_folder_that_cannot_be_loaded_is_one_line_on_every_path(
    damage: Damage, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(weights_dir("seedling"), tmp_path / "model"))
    damage(folder)
    spec, exists = replace(LLAVA, path=folder, weights="trained"), folder.exists()
    for load in (
        lambda: espalier.load(str(folder)),
        lambda: espalier.load("seedling", path=folder),
        *(() if not exists else (lambda: load_adapter(spec),)),
        *(() if not exists else (lambda: check_checkpoint(folder, Digests()),)),
    ):
        assert words in refused(load)
    store = f"store={tmp_path / 'store'}"
    for models in ([f"model={folder}"], ["model=seedling", f"model.path={folder}"]):
        capsys.readouterr()
        assert main(["benchmark=seedling_rec", "limit=1", store, *models]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert words in line
        assert benchmarks(["check", "seedling_rec", *models]) != 0
        captured = capsys.readouterr()
        assert words in captured.err + captured.out
        assert "Traceback" not in captured.err


# ---------------------------------------------------------------- code of checkpoints


@pytest.mark.parametrize("folder", ["harness", "serve", "lab", "tasks"])
def test_the_library_loads_through_the_one_function_that_runs_no_code(folder: str) -> None:
    texts = {file: file.read_text(encoding="utf-8") for file in (ROOT / folder).rglob("*.py")}
    callers = {
        file.relative_to(ROOT).as_posix()
        for file, text in texts.items()
        if "from_pretrained" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and node.attr == "from_pretrained"
    }
    # The bench loads the embedded model as a user of the peers does.
    assert callers <= {"harness/models/loader.py", "lab/bench/peer_sides.py"}


@pytest.mark.parametrize("file", ["tokenizer_config.json", "processor_config.json", "config.json"])
def test_code_of_a_checkpoint_is_not_offered(
    file: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "own.py").write_text("raise SystemExit('it ran')")
    classes = {
        "tokenizer_config.json": {"AutoTokenizer": ["own.Words", None]},
        "processor_config.json": {"AutoProcessor": "own.Words"},
        "config.json": {"AutoConfig": "own.Words", "AutoModelForImageTextToText": "own.Words"},
    }[file]
    unknown = {"tokenizer_class": "Words"} if file == "tokenizer_config.json" else {}
    settings(file, auto_map=classes, **unknown)(folder)
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("a run asked"))
    with suppress(UserError):
        load_adapter(replace(LLAVA, path=folder, weights="trained"))
