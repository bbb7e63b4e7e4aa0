"""Answers that a scorer cannot read are wrong; lmms-eval's reader of MMMU's letters draws an option in their place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

from lmms_eval.tasks._task_utils import mmmu_mcq_utils

#: No letter of an option.
UNREAD = ""


@contextmanager
def without_guesses() -> Iterator[None]:
    """Let a letter that cannot be read be no letter, which is wrong, in place of one drawn at random.

    MMMU's released scorer draws, so its scores of unreadable answers are those of chance and differ by the state of the
    generator.
    """

    def unread(options: Sequence[str]) -> str:
        return UNREAD

    with mock.patch.object(mmmu_mcq_utils, "random", SimpleNamespace(choice=unread)):
        yield
