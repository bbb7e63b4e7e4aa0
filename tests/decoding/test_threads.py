"""The waiting time for a drafter in a separate thread."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from espalier.harness.decoding.speculative.drafts import Draft
from espalier.harness.decoding.speculative.state_machine import DrafterLost
from espalier.harness.decoding.speculative.transports import ThreadTransport

CPU = (torch.device("cpu"),)
SAID = Draft((1,))


def after(seconds: float) -> Callable[[], Draft]:
    def draft() -> Draft:
        time.sleep(seconds)
        return SAID

    return draft


@pytest.mark.slow
def test_a_drafts_prompt_does_not_count_against_the_patience_of_a_round() -> None:
    unread = True
    with ThreadTransport(CPU, CPU, patience=1.0, reading=lambda: unread) as transport:
        assert transport.at_once(after(1.5), lambda: [0]).draft is SAID
        unread = False
        assert transport.at_once(after(0.0), lambda: [0]).draft is SAID
        with pytest.raises(DrafterLost, match=r"within 1 s"):
            transport.at_once(after(3.0), lambda: [0])
        with pytest.raises(DrafterLost, match="hangs"):
            transport.at_once(after(0.0), lambda: [0])
