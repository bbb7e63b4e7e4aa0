"""The prompt of every family, letter by letter: the strings that the authors' own evaluations wrote.

The frames are those of the conversation classes of LLaVA, LLaVA-NeXT and InternVL, of Qwen's README and of
DeepSeek-OCR's release; a family has the same prompt with a checkpoint and with random weights.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

import run
from harness.adapters.base import load_adapter
from harness.config.compose import compose_section
from harness.errors import UserError
from harness.paths import ROOT
from tests.families import FAMILIES
from tests.families.onevision import video
from tests.family_runs import Tiny, saved
from tests.tiny import load_tiny, picture

VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
    "detailed, and polite answers to the user's questions. USER: {m}{t} ASSISTANT:"
)
QWEN_1_5 = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n{m}{t}<|im_end|>\n<|im_start|>assistant\n"
)
QWEN3 = "<|im_start|>user\n{m}{t}<|im_end|>\n<|im_start|>assistant\n"
INTERNVL2 = (
    "<|im_start|>system\n你是由上海人工智能实验室联合商汤科技开发的书生多模态大模型，英文名叫InternVL, "
    "是一个有用无害的人工智能助手。<|im_end|><|im_start|>user\n{m}{t}<|im_end|><|im_start|>assistant\n"
)
INTERNVL2_4B = (
    " <|system|>\n你是由上海人工智能实验室联合商汤科技开发的书生多模态大模型，英文名叫InternVL, "
    "是一个有用无害的人工智能助手。<|end|><|user|>\n{m}{t}<|end|><|assistant|>\n"
)
INTERNVL2_5 = (
    "<|im_start|>system\n你是书生·万象，英文名是InternVL，是由上海人工智能实验室、清华大学及多家合作单位联合开发的"
    "多模态大语言模型。<|im_end|>\n<|im_start|>user\n{m}{t}<|im_end|>\n<|im_start|>assistant\n"
)
DEEPSEEK_OCR = "<s>{m}{t}"

SEEN = "<|vision_start|><|image_pad|><|vision_end|>"
FILM = "<|vision_start|><|video_pad|><|vision_end|>"
CELLS = "<IMG_CONTEXT>"

#: Family, frame's name (None: the family's), frame, and media: one picture, two pictures, a video (None: takes none).
GOLDEN = [
    ("llava", None, VICUNA, "<image>\n", "<image> <image>\n", None),
    ("llava_next", None, VICUNA, "<image>\n", "<image> <image>\n", None),
    ("onevision_image", None, QWEN_1_5, "<image>\n", "<image> <image>\n", "<video>\n"),
    ("llava_video", None, QWEN_1_5, "<image>\n", "<image> <image>\n", "<video>\n"),
    ("qwen2_vl", None, QWEN_1_5, SEEN, 2 * SEEN, FILM),
    ("qwen2_5_vl", None, QWEN_1_5, SEEN, 2 * SEEN, FILM),
    # The marks of a video are put around each frame, by the processor.
    ("qwen3_vl", None, QWEN3, SEEN, 2 * SEEN, "<|video_pad|>"),
    *(
        (name, frame, text, f"{CELLS}\n", f"Image-1: {CELLS}\nImage-2: {CELLS}\n", "<video>\n")
        for name, frame, text in (
            ("internvl", None, INTERNVL2),
            ("internvl_phi3", "internvl2_phi3", INTERNVL2_4B),
            ("internvl_6b", "internvl2_5", INTERNVL2_5),
            ("internvl_qwen3", "internvl2_5", INTERNVL2_5),
        )
    ),
    ("deepseek_ocr", None, DEEPSEEK_OCR, "<image>\n", "<image>\n<image>\n", None),
]

POPE = "Is there a snowboard in the image?\nAnswer the question using a single word or phrase."
MMBENCH = "Which animal is shown? There are several options:\nA. cat\nB. dog\n\nAnswer with the option's letter."


def asked(text: str, *media: Any) -> list[dict]:
    kinds = [("video", one) if isinstance(one, str) else ("image", one) for one in media]
    parts = [{"type": kind, kind: one} for kind, one in kinds]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


@pytest.mark.parametrize("weights", ["trained", "random"])
@pytest.mark.parametrize(
    ("name", "frame", "golden", "one", "two", "film"), GOLDEN, ids=[row[0] for row in GOLDEN]
)
def test_prompts_are_those_of_the_authors(
    name: str, frame: str | None, golden: str, one: str, two: str, film: str | None, weights: str
) -> None:
    spec = replace(FAMILIES[name].spec, conversation=frame)
    adapter = load_adapter(spec) if weights == "random" else load_tiny(spec, saved(name))
    first, second = picture(0, 56, 42), picture(1, 42, 56)
    for text in (POPE, MMBENCH):
        for media, chat in ((one, [first]), (two, [first, second]), ("", [])):
            expected = golden.format(m=media, t=text)
            assert adapter.told(asked(text, *chat))["rendered"] == expected
        if film is not None:
            found = adapter.told(asked(text, video(0)))["rendered"]
            assert found == golden.format(m=film, t=text)


def test_turns_of_a_longer_chat_and_a_system_turn_of_its_own() -> None:
    turns = [
        {"role": "system", "content": [{"type": "text", "text": "s"}]},
        {"role": "user", "content": [{"type": "text", "text": "q"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
        {"role": "user", "content": "r"},
    ]
    assert Tiny("llava").adapter.prompt(turns) == "s USER: q ASSISTANT: a</s>USER: r ASSISTANT:"
    head = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n"
    tail = (
        "<|im_start|>assistant\na<|im_end|>\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n"
    )
    assert Tiny("qwen2_vl").adapter.prompt(turns) == head + tail


def test_the_checkpoint_s_template_yields_to_the_family_s_and_both_are_told(tmp_path: Path) -> None:
    folder = tmp_path / "llava"
    shutil.copytree(saved("llava"), folder)
    own = "{% for turn in messages %}Q: {% for part in turn.content %}{{ part.text }}{% endfor %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(own)
    spec = FAMILIES["llava"].spec
    adapter = load_tiny(spec, folder)
    told = adapter.told(asked("w1"))
    assert told["rendered"] == VICUNA.format(m="", t="w1")
    assert told["template_sha256"] == sha256(adapter.format(None).encode()).hexdigest()
    assert told["checkpoint_template_sha256"] == sha256(own.encode()).hexdigest()
    theirs = load_tiny(replace(spec, conversation="checkpoint"), folder).told(asked("w1"))
    assert theirs["rendered"] == "Q: w1"
    assert theirs["template_sha256"] == theirs["checkpoint_template_sha256"]
    # Without a checkpoint the directory still says how it was trained.
    new = load_adapter(replace(spec, conversation="checkpoint", path=folder))
    assert new.told(asked("w1"))["rendered"] == "Q: w1"


@pytest.mark.parametrize(
    ("name", "frame", "words"),
    [
        ("llava", "vicuna", r"model\.conversation='vicuna' is unknown.*valid: .*vicuna_v1"),
        ("deepseek_ocr", "qwen_1_5", r"model\.conversation='qwen_1_5' is unknown.*valid: plain"),
        ("llava", "checkpoint", r"model\.conversation='checkpoint': no chat template"),
    ],
)
def test_unknown_frames_are_refused(name: str, frame: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_adapter(replace(FAMILIES[name].spec, conversation=frame))


@pytest.mark.parametrize(
    ("model", "frame"),
    [
        ("internvl2_1b", None),
        ("internvl2_8b", None),
        ("internvl2_26b", None),
        ("internvl2_4b", "internvl2_phi3"),
        ("internvl2_5_8b", "internvl2_5"),
        ("internvl3_8b", "internvl2_5"),
        ("internvl3_5_8b", "internvl2_5"),
        ("llava15_7b", None),
        ("seedling", "checkpoint"),
        ("seedling_draft", "checkpoint"),
        ("seedling_full", "checkpoint"),
    ],
)
def test_models_whose_family_has_several_frames_name_theirs(model: str, frame: str | None) -> None:
    assert compose_section("model", model)["conversation"] == frame


def test_a_row_holds_the_prompt_of_its_first_sample(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = ["benchmark=seedling_exist", "method=none", "ratio=0", "limit=1", "engine.warmup=0"]
    assert run.main([f"store={tmp_path}", *cell]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    told = row["extra"]["prompt"]
    # The format that seedling was trained with: blanks, no line break, no system turn.
    assert re.fullmatch(r"USER: <image> [a-z0-9 ]+ \? ASSISTANT:", told["rendered"])
    own = ROOT / "harness/seedling/weights/seedling/chat_template.jinja"
    assert told["template_sha256"] == sha256(own.read_bytes()).hexdigest()
    assert told["checkpoint_template_sha256"] == told["template_sha256"]
