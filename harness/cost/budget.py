"""Budgets in integer token counts, the only place where one is rounded, and the equivalent tokens of a schedule.

Every rule reduces a schedule, the tokens kept after each site, to one number, its
*equivalent tokens*, and requires it to be (1 - ratio) N, or min(count, N) where a budget counts tokens. A method with
several sites gives a one-parameter family of schedules (`TokenReducer.fractions`). The parameter is solved by
bisection, every count is rounded half up, and the last site absorbs the rounding error (earlier sites only when it is
at its bounds), so that the integers miss the rule by less than one token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import pairwise
from numbers import Real
from typing import Any

from espalier.harness.cost.facts import ModelFacts
from espalier.harness.cost.flops import linear_cost, quadratic
from espalier.harness.errors import Refused, brief, unknown_name
from espalier.harness.store.row_text import amount_text
from espalier.methods.base import MethodError, PlanError, Site, TokenReducer
from espalier.methods.blame import Blame
from espalier.methods.views import BEFORE_DECODER

#: Text tokens assumed when a budget is checked before any sample is loaded: a short question.
NOMINAL_TEXT = 32

# Counts this close to a half count as halves: ratios are decimal, and (1 - 0.9) * 15 < 1.5 in binary.
_TIE = 1e-9

_SMALLEST_SHARE = 2.0**-200

_Shares = Callable[[float, tuple[Site, ...]], tuple[float, ...]]


class BudgetError(Refused):
    """The ratio or rule is invalid, or the method cannot reach it on this model."""


class BudgetMismatch(RuntimeError):
    """The kept tokens of a run differ from the budget's request."""


@dataclass(frozen=True)
class Budget:
    """Rule, and ratio of removed visual tokens or count of those that stay.

    Attributes:
        rule: one of RULES.
        ratio: share REMOVED, 0 <= ratio < 1; 1 only if nothing drops tokens and a draft sees none. With a count, the
            share that it removes of a picture of nominal size.
        count: equivalent tokens of every sample, all of a sample that has fewer; None: the ratio applies.
        down: whether a share of tokens after the sites is rounded down instead, to at least one.
        whole_sites: first sites that keep every token.

    Raises:
        BudgetError: unknown rule, a ratio that is not a number in [0, 1], or a count that is no integer above 0.
    """

    rule: str
    ratio: float
    count: int | None = None
    down: bool = False
    whole_sites: int = 0

    def __post_init__(self) -> None:
        """Reject values that no method can reach."""
        if self.rule not in RULES:
            raise BudgetError(str(unknown_name("budget", self.rule, RULES)))
        if isinstance(self.ratio, bool) or not isinstance(self.ratio, Real):
            raise BudgetError(f"ratio={self.ratio!r} is not a number; valid: 0 <= ratio < 1")
        if not 0 <= self.ratio <= 1:  # also False for NaN
            raise _out_of_range(self.ratio)
        if self.count is not None and (type(self.count) is not int or self.count < 1):
            raise BudgetError(f"keep={self.count!r} is no count of tokens; valid: 1 and more")
        object.__setattr__(self, "ratio", float(self.ratio))

    @classmethod
    def of_count(cls, rule: str, count: int, facts: ModelFacts) -> Budget:
        """Return the budget of `count` tokens a sample on a model."""
        nominal = max(facts.visual_tokens, 1)
        return cls(rule, 1 - min(count, nominal) / nominal, count)

    @property
    def amount(self) -> str:
        """What stays or goes, for a reader: `0.9`, or `64 tokens`."""
        return amount_text(self.ratio, self.count)

    @property
    def acts(self) -> bool:
        """Whether it may remove tokens of some sample."""
        return self.ratio > 0 or self.count is not None

    def target(self, n_visual: int) -> float:
        """Return the equivalent tokens that a sample of `n_visual` tokens keeps."""
        return (1 - self.ratio) * n_visual if self.count is None else min(self.count, n_visual)

    def clips(self, n_visual: int) -> bool:
        """Return whether a sample has visual tokens, but fewer than the count."""
        return self.count is not None and 0 < n_visual < self.count

    def keep(
        self,
        reducer: TokenReducer,
        facts: ModelFacts,
        n_visual: int,
        n_text: int,
        earlier_counts: tuple[int, ...] = (),
    ) -> tuple[int, ...]:
        """Return the tokens kept after each site: non-increasing, between 1 and `n_visual`.

        Ratio 0, and a count of at least `n_visual`, keep everything under every rule; a method without sites gets an
        empty schedule, a sample without visual tokens zeros. The first counts are `earlier_counts`, if there are any,
        and those of the sites after them then meet the rule.

        Raises:
            BudgetError: no schedule of this method meets the rule.

        Cost: about 0.1 ms for a new pair of counts, a cache hit after that.
        """
        frame = frame_of(reducer, facts, n_visual, n_text)
        if self.ratio == 1 and frame.starts:
            raise _out_of_range(self.ratio)
        if not frame.starts or not self.acts or self.target(n_visual) == n_visual:
            return (n_visual,) * len(frame.starts)
        unreduced = (n_visual,) * self.whole_sites
        if self.down:
            count = max(1, int(n_visual * (1 - self.ratio)))
            return unreduced + (count,) * (len(frame.starts) - len(unreduced))
        schedule = _schedule(
            self.rule, self.target(n_visual), frame, reducer.shares, earlier_counts
        )
        if schedule is None:
            raise BudgetError(self._unreachable(reducer, frame))
        return unreduced + schedule[len(unreduced) :]

    def draft_keep(self, n_visual: int) -> int:
        """Return how many of `n_visual` tokens a draft sees: the count, or the share (1 - ratio), rounded half up.

        At least one if ratio < 1 and there are any; ratio 1 leaves none.
        """
        return 0 if self.ratio == 1 or n_visual == 0 else max(1, _half_up(self.target(n_visual)))

    def check(self, reducer: TokenReducer, facts: ModelFacts) -> None:
        """Raise BudgetError when the method cannot reach the ratio on a sample of nominal size.

        Raises:
            PlanError: `fractions` returns no shares, or fails.
        """
        _check_fractions(reducer, frame_of(reducer, facts, 1, 1).sites)
        self.keep(reducer, facts, facts.visual_tokens, NOMINAL_TEXT)

    def verify(self, reducer: TokenReducer, facts: ModelFacts, record: Any) -> EquivalentTokens:
        """Compare one finished sample, a `SampleRecord`, with the budget and return its equivalent tokens.

        Raises:
            BudgetMismatch: the layers did not see the tokens that the plans kept; or, unless the method is adaptive,
                the counts differ from the requested ones, which are a curved method's own, or miss the rule by more
                than rounding.
        """
        frame = frame_of(reducer, facts, record.visual, record.text)
        amount = f"ratio {self.ratio}" if self.count is None else self.amount
        where = f"sample {record.sample}: budget {self.rule}, {amount}"
        if len(record.kept) != len(frame.starts):
            raise BudgetMismatch(
                f"{where}: {len(record.kept)} counts for {len(frame.starts)} sites"
            )
        result = equivalent_tokens(reducer, facts, record.visual, record.text, record.kept)
        entering = frame.entering(record.kept)
        if tuple(record.entering) != entering:
            raise BudgetMismatch(
                f"{where}: layers saw {_brief(record.entering)} visual tokens, "
                f"the plans kept {_brief(entering)}"
            )
        if reducer.adaptive or not frame.starts:
            return result
        items = record.items or (record.visual,)
        schedules = [self.keep(reducer, facts, visual, record.text) for visual in items]
        requested = tuple(map(sum, zip(*schedules, strict=True)))
        if not reducer.curved and tuple(record.kept) != requested:
            raise BudgetMismatch(f"{where}: kept {record.kept}, requested {requested}")
        tokens, requested_tokens = getattr(result, self.rule), sum(map(self.target, items))
        if abs(tokens - requested_tokens) > len(items) + _TIE:
            raise BudgetMismatch(
                f"{where}: {tokens:.3f} equivalent tokens, asked for {requested_tokens:.3f}"
            )
        return result

    def _unreachable(self, reducer: TokenReducer, frame: Frame) -> str:
        upper, lower = (
            frame.equivalent(
                self.rule, [f * frame.visual for f in reducer.shares(share, frame.sites)]
            )
            for share in (1.0, _SMALLEST_SHARE)
        )
        if self.count is None:
            # Rounded inwards, so that every ratio of the printed range works.
            low = max(0, math.ceil((1 - upper / frame.visual) * 1e4) / 1e4)
            high = math.floor((1 - lower / frame.visual) * 1e4) / 1e4
            request, valid = f"ratio={self.ratio}", f"{low:g} <= ratio < {high:g}"
        else:
            request = f"keep={self.count}"
            valid = f"{math.floor(lower) + 1} <= keep <= {math.floor(upper + _TIE)}"
        return (
            f"{request} cannot be met under budget={self.rule}: "
            f"{type(reducer).__name__} acting before layer {', '.join(map(str, dict.fromkeys(frame.starts)))} "
            f"of {frame.depth} reaches {valid} "
            f"({frame.visual} visual and {frame.text} text tokens)"
        )


def _check_fractions(reducer: TokenReducer, sites: tuple[Site, ...]) -> None:
    n_sites = len(sites)
    with Blame(reducer, "fractions"):
        for share in (1.0, 0.5):
            fractions = reducer.shares(share, sites)
            if (
                not isinstance(fractions, tuple)
                or len(fractions) != n_sites
                or not all(isinstance(f, float | int) and 0 <= f <= 1 for f in fractions)
                or list(fractions) != sorted(fractions, reverse=True)
            ):
                raise PlanError(
                    f"`fractions` returns {brief(repr(fractions))} for share={share}; valid: a tuple of {n_sites} "
                    "numbers in [0, 1], one a site, none larger than the one before"
                )


def _out_of_range(ratio: float) -> BudgetError:
    return BudgetError(f"ratio={ratio:g} is out of range; valid: 0 <= ratio < 1")


# The bound method hashes and compares by the identity of its reducer, so a reducer need not be
# hashable itself.
@lru_cache(maxsize=8192)
def _schedule(
    rule: str, target: float, frame: Frame, shares: _Shares, earlier_counts: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return the integer schedule, after `earlier_counts`, or None when no share in (0, 1] meets the rule."""
    ceiling = min((frame.visual, *earlier_counts))

    def real(share: float) -> list[float]:
        later = shares(share, frame.sites)[len(earlier_counts) :]
        return [*earlier_counts, *(min(f * frame.visual, ceiling) for f in later)]

    low, high = _SMALLEST_SHARE, 1.0
    # Rounded earlier counts may lie just outside, where the nearest schedule still misses by less than one token.
    reached = (
        frame.equivalent(rule, real(low)) < target <= frame.equivalent(rule, real(high)) + _TIE
    )
    if not (reached or earlier_counts):
        return None
    for _ in range(60):
        middle = (low + high) / 2
        if frame.equivalent(rule, real(middle)) < target:
            low = middle
        else:
            high = middle
    counts = [min(max(_half_up(c), 1), frame.visual) for c in real(high)]
    _settle(rule, frame, counts, target, len(earlier_counts))
    return tuple(counts)


def _settle(rule: str, frame: Frame, counts: list[int], target: float, first: int) -> None:
    """Move the last site, and earlier ones from `first` on while it is at a bound, as close to the rule as possible."""
    last = len(counts) - 1
    for site in range(last, first - 1, -1):
        if frame.spans[site + 1] == 0 or (rule == "kept" and site < last):
            continue  # this site's count does not enter the rule
        if _settle_one(rule, frame, counts, target, site):
            break
    _settle_one(rule, frame, counts, target, last)  # once more, after the others moved


def _settle_one(rule: str, frame: Frame, counts: list[int], target: float, site: int) -> bool:
    """Move one site between its neighbours; return whether it ends strictly inside."""
    low = 1 if site == len(counts) - 1 else counts[site + 1]
    high = frame.visual if site == 0 else counts[site - 1]

    def value(count: int) -> float:
        return frame.equivalent(rule, [*counts[:site], count, *counts[site + 1 :]])

    counts[site] = _nearest(value, target, low, high)
    return low < counts[site] < high


def _nearest(value: Callable[[int], float], target: float, low: int, high: int) -> int:
    """Return the integer in [low, high] with the `value` nearest to `target`; `value` grows, ties go up."""
    floor, top = low, high
    while floor < top:
        middle = (floor + top + 1) // 2
        if value(middle) <= target + _TIE:
            floor = middle
        else:
            top = middle - 1
    above = min(floor + 1, high)
    return above if value(above) - target <= target - value(floor) + _TIE else floor


def _half_up(count: float) -> int:
    return math.floor(count + 0.5 + _TIE)


def _brief(counts: Sequence[int]) -> str:
    """Return runs of equal counts as count x layers."""
    runs: list[list[int]] = []
    for count in counts:
        if runs and runs[-1][0] == count:
            runs[-1][1] += 1
        else:
            runs.append([count, 1])
    return " ".join(f"{count}x{length}" for count, length in runs)


RULES = ("kept", "average", "flops", "kv_bytes")


@dataclass(frozen=True)
class EquivalentTokens:
    """Equivalent visual tokens of a schedule under every rule."""

    kept: float
    average: float
    flops: float

    @property
    def kv_bytes(self) -> float:
        """Of methods that drop tokens, those that enter a layer."""
        return self.average


def equivalent_tokens(
    reducer: TokenReducer, facts: ModelFacts, n_visual: int, n_text: int, kept: Sequence[int]
) -> EquivalentTokens:
    """Return the equivalent tokens of the counts `kept` after each site, under every rule."""
    frame = frame_of(reducer, facts, n_visual, n_text)
    names = (field.name for field in fields(EquivalentTokens))
    return EquivalentTokens(**{rule: frame.equivalent(rule, kept) for rule in names})


@dataclass(frozen=True)
class Frame:
    """The plain numbers of one sample: sites and the layers that they shorten, token counts, costs of a layer.

    One layer of n tokens costs `linear n + square n^2`, with (linear, square) in `cost`; layer 0 costs `extra n` more.
    Layers `states`, of linear attention, cost `state_cost n`.
    """

    sites: tuple[Site, ...]
    starts: tuple[int, ...]
    depth: int
    visual: int
    text: int
    cost: tuple[float, float]
    extra: float = 0.0
    states: tuple[int, ...] = ()
    state_cost: float = 0.0

    @property
    def spans(self) -> tuple[int, ...]:
        """Decoder layers before the first site, then those after each site up to the next."""
        return tuple(b - a for a, b in pairwise((0, *self.starts, self.depth)))

    def entering(self, kept: Sequence[int]) -> tuple[int, ...]:
        """Return the visual tokens entering each layer."""
        counts = zip((self.visual, *kept), self.spans, strict=True)
        return tuple(count for count, span in counts for _ in range(span))

    def equivalent(self, rule: str, kept: Sequence[float]) -> float:
        """Return the equivalent tokens of a schedule, which may be fractional."""
        counts = (self.visual, *kept)
        if rule == "kept":
            return float(counts[-1])
        if rule in ("average", "kv_bytes"):
            return sum(c * s for c, s in zip(counts, self.spans, strict=True)) / self.depth
        linear, square = self.cost
        # Of `spans`, the layers of linear attention.
        bounds = pairwise((0, *self.starts, self.depth))
        state_spans = [sum(a <= layer < b for layer in self.states) for a, b in bounds]
        spent = sum(
            (span - states) * (linear * (count + self.text) + square * (count + self.text) ** 2)
            + states * self.state_cost * (count + self.text)
            for count, span, states in zip(counts, self.spans, state_spans, strict=True)
        )
        first = next(count for count, span in zip(counts, self.spans, strict=True) if span)
        spent += self.extra * (first + self.text)
        # Solve square n^2 + linear n = spent / depth for n > 0, with costs of the mean layer.
        linear += (self.extra + len(self.states) * (self.state_cost - linear)) / self.depth
        square *= 1 - len(self.states) / self.depth
        half = linear / (2 * square)
        return math.sqrt(half**2 + spent / (self.depth * square)) - half - self.text


def shortened_layer(site: Site) -> int:
    """Return the decoder layer with the input that a site shortens: 0 for all sites before the decoder.

    Raises:
        MethodError: it shortens no input: a cache gets shorter after its layer, a decoding step hides entries.
    """
    if site.shortens is None:
        raise MethodError(
            f"a {site.where} site shortens no input of a layer; valid for what drops tokens: "
            f"{', '.join(BEFORE_DECODER)}, layer"
        )
    return site.shortens


def frame_of(reducer: TokenReducer, facts: ModelFacts, n_visual: int, n_text: int) -> Frame:
    """Return the frame of one sample under one method and model."""
    depth = facts.text.layers
    sites = reducer.all_sites(facts.tower.layers, depth)
    starts = tuple(map(shortened_layer, sites))
    linear, square = quadratic(facts.text)
    extra = quadratic(facts.text, first=True)[0] - linear
    states = tuple(filter(facts.text.is_linear, range(depth)))
    cost = linear_cost(facts.text)
    return Frame(sites, starts, depth, n_visual, n_text, (linear, square), extra, states, cost)
