"""The protocols of `espalier report --protocol`, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from espalier.harness.reports.curves.stored_rows import StoredResult
from espalier.harness.reports.protocols.downsampled_groups import downsampled_groups
from espalier.harness.reports.protocols.equal_cost import equal_cost
from espalier.harness.reports.protocols.kept_sets import kept_sets
from espalier.harness.reports.protocols.overall_scores import effivlm, uniprunebench
from espalier.harness.reports.protocols.protocol_table import ProtocolTable
from espalier.harness.reports.protocols.rank_stability import rank_stability

PROTOCOLS: Mapping[str, Callable[[Sequence[StoredResult]], ProtocolTable]] = {
    "vtc": downsampled_groups,
    "uniprunebench": uniprunebench,
    "effivlm": effivlm,
    "cost": equal_cost,
    "ranks": rank_stability,
    "kept": kept_sets,
}


def protocol_tables(names: Sequence[str], results: Sequence[StoredResult]) -> list[ProtocolTable]:
    """Return the table of each named protocol, over the results of a selection.

    Raises:
        UserError: the results lack what a protocol compares.
    """
    return [PROTOCOLS[name](results) for name in dict.fromkeys(names)]
