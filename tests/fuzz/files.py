"""Damaged files: stores, files of cells, checkpoints, data sets and their media."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from espalier.harness.paths import ROOT
from tests.fuzz.case import CELLS, HERE, STORE, Case, run

WEIGHTS = ROOT / "harness/seedling/weights/seedling"

Damage = Callable[[Path, Random], None]

#: Values in the place of others in a file of JSON.
ODD = (None, -3, "x", [], {}, float("nan"), 1e308, True, [[[[]]]], "\ud800", "\x1b[2J", 10**30)


def cut(path: Path, dice: Random) -> None:
    """Leave the beginning of a file."""
    content = path.read_bytes()
    path.write_bytes(content[: dice.randrange(max(len(content), 1))])


def flip(path: Path, dice: Random) -> None:
    """Change some bytes."""
    content = bytearray(path.read_bytes() or b"x")
    for _ in range(dice.randint(1, 20)):
        content[dice.randrange(min(len(content), 4000))] = dice.randrange(256)
    path.write_bytes(content)


def binary(path: Path, dice: Random) -> None:
    """Put noise in the place of a file."""
    path.write_bytes(dice.randbytes(200))


def empty(path: Path, dice: Random) -> None:
    """Leave nothing in a file."""
    path.write_bytes(b"")


def deep(path: Path, dice: Random) -> None:
    """Nest lists deeper than a parser goes."""
    path.write_text("[" * 100_000, encoding="utf-8")


def loop(path: Path, dice: Random) -> None:
    """Put a link to itself in the place of a file."""
    path.unlink()
    path.symlink_to(path)


def folder(path: Path, dice: Random) -> None:
    """Put a folder in the place of a file."""
    path.unlink()
    path.mkdir()


def other(path: Path, dice: Random) -> None:
    """Put another kind of JSON in the place of a file."""
    path.write_text(
        dice.choice(["null", "3", '"x"', "[]", "{}", "[null]", "NaN"]), encoding="utf-8"
    )


def odd(path: Path, dice: Random) -> None:
    """Change a value somewhere in a file of JSON; of several lines, in the first."""
    first, _, rest = path.read_text(encoding="utf-8", errors="replace").partition("\n")
    try:
        content = json.loads(first)
    except ValueError:
        content = json.loads(path.read_text(encoding="utf-8"))
        rest = ""
    table = content
    while isinstance(table, dict) and table:
        key = dice.choice(sorted(table))
        if isinstance(table[key], dict) and table[key] and dice.random() < 0.5:
            table = table[key]
            continue
        table[key] = dice.choice(ODD)
        break
    text = json.dumps(content)
    path.write_text(f"{text}\n{rest}" if rest else text, encoding="utf-8")


DAMAGES: tuple[Damage, ...] = (cut, flip, binary, empty, deep, loop, folder, other, odd)

#: Commands that read a store.
READERS = (
    ("espalier.harness.cli.store", ("ls",)),
    ("espalier.harness.cli.store", ("verify", "--dry")),
    ("espalier.harness.cli.store", ("export", f"{HERE}/tables")),
    ("espalier.harness.cli.store", ("gc",)),
    ("espalier.harness.cli.sweep", ("status",)),
    ("espalier.harness.reports.tables.rebuild", ("d2pruner", "1")),
    ("espalier.harness.cli.curves", ("--benchmarks", "seedling_vqa", "--out", f"{HERE}/x")),
    ("espalier.harness.cli.report", ("--out", f"{HERE}/x.html", "--no-overlays")),
    ("call:load", ()),
)


def damaged_store(file: str, damage: Damage, seed: int) -> Callable[[Path], None]:
    """Return what damages a file of the first run of the store."""

    def prepare(here: Path) -> None:
        first = min((here / "store" / "runs").iterdir())
        path = min((here / "store/sweeps").iterdir()) if file == "sweep" else first / file
        if not path.exists():
            path.write_text("{}", encoding="utf-8")
        damage(path, Random(seed))

    return prepare


def cells_file(text: str) -> Callable[[Path], None]:
    """Return what writes a file of cells."""
    return lambda here: (here / "cells.json").write_text(text, encoding="utf-8") and None


def checkpoint(file: str, damage: Damage | str, seed: int) -> Callable[[Path], None]:
    """Return what copies the embedded model's checkpoint and damages a file of it, or writes a text there."""

    def prepare(here: Path) -> None:
        shutil.copytree(WEIGHTS, here / "model")
        path = here / "model" / file
        if isinstance(damage, str):
            path.write_text(damage, encoding="utf-8")
        else:
            damage(path, Random(seed))

    return prepare


def header(text: str) -> Callable[[Path], None]:
    """Return what gives the weights another header."""

    def prepare(here: Path) -> None:
        shutil.copytree(WEIGHTS, here / "model")
        head = text.encode()
        content = len(head).to_bytes(8, "little") + head + bytes(64)
        (here / "model/model.safetensors").write_bytes(content)

    return prepare


def data_set(place: str) -> Callable[[Path], None]:
    """Return what writes POPE with a picture that lies elsewhere, if `{here}` or an address says so."""

    def prepare(here: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq
        from PIL import Image

        from tests.benchmarks.fixtures.choices import pope

        Image.new("RGB", (96, 96)).save(here / "outside.png")
        pope(here / "data")
        for file in (here / "data").rglob("*.parquet"):
            table = pq.read_table(file)
            number = table.column_names.index("image")
            images = [{"bytes": None, "path": place.replace(HERE, str(here))}] * len(table)
            column = pa.array(images, type=table.schema.field("image").type)
            pq.write_table(table.set_column(number, table.schema.field("image"), column), file)

    return prepare


def data_folder(damage: Callable[[Path], None]) -> Callable[[Path], None]:
    """Return what writes POPE and something odd beside it."""

    def prepare(here: Path) -> None:
        from tests.benchmarks.fixtures.choices import pope

        pope(here / "data")
        damage(min((here / "data").rglob("*.parquet")))

    return prepare


CELL_FILES = (
    *("", "null", "3", "[]", "{}", "[" * 100_000, "[null]", "[3]", "\x00", "NaN", "[[[]]]", '"x"'),
    *("{'a': 1}", '{"cells": []}', '[{"key": "a"}]', '[{"config": null}]', '[{"nosuch": 1}]'),
    *(
        json.dumps([{"key": "a", "row": row, "before": None, "config": config}])
        for row, config in (
            ("/no/such/row.json", None),
            ("/no/such/row.json", {}),
            ("/no/such/row.json", {"model": 3}),
            ("/no/such/row.json", [1]),
            (3, {}),
            (None, {}),
            ("/no/such/row.json", {"benchmark": None, "model": {}, "method": []}),
        )
    ),
)

HEADERS = (
    *("", "[]", "{", "null", '{"a": 3}', '{"a": {"dtype": "F32"}}', "[" * 100_000, '{"a": null}'),
    '{"a": {"dtype": "X9", "shape": [4], "data_offsets": [0, 16]}}',
    '{"a": {"dtype": "F32", "shape": [4], "data_offsets": ["0", "x"]}}',
    '{"a": {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}}',
    '{"a": {"dtype": "F32", "shape": [[4]], "data_offsets": [0, 16]}}',
    '{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 99999999]}}',
    '{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}',
)

CONFIGS = ("[]", "null", "{}", "{", "3", '{"model_type": "nosuch"}', '{"model_type": ["llava"]}')


def files(dice: Random) -> Iterator[Case]:
    """Yield the cases of this module, drawn anew."""
    for _ in range(60):
        file = dice.choice(["row.json", "row.json", "journal.jsonl", "spec.json", "lease", "sweep"])
        damage = dice.choice(
            [choice for choice in DAMAGES if file == "row.json" or choice is not odd]
        )
        prepare = damaged_store(file, damage, dice.randrange(10**6))
        kind = f"store: {damage.__name__} {file}"
        if dice.random() < 0.25:
            line = ("-m", "method=none,random", *CELLS, f"store={STORE}")
            yield Case(kind, "run", line, prepare=prepare, served=True, seconds=120)
            continue
        command, words = dice.choice(READERS)
        yield Case(kind, command, (*words, "--store", STORE), prepare=prepare)
    for text in CELL_FILES:
        line = ("--cells", f"{HERE}/cells.json")
        # No cells are nothing to run.
        yield Case("cells", "run", line, prepare=cells_file(text), refused=text not in ("[]", "{}"))
    line = (*CELLS, f"model.path={HERE}/model")
    for text in HEADERS:
        yield run("checkpoint: header", *line, prepare=header(text), refused=True)
    for text in CONFIGS:
        made = checkpoint("config.json", text, 0)
        yield run("checkpoint: config", *line, prepare=made, refused=True)
    names = ("config.json", "tokenizer.json", "processor_config.json", "model.safetensors")
    for _ in range(16):
        damage = dice.choice([cut, binary, empty, loop, folder])
        name = dice.choice(names)
        made = checkpoint(name, damage, dice.randrange(10**6))
        yield run(f"checkpoint: {damage.__name__} {name}", *line, prepare=made)
    for template in (
        "{{ 1/0 }}",
        "{{",
        "{% for a in range(10**9) %}{% endfor %}",
    ):
        made = checkpoint("chat_template.jinja", template, 0)
        overrides = (*line, "model.conversation=checkpoint")
        yield run("checkpoint: chat template", *overrides, prepare=made, refused=True)
    yield from _data()


def _data() -> Iterator[Case]:
    line = ("benchmark=pope", f"benchmark.path={HERE}/data", "method=none", "engine.paired=0")
    rest = (*line, "limit=1", "engine.warmup=0", "json=true", "model.closed_vocabulary=false")
    for place in (
        f"{HERE}/outside.png",
        "/etc/passwd",
        "http://127.0.0.1:9/x.png",
        "../outside.png",
    ):
        yield run("media", *rest, prepare=data_set(place), refused=True, seconds=90)
    for damage in (
        lambda path: os.mkfifo(path.with_name("train-00001.parquet")),
        lambda path: path.write_bytes(b"PAR1"),
        lambda path: path.with_name("test-9.parquet").symlink_to(path.with_name("nosuch")),
    ):
        yield run("data", *rest, prepare=data_folder(damage), refused=True, seconds=90)
    yield run(
        "data",
        *rest,
        prepare=data_folder(lambda path: path.with_name("up").symlink_to("..")),
        seconds=90,
    )
