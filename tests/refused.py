"""The line with which something is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from espalier.harness.errors import UserError


def refused(call: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """Return the text of the UserError that a call raises; it must be one line."""
    with pytest.raises(UserError) as caught:
        call(*arguments, **options)
    line = str(caught.value)
    assert "\n" not in line
    return line
