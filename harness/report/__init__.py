"""Accuracy-retention curves, and every method against random: what is still answered right as visual tokens go."""

from __future__ import annotations

from harness.report.report import write_report
from harness.report.write import write_curves, write_quickstart

__all__ = ["write_curves", "write_quickstart", "write_report"]
