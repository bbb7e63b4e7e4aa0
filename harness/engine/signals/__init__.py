"""What methods read beyond the tokens: one producer a signal or family of signals, found by name in `table.py`."""

from espalier.harness.engine.signals.dispatch import Signals

__all__ = ["Signals"]
