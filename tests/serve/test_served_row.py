"""`espalier serve setting`: what it prints of a row prunes as the run of that row did."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from espalier.__main__ import main
from espalier.harness.kinds.lookup import method_of
from espalier.harness.runs.environment import commit
from espalier.harness.runs.run_key import key_parts
from espalier.harness.runs.served import served_row
from espalier.harness.runs.served.served_session import setting_of
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store import SCHEMA
from espalier.harness.store.files.digests import Digests
from espalier.methods.readings import readings_of
from espalier.serve.setting import KEY, Setting, served
from tests.commands import spec_of

RUN = "0123456789abcdef"

TEMPLATE = {"template_sha256": "a", "checkpoint_template_sha256": "a"}


def stored(spec: RunSpec, store: Path, **extra: Any) -> None:
    """Write the row of a run, as far as a setting depends on it."""
    parts = key_parts(spec, method_of(spec.method), Digests())
    environment = {"commit": commit(), **extra.pop("environment", {})}
    row = {"schema": SCHEMA, "run_key": RUN, **parts["cell"], "n_samples": 1}
    if row["ratio"] is None:
        row["ratio"] = 0.4  # the share that the count has removed of the samples
    row |= {"settings": parts["settings"], "extra": {"environment": environment, **extra}}
    (store / "runs" / RUN).mkdir(parents=True)
    (store / "runs" / RUN / "row.json").write_text(json.dumps(row), encoding="utf-8")


def printed(store: Path, capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    code = main(["serve", "setting", RUN[:4], "--store", str(store), *options])
    out, error = capsys.readouterr()
    assert (error, code) == ("", 0)
    return out.splitlines()


def setting_in(words: str | Any) -> Setting:
    return Setting().changed(words[KEY])


def cases() -> list[tuple[str, ...]]:
    """Each method with each of its variants, by ratios and counts, and hyper-parameters off their defaults."""
    listed = []
    for name in served():
        readings = readings_of(name)
        variants = (readings and readings.variants) or {None: {}}
        for variant in variants:
            chosen = () if variant is None else (f"method.variant={variant}",)
            listed += [(f"method={name}", *chosen, amount) for amount in ("ratio=0.333", "keep=37")]
    listed += [
        ("method=visionzip", "method.params.dominant_share=0.8125", "ratio=0.9", "seed=7"),
        ("method=cdpruner", "method.params.relevance=none", "ratio=0.1"),
        ("method=scope", "method.params.alpha=1.3", "keep=1"),
        ("method=random", "keep=64", "seed=123456789", "engine.positions=renumbered"),
        ("method=divprune", "ratio=0.7777777777777778", "engine.positions=method"),
    ]
    return listed


@pytest.mark.sampled(18)
@pytest.mark.parametrize("argv", cases(), ids=" ".join)
def test_the_printed_setting_is_that_of_the_run(
    argv: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = spec_of("model=llava15_7b", *argv)
    stored(spec, tmp_path)
    command, request, *_ = printed(tmp_path, capsys)
    words = shlex.split(command)
    assert words[:2] == ["vllm", "serve"]
    assert words[words.index("--revision") + 1] == spec.model.revision
    expected = setting_of(spec, method_of(spec.method))
    body = json.loads(request)
    assert setting_in(body["mm_processor_kwargs"]) == expected
    assert setting_in(json.loads(words[words.index("--hf-overrides") + 1])) == expected
    (table,) = map(json.loads, printed(tmp_path, capsys, "--json"))
    assert table["request"] == body
    assert shlex.join([table["server"]["model"], *table["server"]["options"]]) in command


@pytest.mark.parametrize(
    ("rendered", "special"),
    [("USER: <image> a ASSISTANT:", True), ("<bos>USER: <image> a ASSISTANT:", None)],
)
def test_the_begin_token_is_added_where_the_template_lacks_it(
    rendered: str, special: bool | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored(
        spec_of("method=divprune", "keep=36"), tmp_path, prompt={"rendered": rendered, **TEMPLATE}
    )
    _, request, *further = printed(tmp_path, capsys)
    assert json.loads(request).get("add_special_tokens") == special
    assert further == [f"measured with {KEY} {commit()}"]


def test_other_versions_and_prompts_are_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_row, "installed_version", {"vllm": "0.33.0"}.get)
    stored(
        spec_of("model=llava15_7b", "method=divprune", "keep=36"),
        tmp_path,
        environment={"commit": "espalier-0.1.0", "served": {"vllm": "0.32.0"}},
        prompt={**TEMPLATE, "template_sha256": "b", "rendered": "USER: a"},
    )
    _, _, *further = printed(tmp_path, capsys)
    assert further == [
        f"measured with {KEY} espalier-0.1.0, vllm 0.32.0",
        f"note: measured with {KEY} espalier-0.1.0, and here is {commit()}",
        "note: measured with vllm 0.32.0, and here is 0.33.0",
        "note: the plug-in was tested with vllm 0.31.0, 0.32.0 alone",
        "note: whether the chat template writes the begin token is not known here; where it does not, a request "
        'needs "add_special_tokens": true',
        "note: the run's prompts are not those of the checkpoint's chat template, which a server uses; its first is "
        "'USER: a'",
    ]


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (("method=fastv",), "cannot be served: it acts before decoder layer 2"),
        (("method=snapkv",), "it does not remove tokens of a prompt"),
        (("method=divprune+fastv",), "it is two methods, and vLLM runs one on a prompt"),
        (("method=prumerge",), "reads layer 3 of the tower, and vLLM builds the 3 of 4"),
        (("method=divprune", "model=deepseek_ocr_base"), "which vLLM does not prune; valid: Ll"),
        (
            ("method=divprune", "model=llava_next_7b", "engine.separators=candidates"),
            "engine.separators='candidates' removes newline tokens",
        ),
        (
            ("method=evs", "model=qwen3_vl_2b", "backend=vllm", "backend.pruning=vllm"),
            "valid: --video-pruning-method evs --video-pruning-rate 0.5, without this plug-in",
        ),
    ],
)
def test_a_run_that_cannot_be_served_is_one_line(
    argv: tuple[str, ...], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored(spec_of("ratio=0.5", *argv), tmp_path)
    assert main(["serve", "setting", RUN, "--store", str(tmp_path)]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert line in error
    assert error.count("\n") == 1


def test_code_of_a_user_is_not_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored(spec_of("method=divprune"), tmp_path, code={"divprune": "/a.py:Mine"})
    assert main(["serve", "setting", RUN, "--store", str(tmp_path)]) == 2
    assert "it is code of a user, /a.py:Mine; valid" in capsys.readouterr().err
