"""The tokenizer of a release of LLaVA-1.5 or -1.6 in the library's form, its ids held against the release's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, processors
from transformers import PreTrainedTokenizerFast

from espalier.harness.errors import FOREIGN, UserError
from espalier.harness.models.loader import pretrained
from espalier.harness.tools.convert.sentencepiece_tokens import (
    PROBES,
    fast_tokenizer,
    read_pieces,
    reference,
)

IMAGE, PADDING = "<image>", "<pad>"

_NAMED = ("bos_token", "eos_token", "unk_token")


def read_tokenizer(folder: Path) -> Any:
    """Return the tokenizer with a placeholder and a padding token, as in transformers' checkpoints.

    LLaVA's code encodes each text between pictures by itself, so every one begins with a space.

    Raises:
        UserError: a file is missing or of another kind, or ids would differ from the release's.
    """
    if (folder / "tokenizer.model").is_file():
        tokenizer = _from_pieces(folder)
    else:
        try:
            # Not as a Llama's, for which the library would rebuild it.
            tokenizer = pretrained(PreTrainedTokenizerFast, folder)
        except FOREIGN as error:
            raise UserError(f"{str(folder)!r}: no usable tokenizer ({error})") from error
    tokenizer.add_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (IMAGE, PADDING)],
        special_tokens=True,
    )
    tokenizer.pad_token = PADDING
    return tokenizer


def _from_pieces(folder: Path) -> Any:
    """Return the tokenizer of a sentencepiece model, after a comparison of ids on whole prompts."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        added_path = folder / "added_tokens.json"
        further = json.loads(added_path.read_text(encoding="utf-8")) if added_path.is_file() else {}
        added = _added(config, further)
        named = {role: _content(config[role]) for role in _NAMED}
    except FOREIGN as error:
        raise UserError(f"{str(folder)!r}: no usable tokenizer_config.json ({error!r})") from error
    model = read_pieces(folder / "tokenizer.model")
    pieces = {piece.piece: number for number, piece in enumerate(model.pieces)}
    for token in named.values():
        if token in pieces:
            added.setdefault(pieces[token], AddedToken(token, special=True, normalized=False))
    backend = fast_tokenizer(model, added, once=False)
    ids = reference(model, added, False, frozenset(named.values()))
    for probe in PROBES:
        text = f"{probe}{named['eos_token']}{probe}"
        if backend.encode(text, add_special_tokens=False).ids != ids(text):
            raise UserError(
                f"the converted tokenizer gives other ids than sentencepiece for {probe!r}; nothing was written"
            )
    if config.get("add_bos_token", True):
        begin = named["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=[begin, "$A"], special_tokens=[(begin, backend.token_to_id(begin))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        **named,
    )


def _added(config: Mapping[str, Any], further: Mapping[str, int]) -> dict[int, AddedToken]:
    """Return added tokens by id: new files state them in tokenizer_config.json, old ones in added_tokens.json."""
    stated = {
        int(number): AddedToken(
            token["content"], **{k: v for k, v in token.items() if k != "content"}
        )
        for number, token in config.get("added_tokens_decoder", {}).items()
    }
    old = {number: AddedToken(name, normalized=False) for name, number in further.items()}
    return {**old, **stated}


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)
