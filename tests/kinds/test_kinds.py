"""Every kind of method goes the same way: settled, admitted, opened, answering, accounted for, named in the row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from espalier.harness.cost.budget import Budget, BudgetMismatch, frame_of, shortened_layer
from espalier.harness.cost.memory import Peak
from espalier.harness.engine.record import SampleRecord
from espalier.harness.engine.session import Session
from espalier.harness.errors import Refused, UserError
from espalier.harness.evaluation.evaluate import Evaluation
from espalier.harness.evaluation.samples import Sample
from espalier.harness.kinds.lookup import KINDS, kind_of
from espalier.harness.models.adapter import Adapter
from espalier.harness.models.build_adapter import load_adapter
from espalier.harness.runs.admission import Job, admit
from espalier.harness.runs.result_row import build_row
from espalier.harness.seedling.scene_questions import questions_for
from espalier.harness.seedling.scenes import Scenes
from espalier.harness.specs.catalogue import METHODS, build_method
from espalier.harness.specs.run_spec import AnswerSpec, EngineSpec, MethodSpec
from espalier.harness.store.files.digests import Digests
from espalier.methods.base import Decoder, Method, MethodError, Site, TokenReducer
from espalier.methods.composed import Combined, Composed
from espalier.methods.denoiser import DenoisingReducer
from espalier.methods.fastv import FastV
from espalier.methods.none import NoReduction
from espalier.methods.uniform import Uniform
from espalier.methods.vanilla_sd import VanillaSD
from tests.commands import caption_spec
from tests.kinds.idle import (
    CacheReducer,
    DropDenoising,
    Evict,
    KeepCache,
    KeepDenoising,
    Kindless,
)
from tests.methods.cases import CASES, build

GREEDY = {"do_sample": False, "max_new_tokens": 24}
SCENES = (0, 1, 2)
FASTV = FastV(K=2)


@cache
def adapter() -> Adapter:
    return load_adapter(caption_spec("method=none").model)


def chat_of(index: int) -> list[dict[str, Any]]:
    scene = Scenes().scene("test", 0, index)
    text = questions_for(scene, {"caption": 1})[0].text
    content = [{"type": "image", "image": scene.to_pil()}, {"type": "text", "text": text}]
    return [{"role": "user", "content": content}]


@dataclass(frozen=True)
class Walked:
    """What one method came to: its job, the ids of each answer, and the row."""

    job: Job
    ids: tuple[tuple[int, ...], ...]
    row: Mapping[str, Any]


@cache
def walked(method: Method, store: Path, *overrides: str) -> Walked:
    """Take a method all the way from the command line to the row; a decoder answers one chat at a time, so all do."""
    name = "vanilla_sd" if method.drafts else "uniform"
    settings = ("ratio=0.875", f"store={store}", "engine.transport=sequential")
    job = admit(caption_spec(f"method={name}", *settings, *overrides), Digests(), method=method)
    kind = kind_of(job.method, job.spec)
    ids: list[tuple[int, ...]] = []
    samples: list[Sample] = []
    with kind.open(job.spec, adapter(), job.method) as opened:
        for index in SCENES:
            inputs = opened.encode([chat_of(index)])
            done = opened.generator.generate(inputs, [f"t/{index}"], **GREEDY)
            (text,) = opened.adapter.decode(done.ids)
            ids.append(tuple(done.ids[0].tolist()))
            samples.append(Sample("t", index, text, 0, 0, done.records[0]))
    evaluation = Evaluation({}, len(samples), tuple(samples), {}, (), 0, 1.0, {})
    return Walked(job, tuple(ids), build_row(job, evaluation, Peak(1), {}, "done"))


def in_a_session(method: Any, ratio: float) -> tuple[tuple[int, ...], ...]:
    """The same answers without any of the kinds: a session alone."""
    ids = []
    with Session(adapter(), method, Budget("kept", ratio)) as session:
        for index in SCENES:
            inputs = adapter().encode([chat_of(index)])
            ids.append(tuple(session.generate(inputs, [f"t/{index}"], **GREEDY).ids[0].tolist()))
    return tuple(ids)


@cache
def whole() -> tuple[tuple[int, ...], ...]:
    return in_a_session(NoReduction(), 0.0)


OF_REDUCERS = {
    "backend": "drop",
    "batch_size": 8,
    "positions": "original",
    "decode": "loop",
    "rescore": False,
}
WITHOUT_GAPS = {**OF_REDUCERS, "positions": None}
OF_DECODERS = {"transport": "auto", "compare": True, "graphs": False}

#: Each kind: a method, the share of tokens that answers are made of, settings of the engine that concern it.
EVERY_KIND = {
    "reducer": (FASTV, 0.125, OF_REDUCERS),
    "decoder": (VanillaSD(), 1.0, OF_DECODERS),
    "compressor": (KeepCache(), 1.0, WITHOUT_GAPS),
    "denoiser": (KeepDenoising(), 1.0, WITHOUT_GAPS),
    "combination": (Combined(Uniform(), FASTV), 0.125, OF_REDUCERS),
    "composition": (Composed(FASTV, KeepCache()), 0.125, OF_REDUCERS),
}
#: Kinds derived from reducers: the first of their methods in the contract tests.
EVERY_KIND |= {
    base.__name__: (
        next(method for method in map(build, CASES) if isinstance(method, base)),
        0.125,
        OF_REDUCERS,
    )
    for base, _ in KINDS
    if issubclass(base, TokenReducer) and base.in_one_prefill
    if base not in (TokenReducer, Combined)
}


def test_every_kind_of_the_lookup_is_walked() -> None:
    spec = caption_spec("method=none")
    assert {id(kind_of(method, spec)) for method, _, _ in EVERY_KIND.values()} == {
        id(kind) for (_, denoises), kind in KINDS.items() if not denoises
    }


@pytest.mark.sampled(18)
@pytest.mark.parametrize("name", EVERY_KIND)
def test_each_kind_goes_the_same_way(name: str, store: Path) -> None:
    method, share, concerning = EVERY_KIND[name]
    done = walked(method, store)
    reducer = method if isinstance(method, TokenReducer) else FASTV
    assert done.ids == (in_a_session(reducer, 0.875) if share < 1 else whole())
    row = done.row
    assert row["ratio"] == 1 - share
    assert row["tokens"]["kept_final"] == share * row["tokens"]["visual"]
    depth = done.job.spec.model.facts.text.layers
    assert row["tokens"]["kv_entries"] == depth * row["tokens"]["layer_average"]
    assert row["flops"]["share_of_full"] == 1 if share == 1 else row["flops"]["share_of_full"] < 1
    assert row["memory"]["kv_bytes"] > 0
    assert row["extra"]["achieved"]["kept"] == share * row["tokens"]["visual"]
    assert (row["extra"]["speculative"] is not None) == method.drafts
    engine = row["settings"]["engine"]
    assert engine == {**dict.fromkeys(engine), "warmup": 1, **concerning}
    assert (row["settings"]["draft"] is not None) == method.drafts
    assert row["run_key"] == done.job.key


def test_the_two_answers_differ() -> None:
    assert in_a_session(FASTV, 0.875) != whole()


def test_a_composition_answers_as_its_reducer_and_names_both(store: Path) -> None:
    alone = walked(FASTV, store)
    both = walked(Composed(FASTV, KeepCache(tau=0.25)), store)
    assert both.ids == alone.ids
    for block in ("tokens", "flops"):
        assert both.row[block] == alone.row[block]
    assert both.row["extra"]["sites"] == alone.row["extra"]["sites"]
    assert both.row["settings"]["method"]["params"] == {
        "FastV": alone.row["settings"]["method"]["params"],
        "KeepCache": {"allocation": "uniform", "scope": "visual", "tau": 0.25},
        "cache_ratio": 0.0,
    }
    assert both.row["extra"]["label"] == "KeepCache(tau=0.25)"
    # Each part's hyper-parameters, class and code make another run of it.
    others = [Composed(FASTV, KeepCache(tau=0.5)), Composed(Uniform(), KeepCache(tau=0.25)), FASTV]
    keys = {admit(alone.job.spec, Digests(), method=method).key for method in others}
    assert len(keys | {both.row["run_key"]}) == 4


@pytest.mark.parametrize(
    ("method", "line"),
    [
        (
            DropDenoising(),
            r"^method='fastv' drops tokens at denoising steps, and model='seedling' .*; valid: ",
        ),
        (
            CacheReducer(),
            r"^a cache site shortens no input of a layer; valid .*: tower, vision, prefix, layer$",
        ),
        (CacheReducer("decode"), r"^a decode site shortens no input"),
        (Kindless(), r"^method Kindless is of no kind that runs; valid bases: .*CacheCompressor"),
    ],
)
def test_what_is_not_carried_out_is_refused_in_one_line(
    method: Method, line: str, store: Path
) -> None:
    spec = caption_spec("method=fastv", "ratio=0.5", f"store={store}")
    with pytest.raises((UserError, MethodError), match=line) as error:
        admit(spec, Digests(), method=method)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("where", ["cache", "decode"])
def test_a_site_behind_the_prompt_prunes_no_prompt(where: str) -> None:
    """Neither the budget nor the engine takes it for a site before layer 0."""
    facts, method = adapter().facts, CacheReducer(where)
    with pytest.raises(MethodError, match="shortens no input"):
        frame_of(method, facts, 144, 10)
    with pytest.raises(MethodError, match="shortens no input"):
        Budget("kept", 0.5).check(method, facts)
    with pytest.raises(MethodError, match="which is not implemented"):
        Session(adapter(), method, Budget("kept", 0.5))
    places = (Site("tower", 3), Site("vision"), Site("prefix"), Site("layer", 3))
    assert [shortened_layer(site) for site in places] == [0, 0, 0, 3]


@pytest.mark.parametrize("method", [KeepCache(), KeepDenoising(), VanillaSD()])
def test_a_session_carries_token_reducers_only(method: Any) -> None:
    with pytest.raises(MethodError, match="sessions run token reducers only"):
        Session(adapter(), method, Budget("kept", 0.0))


def test_a_cache_that_lost_entries_is_told() -> None:
    spec = caption_spec("method=none")
    depth = spec.model.facts.text.layers
    record = SampleRecord("s", 16, 4, (), (), (16,) * depth, 16 * depth, 64, 3)
    short = replace(record, kv_entries=16 * depth - 1)
    method = KeepCache()
    assert kind_of(method, spec).account(spec, method, [record]).tokens["kv_entries"] == 16 * depth
    for variant in (method, Composed(NoReduction(), method)):
        with pytest.raises(BudgetMismatch, match=r"the cache holds \d+ visual entries \(16, "):
            kind_of(variant, spec).account(spec, variant, [record, short])


@pytest.mark.slow
def test_bytes_of_a_cache_are_one_budget_for_reducers_and_compressors(store: Path) -> None:
    rows = [
        walked(method, store, "budget=kv_bytes", "ratio=0.5").row
        for method in (FASTV, Evict(), build_method("uniform", {}))
    ]
    whole = walked(NoReduction(), store).row["tokens"]["kv_entries"]
    for row in rows:
        assert row["tokens"]["kv_entries"] == pytest.approx(whole / 2, abs=len(SCENES))
        assert row["extra"]["achieved"]["kv_bytes"] == pytest.approx(whole / 12, abs=1)
    # The rule is in no row of another one.
    assert set(walked(FASTV, store).row["extra"]["achieved"]) == {"kept", "average", "flops"}


def test_a_composition_evicts_what_its_reducer_leaves(store: Path) -> None:
    alone, both = walked(FASTV, store), walked(Composed(FASTV, Evict(), 0.5), store)
    assert both.row["tokens"]["kept_final"] == alone.row["tokens"]["kept_final"]
    entries = alone.row["tokens"]["kv_entries"]
    assert both.row["tokens"]["kv_entries"] == entries / 2
    assert both.row["extra"]["cache"]["share"] == 0.5
    assert sum(both.row["extra"]["cache"]["entries"]) == entries / 2
    assert both.row["memory"]["kv_bytes"] < alone.row["memory"]["kv_bytes"]
    assert both.ids != alone.ids


def test_an_evicting_method_has_the_runs_budget(store: Path) -> None:
    row = walked(Evict(), store).row
    depth, share = 6, 0.125
    assert row["tokens"]["kept_final"] == row["tokens"]["visual"]
    assert row["tokens"]["kv_entries"] == share * depth * row["tokens"]["visual"]
    assert row["extra"]["cache"]["ratio"] == row["ratio"] == 1 - share
    assert row["flops"]["share_of_full"] == 1


# ------------------------------------------------------------------ without a benchmark


def test_answers_need_no_benchmark() -> None:
    spec = AnswerSpec(adapter().spec, MethodSpec("uniform"), Budget("kept", 0.75), EngineSpec())
    method = Uniform()
    kind = kind_of(method, spec)
    settled = kind.normalise(spec, method)
    assert settled == spec
    with kind.open(settled, adapter(), method) as opened:
        inputs = opened.encode([chat_of(0), chat_of(1)])
        done = opened.generator.generate(inputs, ["0", "1"], **GREEDY)
        assert len(opened.adapter.decode(done.ids)) == 2
        assert opened.paired.reduced is not opened.paired.plain
    assert [record.kept for record in done.records] == [(36,), (36,)]
    idle = kind_of(NoReduction(), spec).normalise(spec, NoReduction())
    assert idle == replace(spec, budget=Budget("kept", 0.0))
    emulated = replace(spec, engine=EngineSpec(backend="emulate"))
    with pytest.raises(Refused, match=r"engine\.backend='emulate'"):
        kind_of(VanillaSD(), emulated).normalise(emulated, VanillaSD())


# ------------------------------------------------------------------ one lookup


def test_bases_say_of_themselves_what_the_config_asks() -> None:
    for name in METHODS.names():
        method = build_method(name, {})
        drafts = isinstance(method, Decoder)
        assert method.drafts == METHODS.load(name).drafts == drafts
        assert method.takes_draft == (drafts and method.source == "model")
        once = isinstance(method, TokenReducer) and not isinstance(method, DenoisingReducer)
        assert method.in_one_prefill == once
