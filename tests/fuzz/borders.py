"""Borders: names and links that lead elsewhere, unread arguments, noise as answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from tests.fuzz.case import CELLS, HERE, KEY, STORE, Case, run

#: Model names that look like the hub's and that the hub does not allow.
HUB_NAMES = (
    *("a/..", "a/b.git", "../b", "a/b/c", "a//b", "\u00fc/b", "a/-b", "a/b--c", "a/b..c", " a/b"),
    *("a" * 97 + "/b", "a/" + "b" * 97, "a/.", "./b", "a/b.", "a\\/b"),
)

#: Settings that greedy decoding does not read.
UNREAD = ("temperature=0.9", "top_p=0.5", "top_k=5", "min_p=0.1", "typical_p=0.5")

#: Addresses with a key, typed without quotes.
ADDRESSES = (
    f"http://h/?key={KEY}",
    f"http://user:{KEY}@h/v1",
    f"http://h/v1?api_key={KEY}&a=b",
    f"h:1/{KEY}=x",
)

#: Texts of a row that a reader could take for code or for an override.
PLANTED = (
    {"name": "{here}/x.py:M"},
    {"M": "{here}/x.py:M"},
    "{here}/x.py:M",
    "${oc.env:FUZZ_KEY}",
)

#: What a method of that name would do if its file were imported.
PLUGIN = "open(r'{here}/file', 'w').write('taken')\nclass M:\n    pass\n"


def borders(dice: Random) -> Iterator[Case]:
    """Yield the cases of this module, drawn anew."""
    for name in HUB_NAMES:
        yield run("names", *CELLS, f"model='{name}'", refused=True)
    drawn = "".join(dice.choice("ab.-_/~@:%") for _ in range(8))
    yield run("names", *CELLS, f"model='x/{drawn}'", refused=True)
    yield run("names", *CELLS, "model.path=null", refused=True)
    yield run("names", *CELLS, f"model.path=/{'x' * 5000}", refused=True)
    for setting in UNREAD:
        yield run("arguments", *CELLS, f"+benchmark.generation.{setting}", refused=True)
    yield run("arguments", *CELLS, f"+benchmark.generation.{dice.choice(UNREAD)}", refused=True)
    yield run("arguments", *CELLS, f"keep={10 ** dice.randint(4, 30)}", "method=random", "--dry")
    for address in ADDRESSES:
        for key in ("backend.url", "judge.base_url"):
            yield run("addresses", *CELLS, "backend=vllm", f"{key}={address}", refused=True)
    yield from _links()
    yield from _planted()
    for kind in ("yes_no", "choice", "number", "exact"):
        for _ in range(4):
            yield Case("noise", "call:noise", (kind, str(dice.randrange(10**6))))


def linked(name: str, target: str) -> Callable[[Path], None]:
    """Return what puts a link in the place of a file or a folder of the store."""

    def prepare(here: Path) -> None:
        first = min((here / "store/runs").iterdir())
        (here / "precious").mkdir()
        (here / "precious" / "thesis.tex").write_text("kept", encoding="utf-8")
        path = here / "store" / name.replace("RUN", f"runs/{first.name}")
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(here / target)

    return prepare


def _links() -> Iterator[Case]:
    """Yield commands on a store with a link out of it; the harness's `file` must stay as it is."""
    commands = (
        ("gc", "--purge", "--yes"),
        ("gc", "--days", "0", "--yes"),
        ("verify",),
        ("ls",),
        ("rm", "*", "--yes"),
    )
    for name, target in ((".trash", "."), (".trash", "precious"), ("sweeps", "precious")):
        for words in commands:
            line = (*words, "--store", STORE)
            yield Case("links", "espalier.harness.cli.store", line, prepare=linked(name, target))
    for name in ("RUN/journal.jsonl", "RUN/row.json", "RUN/lease", "RUN/spec.json"):
        line = ("-m", "method=none,random", *CELLS, f"store={STORE}")
        prepare = linked(name, "file")
        yield Case("links", "run", line, prepare=prepare, seconds=120)
        line = ("verify", "--store", STORE)
        yield Case("links", "espalier.harness.cli.store", line, prepare=prepare)


def planted(text: object, place: str) -> Callable[[Path], None]:
    """Return what writes a text into each row of the store, and a file that it names."""

    def prepare(here: Path) -> None:
        (here / "x.py").write_text(PLUGIN.replace(HERE, str(here)), encoding="utf-8")
        path = min((here / "store/runs").iterdir()) / "row.json"
        row = json.loads(path.read_text(encoding="utf-8"))
        value = json.loads(json.dumps(text).replace(HERE, str(here)))
        if place == "extra.code":
            row["extra"]["code"] = value
        elif place == "params":
            row["settings"]["method"]["params"] = {"K": value, "store=x,K": value}
        else:
            row[place] = value if isinstance(value, str) else "x.py:M"
        path.write_text(json.dumps(row), encoding="utf-8")

    return prepare


def _planted() -> Iterator[Case]:
    for text in PLANTED:
        for place in ("extra.code", "params", "benchmark", "variant", "model", "method"):
            prepare = planted(text, place)
            line = (f"{HERE}/pictures", "--store", STORE)
            yield Case("planted", "call:show_first", line, prepare=prepare, seconds=120)
