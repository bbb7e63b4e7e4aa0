"""PEARL (Liu et al., ICLR 2025, arXiv 2408.11850): the draft goes on while the target verifies.

Neither model waits for the other. While the target judges what is pending, the draft says gamma more behind it:

    pre-verify:  nothing is pending; the first of the new tokens is judged as soon as both are done
    post-verify: gamma - 1 tokens are pending; they and the first of the new ones are judged

All stand: the new ones are pending now, and drafting never stopped, so that an answer's runs of accepted tokens may be
longer than a window. One is refused: what stands behind it is lost, the target's own token takes its place, and the
next round is a pre-verify. No round adds a token on top. A round takes as long as the slower side, so the best window
is the one in which the draft is as slow as the target: gamma = auto is the ratio of the measured times of one step.

The draft sees all visual tokens, so the ratio has no meaning here.
"""

from __future__ import annotations

from dataclasses import dataclass

from espalier.methods.windows import AtOnce


@dataclass(frozen=True)
class PEARL(AtOnce):
    """Drafts a chain and verifies the one before at the same time."""
