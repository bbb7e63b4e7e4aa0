"""Training only the last layers of the video model: heads for times, frozen parts, resuming and export."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from espalier.harness.seedling.video.events import WORDS
from lab.training import video_gate, video_stage
from lab.training.__main__ import main
from lab.training.attention_loss import evidence, gaze_loss, of_times, time_heads_loss
from lab.training.clip_features import see, show, visual_tokens
from lab.training.release_stage import load_exported
from lab.training.stage_runtime import (
    TrainingLog,
    Worker,
    load_checkpoint,
    load_recipe,
    save_checkpoint,
)
from lab.training.tower_stage import tower_of
from lab.training.video_drills import Talk, talks_about
from lab.training.video_model import (
    FRAME_TOKENS,
    VIDEO_LAYERS,
    build_video_model,
    video_weights_dir,
)
from lab.training.video_packs import pack_talks, video_hidden
from lab.training.video_stage import prepared, train_stage, video_target
from lab.training.video_top_stage import fit_time_heads, share_head, time_heads_of, train_video_top

FRAMES = 16
ASKED = {"what": 2, "when": 2, "order": 2, "digits": 1, "caption": 1}
RECIPE = load_recipe(continued=True)
TINY = {
    **RECIPE["video"],
    "validation": {"clips": {8: 1}, "questions": {"what": 1}, "drills": 1},
}
TOP = {
    **RECIPE["video_top"],
    "kept": 0.25,
    "layers": [1],
    "steps": 4,
    "parts": 2,
    "block": 2,
    "looking_back": {"layer": 1, "heads": 1, "digit_heads": 1},
    "gaze": {"layers": [1], "heads": 2},
    "time_heads": {
        "told": {"families": ["caption"], "heads": {1: 2}},
        "asked": {"families": ["when", "order"], "heads": {1: 4}},
    },
    "phases": [{"until": 4, "frames": [8], "clips": 1, "whole": 0.0, "keep": [0.1, 0.2]}],
    "mixes": [ASKED],
    "drills": 0,
    "fit": {"clips": 2, "first_index": 5, "steps": 3, "parts": 1, "lr": 0.01, "log_every": 1},
    "log_every": 1,
    "save_every": 2,
    "validate_every": 4,
}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return prepared(build_video_model("seedling_video_draft")).eval()


@pytest.fixture
def lesson(model):
    """Two clips with all their tokens, what is asked about them, and where words look."""
    clips = [see(tower_of(model), "val", 0, index, FRAMES) for index in (1, 2)]
    shown_tokens = show(clips, FRAMES * FRAME_TOKENS, 0.0, np.random.default_rng(0))
    talks = [talks_about(clip.clip, 0, ASKED, 1) for clip in clips]
    packed = pack_talks(talks, dict.fromkeys([*ASKED, "drill", "end"], 1.0), shown_tokens)
    return talks, packed, shown_tokens, evidence(talks, packed, clips, shown_tokens)


@pytest.mark.parametrize("families", [["caption"], ["digits"], ["order", "when"]])
def test_rows_that_look_for_times_are_those_in_front_of_time_words(lesson, families):
    """All that have something to look at, of these families, with the tokens that they looked for before."""
    talks, packed, _, looks = lesson
    time_looks = of_times(looks, talks, packed, families)
    for line, items in enumerate(talks):
        every = dict(zip(looks.places[line].tolist(), looks.right(True, True)[line], strict=True))
        wanted = set()
        for place in looks.places[line][looks.worth[line] > 0].tolist():
            word = WORDS[packed.labels[line, place]]
            family = items[packed.segments[line, place]].family
            if family in families and word[0] == "t" and word[1:].isdigit():
                wanted.add(place)
        real = time_looks.worth[line] > 0
        assert wanted == set(time_looks.places[line][real].tolist())
        assert len(wanted) >= len([talk for talk in items if talk.family in families])
        for place, right in zip(
            time_looks.places[line][real].tolist(),
            time_looks.right(True, True)[line][real],
            strict=True,
        ):
            assert torch.equal(right, every[place])


def test_a_time_at_most_one_frame_behind_the_last_counts_more(model):
    """Of captions and digits, also behind what was told; nothing else changes."""
    shown_tokens = show(
        [see(tower_of(model), "val", 0, 1, FRAMES)], 100, 0.0, np.random.default_rng(0), 3
    )
    beginning, answer = (
        "at time t2 the disk leaves ;",
        "at time t3 the disk leaves ; at time t3 a disk ;",
    )
    talks = [
        Talk("caption", "tell all", answer, beginning=beginning),
        Talk("digits", "read all", "t4 7 t5 1 t7 2 t3 9 t4 5"),
        Talk("order", "which ?", "t1 t2 before"),
    ]
    weights = {"caption": 2.0, "digits": 1.0, "order": 1.0, "end": 0.5}
    plain, soon = (
        pack_talks([talks], family_weights, shown_tokens)
        for family_weights in (weights, weights | {"soon": 4.0})
    )
    changed = (plain.weights != soon.weights)[0]
    assert torch.equal(soon.weights[0][changed], torch.tensor([8.0, 8.0, 4.0, 4.0]))
    assert [WORDS[label] for label in soon.labels[0][changed]] == ["t6", "t6", "t8", "t7"]
    assert torch.equal(plain.labels, soon.labels)


@torch.no_grad()
def test_heads_for_times_are_asked_one_by_one(model, lesson):
    talks, packed, shown_tokens, looks = lesson
    read = video_hidden(model, visual_tokens(model, shown_tokens), shown_tokens, packed)
    plan = {
        "told": {"heads": {0: 3, 1: 2}},
        "asked": {"heads": {1: 5}},
    }
    caption_looks = of_times(looks, talks, packed, ["caption"])
    order_looks = of_times(looks, talks, packed, ["order"])
    loss = time_heads_loss(model, read, plan, {"told": caption_looks, "asked": order_looks})
    early = gaze_loss(model, read, 0, range(3, 4), caption_looks, of_words=True)
    late = gaze_loss(model, read, 1, range(2, 3), caption_looks, of_words=True, late=True)
    order_loss = gaze_loss(model, read, 1, range(5, 6), order_looks, of_words=True, late=True)
    torch.testing.assert_close(loss, (early + late) / 2 + order_loss)


@torch.no_grad()
def test_a_shared_head_gives_what_the_first_one_gave(model, lesson):
    """The overwritten heads, here without effect before, take a part of it over."""
    _, packed, shown_tokens, _ = lesson
    attention = model.model.language_model.layers[1].self_attn
    size = attention.head_dim
    for head in (2, 5):
        attention.o_proj.weight[:, head * size : (head + 1) * size] = 0
    visual = visual_tokens(model, shown_tokens)
    wanted = video_hidden(model, visual, shown_tokens, packed).words
    share_head(model, 1, [2, 5])
    states = video_hidden(model, visual, shown_tokens, packed).words
    torch.testing.assert_close(states, wanted, atol=1e-4, rtol=1e-4)
    columns = attention.o_proj.weight.unflatten(1, (-1, size)).norm(dim=(0, 2))
    assert columns[0] == columns[2] == columns[5] > 0


def test_heads_for_times_are_found_by_layer():
    plan = {"time_heads": {"a": {"heads": {6: 2, 7: 4}}, "b": {"heads": {7: 1}}}}
    assert time_heads_of(plan) == {6: [2], 7: [4, 1]}
    shipped = time_heads_of(RECIPE["video_top"])
    supervised = range(RECIPE["video"]["gaze"]["heads"])
    assert set(shipped) <= set(RECIPE["video_top"]["layers"])
    for heads in shipped.values():  # none of two kinds, none that is told something else
        assert len(set(heads)) == len(heads)
        assert not set(heads) & set(supervised)


def test_fitting_changes_queries_and_keys_of_heads_for_times_alone(model, tmp_path):
    """They find the times of the few clips better behind it."""
    fit = {"clips": 4, "first_index": 5, "steps": 60, "parts": 2, "lr": 0.02, "log_every": 20}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    log = TrainingLog(tmp_path / "log.jsonl", "video_top")
    fit_time_heads(Worker(0, 1), model, {**TINY, **TOP, "fit": fit}, 0, log)
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    losses = [json.loads(line)["times"] for line in lines]
    assert len(losses) == 3
    assert losses[-1] < 0.8 * losses[0]
    changed = {
        name: (value != before[name]).reshape(len(value), -1).any(1).nonzero()[:, 0]
        for name, value in model.state_dict().items()
        if not torch.equal(value, before[name])
    }
    attention = "model.language_model.layers.1.self_attn."
    parts = [f"{part}_proj.{kind}" for part in "qk" for kind in ("weight", "bias")]
    assert changed.keys() <= {attention + part for part in parts}
    assert {attention + "q_proj.weight", attention + "k_proj.weight"} <= changed.keys()
    size = model.model.language_model.layers[1].self_attn.head_dim
    for rows in changed.values():
        assert set((rows // size).tolist()) <= {2, 4}


@pytest.mark.slow
def test_only_the_last_layers_learn_and_go_on_where_they_stopped(tmp_path, monkeypatch):
    """Four steps at once, and two and two, end in the same weights; what is below stays bit for bit."""
    monkeypatch.setattr("lab.training.video_model.VIDEO_LAYERS", dict.fromkeys(VIDEO_LAYERS, 2))
    torch.manual_seed(0)
    started = build_video_model("seedling_video_draft").state_dict()
    recipe = {"seed": 0, "video": TINY, "video_top": TOP}
    for run in ("once", "twice"):
        save_checkpoint(tmp_path / run / "video.pt", {"model": started, "step": 9})
    train_video_top(Worker(0, 1), recipe, tmp_path / "once")

    def halted(path, state):
        save_checkpoint(path, state)
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(video_stage, "save_checkpoint", halted)
        with pytest.raises(KeyboardInterrupt):
            train_video_top(Worker(0, 1), recipe, tmp_path / "twice")
    train_video_top(Worker(0, 1), recipe, tmp_path / "twice")
    once, two = (load_checkpoint(tmp_path / run / "video_top.pt") for run in ("once", "twice"))
    assert once["step"] == two["step"] == 4
    for name, value in once["model"].items():
        torch.testing.assert_close(value, two["model"][name], atol=1e-5, rtol=1e-4)
        learns = "language_model.layers.1." in name
        assert torch.equal(value, started[name]) != learns, name


@pytest.mark.slow
def test_without_a_fit_the_stage_goes_on_from_what_is_there(tmp_path):
    """One step at a rate of 0 leaves every weight as shipped, or as the stage before left it in the run folder."""
    later = load_recipe(continued=True)["video_top"]
    assert (later["fit"], later["start"]) == (None, "seedling_video")
    changes = {"phases": TOP["phases"], "mixes": [{"what": 1}], "drills": 0, "block": 1, "parts": 1}
    plan = {**later, **changes, "lr": 0.0, "steps": 1, "validation": TINY["validation"]}
    train_video_top(Worker(0, 1), {"seed": 0, "video": TINY, "video_top": plan}, tmp_path)
    trained = load_checkpoint(tmp_path / "video_top.pt")["model"]
    shipped = load_exported(video_weights_dir("seedling_video")).state_dict()
    assert trained.keys() == shipped.keys()
    for name, value in trained.items():
        assert torch.equal(value, shipped[name]), name
    shifted = {name: value + 1 for name, value in shipped.items()}
    save_checkpoint(tmp_path / "other" / "video.pt", {"model": shifted, "step": 9})
    train_video_top(Worker(0, 1), {"seed": 0, "video": TINY, "video_top": plan}, tmp_path / "other")
    trained = load_checkpoint(tmp_path / "other" / "video_top.pt")["model"]
    for name, value in trained.items():
        assert torch.equal(value, shifted[name]), name


@pytest.mark.slow
def test_a_stage_ends_with_the_share_that_it_keeps_of_its_start(tmp_path):
    """Also where it went on from a checkpoint, and in the layers that learned alone."""
    small = {**TOP, "steps": 2, "save_every": 1, "validate_every": 2}
    torch.manual_seed(0)
    first = {k: v.clone() for k, v in build_video_model("seedling_video", 2).state_dict().items()}
    ends = {}
    for kept in (0.0, 0.25):
        for steps in (1, 2):
            model = build_video_model("seedling_video", 2)
            model.load_state_dict(first)
            prepared(model).requires_grad_(False)
            model.model.language_model.layers[1].requires_grad_(True)
            # A run that is cut off behind its first step has mixed nothing yet.
            plan = {
                **TINY,
                **small,
                "kept": kept if steps == 2 else 0.0,
                "steps": steps,
                "lr": 0.01,
            }
            train_stage(Worker(0, 1), model, plan, 0, tmp_path / str(kept), "video_top")
        ends[kept] = load_checkpoint(tmp_path / str(kept) / "video_top.pt")["model"]
    moved = 0
    for name, end in ends[0.0].items():
        mixed = 0.75 * end + 0.25 * first[name]
        moved += not torch.equal(end, first[name])
        torch.testing.assert_close(ends[0.25][name], mixed, rtol=1e-5, atol=1e-6)
    assert moved > 5


@pytest.mark.parametrize(
    ("command", "existing"),
    [("video_top --continued", None), ("video_draft", "video_top.pt"), ("video_draft", "video.pt")],
)
def test_stages_begin_with_what_is_there(command, existing, tmp_path, monkeypatch):
    if existing:
        (tmp_path / existing).touch()
    run = []
    monkeypatch.setattr("lab.training.__main__.run_stage", lambda stage, options: run.append(stage))
    main([*command.split(), "--out", str(tmp_path)])
    assert run == command.split()[:1]


def test_what_the_last_stage_wrote_is_taught_and_exported(tmp_path, monkeypatch):
    saved = {}
    monkeypatch.setattr("lab.training.video_model.VIDEO_LAYERS", dict.fromkeys(VIDEO_LAYERS, 2))
    monkeypatch.setattr(
        video_gate, "save_video_model", lambda model, path: saved.update({path.name: model})
    )
    monkeypatch.setattr(video_gate, "record_sums", lambda: None)
    monkeypatch.setattr(video_gate, "LOG", tmp_path / "kept.jsonl")
    (tmp_path / "log.jsonl").write_text('{"stage":"video_top"}\n')
    with pytest.raises(FileNotFoundError, match="run the video stage first"):
        video_target(tmp_path)
    torch.manual_seed(0)
    steps = {"video.pt": "video", "video_top.pt": "video_top"}
    bias = "model.language_model.layers.0.self_attn.q_proj.bias"
    for number, (file, stage) in enumerate(steps.items(), start=1):
        state = build_video_model("seedling_video_draft").state_dict()
        state[bias] = torch.full_like(state[bias], number)
        save_checkpoint(tmp_path / file, {"model": state, "step": RECIPE[stage]["steps"]})
        assert (video_target(tmp_path).state_dict()[bias] == number).all()
        video_gate.export_video(RECIPE, tmp_path)
        assert saved.keys() == {"seedling_video"}
        assert (saved["seedling_video"].state_dict()[bias] == number).all()
    assert (video_target(tmp_path, ["video.pt"]).state_dict()[bias] == 1).all()
