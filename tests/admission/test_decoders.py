"""Runs that decode speculatively, up to the model: which draft, which ratio, which tokens, which benchmark."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from espalier.harness.config.build_spec import build_spec
from espalier.harness.config.composer import compose_section
from espalier.harness.decoding.speculative.shared_vocabulary import (
    check_tokenizers,
    common_size,
    read_vocabulary,
)
from espalier.harness.errors import Refused, UserError
from espalier.harness.kinds.signal_check import signals_of
from espalier.harness.models.families import ADAPTERS
from espalier.harness.paths import CONF, ROOT
from espalier.harness.runs.admission import Job, admit
from espalier.harness.specs.catalogue import build_method, names_of
from espalier.harness.specs.run_spec import MODEL_KEYS, ModelSpec, in_words_of_the_draft
from espalier.harness.store.files.digests import Digests
from espalier.methods.base import Decoder, TokenReducer
from tests.commands import MODELS, cells_of, spec_of

DRAFT = ROOT / "harness/seedling/weights/seedling_draft"
DECODERS = names_of(Decoder)
WITH_DRAFT = [name for name in DECODERS if build_method(name, {}).source == "model"]  # type: ignore[attr-defined]


def job_of(store: Path, *argv: str) -> Job:
    return admit(spec_of(f"store={store}", *argv), Digests())


def draft_of(*argv: str) -> ModelSpec:
    """Return the draft of a run that has one."""
    return spec_of(*argv).method.draft


# ------------------------------------------------------------------ which draft


def test_some_decoders_have_a_draft_model_and_some_have_not() -> None:
    assert {"pearl", "onsd", "parallelvlm"} <= set(WITH_DRAFT)
    assert {"autoregressive", "std"} <= set(DECODERS) - set(WITH_DRAFT)


@pytest.mark.parametrize("name", [*DECODERS, "fastv"])
def test_the_draft_is_the_first_that_the_model_names(name: str) -> None:
    draft = spec_of(f"method={name}").method.draft
    assert (draft and draft.name) == ("seedling_draft" if name in WITH_DRAFT else None)


def test_options_lie_over_the_drafts_config_alone() -> None:
    assert draft_of("method=pearl", "method.draft=seedling_full").name == "seedling_full"
    spec = spec_of("method=pearl", "method.draft=seedling")
    assert spec.method.draft == spec.model
    options = "method.draft_options={dtype: bfloat16, weights: random, scale: {layers: 1}}"
    draft = draft_of("method=pearl", options)
    assert (draft.dtype, draft.weights, draft.facts.text.layers) == ("bfloat16", "random", 1)
    assert draft.facts.tower.layers == 3
    target = spec_of("method=pearl", options).model
    assert (target.dtype, target.weights) == ("float32", "trained")


def test_the_draft_inherits_what_both_see_and_nothing_else() -> None:
    line = (
        *("model=qwen2_5_vl_32b", "method=pearl", "model.dtype=float32", "model.attention=eager"),
        *("model.video.frames=128", "model.processor.max_pixels=401408"),
    )
    draft, model = draft_of(*line), spec_of(*line).model
    assert (draft.name, draft.dtype, draft.attention) == ("qwen2_5_vl_7b", "float32", "sdpa")
    assert (draft.video, draft.processor) == (model.video, model.processor)
    assert (draft.video.frames, draft.processor["max_pixels"]) == (128, 401408)


@pytest.mark.parametrize(
    ("line", "dtype"),
    [
        ((), "bfloat16"),
        (("model.dtype=float16",), "float16"),
        (("method.draft_options={dtype: float32}",), "float32"),
    ],
)
def test_the_draft_computes_in_the_targets_type_unless_set(
    line: tuple[str, ...], dtype: str
) -> None:
    draft = draft_of("model=llava_ov_72b", "method=pearl", "model.device_map=auto", *line)
    assert (draft.name, draft.dtype) == ("llava_ov_7b", dtype)


@pytest.mark.parametrize(
    ("model", "processor"), [("llava15_7b", {"do_pad": True}), ("qwen2_vl_7b", {})]
)
def test_the_processor_of_another_family_is_not_taken_over(
    model: str, processor: dict[str, Any]
) -> None:
    assert (
        draft_of(f"model={model}", "method=pearl", "method.draft=seedling").processor == processor
    )


@pytest.mark.sampled(24)
@pytest.mark.parametrize("name", MODELS)
def test_drafts_are_models_of_one_family(name: str) -> None:
    for draft in compose_section("model", name)["drafts"]:
        assert draft in MODELS
        families = (compose_section("model", model)["adapter"] for model in (name, draft))
        target_family, draft_family = map(ADAPTERS.load, families)
        assert issubclass(target_family, draft_family)  # mixtures of experts, too


def test_drafts_of_the_papers_pairs() -> None:
    pairs = {
        "llava_ov_7b": ("llava_ov_0_5b", "llava_ov_7b"),
        "llava_ov_72b": ("llava_ov_7b", "llava_ov_0_5b"),
        "qwen2_5_vl_32b": ("qwen2_5_vl_7b", "qwen2_5_vl_3b"),
        "seedling": ("seedling_draft",),
        "seedling_draft": (),
        "llava_video_7b": (),
    }
    assert {name: spec_of(f"model={name}").model.drafts for name in pairs} == pairs


def test_composing_a_draft_leaves_hydras_state_alone() -> None:
    assert not GlobalHydra.instance().is_initialized()
    draft_of("method=pearl")
    assert not GlobalHydra.instance().is_initialized()
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        mine = GlobalHydra.instance().hydra
        config = OmegaConf.to_container(compose("config", overrides=["method=pearl"]), resolve=True)
        del config["grids"]
        draft = build_spec({str(key): value for key, value in config.items()}).method.draft
        assert GlobalHydra.instance().hydra is mine
    assert draft.name == "seedling_draft"


def test_error_lines_speak_of_the_draft() -> None:
    line = "model.path: weight file '/a/model.path/model.safetensors' of model='x'; valid: model.hub=<id>"
    with pytest.raises(Refused) as error, in_words_of_the_draft():
        raise Refused(line)
    assert str(error.value) == (
        "method.draft_options.path: weight file '/a/model.path/model.safetensors' of method.draft='x'; valid: "
        "method.draft_options.hub=<id>"
    )


@pytest.mark.parametrize("key", MODEL_KEYS)
def test_every_key_of_a_model_is_reworded_for_the_draft(key: str) -> None:
    with pytest.raises(UserError) as error, in_words_of_the_draft():
        raise UserError(f"model.{key}=x is wrong, and model.safetensors is a file")
    line = f"method.draft_options.{key}=x is wrong, and model.safetensors is a file"
    assert str(error.value) == line


# ------------------------------------------------------------------ the job


@pytest.mark.sampled
@pytest.mark.parametrize("name", DECODERS)
def test_every_decoder_is_admitted_on_the_embedded_pair(tmp_path: Path, name: str) -> None:
    job = job_of(tmp_path, f"method={name}", "ratio=0.9", "engine.batch_size=8")
    assert isinstance(job.method, Decoder)
    assert job.spec.engine.batch_size == 1
    blind, whole = name == "onsd", name in ("autoregressive", "vanilla_sd", "sd_tree", "pearl")
    assert job.spec.budget.ratio == (1 if blind else 0 if whole else 0.9)
    reducer = job_of(tmp_path, "method=fastv", "engine.batch_size=8")
    assert isinstance(reducer.method, TokenReducer)
    assert reducer.spec.engine.batch_size == 8


@pytest.mark.parametrize("ratio", ["0.5", "1"])
def test_a_draft_that_reads_only_has_the_ratio_one(tmp_path: Path, ratio: str) -> None:
    params = ("method.params.text_only=true", "method.params.guidance=none")
    for argv in (("method=onsd",), ("method=parallelvlm", *params)):
        assert job_of(tmp_path, *argv, f"ratio={ratio}").spec.budget.ratio == 1
    pruning = ("method=parallelvlm", "method.params.guidance=self", "method.params.L=1")
    assert job_of(tmp_path, *pruning, "ratio=0.9").spec.budget.ratio == 0.9


@pytest.mark.parametrize(("name", "signals"), [("std", {"text_attention"}), ("pearl", set())])
def test_signals_of_a_decoder_are_those_it_reads_in_the_model(name: str, signals: set[str]) -> None:
    assert signals_of(build_method(name, {}), spec_of().model.facts) == signals


def test_the_drafts_weights_are_checked_as_the_models(tmp_path: Path) -> None:
    copy = tmp_path / "draft"
    shutil.copytree(DRAFT, copy)
    options = f"method.draft_options={{path: {copy}}}"
    assert job_of(tmp_path / "store", "method=pearl", options).spec.method.draft is not None
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"^method\.draft_options\.path=.*: weight file .*damaged"):
        job_of(tmp_path / "store", "method=pearl", options)


# ------------------------------------------------------------------ one vocabulary


def changed_tokenizer(folder: Path, change: Any) -> Path:
    """Return a copy of the embedded draft whose tokenizer's vocabulary went through `change`."""
    shutil.copytree(DRAFT, folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"] = change(tokenizer["model"]["vocab"])
    file.write_text(json.dumps(tokenizer))
    return folder


def swapped(vocabulary: dict[str, int]) -> dict[str, int]:
    first, second = list(vocabulary)[-2:]
    return {**vocabulary, first: vocabulary[second], second: vocabulary[first]}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (swapped, r"method\.draft=seedling_draft .*tokenizer.*token '.+' is \d+ to"),
        (
            lambda words: {**words, "walrus": len(words) + 50},
            "only seedling_draft knows 'walrus'",
        ),
    ],
)
def test_a_draft_with_another_vocabulary_is_refused_with_a_token(
    tmp_path: Path, change: Any, line: str
) -> None:
    folder = changed_tokenizer(tmp_path / "draft", change)
    with pytest.raises(Refused, match=line):
        job_of(tmp_path / "store", "method=pearl", f"method.draft_options={{path: {folder}}}")


def test_added_tokens_may_be_one_sided_and_the_embedded_pair_agrees() -> None:
    ours, added = read_vocabulary(ROOT / "harness/seedling/weights/seedling/tokenizer.json")
    theirs, more = read_vocabulary(DRAFT / "tokenizer.json")
    check_tokenizers(ours, theirs, ("a", "b"), added | more)
    assert common_size(ours, theirs) == max(ours.values()) + 1
    placeholder = next(iter(added))
    without = {token: number for token, number in theirs.items() if token != placeholder}
    for pair in ((ours, without), (without, ours)):
        check_tokenizers(*pair, ("a", "b"), added)
    with pytest.raises(Refused, match="only a knows"):
        check_tokenizers(ours, without, ("a", "b"))


def test_the_common_ids_end_with_the_last_common_token() -> None:
    ours, theirs = {"a": 0, "b": 1, "<x>": 2}, {"a": 0, "b": 1, "<y>": 5}
    check_tokenizers(ours, theirs, ("a", "b"), {"<x>", "<y>"})
    assert common_size(ours, theirs) == common_size(theirs, ours) == 2
    assert common_size({"a": 0}, {"b": 0}) == 0


# ------------------------------------------------------------------ the benchmark of a model

VIDEO_MODELS = (
    *("llava_ov_0_5b", "llava_ov_7b", "llava_ov_72b"),
    *("qwen2_5_vl_3b", "qwen2_5_vl_7b", "qwen2_5_vl_32b", "qwen2_5_vl_72b"),
)


@pytest.mark.sampled(24)
@pytest.mark.parametrize("name", MODELS)
def test_models_made_for_videos_have_a_benchmark_of_their_own(name: str) -> None:
    embedded = dict.fromkeys(("seedling_video", "seedling_video_draft"), "seedling_video_brief")
    embedded["seedling_crowd"] = "seedling_crowd"
    made_for_videos = embedded | dict.fromkeys(VIDEO_MODELS, "video_detail_caption")
    assert spec_of(f"model={name}").benchmark.name == made_for_videos.get(name, "seedling_rec")


@pytest.mark.parametrize(
    ("line", "benchmarks"),
    [
        (
            "-m model=seedling,llava_ov_7b method=none",
            {"seedling_rec": 500, "video_detail_caption": 50},
        ),
        (
            "-m model=llava_ov_7b benchmark=seedling_rec,seedling_vqa",
            ["seedling_rec", "seedling_vqa"],
        ),
        (
            "+experiment=quickstart model=llava_ov_7b method=none ratio=0",
            ["seedling_rec", "seedling_caption"],
        ),
        ("benchmark=seedling_vqa model=llava_ov_7b", ["seedling_vqa"]),
        ("model=llava_ov_7b benchmark=seedling_vqa", ["seedling_vqa"]),
    ],
)
def test_each_model_of_a_sweep_has_its_own_benchmark_unless_it_is_set(
    line: str, benchmarks: list[str] | dict[str, int]
) -> None:
    specs = [build_spec(cell).benchmark for cell in cells_of(*line.split())]
    assert [spec.name for spec in specs] == list(benchmarks)
    if isinstance(benchmarks, dict):
        assert [spec.limit for spec in specs] == [*benchmarks.values()]


def test_the_papers_setting() -> None:
    spec = spec_of("+experiment=parallelvlm")
    assert (spec.model.name, spec.method.name) == ("llava_ov_72b", "parallelvlm")
    assert (spec.budget.ratio, spec.benchmark.limit, spec.model.video.frames) == (0.9, 50, 128)
    assert (spec.method.draft.name, spec.method.draft.video.frames) == ("llava_ov_7b", 128)
    other = spec_of("+experiment=parallelvlm", "model=seedling", "method=pearl", "limit=2")
    assert (other.model.name, other.method.name, other.benchmark.limit) == ("seedling", "pearl", 2)
