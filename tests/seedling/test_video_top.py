"""Training only the last layers of the video model: heads for times, frozen parts, resuming and export."""

from __future__ import annotations

import pytest
import torch

from lab.training import video_gate, video_stage
from lab.training.__main__ import main
from lab.training.stage_runtime import (
    Worker,
    load_checkpoint,
    load_recipe,
    save_checkpoint,
)
from lab.training.video_model import (
    VIDEO_LAYERS,
    build_video_model,
)
from lab.training.video_stage import prepared, train_stage, video_target
from lab.training.video_top_stage import train_video_top

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
