"""Signals that methods read beyond the tokens: one producer for each signal or family, listed in `table.py`."""

from espalier.harness.engine.signals.dispatch import Signals

__all__ = ["Signals"]
