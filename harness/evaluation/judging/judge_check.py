"""Check the judge of a judged benchmark before a model is loaded."""

from __future__ import annotations

from espalier.harness.errors import Refused
from espalier.harness.evaluation.judging.judge_prompt import read_prompt
from espalier.harness.specs.run_spec import RunSpec


def check_judge(spec: RunSpec) -> None:
    """Refuse a judged benchmark without a judge; the server is not contacted yet.

    Raises:
        Refused: no judge is set; other benchmarks can run.
        UserError: the file of `judge.prompt` or the key cannot be used.
    """
    if "judge" not in spec.benchmark.needs:
        return
    judge = spec.judge
    missing = [name for name in ("base_url", "model") if getattr(judge, name) is None]
    if missing:
        raise Refused(
            f"benchmark={spec.benchmark.name!r} is scored by a judge, and judge.{missing[0]}=null; valid: "
            "judge.base_url=http://localhost:8000/v1 judge.model=<its name there>, of any server that speaks "
            "OpenAI's chat completions (docs/judges.md)"
        )
    # Imports httpx, a quarter of a second that runs without a judge need not wait for.
    from espalier.harness.evaluation.judging.client import read_key

    read_key(judge.key_env)
    if judge.prompt is not None:
        read_prompt(judge.prompt)
