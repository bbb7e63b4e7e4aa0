"""Positions of Qwen2-VL and Qwen2.5-VL by the released rule, and the check that no family places text otherwise."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

import espalier
from espalier.harness.cost.budget import Budget
from espalier.harness.engine.layer_inputs import ORDER, MisplacedText
from espalier.harness.engine.session import Session
from espalier.harness.models.architectures.text_positions import (
    IMAGE,
    TEXT,
    VIDEO,
    released_positions,
)
from espalier.harness.models.build_adapter import load_adapter
from espalier.methods.none import NoReduction
from tests.api.families import loaded
from tests.families import FAMILIES
from tests.families.qwen import VIDEOS, clip, video_chat
from tests.family_runs import NONE, ROWS, STEPS, Tiny, saved
from tests.models.test_qwen import SPECS
from tests.tiny import Scatter, chat

RELEASED = ("qwen2_vl", "qwen2_5_vl")
WITH_VIDEOS = ("qwen2_vl_video", "qwen2_5_vl_video", "qwen2_5_vl_mixed")
SIDE = 2

#: 5.6 seconds at 8 frames a second: times reach further than the sides of a frame.
LONG = video_chat("w1 w2 w3", clip(45, 28, 28))


def slow_positions(
    kinds: list[int], grids: dict[int, list[list[int]]], seconds: list[float], pace: float | None
) -> list[tuple[int, int, int]]:
    """The released rule, token by token; takes the grids and seconds that it uses off the lists.

    A word stands one behind the largest number so far. A picture or video begins there on all axes; its rows and
    columns count by one, its time by one or, with a pace, by the seconds of its frame, cut off.
    """
    placed: list[tuple[int, int, int]] = []
    while len(placed) < len(kinds):
        kind = kinds[len(placed)]
        start = 1 + max((max(place) for place in placed), default=-1)
        if kind == TEXT:
            placed.append((start, start, start))
            continue
        frames, rows, columns = grids[kind].pop(0)
        paced = kind == VIDEO and pace is not None
        step = seconds.pop(0) if paced else 1.0
        for frame in range(frames):
            time = frame
            if paced:
                time = int(np.float32(np.float32(frame) * np.float32(step)) * np.float32(pace))
            placed += [
                (start + time, start + row, start + column)
                for row in range(rows // SIDE)
                for column in range(columns // SIDE)
            ]
    return placed


def slow_batch(inputs: dict[str, Any], pace: float | None) -> tuple[Tensor, Tensor]:
    """Positions (3, B, L) and deltas (B, 1) of a batch by the slow rule."""
    kinds, valid = inputs["mm_token_type_ids"], inputs["attention_mask"].bool()
    grids = {IMAGE: "image_grid_thw", VIDEO: "video_grid_thw"}
    remaining = {kind: inputs[key].tolist() if key in inputs else [] for kind, key in grids.items()}
    seconds = list(inputs.get("second_per_grid_ts") or [])
    positions = torch.zeros(3, *kinds.shape, dtype=torch.long)
    deltas = []
    for row in range(len(kinds)):
        places = torch.tensor(
            slow_positions(kinds[row, valid[row]].tolist(), remaining, seconds, pace)
        )
        positions[:, row, valid[row]] = places.T
        deltas.append([int(places.max()) + 1 - len(places)])
    return positions, torch.tensor(deltas)


def pace_of(model: Any) -> float | None:
    return getattr(model.config.vision_config, "tokens_per_second", None)


# ---------------------------------------------------------------------- the rule


def random_batch(rng: np.random.Generator, pictures: tuple[int, ...]) -> dict[str, Any]:
    """A left-padded batch of prompts of words, images and videos of all shapes, in any order."""
    rows, grids, seconds = [], {IMAGE: [], VIDEO: []}, []
    for _ in range(rng.integers(1, 4)):
        kinds = [TEXT] * int(rng.integers(1, 6))
        for _ in range(rng.integers(0, 4)):
            kind = int(rng.choice(pictures))
            frames = int(rng.integers(1, 12)) if kind == VIDEO else 1
            high, wide = (int(size) for size in rng.integers(1, 7, 2))
            grids[kind].append([frames, SIDE * high, SIDE * wide])
            if kind == VIDEO:
                # As the processor has them: two frames over frames a second, in single precision.
                seconds.append(float(np.float32(2 / rng.choice([0.3, 0.5, 1, 1.7, 2, 8, 29.97]))))
            kinds += [kind] * (frames * high * wide) + [TEXT] * int(rng.integers(1, 4))
        rows.append(kinds)
    length = max(map(len, rows))
    kinds = torch.tensor([[TEXT] * (length - len(row)) + row for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    batch = {
        "input_ids": torch.zeros_like(kinds),
        "mm_token_type_ids": kinds,
        "attention_mask": (torch.arange(length) >= length - lengths[:, None]).long(),
        "second_per_grid_ts": seconds,
    }
    named = {"image_grid_thw": grids[IMAGE], "video_grid_thw": grids[VIDEO]}
    return batch | {name: torch.tensor(shapes) for name, shapes in named.items() if shapes}


@pytest.mark.sampled
@pytest.mark.parametrize("pace", [None, 1.0, 2.0, 3.0, 25.0])
def test_positions_equal_the_slow_rule_on_random_prompts(pace):
    rng = np.random.default_rng(0)
    for _ in range(100):
        batch = random_batch(rng, (IMAGE, VIDEO))
        positions, deltas = released_positions(**batch, side=SIDE, pace=pace)
        expected, after = slow_batch(batch, pace)
        assert torch.equal(positions, expected)
        assert torch.equal(deltas, after)


@pytest.mark.parametrize("name", RELEASED)
def test_images_and_text_stand_where_the_library_puts_them(name):
    model = load_adapter(SPECS[name]).model
    rng = np.random.default_rng(1)
    for _ in range(100):
        batch = random_batch(rng, (IMAGE,))
        library = type(model.model).get_rope_index(model.model, **batch)
        for positions, expected in zip(model.model.get_rope_index(**batch), library, strict=True):
            assert torch.equal(positions, expected)


def test_pictures_may_touch():
    kinds = torch.tensor([[TEXT, *[IMAGE] * 6, TEXT]])
    grids = torch.tensor([[1, 2, 4], [1, 4, 4]])
    positions, deltas = released_positions(
        kinds, kinds, image_grid_thw=grids, attention_mask=None, side=SIDE, pace=None
    )
    assert positions[:, 0].tolist() == [
        [0, 1, 1, 3, 3, 3, 3, 5],
        [0, 1, 1, 3, 3, 4, 4, 5],
        [0, 1, 2, 3, 4, 3, 4, 5],
    ]
    assert deltas.tolist() == [[-2]]


@pytest.mark.parametrize("grids", [None, [[1, 2, 4]], [[1, 2, 4], [1, 4, 6]]])
def test_placeholders_without_a_picture_are_refused(grids):
    kinds = torch.tensor([[TEXT, *[IMAGE] * 6, TEXT]])
    shapes = None if grids is None else torch.tensor(grids)
    with pytest.raises(ValueError, match="placeholders are left for which there is no picture"):
        released_positions(kinds, kinds, image_grid_thw=shapes, side=SIDE, pace=None)


# ---------------------------------------------------------------------- answers


def model_alone(name: str, dtype: str) -> Any:
    """A model that no adapter has touched."""
    spec = FAMILIES[name].spec
    model_class = type(Tiny(name, dtype).adapter).data.model_class
    model = model_class.from_pretrained(saved(name), dtype=getattr(torch, dtype)).eval()
    assert "get_rope_index" not in vars(model.model)
    assert spec.adapter in type(model).__module__
    return model


def slow_answers(
    model: Any, inputs: dict[str, Any], suppressed: list[int]
) -> tuple[Tensor, Tensor]:
    """Ids and logits of the library's own generation at the slow rule's positions."""
    places, _ = slow_batch(inputs, pace_of(model))
    counted = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with torch.inference_mode():
        out = model.generate(
            **inputs,
            position_ids=torch.cat([counted[None], places]),
            max_new_tokens=STEPS,
            do_sample=False,
            suppress_tokens=suppressed,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return out.sequences[:, inputs["input_ids"].shape[1] :], torch.stack(out.logits, 1)


@pytest.mark.parametrize("name", WITH_VIDEOS)
def test_answers_equal_the_library_at_the_released_positions(name):
    """Ratio 0 in a padded batch and alone, by the library's loop and the engine's, and the prefill of decoders."""
    tiny = Tiny(name, "float32")
    adapter, model = tiny.adapter, model_alone(name, "float32")
    batches = [tiny.inputs(*ROWS), *(tiny.inputs(row) for row in ROWS), adapter.encode([LONG])]
    for inputs in batches:
        suppressed = list(adapter.items(inputs))
        ids, logits = slow_answers(model, inputs, suppressed)
        for method in (NoReduction(), Scatter(("prefix",)), Scatter((1,))):
            for decode in ("generate", "loop"):
                with Session(adapter, method, NONE, decode=decode) as session:
                    done = session.generate(
                        inputs,
                        max_new_tokens=STEPS,
                        do_sample=False,
                        suppress_tokens=suppressed,
                        output_logits=True,
                    )
                assert torch.equal(done.ids, ids)
                assert torch.equal(done.logits[:, 0], logits[:, 0])
                if decode == "generate":
                    assert torch.equal(done.logits, logits)
        if len(ids) == 1:
            with Session(adapter, NoReduction(), NONE) as session:
                shifted_positions, following = session.prefill(inputs, DynamicCache())
            assert (shifted_positions - logits[0, 0]).abs().max() < 1e-6
            places, _ = slow_batch(inputs, pace_of(model))
            assert following.unique().tolist() == [int(places.max()) + 1]


@pytest.mark.slow
@pytest.mark.parametrize("name", RELEASED)
def test_a_wrapped_model_is_placed_while_a_method_is_on_it(name):
    family = f"{name}_video"
    model, processor = loaded(family)
    bounds = FAMILIES[family].spec.processor
    taken = espalier.wrap(model, processor, processor=bounds, video={"frames": 6, "rule": "fps"})
    before = model.model.get_rope_index
    adapter = load_adapter(
        replace(FAMILIES[family].spec, path=saved(family), weights="trained", dtype="float32")
    )
    single = deepcopy(model).eval()
    for question in (*VIDEOS, LONG):
        with espalier.apply(taken, "none", ratio=0.0) as plain:
            inputs = plain._adapter.encode([question])
            answer = plain.ask(question, max_new_tokens=STEPS)
        assert "get_rope_index" not in vars(model.model)
        assert model.model.get_rope_index == before
        ids, _ = slow_answers(single, inputs, [])
        assert answer.text == adapter.decode(ids)[0]


# ---------------------------------------------------------------------- the check


@pytest.mark.parametrize("backend", ["drop", "emulate"])
@pytest.mark.parametrize("name", RELEASED)
def test_the_librarys_own_rule_is_refused(name, backend):
    """Once the library follows the release, this fails, and the adapter's rule can go."""
    adapter = load_adapter(SPECS[name])
    inputs = adapter.encode([LONG])
    del adapter.model.model.get_rope_index
    with (
        Session(adapter, Scatter((1,)), Budget("kept", 0.5), backend=backend) as session,
        pytest.raises(MisplacedText, match=r"prompt 0 is at \[.*after the largest position"),
    ):
        session.generate(inputs, max_new_tokens=1, do_sample=False)


@pytest.mark.sampled
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("kind", ["images", "videos"])
def test_text_in_another_place_is_refused_in_every_family_with_axes(name, kind):
    adapter = load_adapter(SPECS[name])
    chats = [chat("w1"), LONG] if kind == "videos" else [FAMILIES[name].chats[0], chat("w1")]
    adapter.spec = replace(adapter.spec, media="optional")
    inputs = adapter.encode(chats)
    rule = adapter.model.model.get_rope_index

    def shifted(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        positions, deltas = rule(*args, **kwargs)
        shifted_positions = positions.clone()
        shifted_positions[..., -1] += 1
        return shifted_positions, deltas

    with Session(adapter, NoReduction(), NONE) as session:
        session.generate(inputs, max_new_tokens=1, do_sample=False)
        adapter.model.model.get_rope_index = shifted
        with pytest.raises(MisplacedText, match=rf"text token {inputs['input_ids'].shape[1] - 1} "):
            session.generate(inputs, max_new_tokens=1, do_sample=False)


@pytest.mark.parametrize("name", SPECS)
def test_a_row_names_the_rule(name):
    assert load_adapter(SPECS[name]).prompt_summary(FAMILIES[name].chats[0])["positions"] == ORDER
    assert "positions" not in Tiny("llava").adapter.prompt_summary(FAMILIES["llava"].chats[0])


@pytest.mark.parametrize("name", SPECS)
def test_a_decoder_may_start_from_a_text_without_pictures(name):
    adapter = load_adapter(replace(SPECS[name], media="optional", dtype="float64"))
    inputs = adapter.encode([chat("w1 w2")])
    with Session(adapter, NoReduction(), NONE) as session:
        logits, following = session.prefill(inputs, DynamicCache())
        done = session.generate(inputs, max_new_tokens=1, do_sample=False, output_logits=True)
    assert (logits - done.logits[0, 0]).abs().max() < 1e-6  # `generate` returns fp32
    assert following.tolist() == [[[inputs["input_ids"].shape[1]]]] * 3
