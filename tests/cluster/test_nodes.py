"""Parsing of sinfo's nodes, and requests refused before submission."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from espalier.harness.errors import UserError
from espalier.harness.runs.cluster.launchers import NodeGroup, check_request, nodes_of
from espalier.harness.runs.cluster.resources import Resources

#: As sinfo prints partitions, generic resources, cores, memory and time limits of several clusters.
SINFO = """\
main*|(null)|64|256000|1-00:00:00
gpu|gpu:a100:4(S:0-1)|128+|512000+|12:00:00
gpu|gpu:h100:8,shard:16|192|1024000|12:00:00
debug|gpu:2|16|64000|30:00
open|(null)|8|16000|infinite
"""
FITS = Resources(gpus=0, cpus=4, memory=2**33, minutes=240)


def test_lines_of_sinfo_are_read() -> None:
    groups = nodes_of(SINFO)
    assert groups[0] == NodeGroup("main", True, 0, 64, 256000, 1440)
    assert [group.gpus for group in groups] == [0, 4, 8, 2, 0]
    assert [group.minutes for group in groups] == [1440, 720, 720, 30, float("inf")]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"partition": "gpus"},
            "partition='gpus' (model=m): SLURM has no such partition; valid: debug",
        ),
        (
            {"gpus": 1},
            "cluster.gpus=1 (model=m): no node of partition main gives as much; valid: at most 0",
        ),
        ({"partition": "gpu", "gpus": 9}, "valid: at most 8"),
        ({"cpus": 65}, "cluster.cpus=65"),
        ({"partition": "open", "memory": 2**40}, "cluster.memory=1048576MiB"),
        ({"partition": "debug", "minutes": 31}, "cluster.minutes=31"),
    ],
)
def test_what_no_node_gives_is_one_line(changes: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        check_request(replace(FITS, **changes), "m", nodes_of(SINFO))  # type: ignore[arg-type]


def test_what_some_node_gives_passes() -> None:
    for changes in ({}, {"partition": "gpu", "gpus": 8}, {"partition": "open", "minutes": 10**6}):
        check_request(replace(FITS, **changes), "m", nodes_of(SINFO))  # type: ignore[arg-type]


def test_a_cluster_without_a_default_partition_wants_one_named() -> None:
    with pytest.raises(UserError, match="SLURM has no default partition; valid: gpu"):
        check_request(FITS, "m", nodes_of("gpu|(null)|8|16000|infinite\n"))
