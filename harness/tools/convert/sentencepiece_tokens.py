"""A release's tokenizer: its settings, and the library's from a sentencepiece model of BPE."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
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
from transformers.tokenization_utils_base import generate_merges

# sentencepiece's own copy of this module requires a newer protobuf than other packages allow. Its classes are built
# when it is imported, where a type checker does not see them.
from transformers.utils.sentencepiece_model_pb2_new import ModelProto  # type: ignore[attr-defined]

from espalier.harness.errors import UserError, foreign

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
    with foreign(f"{str(folder)!r}: no usable tokenizer_config.json", "the original file"):
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        old = folder / "added_tokens.json"
        numbers = json.loads(old.read_text(encoding="utf-8")) if old.is_file() else {}
        added = {number: AddedToken(name, normalized=False) for name, number in numbers.items()}
        decoder = config.get("added_tokens_decoder", {})
        added |= {int(number): AddedToken(**token) for number, token in decoder.items()}
        further = [_content(token) for token in config.get("additional_special_tokens") or ()]
        named = {role: _content(config[role]) for role in ROLES if config.get(role) is not None}
    return TokenSettings(config, added, named, frozenset([*named.values(), *further]))


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def from_pieces(
    folder: Path, settings: TokenSettings, once: bool, prompt: str = ""
) -> tuple[Tokenizer, str]:
    """Return the tokenizer of a sentencepiece model, and the text that must precede a prompt.

    Args:
        folder: of the release.
        settings: its tokenizer's settings.
        once: as of `fast_tokenizer`.
        prompt: an empty one.

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
    # A space that the release's tokenizer puts before the first special token has to be written out.
    openings = [token.content for token in added.values() if prompt.startswith(token.content)]
    spaced = once and model.normalizer_spec.add_dummy_prefix
    return backend, " " if spaced and openings and openings[0] not in settings.declared else ""


def wrapped(backend: Tokenizer, **tokens: Any) -> PreTrainedTokenizerFast:
    """Return the library's tokenizer; `tokens` are its special ones by role."""
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, padding_side="left", **tokens
    )


def read_pieces(file: Path) -> Any:
    """Return a parsed sentencepiece model.

    Raises:
        UserError: it is not there, does not parse, is no BPE, or changes texts first.
    """
    model = ModelProto()
    with foreign(f"{str(file)!r} is no sentencepiece model", "the original file", (DecodeError,)):
        model.ParseFromString(file.read_bytes())
    if model.trainer_spec.model_type != _BPE:
        raise UserError(f"{str(file)!r} cannot be converted; valid: a sentencepiece model of BPE")
    spec = model.normalizer_spec
    if spec.precompiled_charsmap or spec.remove_extra_whitespaces:
        raise UserError(
            f"{str(file)!r} cannot be converted, it normalises texts; valid: a sentencepiece model that keeps them"
        )
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
    normal = {
        piece.piece: piece.score
        for number, piece in enumerate(model.pieces)
        if piece.type == _NORMAL and number not in added
    }
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            generate_merges({name: vocabulary[name] for name in normal}, normal),
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
