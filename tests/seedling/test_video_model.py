"""The embedded video model: packed training equals the library's forward; clocks, feed, resuming and files."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

from espalier.harness.seedling import weights_dir
from espalier.harness.seedling.video.events import WORDS, encode
from espalier.harness.seedling.vocabulary import ASSISTANT
from lab.training import video_packs as video_packing
from lab.training import video_stage
from lab.training.__main__ import main
from lab.training.attention_loss import evidence, gaze_loss
from lab.training.clip_features import ShownTokens, see, show, visual_tokens
from lab.training.dialogue_packs import IGNORE, PREFIX
from lab.training.release_stage import load_exported
from lab.training.stage_runtime import (
    Worker,
    load_checkpoint,
    load_recipe,
)
from lab.training.tower_stage import tower_of
from lab.training.video_draft_stage import train_video_draft, video_draft_from
from lab.training.video_drills import talks_about
from lab.training.video_gate import ClipReader, led, spread
from lab.training.video_lessons import Feed
from lab.training.video_model import (
    FRAME_TOKENS,
    VIDEO_LAYERS,
    build_video_model,
    build_video_processor,
    save_video_model,
    video_weights_dir,
)
from lab.training.video_packs import pack_talks, video_hidden
from lab.training.video_stage import (
    new_model,
    prepared,
    stage_of,
    train_video,
)
from lab.training.video_start import BEHIND, CLOCKS, start_from_seedling

FRAMES = 8
TOTAL = FRAMES * FRAME_TOKENS
ASKED = {"what": 2, "when": 1, "digits": 1, "caption": 1}
RECIPE = load_recipe()
TINY = {
    **RECIPE["video"],
    "steps": 4,
    "block": 2,
    "visits": 2,
    "phases": [{"until": 4, "frames": [FRAMES], "clips": 1, "whole": 0.0, "keep": [0.1, 0.2]}],
    "mixes": [{"what": 1}],
    "drills": 1,
    "gaze": {"layers": [1], "heads": 2},
    "validation": {"clips": {FRAMES: 1}, "questions": {"what": 1, "digits": 1}, "drills": 1},
    "log_every": 1,
    "save_every": 2,
    "validate_every": 4,
}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return prepared(build_video_model("seedling_video_draft")).eval()


@pytest.fixture(scope="module")
def started():
    torch.manual_seed(0)
    return new_model().eval()


@pytest.fixture(scope="module")
def clip(started):
    return see(tower_of(started), "val", 0, 0, FRAMES)


def all_tokens(clip) -> ShownTokens:
    return show([clip], TOTAL, 0.0, np.random.default_rng(0))


def listed(looks) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns clip and place of each row ``(R, 2)``, and its right tokens ``(R, 2, 2, V)``."""
    tokens = torch.stack(
        [
            torch.stack([looks.right(late, first) for first in (True, False)], 2)
            for late in (False, True)
        ],
        dim=2,
    )
    real = looks.worth > 0
    lines, numbers = real.nonzero(as_tuple=True)
    return torch.stack([lines, looks.places[real]], dim=1), tokens[lines, numbers]


def unit_weights(talks) -> dict[str, float]:
    return dict.fromkeys([*(talk.family for talk in talks), "end"], 1.0)


@torch.no_grad()
def test_a_packed_dialogue_equals_the_librarys_forward(model):
    """Tower, projector, pooling, newline, positions and template, through the processor and the model itself."""
    clip = see(tower_of(model), "val", 0, 3, FRAMES)
    talks = talks_about(clip.clip, 0, ASKED, 0)
    shown_tokens = all_tokens(clip)
    packed = pack_talks([talks], unit_weights(talks), shown_tokens)
    hidden = video_hidden(model, visual_tokens(model, shown_tokens), shown_tokens, packed).words
    processor = build_video_processor()
    custom, language = model.model.language_model.config._attn_implementation, model.model
    for number, talk in enumerate(talks):
        content = [{"type": "video"}, {"type": "text", "text": talk.question}]
        prompt = processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True
        )
        inputs = processor(
            text=[f"{prompt} {talk.answer}"],
            videos=[clip.clip.frames],
            do_sample_frames=False,
            return_tensors="pt",
        )
        language.language_model.config._attn_implementation = "eager"
        wanted = model(**inputs).logits[0]
        language.language_model.config._attn_implementation = custom
        answer_mask = (packed.segments[0] == number) & (packed.labels[0] != IGNORE)
        length = len(encode(talk.answer)) + 1
        # The features were kept in bfloat16.
        logits = model.lm_head(hidden[0][answer_mask])
        torch.testing.assert_close(logits, wanted[-length:], atol=0.05, rtol=0.05)


@torch.no_grad()
def test_words_that_attend_in_parts_see_what_the_mask_says(model, clip, monkeypatch):
    """The mask is what accelerators take."""
    talks = talks_about(clip.clip, 0, {"what": 2, "caption": 1}, 1)
    packed = pack_talks([talks], unit_weights(talks), all_tokens(clip))
    shown_tokens = all_tokens(clip)
    inputs = (model, visual_tokens(model, shown_tokens), shown_tokens, packed)
    belongs = packed.segments >= 0
    assert len(set(packed.segments[belongs].tolist())) > 3
    states = video_hidden(*inputs).words[belongs]
    monkeypatch.setattr(video_packing, "groups_of", lambda segments: None)
    monkeypatch.setattr(video_packing, "attend_in_parts", None)  # would be called in vain
    torch.testing.assert_close(states, video_hidden(*inputs).words[belongs], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_subset_sees_what_a_mask_would_leave(model, clip):
    """Tokens at their original positions: the library's attention over all of them, the others hidden."""
    talks = talks_about(clip.clip, 0, {"what": 1}, 0)
    few = show([clip], 40, 1.0, np.random.default_rng(1))
    packed = pack_talks([talks], unit_weights(talks), few)
    words = int((packed.segments[0] == 0).sum())
    states = video_hidden(model, visual_tokens(model, few), few, packed).words
    language, shown_tokens = model.model.language_model, all_tokens(clip)
    embeds = [
        language.embed_tokens(torch.tensor([PREFIX])),
        visual_tokens(model, shown_tokens),
        model.model.image_newline[None, None],
        language.embed_tokens(packed.tokens[:, :words]),
    ]
    rows = torch.cat(embeds, dim=1)
    visible = torch.ones(rows.shape[1], dtype=torch.bool)
    visible[len(PREFIX) : len(PREFIX) + TOTAL] = False
    visible[len(PREFIX) + torch.from_numpy(few.chosen[0])] = True
    cells = visible & torch.ones(len(visible), len(visible), dtype=torch.bool).tril()
    cells |= torch.eye(len(visible), dtype=torch.bool)
    mask = torch.zeros(cells.shape).masked_fill_(~cells, float("-inf"))[None, None]
    custom, language.config._attn_implementation = language.config._attn_implementation, "eager"
    wanted = language(inputs_embeds=rows, attention_mask=mask).last_hidden_state
    language.config._attn_implementation = custom
    torch.testing.assert_close(states[0, :words], wanted[0, -words:], atol=1e-3, rtol=1e-3)


def test_a_model_led_by_its_own_answer_says_it_again(clip):
    """On a tenth of the tokens, too: the gaps between them hide nothing."""
    draft = load_exported(video_weights_dir("seedling_video_draft"))
    few, question = spread(clip, 0.1), "describe the video ."
    assert few.chosen.shape == (1, round(TOTAL / 10))
    assert len(set(np.diff(few.chosen[0]))) <= 2
    answer = ClipReader(draft, few).answer(question, 60)
    assert led(draft, few, question, answer) == answer


@torch.no_grad()
def test_gaze_is_the_attention_that_right_tokens_get(model, clip):
    shown_tokens = show([clip], TOTAL // 4, 0.5, np.random.default_rng(3))
    talks = talks_about(clip.clip, 0, {"when": 2, "what": 2, "order": 4}, 1)
    packed = pack_talks([talks], unit_weights(talks), shown_tokens)
    read = video_hidden(model, visual_tokens(model, shown_tokens), shown_tokens, packed)
    rows, tokens = listed(evidence([talks], packed, [clip], shown_tokens))
    layer, heads = 1, 2
    block, language = model.model.language_model.layers[layer], model.model.language_model
    states = block.input_layernorm(read.layers[layer])
    shape = (1, states.shape[1], -1, block.self_attn.head_dim)
    queries = block.self_attn.q_proj(states).view(shape).transpose(1, 2)
    keys = block.self_attn.k_proj(states).view(shape).transpose(1, 2)
    queries, keys = apply_rotary_pos_emb(
        queries, keys, *language.rotary_emb(states, read.positions)
    )
    scores = queries[:, :, -read.words.shape[1] :] @ keys.transpose(2, 3) * block.self_attn.scaling
    weights = (scores + packed.mask(read.prefix)).softmax(-1)[0, :heads, :, read.visual]
    worth = torch.rand(len(rows))
    wanted = [
        -torch.log(weights[head, place, tokens[row, 0, head]].sum(-1)) * worth[row]
        for head in range(heads)
        for row, (_, place) in enumerate(rows)
    ]
    looks = evidence([talks], packed, [clip], shown_tokens)._replace(worth=worth[None])
    loss = gaze_loss(model, read, layer, range(heads), looks, of_words=True)
    torch.testing.assert_close(loss, sum(wanted) / (heads * worth.sum()))


def test_the_first_layers_add_to_seedling_and_change_no_other(started):
    seedling = load_exported(weights_dir("seedling")).state_dict()
    state = started.state_dict()
    for name in ("self_attn.q_proj.weight", "mlp.up_proj.weight", "input_layernorm.weight"):
        for layer in range(6):
            source = seedling[f"model.language_model.layers.{layer}.{name}"]
            place = layer + len(CLOCKS) * (layer >= BEHIND)
            assert torch.equal(state[f"model.language_model.layers.{place}.{name}"], source)


@pytest.mark.sampled
@pytest.mark.parametrize("parts", [1, 3])
def test_a_feed_depends_on_the_step_alone(started, parts):
    plan, tower = (
        {**TINY, "looking_back": {"layer": 1, "heads": 1}, "parts": parts},
        tower_of(started),
    )
    straight = list(Feed(Worker(0, 1), plan, 0).lessons(tower, 0))
    assert len(straight) == parts * TINY["steps"]
    assert not torch.equal(straight[0][0].packed.tokens, straight[1][0].packed.tokens)
    for feeders, first in ((0, 0), (0, 1), (0, 2), (2, 0), (2, 3)):
        resumed = list(Feed(Worker(0, 1, feeders=feeders), plan, 0).lessons(tower, first))
        for (lesson, pool), (resumed_lesson, same_pool) in zip(
            straight[parts * first :], resumed, strict=True
        ):
            assert _tensors(lesson)
            assert all(map(torch.equal, _tensors(lesson), _tensors(resumed_lesson)))
            assert np.array_equal(lesson.shown_tokens.chosen, resumed_lesson.shown_tokens.chosen)
            assert torch.equal(pool, same_pool)


def _tensors(lesson) -> list[torch.Tensor]:
    packed = [getattr(lesson.packed, field.name) for field in fields(lesson.packed)]
    looks = [
        tensor
        for looks_of_kind in (lesson.looks, *lesson.looks_back.values())
        for tensor in looks_of_kind
    ]
    return [lesson.shown_tokens.features, *packed, *lesson.labels.values(), *looks]


@pytest.mark.slow
def test_training_goes_on_where_it_stopped(tmp_path, monkeypatch):
    """Four steps at once, and two and two, end in the same weights; then the draft learns from them."""
    small = dict.fromkeys(VIDEO_LAYERS, 2)

    def start(name: str) -> object:
        assert name == "seedling"
        return prepared(build_video_model("seedling_video_draft"))

    monkeypatch.setattr(video_stage, "new_model", start)
    monkeypatch.setattr("lab.training.video_model.VIDEO_LAYERS", small)
    last = dict.fromkeys(("since", "since_digit", "last", "asked"), 2)
    tiny = {**TINY, "named_after": {"time": 1, "act": 1, **last}, "needed": 1}
    tiny |= {"looking_back": {"layer": 1, "heads": 2, "digit_heads": 1}, "muon": True, "parts": 2}
    tiny["terms"] = {**tiny["terms"], **dict.fromkeys(last, 0.1), "back": 0.1}
    recipe = {"seed": 0, "video": tiny}
    train_video(Worker(0, 1), recipe, tmp_path / "once")
    stop = {**tiny, "validate_every": 100}
    monkeypatch.setattr(video_stage, "save_checkpoint", _Halt(2))
    with pytest.raises(KeyboardInterrupt):
        train_video(Worker(0, 1), {**recipe, "video": stop}, tmp_path / "twice")
    monkeypatch.undo()
    monkeypatch.setattr(video_stage, "new_model", start)
    monkeypatch.setattr("lab.training.video_model.VIDEO_LAYERS", small)
    train_video(Worker(0, 1), recipe, tmp_path / "twice")
    once_run, two = (load_checkpoint(tmp_path / run / "video.pt") for run in ("once", "twice"))
    assert once_run["step"] == two["step"] == 4
    for name, value in once_run["model"].items():
        torch.testing.assert_close(value, two["model"][name], atol=1e-5, rtol=1e-4)
    for name, value in once_run["namers"].items():
        torch.testing.assert_close(value, two["namers"][name], atol=1e-5, rtol=1e-4)
    # Both kinds of gains start at one: what names learns, too.
    assert (once_run["namers"]["gain"] != 1).all()
    assert (once_run["namers"]["asked_gain"] != 1).any()
    records = [json.loads(line) for line in (tmp_path / "once/log.jsonl").read_text().splitlines()]
    assert {"answers", "look", "time", "act", "back", *last} <= records[0].keys()
    assert f"{FRAMES}/what" in records[-1]["val"]
    draft = {"target_layers": [0, 1], "answer_weight": 0.3, "steps": 2, "lr": 1e-3}
    draft |= {"distilled_from": 1, "restarts": [], "start": "target"}
    draft |= {"named_after": {"time": 1, "act": 1}}
    train_video_draft(
        Worker(0, 1), {**recipe, "video": tiny, "video_draft": draft}, tmp_path / "once"
    )
    assert load_checkpoint(tmp_path / "once/video_draft.pt")["step"] == 2


class _Halt:
    """Saves a checkpoint of one step, then stops the training like a user does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, path: Path, state: dict) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, path)
        if state["step"] == self.step:
            raise KeyboardInterrupt


@torch.no_grad()
def test_a_saved_model_answers_through_the_librarys_generate_as_through_the_gate(tmp_path):
    torch.manual_seed(0)
    fresh = build_video_model("seedling_video_draft").eval()
    question = "describe the video ."
    save_video_model(fresh, tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size < 8e6
    loaded, report = transformers.LlavaOnevisionForConditionalGeneration.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    clip = see(tower_of(loaded.eval()), "val", 0, 0, FRAMES)
    processor = transformers.AutoProcessor.from_pretrained(tmp_path)
    prompt = processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": question}]}],
        add_generation_prompt=True,
    )
    inputs = processor(
        text=[prompt], videos=[clip.clip.frames], do_sample_frames=False, return_tensors="pt"
    )
    places = len(PREFIX) + TOTAL + 1
    assert inputs["input_ids"].shape[1] == places + len(encode(question)) + 1
    assert inputs["input_ids"][0, -1] == ASSISTANT
    answer = loaded.generate(**inputs, max_new_tokens=6)[0, inputs["input_ids"].shape[1] :]
    watched = ClipReader(loaded, all_tokens(clip))
    for _ in range(2):  # the first question leaves nothing behind
        assert watched.answer(question, 6) == answer.tolist()


def test_the_largest_model_fits():
    """Weights of 16 bit below 8 MB, and words for every token."""
    model = build_video_model()
    assert 2 * sum(weight.numel() for weight in model.parameters()) < 8e6
    assert model.config.text_config.vocab_size == len(WORDS)
    assert model.config.text_config.max_position_embeddings >= 16000


@pytest.mark.parametrize("stage", ["video", "video_draft"])
def test_a_stage_continues_from_shipped_weights(started, stage):
    """The recipe names them; every weight is theirs, and the other entries of the stage stay as they are."""
    first, later = RECIPE[stage], load_recipe(continued=True)[stage]
    name = {"video": "seedling_video", "video_draft": "seedling_video_draft"}[stage]
    assert later["start"] == name != first["start"]
    assert (stage_of(stage, first), stage_of(stage, later)) == (stage, f"{stage}_continued")
    assert {key: later[key] for key in later if key not in first["continued"]} == {
        key: first[key] for key in first if key not in first["continued"]
    }
    model = new_model(name) if stage == "video" else video_draft_from(started, [0, 1, 7], name)
    shipped = load_exported(video_weights_dir(name)).state_dict()
    for key, value in model.state_dict().items():
        assert torch.equal(value, shipped[key])
    assert not any(weight.requires_grad for weight in tower_of(model).parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("video --device tpu", "invalid choice: 'tpu'"),
        (
            "tower --device cuda",
            "--device cuda is of the stages video, video_top, video_draft, not tower",
        ),
        ("video --device cuda", "--device cuda: torch finds no such device here"),
        ("video_top --out nowhere", "video_top goes on from nowhere/video.pt: run video first"),
        (
            "video_draft --continued --out nowhere",
            "video_draft goes on from nowhere/video.pt: run video first",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_at_once(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        main(arguments.split())
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_start_needs_room_for_the_clocks(started):
    with pytest.raises(KeyError):
        start_from_seedling(
            build_video_model("seedling_video_draft"), load_exported(weights_dir("seedling"))
        )
