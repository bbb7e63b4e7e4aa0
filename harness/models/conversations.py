"""Chat formats of the authors' evaluations, as Jinja templates, and the templates of checkpoints.

A template combines a frame, the text around turns, with a rule for the pictures and videos of a turn. Sources: the
conversation classes of LLaVA, LLaVA-NeXT and InternVL (`vicuna_v1`, `qwen_1_5`, `Hermes-2`, `internlm2-chat`,
`phi3-chat`, `internvl2_5`), of LaViDa and LLaDA-V (`llada`, `dream`, `llava_llada`), Qwen's README, DeepSeek-OCR's
release, templates of GLM-4.1V, Molmo2, PaddleOCR-VL, HunyuanOCR and MiniCPM-V 4.6. Other hub checkpoints' differ:
LLaVA-1.5's has no system sentence; LLaVA-OneVision's has no system turn and other white space.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from espalier.harness.errors import UserError, unknown_name
from espalier.harness.models.loader import MALFORMED, unreadable
from espalier.harness.specs.generation import Thinking
from espalier.harness.specs.run_spec import CHECKPOINT, ModelSpec

#: Media first, separated by blanks and followed by a line break, as in LLaVA's code and lmms-eval's classes.
TAGGED = (
    "{% for part in turn.content if part.type != 'text' %}"
    "{{ '<' + part.type + '>' + ('\\n' if loop.last else ' ') }}{% endfor %}"
    "{% for part in turn.content if part.type == 'text' %}{{ part.text }}{% endfor %}"
)

#: Media first, a line each, as in VLMEvalKit's class of LLaVA-OneVision and the hub's template of LLaVA-1.5.
LINES = TAGGED.replace("('\\n' if loop.last else ' ')", "'\\n'")

#: Media first without separators, the text on the next line, as in the hub's template of LLaVA-OneVision.
CLOSE = (
    "{% for part in turn.content if part.type != 'text' %}{{ '<' + part.type + '>' }}{% endfor %}"
    "{% for part in turn.content if part.type == 'text' %}{{ '\\n' + part.text }}{% endfor %}"
)

#: Media first without any separator, as in the code of LaViDa and LLaDA-V if their tokenizer adds no begin token: it
#: then drops the first token after a picture.
FLUSH = TAGGED.replace(" + ('\\n' if loop.last else ' ')", "")

#: Media at their position in the turn without separators, as in Qwen's template.
BARE = (
    "{% for part in turn.content %}{{ part.text if part.type == 'text' else"
    " '<|vision_start|><|' + part.type + '_pad|><|vision_end|>' }}{% endfor %}"
)

#: As `BARE`, but only the placeholder of a video: Qwen3-VL's processor writes times and the marks around each frame.
TIMED = BARE.replace(
    "'<|vision_start|><|' + part.type",
    "'<|video_pad|>' if part.type == 'video' else '<|vision_start|><|' + part.type",
)

#: As `BARE`, with GLM's marks.
SPANNED = BARE.replace(
    "'<|vision_start|><|' + part.type + '_pad|><|vision_end|>'",
    "'<|begin_of_' + part.type + '|><|' + part.type + '|><|end_of_' + part.type + '|>'",
)

#: Media first, a line each; several pictures are numbered, as on InternVL's model cards.
NUMBERED = (
    "{% for part in turn.content if part.type == 'video' %}{{ '<video>\\n' }}{% endfor %}"
    "{% for part in turn.content if part.type == 'image' %}"
    "{{ ('' if loop.length == 1 else 'Image-' + loop.index|string + ': ') + '<IMG_CONTEXT>\\n' }}{% endfor %}"
    "{% for part in turn.content if part.type == 'text' %}{{ part.text }}{% endfor %}"
)

#: As `NUMBERED`, but several pictures on one line, as in lmms-eval's class of InternVL.
ROWED = NUMBERED.replace(
    "{{ ('' if loop.length == 1 else 'Image-' + loop.index|string + ': ') + '<IMG_CONTEXT>\\n' }}",
    "{{ '<IMG_CONTEXT>' + ('\\n' if loop.last else ' ') }}",
)

#: Media at their position in the turn, a blank before a text at its start, as in SmolVLM's template.
MARKED = (
    "{% if turn.content and turn.content[0].type == 'text' %} {% endif %}"
    "{% for part in turn.content %}{{ part.text if part.type == 'text' else '<' + part.type + '>' }}{% endfor %}"
)

#: Media at their position in the turn, white space around the user's texts stripped, as in Gemma 3's template.
STARTED = (
    "{% for part in turn.content %}{{ '<start_of_image>' if part.type == 'image' else"
    " part.text if turn.role == 'system' else part.text | trim }}{% endfor %}"
)

#: Media at their position in the turn, white space around all texts stripped, as in Gemma 4's template.
TURNED = (
    "{% for part in turn.content %}{{ part.text | trim if part.type == 'text' else"
    " '<|' + part.type + '|>' }}{% endfor %}"
)

#: Pictures first without separators, between their marks, as in PaddleOCR-VL's template.
FRAMED = FLUSH.replace(
    "'<' + part.type + '>'", "'<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>'"
)

#: Media at their position in the turn without separators, between their marks, as in HunyuanOCR's template.
HOLDERS = BARE.replace(
    "'<|vision_start|><|' + part.type + '_pad|><|vision_end|>'",
    "'<｜hy_place▁holder▁no▁100｜><｜hy_place▁holder▁no▁102｜><｜hy_place▁holder▁no▁101｜>'",
)

#: The texts of a turn with blanks between them, as in Molmo2's template, which writes pictures before the chat.
TEXTS = "{% for part in turn.content if part.type == 'text' %}{{ part.text + ('' if loop.last else ' ') }}{% endfor %}"

#: The pictures of all turns, numbered if there are several, then the videos, as in Molmo2's template.
PICTURES_FIRST = (
    "{% set front = namespace(count=0) %}{% for turn in messages if turn.content is not string %}"
    "{% for part in turn.content if part.type == 'image' %}{% set front.count = front.count + 1 %}{% endfor %}"
    "{% endfor %}{% for _ in range(front.count) %}"
    "{{ ('Image ' + loop.index|string if front.count > 1 else '') + '<|image|>' }}{% endfor %}"
    "{% for turn in messages if turn.content is not string %}"
    "{% for part in turn.content if part.type == 'video' %}{{ '<|video|>' }}{% endfor %}{% endfor %}"
)

#: Media and texts in their order, a line each, as in MiniCPM-V's template.
LINED = (
    "{% for part in turn.content %}{{ part.text if part.type == 'text' else '<|' + part.type + '_pad|>' }}"
    "{{ '' if loop.last else '\\n' }}{% endfor %}"
)

#: Rules for media by the value of `model.join`, for families with the placeholder `<image>`.
JOINS: Mapping[str, str] = {"blank": TAGGED, "lines": LINES, "close": CLOSE}

#: Complete format of DeepSeek-OCR: no roles, white space at both ends stripped.
PLAIN = (
    "{{ bos_token }}{% set said %}{% for turn in messages %}{% for part in turn.content %}"
    "{{ '<image>\\n' if part.type == 'image' else part.text }}{% endfor %}{% endfor %}{% endset %}{{ said | trim }}"
)


@dataclass(frozen=True)
class ChatFrame:
    """The text around the turns of a chat.

    Attributes:
        system: system message of chats without a system turn; None: no such message.
        heads: text before a turn, by role.
        ends: text after a turn, by role.
        answer: text before the model's answer.
        lead: text before the chat.
        trim: strip white space at both ends of a message.
        think: text after `answer` if reasoning is requested (`model.generation.thinking`), or not turned off.
        joined: the system message begins the first user turn, which has no head then.
        front: template of what stands between `lead` and the first turn.
        silent: text after a user's turn and after `answer` if reasoning is turned off; None: it cannot be.
        quiet: reasoning is off unless requested.
    """

    system: str | None
    heads: Mapping[str, str]
    ends: Mapping[str, str]
    answer: str
    lead: str = ""
    trim: bool = False
    think: str = ""
    joined: bool = False
    front: str = ""
    silent: tuple[str, str] | None = None
    quiet: bool = False

    def template(self, media: str) -> str:
        """Return the chat template in Jinja; `media` writes the parts of `turn.content`."""
        system_text = "" if self.system is None else self._around("system", self.system)
        content = f"{{% if turn.content is string %}}{{{{ turn.content }}}}{{% else %}}{media}{{% endif %}}"
        if self.trim:
            content = f"{{% set text %}}{content}{{% endset %}}{{{{ text | trim }}}}"
        tail = ""
        if self.silent is not None:
            is_off = "not enable_thinking"
            if not self.quiet:
                is_off = f"enable_thinking is defined and {is_off}"
            after_turn, after_answer = map(_literal, self.silent)
            content += (
                f"{{% if turn.role == 'user' and {is_off} %}}{{{{ {after_turn} }}}}{{% endif %}}"
            )
            tail = f"{{{{ {after_answer} if {is_off} else {_literal(self.think)} }}}}"
        head = "{{ heads[turn.role] }}"
        if self.joined:
            head = f"{{% if loop.first or loop.previtem.role != 'system' %}}{head}{{% endif %}}"
        return (
            f"{{% set heads = {_literal(self.heads)} %}}{{% set ends = {_literal(self.ends)} %}}"
            f"{{{{ {_literal(self.lead)} }}}}{self.front}"
            f"{{% if messages[0].role != 'system' %}}{{{{ {_literal(system_text)} }}}}{{% endif %}}"
            f"{{% for turn in messages %}}{head}{content}{{{{ ends[turn.role] }}}}{{% endfor %}}"
            f"{{% if add_generation_prompt %}}{{{{ {_literal(self.answer)} }}}}{tail}{{% endif %}}"
        )

    def render(self, question: str) -> str:
        """Return a chat of one question without pictures and without `lead`."""
        system_text = "" if self.system is None else self._around("system", self.system)
        return f"{system_text}{self._around('user', question)}{self.answer}"

    def _around(self, role: str, text: str) -> str:
        return f"{self.heads[role]}{text}{self.ends[role]}"


def roles(system: str, user: str, assistant: str) -> dict[str, str]:
    """Return the texts in a table by role."""
    return {"system": system, "user": user, "assistant": assistant}


def uniform_frame(
    message: str | None, heads: Mapping[str, str], end: str, lead: str = ""
) -> ChatFrame:
    """Return a frame with the same end for all turns and the assistant's head before the answer."""
    return ChatFrame(message, heads, roles(end, end, end), heads["assistant"], lead)


_CHATML = roles("<|im_start|>system\n", "<|im_start|>user\n", "<|im_start|>assistant\n")
_PHI3 = roles("<|system|>\n", "<|user|>\n", "<|assistant|>\n")
_LLAMA3 = {
    role: f"<|start_header_id|>{role}<|end_header_id|>\n\n"
    for role in ("system", "user", "assistant")
}
_VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
_LLADA = (
    "You are a helpful language and vision assistant. You are able to understand the visual content that the user "
    "provides, and assist the user with a variety of tasks using natural language."
)
_INTERNVL2 = (
    "你是由上海人工智能实验室联合商汤科技开发的书生多模态大模型，英文名叫InternVL, "
    "是一个有用无害的人工智能助手。"
)
_INTERNVL2_5 = (
    "你是书生·万象，英文名是InternVL，"
    "是由上海人工智能实验室、清华大学及多家合作单位联合开发的多模态大语言模型。"
)


def _llada(suffix: str = "") -> ChatFrame:
    """Return the frame of LaViDa and LLaDA-V; `suffix` ends every question."""
    end = "<|eot_id|>"
    ends = roles(end, f"{suffix}{end}", end)
    return ChatFrame(_LLADA, _LLAMA3, ends, _LLAMA3["assistant"], "<|startoftext|>", trim=True)


def _paddleocr_vl(answer: str) -> ChatFrame:
    """Return the frame of PaddleOCR-VL; `answer` is the text before answers."""
    return ChatFrame(
        None,
        roles("", "User: ", answer),
        roles("\n", "\n", "</s>"),
        answer,
        "<|begin_of_sentence|>",
    )


_QWEN3_5 = replace(
    uniform_frame(None, _CHATML, "<|im_end|>\n"),
    trim=True,
    think="<think>\n",
    silent=("", "<think>\n\n</think>\n\n"),
)

FRAMES: Mapping[str, ChatFrame] = {
    "vicuna_v1": ChatFrame(
        _VICUNA, roles("", "USER: ", "ASSISTANT: "), roles(" ", " ", "</s>"), "ASSISTANT:"
    ),
    # Templates of hub checkpoints, as quoted in processor tests of transformers and by users.
    "vicuna_hub": ChatFrame(
        None, roles("", "USER: ", "ASSISTANT: "), roles(" ", " ", "</s>"), "ASSISTANT:"
    ),
    "onevision_hub": ChatFrame(
        None,
        roles("<|im_start|>system ", "<|im_start|>user ", "<|im_start|>assistant "),
        roles("<|im_end|>", "<|im_end|>", "<|im_end|>"),
        "<|im_start|>assistant\n",
    ),
    # Of LLaVA-NeXT with Mistral 7B.
    "mistral_instruct": ChatFrame(
        None, roles("", "[INST] ", " "), roles("", " [/INST]", " </s>"), ""
    ),
    # Of LLaVA-NeXT with Yi-34B.
    "chatml_direct": uniform_frame("Answer the questions.", _CHATML, "<|im_end|>"),
    "qwen_1_5": uniform_frame("You are a helpful assistant.", _CHATML, "<|im_end|>\n"),
    # Qwen3-VL's Thinking releases begin the reasoning in the prompt.
    "qwen3": replace(uniform_frame(None, _CHATML, "<|im_end|>\n"), think="<think>\n"),
    "qwen3_5": _QWEN3_5,
    "minicpm_v": replace(_QWEN3_5, quiet=True),
    "internvl2": uniform_frame(_INTERNVL2, _CHATML, "<|im_end|>"),
    # The space is a token: Llama's tokenizer adds it before the first special token, converted tokenizers do not.
    "internvl2_phi3": uniform_frame(_INTERNVL2, _PHI3, "<|end|>", lead=" "),
    "internvl2_5": uniform_frame(_INTERNVL2_5, _CHATML, "<|im_end|>\n"),
    "smolvlm": ChatFrame(
        None,
        roles("System:", "User:", "Assistant:"),
        roles(*3 * ["<end_of_utterance>\n"]),
        "Assistant:",
        "<|im_start|>",
    ),
    "gemma3": ChatFrame(
        None,
        roles("<start_of_turn>user\n", "<start_of_turn>user\n", "<start_of_turn>model\n"),
        roles("\n\n", "<end_of_turn>\n", "<end_of_turn>\n"),
        "<start_of_turn>model\n",
        "<bos>",
        joined=True,
    ),
    # Of Gemma 4's template for the sizes that close the channel of thoughts where none are requested.
    "gemma4": ChatFrame(
        None,
        roles("<|turn>system\n", "<|turn>user\n", "<|turn>model\n"),
        roles(*3 * ["<turn|>\n"]),
        "<|turn>model\n<|channel>thought\n<channel|>",
        "<bos>",
    ),
    # Of the template of GLM-4.1V's checkpoint, and the words by which those of later releases turn reasoning off.
    "glm4v": ChatFrame(
        None,
        roles("<|system|>\n", "<|user|>\n", "<|assistant|>\n"),
        roles("", "", ""),
        "<|assistant|>\n",
        "[gMASK]<sop>",
        silent=("/nothink", "<think></think>\n"),
    ),
    # Prompts begin with the end of a turn, the release's begin token; later turns of the assistant with a blank.
    "molmo2": ChatFrame(
        None,
        {**_CHATML, "assistant": " <|im_start|>assistant\n"},
        roles(*3 * ["<|im_end|>\n"]),
        _CHATML["assistant"],
        "<|im_end|>",
        front=PICTURES_FIRST,
    ),
    "paddleocr_vl": _paddleocr_vl("Assistant: "),
    # Of PaddleOCR-VL-1.5 and later.
    "paddleocr_vl_1_5": _paddleocr_vl("Assistant:\n"),
    # The release's code begins with an empty system turn.
    "hunyuan_ocr": ChatFrame(
        "",
        roles("", "", ""),
        roles("<｜hy_place▁holder▁no▁3｜>", "<｜hy_User｜>", "<｜hy_Assistant｜>"),
        "",
        "<｜hy_begin▁of▁sentence｜>",
    ),
    "llada": _llada(),
    "llada_no_think": _llada(" /no_think"),
    "llada_think": _llada(" /think"),
    "dream": uniform_frame(_LLADA, _CHATML, "<|im_end|>\n"),
}


#: A loop over the content of a turn, or the word `image`.
_PARTS = re.compile(r"\bin\s+\w+(\.content|\[['\"]content['\"]\])|image")


def template_of(name: str, media: str, thinking: bool = False) -> str:
    """Return the template of a frame with a family's rule for media; with `thinking`, its prompts ask for reasoning.

    Raises:
        UserError: an unknown frame, or that of a checkpoint, which has none.
    """
    if name == CHECKPOINT:
        raise UserError(
            f"model.conversation={CHECKPOINT!r}: the checkpoint comes without a chat template; valid: "
            f"{', '.join(FRAMES)}"
        )
    if name not in FRAMES:
        raise unknown_name("model.conversation", name, (*FRAMES, CHECKPOINT))
    frame = FRAMES[name]
    if thinking and frame.silent is None:
        frame = replace(frame, answer=frame.answer + frame.think)
    return frame.template(media)


def takes_parts(template: str) -> bool:
    """Return whether a template reads the parts of a turn; templates of text models expect one text."""
    return _PARTS.search(template) is not None


def flatten_template(template: str, media: str) -> str:
    """Return a template of a text model, extended to write the parts of a turn as one text first."""
    return (
        "{% set flat_ = namespace(turns=[]) %}{% for turn in messages %}"
        "{% if turn.content is string %}{% set text = turn.content %}"
        f"{{% else %}}{{% set text %}}{media}{{% endset %}}{{% endif %}}"
        "{% set flat_.turns = flat_.turns + [{'role': turn.role, 'content': text}] %}{% endfor %}"
        "{% set messages = flat_.turns %}"
    ) + template


def join_of(name: str | None, joins: Mapping[str, str]) -> str | None:
    """Return the rule for media selected by `model.join`; None for null.

    Raises:
        UserError: the family has no such rule.
    """
    if name is not None and name not in joins:
        raise unknown_name("model.join", name, joins or ("null",))
    return None if name is None else joins[name]


def sha256_of(template: str | None) -> str | None:
    """Return the hash of a template; None without a template."""
    return None if template is None else sha256(template.encode()).hexdigest()


def _literal(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


log = logging.getLogger(__name__)

#: Variable of chat templates that turns reasoning on and off.
SWITCH = "enable_thinking"

#: Files that may hold a checkpoint's chat template; the first with a template is used.
TEMPLATE_FILES = (
    *("chat_template.jinja", "chat_template.json"),
    *("processor_config.json", "tokenizer_config.json"),
)


def local_template(spec: ModelSpec) -> str | None:
    """Return the chat template in a local model directory, for models built without their checkpoint.

    Raises:
        UserError: a file that may hold the template does not parse.
    """
    if spec.path is None:
        return None
    for name in TEMPLATE_FILES:
        file = spec.path / name
        if not file.is_file():
            continue
        try:
            text = file.read_text(encoding="utf-8")
            value = text if file.suffix == ".jinja" else json.loads(text).get("chat_template")
        except MALFORMED as error:
            raise unreadable(spec, error) from error
        if template := default_template(value):
            return template
    return None


def template_of_processor(processor: Any, tokenizers: bool = True) -> str | None:
    """Return the chat template that a processor was loaded with; with `tokenizers`, else that of its tokenizer."""
    template = default_template(getattr(processor, "chat_template", None))
    if template is not None or not tokenizers:
        return template
    return default_template(getattr(processor.tokenizer, "chat_template", None))


def default_template(value: Any) -> str | None:
    """Return the default template of one template, several by name, or a list of named ones as in old files."""
    if isinstance(value, list):
        value = {part.get("name"): part.get("template") for part in value if isinstance(part, dict)}
    return (value.get("default") if isinstance(value, dict) else value) or None


def other_template(spec: ModelSpec, shipped: str | None) -> str | None:
    """Return one line if the checkpoint's template differs from the hash in the model's file; else None."""
    expected, actual = spec.template_sha256, sha256_of(shipped)
    if expected is None or spec.weights == "random" or expected == actual:
        return None
    return (
        f"model={spec.name}: the checkpoint's chat template has sha256 {actual}, not {expected} "
        "(model.template_sha256): another revision, or changed; prompts follow it only under "
        f"model.conversation={CHECKPOINT}"
    )


def warn_of_template(spec: ModelSpec, shipped: str | None, template: str) -> None:
    """Log the line of `other_template`, or that prompts of a local directory do not follow its template."""
    line = other_template(spec, shipped)
    unstated = spec.conversation is None and spec.template_sha256 is None
    if line is None and spec.path is not None and shipped not in (None, template) and unstated:
        line = (
            f"model={spec.name}: prompts follow the family's own format; the chat template in {str(spec.path)!r} "
            f"differs, and is used under model.conversation={CHECKPOINT}"
        )
    if line is not None:
        log.warning("%s", line)


def thinking_options(spec: ModelSpec, template: str) -> dict[str, bool]:
    """Return `enable_thinking` for a chat template by `model.generation.thinking`; nothing if that is unset.

    Raises:
        UserError: reasoning is to be off, and the template has no such switch.
    """
    prompted = thinking_of(spec).prompted
    if prompted is not None and SWITCH in template:
        return {SWITCH: prompted}
    if prompted is False:
        raise UserError(
            f"model.generation.thinking='off': the prompt format of model={spec.name!r} does not read {SWITCH}; valid: "
            f"null, or model.conversation={CHECKPOINT} where the checkpoint's template reads it"
        )
    return {}


def thinking_of(spec: ModelSpec) -> Thinking:
    """Return the words for reasoning of `model.generation.thinking`."""
    return Thinking.of(spec.generation.get("thinking")) or Thinking()
