"""The engine's comparisons again, on the trained embedded model and its own questions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from espalier.harness.config.build_spec import build_spec
from espalier.harness.config.compose import read_command
from espalier.harness.cost.budget import Budget
from espalier.harness.engine.artifacts import prior_for
from espalier.harness.engine.session import Session
from espalier.harness.models.build_adapter import load_adapter
from espalier.harness.specs.catalogue import build_method
from tests.methods.cases import CASES, build, case_id

#: Layers of the embedded model's tower and decoder.
TOWER, DEPTH = 3, 6


def kind_of(case: tuple[str, dict[str, Any]]) -> tuple[object, ...]:
    """Return the kinds of engine behaviour that a method uses: where it acts, and how."""
    method = build(case)
    places = [site.where for site in method.all_sites(TOWER, DEPTH)]
    return tuple(places), method.decode_site(DEPTH), method.adaptive, method.proportional


#: The first case of each kind; the embedded model takes images only. tests/methods/test_matrix.py has every case.
KINDS = {kind_of(case): case for case in reversed(CASES) if not build(case).needs_frames()}
ON_IMAGES = list(KINDS.values())

QUESTIONS = ["where is the red frame ?", "describe the image .", "read all digits ."]
GENERATION = {"max_new_tokens": 24, "do_sample": False, "output_logits": True}


@pytest.fixture(scope="module")
def spec():
    return build_spec(read_command(["model=seedling"]).cells[0]).model


@pytest.fixture(scope="module")
def adapter(spec):
    return load_adapter(spec)


@pytest.fixture(scope="module")
def chats():
    from espalier.harness.seedling.scenes import Scenes

    scenes = Scenes()
    return [
        [
            {
                "role": "user",
                "content": [
                    {"type": "image", "image": scenes.scene("val", 0, index).to_pil()},
                    {"type": "text", "text": text},
                ],
            }
        ]
        for index, text in enumerate(QUESTIONS)
    ]


def run(adapter, spec, case, budget, chats, samples, **options):
    method = build_method(*case)
    prior = prior_for(spec, method)
    with Session(adapter, method, budget, prior=prior, **options) as session:
        return session.generate(adapter.encode(chats), samples, **GENERATION)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", ON_IMAGES, ids=case_id)
def test_every_kind_of_method_at_ratio_zero_is_bit_identical(adapter, spec, chats, case):
    inputs = adapter.encode(chats)
    with torch.inference_mode():
        plain = adapter.model.generate(**inputs, **GENERATION, return_dict_in_generate=True)
    got = run(adapter, spec, case, Budget("kept", 0.0), chats, ["a", "b", "c"])
    assert torch.equal(got.logits, torch.stack(plain.logits, 1))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", ON_IMAGES, ids=case_id)
def test_every_kind_of_method_drops_as_it_emulates(adapter, spec, chats, case):
    budget, names = Budget("kept", 0.8), ["a", "b", "c"]
    fast = run(adapter, spec, case, budget, chats, names)
    slow = run(adapter, spec, case, budget, chats, names, backend="emulate")
    assert [r.kept for r in fast.records] == [r.kept for r in slow.records]
    assert torch.equal(fast.ids, slow.ids)
    scale = slow.logits.abs().max()
    assert (fast.logits - slow.logits).abs().max() <= 5e-6 * scale


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", ON_IMAGES, ids=case_id)
def test_every_kind_of_method_gives_a_batch_what_it_gives_its_rows(adapter, spec, chats, case):
    budget, names = Budget("kept", 0.8), ["a", "b", "c"]
    batch = run(adapter, spec, case, budget, chats, names)
    for row, chat in enumerate(chats):
        single = run(adapter, spec, case, budget, [chat], [names[row]])
        assert torch.equal(batch.records[row].origin, single.records[0].origin)
        length = int((single.ids[0] != adapter.pad_id).sum())
        assert torch.equal(batch.ids[row, :length], single.ids[0, :length])
