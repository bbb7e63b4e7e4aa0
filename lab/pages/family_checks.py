"""Which tests compare which model family with what: instances are read off the tests' own parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from espalier.harness.errors import UserError


@dataclass(frozen=True)
class Check:
    """A test that runs on tiny instances of model families.

    Attributes:
        compares: what it compares, as the page says it.
        test: file and function.
        axis: its parameter that names an instance of tests/families or a family; None: `families` states them.
        families: for tests without such a parameter.
    """

    compares: str
    test: str
    axis: str | None = "name"
    families: tuple[str, ...] = ()

    def subjects(self) -> set[str]:
        """Return instances and families that the test runs on.

        Raises:
            UserError: there is no such test, or it has no such parameter.
        """
        file, _, name = self.test.partition("::")
        function = getattr(import_module(file.removesuffix(".py").replace("/", ".")), name, None)
        values = None if function is None or self.axis is None else _values(function, self.axis)
        if function is None or (self.axis is not None and values is None):
            raise UserError(
                f"{self.test} has no parameter {self.axis!r}; see lab/pages/family_checks.py"
            )
        return set(self.families if values is None else values)


def _values(function: Any, axis: str) -> set[str] | None:
    """Return the values of a parameter of a test; None if it has none of that name."""
    for mark in getattr(function, "pytestmark", ()):
        if mark.name != "parametrize":
            continue
        names, cases = mark.args
        names = names.split(",") if isinstance(names, str) else list(names)
        if axis in names:
            place = names.index(axis)
            return {_case(case)[place] if len(names) > 1 else _case(case) for case in cases}
    return None


def _case(case: Any) -> Any:
    """Return the values of a case, also of `pytest.param`."""
    return case.values if hasattr(case, "marks") else case


_FAMILIES = "tests/models/test_families.py::test_"

CHECKS = (
    Check("ratio 0 and the plain model, to the bit", f"{_FAMILIES}ratio_zero_is_bit_identical"),
    Check("dropped tokens and masked ones, fp64", f"{_FAMILIES}dropping_equals_emulation"),
    Check(
        "dropped tokens and full forwards with handwritten masks",
        f"{_FAMILIES}dropping_equals_a_full_forward_with_handwritten_masks",
    ),
    Check(
        "a padded batch and its rows alone, and every layer's cache",
        f"{_FAMILIES}padded_batch_equals_single_rows_and_caches_are_as_planned",
    ),
    Check("beams of a batch and of its rows", f"{_FAMILIES}beams_equal_beams_of_single_rows"),
    Check("attention read by methods and eager attention", f"{_FAMILIES}text_probes_equal_eager"),
    Check(
        "the engine's decoding loop and the library's `generate`",
        "tests/engine/test_loop.py::test_every_family_alone_and_padded",
    ),
    Check(
        "evicted caches and whole ones with the rest hidden (compressors)",
        "tests/engine/test_eviction.py::test_steps_equal_the_whole_cache_with_the_rest_hidden",
    ),
    Check(
        "tokens hidden from each step of an answer and handwritten masks",
        "tests/engine/test_decode.py::test_steps_equal_whole_forwards_with_handwritten_masks",
    ),
    Check(
        "dropping in the tower and masking there",
        "tests/engine/test_tower.py::test_dropping_equals_emulation_and_a_batch_its_rows",
    ),
    Check(
        "every reducer, against emulation",
        "tests/methods/test_matrix.py::test_a_method_on_a_family",
    ),
    Check(
        "speculative answers and the target's own",
        "tests/decoding/test_families.py::test_the_answer_is_the_targets",
    ),
    Check(
        "FLOPs of every part and torch's counter",
        "tests/cost/test_flops_families.py::test_every_part_of_a_loaded_model_costs_what_torch_counts",
    ),
    Check(
        "a model of the caller (`wrap`) and the plain model, before and after",
        "tests/api/test_wrap.py::test_a_wrapped_model_answers_and_is_given_back_as_it_was",
    ),
    Check(
        "answers to videos and the library's at the release's positions",
        "tests/models/test_positions.py::test_answers_equal_the_library_at_the_released_positions",
    ),
    Check(
        "the decoder's input and a slow fp64 form of the release's description",
        "tests/models/test_llada.py::test_the_prompt_in_front_of_the_decoder_is_the_one_of_the_description",
    ),
    Check(
        "tensors of a release in its own names and the model's",
        "tests/models/test_llada.py::test_every_tensor_of_a_release_lands_where_it_belongs",
        axis="family",
    ),
    Check(
        "logits of a release in its own names and of its source",
        "tests/models/test_deepseek.py::test_the_released_names_load_with_equal_logits",
        axis=None,
        families=("deepseek_ocr",),
    ),
    Check(
        "logits of a converted release and of its source",
        "tests/convert/test_llava.py::test_a_converted_release_answers_as_the_model_it_holds",
        axis=None,
        families=("llava", "llava_next"),
    ),
    Check(
        "logits of a release in its own names and of its source",
        "tests/convert/test_lmms.py::test_a_release_loads_without_conversion",
        axis=None,
        families=("llava_onevision", "llava_video"),
    ),
    Check(
        "logits of a converted release and of its source",
        "tests/convert/test_internvl.py::test_a_converted_release_answers_as_the_model_it_holds",
        axis=None,
        families=("internvl",),
    ),
    Check(
        "prompts and the golden strings of the authors' code",
        "tests/models/test_prompts.py::test_every_set_of_every_family_asks_as_its_golden_strings",
        axis="family",
    ),
    Check(
        "dropped tokens and layers run by hand on the others",
        "tests/models/test_qwen3_5.py::test_dropping_at_a_layer_equals_layers_run_by_hand_on_what_stays",
    ),
    Check(
        "prompts, pixels, logits and answers of the release's own code, on tiny weights",
        "tests/models/test_released.py::test_every_mode_of_deepseek_ocr_answers_as_its_release",
        axis=None,
        families=("deepseek_ocr", "deepseek_ocr2", "internvl", "llava_video", "llava_onevision1_5"),
    ),
    Check(
        "answers on canvases and the class's with handwritten masks",
        "tests/diffusion/test_canvas.py::test_dropping_equals_handwritten_masks",
        axis=None,
        families=("diffusion_gemma",),
    ),
)


@cache
def instances() -> Mapping[str, Any]:
    """Return the tiny instances of all families by name."""
    # By name: the tests are not checked as strictly as what imports them.
    plain = import_module("tests.families").FAMILIES
    denoising = import_module("tests.families.llada").DENOISING
    return {**plain, **denoising, **import_module("tests.families.diffusion_gemma").CANVASES}


def families_of(subjects: Iterable[str]) -> set[str]:
    """Return the families of instances of tests/families; a family stands for itself."""
    tiny = instances()
    return {tiny[name].spec.adapter if name in tiny else name for name in subjects}
