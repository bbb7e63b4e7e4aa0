"""Runs of `backend=vllm`: what is refused before an engine starts, and what their keys and records hold."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from espalier.harness.cost.budget import Budget, BudgetMismatch
from espalier.harness.engine.record import SampleRecord
from espalier.harness.engine.session import Session
from espalier.harness.errors import UserError
from espalier.harness.evaluation.samples import Sample
from espalier.harness.kinds.lookup import method_of
from espalier.harness.runs.run_key import key_parts
from espalier.harness.runs.served import backend_check
from espalier.harness.runs.served.engine_pool import code_folder, pruning_arguments
from espalier.harness.runs.served.served_session import (
    ServedGenerator,
    kept_of,
    sampling_of,
    served_prompts,
    setting_of,
)
from espalier.harness.specs.run_spec import AnswerSpec, EngineSpec, MethodSpec
from espalier.harness.store.files.digests import Digests
from espalier.methods.divprune import DivPrune
from espalier.serve.adapter import TESTED
from espalier.serve.setting import Setting
from lab.pages.serve_page import PAGE, page
from tests import commands
from tests.tiny import LLAVA, chat, load_tiny, picture, save_tiny

spec_of = partial(commands.spec_of, "method=divprune")


def check(*argv: str) -> None:
    spec = spec_of("backend=vllm", *argv)
    backend_check.check_backend(spec, method_of(spec.method))


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ((), "backend='vllm' needs backend.python"),
        (("backend.python=/no/python",), "backend.python='/no/python' does not run"),
        (
            (f"backend.python={sys.executable}",),
            rf"has no vllm; valid: {sys.executable} -m pip install vllm=={TESTED[-1]}$",
        ),
    ],
)
def test_without_an_engine_the_line_names_what_is_missing(argv: tuple[str, ...], line: str) -> None:
    with pytest.raises(UserError, match=line):
        check(*argv)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (("backend.url=localhost",), "backend.url='localhost'; valid: the address of a server"),
        (("backend.url=http://a", "backend.python=b"), "backend.python is set as well"),
        (("backend.url=http://a", "backend.tensor_parallel=2"), "has its own parallelism"),
        (
            ("backend.url=http://127.0.0.1:{closed}/v1",),
            "Connection refused); valid: the address of",
        ),
        (("backend.url=http://127.0.0.1:{open}/empty",), "is no server of vLLM"),
        (("backend.url=http://127.0.0.1:{open}",), "is no server of vLLM; valid: the address of"),
    ],
)
def test_a_server_is_asked_before_the_run(argv: tuple[str, ...], line: str, tmp_path: Path) -> None:
    (tmp_path / "version").write_text("nothing", encoding="utf-8")
    serve = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), serve) as server,
        ThreadingHTTPServer(("127.0.0.1", 0), serve) as other,
    ):
        other.server_close()
        Thread(target=server.serve_forever, daemon=True).start()
        ports = {"open": server.server_port, "closed": other.server_port}
        with pytest.raises(UserError) as error:
            check(*(argument.format(**ports) for argument in argv))
        server.shutdown()
    assert line in str(error.value)
    assert "\n" not in str(error.value)


def test_only_a_run_by_item_has_its_scope_in_the_settings() -> None:
    for argv, scope in (((), None), (("engine.scope=item",), "item")):
        spec = spec_of(*argv)
        engine = key_parts(spec, method_of(spec.method), Digests())["settings"]["engine"]
        assert engine.get("scope") == scope


TESTED_VERSION, OTHER_VERSION = "0.32.0", "0.33.0"
OWN_PRUNING = ("backend.pruning=vllm", "model=qwen3_vl_2b")


@pytest.mark.parametrize(
    ("version", "argv", "line"),
    [
        (OTHER_VERSION, (), "has vllm 0.33.0, which was not tested; valid: 0.31.0, 0.32.0"),
        *(
            (TESTED_VERSION, argv, line)
            for argv, line in (
                (("method=fastv",), "'fastv' cannot be served: it acts before decoder layer 2"),
                (("method=snapkv",), "serves token reducers of methods/"),
                (("method=pearl",), "serves token reducers of methods/"),
                (("method=divprune+random",), "serves token reducers of methods/, one a run"),
                (
                    ("engine.rescore=true",),
                    "engine.rescore=True is a setting of backend=transformers",
                ),
                (
                    ("engine=emulate",),
                    "engine.backend='emulate' is a setting of backend=transformers",
                ),
                (("engine.batch_size=auto",), "engine.batch_size='auto'"),
                (
                    ("model=llava15_7b", "model.weights=random"),
                    "has no checkpoint for backend=vllm",
                ),
                (("model=deepseek_ocr_base",), "which backend=vllm does not serve"),
            )
        ),
        *(
            (TESTED_VERSION, (*OWN_PRUNING, *argv), line)
            for argv, line in (
                (
                    ("method=divprune",),
                    "vLLM has no method='divprune' of its own for model='qwen3_vl_2b'",
                ),
                (
                    ("method=vidcom2", "model=qwen2_5_vl_3b"),
                    "for model='qwen2_5_vl_3b'; valid: evs",
                ),
                (("method=evs", "model=llava_ov_7b"), "valid: backend.pruning=espalier"),
                (
                    ("method=vidcom2", "method.params.channels=1.0"),
                    "takes no hyper-parameters in vLLM; valid: {",
                ),
                (("method=evs", "keep=64"), "keep=64 is no share; valid: ratio="),
                (("method=evs", "backend.pruning=x"), "backend.pruning='x'"),
            )
        ),
    ],
)
def test_what_cannot_be_served_is_one_line(
    version: str, argv: tuple[str, ...], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_check, "engine_version", lambda python: version)
    with pytest.raises(UserError, match=re.escape(line)):
        check("backend.python=python", *argv)


def test_pruning_of_vllm_is_in_arguments_settings_and_counts(tmp_path: Path) -> None:
    argv = ("backend=vllm", "model=qwen3_vl_2b", "method=vidcom2", "ratio=0.7")
    entries = []
    for pruning in ("espalier", "vllm"):
        spec = spec_of(*argv, f"backend.pruning={pruning}")
        settings = key_parts(spec, method_of(spec.method), Digests())["settings"]
        kept = kept_of(Setting("vidcom2", ratio=0.7), spec.budget, 12)
        entries.append((settings["backend"].get("pruning"), pruning_arguments(spec), kept))
    arguments = {
        "video_pruning_rate": 0.7,
        "video_pruning_method": "vidcom2",
        "hf_overrides": {"architectures": ["PlainQwen3VLForConditionalGeneration"]},
    }
    assert entries == [(None, {"hf_overrides": {"espalier": {}}}, 4), ("vllm", arguments, 3)]


def test_only_a_served_run_has_the_engine_in_its_settings() -> None:
    spec = spec_of()
    assert "backend" not in key_parts(spec, method_of(spec.method), Digests())["settings"]


def test_the_setting_is_that_of_the_run() -> None:
    setting = setting_of(spec_of("engine.positions=method", "keep=8", "seed=3"), DivPrune())
    assert (setting.method, setting.keep, setting.seed) == ("divprune", 8, 3)
    assert setting.positions == "renumbered"
    assert sampling_of({"max_new_tokens": 7, "do_sample": False, "num_beams": 1}, 0, (2, 5)) == {
        "max_tokens": 7,
        "temperature": 0.0,
        "seed": 0,
        "stop_token_ids": [2, 5],
        "ignore_eos": True,
    }
    lengths = sampling_of({"min_new_tokens": 8, "max_new_tokens": 4}, 0, ())
    assert (lengths["min_tokens"], lengths["max_tokens"]) == (4, 4)
    with pytest.raises(UserError, match=r"generation.num_beams=3 has no counterpart"):
        sampling_of({"num_beams": 3}, 0, ())


class Answering:
    """An engine that reads as many tokens as the method keeps."""

    def __init__(self, kept: int) -> None:
        self.kept = kept

    def ask(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        lengths = [len(request["prompt"]) - 1 + self.kept for request in requests]
        return [{"ids": [3, 4], "prompt": length, "ended": False} for length in lengths]


def test_the_cache_of_a_served_prompt_has_the_bytes_of_that_prompt_alone(tmp_path: Path) -> None:
    """In the harness's own engine the shorter prompts of a batch are padded; with one prompt both count alike."""
    adapter = load_tiny(LLAVA, save_tiny(LLAVA, tmp_path), "float32")
    spec = AnswerSpec(
        model=adapter.spec,
        method=MethodSpec("divprune"),
        budget=Budget("kept", 0.75),
        engine=EngineSpec(),
    )
    chats = [chat(words, picture(n, 28, 28)) for n, words in enumerate(("w1", "w1 w2 w3 w4"))]
    served = ServedGenerator(spec, adapter, DivPrune(), Answering(4))
    prompts = served_prompts(adapter, chats)
    counted = [record.kv_bytes for record in served.generate(prompts, ["a", "b"]).records]
    with Session(adapter, DivPrune(), spec.budget) as session:
        alone = [
            session.generate(adapter.encode([single]), ["a"], max_new_tokens=3).records[0].kv_bytes
            for single in chats
        ]
        padded = session.generate(adapter.encode(chats), ["a", "b"], max_new_tokens=3).records
    assert (counted, [record.kv_bytes for record in padded]) == (alone, [alone[1]] * 2)


def test_counts_of_several_pictures_are_verified_one_by_one() -> None:
    record = SampleRecord(
        sample="a",
        visual=12,
        text=4,
        requested=(6,),
        kept=(6,),
        entering=(6,) * LLAVA.facts.text.layers,
        kv_entries=0,
        kv_bytes=0,
        new_tokens=1,
        items=(3, 3, 3, 3),
    )
    with pytest.raises(BudgetMismatch, match=r"requested \(8,\)"):
        Budget("kept", 0.5).verify(DivPrune(), LLAVA.facts, record)
    sample = Sample("t", 0, "x", 16, 1, record)
    assert Sample.from_entry(sample.entry()).record.items == (3, 3, 3, 3)


def test_another_interpreter_finds_the_package_and_its_entry_point(tmp_path: Path) -> None:
    folder = code_folder(tmp_path / "code")
    assert (folder / "espalier" / "serve" / "plugin.py").is_file()
    (points,) = folder.glob("*.dist-info/entry_points.txt")
    assert "espalier.serve.plugin:register" in points.read_text(encoding="utf-8")


def test_the_page_lists_what_is_served() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "python -m lab.pages.serve_page --write docs/serve.md"
    )
