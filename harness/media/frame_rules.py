"""Rules of published evaluations for selecting frames of a video, on integers only."""

from __future__ import annotations

from collections.abc import Callable

from espalier.harness.errors import UserError, unknown_name

FRAMES_KEY = "model.video.frames"
RULE_KEY = "model.video.rule"
SHORT_KEY = "model.video.short"
RATE_KEY = "model.video.rate"

#: Handling of videos with fewer frames than the rule takes.
SHORT = ("repeat", "all", "second", "error")

# Bounds of the Qwen-VL utilities for sampling by rate: 4 to 768 frames, an even number, because the models merge pairs
# of frames.
LEAST_BY_RATE = 4
MOST_BY_RATE = 768
PAIR = 2


def _line(total: int, count: int) -> list[float]:
    """Return numpy's linspace(0, total - 1, count), by its arithmetic: numpy takes 0.2 seconds to import."""
    last = float(total - 1)
    step = last / max(count - 1, 1)
    return [*(index * step for index in range(count - 1)), last if count > 1 else 0.0]


def _uniform(total: int, count: int) -> list[int]:
    """Return floor(linspace(0, total - 1, count)), as in the evaluations."""
    return [int(place) for place in _line(total, count)]


def _centre(total: int, count: int) -> list[int]:
    """Return the centres of `count` equal segments, rounded as in InternVL's evaluation."""
    if count == total:  # the formula would repeat some frames and skip others
        return list(range(total))
    segment = (total - 1) / count
    return [int(segment / 2 + round(segment * i)) for i in range(count)]


def _rounded(total: int, count: int) -> list[int]:
    """Return round(linspace(0, total - 1, count)), halves to even."""
    return [round(place) for place in _line(total, count)]


RULES: dict[str, Callable[[int, int], list[int]]] = {
    "uniform": _uniform,
    "centre": _centre,
    "fps": _rounded,
    # floor(i total / count): the first frame of each of `count` equal segments.
    "floor": lambda total, count: [index * total // count for index in range(count)],
    "pairs": _rounded,
}

#: Rules that sample by time first, and thin the result if it has too many frames.
THINNED = ("fps_then_uniform", "fps_then_few")
NAMES = (*RULES, *THINNED)


def check_rule(count: int, rule: str, short: str, rate: float) -> None:
    """Raise UserError for invalid settings, before a file is opened.

    Raises:
        UserError: an unknown rule or `short`, a count below 1 (below 2 for `fps` and `pairs`), a rate <= 0.
    """
    if rule not in NAMES:
        raise unknown_name(RULE_KEY, rule, NAMES)
    if short not in SHORT:
        raise unknown_name(SHORT_KEY, short, SHORT)
    minimum = PAIR if rule in ("fps", "pairs") else 1
    if count < minimum:
        raise UserError(
            f"{FRAMES_KEY}={count} must be an integer of at least {minimum} for rule={rule}"
        )
    if not 0 < rate < float("inf"):
        raise UserError(f"{RATE_KEY}={rate} must be a positive number: frames per second")


def target_count(total: int, count: int, rule: str, rate: float, fps: float) -> int:
    """Return the number of frames that a rule takes, which may exceed those of the video.

    Args:
        total: frames in the video.
        count: requested frames; the maximum for `fps` and `pairs`.
        rule: a name in RULES.
        rate: sampled frames per second, for `fps`.
        fps: frames per second of the file.
    """
    if rule == "pairs":
        return max(min(count, total) // PAIR * PAIR, PAIR)
    if rule != "fps":
        return count
    by_rate = max(total / fps * rate, LEAST_BY_RATE)
    target = int(min(by_rate, count // PAIR * PAIR, total)) // PAIR * PAIR
    return max(target, PAIR)


def rule_indices(total: int, count: int, rule: str) -> tuple[int, ...]:
    """Return the `count` indices of a rule: ascending, in [0, total), distinct if count <= total.

    Args:
        total: frames in the video.
        count: frames to take; if the video has fewer, some are repeated.
        rule: a name in RULES.
    """
    return tuple(RULES[rule](total, count))


def each_second(total: int, fps: float, rate: float = 1.0) -> tuple[int, ...]:
    """Return every round(fps / rate)-th frame, starting with the first, as in lmms-eval's class of LLaVA-Video."""
    return tuple(range(0, total, max(round(fps / rate), 1)))


def thinned_indices(total: int, count: int, rule: str, rate: float, fps: float) -> tuple[int, ...]:
    """Return the frames of a rule in THINNED: at most `count`, distinct.

    Args:
        total: frames in the video.
        count: maximum number of frames.
        rule: `fps_then_uniform` takes every round(fps / rate)-th frame, or `uniform` ones of the whole video if these
            are too many; `fps_then_few` takes `uniform` ones among those of `fps` without a limit.
        rate: sampled frames per second.
        fps: frames per second of the file.
    """
    if rule == "fps_then_uniform":
        timed = each_second(total, fps, rate)
        return timed if len(timed) <= count else rule_indices(total, count, "uniform")
    timed = rule_indices(total, target_count(total, MOST_BY_RATE, "fps", rate, fps), "fps")
    if len(timed) <= count:
        return timed
    return tuple(timed[place] for place in rule_indices(len(timed), count, "uniform"))
