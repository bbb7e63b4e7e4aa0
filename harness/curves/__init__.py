"""Accuracy-retention curves: what a method still answers right as visual tokens go."""

from __future__ import annotations

from harness.curves.write import write_curves, write_quickstart

__all__ = ["write_curves", "write_quickstart"]
