"""Check this machine and its results (`make doctor`).

Versions, devices, memory, store and checkpoints are examined; then the embedded model answers on the processor and on
each GPU: ratio 0 bit by bit, dropped against emulated tokens, a draft in a process and in a thread (a CUDA stream
each), layers spread over the GPUs, FlashAttention. The table shows ok, failed or not here; the exit code is 1 if a
check failed. Takes about a minute without a GPU.

With overrides of a run (`doctor model=qwen2_5_vl_7b`), only a prompt of its longest length is tried, on random weights;
with `cards=4x80` as well, a prompt on simulated cards (docs/placement.md).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from espalier.harness.errors import plain
from espalier.harness.paths import DEFAULT_STORE
from espalier.harness.specs.commands import command, command_parser
from espalier.harness.specs.hub_cache import downloads, go_offline
from espalier.harness.tools.doctor.machine_report import Check, Finding, NotHere, examine


def checks(store: Path) -> Iterator[tuple[str, Check]]:
    """Yield every check with its name, cheap ones first."""
    # torch and transformers take seconds to import, and --help needs neither.
    from espalier.harness.tools.doctor import exactness
    from espalier.harness.tools.doctor import machine_report as machine

    yield "packages", machine.packages
    yield "processor", machine.processor
    yield "GPUs", machine.gpus
    yield "precision", machine.precision
    yield "store", partial(machine.store, store)
    yield "embedded weights", machine.embedded
    yield "checkpoints", machine.checkpoints
    for device in devices():
        yield f"ratio 0, {device}", partial(exactness.ratio_zero, device)
        yield f"drop against emulate, {device}", partial(exactness.drop_as_emulated, device)
    yield "draft in a process, cpu", partial(exactness.speculative, "cpu", "processes")
    for name, check in (
        ("draft on a stream", partial(exactness.speculative, "cuda:0", "threads")),
        (
            "CUDA graphs on two streams",
            partial(exactness.speculative, "cuda:0", "threads", "engine.graphs=true"),
        ),
        (
            "device_map",
            partial(exactness.same_answers, ["model.device_map=auto"], ["model.device=cpu"]),
        ),
        ("FlashAttention", partial(exactness.flash, "cuda:0")),
    ):
        yield name, check if len(devices()) > 1 else without_gpu


def devices() -> list[str]:
    """Return the processor and all GPUs."""
    # torch takes seconds to import, and --help does not need it.
    import torch

    return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]


def without_gpu() -> str:
    """Report that a check needs a GPU.

    Raises:
        NotHere: always.
    """
    raise NotHere("needs a CUDA device")


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Examine this machine; return 1 if a check failed."""
    parser = command_parser("doctor", __doc__, "", "--store /scratch/results", "model=llava15_7b")
    parser.add_argument("overrides", nargs="*", help="of a run: its longest prompt is tried")
    parser.add_argument("--store", type=Path, default=DEFAULT_STORE, help="the run store")
    options = parser.parse_args(argv)
    downloads.set(False)
    go_offline()
    chosen, findings = checks(options.store), []
    if options.overrides:
        # Imported here: it needs torch, which takes seconds.
        from espalier.harness.tools.doctor import exactness

        cards = [word for word in options.overrides if word.startswith("cards=")]
        overrides = [word for word in options.overrides if word not in cards]
        chosen = iter([("longest prompt", partial(exactness.longest_shape, overrides))])
        if cards:
            size = cards[-1].removeprefix("cards=")
            chosen = iter([("rehearsal", partial(exactness.rehearsed, overrides, size))])
    for name, check in chosen:
        print(f"doctor: {name}", file=sys.stderr, flush=True)
        findings.append(examine(name, check))
    print_table(findings)
    return 1 if any(finding.status == "failed" for finding in findings) else 0


def print_table(findings: Sequence[Finding]) -> None:
    """Print one line for each check, and the number of checks by status."""
    table = Table()
    for title in ("check", "", "seen", "s"):
        table.add_column(title, justify="right" if title == "s" else "left")
    colours = {"ok": "green", "failed": "red", "not here": "dim"}
    for finding in findings:
        status = f"[{colours[finding.status]}]{finding.status}[/]"
        table.add_row(finding.name, status, escape(plain(finding.detail)), f"{finding.seconds:.1f}")
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    counts = {status: sum(finding.status == status for finding in findings) for status in colours}
    console.print(", ".join(f"{count} {status}" for status, count in counts.items()))
