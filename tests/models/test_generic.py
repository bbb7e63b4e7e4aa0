"""Classes of transformers without a file here: proved at loading, limited to what was proved, or refused."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import wraps
from pathlib import Path

import pytest
import torch

import espalier
from espalier.harness.errors import UserError
from espalier.harness.models.build_adapter import build_adapter
from espalier.harness.models.families import GENERIC, MODEL_TYPES
from espalier.harness.models.generic import GenericAdapter
from espalier.harness.models.generic_proof import prove
from espalier.harness.models.unlisted_checkpoint import read_checkpoint
from run import main
from tests.models.unlisted_models import UNLISTED, save_unlisted
from tests.tiny import LLAVA, chat, picture

#: Why a class is refused.
REFUSED = {"gemma3": "masks of its own"}


def load(name: str, folder: Path) -> GenericAdapter:
    """Return the adapter of a saved checkpoint, as a folder on the command line is loaded."""
    spec = replace(
        LLAVA, name=name, path=folder, weights="trained", adapter="none", architecture={}
    )
    spec = read_checkpoint(spec, "model")
    assert spec.adapter == "generic"
    adapter: GenericAdapter = build_adapter(GenericAdapter, spec)
    return adapter


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", [name for name in UNLISTED if name not in REFUSED])
def test_classes_without_a_file_are_proved(name: str, tmp_path: Path) -> None:
    adapter = load(name, save_unlisted(name, tmp_path))
    inputs = adapter.encode([chat("What?", picture(0, 56, 40)), chat("And what is this here?", 1)])
    layout = adapter.layout(inputs)
    units = adapter.features_of(inputs)
    assert sum(layout.counts) == len(units)
    assert adapter.facts.sites == ("prefix",)


def test_a_class_is_refused_with_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODEL_TYPES, "gemma3", GENERIC)  # as if it had no file
    with pytest.raises(UserError, match=r"Gemma3ForConditionalGeneration.* masks of its own"):
        load("gemma3", save_unlisted("gemma3", tmp_path))


def test_features_in_another_order_are_noticed(tmp_path: Path) -> None:
    adapter = load("mistral3", save_unlisted("mistral3", tmp_path))
    with pytest.raises(UserError, match=r"features of get_image_features are not what enters"):
        prove(adapter, lambda inputs: adapter.features_of(inputs).flip(0))


def test_a_head_that_the_engine_does_not_see_is_noticed(tmp_path: Path) -> None:
    """The class scales its logits after the head, in code that the engine's loop does not run."""
    adapter = load("mistral3", save_unlisted("mistral3", tmp_path))
    forward = adapter.model.forward

    @wraps(forward)
    def scaled(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits * 0.5
        return output

    adapter.model.forward = scaled
    with pytest.raises(UserError, match=r"ratio 0 \(loop\) changes logits"):
        prove(adapter, adapter.features_of)


def test_a_run_acts_before_the_decoder_and_nowhere_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_unlisted("mistral3", tmp_path / "model")
    command = [f"model={folder}", f"store={tmp_path}", "limit=1", "engine.paired=0", "json=true"]
    assert main([*command, "method=divprune", "ratio=0.5"]) == 0
    row = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert row["tokens"]["kept_final"] == row["tokens"]["visual"] / 2
    assert row["flops"]["tower"] is None
    assert main([*command, "method=fastv", "ratio=0.5"]) == 2
    assert (
        "acts at layer, and model='model', a class without a file here" in capsys.readouterr().err
    )


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", [name for name in UNLISTED if name not in REFUSED])
def test_a_picture_of_several_tiles_is_one_item(name: str, tmp_path: Path) -> None:
    model = espalier.load(save_unlisted(name, tmp_path), device="cpu")
    sizes = ((28, 28), (56, 28), (28, 84), (84, 56))
    with model.open_adapter() as adapter:
        alone = [
            adapter.layout(adapter.encode([chat("What?", picture(0, *size))])) for size in sizes
        ]
        parts = [{"type": "image", "image": picture(0, *size)} for size in sizes]
        words = [{"type": "text", "text": f"w{n} and:"} for n in range(len(sizes))]
        mixed = [part for pair in zip(parts, words, strict=True) for part in pair]
        turns = [{"role": "user", "content": mixed}]
        layout = adapter.layout(adapter.encode([turns]))
    assert [int(one.picture.max()) for one in alone] == [0] * len(sizes)
    counts = torch.bincount(layout.picture[0]).tolist()
    assert counts == [one.counts[0] for one in alone]
    with espalier.apply(model, "divprune", ratio=0.5) as pruned:
        for size, one in zip(sizes, alone, strict=True):
            answer = pruned.ask(picture(0, *size), "What?", max_new_tokens=2)
            assert (answer.visual, len(answer.kept_indices)) == (one.counts[0], answer.kept)
            with pytest.raises(UserError, match="have no place in the picture"):
                answer.show()
        assert pruned.ask(turns, max_new_tokens=2).visual == sum(counts)
