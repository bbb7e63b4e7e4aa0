"""Questions and answers on the embedded model: equal to those of run.py, with error lines for Python callers."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from PIL import Image

import espalier
from espalier.harness.api.argument_errors import in_python_terms
from espalier.harness.cost.budget import Budget
from espalier.harness.engine.session import Session
from espalier.harness.paths import ROOT
from espalier.harness.seedling.scene_benchmarks import sample_scene, samples
from espalier.methods.base import Plan, Site, TokenReducer, View
from espalier.methods.fastv import FastV
from tests.families.qwen import clip
from tests.family_runs import saved
from tests.refused import refused
from tests.tiny import picture


@dataclass(frozen=True)
class Middle(TokenReducer):
    """Keeps tokens near the middle; registered nowhere."""

    power: float = 2.0

    def sites(self, depth: int) -> tuple[Site, ...]:
        return (Site("prefix"),)

    def plan(self, view: View, keep: int) -> Plan:
        away = (view.grid[..., 2:].float() - 5.5).abs().pow(self.power).sum(-1)
        return Plan(away.argsort(dim=1, stable=True)[:, :keep].sort(dim=1).values)


@pytest.fixture(scope="module")
def questions():
    return [
        (sample_scene(item).to_pil(), item["question"])
        for item in samples("seedling_vqa", "test", 0, 0, 5)
    ]


@pytest.mark.parametrize(
    ("method", "params"), [("fastv", {}), ("fastv", {"K": 3}), ("divprune", {}), ("fitprune", {})]
)
def test_an_answer_is_what_the_engine_says(model, questions, method, params):
    with espalier.apply(model, method, ratio=0.5, **params) as pruned:
        answer = pruned.ask(*questions[0], max_new_tokens=6)
        built = pruned._checked.method
    assert all(getattr(built, name) == value for name, value in params.items())
    with model.open_adapter() as adapter, Session(adapter, built, Budget("kept", 0.5)) as session:
        content = [
            {"type": "image", "image": questions[0][0]},
            {"type": "text", "text": questions[0][1]},
        ]
        inputs = adapter.encode([[{"role": "user", "content": content}]])
        generated = session.generate(inputs, max_new_tokens=6, do_sample=False)
        text = adapter.decode(generated.ids)[0]
    (record,) = generated.records
    assert (answer.text, answer.kept_indices) == (text, tuple(record.origin.tolist()))
    assert (answer.kept, answer.visual, answer.tokens) == (
        record.entering[-1],
        144,
        record.new_tokens,
    )
    assert 0 < answer.flops.share == answer.flops.exact / answer.flops.full < 1
    assert answer.ratio == pytest.approx(0.5, abs=0.01)
    assert {"vision", "select", "prefill", "decode"} <= set(answer.times_ms)


def test_nothing_removed_costs_everything(model, questions):
    with espalier.apply(model, "none", ratio=0.9) as plain:
        answer = plain.ask(*questions[0])
    assert (answer.kept, answer.ratio, answer.flops.share, answer.decoding) == (144, 0.0, 1.0, None)


def test_batches_and_lists_answer_as_single_questions(model, questions):
    with espalier.apply(model, "random", ratio=0.5, seed=3) as pruned:
        single = [pruned.ask(*item, max_new_tokens=5) for item in questions]
        many = pruned.ask_many(questions, max_new_tokens=5, batch_size=2)
        image = questions[0][0]
        listed = pruned.ask(image, [question for _, question in questions], max_new_tokens=5)
        repeated = [pruned.ask(image, question, max_new_tokens=5) for _, question in questions]
    assert [(item.text, item.kept_indices) for item in many] == [
        (item.text, item.kept_indices) for item in single
    ]
    assert [item.text for item in listed] == [item.text for item in repeated]
    assert [item.question for item in listed] == [question for _, question in questions]


def test_pictures_come_as_files_arrays_and_chats(model, questions, tmp_path):
    image, question = questions[0]
    image.save(tmp_path / "scene.png")
    chat = [
        {
            "role": "user",
            "content": [
                {"type": "image", "path": tmp_path / "scene.png"},
                {"type": "text", "text": question},
            ],
        }
    ]
    with espalier.apply(model, "divprune", ratio=0.75) as pruned:
        ways = [
            image,
            str(tmp_path / "scene.png"),
            tmp_path / "scene.png",
            np.asarray(image),
            (tmp_path / "scene.png").read_bytes(),
            torch.from_numpy(np.array(image)),
            torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255,
            np.asarray(image) / 255,
            [image],
        ]
        answers = [pruned.ask(item, question) for item in ways] + [
            pruned.ask(chat),
            *pruned.ask_many([chat]),
        ]
        nothing = pruned.ask(None, question, max_new_tokens=2)
        turns = pruned.ask(
            [*chat, {"role": "assistant", "content": "yes"}, {"role": "user", "content": question}],
            max_new_tokens=2,
        )
    assert {(item.text, item.kept_indices) for item in answers} == {
        (answers[0].text, answers[0].kept_indices)
    }
    assert (nothing.visual, nothing.kept, nothing.ratio) == (0, 0, 0.0)
    assert turns.visual == 144
    assert "question without pictures" in refused(nothing.show)


def test_generation_settings_reach_the_model(model, questions):
    with espalier.apply(model, "none") as plain:
        assert plain.ask(*questions[0], max_new_tokens=1).tokens == 1
        drawn = [
            plain.ask(*questions[0], do_sample=True, temperature=9.0, max_new_tokens=8).text
            for _ in range(2)
        ]
        assert drawn[0] == drawn[1] != plain.ask(*questions[0], max_new_tokens=8).text
        word = plain.ask(*questions[0]).text
        assert plain.ask(*questions[0], until=[word[1:]]).text == word[0]


def test_an_own_method_that_is_registered_nowhere(model, questions):
    with espalier.apply(model, Middle(power=1.0), ratio=0.9) as pruned:
        answer = pruned.ask(*questions[0])
    rows = {index // 12 for index in answer.kept_indices}
    assert answer.kept == 14
    assert rows <= {3, 4, 5, 6, 7, 8}
    assert "Middle(power=1.0) on seedling" in repr(pruned)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("draft", [None, "seedling_draft", "loaded", "folder"])
def test_a_draft_guesses_and_the_answer_is_the_targets_own(model, questions, draft):
    draft_model = draft
    if draft == "loaded":
        draft_model = espalier.load("seedling_draft", device="cpu")
    if draft == "folder":
        draft_model = ROOT / "harness" / "seedling" / "weights" / "seedling_draft"
    with espalier.apply(model, "none") as plain:
        expected = [item.text for item in plain.ask_many(questions[:2])]
    with espalier.apply(model, "specvlm_sd", ratio=0.5, draft=draft_model, compare=True) as fast:
        answers = fast.ask_many(questions[:2])
    assert [item.text for item in answers] == expected
    for item in answers:
        assert (item.kept, item.decoding.draft_visual, item.ratio) == (144, 72, 0.5)
        assert 0 <= item.decoding.accepted <= 1
        assert item.decoding.tokens_per_target_forward >= 1
        assert item.decoding.speedup > 0
        assert item.flops.share == 1.0


@pytest.mark.slow
def test_a_borrowed_draft_works_beside_its_target(questions):
    from transformers import AutoProcessor, LlavaForConditionalGeneration

    weights = ROOT / "harness" / "seedling" / "weights"
    pair = [
        espalier.wrap(
            LlavaForConditionalGeneration.from_pretrained(folder),
            AutoProcessor.from_pretrained(folder),
        )
        for folder in (weights / "seedling", weights / "seedling_draft")
    ]
    with espalier.apply(pair[0], "pearl", draft=pair[1]) as fast:
        assert fast._checked.spec.engine.transport == "threads"
        answers = fast.ask(*questions[0])
    with espalier.apply(pair[0], "none") as plain:
        assert plain.ask(*questions[0]).text == answers.text
    assert "draft=None: model=llava names no draft; valid: a name of conf/model" in refused(
        espalier.apply, pair[0], "pearl"
    )


def test_a_video_is_a_file_or_frames():
    model = espalier.load(
        saved("qwen2_vl_video"), dtype="float32", device="cpu", video={"frames": 4}
    )
    path = clip(12, 56, 28)["video"]
    with espalier.apply(model, "uniform", ratio=0.5) as pruned:
        from_file = pruned.ask(path, "w1", max_new_tokens=2)
        frames = [picture(number, 28, 56) for number in range(6)]
        from_frames = pruned.ask(espalier.video(frames, fps=2), "w1", max_new_tokens=2)
        array = pruned.ask(np.stack([np.asarray(item) for item in frames]), "w1", max_new_tokens=2)
        images = pruned.ask(frames[:2], "w1", max_new_tokens=2)
    assert (from_file.visual, from_frames.visual, array.visual) == (16, 24, 24)
    assert [item.name for item in from_frames._visible.images] == ["0.0 s", "1.0 s", "2.0 s"]
    assert [item.name for item in images._visible.images] == ["picture 1", "picture 2"]


def test_a_picture_of_what_was_kept(model, questions, tmp_path):
    with espalier.apply(model, "fastv", ratio=0.9) as pruned:
        answer = pruned.ask(*questions[0])
    figure = answer.show(tmp_path / "kept.png")
    shown = np.asarray(Image.open(tmp_path / "kept.png").convert("RGB"))
    assert figure._repr_png_()[:8] == b"\x89PNG\r\n\x1a\n"
    assert min(shown.shape[:2]) > 200
    drawn = figure.axes[0].images[0].get_array()
    original = np.asarray(questions[0][0], dtype=float) / 255
    side = drawn.shape[0] // 12
    for token in range(144):
        row, column = divmod(token, 12)
        cell = drawn[row * side : (row + 1) * side, column * side : (column + 1) * side].mean(
            (0, 1)
        )
        pixels = original[row * 8 : row * 8 + 8, column * 8 : column * 8 + 8].mean((0, 1))
        if token in answer.kept_indices:
            assert np.allclose(cell, pixels, atol=0.02)
        else:
            assert cell.min() > 0.71
            assert np.ptp(cell) < 1e-5
    with pytest.raises(espalier.UserError, match=r"show\(path='.*'\) cannot be written"):
        answer.show(tmp_path / "nowhere" / "kept.png")
    assert "cannot be written" in refused(answer.show, tmp_path / "kept.word")


REFUSED = {
    "method='fastvv' is unknown (did you mean fastv?)": lambda m: espalier.apply(m, "fastvv"),
    "ratio=None: method='fastv' removes visual tokens; valid: ratio=": lambda m: espalier.apply(
        m, "fastv"
    ),
    "K=0": lambda m: espalier.apply(m, "fastv", K=0),
    "K='two' must be an integer": lambda m: espalier.apply(m, "fastv", K="two"),
    "K=17": lambda m: espalier.apply(m, "fastv", K=17),
    "ratio=1.5 must be a number in [0, 1)": lambda m: espalier.apply(m, "fastv", ratio=1.5),
    "budget='half' is unknown": lambda m: espalier.apply(m, "fastv", budget="half"),
    "positions='new' is unknown": lambda m: espalier.apply(m, "fastv", positions="new"),
    "positions='renumbered' closes": lambda m: espalier.apply(
        m, "vanilla_sd", positions="renumbered"
    ),
    ": method='fastv' takes no draft model; valid: without draft": lambda m: espalier.apply(
        m, "fastv", draft="seedling_draft"
    ),
    "transport='threads': method='fastv' takes no draft": lambda m: espalier.apply(
        m, "fastv", ratio=0.5, transport="threads"
    ),
    "compare=True: method='divprune' is no speculative": lambda m: espalier.apply(
        m, "divprune", ratio=0.5, compare=True
    ),
    "cache_ratio=0.75 is the share that a compressor evicts": lambda m: espalier.apply(
        m, "fastv", ratio=0.5, cache_ratio=0.75
    ),
    "cache_ratio=1 must be a number in [0, 1): the share of cache": lambda m: espalier.apply(
        m, "fastv", ratio=0.5, compressor="h2o", cache_ratio=1
    ),
    "compressor is a FastV; valid: a name, or an instance of a CacheCompressor": (
        lambda m: espalier.apply(m, "fastv", ratio=0.5, compressor=FastV())
    ),
    "variant='paper': the method is an object with settings of its own": (
        lambda m: espalier.apply(m, FastV(), ratio=0.5, variant="paper")
    ),
    "draft='seedling': method='fastv' takes no draft model": lambda m: espalier.apply(
        m, "fastv", ratio=0.5, draft=m
    ),
    "budget='3' is unknown": lambda m: espalier.apply(m, "fastv", ratio=0.5, budget=3),
    "draft=3 must be": lambda m: espalier.apply(m, "pearl", draft=3),
    "cache_ratio=0.7 is the share that a compressor evicts": lambda m: espalier.apply(
        m, "h2o", ratio=0.5, cache_ratio=0.7
    ),
    "draft='seedling_drat' is unknown": lambda m: espalier.apply(m, "pearl", draft="seedling_drat"),
    "K: an instance of a method": lambda m: espalier.apply(m, FastV(), K=3),
    "method=FastV is a class; valid: an instance, FastV(...)": lambda m: espalier.apply(m, FastV),
    "method is a int; valid: a name of conf/method": lambda m: espalier.apply(m, 3),
    "model is a str; valid: the result of espalier.load": lambda m: espalier.apply(
        "seedling", "fastv"
    ),
    "seed=-1": lambda m: espalier.apply(m, "fastv", seed=-1),
    "name='seedlin' is unknown (did you mean seedling?)": lambda m: espalier.load("seedlin"),
    "setting='dtpye' is unknown (did you mean dtype?)": lambda m: espalier.load(
        "seedling", dtpye="float32"
    ),
    "dtype='float8' is unknown": lambda m: espalier.load("seedling", dtype="float8"),
    "valid: path=<directory>, or offline=False and HF_HUB_OFFLINE unset to": lambda m: (
        espalier.load("llava15_7b", dtype="float32", offline=True)
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_work_is_one_line_with_the_argument(model, line):
    refusal = refused(REFUSED[line], model)
    assert line in refusal
    assert "method.params" not in refusal
    assert "engine." not in refusal


UNANSWERED = {
    "image 'no.png' does not exist": lambda p, i: p.ask("no.png", "w"),
    "image of shape (3, 3, 3) and int64": lambda p, i: p.ask(np.zeros((3, 3, 3), int), "w"),
    "values from 0 to 7, such as pixels": lambda p, i: p.ask(np.full((3, 3, 3), 7.0), "w"),
    "image=object cannot be opened; valid: a PIL image": lambda p, i: p.ask(object(), "w"),
    "question=None must be a text": lambda p, i: p.ask(i),
    "question 1: image 'no.png'": lambda p, i: p.ask_many(
        [(i, "is there a star ?"), ("no.png", "w")]
    ),
    "question 0: 'w'; valid: (media, question)": lambda p, i: p.ask_many(["w"]),
    "questions=None; valid: a list of": lambda p, i: p.ask_many(None),
    "questions=7; valid: a list of": lambda p, i: p.ask_many(7),
    "role='5' is unknown": lambda p, i: p.ask([{"role": 5, "content": "w"}]),
    "max_pixels=9 of a picture": lambda p, i: p.ask(
        [{"role": "user", "content": [{"type": "image", "image": i, "max_pixels": 9}]}]
    ),
    "top_p=0.5 changes nothing without do_sample=True": lambda p, i: p.ask(i, "w", top_p=0.5),
    "length_penalty=2.0 changes nothing": lambda p, i: p.ask(i, "w", length_penalty=2.0),
    "max_new_tokens=0 must be an integer": lambda p, i: p.ask(i, "w", max_new_tokens=0),
    "temprature": lambda p, i: p.ask(i, "w", temprature=1.0),
    "use_cache=False is not supported": lambda p, i: p.ask(i, "w", use_cache=False),
    "takes images only": lambda p, i: p.ask(espalier.video([i, i]), "w"),
    "turn 0 of the chat holds": lambda p, i: p.ask(
        [{"role": "user", "content": [{"type": "sound"}]}]
    ),
    "a chat holds its question": lambda p, i: p.ask([{"role": "user", "content": "w"}], "w"),
    "batch_size=0": lambda p, i: p.ask(i, "w", batch_size=0),
}


@pytest.mark.sampled
@pytest.mark.parametrize("line", UNANSWERED)
def test_questions_that_cannot_be_answered(model, questions, line):
    with espalier.apply(model, "fastv", ratio=0.75) as pruned:
        refusal = refused(UNANSWERED[line], pruned, questions[0][0])
    assert line in refusal
    assert "chat 0 of the batch" not in refusal


def test_outside_the_with_nothing_is_answered(model, questions):
    pruned = espalier.apply(model, "fastv", ratio=0.75)
    assert "inside `with espalier.apply" in refused(pruned.ask, *questions[0])
    with pruned, pytest.raises(RuntimeError, match="open already"):
        pruned.__enter__()
    with pruned:
        assert pruned.ask(*questions[0]).kept == 36


def test_lines_keep_commands_and_file_names():
    line = "model.path=null is true; run: python -m espalier calibrate model.path=/a/true.bin model.weights=random"
    assert in_python_terms(line) == (
        "path=None is True; run: python -m espalier calibrate model.path=/a/true.bin model.weights=random"
    )
    assert (
        in_python_terms("/m/model.safetensors and model='x' of null.png")
        == "/m/model.safetensors and model='x' of null.png"
    )
    assert (
        in_python_terms("method.draft_options.path=1, method.draft=x")
        == "draft_options.path=1, draft=x"
    )
    assert in_python_terms("chat 1 of the batch: no", 9, 4) == "question 5: no"


@pytest.mark.slow
def test_the_import_is_quick_and_lmms_eval_stays_away(tmp_path):
    code = (
        "import sys, time; start = time.process_time(); import espalier; took = time.process_time() - start\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules and 'hydra' not in sys.modules\n"
        "assert took < 0.3, took\n"
        "assert {'load', 'wrap', 'apply', 'video', 'UserError'} <= set(dir(espalier))\n"
        "model = espalier.load('seedling', device='cpu')\n"
        "from PIL import Image\n"
        "with espalier.apply(model, 'divprune', ratio=0.9) as pruned:\n"
        "    answer = pruned.ask(Image.new('RGB', (96, 96)), 'is there a star ?', max_new_tokens=2)\n"
        "assert answer.kept == 14 and answer.show()\n"
        "assert not [name for name in sys.modules if name.startswith('lmms_eval')]\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "print('fine')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "fine\n", done.stderr


def test_there_is_no_other_name():
    with pytest.raises(AttributeError, match="no attribute 'prune'"):
        _ = espalier.prune
