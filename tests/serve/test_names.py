"""The check of vLLM's names, over names that are faked to be broken; `python -m tests.serve.names` is the real one."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import espalier.serve
from tests.serve import names
from tests.serve.names import INTERFACES, UNSTABLE, Name
from tests.serve.stubs import put_module

FOLDER = Path(espalier.serve.__file__).parent


class Processor:
    def apply(self, inputs: Any, timing_ctx: Any) -> None:
        self.kept = inputs


def test_a_name_that_broke_is_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_module(monkeypatch, "vllm.fake", Processor=Processor, table={}, flag=SimpleNamespace(a=1))
    whole = (
        Name("vllm.fake", "Processor.apply", ("inputs", "timing_ctx")),
        Name("vllm.fake", "table", ("get",)),
        Name("vllm.fake", "flag.a"),
        Name(__name__, "kept", assigned=True),
    )
    assert [*names.broken(whole)] == []
    gone = (
        Name("vllm.fake", "Processor.run"),
        Name("nowhere", "Processor"),
        Name("vllm.fake", "Processor.apply", ("inputs", "timing", "cache")),
        Name(__name__, "dropped", assigned=True),
    )
    monkeypatch.setattr(names, "UNSTABLE", whole)
    monkeypatch.setattr(names, "INTERFACES", gone)
    assert names.main() == 1
    assert capsys.readouterr().out.splitlines() == [
        "vllm.fake:Processor.run is gone: type object 'Processor' has no attribute 'run'",
        "nowhere:Processor is gone: No module named 'nowhere'",
        "vllm.fake:Processor.apply has no timing, cache",
        f"{__name__}:dropped is not set any more",
        "4 of 8 names broke",
    ]
    monkeypatch.setattr(names, "INTERFACES", ())
    assert names.main() == 0


def test_the_adapter_alone_touches_unstable_names() -> None:
    """Fewer than twelve; every import of vLLM elsewhere is of an interface or of a model class."""
    assert len(UNSTABLE) < 12
    own = {name.path.removesuffix(".__init__").rpartition(".")[2] for name in UNSTABLE} - {"apply"}
    interfaces = {name.path.partition(".")[0] for name in INTERFACES}
    imported = set()
    for file in FOLDER.glob("*.py"):
        source = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                imported |= {(file.name, alias.name) for alias in node.names}
        tokens = {token.string for token in tokenize.generate_tokens(io.StringIO(source).readline)}
        if file.name == "adapter.py":
            assert all(name in source for name in own)
        else:
            assert not own & {token.strip("\"'") for token in tokens}, file.name
    elsewhere = {name for file, name in imported if file != "adapter.py"}
    assert elsewhere <= interfaces | ENGINE


#: Of vLLM's pages about running a model, and about several processes.
ENGINE = {
    *("LLM", "SamplingParams", "AsyncEngineArgs", "RequestOutputKind"),
    *("cleanup_dist_env_and_memory", "get_tensor_model_parallel_rank"),
    *("get_tensor_model_parallel_world_size", "tensor_model_parallel_all_gather"),
    "tensor_model_parallel_all_reduce",
}
