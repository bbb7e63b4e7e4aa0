"""A release's tokenizer: its settings, and the library's from a sentencepiece model of BPE, compared with the original.

The ids of whole prompts are compared before anything is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
from transformers import PreTrainedTokenizerFast

# sentencepiece's own copy of this module requires a newer protobuf than other packages allow. Its classes are built
# when it is imported, where a type checker does not see them.
from transformers.utils.sentencepiece_model_pb2_new import ModelProto  # type: ignore[attr-defined]

from espalier.harness.errors import FOREIGN, UserError

#: The character that replaces a space, also the one that is put before a text.
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"

#: Kinds of pieces and of models, as sentencepiece counts them.
_NORMAL, _USER_DEFINED = 1, 4
_BPE = 2


ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True)
class TokenSettings:
    """Content of tokenizer_config.json and added_tokens.json.

    Attributes:
        config: content of tokenizer_config.json.
        added: added tokens by id.
        named: special tokens by role.
        declared: all special tokens.
    """

    config: Mapping[str, Any]
    added: dict[int, AddedToken]
    named: dict[str, str]
    declared: frozenset[str]


def read_settings(folder: Path) -> TokenSettings:
    """Return the settings of a release's tokenizer: old releases state added tokens in added_tokens.json.

    Raises:
        UserError: a file is not there or does not parse.
    """
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        old = folder / "added_tokens.json"
        numbers = json.loads(old.read_text(encoding="utf-8")) if old.is_file() else {}
        added = {number: AddedToken(name, normalized=False) for name, number in numbers.items()}
        for number, token in config.get("added_tokens_decoder", {}).items():
            added[int(number)] = AddedToken(**token)
        further = [_content(token) for token in config.get("additional_special_tokens") or ()]
        named = {role: _content(config[role]) for role in ROLES if config.get(role) is not None}
    except FOREIGN as error:
        raise UserError(f"{str(folder)!r}: no usable tokenizer_config.json ({error!r})") from error
    return TokenSettings(config, added, named, frozenset([*named.values(), *further]))


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


#: From a text to its token ids.
Ids = Callable[[str], list[int]]


def from_pieces(folder: Path, settings: TokenSettings, once: bool) -> tuple[Tokenizer, Ids]:
    """Return the tokenizer of a sentencepiece model, and the ids of the release's.

    Args:
        folder: of the release.
        settings: its tokenizer's settings.
        once: as of `fast_tokenizer`.

    Raises:
        UserError: the model cannot be read, or ids leave a gap.
    """
    model = read_pieces(folder / "tokenizer.model")
    numbers = {piece.piece: number for number, piece in enumerate(model.pieces)}
    added = {
        numbers[token]: AddedToken(token, special=True, normalized=False)
        for token in settings.named.values()
        if token in numbers
    } | settings.added
    backend = fast_tokenizer(model, added, once)
    ends = [
        settings.named.get(f"{end}_token")
        if settings.config.get(f"add_{end}_token", default)
        else None
        for end, default in (("bos", True), ("eos", False))
    ]
    if any(ends):
        single = [token for token in (ends[0], "$A", ends[1]) if token is not None]
        special = [(token, backend.token_to_id(token)) for token in ends if token is not None]
        backend.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=special
        )
    return backend, reference(model, added, once, settings.declared)


def compared(backend: Tokenizer, ids: Ids, written: Callable[[str], str]) -> str:
    """Return the text that must precede a prompt, after a comparison of ids.

    Args:
        backend: the library's tokenizer.
        ids: those of the release's.
        written: returns the prompt of a question.

    Raises:
        UserError: ids differ.
    """
    # A space that the release's tokenizer puts before the first special token has to be written out.
    lead = " " if ids(written(""))[:1] == [backend.token_to_id(SPACE)] else ""
    for probe in PROBES:
        text = written(probe)
        if backend.encode(lead + text, add_special_tokens=False).ids != ids(text):
            raise UserError(
                f"the converted tokenizer gives other ids than sentencepiece for {probe!r}; nothing was written"
            )
    return lead


def wrapped(backend: Tokenizer, **tokens: Any) -> PreTrainedTokenizerFast:
    """Return the library's tokenizer; `tokens` are its special ones by role."""
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, padding_side="left", **tokens
    )


def read_pieces(file: Path) -> Any:
    """Return a parsed sentencepiece model.

    Raises:
        UserError: it is not there, does not parse or is no BPE.
    """
    model = ModelProto()
    try:
        model.ParseFromString(file.read_bytes())
    except (*FOREIGN, DecodeError) as error:
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
) -> Ids:
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
