"""PEARL (Liu et al., ICLR 2025, arXiv 2408.11850): the draft goes on while the target verifies.

Neither model waits for the other. While the target judges the pending tokens, the draft proposes gamma more:

    pre-verify:  nothing is pending; the first of the new tokens is judged as soon as both are done
    post-verify: gamma - 1 tokens are pending; they and the first of the new ones are judged

If all are accepted, the new ones are pending and drafting never stopped, so that runs of accepted tokens may be longer
than a window. If one is rejected, the tokens after it are lost, the target's own token replaces it, and the next round
is a pre-verify. No round adds an extra token. A round takes as long as the slower side, so the best window is the one
in which the draft takes as long as the target: gamma = auto is the ratio of the measured times of one step.

The draft sees all visual tokens, so the ratio has no meaning here.
"""

from __future__ import annotations

from dataclasses import dataclass

from espalier.methods.windows import AtOnce


@dataclass(frozen=True)
class PEARL(AtOnce):
    """Drafts a chain and verifies the one before at the same time."""
