"""The tokenizer of a release of InternVL in the library's form, its ids held against the release's own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from sentencepiece import SentencePieceProcessor
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

# sentencepiece's own copy of this module requires a newer protobuf than other packages allow. Its classes are built
# when it is imported, where a type checker does not see them.
from transformers.utils.sentencepiece_model_pb2_new import ModelProto  # type: ignore[attr-defined]

from espalier.harness.errors import FOREIGN, UserError
from espalier.harness.models.conversations import NUMBERED, ChatFrame
from espalier.harness.models.internvl_processor import TOKENS

#: The character that replaces a space, also the one that is put before a text.
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"

#: Kinds of pieces and of models, as sentencepiece counts them.
_NORMAL, _USER_DEFINED = 1, 4
_BPE = 2


def read_pieces(file: Path) -> Any:
    """Return a parsed sentencepiece model.

    Raises:
        UserError: it is not there, does not parse or is no BPE.
    """
    model = ModelProto()
    try:
        model.ParseFromString(file.read_bytes())
    except (OSError, DecodeError) as error:
        raise UserError(f"{str(file)!r} is no sentencepiece model ({error})") from error
    if model.trainer_spec.model_type != _BPE:
        raise UserError(f"{str(file)!r} cannot be converted; valid: a sentencepiece model of BPE")
    return model


def fast_tokenizer(model: Any, added: Mapping[int, AddedToken], once: bool) -> Tokenizer:
    """Return the tokenizer without a post-processor.

    Args:
        model: a parsed sentencepiece model.
        added: by id; one below the number of pieces takes the place of a piece that was reserved for it.
        once: a space is put before the text, otherwise before each part between added tokens.

    Raises:
        UserError: ids of added tokens leave a gap, or a name occurs twice.
    """
    names = [piece.piece for piece in model.pieces]
    for number in sorted(added):
        if number > len(names):
            raise UserError(
                f"added token {added[number].content!r} has id {number}, {len(names)} is the next free one"
            )
        names[number : number + 1] = [added[number].content]
    vocabulary = {name: number for number, name in enumerate(names)}
    if len(vocabulary) < len(names):
        twice = next(name for number, name in enumerate(names) if vocabulary[name] != number)
        raise UserError(f"token {twice!r} has two ids")
    merges = _merges(model, added)
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            merges,
            unk_token=model.trainer_spec.unk_piece,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    defined = [
        AddedToken(piece.piece, normalized=False)
        for number, piece in enumerate(model.pieces)
        if piece.type == _USER_DEFINED and number not in added
    ]
    tokenizer.add_tokens([*(added[number] for number in sorted(added)), *defined])
    prefix = model.normalizer_spec.add_dummy_prefix
    if once:
        scheme = "first" if prefix else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, scheme, split=False)
    else:
        steps = [normalizers.Prepend(SPACE)] if prefix else []
        tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", left=1)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges(model: Any, added: Mapping[int, AddedToken]) -> list[tuple[str, str]]:
    """Return the pairs that sentencepiece joins, the highest score first."""
    normal = {
        piece.piece: number
        for number, piece in enumerate(model.pieces)
        if piece.type == _NORMAL and number not in added
    }
    ranked = [
        (-model.pieces[number].score, normal[name[:cut]], normal[name[cut:]], name, cut)
        for name, number in normal.items()
        for cut in range(1, len(name))
        if name[:cut] in normal and name[cut:] in normal
    ]
    return [(name[:cut], name[cut:]) for *_, name, cut in sorted(ranked)]


def reference(
    model: Any, added: Mapping[int, AddedToken], once: bool, declared: frozenset[str]
) -> Callable[[str], list[int]]:
    """Return what gives the ids of a text as the release's slow tokenizer does: parts between added tokens, one by one.

    Args:
        model: a parsed sentencepiece model.
        added: by id.
        once: as of `fast_tokenizer`.
        declared: the tokens that the release calls special, a leading space before one is dropped.
    """
    spaced = bool(model.normalizer_spec.add_dummy_prefix)
    bare = ModelProto()
    bare.CopyFrom(model)
    bare.normalizer_spec.add_dummy_prefix = spaced and not once
    pieces = SentencePieceProcessor(model_proto=bare.SerializeToString())
    by_content = {token.content: (number, token) for number, token in added.items()}
    longest = sorted(by_content, key=len, reverse=True)
    border = re.compile("(" + "|".join(map(re.escape, longest)) + ")")

    def ids(text: str) -> list[int]:
        parts = [part for part in border.split(SPACE * (spaced and once) + text) if part]
        if len(parts) > 1 and parts[0] == SPACE and parts[1] in declared:
            del parts[0]
        for place, part in enumerate(parts):
            token = by_content.get(part, (0, None))[1]
            if token is not None and token.rstrip and place + 1 < len(parts):
                parts[place + 1] = parts[place + 1].lstrip()
            if token is not None and token.lstrip and place > 0:
                parts[place - 1] = parts[place - 1].rstrip()
        token_ids: list[int] = []
        for part in parts:
            token_ids += [by_content[part][0]] if part in by_content else pieces.encode(part)
        return token_ids

    return ids


#: Texts for comparing ids: languages, digits, white space, code, and characters that need byte tokens.
PROBES = (
    "What is shown in this picture? Answer with a single word.",
    "  two  spaces,\ttabs\n\nand lines \n",
    "请描述图中的文字。どこですか。 Где это? ¿Qué es?",
    "x1 = 3.14159 * (2024 - 10_000) ** 2  # 100%, $5, e@mail.org",
    "naïve café, ½ of 🙂🙃, \u200bzero width, \x07",
    "A. yes\nB. no\nAnswer with the option's letter from the given choices directly.",
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
        backend: Tokenizer = Qwen2Tokenizer.from_pretrained(source).backend_tokenizer
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
