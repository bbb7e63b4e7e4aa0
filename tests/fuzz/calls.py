"""What cases call that is no command: each returns normally, or raises UserError for what a command would refuse."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from random import Random

from espalier.harness.errors import UserError
from espalier.harness.paths import ROOT, located
from tests import commands
from tests.fuzz.case import CELLS
from tests.fuzz.judges import ANSWERS


def path(key: str, value: str) -> None:
    """Set a path on a command line and see that it comes back as it was typed."""

    section: object = commands.spec_of(f"{key}={value}", "limit=1")
    for part in key.split("."):
        section = getattr(section, part)
    assert section == located(value.strip()), f"{section} is not {value}"


def template(text: str) -> None:
    """Render a question."""
    from espalier.harness.specs.question_templates import checked_template, question_text

    question_text(checked_template("benchmark.text", text), {"question": "What?"}, "row 0")


def load(flag: str, store: str) -> None:
    """Load a store's rows."""
    from espalier.harness.reports import results

    del flag
    results.load(store)


def judge(name: str) -> None:
    """Ask a judge that gives a bad answer."""
    from espalier.harness.evaluation.judging.client import JudgeClient, RequestError
    from espalier.harness.specs.judge_spec import JudgeSpec
    from tests.benchmarks.judge_server import Answer, JudgeServer

    status, headers, body = ANSWERS[name]
    with JudgeServer() as server:
        # A client that reads no further is no trouble of the server's.
        server._server.handle_error = lambda *error: None  # type: ignore[method-assign]
        server.next(Answer(status, body, headers=tuple(headers.items())))
        spec = JudgeSpec(
            base_url=server.base_url, model="referee", key_env="FUZZ_KEY", timeout=20, retries=0
        )

        async def ask() -> None:
            async with JudgeClient(spec) as client:
                await client.ask({"model": "referee", "messages": []})

        try:
            asyncio.run(ask())
        except RequestError as trouble:
            wait = "" if trouble.wait is None else f"{trouble.wait:.0f}"
            raise UserError(f"{trouble} {wait}") from trouble


def noise(kind: str, seed: str) -> None:
    """Score an answer of drawn letters: it must be wrong."""
    from espalier.tasks.data import utils

    dice = Random(int(seed))
    letters = "zqxjvkw ;<>_0\u0e01\u6f22" if kind in ("yes_no", "choice") else "zqxjvkw ;<>_"
    answer = "".join(dice.choice(letters) for _ in range(dice.randrange(60)))
    right = {"yes_no": "yes", "choice": "red", "number": "4", "exact": "a cat"}[kind]
    doc = {"answers": [right], "choices": ["red", "blue"], "tolerance": (0.0, 0.0)}
    scores = getattr(utils, f"score_{kind}")(doc, [answer])
    assert scores["accuracy"] == 0, (answer, scores)
    if kind != "exact":
        assert scores["unparsed"] == 1, (answer, scores)


def show_first(pictures: str, flag: str, store: str) -> None:
    """Show the first run of a store with its pictures."""
    from espalier.harness.cli.store import main

    run = min((Path(store) / "runs").iterdir()).name
    code = main(["show", run, "--pictures", pictures, flag, store])
    if code:
        raise SystemExit(code)


def locale(store: str, **environment: str) -> None:
    """Ask for a stored row under another locale, in a process of its own; the key must be the same."""
    before = sorted(os.listdir(f"{store}/runs"))
    line = [sys.executable, str(ROOT / "run.py"), "method=none", *CELLS, f"store={store}"]
    done = subprocess.run(
        line,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(f"{store}/runs")) == before, "another key"
