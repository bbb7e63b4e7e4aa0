"""Methods that read the prompt's words, on tiny models of real families: exact, and the same in a batch as alone."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from espalier.harness.cost.budget import Budget
from espalier.harness.engine.session import Session
from espalier.methods.dart import DART
from espalier.methods.sparsevlm import SparseVLM
from tests.families import FAMILIES
from tests.tiny import load_tiny, save_tiny

NAMES = ["llava_next", "qwen2_5_vl", "onevision_mixed"]
METHODS = {
    "sparsevlm": SparseVLM(),
    "sparsevlm-official": SparseVLM(raters="above", assignment="euclidean", cluster="mean"),
    "dart": DART(),
}


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    @cache
    def loaded(name):
        spec = FAMILIES[name].spec
        return load_tiny(spec, save_tiny(spec, tmp_path_factory.mktemp(name)))

    return loaded


def run(adapter, method, budget, chats, backend="drop", samples=None):
    inputs = adapter.encode(list(chats))
    generation = {
        "max_new_tokens": 4,
        "do_sample": False,
        "output_logits": True,
        "suppress_tokens": list(adapter.items(inputs)),
    }
    with Session(adapter, method, budget, backend=backend) as session:
        return session.generate(inputs, samples, **generation)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("name", NAMES)
def test_the_engine_drops_as_it_emulates_and_rows_as_a_batch(load, name, method):
    adapter, chats = load(name), FAMILIES[name].chats
    fast = run(adapter, method, Budget("average", 0.5), chats)
    slow = run(adapter, method, Budget("average", 0.5), chats, backend="emulate")
    nothing = run(adapter, method, Budget("average", 0.0), chats)
    span = fast.logits.abs().max()
    assert (fast.logits - slow.logits).abs().max() < 1e-9 * span
    assert (fast.logits[:, 0] - nothing.logits[:, 0]).abs().max() > 1e-2
    for row, one in enumerate(chats):
        record = fast.records[row]
        assert record.kept == record.requested
        assert record.kept[-1] < record.visual
        alone = run(adapter, method, Budget("average", 0.5), [one])
        assert torch.equal(alone.records[0].origin, record.origin)
        assert (alone.logits[0] - fast.logits[row]).abs().max() < 1e-6 * span
        assert nothing.records[row].kept == (record.visual,) * len(record.kept)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("name", NAMES)
def test_ratio_zero_is_the_plain_model(load, name, method):
    adapter, chats = load(name), FAMILIES[name].chats
    inputs = adapter.encode(list(chats))
    with torch.inference_mode():
        plain = adapter.model.generate(
            **inputs,
            max_new_tokens=4,
            do_sample=False,
            output_logits=True,
            suppress_tokens=list(adapter.items(inputs)),
            return_dict_in_generate=True,
        )
    got = run(adapter, method, Budget("average", 0.0), chats)
    assert torch.equal(got.logits, torch.stack(plain.logits, 1))
