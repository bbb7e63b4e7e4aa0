"""Words of captions that a draft predicts or not: by kind, and the first one that it gets wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from espalier.harness.seedling.scenes import COLOUR_NAMES
from espalier.harness.seedling.sprites import SHAPES
from espalier.harness.seedling.video.clip_vocabulary import COLUMNS, ROWS, WORDS
from espalier.harness.stats import Interval, share_interval

#: Which subset, the ratio, and where its tokens stand.
Setting = tuple[str, float, str]

KINDS = ("time", "object", "digit", "place", "event", "end", "template")
_EVENTS = frozenset(
    ("enters", "leaves", "moves", "turns", "changes", "is", "there", "covered", "seen")
)


@dataclass(frozen=True)
class Told:
    """One caption.

    Attributes:
        caption: its ids, the end of sequence included.
        right: for each setting, which of them the draft predicts.
        kept: for each subset and ratio, the shares of the tokens that show an object, and of those in which an event
            begins, that the draft sees.
    """

    caption: list[int]
    right: dict[Setting, list[bool]]
    kept: dict[tuple[str, float], tuple[float, float]]


@dataclass(frozen=True)
class Guided:
    """What came of one setting over all captions.

    Attributes:
        accepted: share of all words.
        by_kind: share of the words of each kind that there are.
        first: share of captions whose first wrong word is of a kind; what is left has none.
        run: words before the first wrong one, mean over captions.
        objects: share of the tokens that show an object which the draft sees, mean over captions.
        events: the same of tokens in which an event begins.
    """

    accepted: Interval
    by_kind: dict[str, float]
    first: dict[str, float]
    run: float
    objects: float
    events: float


def summarised(told: Sequence[Told]) -> dict[Setting, Guided]:
    """Return what came of each setting, in the order in which they were measured."""
    return {setting: _summary(told, setting) for setting in told[0].right}


def _summary(told: Sequence[Told], setting: Setting) -> Guided:
    rows = [(one.caption, one.right[setting]) for one in told]
    objects, events = zip(*(one.kept[setting[:2]] for one in told), strict=True)
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
    """Return which of `KINDS` a word of a caption is."""
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
