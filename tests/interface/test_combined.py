"""Two reducers on one prompt, `divprune+fastv`: exact beside both by hand, and from the command line to a row."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import espalier
import run
from espalier.harness.api.run_request import read_method
from espalier.harness.cost.budget import Budget, equivalent_tokens
from espalier.harness.engine.record import GeneratedBatch
from espalier.harness.engine.session import Session
from espalier.harness.runs.admission import admit
from espalier.harness.store.files.digests import Digests
from espalier.methods.autoprune import AutoPrune
from espalier.methods.base import Need, Plan, Site, TokenReducer, View
from espalier.methods.composed import Combined, Composed
from espalier.methods.dart import DART
from espalier.methods.divprune import DivPrune
from espalier.methods.fastv import FastV
from espalier.methods.pyramiddrop import PyramidDrop
from espalier.methods.random import Random
from espalier.methods.snapkv import SnapKV
from espalier.methods.tome import ToMe
from espalier.methods.top_p import TopP
from espalier.methods.visionzip import VisionZip
from tests import commands
from tests.families import FAMILIES
from tests.family_runs import Tiny, generation, plain
from tests.refused import refused
from tests.tiny import chat, picture

RATIO = 0.6
LLAVA = Tiny("llava")
SEEDLING = ("model=seedling", "benchmark=seedling_rec", "limit=4", "engine.paired=0")

spec_of = partial(commands.spec_of, *SEEDLING)


@dataclass(frozen=True)
class ByHand(TokenReducer):
    """The slow reference, for one prompt: at each site a method by itself, with its number of tokens."""

    steps: tuple[tuple[Site, TokenReducer, int], ...]

    @property
    def draws(self) -> bool:
        return any(method.draws for _, method, _ in self.steps)

    @property
    def adaptive(self) -> bool:
        return True  # counts are given

    def all_sites(self, blocks: int, depth: int) -> tuple[Site, ...]:
        return tuple(site for site, _, _ in self.steps)

    def sites(self, depth: int) -> tuple[Site, ...]:
        return self.all_sites(0, depth)

    def needs(self, site: Site) -> tuple[Need, ...]:
        (needs,) = (method.needs(site) for place, method, _ in self.steps if place == site)
        return needs

    def plan(self, view: View, keep: int) -> Plan:
        (plan,) = (method.plan(view, n) for place, method, n in self.steps if place == view.site)
        return plan


def answers(
    tiny: Tiny, method: TokenReducer, budget: Budget, *rows: int, **options: Any
) -> GeneratedBatch:
    adapter, inputs = tiny.adapter, tiny.inputs(*rows)
    names = [str(row) for row in rows or range(3)]
    with Session(adapter, method, budget, **options) as session:
        return session.generate(inputs, names, **generation(adapter, inputs))


def half_up(count: float) -> int:
    return math.floor(count + 0.5 + 1e-9)


def by_hand(
    tiny: Tiny, first: TokenReducer, second: TokenReducer, first_ratio: float | None, row: int
) -> GeneratedBatch:
    """Answer one prompt: the first keeps its share of all tokens, the second the rest of the budget."""
    n_visual = answers(tiny, first, Budget("kept", 0.0), row).records[0].visual
    share = (1 - RATIO) ** 0.5 if first_ratio is None else 1 - first_ratio
    counts = half_up(share * n_visual), half_up((1 - RATIO) * n_visual)
    facts = tiny.adapter.facts
    steps = [
        (*method.all_sites(facts.tower.layers, facts.text.layers), method, count)
        for method, count in zip((first, second), counts, strict=True)
    ]
    return answers(tiny, ByHand(tuple(steps)), Budget("kept", RATIO), row)


#: Pairs of methods with one site each: before the projector with merged tokens, before the decoder, inside it.
PAIRS = (
    (DivPrune(), FastV()),
    (DivPrune(), DART()),
    (Random(), FastV(K=1)),
    (VisionZip(), DivPrune()),
    (VisionZip(), FastV(K=3)),
    (FastV(K=1), DivPrune(layer=2)),
)


def check_by_hand(
    tiny: Tiny, first: TokenReducer, second: TokenReducer, first_ratio: float | None = None
) -> None:
    both = Combined(first, second, first_ratio)
    # Tokens cannot be hidden from layers of linear attention.
    backends = ("drop", "emulate") if tiny.adapter.facts.text.linear is None else ("drop",)
    runs = [answers(tiny, both, Budget("kept", RATIO), backend=backend) for backend in backends]
    for row in range(3):
        hand = by_hand(tiny, first, second, first_ratio, row)
        (record,) = hand.records
        for done in runs:
            assert torch.equal(done.ids[row], hand.ids[0])
            assert done.records[row].kept == record.kept
            assert torch.equal(done.records[row].origin, record.origin)
            difference = (done.logits[row] - hand.logits[0]).abs().max()
            assert difference < 1e-6


@pytest.mark.sampled
@pytest.mark.parametrize("first_ratio", [None, 0.25])
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_two_are_what_both_do_by_hand(
    first: TokenReducer, second: TokenReducer, first_ratio: float | None
) -> None:
    """Three prompts of unequal length in one batch, the second with two pictures."""
    check_by_hand(LLAVA, first, second, first_ratio)


@pytest.mark.sampled
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_runs_two(name: str) -> None:
    """Several images in a prompt, and videos."""
    full = Tiny(name).adapter.facts.text.full_layers
    layer = next(layer for layer in full if layer > 0) + 1
    check_by_hand(Tiny(name), DivPrune(), FastV(K=layer))


# ------------------------------------------------------------------ budgets


@pytest.mark.sampled
@pytest.mark.parametrize("pair", [*PAIRS, (ToMe(), DivPrune()), (DivPrune(), PyramidDrop())])
def test_without_a_ratio_the_model_is_unchanged(pair: tuple[TokenReducer, TokenReducer]) -> None:
    ids, logits = plain(LLAVA)
    done = answers(LLAVA, Combined(*pair), Budget("kept", 0.0))
    assert torch.equal(done.ids, ids)
    assert torch.equal(done.logits, logits)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("first", "second"),
    [*PAIRS, (ToMe(), Random()), (DivPrune(), TopP()), (DivPrune(), AutoPrune())],
)
@pytest.mark.parametrize("rule", ["kept", "average", "flops"])
def test_one_that_removes_nothing_leaves_the_other_alone(
    first: TokenReducer, second: TokenReducer, rule: str
) -> None:
    budget = Budget(rule, 0.3)
    for first_ratio, alone in ((0.0, second), (1.0, first)):
        both = answers(LLAVA, Combined(first, second, first_ratio), budget)
        single = answers(LLAVA, alone, budget)
        assert torch.equal(both.logits, single.logits)
        for ours, theirs in zip(both.records, single.records, strict=True):
            assert torch.equal(ours.origin, theirs.origin)
            assert ours.entering == theirs.entering


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("first", "second"),
    [*PAIRS, (ToMe(), DivPrune()), (DivPrune(), PyramidDrop()), (DivPrune(), AutoPrune())],
)
@pytest.mark.parametrize("rule", ["kept", "average", "flops", "kv_bytes"])
def test_the_budget_is_that_of_both(first: TokenReducer, second: TokenReducer, rule: str) -> None:
    both, facts = Combined(first, second), LLAVA.adapter.facts
    budgets = Budget(rule, 0.5), Budget.of_count(rule, 8, facts)
    for budget in budgets:
        for record in answers(LLAVA, both, budget).records:
            budget.verify(both, facts, record)
            left = equivalent_tokens(both, facts, record.visual, record.text, record.kept)
            assert abs(getattr(left, rule) - budget.target(record.visual)) <= 1


def test_each_keeps_the_same_share_of_what_it_gets() -> None:
    facts = LLAVA.adapter.facts
    keep = partial(Budget("kept", 0.9).keep, facts=facts, n_visual=1600, n_text=9)
    assert keep(Combined(DivPrune(), FastV())) == (506, 160)  # 1600 * 0.1 ** 0.5
    assert keep(Combined(DivPrune(), FastV(), 0.5)) == (800, 160)
    assert keep(Combined(DivPrune(), FastV(), 0.95)) == (160, 160)
    # Of what PyramidDrop gets, it keeps the shares that it keeps by itself.
    share = 0.1**0.5
    shares = PyramidDrop().fractions(share, 3)
    assert keep(Combined(DivPrune(), PyramidDrop())) == (
        506,
        *(half_up(1600 * share * fraction) for fraction in shares),
    )


def test_a_second_method_may_keep_fewer_than_its_count() -> None:
    both = Combined(DivPrune(), TopP(p=0.5))
    done = answers(LLAVA, both, Budget("kept", 0.5))
    for record in done.records:
        divided, left = record.kept
        assert divided == record.requested[0]
        assert 0 < left <= record.requested[1]


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("method=fastv+divprune",), ("prefix, before FastV at layer 2; valid: divprune+fastv,",)),
        (("method=divprune+random",), ("both act at prefix", "divprune+fastv", "divprune+dart")),
        (("method=divprune+visionzip",), ("vision, before DivPrune", "valid: visionzip+divprune,")),
        (("method=visionzip+uniform",), ("Uniform needs every token", "visionzip+random")),
        (("method=divprune+sttm",), ("STTM needs every token", "divprune+fastv")),
        (("method=tome+autoprune",), ("reads cls_attention of every patch", "tome+fastv")),
        (("method=top_p+btp",), ("TopP chooses its own count", "valid: one method")),
        (("method=downsample+fastv",), ("makes the pictures smaller",)),
        (("method=dycoke+fastv",), ("chooses again at each decoding step",)),
        (("method=none+fastv",), ("NoReduction drops nothing",)),
        (("method=fastv+fastv",), ("FastV is there twice; valid: two different methods",)),
        (
            ("method=divprune+snapkv",),
            ("SnapKV is no single method that drops tokens", "compressor=<name>"),
        ),
        (("method=divprune+pearl",), ("PEARL is no single method",)),
        (("method=divprune+d3tom",), ("D3ToM is no single method",)),
        (("method=divprune+fastw",), ("part='fastw' is unknown (did you mean fastv?)", "aim")),
        (("method=divprune+fastv+btp",), ("joins 3 methods; valid: two",)),
        (("method=divprune+fastv", "model=seedling_diffusion"), ("denoises its answers",)),
        (("method=divprune+fastv", "compressor=divprune+fastv"), ("evicts no cache entries",)),
        (("method=visionzip+divprune", "engine.scope=item"), ("at one site; valid: prompt",)),
        (
            ("method=divprune+fastv", "engine.positions=method"),
            ("renumbered positions, FastV with original ones; valid: original, renumbered",),
        ),
        (
            ("method=divprune+fastv", "method.params.fastv.K=9"),
            ("FastV: method.params.K=9 is out of range; valid: 1 to 5",),
        ),
        (
            ("method=divprune+fastv", "+method.params.fastv.k=2"),
            ("method.params.fastv='k' is unknown", "K"),
        ),
        (
            ("method=divprune+fastv", "method.params.first_ratio=1.1"),
            ("method.params.first_ratio=1.1", "number in [0, 1]"),
        ),
        (("method=divprune+fastv", "method.params.K=3"), ("method.params.K", "params.fastv")),
    ],
)
def test_what_cannot_combine_is_refused_in_one_line(
    argv: Sequence[str], words: Sequence[str], tmp_path: Path
) -> None:
    line = refused(lambda: admit(spec_of(*argv, f"store={tmp_path}", "ratio=0.5"), Digests()))
    for text in words:
        assert text in line


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        (["divprune"], "method is a list of 1; valid: two methods"),
        (["divprune", "fastv", "btp"], "method is a list of 3; valid: two methods"),
        (["divprune", 3], "method is a int"),
        (["divprune", "fastw"], "did you mean fastv?"),
        ([DivPrune(), DivPrune(layer=2)], "DivPrune is there twice"),
        (["divprune+fastv", "btp"], "Combined is no single method that drops tokens"),
        ([DivPrune(), "fastv+btp"], "Combined is no single method that drops tokens"),
        ([DivPrune(), SnapKV()], "SnapKV is no single method"),
    ],
)
def test_a_wrong_list_is_refused(methods: Any, words: str) -> None:
    assert words in refused(read_method, methods)


# ------------------------------------------------------------------ from a command line to a row


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Rows by method and compressor; three methods on a prompt among them."""
    store = tmp_path_factory.mktemp("store")
    line = [*SEEDLING, "ratio=0.9", f"store={store}", "engine.warmup=0", "json=false"]
    params = ("method.params.first_ratio=0.5", "method.params.fastv.K=3")
    assert run.main([*line, "method=divprune+fastv"]) == 0
    assert run.main([*line, "method=divprune+fastv", *params, "compressor=snapkv"]) == 0
    stored_rows = [json.loads(path.read_text()) for path in store.glob("runs/*/row.json")]
    return {row["method"]: row for row in stored_rows}


@pytest.mark.slow
def test_a_row_has_the_budget_of_each_and_of_both(rows: dict[str, dict[str, Any]]) -> None:
    row = rows["divprune+fastv"]
    extra = row["extra"]
    assert (row["ratio"], extra["label"], row["tokens"]["kept_final"]) == (0.9, "", 14)
    assert [(site["requested"], site["kept"]) for site in extra["sites"]] == [(46, 46), (14, 14)]
    assert extra["parts"] == [
        {"method": "divprune", "ratio": 1 - 46 / 144, "achieved": 1 - 46 / 144},
        {"method": "fastv", "ratio": 1 - 14 / 46, "achieved": 1 - 14 / 46},
    ]
    assert extra["achieved"]["kept"] == 14
    params = row["settings"]["method"]["params"]
    assert params == {
        "DivPrune": {"layer": 0},
        "FastV": {"K": 2, "queries": "last"},
        "first_ratio": None,
    }


def test_a_compressor_evicts_what_two_reducers_leave(rows: dict[str, dict[str, Any]]) -> None:
    extra = rows["divprune+fastv+snapkv"]["extra"]
    assert extra["label"].startswith("FastV(K=3)")
    assert extra["label"].endswith("first_ratio=0.5 cache_ratio=0.5")
    assert extra["params"]["first_ratio"] == 0.5
    assert set(extra["params"]) == {"DivPrune", "FastV", "SnapKV", "first_ratio", "cache_ratio"}
    assert [part["ratio"] for part in extra["parts"]] == [0.5, 1 - 14 / 72]
    assert extra["cache"]["entered"] == [72, 72, 72, 14, 14, 14]
    assert extra["cache"]["share"] == pytest.approx(0.5, abs=0.01)


def test_each_setting_of_each_part_is_another_run(tmp_path: Path) -> None:
    names = ("divprune+fastv", "divprune+fastv_paper", "divprune+dart", "divprune", "fastv")
    lines = [(f"method={name}",) for name in names]
    params = ("first_ratio=0.5", "fastv.K=3", "divprune.layer=1")
    lines += [(lines[0][0], f"method.params.{text}") for text in params]
    jobs = [admit(spec_of(*line, "ratio=0.5", f"store={tmp_path}"), Digests()) for line in lines]
    assert (
        len({job.key for job in jobs})
        == len({(job.parts["cell"]["method"], job.label) for job in jobs})
        == 8
    )
    method = jobs[0].method
    composed = Composed(method, SnapKV())  # type: ignore[arg-type]
    assert [type(part).__name__ for part in composed.parts] == ["DivPrune", "FastV", "SnapKV"]


@pytest.mark.slow
def test_python_takes_a_list(rows: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    row, line = rows["divprune+fastv"], {"ratio": 0.9, "limit": 4, "store": tmp_path}
    pairs = (["divprune", "fastv"], "divprune+fastv", [DivPrune(), "fastv"])
    evaluated = [espalier.evaluate("seedling", pair, "seedling_rec", **line) for pair in pairs]
    for run_of_pair in evaluated:
        assert run_of_pair.row["method"] == "divprune+fastv"
        assert run_of_pair.row["metrics"] == row["metrics"]
        assert run_of_pair.row["extra"]["parts"] == row["extra"]["parts"]
    assert len({run_of_pair.key for run_of_pair in evaluated}) == 1
    model = espalier.load("seedling")
    applied = espalier.apply(
        model, ["divprune", "fastv"], ratio=0.9, first_ratio=0.5, fastv={"K": 3}
    )
    with applied as pruned:
        answer = pruned.ask(None, "is there a star ?")
        assert (answer.visual, answer.kept) == (0, 0)


def test_generate_is_pruned_by_both() -> None:
    model = espalier.load("seedling")
    question = (picture(0, 96, 96), "is there a star ?")
    applied = espalier.apply(model, ["divprune", "fastv"], ratio=0.9)
    with applied as pruned, model.open_adapter() as adapter:
        inputs = adapter.encode([chat(question[1], question[0])])
        ids = adapter.model.generate(**inputs, max_new_tokens=4)
        answer = pruned.ask(*question, max_new_tokens=4)
        assert adapter.decode(ids[:, inputs["input_ids"].shape[1] :]) == [answer.text]


def test_nested_blocks_name_the_list() -> None:
    model = espalier.load("seedling")
    with espalier.apply(model, "divprune", ratio=0.5):
        inner = espalier.apply(model, "fastv", ratio=0.5)
        line = refused(inner.__enter__)
    assert "apply(model, ['divprune', 'fastv'])" in line
