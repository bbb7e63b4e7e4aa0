"""GPUs that `--dry` estimates hours for, and the span of shares of their peaks that runs reach (conf/gpus.yaml)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from espalier.harness.config.lmms_task_files import read_yaml
from espalier.harness.paths import CONF
from espalier.harness.settings import Memory, Positive, read_section, table

PATH = CONF / "gpus.yaml"


class Span(NamedTuple):
    """The least and the largest value of a quantity."""

    low: float
    high: float

    def times(self, factor: float) -> Span:
        """Return the span of a multiple; `factor` is not negative."""
        return Span(self.low * factor, self.high * factor)

    @classmethod
    def total(cls, spans: Iterable[Span]) -> Span:
        """Return the sum of spans, from the sum of the least to that of the largest."""
        entries = list(spans)
        return cls(sum(span.low for span in entries), sum(span.high for span in entries))

    @classmethod
    def around(cls, spans: Iterable[Span]) -> Span:
        """Return the span from the least to the largest of several."""
        entries = list(spans)
        return cls(min(span.low for span in entries), max(span.high for span in entries))


@dataclass(frozen=True)
class GpuKind:
    """Peaks of a GPU.

    Attributes:
        flops: FLOP/s of dense half-precision products.
        bandwidth: bytes/s of its memory.
        memory: bytes.
    """

    flops: Positive
    bandwidth: Positive
    memory: Memory


@dataclass(frozen=True)
class Reached:
    """What runs reach, as spans of times over work.

    Attributes:
        products: seconds for each FLOP, times the peak.
        reads: seconds for each byte that a step reads, times the peak.
        launch: least seconds for a layer of one forward.
        loading: seconds for each byte of weights that is loaded.
        start: seconds of a job before that.
    """

    products: Span
    reads: Span
    launch: Span
    loading: Span
    start: Span


@cache
def gpu_kinds() -> Mapping[str, GpuKind]:
    """Return the GPUs of the file by name."""
    return read_kinds(str(PATH.name), _content()["kinds"])


@cache
def reached() -> Reached:
    """Return what runs reach, by the file."""
    content = _content()
    shares = {name: Span(*sorted(1 / share for share in content[name])) for name in SHARES}
    seconds = {name: Span(*sorted(content[name])) for name in ("launch", "start")}
    return Reached(**shares, **seconds)


#: Entries of the file that divide work.
SHARES = ("products", "reads", "loading")


def read_kinds(key: str, value: Any) -> dict[str, GpuKind]:
    """Return a table of GPUs.

    Raises:
        UserError: an entry lacks a peak or has another key.
    """
    return {
        name: read_section(GpuKind, f"{key}.{name}", peaks)
        for name, peaks in table(key, value).items()
    }


def _content() -> dict[str, Any]:
    return read_yaml(PATH)
