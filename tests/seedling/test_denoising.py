"""Training by masked denoising: attention visibility, masks, loss, sampling, and resuming from a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from espalier.harness.seedling.scene_questions import FAMILIES, SceneQuestion, questions_for
from espalier.harness.seedling.scenes import Scenes
from espalier.harness.seedling.vocabulary import ASSISTANT, EOS, MASK, PAD, VOCABULARY, encode
from lab.training import denoising_stage
from lab.training.denoising_answers import Sampler, reveals
from lab.training.denoising_stage import (
    train_denoising,
)
from lab.training.dialogue_packs import IGNORE, PREFIX, TEXT_START
from lab.training.noised_batch import (
    Noised,
    denoising_loss,
    noise,
    text_hidden,
    use_denoising_attention,
    without_mask,
)
from lab.training.release_stage import export_model, load_exported, merged_log
from lab.training.seedling_model import DENOISER, build_model
from lab.training.stage_runtime import Worker, load_checkpoint, load_recipe

PLAN = load_recipe()["denoising"]
VISUAL = 10


@pytest.fixture(scope="module")
def rows() -> list[list[SceneQuestion]]:
    scenes = Scenes()
    counts = dict.fromkeys(FAMILIES, 1)
    return [questions_for(scenes.scene("val", 0, number), counts) for number in range(2)]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = build_model("seedling_draft", init_range=0.1).eval()
    use_denoising_attention(model.model.language_model)
    return model


def a_part_of_the_image(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Visual tokens ``(B, 10, 192)`` of scattered places, and their position ids."""
    torch.manual_seed(1)
    places = torch.arange(3, 3 + 5 * VISUAL, 5).expand(rows, -1)
    return torch.randn(rows, VISUAL, 192) * 0.1, places


def seen(query: str, key: str, opened: bool, alone: bool) -> bool:
    """Whether one part of a dialogue sees another, said once more in words."""
    if query == "image":
        return key == "image" or (alone and (key == "prompt" or opened))
    if query == "prompt":
        return key != "answer" or opened
    return True


def by_itself(model, visual, places, tokens, roles: list[str], opened: bool, alone: bool):
    """Hidden states of one dialogue: the library's own attention under a mask written cell by cell."""
    language = model.model.language_model
    parts = ["image"] * (len(PREFIX) + len(visual)) + roles
    cells = [[seen(query, key, opened, alone) for key in parts] for query in parts]
    start, words = (language.embed_tokens(ids) for ids in (torch.tensor(PREFIX), tokens))
    text_places = torch.arange(TEXT_START, TEXT_START + len(tokens))
    position_ids = torch.cat([torch.arange(len(PREFIX)), places, text_places])[None]
    mask = torch.where(torch.tensor(cells), 0.0, float("-inf"))[None, None]
    custom = language.config._attn_implementation
    language.config._attn_implementation = "eager"
    hidden = language(
        inputs_embeds=torch.cat([start, visual, words])[None],
        attention_mask=mask,
        position_ids=position_ids,
    ).last_hidden_state[0]
    language.config._attn_implementation = custom
    return hidden[len(parts) - len(roles) :]


@torch.no_grad()
@pytest.mark.parametrize("alone", [False, True], ids=["packed", "alone"])
@pytest.mark.parametrize("opened", [0.0, 1.0], ids=["prefix", "full"])
def test_a_dialogue_sees_what_it_would_see_by_itself(model, rows, alone, opened):
    """Packed dialogues, and rows padded to the longest, equal one forward pass a dialogue."""
    plan = {**PLAN, "opened": opened}
    laid = [[question] for question in rows[0]] if alone else rows
    batch = noise(laid, plan, np.random.default_rng(0))
    visual, places = a_part_of_the_image(len(laid))
    visible = batch.visible(len(PREFIX) + VISUAL, alone)
    hidden = text_hidden(model, visual, batch.tokens, batch.positions, visible, places)
    for line, row in enumerate(laid):
        for number in range(len(row)):
            in_dialogue = batch.segments[line] == number
            roles = [
                "answer" if is_answer else "prompt"
                for is_answer in batch.answers[line][in_dialogue]
            ]
            tokens = batch.tokens[line][in_dialogue]
            wanted = by_itself(
                model, visual[line], places[line], tokens, roles, bool(opened), alone
            )
            torch.testing.assert_close(hidden[line][in_dialogue], wanted, atol=1e-4, rtol=1e-4)


def test_masks_hide_answers_and_nothing_else(rows):
    batch = noise(rows, PLAN, np.random.default_rng(3))
    masked = batch.tokens == MASK
    assert masked.any()
    assert not (masked & ~batch.answers).any()
    assert ((batch.targets != IGNORE) == masked).all()
    clean = torch.where(masked, batch.targets, batch.tokens)
    for line, row in enumerate(rows):
        for number, question in enumerate(row):
            in_dialogue = batch.segments[line] == number
            words, answer = clean[line][in_dialogue].tolist(), encode(question.answer)
            silent = [*encode(question.text), ASSISTANT]
            room = len(words) - len(silent)
            assert room in PLAN["rooms"][question.family]
            assert words == [*silent, *answer, *[EOS] * (room - len(answer))]
            places = torch.arange(TEXT_START, TEXT_START + len(words))
            assert batch.positions[line][in_dialogue].tolist() == places.tolist()
            assert len(set(batch.shares[line][in_dialogue & batch.answers[line]].tolist())) == 1
            weight = PLAN["weights"][question.family]
            ends = [weight * PLAN["weights"]["end"]] * (room - len(answer))
            wanted = [0.0] * len(silent) + [weight] * len(answer) + ends
            assert batch.weights[line][in_dialogue].tolist() == pytest.approx(wanted)
    padding = batch.segments < 0
    assert (batch.tokens[padding] == PAD).all()
    assert (batch.weights[padding] == 0).all()


def test_loss_divides_by_the_share_of_masks():
    """Two answers of known logits, added up place by place; a share below the clip counts as the clip."""
    targets = torch.tensor([[IGNORE, 5, IGNORE, 7], [9, IGNORE, IGNORE, IGNORE]])
    batch = Noised(
        tokens=targets,
        targets=targets,
        weights=torch.tensor([[0.0, 2.0, 3.0, 0.5], [1.5, 0.0, 0.0, 0.0]]),
        shares=torch.tensor([[1.0, 0.8, 0.8, 0.8], [0.01, 1.0, 1.0, 1.0]]),
        positions=targets,
        segments=targets,
        answers=targets > 0,
        opened=targets > 0,
    )
    logits = torch.randn(3, len(VOCABULARY), generator=torch.Generator().manual_seed(0))
    wanted = 0.0
    for row, (target, weight, share) in enumerate([(5, 2.0, 0.8), (7, 0.5, 0.8), (9, 1.5, 0.1)]):
        rest_logits = [float(x) for token, x in enumerate(logits[row]) if token != MASK]
        log_share = float(logits[row, target]) - float(np.logaddexp.reduce(rest_logits))
        wanted -= log_share * weight / share
    assert denoising_loss(logits, batch, clip=0.1).item() == pytest.approx(wanted, rel=1e-5)


def test_the_mask_is_never_an_answer():
    logits = torch.zeros(2, len(VOCABULARY))
    logits[:, MASK], logits[:, 8] = 9.0, 1.0
    assert without_mask(logits).argmax(-1).tolist() == [8, 8]


def test_reveals_add_up():
    assert (reveals(8, 4), reveals(7, 3)) == ([2, 2, 2, 2], [3, 2, 2])


@torch.no_grad()
@pytest.mark.parametrize("opened", [False, True], ids=["prefix", "full"])
def test_sampler_unmasks_the_surest_places_first(model, opened):
    """Answers of a batch are those of a loop over single questions with the library's attention."""
    questions = torch.tensor([[*encode(f"is there a digit {n} ?"), ASSISTANT] for n in (3, 8)])
    visual, places = a_part_of_the_image(2)
    answers = Sampler(0.5, opened=opened).decode(model, visual, places, questions, 5)
    for row, question in enumerate(questions):
        tokens, start = torch.cat([question, torch.full((5,), MASK)]), len(question)
        roles = ["prompt"] * start + ["answer"] * 5
        for count in (3, 2):
            hidden = by_itself(model, visual[row], places[row], tokens, roles, opened, alone=True)
            logits = model.lm_head(hidden)
            logits[:, MASK] = float("-inf")
            shares = logits.softmax(-1)
            still = [place for place in range(start, start + 5) if tokens[place] == MASK]
            for place in sorted(still, key=lambda place: -float(shares[place].max()))[:count]:
                tokens[place] = shares[place].argmax()
        answer = tokens[start:].tolist()
        answer = answer[: answer.index(EOS)] if EOS in answer else answer
        assert answers[row] == " ".join(VOCABULARY[token] for token in answer)


@pytest.mark.slow
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(tmp_path: Path, monkeypatch):
    """Stopped in the packed part and continued through the switch to single rows: the same bits."""
    small = {
        "steps": 3,
        "packed_until": 2,
        "alone_every": 9,
        "warmup": 1,
        "batch": 1,
        "save_every": 2,
    }
    mix = {
        "mixes": [{"attr": 1, "exist": 1}],
        "validate_every": 2,
        "alone": {"short": 1, "captions": 0},
    }
    recipe = {"seed": 0, "denoising": {**PLAN, **small, **mix}}
    monkeypatch.setattr(denoising_stage, "validation", lambda *_: {})
    train_denoising(Worker(0, 1), recipe, tmp_path / "straight")

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as stopped:
        stopped.setattr(denoising_stage, "validation", stop)
        with pytest.raises(KeyboardInterrupt):
            train_denoising(Worker(0, 1), recipe, tmp_path / "halted")
    train_denoising(Worker(0, 1), recipe, tmp_path / "halted")
    straight, halted = (
        load_checkpoint(tmp_path / name / "denoising.pt") for name in ("straight", "halted")
    )
    assert straight["step"] == halted["step"] == 3
    for kind in ("model", "average"):
        for key, value in straight[kind].items():
            assert torch.equal(value, halted[kind][key]), key
    changed = [
        k for k, v in straight["model"].items() if not torch.equal(v, straight["average"][k])
    ]
    assert changed
    assert not any("vision_tower" in key for key in changed)


def test_exported_config_names_the_mask(tmp_path: Path):
    export_model(DENOISER, build_model(DENOISER).state_dict(), tmp_path, {"mask_token_id": MASK})
    assert json.loads((tmp_path / "config.json").read_text())["mask_token_id"] == MASK
    assert load_exported(tmp_path).config.mask_token_id == MASK


def test_a_new_log_replaces_its_own_stages_only(tmp_path: Path):
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    old.write_text('{"stage":"tower","step":1}\n{"stage":"denoising","step":1}\n')
    new.write_text('{"stage":"denoising","step":2}\n')
    assert merged_log(old, new) == '{"stage":"tower","step":1}\n{"stage":"denoising","step":2}\n'
    assert merged_log(tmp_path / "none.jsonl", new) == new.read_text()
