"""`espalier explore`: the answers on its page are those of `ask`, and every mistake is one line."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from html import unescape
from importlib.util import find_spec
from pathlib import Path
from urllib.request import urlopen

import pytest

import espalier
from espalier.__main__ import main
from espalier.harness.paths import ROOT
from espalier.harness.seedling.scene_benchmarks import sample_scene, samples

needs_gradio = pytest.mark.skipif(
    find_spec("gradio") is None, reason="gradio is not installed (make test-explore)"
)


@pytest.fixture(scope="module")
def model() -> espalier.Model:
    return espalier.load("seedling")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Return the file of a scene, and a question about it."""
    sample = samples("seedling_caption", "test", 0, 4, 1)[0]
    path = tmp_path_factory.mktemp("scene") / "scene.png"
    sample_scene(sample).to_pil().save(path)
    return str(path), sample["question"]


@contextmanager
def served(*words: str | Path) -> Iterator[str]:
    """Serve a page from a process of its own; yield its address, and end it as Ctrl-C does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    address = f"http://127.0.0.1:{port}/"
    environment = {**os.environ, "GRADIO_SERVER_PORT": port, "PYTHONPATH": str(ROOT)}
    # A shell ignores Ctrl-C in what it starts in the background, such as these tests.
    process = subprocess.Popen(
        [sys.executable, *words],
        env=environment,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        until = time.monotonic() + 120
        while time.monotonic() < until and process.poll() is None:
            with suppress(OSError), urlopen(address):
                break
            time.sleep(0.5)
        yield address
    finally:
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out.startswith(f"{address}\n") == ("espalier" in words)


def cells(half: str) -> dict[str, list[str]]:
    """Return the cells of a half's table by the names of its rows."""
    rows = re.findall(r"<tr><th>(.*?)</th><td>(.*?)</td><td>(.*?)</td></tr>", half)
    return {name: [*map(unescape, values)] for name, *values in rows}


def pictures(half: str) -> list[bytes]:
    return [b64decode(content) for content in re.findall(r"base64,([\w+/=]+)", half)]


def answer(
    model: espalier.Model, method: str, ratio: float, scene: tuple[str, str]
) -> espalier.Answer:
    with espalier.apply(model, method, ratio) as pruned:
        return pruned.ask(*scene)


@needs_gradio
@pytest.mark.parametrize("percent", [10, 100])
def test_both_halves_have_the_answers_and_the_pictures_of_ask(
    model: espalier.Model, scene: tuple[str, str], percent: int
) -> None:
    from espalier.harness.tools.explore import compare

    methods, unpruned = ("fastv", "random"), answer(model, "none", 0, scene)
    halves = compare(model, *scene, percent, *methods)
    for method, half in zip(methods, halves, strict=True):
        alone, table = answer(model, method, 1 - percent / 100, scene), cells(half)
        assert table["answer"] == [alone.text, unpruned.text]
        assert table["visual tokens kept"] == [f"{alone.kept} of 144", "144 of 144"]
        assert table["FLOPs of the prefill"][0].endswith(f"{alone.flops.share:.0%}")
        assert all(float(time.removesuffix(" ms")) > 0 for time in table["prefill"])
        assert pictures(half) == [alone.show()._repr_png_()]
    assert answer(model, "random", 0.9, scene).kept == 14


@needs_gradio
def test_caches_and_drafts_are_told_beside_the_tokens(
    model: espalier.Model, scene: tuple[str, str]
) -> None:
    from espalier.harness.tools.explore import compare

    evicted, drafted = map(cells, compare(model, *scene, 25, "snapkv", "specvlm_sd"))
    assert evicted["visual tokens kept"][0] == "144 of 144, 25% in the cache"
    assert drafted["visual tokens kept"][0] == "144 of 144, draft 36"


@needs_gradio
def test_a_method_that_cannot_run_has_a_line_in_its_half(
    model: espalier.Model, scene: tuple[str, str]
) -> None:
    from espalier.harness.tools.explore import compare

    line, half = compare(model, *scene, 50, "dycoke", "divprune")
    assert line == (
        "<p><b>method=&#x27;dycoke&#x27; compares the frames of videos, and model=&#x27;seedling&#x27; takes images "
        "only</b></p>"
    )
    assert len(pictures(half)) == 1


@needs_gradio
def test_what_cannot_be_asked_is_a_line_in_both_halves(
    model: espalier.Model, scene: tuple[str, str], tmp_path: Path
) -> None:
    from espalier.harness.tools.explore import compare

    nothing = "<p><b>nothing to ask; valid: a picture and a question</b></p>"
    assert compare(model, None, "is there a star ?", 25, "fastv", "random") == [nothing] * 2
    assert compare(model, scene[0], "  ", 25, "fastv", "random") == [nothing] * 2
    torn = tmp_path / "torn<b>.png"
    torn.write_bytes(Path(scene[0]).read_bytes()[:2000])
    lines = compare(model, str(torn), scene[1], 25, "fastv", "random")
    assert lines[0] == lines[1]
    assert "torn&lt;b&gt;.png" in lines[0]


@needs_gradio
@pytest.mark.parametrize("name", ["seedling", "seedling_diffusion", "wrapped"])
def test_methods_to_choose_from_are_those_that_apply_takes(
    name: str, model: espalier.Model, scene: tuple[str, str]
) -> None:
    if name == "wrapped":
        with model.open_adapter() as adapter:
            model = espalier.wrap(adapter.model, adapter.processor)
    elif name != "seedling":
        model = espalier.load(name)
    page = espalier.explore(model, scene[0], ratio=0.9)
    first, second = (
        block for block in page.blocks.values() if block.get_block_name() == "dropdown"
    )
    names = {choice for choice, _ in first.choices}
    assert first.choices == second.choices
    assert (first.value, second.value) == ("divprune", "random")
    assert ("d3tom" in names) == (name == "seedling_diffusion")
    assert ("snapkv" in names) == (name != "seedling_diffusion")
    assert ("fitprune" in names) == (name == "seedling")
    for method in ("none", "divprune", "random"):
        assert method in names
    (slider,) = (block for block in page.blocks.values() if block.get_block_name() == "slider")
    assert slider.value == 10


@needs_gradio
def test_a_notebook_shows_the_page(model: espalier.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    page, shown = espalier.explore(model), []
    assert not page.analytics_enabled
    monkeypatch.setattr("gradio.Blocks.launch", lambda self, **options: shown.append(options))
    page._ipython_display_()
    assert [(options["share"], options["quiet"]) for options in shown] == [(False, True)]


@needs_gradio
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["nowhere.png"], "image 'nowhere.png' does not exist; valid: an image file"),
        (["ratio=1.5"], "ratio=1.5 must be a number in [0, 1): the share of visual tokens removed"),
        (["method=d3tom"], "method='d3tom' drops tokens at denoising steps"),
        (["model=seedlink"], "model='seedlink' is unknown"),
        (["model.dtype=x"], "model.dtype='x' is unknown"),
        (["keep=64"], "explore: 'keep=64' is not a setting of this page; valid: model, method, ratio,"),
        (["--port", "70000"], "--port=70000 is in use, or no port; valid: another, or none"),
    ],
)  # fmt: skip
def test_a_mistake_on_the_command_line_is_one_line(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explore", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"error: {line}")


@needs_gradio
def test_a_port_in_use_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["explore", "--port", str(port)]) == 2
    assert capsys.readouterr().err.startswith(f"error: --port={port} is in use")


def test_without_gradio_a_line_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "espalier.harness.tools.explore", raising=False)
    monkeypatch.delitem(vars(espalier), "explore", raising=False)
    monkeypatch.setitem(sys.modules, "gradio", None)
    line = "the package gradio is not installed; valid: pip install 'espalier-vlm[explore]'"
    assert main(["explore"]) == 2
    assert capsys.readouterr().err == f"error: {line}\n"
    with pytest.raises(espalier.UserError) as caught:
        espalier.explore  # noqa: B018
    assert str(caught.value) == line


@needs_gradio
def test_questions_of_two_people_do_not_mix(model: espalier.Model, scene: tuple[str, str]) -> None:
    from gradio_client import Client, handle_file

    with served("-m", "espalier", "explore", scene[0], "method=fastv") as address:
        client = Client(address, verbose=False, analytics_enabled=False)
        lines = [("fastv", "random", 10), ("divprune", "none", 50), ("random", "fastv", 30)] * 2
        jobs = [
            client.submit(handle_file(scene[0]), scene[1], percent, first, second, api_name="/ask")
            for first, second, percent in lines
        ]
        for job, (first, second, percent) in zip(jobs, lines, strict=True):
            for method, half in zip((first, second), job.result(), strict=True):
                alone = answer(model, method, 1 - percent / 100, scene)
                assert cells(half)[""] == [method, "unpruned"]
                assert cells(half)["answer"][0] == alone.text
                assert pictures(half) == [alone.show()._repr_png_()]


@needs_gradio
def test_the_file_of_a_space_serves_a_page(scene: tuple[str, str]) -> None:
    from gradio_client import Client, handle_file

    with served(ROOT / "docs/space/app.py") as address:
        client = Client(address, verbose=False, analytics_enabled=False)
        halves = client.predict(
            handle_file(scene[0]), scene[1], 25, "divprune", "random", api_name="/ask"
        )
    assert [cells(half)[""][0] for half in halves] == ["divprune", "random"]
