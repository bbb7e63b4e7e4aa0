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
from itertools import product
from pathlib import Path
from typing import Any

import lmms_eval.tasks
import numpy as np
import pytest
from jinja2 import Template
from lmms_eval.utils import load_yaml_config

import run
from espalier.harness.config.benchmark_section import benchmark_spec
from espalier.harness.config.composer import compose_section
from espalier.harness.config.model_section import model_spec, with_question
from espalier.harness.errors import UserError
from espalier.harness.kinds.checkpoint_check import check_model
from espalier.harness.media.frames import Clip
from espalier.harness.models.adapter import Adapter
from espalier.harness.models.build_adapter import load_adapter
from espalier.harness.models.chat_media import Media
from espalier.harness.models.conversations import FRAMES, template_of
from espalier.harness.models.families import ADAPTERS
from espalier.harness.paths import ROOT
from espalier.harness.specs.question_templates import question_text
from espalier.harness.specs.run_spec import ModelSpec, PromptSpec
from espalier.harness.store.files.digests import Digests
from tests.families import FAMILIES
from tests.families.onevision import video
from tests.family_runs import Tiny, saved
from tests.refused import refused
from tests.tiny import LLAVA, load_tiny, picture

VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
    "detailed, and polite answers to the user's questions. USER: {m}{t} ASSISTANT:"
)
CHATML_DIRECT = (
    "<|im_start|>system\nAnswer the questions.<|im_end|>"
    "<|im_start|>user\n{m}{t}<|im_end|><|im_start|>assistant\n"
)
QWEN_1_5 = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n{m}{t}<|im_end|>\n<|im_start|>assistant\n"
)
QWEN3 = "<|im_start|>user\n{m}{t}<|im_end|>\n<|im_start|>assistant\n"
#: The file of the model turns reasoning off.
QWEN3_5 = f"{QWEN3}<think>\n\n</think>\n\n"
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

PADDLE = "<|begin_of_sentence|>User: {m}{t}\nAssistant: "
PADDLE_1_5 = PADDLE.replace(": ", ":\n").replace("User:\n", "User: ")
HUNYUAN = "<｜hy_begin▁of▁sentence｜><｜hy_place▁holder▁no▁3｜>{m}{t}<｜hy_User｜>"

MINICPM = f"{QWEN3}<think>\n\n</think>\n\n"

SEEN = "<|vision_start|><|image_pad|><|vision_end|>"
FILM = "<|vision_start|><|video_pad|><|vision_end|>"
CELLS = "<IMG_CONTEXT>"
GLM = "[gMASK]<sop><|user|>\n{m}{t}<|assistant|>\n"
GLM_SEEN = "<|begin_of_image|><|image|><|end_of_image|>"
MOLMO2 = "<|im_end|>{m}<|im_start|>user\n{t}<|im_end|>\n<|im_start|>assistant\n"
TWO_IMAGES = "Image 1<|image|>Image 2<|image|>"
FRAMED = "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"
HELD = "<｜hy_place▁holder▁no▁100｜><｜hy_place▁holder▁no▁102｜><｜hy_place▁holder▁no▁101｜>"

#: Family, frame's name (None: the family's), frame, and media: one picture, two pictures, a video (None: takes none).
GOLDEN = [
    ("llava", None, VICUNA, "<image>\n", "<image> <image>\n", None),
    ("llava_next", None, VICUNA, "<image>\n", "<image> <image>\n", None),
    ("llava_next", "chatml_direct", CHATML_DIRECT, "<image>\n", "<image> <image>\n", None),
    ("onevision_image", None, QWEN_1_5, "<image>\n", "<image> <image>\n", "<video>\n"),
    ("llava_video", None, QWEN_1_5, "<image>\n", "<image> <image>\n", "<video>\n"),
    ("qwen2_vl", None, QWEN_1_5, SEEN, 2 * SEEN, FILM),
    ("qwen2_5_vl", None, QWEN_1_5, SEEN, 2 * SEEN, FILM),
    ("llava_onevision1_5", None, QWEN_1_5, SEEN, 2 * SEEN, FILM),
    # The marks of a video are put around each frame, by the processor.
    ("qwen3_vl", None, QWEN3, SEEN, 2 * SEEN, "<|video_pad|>"),
    ("qwen3_5", None, f"{QWEN3}<think>\n", SEEN, 2 * SEEN, "<|video_pad|>"),
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
    ("deepseek_ocr2", None, DEEPSEEK_OCR, "<image>\n", "<image>\n<image>\n", None),
    ("glm4v", None, GLM, GLM_SEEN, 2 * GLM_SEEN, GLM_SEEN.replace("image", "video")),
    ("molmo2", None, MOLMO2, "<|image|>", TWO_IMAGES, "<|video|>"),
    ("paddleocr_vl", None, PADDLE, FRAMED, 2 * FRAMED, None),
    ("paddleocr_vl", "paddleocr_vl_1_5", PADDLE_1_5, FRAMED, 2 * FRAMED, None),
    ("hunyuan_ocr", None, HUNYUAN, HELD, 2 * HELD, None),
    ("minicpm_v", None, MINICPM, "<|image_pad|>\n", 2 * "<|image_pad|>\n", None),
]

POPE = "Is there a snowboard in the image?\nAnswer the question using a single word or phrase."
MMBENCH = "Which animal is shown? There are several options:\nA. cat\nB. dog\n\nAnswer with the option's letter."


ONEVISION_HUB = "<|im_start|>user {m}\n{t}<|im_end|><|im_start|>assistant\n"  # the line break belongs to the text
VICUNA_HUB = "USER: {m}{t} ASSISTANT:"

#: Tiny family, model, set, frame, and media as in GOLDEN: what each set of a family makes of a chat.
SETS = [
    *(
        row
        for family, model in (("llava", "llava15_7b"), ("llava_next", "llava_next_7b"))
        for row in (
            (family, model, "original", VICUNA, "<image>\n", "<image> <image>\n", None),
            (family, model, "lmms_eval", VICUNA, "<image>\n", "<image> <image>\n", None),
            (family, model, "hub", VICUNA_HUB, "<image>\n", "<image>\n<image>\n", None),
        )
    ),
    *(
        ("onevision_image", model, name, frame, *media)
        for model in ("llava_ov_7b",)
        for name, frame, *media in (
            ("original", QWEN_1_5, "<image>\n", "<image> <image>\n", "<video>\n"),
            ("lmms_eval", QWEN_1_5, "<image>\n", "<image> <image>\n", "<video>\n"),
            ("vlmevalkit", QWEN_1_5, "<image>\n", "<image>\n<image>\n", "<video>\n"),
            ("hub", ONEVISION_HUB, "<image>", "<image><image>", "<video>"),
        )
    ),
    ("llava_video", "llava_video_7b", "original", QWEN_1_5, "<image>\n", None, "<video>\n"),
    ("llava_video", "llava_video_7b", "lmms_eval", QWEN_1_5, "<image>\n", None, "<video>\n"),
    *(
        (family, model, name, QWEN_1_5, SEEN, 2 * SEEN, FILM)
        for family, model, names in (
            ("qwen2_vl", "qwen2_vl_7b", ("original", "lmms_eval", "hub", "vlmevalkit")),
            ("qwen2_5_vl", "qwen2_5_vl_7b", ("original", "lmms_eval", "hub")),
            ("llava_onevision1_5", "llava_ov_1_5_8b", ("original", "lmms_eval")),
        )
        for name in names
    ),
    ("qwen3_vl", "qwen3_vl_8b", "original", QWEN3, SEEN, 2 * SEEN, "<|video_pad|>"),
    ("qwen3_vl", "qwen3_vl_8b", "lmms_eval", QWEN_1_5, SEEN, 2 * SEEN, "<|video_pad|>"),
    ("qwen3_vl", "qwen3_vl_8b", "hub", QWEN3, SEEN, 2 * SEEN, "<|video_pad|>"),
    ("qwen3_5", "qwen3_5_9b", "original", QWEN3_5, SEEN, 2 * SEEN, "<|video_pad|>"),
    ("qwen3_5", "qwen3_5_9b", "hub", QWEN3_5, SEEN, 2 * SEEN, "<|video_pad|>"),
    *(
        (family, model, name, frame, f"{CELLS}\n", two, "<video>\n")
        for family, model, frame in (
            ("internvl", "internvl2_8b", INTERNVL2),
            ("internvl_phi3", "internvl2_4b", INTERNVL2_4B),
            ("internvl_6b", "internvl2_5_8b", INTERNVL2_5),
        )
        for name, two in (
            ("original", f"Image-1: {CELLS}\nImage-2: {CELLS}\n"),
            ("lmms_eval", f"{CELLS} {CELLS}\n"),
            ("hub", f"Image-1: {CELLS}\nImage-2: {CELLS}\n"),
            ("vlmevalkit", f"Image-1: {CELLS}\nImage-2: {CELLS}\n"),
        )
    ),
    ("deepseek_ocr", "deepseek_ocr_base", "original", DEEPSEEK_OCR, "<image>\n", None, None),
    ("deepseek_ocr2", "deepseek_ocr2", "original", DEEPSEEK_OCR, "<image>\n", None, None),
    *(
        ("paddleocr_vl", model, name, frame, FRAMED, 2 * FRAMED, None)
        for model, frame in (("paddleocr_vl_0_9b", PADDLE), ("paddleocr_vl_1_5_0_9b", PADDLE_1_5))
        for name in ("original", "table", "formula", "chart")
    ),
    ("molmo2", "molmo2_4b", "original", MOLMO2, "<|image|>", TWO_IMAGES, "<|video|>"),
    *(
        ("hunyuan_ocr", "hunyuan_ocr_1b", name, HUNYUAN, HELD, 2 * HELD, None)
        for name in ("original", "text", "table", "formula", "chart")
    ),
    (
        *("minicpm_v", "minicpm_v_4_6", "original", MINICPM),
        *("<|image_pad|>\n", 2 * "<|image_pad|>\n", None),
    ),
]

SHORT = "Answer the question using a single word or phrase."
LETTER = "Answer with the option's letter from the given choices directly."
TEXTVQA = f"What is the brand of this camera?\n{SHORT}"
TEXTVQA_OCR = f"What is the brand of this camera?\nReference OCR token: DAKOTA, DIGITAL\n{SHORT}"
MMBENCH_LMMS = f"Which animal is shown? There are several options:\nA. cat\nB. dog\n\n{LETTER}"
MMBENCH_LLAVA = f"Which animal is shown?\nA. cat\nB. dog\n{LETTER}"
MMBENCH_VLMEVAL = (
    "Question: Which animal is shown?\nOptions:\nA. cat\nB. dog\n"
    "Please select the correct answer from the options above. \n"
)
CAPTION = "Provide a one-sentence caption for the provided image."
OCR = "<|grounding|>Convert the document to markdown."

CAMERA = {"question": "what is the brand of this camera?", "ocr_tokens": ["DAKOTA", "DIGITAL"]}
ANIMAL = {
    **{"question": "Which animal is shown?", "hint": "nan", "A": "cat", "B": "dog", "C": "nan"},
    **dict.fromkeys(("D", "E"), float("nan")),
    **dict.fromkeys(("answer", "category", "L2-category", "index", "source", "split"), "x"),
}

#: Benchmark, its task of lmms-eval, a sample, and the question by whose words: "" are lmms-eval's own.
QUESTIONS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "pope": (
        "pope/pope.yaml",
        {"question": "Is there a snowboard in the image?"},
        {
            "": POPE,
            "vlmevalkit": "Is there a snowboard in the image?",
            "vlmevalkit_qwen2_vl": "Is there a snowboard in the image? Please answer yes or no.",
        },
    ),
    "textvqa": (
        "textvqa/_default_template_textvqa_yaml",
        CAMERA,
        {
            "": TEXTVQA,
            "internvl": f"what is the brand of this camera? {SHORT}",
            "vlmevalkit": f"what is the brand of this camera?\n{SHORT}",
            "vlmevalkit_qwen2_vl": "what is the brand of this camera?\n"
            "Please try to answer the question with short words or phrases if possible.",
        },
    ),
    "textvqa_ocr": ("textvqa/_default_template_textvqa_yaml", CAMERA, {"": TEXTVQA_OCR}),
    "mmbench_en": (
        "mmbench/_default_template_mmbench_en_yaml",
        ANIMAL,
        {
            "": MMBENCH_LMMS,
            "llava": MMBENCH_LLAVA,
            "vlmevalkit": MMBENCH_VLMEVAL,
            "vlmevalkit_qwen2_vl": MMBENCH_VLMEVAL[:-2],
            "vlmevalkit_internvl": MMBENCH_LLAVA,
        },
    ),
}

#: Whose words a set asks in, the first that a benchmark has.
WORDS = {
    ("llava15_7b", "original"): ("llava",),
    ("llava_next_7b", "original"): ("llava",),
    ("llava_ov_7b", "vlmevalkit"): ("vlmevalkit",),
    ("qwen2_vl_7b", "vlmevalkit"): ("vlmevalkit_qwen2_vl", "vlmevalkit"),
    **{
        (f"internvl2_{size}", name): words
        for size in ("8b", "4b", "5_8b")
        for name, words in (
            ("original", ("internvl", "llava")),
            ("vlmevalkit", ("vlmevalkit_internvl", "vlmevalkit")),
        )
    },
}


def question_turns(text: str, *media: Any) -> list[dict]:
    kinds = [
        ("video", medium) if isinstance(medium, str) else ("image", medium) for medium in media
    ]
    parts = [{"type": kind, kind: medium} for kind, medium in kinds]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


@pytest.mark.sampled
@pytest.mark.parametrize("weights", ["trained", "random"])
@pytest.mark.parametrize(
    ("name", "frame", "golden", "single", "double", "film"),
    GOLDEN,
    ids=[f"{row[0]}-{row[1]}" for row in GOLDEN],
)
def test_prompts_are_those_of_the_authors(
    name: str,
    frame: str | None,
    golden: str,
    single: str,
    double: str,
    film: str | None,
    weights: str,
) -> None:
    spec = replace(FAMILIES[name].spec, conversation=frame)
    adapter = load_adapter(spec) if weights == "random" else load_tiny(spec, saved(name))
    first, second = picture(0, 56, 42), picture(1, 42, 56)
    for text in (POPE, MMBENCH):
        for media, chat in ((single, [first]), (double, [first, second]), ("", [])):
            expected = golden.format(m=media, t=text)
            assert adapter.prompt_summary(question_turns(text, *chat))["rendered"] == expected
        if film is not None:
            rendered = adapter.prompt_summary(question_turns(text, video(0)))["rendered"]
            assert rendered == golden.format(m=film, t=text)


def model_under(model: str, name: str, tasks: tuple[str, ...] = ()) -> ModelSpec:
    """A model of conf/model under a set of prompts, without a checkpoint."""
    part = compose_section("model", model)
    return model_spec({**part, "prompt": name, "weights": "random", "device": "cpu"}, tasks)


def tiny_under(family: str, spec: ModelSpec) -> Adapter:
    """The tiny model of a family with the prompts of a whole one."""
    prompts = {name: getattr(spec, name) for name in ("conversation", "prompt", "generation")}
    return load_adapter(replace(FAMILIES[family].spec, **prompts))


def own_question(task: str, sample: dict[str, Any], changes: dict[str, Any]) -> str:
    """Return the prompt of lmms-eval's task with changed prompt settings."""
    settings = load_yaml_config(str(Path(lmms_eval.tasks.__file__).parent / task), mode="full")
    words = {**settings["lmms_eval_specific_kwargs"]["default"], **changes}
    return str(settings["doc_to_text"](sample, words))


def question(benchmark: str, prompt: PromptSpec) -> str:
    """Return the prompt of a benchmark under a set of prompts, built as in a run, without its data."""
    task, sample, _ = QUESTIONS[benchmark]
    spec = with_question(benchmark_spec(compose_section("benchmark", benchmark)), prompt)
    if spec.text is None:
        return own_question(task, sample, dict(spec.prompt))
    return question_text(spec.text, sample, "here")


@pytest.mark.sampled(18)
@pytest.mark.parametrize(
    ("family", "model", "name", "frame", "single", "double", "film"),
    SETS,
    ids=[f"{row[1]}-{row[2]}" for row in SETS],
)
def test_every_set_of_every_family_asks_as_its_golden_strings(
    family: str,
    model: str,
    name: str,
    frame: str,
    single: str,
    double: str | None,
    film: str | None,
) -> None:
    spec = model_under(model, name)
    adapter = tiny_under(family, spec)
    texts = [CAPTION, OCR]
    for benchmark, (_, _, golden) in QUESTIONS.items():
        words = next((word for word in WORDS.get((model, name), ()) if word in golden), "")
        assert question(benchmark, spec.prompt) == golden[words]
        texts.append(golden[words])
    first, second = picture(0, 56, 42), picture(1, 42, 56)
    for text in texts:
        for media, chat in ((single, [first]), (double, [first, second])):
            if media is not None:
                rendered_prompt = adapter.prompt_summary(question_turns(text, *chat))["rendered"]
                # DeepSeek-OCR's format strips both ends.
                ends = text.strip() if family.startswith("deepseek_ocr") else text
                assert rendered_prompt == frame.format(m=media, t=ends)
        if film is not None:
            assert adapter.prompt_summary(question_turns(text, video(0)))[
                "rendered"
            ] == frame.format(m=film, t=text)


def test_the_table_of_golden_strings_has_every_set_of_every_family() -> None:
    """LLaVA-Video's set for AirCache differs by its times; see below."""
    prompts = {(row[1], row[2]) for row in SETS} | {("llava_video_7b", "vlmevalkit")}
    for model in {row[1] for row in SETS}:
        sets = compose_section("model", model)["prompts"]
        assert {(model, name) for name, prompt in sets.items() if prompt is not None} == {
            row for row in prompts if row[0] == model
        }


def test_hints_and_missing_options_of_mmbench() -> None:
    sample = {**ANIMAL, "hint": "It barks.", "B": None, "C": "dog", "D": "cow"}
    spec = benchmark_spec(compose_section("benchmark", "mmbench_en"))
    assert question_text(spec.texts["llava"], sample, "here") == (
        f"It barks.\nWhich animal is shown?\nA. cat\nC. dog\nD. cow\n{LETTER}"
    )
    assert question_text(spec.texts["vlmevalkit"], sample, "here").startswith(
        "Hint: It barks.\nQuestion: Which animal is shown?\nOptions:\nA. cat\nC. dog\nD. cow\nPlease"
    )


@pytest.mark.slow
def test_llava_video_tells_times_in_three_forms() -> None:
    """Three frames of 90 at 29.97 a second: one a second, or of the whole video."""
    pixels = np.zeros((3, 20, 30, 3), np.uint8)
    prompts = "These frames are located at {}.Please answer the following questions related to this video."
    lasts = (
        f"The video lasts for 3.00 seconds, and 3 frames are uniformly sampled from it. {prompts}"
    )
    for indices, at in (((0, 30, 60), "0.00s,1.00s,2.00s"), ((0, 44, 89), "0.00s,1.47s,2.97s")):
        clip = Clip(pixels, indices, tuple(i / 29.97 for i in indices), 29.97, 90, 3.003)
        golden = {
            True: f"<video>\n{lasts}",
            "release": f"<video>{lasts}",
            # The height of a frame stands for their number, and blanks are missing.
            "vlmevalkit": "<video>\nThe video lasts for 3.00 seconds,and 20 frames are uniformly sampled from it."
            + prompts,
        }
        for form, text in golden.items():
            spec = replace(FAMILIES["llava_video"].spec, processor={"time_instruction": form})
            assert load_adapter(spec).prompt_text(
                question_turns("Q", "a.mp4"), Media(clips=[clip])
            ) == QWEN_1_5.format(m=text.format(at) + "\n", t="Q")
    assert model_under("llava_video_7b", "vlmevalkit").processor["time_instruction"] == "vlmevalkit"
    with pytest.raises(UserError, match=r"time_instruction='yes' is unknown.*vlmevalkit"):
        load_adapter(replace(FAMILIES["llava_video"].spec, processor={"time_instruction": "yes"}))


def test_frames_of_internvl_are_labelled_as_the_set_says() -> None:
    label = model_under("internvl2_8b", "vlmevalkit").processor["frame_label"]
    spec = FAMILIES["internvl"].spec
    for frame_label, golden in ((label, "Frame-{}: "), ("Frame{}: ", "Frame{}: ")):
        adapter = load_adapter(
            replace(spec, processor={**spec.processor, "frame_label": frame_label})
        )
        ids = adapter.encode([question_turns("Q", video(0))])["input_ids"][0]
        text_out = adapter.processor.tokenizer.decode(ids).replace(CELLS, "")
        frames = "\n".join(golden.format(n) + "<img></img>" for n in (1, 2, 3))
        assert f"user\n{frames}\nQ<" in text_out
    assert "frame_label='Frame' has no {}" in refused(
        load_adapter, replace(spec, processor={"frame_label": "Frame"})
    )


def test_pictures_of_internvl_share_64_tiles_under_vlmevalkit() -> None:
    spec = FAMILIES["internvl"].spec
    wide = [picture(seed, 84, 28) for seed in range(3)]  # three tiles each, and a thumbnail
    for together, tiles in ((None, 12), (6, 9), (2, 3)):
        shared = {} if together is None else {"patches_together": together}
        adapter = load_adapter(replace(spec, processor={**spec.processor, **shared}))
        assert len(adapter.encode([question_turns("Q", *wide)])["pixel_values"]) == tiles


def test_deepseek_s_one_prompt_stands_for_whatever_an_ocr_task_asks() -> None:
    task = {**compose_section("benchmark", "seedling_exist"), "kind": "ocr"}
    prompt = model_under("deepseek_ocr_base", "original", ("ocr", "omnidocbench")).prompt
    spec = with_question(benchmark_spec(task), prompt)
    assert (spec.text, spec.generation["max_new_tokens"]) == (OCR, 8192)
    template = with_question(
        benchmark_spec({**task, "text": "Free OCR.", "generation": {"max_new_tokens": 9}}),
        prompt,
    )
    assert (template.text, template.generation["max_new_tokens"]) == ("Free OCR.", 9)
    # It has no words for questions; asked one, it gets the question.
    assert (
        model_under("deepseek_ocr_base", "original", ("understanding", "pope")).prompt.text is None
    )


def test_turns_of_a_longer_chat_and_a_system_turn_of_its_own() -> None:
    turns = [
        {"role": "system", "content": [{"type": "text", "text": "s"}]},
        {"role": "user", "content": [{"type": "text", "text": "q"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
        {"role": "user", "content": "r"},
    ]
    assert Tiny("llava").adapter.render(turns) == "s USER: q ASSISTANT: a</s>USER: r ASSISTANT:"
    head = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n"
    tail = (
        "<|im_start|>assistant\na<|im_end|>\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n"
    )
    assert Tiny("qwen2_vl").adapter.render(turns) == head + tail


def test_the_checkpoint_s_template_yields_to_the_family_s_and_both_are_told(tmp_path: Path) -> None:
    folder = tmp_path / "llava"
    shutil.copytree(saved("llava"), folder)
    template = "{% for turn in messages %}Q: {% for part in turn.content %}{{ part.text }}{% endfor %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    spec = FAMILIES["llava"].spec
    adapter = load_tiny(spec, folder)
    prompts = adapter.prompt_summary(question_turns("w1"))
    assert prompts["rendered"] == VICUNA.format(m="", t="w1")
    assert prompts["template_sha256"] == sha256(adapter.format(None).encode()).hexdigest()
    assert prompts["checkpoint_template_sha256"] == sha256(template.encode()).hexdigest()
    theirs = load_tiny(replace(spec, conversation="checkpoint"), folder).prompt_summary(
        question_turns("w1")
    )
    assert theirs["rendered"] == "Q: w1"
    assert theirs["template_sha256"] == theirs["checkpoint_template_sha256"]
    # Without a checkpoint the directory still says how it was trained.
    new = load_adapter(replace(spec, conversation="checkpoint", path=folder))
    assert new.prompt_summary(question_turns("w1"))["rendered"] == "Q: w1"


@pytest.mark.parametrize(
    ("name", "frame", "words"),
    [
        ("llava", "vicuna", r"model\.conversation='vicuna' is unknown.*valid: .*vicuna_v1"),
        ("deepseek_ocr", "qwen_1_5", r"model\.conversation='qwen_1_5' is unknown.*valid: plain"),
        ("llava", "checkpoint", r"model\.conversation='checkpoint': .*without a chat template"),
    ],
)
def test_unknown_frames_are_refused(name: str, frame: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_adapter(replace(FAMILIES[name].spec, conversation=frame))


@pytest.mark.parametrize(
    ("frame", "end"),
    [
        *(
            ("internvl2", "<|im_end|>"),
            ("internvl2_5", "<|im_end|>\n"),
            ("internvl2_phi3", "<|end|>"),
        ),
        *(("qwen_1_5", "<|im_end|>\n"), ("chatml_direct", "<|im_end|>")),
        *(
            ("mistral_instruct", " [/INST]"),
            ("gemma3", "<end_of_turn>\n"),
            ("dream", "<|im_end|>\n"),
        ),
    ],
)
def test_a_turn_ends_as_in_the_release(frame: str, end: str) -> None:
    turns = [{"role": "user", "content": "first"}, {"role": "user", "content": "second"}]
    text = Template(template_of(frame, "")).render(messages=turns, add_generation_prompt=True)
    head, answer = FRAMES[frame].heads["user"], FRAMES[frame].answer
    assert text.endswith(f"{head}first{end}{head}second{end}{answer}")


@pytest.mark.parametrize("family", ADAPTERS.names())
def test_no_line_lists_what_it_refuses_as_valid(family: str) -> None:
    for frame, join in product((None, "checkpoint", "other"), (None, "vllm", "other", "null")):
        prompt = replace(LLAVA.prompt, join=join)
        spec = replace(
            LLAVA,
            adapter=family,
            conversation=frame,
            prompt=prompt,
            hub="some/model",
            weights="trained",
        )
        line = refused(check_model, spec, True, Digests())
        name = re.search(r"='(\w+)' is unknown", line)
        assert name is None or name[1] not in re.findall(r"\w+", line.partition("valid: ")[2])
        if frame == "checkpoint" and join is None:
            assert "model.hub='some/model'" in line


def test_a_checkpoint_without_a_template_is_not_an_unknown_name() -> None:
    words = r"model.conversation='checkpoint': the checkpoint comes without a chat template; valid: vicuna_v1, "
    with pytest.raises(UserError, match=words):
        ADAPTERS.load("generic").format(None)


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


@pytest.mark.slow
def test_a_row_holds_the_prompt_of_its_first_sample(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = ["benchmark=seedling_exist", "method=none", "ratio=0", "limit=1", "engine.warmup=0"]
    assert run.main([f"store={tmp_path}", "json=true", *cell]) == 0
    prompts = json.loads(capsys.readouterr().out.splitlines()[-1])["extra"]["prompt"]
    # The format that seedling was trained with: blanks, no line break, no system turn.
    assert re.fullmatch(r"USER: <image> [a-z0-9 ]+ \? ASSISTANT:", prompts["rendered"])
    template = ROOT / "harness/seedling/weights/seedling/chat_template.jinja"
    assert prompts["template_sha256"] == sha256(template.read_bytes()).hexdigest()
    assert prompts["checkpoint_template_sha256"] == prompts["template_sha256"]
