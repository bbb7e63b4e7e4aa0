"""A model in memory: family and sizes are measured, and the model is restored afterwards."""

from __future__ import annotations

from contextlib import ExitStack
from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import espalier
from espalier.harness.api.questions import question_chat
from espalier.harness.config.composer import compose_section
from espalier.harness.config.model_section import model_spec
from espalier.harness.models.families import ADAPTERS
from espalier.harness.models.loader import config_of
from espalier.harness.models.measured_facts import unlisted_facts
from espalier.harness.paths import CONF
from tests.api.families import loaded
from tests.families import FAMILIES
from tests.family_runs import adapter_of, saved
from tests.refused import refused
from tests.tiny import picture

#: One way of feeding each family: wrap needs no second.
WRAPPED = (
    "llava",
    "llava_next",
    "onevision_image",
    "llava_video",
    "qwen2_vl",
    "qwen2_5_vl",
    "internvl",
    "deepseek_ocr",
    "deepseek_ocr2",
    "qwen3_vl_moe",
    "qwen3_5_moe",
    "glm4v",
    "paddleocr_vl",
    "hunyuan_ocr",
    "molmo2",
    "minicpm_v",
    "llava_onevision1_5",
)
QUESTION = "w1 w2"


#: What transformers itself leaves in a tower the first time that it runs, with a hook for each layer.
LIBRARY = "_output_capturing_hooks_installed"


def hooks(module: Any) -> list[str]:
    """The hooks of a module, but for transformers' own."""
    handles = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return [str(hook) for hook in handles if hook.__name__ != "output_capturing_hook"]


def state(model: Any, processor: Any) -> dict[str, Any]:
    """Everything of a model and its processor that anybody could notice a change of."""
    tokenizer = processor.tokenizer
    return {
        "generation": (id(model.generation_config), model.generation_config.to_dict()),
        "config": model.config.to_dict(),
        "attention": model.config._attn_implementation,
        "training": [module.training for module in model.modules()],
        "hooks": [(name, hooks(module)) for name, module in model.named_modules()],
        "forwards": [name for name, module in model.named_modules() if "forward" in vars(module)],
        "attributes": [
            (n, sorted({*vars(module)} - {LIBRARY})) for n, module in model.named_modules()
        ],
        "weights": [float(parameter.detach().double().sum()) for parameter in model.parameters()],
        "template": processor.chat_template,
        "processor": {name: str(value) for name, value in vars(processor).items()},
        "padding": (
            tokenizer.padding_side,
            tokenizer.pad_token,
            str(tokenizer.backend_tokenizer.padding),
        ),
        "truncation": str(tokenizer.backend_tokenizer.truncation),
    }


@pytest.mark.sampled(18)
@pytest.mark.parametrize("name", WRAPPED)
def test_a_wrapped_model_answers_and_is_given_back_as_it_was(name):
    model, processor = loaded(name)
    model.train()
    model.generation_config.repetition_penalty = 1.3
    processor.tokenizer.padding_side = "right"
    processor.tokenizer.pad_token = None
    before = state(model, processor)
    taken = espalier.wrap(model, processor)
    assert state(model, processor) == before
    with espalier.apply(taken, "random", ratio=0.5) as pruned:
        answer = pruned.ask([picture(1, 56, 42), picture(2, 28, 56)], QUESTION, max_new_tokens=3)
        assert not model.training
    assert state(model, processor) == before
    assert answer.kept == len(answer.kept_indices) < answer.visual
    pruned = espalier.apply(taken, "fastv", ratio=0.5)
    with pytest.raises(espalier.UserError, match=r"no\.png"), pruned:
        pruned.ask("no.png", QUESTION)
    assert state(model, processor) == before


@pytest.mark.parametrize("name", WRAPPED)
def test_facts_are_read_off_the_model(name):
    spec = FAMILIES[name].spec
    facts = unlisted_facts(adapter_of(name))
    for fact in (
        "text",
        "tower",
        "stem",
        "projector",
        "gated_projector",
        "stem_joins",
        "vocabulary",
        "class_attention",
        "rotary_axes",
    ):
        assert getattr(facts, fact) == getattr(spec.facts, fact), fact


@pytest.mark.sampled(24)
@pytest.mark.parametrize("file", sorted(path.stem for path in (CONF / "model").glob("*.yaml")))
def test_families_lack_what_their_files_say(file):
    spec = model_spec(compose_section("model", file) | {"weights": "random"})
    family = ADAPTERS.load(spec.adapter)
    assert set(family.data.lacking) == set(compose_section("model", file)["facts"]["lacking"])
    assert family.data.patch_tokens == spec.facts.patch_tokens


def test_the_user_goes_on_with_the_model_and_nothing_is_left():
    model, processor = loaded("llava")
    inputs = processor(text="<image>\nw1", images=[picture(0)], return_tensors="pt")
    plain = model.eval().generate(**inputs, max_new_tokens=4, do_sample=False)
    with espalier.apply(espalier.wrap(model, processor), "divprune", ratio=0.5) as pruned:
        pruned.ask(picture(0), "w1", max_new_tokens=2)
    assert torch.equal(model.generate(**inputs, max_new_tokens=4, do_sample=False), plain)


METHODS = {"divprune": {}, "fastv": {"K": 1}, "snapkv": {}}


@pytest.mark.sampled(18)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", WRAPPED)
def test_the_models_own_generate_answers_as_ask_does(name, method):
    """Of a batch, with the inputs of the model's processor."""
    model, processor = loaded(name)
    taken = espalier.wrap(model, processor)
    pair = [(picture(number, 56, 42), question) for number, question in ((1, "w1"), (2, "w3 w4"))]
    settings = {"max_new_tokens": 5, "do_sample": False}
    with taken.open_adapter() as adapter:
        inputs = adapter.encode([question_chat(*question, taken.spec) for question in pair])
        plain = model.generate(**inputs, **settings)
    beams = {"num_beams": 1 if method == "snapkv" else 2}
    with ExitStack() as stack:
        try:
            applied = espalier.apply(taken, method, ratio=0.5, **METHODS[method])
            pruned = stack.enter_context(applied)
            answers = pruned.ask_many(pair, **settings)
        except espalier.UserError:
            pytest.skip("the method does not run on this family")
        ids = model.generate(**inputs, **settings)
        of_beams = model.generate(**inputs, **settings, **beams)
        prompt = inputs["input_ids"]
        assert adapter.decode(ids[:, prompt.shape[1] :]) == [a.text for a in answers]
        assert torch.equal(of_beams[:, : prompt.shape[1]], prompt)
        beam_answers = pruned.ask_many(pair, **settings, **beams)
        beam_texts = adapter.decode(of_beams[:, prompt.shape[1] :])
        assert beam_texts == [answer.text for answer in beam_answers]
    assert torch.equal(model.generate(**inputs, **settings), plain)


def test_generate_under_a_method_refuses_in_one_line_what_only_ask_can():
    model, processor = loaded("llava")
    inputs = processor(text="<image>\nw1", images=[picture(0)], return_tensors="pt")
    taken = espalier.wrap(model, processor)
    with espalier.apply(taken, "divprune", ratio=0.5):
        line = refused(lambda: model.generate(**inputs, return_dict_in_generate=True))
        assert "return_dict_in_generate=True" in line
        assert "past_key_values" in refused(lambda: model.generate(**inputs, past_key_values=()))
    with espalier.apply(taken, "vanilla_sd", draft=taken):
        line = refused(lambda: model.generate(**inputs, max_new_tokens=2))
    assert "valid: ask(...)" in line


def test_methods_may_be_open_inside_one_another():
    taken = espalier.wrap(*loaded("llava"))
    request = {"media": picture(0), "question": QUESTION, "max_new_tokens": 4}
    with espalier.apply(taken, "none") as plain:
        single = plain.ask(**request)
        with espalier.apply(taken, "fastv", ratio=0.5) as pruned:
            assert pruned.ask(**request).kept == 8
            assert plain.ask(**request).text == single.text
        assert plain.ask(**request).text == single.text


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        (("divprune", {}), ("fastv", {})),
        (("fastv", {}), ("fastv", {})),
        (("aircache", {}), ("divprune", {})),
        (("none", {"compressor": "aircache"}), ("fastv", {})),
        (("divprune", {}), ("pearl", {"draft": True})),
        (("pearl", {"draft": True}), ("aircache", {})),
    ],
)
def test_two_methods_that_act_are_refused_on_one_model(outer, inner):
    model, processor = loaded("llava")

    def opened(name, options):
        # The same weights under another wrapping are the same model.
        taken = espalier.wrap(model, processor)
        draft = {"draft": taken, "transport": "sequential"} if options.get("draft") else {}
        return espalier.apply(
            taken,
            name,
            **({} if name in ("none", "pearl") else {"ratio": 0.5}),
            **(options | draft),
        )

    request = {"media": picture(0), "question": QUESTION, "max_new_tokens": 2}
    with opened(*outer) as first:
        alone = first.ask(**request)
        with pytest.raises(espalier.UserError) as refused, opened(*inner):
            pass
        assert first.ask(**request).text == alone.text
    line = str(refused.value)
    assert line.startswith(f"method={inner[0]!r}: method='{outer[0]}")
    assert "do not combine" in line
    assert "\n" not in line
    with opened(*inner) as second, opened("none", {}) as plain:
        second.ask(**request)
        plain.ask(**request)
    assert not [name for name in vars(model) if "espalier" in name]


@pytest.mark.parametrize("first", ["divprune", "none"])
def test_blocks_that_close_in_the_order_in_which_they_opened_leave_a_model_free(first):
    model, processor = loaded("llava")
    wrapped = {name: espalier.wrap(model, processor) for name in ("divprune", "none")}
    blocks = {
        "divprune": espalier.apply(wrapped["divprune"], "divprune", ratio=0.5),
        "none": espalier.apply(wrapped["none"], "none"),
    }
    order = sorted(blocks, key=lambda name: name != first)
    for name in order:
        blocks[name].__enter__()
    for name in order:
        blocks[name].__exit__(None, None, None)
    assert not [name for name in vars(model) if "espalier" in name]


def test_a_draft_is_a_model_on_which_a_method_acts():
    target, draft = (espalier.wrap(*loaded("llava")) for _ in range(2))
    with (
        espalier.apply(draft, "divprune", ratio=0.5),
        pytest.raises(espalier.UserError, match="acts on this model already"),
        espalier.apply(target, "pearl", draft=draft, transport="sequential"),
    ):
        pass


def test_methods_act_on_two_models_at_once_and_a_failed_block_ends_its_own():
    first, second = (espalier.wrap(*loaded("llava")) for _ in range(2))
    request = {"media": picture(0), "question": QUESTION, "max_new_tokens": 2}
    with (
        espalier.apply(first, "divprune", ratio=0.5) as outer,
        espalier.apply(second, "fastv", ratio=0.25) as inner,
    ):
        assert (outer.ask(**request).kept, inner.ask(**request).kept) == (8, 12)
    with pytest.raises(ZeroDivisionError), espalier.apply(first, "divprune", ratio=0.5):
        raise ZeroDivisionError
    with espalier.apply(first, "fastv", ratio=0.5) as pruned:
        assert pruned.ask(**request).kept == 8


def test_wrapped_and_loaded_answer_alike():
    taken = espalier.wrap(
        *loaded("qwen2_vl"), conversation="qwen_1_5", processor=FAMILIES["qwen2_vl"].spec.processor
    )
    read = espalier.load(
        saved("qwen2_vl"),
        dtype="float32",
        conversation="qwen_1_5",
        processor=FAMILIES["qwen2_vl"].spec.processor,
    )
    answers = []
    for model in (taken, read):
        with espalier.apply(model, "fastv", ratio=0.5) as pruned:
            answers.append(pruned.ask(picture(1, 56, 42), QUESTION, max_new_tokens=6))
    first, second = answers
    assert (first.text, first.kept_indices, first.flops) == (
        second.text,
        second.kept_indices,
        second.flops,
    )
    assert taken.spec.facts == read.spec.facts


def test_a_model_of_no_family_is_refused_by_name():
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "vocab_size": 8,
    }
    llama = LlamaForCausalLM(LlamaConfig(**sizes))
    with pytest.raises(
        espalier.UserError, match=r"model_type='llama' is unknown.*; valid: .*llava.*qwen2_vl"
    ):
        espalier.wrap(llama, None)
    assert "model_type='None'" in refused(espalier.wrap, object(), None)
    model, processor = loaded("llava")
    assert "LlavaModel; valid for model_type='llava': LlavaForCond" in refused(
        espalier.wrap, model.model, processor
    )
    for other in (None, processor.image_processor, processor.tokenizer, "llava"):
        with pytest.raises(espalier.UserError, match=r"^processor is a .*valid: that of the model"):
            espalier.wrap(model, other)
    with pytest.raises(espalier.UserError, match=r"setting='dtype' is unknown.*conversation"):
        espalier.wrap(model, processor, dtype="float16")


def test_a_folder_without_a_file_of_conf_is_read_by_its_own_configuration():
    model = espalier.load(saved("internvl"), dtype="float32")
    assert model.spec.adapter == "internvl"
    assert config_of(model.spec)["model_type"] == "internvl"
    assert model.spec.facts.text == FAMILIES["internvl"].spec.facts.text
    with pytest.raises(
        espalier.UserError,
        match="do not describe the model completely; valid: a name of conf/model",
    ):
        espalier.load(saved("deepseek_ocr"))


def test_what_was_calibrated_on_a_checkpoint_is_refused_for_a_model_in_memory():
    taken = espalier.wrap(*loaded("llava"))
    for method in ("d2pruner", "fitprune"):
        assert f"'{method}' reads a calibration of a checkpoint" in refused(
            espalier.apply, taken, method, ratio=0.5
        )


def test_the_processor_is_that_of_the_time_of_wrapping():
    model, processor = loaded("llava")
    kept = deepcopy(processor.chat_template)
    taken = espalier.wrap(model, processor)
    processor.chat_template = "{{ 1 / 0 }}"
    with espalier.apply(taken, "none") as pruned:
        assert pruned.ask(picture(0), QUESTION, max_new_tokens=1).visual == 16
    assert kept != processor.chat_template
