"""Each family takes the settings of its models in conf/model: a dry run does not import the family to check them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from espalier.harness.config.group_lists import choices, read_choice
from espalier.harness.config.model_section import model_spec
from espalier.harness.errors import UserError
from espalier.harness.kinds.checkpoint_check import check_model
from espalier.harness.models.families import ADAPTERS
from espalier.harness.specs.benchmark_spec import TASK_KINDS
from espalier.harness.specs.run_spec import CHECKPOINT, ModelSpec
from espalier.harness.store.files.digests import Digests

MODELS = choices("model")


def specs_of(name: str) -> list[ModelSpec]:
    """Each prompt set of a model, for each kind of task and each benchmark that the set names."""
    section = read_choice("model", name)
    sets = {"original": {}, **section["prompts"]}
    return [
        model_spec({**section, "prompt": prompt, "weights": weights, "device": "cpu"}, (task,))
        for prompt, settings in sets.items()
        if settings is not None
        for task in {*TASK_KINDS, *(settings.get("tasks") or {})}
        for weights in ("trained", "random")
    ]


@pytest.mark.sampled
@pytest.mark.parametrize("name", MODELS)
def test_a_family_takes_what_its_models_state(name: str) -> None:
    for spec in specs_of(name):
        family = ADAPTERS.load(spec.adapter)
        family.check_settings(spec)
        conversation = None if spec.conversation == CHECKPOINT else spec.conversation
        assert family.format(conversation, spec.prompt.join)


@pytest.mark.parametrize(
    ("name", "changes", "line"),
    [
        ("seedling", {"processor": {"do_pat": True}}, "model.processor='do_pat' is unknown"),
        ("seedling", {"processor": {"do_pad": 3}}, "model.processor.do_pad=3 must be true or"),
        ("seedling", {"conversation": "nosuch"}, "model.conversation='nosuch' is unknown"),
        (
            "diffusion_gemma_26b",
            {"attention": "eager", "dtype": "float32"},
            "model.attention='eager': model='diffusion",
        ),
    ],
)
def test_other_settings_are_checked(name: str, changes: dict[str, object], line: str) -> None:
    shipped = model_spec({**read_choice("model", name), "device": "cpu"})
    with pytest.raises(UserError) as refusal:
        check_model(replace(shipped, **changes), True, Digests())
    assert str(refusal.value).startswith(line)


def test_a_family_of_another_model_is_checked() -> None:
    """The name of a file in conf/model does not make its settings right for another family."""
    shipped = model_spec({**read_choice("model", "qwen2_5_vl_7b"), "weights": "random"})
    with pytest.raises(UserError, match=r"model\.processor='cap_pixels_per_frame' is unknown"):
        check_model(replace(shipped, adapter="llava", device="cpu"), True, Digests())
