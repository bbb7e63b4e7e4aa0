"""Tokenizer files of tiny releases."""

from __future__ import annotations

import io
from typing import Any

from sentencepiece import SentencePieceTrainer


def piece_model(reserved: tuple[str, ...], **options: Any) -> bytes:
    """A sentencepiece model of bytes and a few merges, as InternLM2's and Llama's are made."""
    file = io.BytesIO()
    settings = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, **options}
    SentencePieceTrainer.train(
        sentence_iterator=iter(["w1 w2 what is the word in this picture here 12 34 56"] * 3),
        model_writer=file,
        vocab_size=340,
        model_type="bpe",
        byte_fallback=True,
        user_defined_symbols=list(reserved),
        minloglevel=2,
        **settings,
    )
    return file.getvalue()


def token(content: str, **flags: bool) -> dict[str, Any]:
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {"content": content, **plain, "special": True, **flags}
