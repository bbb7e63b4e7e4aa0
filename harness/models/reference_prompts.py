"""How the originals turn a prompt into token ids, beside how it is done here.

LLaVA's code and what grew out of it, and DeepSeek-OCR's, cut a prompt at its placeholders and tokenise the pieces one
by one, with the begin token once. A tokenizer that marks the start of a text (sentencepiece's blank) marks it at each
piece then, and not where the whole prompt is tokenised at once, as the library's processors do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from espalier.harness.models.chat_media import Chat

if TYPE_CHECKING:
    from espalier.harness.models.adapter import Adapter

#: Stands for a picture or a video among token ids.
SEEN = -1


@dataclass(frozen=True)
class Tokens:
    """A prompt as token ids, `SEEN` for each picture or video.

    Attributes:
        prompt: the text.
        ours: what the model is given.
        theirs: what the originals' procedure gives it.
        words: of each id that stands in either, its token.
    """

    prompt: str
    ours: tuple[int, ...]
    theirs: tuple[int, ...]
    words: dict[int, str]

    @property
    def difference(self) -> str | None:
        """Return one line about the first token that differs; None if none does."""
        if self.ours == self.theirs:
            return None
        pairs = zip(self.ours, self.theirs, strict=False)
        place = next(
            (n for n, (mine, other) in enumerate(pairs) if mine != other),
            min(len(self.ours), len(self.theirs)),
        )
        return (
            f"token {place}: here {self._at(self.ours, place)}, in the original {self._at(self.theirs, place)}; "
            f"{len(self.ours)} and {len(self.theirs)} tokens"
        )

    def _at(self, ids: Sequence[int], place: int) -> str:
        if place >= len(ids):
            return "the end"
        return "a picture" if ids[place] == SEEN else f"{ids[place]} {self.words[ids[place]]!r}"


def in_pieces(
    tokenizer: Any, prompt: str, placeholders: Sequence[str], begun: bool = False
) -> list[int]:
    """Return a prompt's ids as the originals make them: each piece between placeholders tokenised alone.

    Where the first piece starts with the begin token, LLaVA's code leaves out the first token of every later piece as
    another one, whatever it is.

    Args:
        tokenizer: the model's.
        prompt: with a placeholder for each picture or video.
        placeholders: their texts.
        begun: the prompt holds its begin token as text, and the tokenizer adds none to the pieces: DeepSeek-OCR's code.
    """
    pieces, rest = [], prompt
    while found := [(rest.index(mark), mark) for mark in placeholders if mark in rest]:
        start, mark = min(found)
        pieces.append(rest[:start])
        rest = rest[start + len(mark) :]
    tokenised = [
        list(tokenizer(piece, add_special_tokens=not begun)["input_ids"])
        for piece in (*pieces, rest)
    ]
    first = tokenised[0][:1]
    begins = not begun and first == [tokenizer.bos_token_id]
    ids = list(tokenised[0])
    for piece in tokenised[1:]:
        ids += [SEEN, *piece[begins:]]
    return ids


def compared(adapter: Adapter, chat: Chat) -> Tokens:
    """Return the tokens of a chat as the model is given them and as the originals' procedure makes them.

    Of families whose originals tokenise a prompt at once, both are the same by construction.

    Cost: the pictures of the chat are processed, the model is not run.
    """
    tokenizer = adapter.processor.tokenizer
    prompt = adapter.written(chat, adapter.opened(chat))
    inputs = adapter.encode([chat])
    given = inputs["input_ids"][0][inputs["attention_mask"][0].bool()].tolist()
    visual = set(adapter.items(inputs))
    ours = [
        one
        for seen, run in groupby(given, lambda one: one in visual)
        for one in ([SEEN] if seen else run)
    ]
    theirs = ours
    if adapter.pieces != "whole":
        begun = adapter.pieces == "begun"
        theirs = in_pieces(tokenizer, prompt, adapter.placeholders, begun)
    known = {one for one in (*ours, *theirs) if one != SEEN}
    words = {one: str(tokenizer.convert_ids_to_tokens(one)) for one in known}
    return Tokens(prompt, tuple(ours), tuple(theirs), words)
