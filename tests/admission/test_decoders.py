"""Runs that decode speculatively, up to the model: which draft, which ratio, which tokens, which benchmark."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
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
from espalier.harness.specs.run_spec import MODEL_KEYS, RunSpec, in_words_of_the_draft
from espalier.harness.store.files.digests import Digests
from espalier.methods.base import Decoder, TokenReducer
from tests import commands

DRAFT = ROOT / "harness/seedling/weights/seedling_draft"
MODELS = sorted(path.stem for path in (CONF / "model").glob("*.yaml"))
DECODERS = names_of(Decoder)
WITH_DRAFT = [name for name in DECODERS if build_method(name, {}).source == "model"]  # type: ignore[attr-defined]


def specs_of(*argv: str) -> list[RunSpec]:
    return [build_spec(cell) for cell in commands.cells_of(*argv)]


def spec_of(*argv: str) -> RunSpec:
    return specs_of(*argv)[0]


def job_of(store: Path, *argv: str) -> Job:
    return admit(spec_of(f"store={store}", *argv), Digests())


# ------------------------------------------------------------------ which draft


def test_some_decoders_have_a_draft_model_and_some_have_not() -> None:
    assert {"pearl", "onsd", "parallelvlm"} <= set(WITH_DRAFT)
    assert {"autoregressive", "std"} <= set(DECODERS) - set(WITH_DRAFT)


@pytest.mark.parametrize("name", DECODERS)
def test_the_draft_is_the_first_that_the_model_names(name: str) -> None:
    draft = spec_of(f"method={name}").method.draft
    assert (None if draft is None else draft.name) == (
        "seedling_draft" if name in WITH_DRAFT else None
    )


def test_a_reducer_has_no_draft() -> None:
    assert spec_of("method=fastv").method.draft is None


def test_another_draft_and_the_model_itself() -> None:
    assert spec_of("method=pearl", "method.draft=seedling_full").method.draft is not None
    spec = spec_of("method=pearl", "method.draft=seedling")
    assert spec.method.draft == spec.model


def test_options_lie_over_the_drafts_config_alone() -> None:
    spec = spec_of(
        "method=pearl",
        "method.draft_options={dtype: bfloat16, weights: random, scale: {layers: 1}}",
    )
    draft = spec.method.draft
    assert draft is not None
    assert (draft.dtype, draft.weights, draft.facts.text.layers) == ("bfloat16", "random", 1)
    assert draft.facts.tower.layers == 3
    assert (spec.model.dtype, spec.model.weights) == ("float32", "trained")


def test_the_draft_inherits_what_both_see_and_nothing_else() -> None:
    spec = spec_of(
        "model=qwen2_5_vl_32b",
        "method=pearl",
        "model.dtype=float32",
        "model.attention=eager",
        "model.video.frames=128",
        "model.processor.max_pixels=401408",
    )
    draft = spec.method.draft
    assert draft is not None
    assert draft.name == "qwen2_5_vl_7b"
    assert (draft.dtype, draft.attention) == ("float32", "sdpa")
    assert (draft.video, draft.processor) == (spec.model.video, spec.model.processor)
    assert (draft.video.frames, draft.processor["max_pixels"]) == (128, 401408)


def test_the_draft_computes_in_the_targets_type_unless_asked() -> None:
    wide = ("model=llava_ov_72b", "method=pearl", "model.device_map=auto")
    for more, dtype in (
        ((), "bfloat16"),
        (("model.dtype=float16",), "float16"),
        (("method.draft_options={dtype: float32}",), "float32"),
    ):
        draft = spec_of(*wide, *more).method.draft
        assert draft is not None
        assert (draft.name, draft.dtype) == ("llava_ov_7b", dtype)


def test_the_processor_of_another_family_is_not_taken_over() -> None:
    spec = spec_of("model=llava15_7b", "method=pearl", "method.draft=seedling")
    assert spec.method.draft is not None
    assert spec.method.draft.processor == {"do_pad": True}  # one family
    spec = spec_of("model=qwen2_vl_7b", "method=pearl", "method.draft=seedling")
    assert spec.method.draft is not None
    assert spec.method.draft.processor == {}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MODELS)
def test_drafts_are_models_of_one_family(name: str) -> None:
    section = compose_section("model", name)
    for draft in section["drafts"]:
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
    from hydra import compose, initialize_config_dir

    assert not GlobalHydra.instance().is_initialized()
    assert spec_of("method=pearl").method.draft is not None
    assert not GlobalHydra.instance().is_initialized()
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        mine = GlobalHydra.instance().hydra
        config = OmegaConf.to_container(compose("config", overrides=["method=pearl"]), resolve=True)
        assert isinstance(config, dict)
        del config["grids"]
        inside = build_spec({str(key): value for key, value in config.items()})
        assert GlobalHydra.instance().hydra is mine
    assert inside.method.draft is not None
    assert inside.method.draft.name == "seedling_draft"


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


@pytest.mark.parametrize("name", DECODERS)
def test_every_decoder_is_admitted_on_the_embedded_pair(tmp_path: Path, name: str) -> None:
    job = job_of(tmp_path, f"method={name}", "ratio=0.9", "engine.batch_size=8")
    assert isinstance(job.method, Decoder)
    assert job.spec.engine.batch_size == 1
    blind, whole = name == "onsd", name in ("autoregressive", "vanilla_sd", "sd_tree", "pearl")
    assert job.spec.budget.ratio == (1 if blind else 0 if whole else 0.9)


def test_a_reducer_acts_on_the_model_itself(tmp_path: Path) -> None:
    job = job_of(tmp_path, "method=fastv", "engine.batch_size=8")
    assert isinstance(job.method, TokenReducer)
    assert job.spec.engine.batch_size == 8


@pytest.mark.parametrize("ratio", ["0.5", "1"])
def test_a_draft_that_reads_only_has_the_ratio_one(tmp_path: Path, ratio: str) -> None:
    params = ("method.params.text_only=true", "method.params.guidance=none")
    for argv in (("method=onsd",), ("method=parallelvlm", *params)):
        assert job_of(tmp_path, *argv, f"ratio={ratio}").spec.budget.ratio == 1


def test_a_draft_that_prunes_itself_is_checked_as_a_model(tmp_path: Path) -> None:
    argv = ("method=parallelvlm", "method.params.guidance=self", "ratio=0.9")
    assert job_of(tmp_path, *argv, "method.params.L=1").spec.budget.ratio == 0.9


def test_signals_of_a_decoder_are_those_it_reads_in_the_model() -> None:
    facts = spec_of().model.facts
    std = build_method("std", {})
    assert isinstance(std, Decoder)
    assert signals_of(std, facts) == {"text_attention"}
    pearl = build_method("pearl", {})
    assert isinstance(pearl, Decoder)
    assert signals_of(pearl, facts) == set()


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


def test_a_draft_with_other_ids_is_refused_with_a_token(tmp_path: Path) -> None:
    def swap(vocabulary: dict[str, int]) -> dict[str, int]:
        first, second = list(vocabulary)[-2:]
        return {**vocabulary, first: vocabulary[second], second: vocabulary[first]}

    folder = changed_tokenizer(tmp_path / "draft", swap)
    with pytest.raises(
        Refused, match=r"method\.draft=seedling_draft .*tokenizer.*token '.+' is \d+ to"
    ):
        job_of(tmp_path / "store", "method=pearl", f"method.draft_options={{path: {folder}}}")


def test_a_draft_with_another_word_is_refused_with_it(tmp_path: Path) -> None:
    def more(vocabulary: dict[str, int]) -> dict[str, int]:
        return {**vocabulary, "walrus": len(vocabulary) + 50}

    folder = changed_tokenizer(tmp_path / "draft", more)
    with pytest.raises(Refused, match=r"only seedling_draft knows 'walrus'"):
        job_of(tmp_path / "store", "method=pearl", f"method.draft_options={{path: {folder}}}")


def test_added_tokens_may_be_one_sided_and_the_embedded_pair_agrees() -> None:
    ours, added = read_vocabulary(ROOT / "harness/seedling/weights/seedling/tokenizer.json")
    theirs, more = read_vocabulary(DRAFT / "tokenizer.json")
    check_tokenizers(ours, theirs, ("a", "b"), added | more)
    assert common_size(ours, theirs) == max(ours.values()) + 1
    placeholder = next(iter(added))
    without = {token: number for token, number in theirs.items() if token != placeholder}
    check_tokenizers(ours, without, ("a", "b"), added)
    check_tokenizers(without, ours, ("a", "b"), added)
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


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MODELS)
def test_models_made_for_videos_have_a_benchmark_of_their_own(name: str) -> None:
    embedded = dict.fromkeys(("seedling_video", "seedling_video_draft"), "seedling_video_brief")
    embedded["seedling_crowd"] = "seedling_crowd"
    made_for_videos = embedded | dict.fromkeys(VIDEO_MODELS, "video_detail_caption")
    expected = made_for_videos.get(name, "seedling_rec")
    spec = spec_of(f"model={name}")
    assert spec.benchmark.name == expected


def test_a_benchmark_that_is_asked_for_goes_before_the_models_own() -> None:
    asked = ("benchmark=seedling_vqa", "model=llava_ov_7b")
    assert spec_of(*asked).benchmark.name == "seedling_vqa"
    assert spec_of(*reversed(asked)).benchmark.name == "seedling_vqa"


def test_in_a_sweep_each_model_has_its_own_unless_it_is_given() -> None:
    cells = specs_of("-m", "model=seedling,llava_ov_7b", "method=none")
    assert [cell.benchmark.name for cell in cells] == ["seedling_rec", "video_detail_caption"]
    assert [cell.benchmark.limit for cell in cells] == [500, 50]
    given = specs_of("-m", "model=llava_ov_7b", "benchmark=seedling_rec,seedling_vqa")
    assert [cell.benchmark.name for cell in given] == ["seedling_rec", "seedling_vqa"]
    preset = specs_of("+experiment=quickstart", "model=llava_ov_7b", "method=none", "ratio=0")
    assert [cell.benchmark.name for cell in preset] == ["seedling_rec", "seedling_caption"]


def test_the_papers_setting() -> None:
    spec = spec_of("+experiment=parallelvlm")
    assert (spec.model.name, spec.method.name) == ("llava_ov_72b", "parallelvlm")
    assert (spec.budget.ratio, spec.benchmark.limit, spec.model.video.frames) == (0.9, 50, 128)
    assert spec.method.draft is not None
    assert (spec.method.draft.name, spec.method.draft.video.frames) == ("llava_ov_7b", 128)
    other = spec_of("+experiment=parallelvlm", "model=seedling", "method=pearl", "limit=2")
    assert (other.model.name, other.method.name, other.benchmark.limit) == ("seedling", "pearl", 2)
