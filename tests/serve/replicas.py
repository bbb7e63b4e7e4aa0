"""One model in several processes, and with an adapter: each request has the answer of the harness's engine.

All settings of a picture are in flight together, twice, with prefix caching: a cache that mixed up settings or
processes would show. `make test-serve`, not an everyday test.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import espalier
from espalier.harness.runs.served.engine_pool import code_folder
from espalier.harness.runs.served.engine_server import EngineServer
from tests.serve.equal_answers import Side, harness_answers, request_of, same, scenes, served
from tests.serve.running_server import (
    MODEL,
    ON,
    PYTHON,
    RUN,
    ready,
    row_of,
    run_beside_death,
    serving,
    stop,
)
from tests.serve.running_server import espalier as run_espalier

#: Of PyPI's package `vllm-router`.
ROUTER = Path(os.environ.get("SERVE_ROUTER", PYTHON.with_name("vllm-router")))

#: Method and ratio; `cdpruner` reads words, `visionzip` attention and keys of the tower.
CELLS = (
    ("none", 0.0),
    *((name, ratio) for name in ("random", "divprune", "cdpruner") for ratio in (0.5, 0.75)),
    ("visionzip", 0.75),
)

#: Pictures of a cell, each with a question.
PROMPTS = 8

TURNS = 2

#: In pieces that split pictures.
CACHED = (*ON, "--enable-prefix-caching", "--block-size", "32", "--max-num-batched-tokens", "160")

LAYERS = ("--tensor-parallel-size", "2")

REQUESTS = ("--data-parallel-size", "2")

#: Without it each worker of a server takes the processors of a node of memory, and most machines have one.
UNBOUND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, and a record of vLLM by the name that its command reads: its build for processors has another."""
    if not PYTHON.exists():
        pytest.exit(f"no vLLM: {PYTHON} does not exist", returncode=1)
    folder = code_folder(tmp_path_factory.mktemp("code") / "path")
    record = folder / "vllm-0.32.0+cpu.dist-info"
    record.mkdir()
    text = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n"
    record.joinpath("METADATA").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def side() -> Side:
    return side_of(MODEL)


def side_of(model: Path) -> Side:
    with espalier.load("seedling", path=model).open_adapter() as adapter:
        return Side(adapter, scenes(PROMPTS))


def equal(pairs: Sequence[tuple[EngineServer, Side]]) -> list[bool]:
    """Whether each answer of a server is that of the harness, two turns of all cells; the sides must differ."""
    asked = [
        (server, request_of(side.adapter, *cell, "original"), side)
        for cell in CELLS
        for server, side in pairs
    ]
    expected = [harness_answers(spec, side) for _, spec, side in asked]
    texts = {json.dumps([e[0] for e in expected[n :: len(pairs)]]) for n in range(len(pairs))}
    assert len(texts) == len(pairs)
    with ThreadPoolExecutor(len(asked)) as pool:
        turns = [list(pool.map(lambda cell: served(*cell), asked)) for _ in range(TURNS)]
    return [
        same(answer, right, logits)
        for answers in turns
        for cell, (rights, all_logits) in zip(answers, expected, strict=True)
        for answer, right, logits in zip(cell, rights, all_logits, strict=True)
    ]


def counters(url: str, name: str) -> dict[str, float]:
    """Values of a counter of /metrics, by its labels."""
    text = httpx.get(f"{url}/metrics").text
    rows = re.findall(rf"^{re.escape(name)}(?:{{(.*)}})? (\S+)$", text, re.MULTILINE)
    return {labels: float(value) for labels, value in rows}


def counts(*urls: str) -> tuple[dict[str, float], list[float]]:
    """Requests of each method over servers, and those that each engine has answered."""
    total: dict[str, float] = {}
    engines = []
    for url in urls:
        for labels, value in counters(url, "espalier_requests_total").items():
            total[labels] = total.get(labels, 0) + value
        assert counters(url, "espalier_selection_seconds_count")[""] > 0
        assert sum(counters(url, "vllm:prefix_cache_hits_total").values()) > 0
        by_engine: dict[str, float] = {}
        for labels, value in counters(url, "vllm:request_success_total").items():
            (number,) = re.findall(r'engine="(\d+)"', labels)
            by_engine[number] = by_engine.get(number, 0) + value
        engines += by_engine.values()
    return total, engines


def expected_counts(pairs: int = 1) -> dict[str, float]:
    total: dict[str, float] = {}
    for name, _ in CELLS:
        label = f'method="{name}"'
        total[label] = total.get(label, 0) + PROMPTS * TURNS * pairs
    return total


@pytest.mark.parametrize(
    ("command", "options", "engines"),
    [
        (False, (), 1),
        (False, LAYERS, 1),
        (False, REQUESTS, 2),
        (True, REQUESTS, 2),
    ],
    ids=["one", "layers", "requests", "servers"],
)
def test_several_processes_answer_as_the_harness_does(
    code: Path, side: Side, tmp_path: Path, command: bool, options: tuple[str, ...], engines: int
) -> None:
    """Divided layers; divided requests with one server, and with one for each engine, as `vllm serve` starts them."""
    script = f"{PYTHON} -m vllm.entrypoints.cli.main serve {MODEL} --dtype float32"
    with serving(
        code, tmp_path / "log", *CACHED, *options, script=script if command else "", **UNBOUND
    ) as (url, _):
        answers = equal([(EngineServer(url, side.adapter.spec), side)])
        requests, by_engine = counts(url)
    print(f"equal {sum(answers)} of {len(answers)}; requests {by_engine}", end=" ")
    assert all(answers)
    assert requests == expected_counts()
    assert len(by_engine) == engines
    assert min(by_engine) > 0


@contextmanager
def routing(log: Path, *urls: str) -> Iterator[str]:
    """The address of vLLM's router before some servers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [str(ROUTER), "--host", "127.0.0.1", "--port", port, "--policy", "round_robin"]
    url = f"http://127.0.0.1:{port}"
    with log.open("w", encoding="utf-8") as stream:
        router = subprocess.Popen(
            [*command, "--worker-urls", *urls],
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while not ready(url):
                assert router.poll() is None, log.read_text(encoding="utf-8")[-2000:]
                time.sleep(0.2)
            yield url
        finally:
            stop(router)


def test_replicas_behind_a_router_answer_as_the_harness_does(
    code: Path, side: Side, tmp_path: Path
) -> None:
    """One of them dies in a run, which then goes on with the other, or ends in one line and is continued."""
    if not ROUTER.exists():
        pytest.skip(
            f"{ROUTER} does not exist: pip install vllm-router, in any environment, and SERVE_ROUTER"
        )
    store, length = tmp_path / "store", ("limit=40", "engine.batch_size=4")
    with ExitStack() as stack:
        (first, server), (second, _) = (
            stack.enter_context(serving(code, tmp_path / name, *CACHED)) for name in ("a", "b")
        )
        router = stack.enter_context(routing(tmp_path / "router", first, second))
        answers = equal([(EngineServer(router, side.adapter.spec), side)])
        requests, by_engine = counts(first, second)
        print(f"equal {sum(answers)} of {len(answers)}; requests {by_engine}", end=" ")
        assert all(answers)
        assert requests == expected_counts()
        assert min(by_engine) > 0
        whole = row_of(run_espalier(tmp_path / "whole", *RUN, *length, f"backend.url={router}"))
        exit_code, errors = run_beside_death(store, server, *length, f"backend.url={router}")
        print(f"run after a death: {exit_code}, {errors.strip()[-300:]}", end=" ")
        assert "Traceback" not in errors
        row = row_of(run_espalier(store, *RUN, *length, f"backend.url={router}"))
    assert row["extra"]["answers"] == whole["extra"]["answers"]


def changed(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    """The embedded model with other tensors."""
    shutil.copytree(MODEL, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        change({name: tensor.float() for name, tensor in tensors.items()}),
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


#: The layers of the decoder that the adapter changes.
ADAPTED = re.compile(r"language_model\.model\.layers\..*\.(?:q|v|down)_proj\.weight")

RANK, ALPHA = 4, 8


def write_lora(folder: Path) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Write an adapter for the decoder as PEFT does; the function adds it to the tensors of a model."""
    generator = torch.Generator().manual_seed(0)
    tensors, sums = {}, {}
    for name, tensor in load_file(MODEL / "model.safetensors").items():
        if ADAPTED.fullmatch(name):
            down = torch.randn(RANK, tensor.shape[1], generator=generator) * 0.1
            up = torch.randn(tensor.shape[0], RANK, generator=generator) * 0.1
            sums[name] = up @ down * (ALPHA / RANK)
            place = name.replace("language_model.model.", "model.language_model.")
            place = f"base_model.model.{place.removesuffix('.weight')}"
            tensors |= {f"{place}.lora_A.weight": down, f"{place}.lora_B.weight": up}
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA}
    config |= {"target_modules": ["q_proj", "v_proj", "down_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return lambda stored: {name: tensor + sums.get(name, 0) for name, tensor in stored.items()}


def test_requests_with_and_without_an_adapter_share_a_server(
    code: Path, side: Side, tmp_path: Path
) -> None:
    """The reference for an adapter is the model to which it was added.

    vLLM's code for processors gives requests without an adapter that of the last slot: one slot more stays empty.
    """
    merged = side_of(changed(tmp_path / "merged", write_lora(tmp_path / "lora")))
    lora = f"tuned={tmp_path / 'lora'}"
    options = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules", lora)
    with serving(code, tmp_path / "log", *CACHED, *options, **UNBOUND) as (url, _):
        spec = side.adapter.spec
        tuned = EngineServer(url, replace(spec, path=tmp_path / "lora"))
        answers = equal([(EngineServer(url, spec), side), (tuned, merged)])
    print(f"equal {sum(answers)} of {len(answers)}", end=" ")
    assert all(answers)
