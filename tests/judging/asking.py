"""A process that asks a judge: `python asking.py <address> <store> <questions>`; it prints what it took as verdicts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from espalier.harness.evaluation.judging.judge import collect_verdicts
from espalier.harness.evaluation.judging.judge_prompt import JudgePrompt, JudgeQuestion
from espalier.harness.specs.judge_spec import JudgeSpec


def questions(count: int) -> list[JudgeQuestion]:
    """Return questions that every process asks in the same words."""
    words = JudgePrompt("mine", "Q: {number} A: {answer}")
    return [
        JudgeQuestion(("t", number), words, {"number": str(number), "answer": "yes"}, str.isdecimal)
        for number in range(count)
    ]


def main(address: str, store: str, count: str) -> None:
    """Ask, two at once."""
    spec = JudgeSpec(address, "referee", concurrency=2)
    results = collect_verdicts(spec, Path(store), questions(int(count)))
    print(json.dumps({number: text for (_, number), text in sorted(results.verdicts.items())}))


if __name__ == "__main__":
    main(*sys.argv[1:])
