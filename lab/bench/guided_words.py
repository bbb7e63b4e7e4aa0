"""Words of captions that a draft predicts: by kind, and the first wrong one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from espalier.harness.seedling.scenes import COLOUR_NAMES, SHAPES
from espalier.harness.seedling.video.events import COLUMNS, ROWS, WORDS
from espalier.harness.stats import Interval, share_interval

#: Subset, ratio, and token positions.
Setting = tuple[str, float, str]

KINDS = ("time", "object", "digit", "place", "event", "end", "template")
_EVENTS = frozenset(
    ("enters", "leaves", "moves", "turns", "changes", "is", "there", "covered", "seen")
)


@dataclass(frozen=True)
class CaptionRecord:
    """One caption.

    Attributes:
        caption: token ids, including the end of sequence.
        right: for each setting, which tokens the draft predicts.
        kept: for each subset and ratio, the shares of the tokens that show an object, and of those in which an event
            begins, that the draft sees.
    """

    caption: list[int]
    right: dict[Setting, list[bool]]
    kept: dict[tuple[str, float], tuple[float, float]]


@dataclass(frozen=True)
class Guided:
    """Results of one setting over all captions.

    Attributes:
        accepted: share of accepted words.
        by_kind: share of accepted words of each kind.
        first: share of captions by kind of the first wrong word; the rest have none.
        run: mean number of words before the first wrong one.
        objects: share of the tokens with an object that the draft sees, mean over captions.
        events: the same for tokens in which an event begins.
    """

    accepted: Interval
    by_kind: dict[str, float]
    first: dict[str, float]
    run: float
    objects: float
    events: float


def summarised(captions: Sequence[CaptionRecord]) -> dict[Setting, Guided]:
    """Return the results of each setting, in the order of measurement."""
    return {setting: _summary(captions, setting) for setting in captions[0].right}


def _summary(captions: Sequence[CaptionRecord], setting: Setting) -> Guided:
    rows = [(record.caption, record.right[setting]) for record in captions]
    objects, events = zip(*(record.kept[setting[:2]] for record in captions), strict=True)
    of_kind, right_of_kind, first = Counter[str](), Counter[str](), Counter[str]()
    for caption, right in rows:
        kinds = [kind_of_word(token) for token in caption]
        of_kind.update(kinds)
        right_of_kind.update(kind for kind, is_right in zip(kinds, right, strict=True) if is_right)
        if not all(right):
            first[kinds[right.index(False)]] += 1
    return Guided(
        share_interval([sum(right) for _, right in rows], [len(right) for _, right in rows]),
        {kind: right_of_kind[kind] / of_kind[kind] for kind in KINDS if of_kind[kind]},
        {kind: first[kind] / len(rows) for kind in KINDS},
        sum([*right, False].index(False) for _, right in rows) / len(rows),
        fmean(objects),
        fmean(events),
    )


def kind_of_word(token: int) -> str:
    """Return the kind (one of `KINDS`) of a word of a caption."""
    word = WORDS[token]
    if word[0] == "t" and word[1:].isdigit():
        return "time"
    if word.isdigit():
        return "digit"
    if word in COLOUR_NAMES or word in SHAPES or word == "frame":
        return "object"
    if word in ROWS or word in COLUMNS:
        return "place"
    if word in _EVENTS:
        return "event"
    return "end" if word == "<eos>" else "template"
