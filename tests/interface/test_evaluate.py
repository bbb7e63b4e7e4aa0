"""`espalier.evaluate`: the runs of the command line, with names or objects in each place."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoProcessor, LlavaForConditionalGeneration

import espalier
import run
from espalier.harness.seedling import weights_dir
from espalier.harness.seedling.scene_benchmarks import sample_scene, samples
from espalier.harness.stats import mcnemar_pvalue
from espalier.methods.base import Plan, Site, TokenReducer
from espalier.methods.compressor import CacheCompressor
from espalier.methods.fastv import FastV
from espalier.methods.h2o import H2O
from espalier.methods.select.topk import top

LIMIT = 5
BENCHMARK = "seedling_vqa"


@dataclass(frozen=True)
class Norm(TokenReducer):
    """Keeps the longest tokens."""

    p: float = 2.0

    def sites(self, depth: int) -> tuple[Site, ...]:
        return (Site("prefix"),)

    def plan(self, view: Any, keep: int) -> Plan:
        return Plan(top(view.tokens.float().norm(p=self.p, dim=-1), keep))


class Interrupter:
    """Interrupts after a number of plans; None: never."""

    plans: int | None = None


@dataclass(frozen=True)
class Interrupted(Norm):
    def plan(self, view: Any, keep: int) -> Plan:
        if Interrupter.plans is not None:
            if Interrupter.plans == 0:
                raise KeyboardInterrupt
            Interrupter.plans -= 1
        return super().plan(view, keep)


@dataclass(frozen=True)
class Broken(Norm):
    def plan(self, view: Any, keep: int) -> Plan:
        raise ZeroDivisionError("of mine")


@pytest.fixture(scope="module")
def model() -> espalier.Model:
    return espalier.load("seedling", device="cpu")


@pytest.fixture(scope="module")
def fastv(store: Path) -> espalier.EvaluatedRun:
    """The run of fastv that the command line has made."""
    argv = [f"benchmark={BENCHMARK}", f"limit={LIMIT}", f"store={store}", "json=false"]
    assert run.main([*argv, "model=seedling", "method=fastv", "ratio=0.9"]) == 0
    return evaluated(store, "fastv")


def evaluated(
    store: Path, method: Any, model: Any = "seedling", ratio: float | None = 0.9, **settings: Any
) -> espalier.EvaluatedRun:
    return espalier.evaluate(model, method, BENCHMARK, ratio, limit=LIMIT, store=store, **settings)


@contextmanager
def refused(*words: str) -> Iterator[None]:
    with pytest.raises(espalier.UserError) as caught:
        yield
    line = str(caught.value)
    assert "\n" not in line
    assert [word for word in words if word not in line] == []


@pytest.mark.slow
def test_a_run_of_the_command_line_is_served_from_the_store(
    fastv: espalier.EvaluatedRun, store: Path
) -> None:
    assert fastv.status == "cached"
    stored = json.loads((store / "runs" / fastv.key / "row.json").read_text())
    assert {**fastv.row, "status": "done"} == stored
    assert [path.name for path in (store / "runs").iterdir()].count(fastv.key) == 1


@pytest.mark.slow
def test_objects_have_the_keys_of_their_names(
    fastv: espalier.EvaluatedRun, store: Path, model: espalier.Model
) -> None:
    for loaded, method in ((model, "fastv"), (model, FastV(K=2)), ("seedling", FastV(K=2))):
        same = evaluated(store, method, loaded, np.float64(0.9))
        assert (same.status, same.key) == ("cached", fastv.key)
    assert evaluated(store, "fastv", K=2, queries="last").key == fastv.key
    changed = evaluated(store, FastV(K=3, queries="last"), model)
    # An instance has the reading with its values.
    assert (changed.status, changed.row["variant"]) == ("done", "official")
    assert evaluated(store, "fastv", K=3, variant="official").key == changed.key
    assert evaluated(store, "fastv", K=3, variant="paper").key != changed.key
    stacks = [
        evaluated(store, method, model, compressor=compressor, cache_ratio=0.25)
        for method, compressor in (
            ("fastv", H2O(repeated=True)),
            (FastV(K=2), "h2o"),
            (FastV(K=2), H2O(repeated=True)),
        )
    ]
    assert [(stack.status, stack.row["method"], stack.key) for stack in stacks] == [
        (status, "fastv+h2o", stacks[0].key) for status in ("done", "cached", "cached")
    ]


@pytest.mark.slow
def test_a_count_of_tokens_is_that_of_the_command_line(store: Path, model: espalier.Model) -> None:
    argv = [f"benchmark={BENCHMARK}", f"limit={LIMIT}", f"store={store}", "json=false"]
    assert run.main([*argv, "method=fastv", "keep=64"]) == 0
    for loaded in ("seedling", model):
        counted = evaluated(store, "fastv", loaded, None, keep=64)
        assert (counted.status, counted.row["keep"]) == ("cached", 64)
    assert set(counted.samples.kept) == {64}


def test_a_run_has_metrics_and_samples(fastv: espalier.EvaluatedRun) -> None:
    frame, metric = fastv.samples, fastv.metrics["accuracy"]
    assert list(frame.columns[:8]) == [
        *("id", "question", "answer", "target"),
        *("score", "visual", "kept", "tokens"),
    ]
    assert len(frame) == fastv.row["n_samples"] == LIMIT
    assert metric["value"] == fastv.value == frame.score.mean() == frame.accuracy.mean()
    assert metric["low"] < metric["value"] <= metric["high"]
    assert metric["stderr"] == fastv.row["metrics"]["accuracy"]["stderr"]
    assert set(frame.kept) == {14}
    assert set(frame.visual) == {144}
    right = frame[frame.answer == frame.target]
    assert list(right.score) == [1.0] * len(right)
    assert repr(fastv).startswith(f"fastv official 0.9 on {BENCHMARK} (seedling): accuracy 0.")
    assert "<table" in fastv._repr_html_()


def test_two_runs_are_compared_on_their_samples(fastv: espalier.EvaluatedRun, store: Path) -> None:
    whole = evaluated(store, "none", ratio=None)
    comparison = fastv.against(whole)
    gain = fastv.samples.score.to_numpy() - whole.samples.score.to_numpy()
    assert comparison.difference == pytest.approx(gain.mean())
    assert (comparison.broke, comparison.mended) == ((gain < 0).sum(), (gain > 0).sum())
    assert comparison.p == mcnemar_pvalue(comparison.broke, comparison.mended)
    assert comparison.interval[0] <= comparison.difference <= comparison.interval[1]
    assert len(comparison.samples) == np.count_nonzero(gain)
    assert repr(comparison).count("\n") == 1
    with refused("against(str)"):
        fastv.against("none")
    with refused("metric='bogus'", "accuracy"):
        fastv.against(whole, "bogus")


@pytest.mark.slow
def test_an_interrupted_run_resumes(store: Path, model: espalier.Model) -> None:
    Interrupter.plans = 2
    with pytest.raises(KeyboardInterrupt):
        evaluated(store, Interrupted(), model, batch_size=2, **{"engine.warmup": 0})
    Interrupter.plans = None
    resumed = evaluated(store, Interrupted(), model, batch_size=2, **{"engine.warmup": 0})
    assert (resumed.status, resumed.row["extra"]["resumed_samples"]) == ("resumed", 4)
    assert list(resumed.samples.answer) == list(evaluated(store, Norm(), model).samples.answer)


@pytest.mark.slow
def test_an_interrupted_run_on_own_data_resumes_unless_the_data_have_changed(
    store: Path, model: espalier.Model, tmp_path: Path
) -> None:
    lines = ["image,question,answer"]
    for number, sample in enumerate(samples(BENCHMARK, "test", 0, 0, 3)):
        sample_scene(sample).to_pil().save(tmp_path / f"{number}.png")
        lines.append(f"{number}.png,{sample['question']},{sample['answer']}")
    data = tmp_path / "mine.csv"
    data.write_text("\n".join(lines), encoding="utf-8")

    def run_on_data(method: Norm, plans: int | None = None) -> espalier.EvaluatedRun:
        Interrupter.plans = plans
        settings: dict[str, Any] = {"benchmark.text": "{{ question }}", "engine.warmup": 0}
        return espalier.evaluate(
            model, method, data, 0.9, store=store, score="exact", batch_size=1, **settings
        )

    with pytest.raises(KeyboardInterrupt):
        run_on_data(Interrupted(), plans=2)
    resumed = run_on_data(Interrupted())
    assert (resumed.status, resumed.row["extra"]["resumed_samples"]) == ("resumed", 2)
    whole = run_on_data(Norm())
    assert list(resumed.samples.answer) == list(whole.samples.answer)
    assert resumed.row["metrics"] == whole.row["metrics"]
    # With another picture it is another run, which takes no answer of the one before.
    with pytest.raises(KeyboardInterrupt):
        run_on_data(Interrupted(p=3.0), plans=1)
    (tmp_path / "0.png").write_bytes((tmp_path / "1.png").read_bytes())
    changed = run_on_data(Interrupted(p=3.0))
    assert (changed.status, changed.row["extra"]["resumed_samples"]) == ("done", 0)


def test_an_error_of_an_own_method_is_one_line_with_its_cause(
    store: Path, model: espalier.Model
) -> None:
    with pytest.raises(espalier.UserError, match="method Broken at prefix 0") as caught:
        evaluated(store, Broken(), model)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.slow
def test_a_model_in_memory_counts_by_its_weights(store: Path) -> None:
    folder = weights_dir("seedling")
    hf_model = LlavaForConditionalGeneration.from_pretrained(folder).train()
    wrapped = espalier.wrap(hf_model, AutoProcessor.from_pretrained(folder), name="mine")
    former = (hf_model.generation_config, hf_model.config.to_dict())
    first = evaluated(store, "divprune", wrapped)
    assert (first.status, first.row["model"]) == ("done", "mine")
    assert first.row["settings"]["model"]["revision"].startswith("memory-")
    assert list(first.samples.answer) == list(evaluated(store, "divprune").samples.answer)
    assert (hf_model.generation_config, hf_model.config.to_dict()) == former
    assert all(module.training for module in hf_model.modules())
    # A class by its place is composed anew, a model that is wrapped again is the same.
    assert evaluated(store, f"{__file__}:Norm", wrapped).row["method"] == "Norm"
    assert (
        evaluated(
            store,
            "divprune",
            espalier.wrap(hf_model, AutoProcessor.from_pretrained(folder), name="mine"),
        ).status
        == "cached"
    )
    with torch.no_grad():
        hf_model.lm_head.weight[-1, -1] += 1e-3
    assert evaluated(store, "divprune", wrapped).key != first.key
    with refused("'d2pruner' reads a calibration of a checkpoint"):
        evaluated(store, "d2pruner", wrapped)
    hf_model.model.register_forward_hook(lambda *arguments: None)
    with refused("hf_model: model has a hook", "handle.remove()"):
        evaluated(store, "divprune", wrapped)


@pytest.mark.slow
def test_records_in_memory_are_a_benchmark(store: Path, model: espalier.Model) -> None:
    records = [
        {
            "id": f"mine-{number}",
            "image": sample_scene(sample).to_pil(),
            "question": sample["question"],
            "answer": sample["answer"],
        }
        for number, sample in enumerate(samples(BENCHMARK, "test", 0, 0, 3))
    ]
    settings: dict[str, Any] = {"store": store, "benchmark.text": "{{ question }}"}
    first = espalier.evaluate(model, "none", records, **settings)
    assert list(first.samples.id) == ["mine-0", "mine-1", "mine-2"]
    assert list(first.samples.target) == [record["answer"] for record in records]
    assert first.value == 1.0
    assert espalier.evaluate(model, "none", pd.DataFrame(records), **settings).status == "cached"
    other_score = espalier.evaluate(model, "none", records, score="contains", **settings)
    assert other_score.key != first.key
    with refused("no column question"):
        espalier.evaluate(model, "none", pd.DataFrame({"image": [1]}), store=store)


MISTAKES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no ratio": ({"ratio": None}, ("ratio=None", "'fastv' removes", "ratio=<share", "keep=<")),
    "ratio": ({"ratio": 1.5}, ("ratio=1.5",)),
    "parameter": ({"L": 2}, ("L=2 is no argument and no hyper-parameter of", "K, queries; arg")),
    "case": ({"k": 2}, ("did you mean K=2?",)),
    "tokens": ({"tokens": 64}, ("did you mean keep=64?",)),
    "share": ({"keep_ratio": 0.1}, ("did you mean keep='10%'?",)),
    "near": ({"batchsize": 4}, ("did you mean batch_size=4?",)),
    "section": ({"dtype": "float16"}, ("valid: **{'model.dtype': 'float16'}",)),
    "store": ({"store": 3}, ("store=3",)),
    "address": ({"store": "s3://a/b"}, ("store='s3://a/b' is an address",)),
    "path": ({"benchmark": "none.csv"}, ("none.csv' does not exist",)),
    "value": ({"K": 0}, ("K=0", "1 or more")),
    "engine": ({"batch_size": 0}, ("batch_size=0",)),
    "command": ({"curves": "x"}, ("curves is for commands",)),
    "object": ({"seed": object()}, ("seed is a object", "a number, a text")),
    "model": ({"model": 3}, ("model is a int", "espalier.load")),
    "model name": ({"model": "seedlin"}, ("'seedlin' is unknown", "seedling")),
    "class": ({"method": Norm}, ("Norm is a class", "Norm(...)")),
    "function": ({"method": len}, ("method is a builtin_function", "TokenReducer")),
    "instance": ({"method": Norm(), "p": 1}, ("p: an instance", "Norm(p=1)")),
    "no field": ({"method": Norm(), "tokens": 9}, ("of method 'Norm' (did you mean keep=9?)",)),
    "compressor": ({"compressor": 3}, ("compressor is a int", "CacheCompressor")),
    "benchmark": ({"benchmark": 3}, ("benchmark is a int", "a pandas frame")),
    "base": ({"method": CacheCompressor}, ("CacheCompressor is a class",)),
}


ARGUMENTS: dict[str, Any] = {
    **{"model": "seedling", "method": "fastv", "benchmark": BENCHMARK, "ratio": 0.9, "limit": 2}
}


@pytest.mark.sampled
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(store: Path, mistake: str) -> None:
    changes, words = MISTAKES[mistake]
    with refused(*words):
        espalier.evaluate(**{**ARGUMENTS, "store": store, **changes})


SETTLED: dict[str, tuple[dict[str, Any], str]] = {
    "precision": ({"model.dtype": "bfloat16"}, "or dtype in espalier.load or espalier.wrap"),
    "pictures": ({"model.transparency": "white"}, "or transparency in espalier.load"),
    "video": ({"model.video.frames": 4}, "the model is an object"),
    "parameter": ({"method": FastV(K=2), "method.params.K": 3}, "or K in the call that made it"),
    "reading": ({"method": FastV(K=2), "variant": "paper"}, "the method is an object"),
    "evictor": (
        {"compressor": H2O(), "compressor.params.recent": 2},
        "the compressor is an object",
    ),
    "no evictor": ({"cache_ratio": 0.25}, "cache_ratio=0.25 is the share that a compressor"),
    "another engine": ({"backend.options": {"seed": 1}}, "backend.options is for another engine"),
}


@pytest.mark.parametrize("case", SETTLED)
def test_a_key_that_an_object_has_settled_is_refused(
    store: Path, model: espalier.Model, case: str
) -> None:
    """The row would state a setting that its answers did not have."""
    changes, words = SETTLED[case]
    with refused(words):
        espalier.evaluate(**{**ARGUMENTS, "model": model, "store": store, **changes})


def test_an_engine_setting_that_a_method_does_not_use_is_named(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [f"benchmark={BENCHMARK}", "limit=1", f"store={store}", "json=false"]
    argv += ["method=none", "engine.paired=0", "engine.positions=renumbered"]
    assert run.main([*argv, "engine.transport=threads", "compressor.ratio=0.75"]) == 0
    printed = capsys.readouterr().err
    for line in (
        "engine.positions=renumbered: method=none does not use it",
        "engine.transport=threads: method=none does not use it",
        "compressor.ratio=0.75: compressor=none evicts nothing",
    ):
        assert line in printed


def test_the_process_is_as_before(
    fastv: espalier.EvaluatedRun,
    store: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    capfd.readouterr()
    espalier.load("seedling", device="cpu")
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    results: list[str] = []
    thread = threading.Thread(target=lambda: results.append(evaluated(store, "fastv").status))
    thread.start()
    thread.join()
    assert results == ["cached"]
    assert huggingface_hub.constants.HF_HUB_OFFLINE is False
    assert "HF_HUB_OFFLINE" not in os.environ
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
