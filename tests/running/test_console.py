"""The registry of names, the tables on the terminal, and the silence where there is none."""

from __future__ import annotations

import io
import sys

import pytest

from harness.errors import UserError
from harness.registry import Registry
from harness.running import console


def test_registry_imports_a_module_only_when_its_name_is_loaded() -> None:
    table = Registry("colour")
    table.add("red", "this.module.does.not.exist:Red")
    table.add("blue", "colorsys:rgb_to_hsv")
    assert table.names() == ("blue", "red")
    assert "red" in table
    assert "green" not in table
    sys.modules.pop("colorsys", None)
    assert "blue" in table
    assert "colorsys" not in sys.modules
    assert table.load("blue")(0, 0, 0) == (0, 0, 0)
    with pytest.raises(ModuleNotFoundError):
        table.load("red")


def test_registry_refuses_a_second_entry() -> None:
    table = Registry("colour")
    table.add("red", "a:A")
    with pytest.raises(ValueError, match="registered twice: a:A and b:B"):
        table.add("red", "b:B")


def test_registry_names_the_key_and_the_valid_names() -> None:
    table = Registry("colour")
    table.add("red", "a:A")
    table.add("blue", "a:A")
    with pytest.raises(UserError, match=r"colour='rid' .*did you mean red\?.*valid: blue, red"):
        table.load("rid")


def row(method: str, key: str, **more: object) -> dict[str, object]:
    return {
        "model": "seedling",
        "method": method,
        "benchmark": "rec",
        "ratio": 0.5,
        "budget_rule": "kept",
        "run_key": key,
        "n_samples": 7,
        "status": "done",
        "metrics": {
            "other": {"value": 0.25, "stderr": None},
            "acc": {"value": 0.5, "stderr": 0.125},
        },
        "tokens": {"visual": 144, "requested_keep": 72, "kept_final": 72, "layer_average": 96},
        "flops": {"prefill_exact": 1e9, "share_of_full": 0.5},
        "time": {"vision_ms": 1, "select_ms": None, "prefill_ms": 3, "decode_ms_per_token": 4},
        "memory": {"kv_bytes": 2048, "peak_bytes": 3 * 2**20},
        "extra": {"headline": "acc", "label": "K=3", "speedup": None},
        **more,
    }


def test_table_has_one_line_for_each_run_with_its_headline() -> None:
    out = io.StringIO()
    rows = [row("none", "a"), row("none", "a", status="cached"), row("fastv", "b")]
    console.print_rows(rows, out, full=False)
    lines = [line for line in out.getvalue().splitlines() if line.startswith("rec")]
    assert len(lines) == 2
    cells = "rec none K=3 0.5 acc 0.500 ± 0.125 7 72 50% 1.00 - 3.00 4.00 2 KiB done"
    assert " ".join(lines[0].split()) == cells
    assert "other" not in out.getvalue()


def test_sheet_shows_every_metric_headline_first() -> None:
    out = io.StringIO()
    prefill = {"ratio": 1.5, "low": 1.25, "high": 1.75, "bound": 2.0}
    speedup = {"pairs": 4, "prefill": prefill, "above_bound": False}
    extra = {"headline": "acc", "label": "", "speedup": speedup}
    console.print_rows([row("fastv", "b", extra=extra)], out, full=True)
    text = out.getvalue()
    assert text.index("acc 0.500 ± 0.125") < text.index("other 0.250")
    assert "144, asked to keep 72, kept 72, mean over layers 96" in text
    assert "prefill 1.50x [1.25, 1.75] in 4 pairs, 2.00x by FLOPs " in text
    assert "believable" not in text
    assert "\x1b" not in text


def test_a_speed_up_above_its_bound_is_not_to_be_believed() -> None:
    out = io.StringIO()
    prefill = {"ratio": 9.5, "low": None, "high": None, "bound": 3.6}
    speedup = {"pairs": 1, "prefill": prefill, "above_bound": True}
    extra = {"headline": "acc", "label": "", "speedup": speedup}
    console.print_rows([row("fastv", "b", extra=extra)], out, full=True)
    assert "9.50x in 1 pairs, 3.60x by FLOPs; above the bound: not believable" in out.getvalue()


def test_undefined_metric_is_said_to_be_undefined() -> None:
    out = io.StringIO()
    metrics = {"acc": {"value": None, "stderr": None}}
    console.print_rows([row("fastv", "b", metrics=metrics)], out, full=True)
    assert "acc undefined" in out.getvalue()


def test_progress_is_silent_without_a_terminal() -> None:
    stream = io.StringIO()
    with console.progress_bar("run", stream) as advance:
        advance(1, 2)
        advance(2, 2)
    assert stream.getvalue() == ""


def test_progress_draws_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with console.progress_bar("fastv 0.5", stream) as advance:
        advance(1, 2)
        advance(2, 2)
    assert "fastv 0.5" in stream.getvalue()
    assert "2/2" in stream.getvalue()
