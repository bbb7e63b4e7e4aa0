"""The tokenizer of a release of InternVL in the library's form, its ids held against the release's own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

from espalier.harness.errors import FOREIGN, UserError
from espalier.harness.models.conversations import NUMBERED, ChatFrame
from espalier.harness.models.internvl import TOKENS
from espalier.harness.models.loader import pretrained
from espalier.harness.tools.convert.sentencepiece_tokens import (
    PROBES,
    SPACE,
    fast_tokenizer,
    read_pieces,
    reference,
)

#: What has to be one token in a chat format.
_MARKS = re.compile(r"<\|\w+\|>")

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True)
class Tokens:
    """Contents of a release's tokenizer files.

    Attributes:
        backend: the tokenizer, without tokens put at the ends of a text.
        named: its special tokens by role, None for one it does not have.
        ends: tokens put before and after a text.
        ids: the release's own ids of a text; None where the library reads the release's format itself.
    """

    backend: Tokenizer
    named: Mapping[str, str | None]
    ends: tuple[str | None, str | None]
    ids: Callable[[str], list[int]] | None


def read_tokens(source: Path) -> Tokens:
    """Read tokenizer_config.json and the vocabulary of a release.

    Raises:
        UserError: a file is not there or of another kind, or an added token would get another id.
    """
    try:
        config = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
        added = {
            int(number): AddedToken(token.pop("content"), **token)
            for number, token in config["added_tokens_decoder"].items()
        }
    except FOREIGN as error:
        raise UserError(f"{str(source)!r}: no usable tokenizer_config.json ({error!r})") from error
    named = {role: _content(config.get(role)) for role in _NAMED}
    kind = str(config.get("tokenizer_class")).removesuffix("Fast")
    if kind == "Qwen2Tokenizer":
        tokens = Tokens(_qwen2(source), named, (None, None), None)
    elif kind in ("InternLM2Tokenizer", "LlamaTokenizer"):
        tokens = _pieces(source, config, kind, added, named)
    else:
        raise UserError(
            f"tokenizer_config.json: tokenizer_class={kind!r} cannot be converted; "
            "valid: InternLM2Tokenizer, LlamaTokenizer, Qwen2Tokenizer"
        )
    for number, token in added.items():
        if tokens.backend.token_to_id(token.content) != number:
            raise UserError(
                f"token {token.content!r} has id {number} in the release, "
                f"{tokens.backend.token_to_id(token.content)} after conversion"
            )
    return tokens


def _content(token: Any) -> str | None:
    content: str | None = token["content"] if isinstance(token, dict) else token
    return content


def _qwen2(source: Path) -> Tokenizer:
    try:
        backend: Tokenizer = pretrained(Qwen2Tokenizer, source).backend_tokenizer
    except FOREIGN as error:
        raise UserError(f"{str(source)!r}: no usable vocabulary ({error})") from error
    return backend


def _pieces(
    source: Path,
    config: Mapping[str, Any],
    kind: str,
    added: Mapping[int, AddedToken],
    named: Mapping[str, str | None],
) -> Tokens:
    model = read_pieces(source / "tokenizer.model")
    # Llama's tokenizer once put a space after every special token; InternLM2's still does.
    once = kind == "LlamaTokenizer" and config.get("legacy") is False
    further = map(_content, config.get("additional_special_tokens") or ())
    declared = frozenset(str(token) for token in (*named.values(), *further) if token is not None)
    return Tokens(
        backend=fast_tokenizer(model, added, once),
        named=named,
        ends=(
            named["bos_token"] if config.get("add_bos_token", True) else None,
            named["eos_token"] if config.get("add_eos_token", False) else None,
        ),
        ids=reference(model, added, once, declared),
    )


def build_tokenizer(tokens: Tokens, prompt: ChatFrame) -> tuple[PreTrainedTokenizerFast, str]:
    """Return the tokenizer and the chat template.

    Raises:
        UserError: it lacks a token that a chat needs, or gives other ids than the release.
    """
    backend = tokens.backend
    end = prompt.ends["user"].strip()
    media = [TOKENS[role] for role in TOKENS if role != "video_token"]
    for token in (*media, end, *_MARKS.findall(prompt.render(""))):
        if backend.token_to_id(token) is None:
            raise UserError(f"the tokenizer of the release has no token {token!r}")
    lead = _check(tokens, prompt)
    before, after = tokens.ends
    if before is not None or after is not None:
        single = [token for token in (before, "$A", after) if token is not None]
        backend.post_processor = processors.TemplateProcessing(
            single=single,
            special_tokens=[(t, backend.token_to_id(t)) for t in (before, after) if t is not None],
        )
    named = {role: token for role, token in tokens.named.items() if token is not None}
    named.setdefault("eos_token", end)
    named.setdefault("pad_token", named["eos_token"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        # The processor replaces the video token before a text is encoded: its id, the next free one, never reaches
        # the model.
        **named,
        **TOKENS,
    )
    return tokenizer, replace(prompt, lead=lead).template(NUMBERED)


def _check(tokens: Tokens, prompt: ChatFrame) -> str:
    """Compare ids on whole prompts; return the lead of the chat template."""
    if tokens.ids is None:
        return ""
    # A space that the release's tokenizer puts before the first special token has to be written out.
    space = tokens.backend.token_to_id(SPACE)
    lead = " " if tokens.ids(prompt.render(""))[:1] == [space] else ""
    for probe in PROBES:
        text = prompt.render(probe)
        ids = tokens.backend.encode(lead + text, add_special_tokens=False).ids
        if ids != tokens.ids(text):
            raise UserError(
                f"the converted tokenizer gives other ids than sentencepiece for {probe!r}; nothing was written"
            )
    return lead
