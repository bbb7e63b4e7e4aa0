"""The evaluation with the real engine on the trained embedded model."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from espalier.harness.evaluation.evaluate import Evaluation, SampleErrors, evaluate
from espalier.harness.evaluation.metered import time_medians
from espalier.harness.kinds.sample_counts import token_means
from espalier.harness.models.adapter import Adapter
from espalier.harness.specs.catalogue import build_method
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store import Journal
from espalier.methods.base import TokenReducer
from tests import commands

LIMIT = 8


make_spec = partial(
    commands.spec_of, f"limit={LIMIT}", "model.device=cpu", "benchmark=seedling_rec", "ratio=0.75"
)


def run(spec: RunSpec, adapter: Adapter, journal: Journal) -> Evaluation:
    method: TokenReducer = build_method(spec.method.name, spec.method.params)
    return evaluate(spec, adapter, method, journal)


def untimed(result: Evaluation) -> tuple[Any, ...]:
    """Everything that must not depend on batches, breaks or the clock."""
    samples = [
        replace(sample, record=replace(sample.record, times_ms={}, kv_bytes=0))
        for sample in result.samples
    ]
    return samples, result.metrics, result.scores, result.n_samples


@pytest.fixture(scope="module")
def whole(adapter: Adapter, tmp_path_factory: pytest.TempPathFactory) -> tuple[Evaluation, Path]:
    path = tmp_path_factory.mktemp("whole") / "journal.jsonl"
    return run(make_spec("method=random", "engine.batch_size=4"), adapter, Journal(path)), path


def test_telemetry_is_complete(whole: tuple[Evaluation, Path], adapter: Adapter) -> None:
    result, _ = whole
    text = adapter.facts.text
    depth = text.layers
    assert [sample.doc_id for sample in result.samples] == list(range(LIMIT))
    for sample in result.samples:
        record = sample.record
        assert record.sample == f"seedling_rec/{sample.doc_id}"
        assert (record.visual, record.requested, record.kept) == (144, (36,), (36,))
        assert (record.entering, record.kv_entries) == ((36,) * depth, 36 * depth)
        # Keys and values in fp32; what is longer is the padding of the batch.
        entries = record.kv_bytes / (depth * 2 * text.kv_heads * text.head_dim * 4)
        assert 36 + record.text <= entries < 36 + record.text + 16
        assert sample.output_tokens == record.new_tokens > 0
        assert sample.answer
        for phase in ("vision", "select", "prefill", "decode_per_token"):
            assert record.times_ms[phase] > 0
        assert {"acc_at_50", "mean_iou"} <= set(result.scores[sample.key])
    assert token_means([sample.record for sample in result.samples])["kept_final"] == 36
    assert time_medians([sample.record for sample in result.samples])["select_ms"] is not None
    assert 0 < (result.metrics["mean_iou"]["value"] or 0) < 1


def test_batches_of_one_and_a_resumed_run_give_the_same(
    journal: Journal, whole: tuple[Evaluation, Path], adapter: Adapter, tmp_path: Path
) -> None:
    single = make_spec("method=random", "engine.batch_size=1", "engine.warmup=0")
    assert untimed(run(single, adapter, Journal(tmp_path / "single.jsonl"))) == untimed(whole[0])
    lines = whole[1].read_bytes().splitlines(keepends=True)
    # Killed while the second batch was written: two samples of it whole, the third torn.
    journal.path.write_bytes(b"".join(lines[:6]) + lines[6][:40])
    spec = make_spec("method=random", "engine.batch_size=4", "engine.warmup=0")
    result = run(spec, adapter, journal)
    assert (result.resumed, untimed(result)) == (6, untimed(whole[0]))
    assert [sample.record.kv_bytes for sample in result.samples] == [
        sample.record.kv_bytes for sample in whole[0].samples
    ]


@pytest.mark.sampled(24)
@pytest.mark.parametrize("method", ["method=none ratio=0", "method=divprune ratio=0.75"])
@pytest.mark.parametrize("benchmark", ["vqa", "caption"])
def test_batches_do_not_change_answers(
    adapter: Adapter, tmp_path: Path, benchmark: str, method: str
) -> None:
    line = (f"benchmark=seedling_{benchmark}", "engine.warmup=0", *method.split())
    four, single = (
        run(
            make_spec(*line, f"engine.batch_size={size}"),
            adapter,
            Journal(tmp_path / f"{size}.jsonl"),
        )
        for size in (4, 1)
    )
    assert untimed(four) == untimed(single)


def test_failing_sample_is_named_and_leaves_the_model_working(
    adapter: Adapter, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scene that cannot be read fails alone; the session goes on with the others."""
    plain = adapter.prepare
    seen: list[Any] = []

    def prepare(chats: Sequence[Any]) -> Any:
        seen.extend(chats)
        if seen[2] in chats:
            raise OSError("truncated image")
        return plain(chats)

    monkeypatch.setattr(adapter, "prepare", prepare)
    spec = make_spec("method=random", "engine.batch_size=4", "engine.warmup=0")
    with pytest.raises(SampleErrors, match=r"1 of 8 .*seedling_rec/2: OSError: truncated image"):
        run(spec, adapter, journal)
    assert sorted(e["doc_id"] for e in journal.entries() if "answer" in e) == [0, 1, 3, 4, 5, 6, 7]
    monkeypatch.undo()
    assert run(spec, adapter, journal).resumed == LIMIT - 1


TASK = """
task: files
dataset_path: json
dataset_kwargs: {data_files: {test: files.jsonl}}
test_split: test
output_type: generate_until
doc_to_visual: !function utils.images
doc_to_text: !function utils.question
doc_to_target: target
process_results: !function utils.score
generation_kwargs: {max_new_tokens: 4}
metric_list:
  - {metric: silent, aggregation: mean, higher_is_better: true}
"""

UTILS = """
from PIL import Image

def images(doc):
    return [Image.open(doc["file"])] if doc["file"] else []

def question(doc, lmms_eval_specific_kwargs=None):
    return "where is the 7 ?"

def score(doc, results):
    return {"silent": float(results[0] == "")}
"""


def write_files(folder: Path) -> list[str]:
    """Write six documents, of which 1, 2 and 4 cannot be answered, and return the overrides that select them."""
    scene = Image.new("RGB", (192, 192), "navy")
    scene.paste("white", (30, 40, 90, 100))
    scene.save(folder / "whole.png")
    whole = (folder / "whole.png").read_bytes()
    (folder / "cut.png").write_bytes(whole[: len(whole) // 2])
    (folder / "text.png").write_text("not an image")
    names = ["whole.png", "cut.png", "text.png", "whole.png", "", "whole.png"]
    files = [str(folder / name) if name else "" for name in names]
    lines = [json.dumps({"file": file, "target": ""}) for file in files]
    (folder / "files.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "files.yaml").write_text(TASK)
    (folder / "utils.py").write_text(UTILS)
    place = [f"benchmark.include_path={folder}", "benchmark.task=files", "benchmark.sources=[]"]
    return [*place, "benchmark.metrics=[silent]", "benchmark.headline=silent"]


def test_an_image_that_cannot_be_decoded_is_an_error_and_never_an_answer(
    journal: Journal, adapter: Adapter, tmp_path: Path
) -> None:
    overrides = [*write_files(tmp_path), "method=none", "ratio=0", "engine.batch_size=3"]
    with pytest.raises(SampleErrors) as raised:
        run(make_spec(*overrides), adapter, journal)
    named = [str(failure) for failure in raised.value.failures]
    # lmms-eval tells PIL to fill up truncated images; grey pixels would have been answered.
    assert re.match(r"files/1: \w+: .*truncated", named[0])
    assert re.match(r"files/2: \w+: .*text\.png", named[1])
    assert len(named) == 2
    result = run(make_spec(*overrides, "engine.max_errors=2"), adapter, journal)
    assert (result.n_samples, result.resumed, len(result.failures)) == (4, 4, 2)
    # A document without an image is answered as a text.
    assert [sample.record.visual for sample in result.samples] == [144, 144, 0, 144]
    # An empty answer in the place of a failed one would have counted.
    assert result.metrics["silent"]["value"] == 0.0
    assert set(result.scores) == {("files", 0), ("files", 3), ("files", 4), ("files", 5)}


def test_kept_tokens_are_recorded_and_change_no_answer(adapter: Adapter, tmp_path: Path) -> None:
    plain, recording = (Journal(tmp_path / f"{name}.jsonl") for name in ("plain", "recording"))
    first = run(make_spec("method=fastv"), adapter, plain)
    assert [sample.answer for sample in first.samples] == [
        sample.answer
        for sample in run(make_spec("method=fastv", "engine.kept=true"), adapter, recording).samples
    ]
    sets = [entry["record"]["kept_tokens"] for entry in recording.entries() if "answer" in entry]
    assert [len(kept) for kept in sets] == [36] * LIMIT
    assert all(kept == sorted(set(kept)) and kept[-1] < 144 for kept in sets)
    assert all("kept_tokens" not in entry.get("record", {}) for entry in plain.entries())
