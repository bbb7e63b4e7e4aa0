"""Every field of a run's description changes the run key, or stands here with the reason why it does not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import cache, reduce
from pathlib import Path
from typing import Any

import pytest

from espalier.harness.cost.facts import LinearFacts
from espalier.harness.errors import Refused
from espalier.harness.kinds.lookup import method_of
from espalier.harness.paths import ROOT
from espalier.harness.runs import run_key as keys
from espalier.harness.runs.run_key import key_parts, run_key
from espalier.harness.runs.run_settings import Contents, settings_of
from espalier.harness.runs.served import engine_process, engine_server
from espalier.harness.settings import OMITTED, STATED, marked
from espalier.harness.specs.benchmark_spec import Answers, Cluster, Derived
from espalier.harness.specs.catalogue import METHODS, build_method
from espalier.harness.specs.row_settings import SECTIONS
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store.files.digests import Digests
from espalier.methods.base import Method
from tests import commands

#: Fields that change no number: path of the field -> why.
EXEMPT = {
    "budget.down": "follows from the method's hyper-parameters, which are in the key",
    "budget.whole_sites": "set for the steps of a run, by the method",
    **dict.fromkeys(("lease.beat", "lease.expiry"), "who computes a run, and nothing of it"),
    "benchmark.media": "refuses a sample or changes nothing",
    "model.check_weights": "refuses a model or changes nothing",
    "method.draft.check_weights": "as model.check_weights",
    "model.longest": "room that cards keep free",
    "method.draft.longest": "as model.longest",
    "model.conversion": "a command to print where a checkpoint does not load",
    "model.drafts": "names to choose a draft from; the chosen one is in method.draft",
    "method.draft.conversion": "as model.conversion",
    "method.draft.drafts": "a draft has no draft",
    "method.variants": "names of readings in a label; the hyper-parameters that they set are in the key",
    "method.draft.boxes": "what is asked is the same for both sides of a pair, by the target's format",
    **dict.fromkeys(
        (
            f"{model}.prompt.{name}"
            for model in ("model", "method.draft")
            for name in ("words", "text", "generation")
        ),
        "what the set asks; what is asked is in benchmark.text and benchmark.generation",
    ),
    **dict.fromkeys(
        ("model.template_sha256", "method.draft.template_sha256"), "warns or changes nothing"
    ),
    **dict.fromkeys(
        ("model.closed_vocabulary", "method.draft.closed_vocabulary"),
        "refuses a benchmark or changes nothing",
    ),
    **dict.fromkeys(
        (
            f"{model}.facts.{name}"
            for model in ("model", "method.draft")
            for name in ("signals", "unproved")
        ),
        "refuses a method or changes nothing",
    ),
    **dict.fromkeys(
        ("model.facts.nominal_work", "method.draft.facts.nominal_work"),
        "an estimate before the run; the row counts its samples",
    ),
    "benchmark.include_path": "where the task lies; its files are in `sources`, or hashed where these are empty",
    **dict.fromkeys(
        ("benchmark.title", "benchmark.note", "benchmark.papers", "benchmark.reported"),
        "how tables print what the row has",
    ),
    "benchmark.texts": "texts to choose from; the chosen one is in benchmark.text",
    "benchmark.needs": "refuses a benchmark or changes nothing",
    **dict.fromkeys(
        (
            f"benchmark.dataset.{name}"
            for name in ("config", "split", "samples", "video", "licence")
        ),
        "prose for readers; the task file names them",
    ),
    "backend.python": "where the engine is installed; its version is in the settings",
    "engine.threads": "answers do not depend on it; the environment of the row says it beside the times",
    "engine.prefetch": "answers do not depend on it; the environment of the row says it beside the times",
    "engine.max_errors": "decides whether there is a row, not what it says",
    "engine.paired": "measures beside a run that has ended; a row that lacks the figure asked for gets it by itself",
    "engine.share": "says what is computed once for several rows: equal answers and counts, and no times",
    "engine.patience": "decides when a lost draft is given up, which the row counts",
    **dict.fromkeys(
        (f"judge.{name}" for name in ("base_url", "key_env")),
        "where the judge is; its verdicts are the same",
    ),
    **dict.fromkeys(
        (f"judge.{name}" for name in ("timeout", "retries", "concurrency")),
        "how patient a run is with its judge",
    ),
    "force": "runs again, under the same key",
    "log": "where the row is mirrored",
    "log_options": "where the row is mirrored",
    "log_samples": "what the mirror shows",
    "log_pictures": "what the mirror shows",
    "store": "where the row lies",
    "offline": "whether files may be fetched; their content is hashed",
    "curves": "what is drawn afterwards",
    "report": "what is drawn afterwards",
    "refused": "what a sweep does with other cells",
    "json": "what is printed",
}

#: Folders of own data with different answers.
OWN_DATA = Path(__file__).with_name("own_data")

#: Runs from which fields are changed: a field counts if it changes the key of one of them.
BASES = {
    "reducer": ("method=fastv", "ratio=0.5"),
    "random weights": ("method=fastv", "ratio=0.5", "model=llava15_7b", "model.weights=random"),
    "decoder": ("method=pearl",),
    "stack": ("method=fastv", "ratio=0.5", "compressor=aircache"),
    "own data": (
        *("method=fastv", "ratio=0.5", "benchmark=data"),
        *(f"benchmark.path={OWN_DATA / 'red'}", "benchmark.score=number"),
        "benchmark.question='how many digits are there ?'",
    ),
    "boxes": ("method=fastv", "ratio=0.5", "benchmark=refcoco_val"),
    "served": ("method=divprune", "ratio=0.5", "backend=vllm", f"backend.python={ROOT / 'python'}"),
    "judged": (
        *("method=fastv", "ratio=0.5", "benchmark=llava_bench", "judge.model=somebody"),
        "judge.base_url=http://localhost:8000/v1",
    ),
    "draft of random weights": (
        *("method=pearl", "model=llava_ov_7b", "model.weights=random"),
        "method.draft_options={weights: random}",
    ),
}

#: What cannot be changed by its type alone, and where other files must lie.
VALUES: dict[str, Any] = {
    "method.name": "divprune",
    "method.params": {"K": 3},
    "method.code": "json:JSONDecoder",
    "method.compressor.code": "json:JSONDecoder",
    "method.compressor.name": "h2o",
    "method.compressor.params": {"alpha": 0.5},
    "method.compressor.ratio": 0.75,
    "backend.pruning": "vllm",
    "budget.rule": "flops",
    "budget.ratio": 0.25,
    "budget.count": 64,
    "benchmark.derived": {"total": Derived("sum", ("accuracy", "unparsed"))},
    "benchmark.answers": Answers("letters", ("options",)),
    "benchmark.cluster": Cluster("scene"),
    "benchmark.blocks": 0,
    "benchmark.sources": (ROOT / "tasks" / "videos",),
    "benchmark.path": OWN_DATA / "blue",
    **{
        f"{model}.facts.{stack}.linear": LinearFacts(2, 2, 4, 8, 12)
        for model in ("model", "method.draft")
        for stack in ("text", "tower")
    },
    "model.path": ROOT / "tasks",
    "method.draft.path": ROOT / "tasks",
    "judge.prompt": ROOT / "tests" / "judging" / "words.yaml",
}


@cache
def bases() -> dict[str, RunSpec]:
    specs = {name: commands.spec_of(*argv) for name, argv in BASES.items()}
    # On the hub, and not in the cache of this machine.
    away: dict[str, Any] = {"path": None, "hub": "somebody/something", "revision": "main"}
    near, pair = specs["reducer"], specs["decoder"]
    return specs | {
        "hub": replace(near, model=replace(near.model, **away)),
        "draft on the hub": replace(
            pair, method=replace(pair.method, draft=replace(pair.method.draft, **away))
        ),
    }


def walk(value: Any, path: str = "") -> Iterator[str]:
    """Yield the dotted path of every field that is no description itself."""
    for field in fields(value):
        inner, name = getattr(value, field.name), f"{path}{field.name}"
        if is_dataclass(inner):
            yield from walk(inner, f"{name}.")
        else:
            yield name


def at(value: Any, path: str) -> Any:
    return reduce(lambda part, name: getattr(part, name, MISSING), path.split("."), value)


def put(value: Any, path: str, new: Any) -> Any:
    name, _, rest = path.partition(".")
    return replace(value, **{name: put(getattr(value, name), rest, new) if rest else new})


def other(old: Any) -> Any:
    """Return another value of the same kind."""
    match old:
        case bool():
            return not old
        case int() | float():
            return old + 1
        case str():
            return f"{old}x"
        case Path():
            return old / "x"
        case tuple():
            return (*old, "x")
        case frozenset():
            return old | {"x"}
        case Mapping():
            return {**old, "x": 1}
        case _:
            return "x"


@cache
def built(name: str) -> Method:
    return method_of(bases()[name].method)


@cache
def key_of(base: str) -> str:
    return run_key(key_parts(bases()[base], built(base), DIGESTS))


def changes_key(base: str, path: str) -> bool:
    spec = bases()[base]
    old = at(spec, path)
    if old is MISSING:
        return False
    changed = put(spec, path, VALUES.get(path, other(old)))
    method = method_of(changed.method) if (base, path) in BUILT else built(base)
    try:
        return run_key(key_parts(changed, method, DIGESTS)) != key_of(base)
    except Refused:  # no kind of method for such a model
        return False


DIGESTS = Digests()
#: What the method is built from, beside its name.
BUILT = {
    ("reducer", "method.params"),
    ("stack", "method.compressor.params"),
    ("stack", "method.compressor.ratio"),
}
FIELDS = {path for spec in bases().values() for path in walk(spec)}
#: Without what is a description of its own in one of the runs.
PATHS = sorted(path for path in FIELDS if not any(name.startswith(f"{path}.") for name in FIELDS))


@pytest.fixture(autouse=True)
def _without_reading_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hash no code: a field that changes it must change the settings, too."""
    monkeypatch.setattr(keys, "entry_files", lambda *_: [])
    monkeypatch.setattr(keys, "code_files", lambda *_: {})
    # An interpreter that has no engine.
    monkeypatch.setattr(engine_process, "engine_version", lambda _: "1.0")
    monkeypatch.setattr(engine_server, "server_version", lambda _: "1.0")


def test_the_walk_reaches_every_description() -> None:
    reached = {path.rpartition(".")[0] for path in PATHS}
    assert reached >= {
        *("", "model", "model.facts", "model.facts.text", "model.facts.tower", "model.video"),
        *(
            "method",
            "method.compressor",
            "method.draft",
            "method.draft.facts.text",
            "method.draft.video",
        ),
        *("benchmark", "budget", "engine"),
    }


@pytest.mark.sampled
@pytest.mark.parametrize("path", PATHS)
def test_a_field_changes_the_key_or_has_a_reason(path: str) -> None:
    changing = [base for base in bases() if changes_key(base, path)]
    if path in EXEMPT:
        assert changing == []
    else:
        assert changing, f"{path} changes no key, and EXEMPT has no reason for it"


def test_no_reason_is_left_of_a_field_that_is_gone() -> None:
    assert set(PATHS) >= set(EXEMPT) | set(VALUES)


@pytest.mark.parametrize("name", METHODS.names())
def test_every_hyper_parameter_is_part_of_the_settings(name: str) -> None:
    method = build_method(name, {})
    settings = settings_of(bases()["decoder"], method, Contents("abc"))
    assert set(settings["method"]["params"]) == {field.name for field in fields(method)}


def test_random_weights_have_their_architecture_in_the_key() -> None:
    built_as = {
        base: key_parts(bases()[base], built(base), DIGESTS)["settings"]["model"]["architecture"]
        for base in ("reducer", "random weights")
    }
    assert built_as["reducer"] is None
    assert built_as["random weights"] == bases()["random weights"].model.architecture != {}


def test_settings_are_as_a_stored_row_gives_them_back() -> None:
    for base, spec in bases().items():
        settings = key_parts(spec, built(base), DIGESTS)["settings"]
        assert json.loads(json.dumps(settings, allow_nan=False)) == settings
        for block, values in settings.items():
            section = SECTIONS.get(block)
            if section is not None and values is not None:
                assert {*marked(section, STATED)} - {*marked(section, OMITTED)} <= values.keys()
