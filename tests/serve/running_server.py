"""A running server of vLLM: equal answers, refusals before the first sample, its death in a run; and a small load."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pandas as pd
import pytest

from espalier.harness.paths import ROOT
from espalier.harness.runs.served.engine_pool import code_folder
from espalier.harness.seedling.scene_benchmarks import sample_scene, samples
from espalier.serve.adapter import TESTED
from espalier.serve.setting import KEY
from lab.pages.serve_page import PAGE

PYTHON = Path(os.environ.get("SERVE_PYTHON", ".venv-serve/bin/python"))

MODEL = ROOT / "harness" / "seedling" / "weights" / "seedling"

TRUST = ("--trust-request-mm-kwargs", "--trust-request-chat-template")

#: What switches the plug-in on.
ON = ("--hf-overrides", '{"espalier": {}}', *TRUST)

#: Seconds that a server may take to load.
PATIENCE = 600

RUN = ("backend=vllm", "benchmark=seedling_rec", "method=divprune", "ratio=0.75")


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not PYTHON.exists():
        pytest.exit(f"no vLLM: {PYTHON} does not exist", returncode=1)
    return code_folder(tmp_path_factory.mktemp("code") / "path")


@contextmanager
def serving(
    code: Path, log: Path, *options: str, script: str = "", **environment: str
) -> Iterator[tuple[str, subprocess.Popen]]:
    """A server of the embedded model, or of a script: its address and its process; it is gone at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    further = ("--enforce-eager", "--host", "127.0.0.1", "--port", str(port), *options)
    command = ["bash", "-ec", f"{script.rstrip()} {shlex.join(further)}"]
    if not script:
        command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL)]
        command += ["--dtype", "float32", *further]
    url = f"http://127.0.0.1:{port}"
    with log.open("w", encoding="utf-8") as stream:
        server = subprocess.Popen(
            command,
            env={**variables(code, PYTHON), "VLLM_CPU_KVCACHE_SPACE": "1", **environment},
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            end = time.monotonic() + PATIENCE
            while not ready(url):
                assert server.poll() is None, log.read_text(encoding="utf-8")[-2000:]
                assert time.monotonic() < end
                time.sleep(0.5)
            yield url, server
        finally:
            stop(server)


def variables(code: Path, python: Path) -> dict[str, str]:
    """The environment in which `python` is an interpreter that finds the package."""
    path = f"{python.parent}:{os.environ['PATH']}"
    return {**os.environ, "PYTHONPATH": str(code), "PATH": path}


def ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def stop(server: subprocess.Popen) -> None:
    """End a server and its engine, which is a process of its session."""
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def espalier(store: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "espalier", "run", f"store={store}", "json=true", *argv]
    return subprocess.run(command, capture_output=True, encoding="utf-8", check=False)


def run_beside_death(store: Path, server: subprocess.Popen, *argv: str) -> tuple[int, str]:
    """The exit code and errors of a run during which a server is killed after three answers."""
    command = [sys.executable, "-m", "espalier", "run", f"store={store}", *RUN, *argv]
    with subprocess.Popen(command, stderr=subprocess.PIPE, encoding="utf-8") as running:
        while running.poll() is None and answered(store) < 3:
            time.sleep(0.05)
        stop(server)
        _, errors = running.communicate()
    return running.returncode, errors


def row_of(done: subprocess.CompletedProcess[str]) -> dict:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_a_server_answers_as_the_harness_does(code: Path, tmp_path: Path) -> None:
    settings = ("method=divprune", "ratio=0.75", "benchmark=seedling_rec", "limit=12")
    with serving(code, tmp_path / "log", *ON) as (url, _):
        served = row_of(espalier(tmp_path / "a", *settings, "backend=vllm", f"backend.url={url}"))
        # A second server for this address ends at once, and the first goes on.
        late = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL)]
        late += ["--host", "127.0.0.1", "--port", url.rpartition(":")[2]]
        ended = subprocess.run(
            late, capture_output=True, encoding="utf-8", check=False, env=variables(code, PYTHON)
        )
        wrong = espalier(
            tmp_path / "b", *RUN, "model=seedling_full", f"backend.url={url}", "limit=1"
        )
    row = row_of(espalier(tmp_path / "c", *settings, "engine.paired=0"))
    for key in ("metrics", "tokens", "flops"):
        assert served[key] == row[key]
    assert served["extra"]["answers"] == row["extra"]["answers"]
    assert served["extra"]["achieved"] == row["extra"]["achieved"]
    assert served["settings"]["backend"]["version"] in TESTED
    assert ended.returncode != 0
    assert "Address already in use" in ended.stderr
    assert wrong.returncode != 0
    assert "valid for model='seedling_full': a server of" in wrong.stderr


def run(script: str, folder: Path, code: Path) -> str:
    """What a block of the page prints, in a folder, in the environment of the harness."""
    done = subprocess.run(
        ["bash", "-ec", script],
        cwd=folder,
        env=variables(code, Path(sys.executable)),
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_as_it_is_printed_gives_the_answers_of_the_harness(
    code: Path, tmp_path: Path
) -> None:
    """Its first blocks: a server, a scene, a question; then other scenes and questions by the same request."""
    start, draw, ask, *_ = re.findall(r"```sh\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    start = "".join(line for line in start.splitlines(keepends=True) if "pip install" not in line)
    (question,) = re.findall(r'"text": "(.*?)"', ask)
    (setting,) = re.findall(r'"mm_processor_kwargs": (\{.*\})', ask)
    budget = json.loads(setting)[KEY]
    run(draw, tmp_path, code)
    pictures = {"scene.png": question}
    for number, doc in enumerate(samples("seedling_vqa", "test", 0, 4_000_000, 5)):
        sample_scene(doc).to_pil().save(tmp_path / f"{number}.png")
        pictures[f"{number}.png"] = doc["question"]
    answers = []
    with serving(code, tmp_path / "log", script=start) as (url, _):
        script = ask.replace("http://localhost:8000", url)
        for picture, words in pictures.items():
            asked = script.replace("scene.png", picture).replace(question, words)
            reply = json.loads(run(asked, tmp_path, code))
            # vLLM decodes word by word, so the blank before the first word stays.
            answers.append(reply["choices"][0]["message"]["content"].strip())
            # The begin token and the names of two turns stand around the question.
            usage = reply["usage"]
            assert usage["prompt_tokens"] == 3 + len(words.split()) + budget["keep"]
            details = usage["prompt_tokens_details"]["multimodal_tokens"]
            assert details == {"image": budget["keep"]}
    table = tmp_path / "scenes.jsonl"
    lines = [json.dumps({"image": p, "question": q, "answer": "a"}) for p, q in pictures.items()]
    table.write_text("\n".join(lines), encoding="utf-8")
    overrides = [f"method={budget['method']}", f"keep={budget['keep']}", "engine.paired=0"]
    overrides += ["benchmark=data", f"benchmark.path={table}", "+benchmark.prompt.post_prompt=''"]
    row_of(espalier(tmp_path / "store", *overrides))
    entries = [
        json.loads(line)
        for path in (tmp_path / "store").rglob("*.jsonl")
        for line in path.read_text("utf-8").splitlines()
        if "journal" in str(path)
    ]
    expected = {entry["doc_id"]: entry["answer"] for entry in entries if "answer" in entry}
    assert answers == [expected[number] for number in range(len(pictures))]
    assert len(set(answers)) > 1


@pytest.mark.parametrize(
    ("options", "environment", "line"),
    [
        (ON, {"VLLM_PLUGINS": "none"}, "backend.url"),
        (TRUST, {}, "started with --hf-overrides"),
        (ON[:2], {}, "--trust-request-chat-template"),
    ],
)
def test_a_server_without_the_plug_in_is_refused(
    code: Path, tmp_path: Path, options: tuple[str, ...], environment: dict, line: str
) -> None:
    with serving(code, tmp_path / "log", *options, **environment) as (url, _):
        done = espalier(tmp_path / "a", *RUN, f"backend.url={url}", "limit=1")
    print(done.stderr)
    assert done.returncode != 0
    assert line in done.stderr
    assert "valid: a server with the plug-in" in done.stderr or "has no plug-in" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_goes_on_after_its_server_has_died(code: Path, tmp_path: Path) -> None:
    store, length = tmp_path / "store", ("limit=40", "engine.batch_size=1")
    with serving(code, tmp_path / "log", *ON) as (url, server):
        exit_code, errors = run_beside_death(store, server, *length, f"backend.url={url}")
    assert exit_code != 0
    assert f"the server at backend.url='{url}' ended" in errors
    assert "Traceback" not in errors
    assert answered(store) >= 3
    with serving(code, tmp_path / "log", *ON) as (url, _):
        row = row_of(espalier(store, *RUN, *length, f"backend.url={url}"))
        again = row_of(espalier(tmp_path / "new", *RUN, *length, f"backend.url={url}"))
    assert row["status"] == "resumed"
    assert row["extra"]["resumed_samples"] >= 3
    assert row["extra"]["answers"] == again["extra"]["answers"]


def test_a_small_load_gives_rows_and_a_sentence(code: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lab.bench.serve_bench", f"backend.python={PYTHON}"]
    command += ["method=divprune", "ratio=0.75", "+backend.options.enforce_eager=true"]
    command += ["--in-flight=4", "--load=1", "--lives=1", "--requests=4", "--seconds=2"]
    command += ["--tokens=4", "--write"]
    done = subprocess.run(
        [*command, str(tmp_path)],
        capture_output=True,
        encoding="utf-8",
        check=False,
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "`divprune` at 0.75 (prompts of 211 and 103 tokens): " in done.stdout
    rows = pd.read_csv(tmp_path / "serve_seedling.csv")
    assert rows.groupby("method").size().to_dict() == {"divprune": 3, "none": 3}
    fewer = rows.groupby("method").prompt_tokens.first()
    assert fewer["none"] - fewer["divprune"] == 144 - 36
    assert (rows.selection_ms < rows.encoder_ms).all()
    assert (rows.blocks_peak >= 1).all()


def test_metrics_count_what_is_removed(code: Path, tmp_path: Path) -> None:
    """Two requests for a picture, the second answered from the caches, one that removes nothing, and a refusal."""
    picture = io.BytesIO()
    sample_scene(samples("seedling_vqa", "test", 0, 0, 1)[0]).to_pil().save(picture, "PNG")
    data = base64.b64encode(picture.getvalue()).decode()
    medium = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    message = {"role": "user", "content": [medium, {"type": "text", "text": "where is red ?"}]}
    with serving(code, tmp_path / "log", *ON, VLLM_LOGGING_LEVEL="DEBUG") as (url, _):
        codes = [
            httpx.post(
                f"{url}/v1/chat/completions",
                json={
                    "model": str(MODEL),
                    "messages": [message],
                    "mm_processor_kwargs": {KEY: setting},
                },
                timeout=PATIENCE,
            ).status_code
            for setting in (*[{"method": "divprune", "keep": 36}] * 2, {}, {"method": "fastv"})
        ]
        text = httpx.get(f"{url}/metrics").text
    assert codes == [200, 200, 200, 400]
    values = dict(re.findall(r"^(espalier_\S+) (\S+)$", text, re.MULTILINE))
    assert {name: float(value) for name, value in values.items() if "_total" in name} == {
        f'espalier_{name}_total{{method="{method}"}}': number
        for method, numbers in (("divprune", (2, 288, 72)), ("none", (1, 144, 144)))
        for name, number in zip(("requests", "visual_tokens", "kept_tokens"), numbers, strict=True)
    }
    assert float(values["espalier_selection_seconds_count"]) == 1
    assert float(values["espalier_selection_seconds_sum"]) > 0
    log = (tmp_path / "log").read_text(encoding="utf-8")
    assert log.count("36 of 144 visual tokens of 1 pictures and videos stay: {") == 2


def answered(store: Path) -> int:
    """Answers in the journals of a store."""
    return sum(
        path.read_bytes().count(b"\n") for path in store.rglob("*.jsonl") if "journal" in str(path)
    )
