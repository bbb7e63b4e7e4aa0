"""Mistakes in users' methods: each is one line with the method, the mistake and the remedy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import espalier
import run
from espalier.harness.api.questions import question_chat
from espalier.harness.paths import ROOT
from espalier.methods.base import (
    Assignment,
    Attended,
    Decoder,
    Mixture,
    Need,
    Plan,
    Site,
    TokenReducer,
)
from espalier.methods.compressor import CacheCompressor
from espalier.methods.denoiser import DenoisingReducer
from espalier.methods.select.topk import top
from espalier.methods.uniform import Uniform

PICTURE = np.zeros((144, 144, 3), dtype=np.uint8)
LAYER = (Site("layer", 2),)


@dataclass(frozen=True)
class Mine(TokenReducer):
    """Answers by a function of the view and the budget."""

    rule: Callable[..., Any]
    where: tuple[Site, ...] = LAYER
    read: Any = (Need("last_attention"),)

    def sites(self, depth: int) -> Any:
        return self.where

    def needs(self, site: Site) -> Any:
        return self.read

    def plan(self, view: Any, keep: int) -> Any:
        return self.rule(view, keep)


def first(view: Any, keep: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + keep).expand(view.tokens.shape[0], keep)


def fails(view: Any, keep: int) -> Plan:
    return Plan(first(view, keep)[:, : 1 // (keep - keep)])


class OwnError(Exception):
    """Derived from nothing that a harness could list."""


def raises(view: Any, keep: int) -> Plan:
    raise OwnError("two\nlines")


def refusal(
    model: Any, method: Any, early: bool = False, question: Any = None, **how: Any
) -> espalier.UserError:
    """Return the error about a method, which `apply` itself raises if it is `early`, before a question."""
    if isinstance(method, Decoder):
        how["transport"] = "sequential"

    def use() -> None:
        applied = espalier.apply(model, method, ratio=0.9, **how)
        assert not early
        with applied as pruned:
            pruned.ask(PICTURE, "what is it ?", **question or {})

    with pytest.raises(espalier.UserError) as caught:
        use()
    assert type(method).__name__ in str(caught.value)
    return caught.value


MISTAKES = {
    "tensor": (first, ("plan returns a Tensor", "espalier.methods.base.Plan(kept)")),
    "nothing": (
        lambda view, keep: None,
        ("plan returns nothing", "espalier.methods.base.Plan(kept)"),
    ),
    "list": (lambda view, keep: Plan([0, 1]), ("Plan.kept is a list", "of int64")),
    "attribute": (
        lambda view, keep: Plan(top(view.attention, keep)),
        ("View has no 'attention'", "`needs`", "'last_attention'", "docs/methods.md"),
    ),
    "signal": (
        lambda view, keep: Plan(top(view.signals["cls_attention"], keep)),
        ("view.signals has no 'cls_attention'", "`needs`", "'last_attention'"),
    ),
    "unsorted": (
        lambda view, keep: Plan(view.signals["last_attention"].topk(keep).indices),
        ("row 0 is unsorted", "espalier.methods.select.topk.top", "torch.topk"),
    ),
    "count": (lambda view, keep: Plan(first(view, keep - 1)), ("keeps 13 tokens", "asks for 14")),
    "twice": (lambda view, keep: Plan(first(view, keep) // 2), ("holds 0 more than once",)),
    "outside": (lambda view, keep: Plan(first(view, keep, 140)), ("[0, 144)", "holds 144")),
    "negative": (lambda view, keep: Plan(first(view, keep, -1)), ("holds -1",)),
    "float": (lambda view, keep: Plan(first(view, keep).float()), ("of float32", "of int64")),
    "int32": (lambda view, keep: Plan(first(view, keep).int()), ("of int32", "of int64")),
    "mask": (
        lambda view, keep: Plan(view.signals["last_attention"] > 0),
        ("of bool", "espalier.methods.select.topk.indices_of(mask, keep)"),
    ),
    "device": (lambda view, keep: Plan(first(view, keep).to("meta")), ("on meta", "on cpu")),
    "rows": (
        lambda view, keep: Plan(first(view, keep).repeat(2, 1)),
        ("(2, 14)", "valid: (1, K) of int64"),
    ),
    "flat": (lambda view, keep: Plan(first(view, keep)[0]), ("is (14,)", "valid: (1, K)")),
    "order": (
        lambda view, keep: Plan(first(view, keep), order=first(view, keep)),
        ("Plan.order is for sites of the kind 'tower'", "'layer'"),
    ),
    "entering": (
        lambda view, keep: Plan(first(view, keep), entering=True),
        ("Plan.entering is for sites of the kind 'block'",),
    ),
    "slots": (
        lambda view, keep: Plan(
            first(view, keep), Assignment(first(view, 144), torch.ones(1, 144))
        ),
        ("Assignment.slot must lie in [-1, 14)",),
    ),
    "weights": (
        lambda view, keep: Plan(
            first(view, keep), Assignment(first(view, 144) % 14, torch.ones(1, 14))
        ),
        ("Assignment.weight is (1, 14)", "(1, 144)"),
    ),
    "mixture": (
        lambda view, keep: Plan(first(view, keep), Mixture(torch.ones(1, 144, 14))),
        ("Mixture.matrix is (1, 144, 14)", "(1, 14, 144)"),
    ),
    "not a number": (
        lambda view, keep: Plan(top(view.signals["last_attention"] / 0, keep)),
        ("scores: NaN or infinite among 144 values",),
    ),
    "weight": (
        lambda view, keep: Plan(
            first(view, keep), Assignment(first(view, 144) % 14, torch.full((1, 144), torch.nan))
        ),
        ("Assignment.weight holds NaN or infinity",),
    ),
    **{
        f"spare {spare}": (
            lambda view, keep, spare=spare: Plan(first(view, keep), spare=torch.full((1,), spare)),
            ("Plan.spare must lie in [0, 14]",),
        )
        for spare in (10**6, 15, -1)
    },
    "NaN everywhere": (
        lambda view, keep: Plan(first(view, keep), scores=torch.full((1, 144), torch.nan)),
        ("Plan.scores holds NaN",),
    ),
    "NaN once": (
        lambda view, keep: Plan(
            first(view, keep), scores=torch.tensor([[torch.nan, *[-torch.inf] * 143]])
        ),
        ("Plan.scores holds NaN",),
    ),
    "field": (lambda view, keep: setattr(view, "tokens", 0), ("cannot assign to field 'tokens'",)),
    "failure": (fails, ("`plan` failed", f"{__file__}:", "ZeroDivisionError")),
    "own error": (raises, ("OwnError: two lines", f"{__file__}:")),
}


@pytest.mark.sampled
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_plan_is_one_line_with_the_remedy(model: Any, mistake: str) -> None:
    rule, words = MISTAKES[mistake]
    line = str(refusal(model, Mine(rule)))
    assert [word for word in (*words, "method Mine at layer 2") if word not in line] == []


def test_the_plan_of_another_site_is_named_with_its_site(model: Any) -> None:
    plans: list[Plan] = []

    def once(view: Any, keep: int) -> Plan:
        if not plans:
            plans.append(Plan(top(view.signals["last_attention"], keep)))
        return plans[0]

    @dataclass(frozen=True)
    class Twice(Mine):
        def fractions(self, share: float, n_sites: int) -> tuple[float, ...]:
            return (share, share / 2)

    error = refusal(model, Twice(once, (Site("layer", 2), Site("layer", 4))))
    assert "method Twice at layer 4: plan keeps" in str(error)


def test_what_a_method_raised_stays_the_cause(model: Any) -> None:
    error = refusal(model, Mine(fails))
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert error.__cause__.__traceback__ is not None
    assert f":{fails.__code__.co_firstlineno + 1}: ZeroDivisionError" in str(error)
    assert isinstance(refusal(model, Mine(raises)).__cause__, OwnError)


@dataclass(frozen=True)
class Shared(Mine):
    """Shares of sites by a function."""

    shares: Callable[..., Any] = first

    def fractions(self, share: float, n_sites: int) -> Any:
        return self.shares(share, n_sites)


@dataclass(frozen=True)
class Closed(Mine):
    """Asks for an unknown rule of positions."""

    def positions(self, depth: int) -> Any:
        return "closed"


#: Methods that are refused before a question, and words of the line.
DECLARED = [
    (
        Mine(first, Site("layer", 2), ()),
        ("`sites` returns Site(", "a tuple of espalier.methods.base.Site"),
    ),
    (
        Mine(first, ("layer", 2), ()),  # type: ignore[arg-type]
        ("`sites` returns ('layer', 2)", "a tuple of espalier.methods.base.Site"),
    ),
    (Mine(first, None, ()), ("`sites` returns None",)),  # type: ignore[arg-type]
    (Mine(first, LAYER, ("last_attention",)), ("`needs` returns", "espalier.methods.base.Need")),
    (Mine(first, LAYER, None), ("`needs` returns None", "espalier.methods.base.Need")),
    (Mine(first, LAYER, (Need("last_atention"),)), ("did you mean last_attention",)),
    (Mine(first, (Site("layer", 99),), ()), ("layer=99", "valid for layer: 0 to 5")),
    (Mine(first, (Site("layr", 2),), ()), ("'layr'", "valid for where: tower")),  # type: ignore[arg-type]
    (Mine(first, (Site("layer", 4), Site("layer", 2)), ()), ("layer=4", "valid: first to last")),
    (Shared(first, shares=lambda share, n_sites: None), ("`fractions` returns None",)),
    (Shared(first, shares=lambda share, n_sites: (share, share)), ("valid: a tuple of 1 numbers",)),
    (Shared(first, shares=lambda share, n_sites: (float("nan"),)), ("returns (nan,)",)),
    (Shared(first, shares=lambda share, n_sites: (share / 0,)), ("`fractions` failed",)),
    (Closed(first), ("`positions` returns 'closed'; valid: original",)),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("method", "words"), DECLARED)
def test_what_a_method_declares_is_checked_first(
    model: Any, method: Any, words: tuple[str, ...]
) -> None:
    how = {"positions": "method"} if isinstance(method, Closed) else {}
    line = str(refusal(model, method, early=True, **how))
    assert [word for word in words if word not in line] == []


@pytest.mark.parametrize(
    ("where", "layer", "words"),
    [
        (Site("prefix"), None, "valid: a site before a later layer"),
        (Site("layer", 2), 2, "valid for layer: 0 to 1"),
        (Site("layer", 2), 77, "valid for layer: 0 to 1"),
    ],
)
def test_attention_of_a_layer_that_has_not_run_is_refused(
    model: Any, where: Site, layer: int | None, words: str
) -> None:
    line = str(refusal(model, Mine(first, (where,), (Need("last_attention", layer),))))
    assert f"`needs` returns Need(signal='last_attention', layer={layer}, depth=None)" in line
    assert words in line


def test_a_method_that_writes_into_its_view_changes_nothing(model: Any) -> None:
    def merged(view: Any, keep: int) -> Plan:
        kept = first(view, keep)
        return Plan(kept, Assignment(first(view, 144) % keep, torch.full((1, 144), 1 / 11)))

    def written(view: Any, keep: int) -> Plan:
        view.grid.zero_()
        view.signals["last_attention"].zero_()
        view.tokens.normal_()
        return merged(view, keep)

    def logits(rule: Callable[..., Plan]) -> torch.Tensor:
        chat = question_chat(PICTURE, "what is it ?", model.spec)
        with espalier.apply(model, Mine(rule), ratio=0.9) as pruned:
            inputs = pruned._opened.encode([chat])
            more = {"max_new_tokens": 2, "output_logits": True}
            return pruned._opened.generator.generate(inputs, ["0"], **more).logits

    assert torch.equal(logits(written), logits(merged))


@dataclass(frozen=True)
class Scores(CacheCompressor):
    """Scores by a function of the view; the other calls by functions where they are given."""

    rule: Callable[..., Any] = len
    calls: Any = ()

    def score(self, view: Any) -> Any:
        return self.rule(view)

    def allocate(self, scores: Any, total: int) -> Any:
        return dict(self.calls).get("allocate", super().allocate)(scores, total)

    def keep(self, scores: Any, count: int) -> Any:
        return dict(self.calls).get("keep", super().keep)(scores, count)

    def merge(self, scores: Any, kept: Any) -> Any:
        return dict(self.calls).get("merge", super().merge)(scores, kept)


def by_key(view: Any) -> torch.Tensor:
    return view.keys[:1, view.candidates].norm(dim=-1)


def written_keys(view: Any) -> torch.Tensor:
    view.keys.div_(2)
    return by_key(view)


@dataclass(frozen=True)
class Steps(DenoisingReducer):
    """Shares of steps by a function."""

    rule: Callable[..., Any]

    def sites(self, depth: int) -> tuple[Site, ...]:
        return (Site("block", 1),)

    def plan(self, view: Any, keep: int) -> Plan:
        return Plan(first(view, keep))

    def ratios(self, ratio: float, steps: int) -> Any:
        return self.rule(ratio, steps)


@dataclass(frozen=True)
class Entered(Steps):
    """Merges entries of a cached prompt by functions."""

    choose: Callable[..., Any] = top
    merge: Callable[..., Any] = fails

    merges_entries = True

    def chosen(self, attention: Any, keep: int) -> Any:
        return self.choose(attention, keep)

    def merged(self, entries: Any) -> Any:
        return self.merge(entries)


@dataclass(frozen=True)
class Guide(Decoder):
    """Chooses by a function of the view."""

    rule: Callable[..., Any]
    count: Any = 1

    @property
    def window(self) -> Any:
        return self.count

    @property
    def guided(self) -> bool:
        return True

    def sites(self, depth: int) -> tuple[Site, ...]:
        return (Site("layer", 2),)

    def choose(self, view: Any, keep: int) -> Any:
        return self.rule(view, keep)


@dataclass(frozen=True)
class Focused(Mine):
    """Attends by a function at each decoding step."""

    def decode_site(self, depth: int) -> Site | None:
        return Site("decode", 3)

    def attend(self, view: Any, last: Attended | None) -> Any:
        return self.rule(view, 0)

    def plan(self, view: Any, keep: int) -> Plan:
        return Plan(first(view, keep))


def half(ratio: float, steps: int) -> tuple[float, ...]:
    """Return the shares of steps of which the first drops nothing."""
    return (0.0, *(ratio,) * (steps - 1))


#: Methods of other kinds that are refused, and words of the line.
OTHERS: list[tuple[Any, tuple[str, ...]]] = [
    (Scores(rule=lambda view: None), ("what `score` returns is a NoneType",)),
    (Scores(rule=lambda view: torch.ones(3, len(view.candidates))), ("3 rows", "valid: 1")),
    (Scores(rule=lambda view: torch.ones(1, 5)), ("(1, 5)", "(K, 144) of a floating type")),
    (Scores(rule=lambda view: view.nothing), ("`score` failed", "AttributeError")),
    (Scores(rule=lambda view: by_key(view) / 0), ("scores: NaN or infinite",)),
    (
        Scores(rule=written_keys),
        ("`score` writes into view.keys or view.queries", "view.keys.clone()"),
    ),
    *(
        (Scores(rule=by_key, calls=((call, rule),)), (words,))
        for call, rule, words in (
            ("allocate", lambda scores, total: None, "`allocate` returns is a NoneType"),
            ("allocate", lambda scores, total: [1] * 6, "`allocate` returns is a list"),
            ("allocate", lambda scores, total: torch.full((6,), 9), "in sum 54; valid"),
            ("allocate", lambda scores, total: torch.full((6,), total / 6), "of float32"),
            ("keep", lambda scores, count: None, "`keep` returns is a NoneType"),
            ("keep", lambda scores, count: scores.topk(count).indices, "row 0 is unsorted"),
            ("keep", lambda scores, count: torch.arange(count)[None] + 140, "row 0 holds 144"),
            ("keep", lambda scores, count: torch.zeros(1, count).long(), "holds 0 more than once"),
            ("merge", lambda scores, kept: 5, "`merge` returns is a int"),
            ("merge", lambda scores, kept: scores, "`merge` returns is (1, 144) of float32"),
            ("merge", lambda scores, kept: scores.long() + 999, "must lie in [-1, 144)"),
            ("merge", lambda scores, kept: scores / fails, "`merge` failed"),
        )
    ),
    (Entered(half, lambda attention, keep: None), ("`chosen` returns is a NoneType", "at block 1")),
    (
        Entered(half, lambda attention, keep: torch.zeros(1, keep).long()),
        ("holds 0 more than once", "at block 1"),
    ),
    (Entered(half, top, lambda entries: 5), ("`merged` failed", "at block 1")),
    (
        Entered(half, top, lambda entries: (entries.prompt.keys.rows, entries.prompt.values.rows)),
        ("keys that `merged` returns is", "at block 1"),
    ),
    (Guide(lambda view, keep: Plan(first(view, keep))), ("what `choose` returns is a Plan",)),
    (Guide(lambda view, keep: first(view, keep, 140)), ("method Guide", "[0, 144)")),
    (
        Guide(lambda view, keep: first(view, keep - 1)),
        ("keeps 13 tokens, the budget asks for 14",),
    ),
    (Guide(fails), ("`choose` failed", "ZeroDivisionError")),
    (Focused(lambda view, keep: None), ("`attend` returns a NoneType",)),
    (
        Focused(lambda view, keep: Attended(torch.ones(1, 2), torch.ones(1))),
        ("Attended.entries is (1, 2) of torch.float32",),
    ),
    *(
        (Mine(first, (Site("layer", layer),), ()), ("valid for layer: 0 to 5",))
        for layer in (1.5, 2.0, "2", None, True)
    ),
    *(
        (
            Mine(first, LAYER * count, ()),
            ("returns Site(where='layer', layer=2) twice; valid: once",),
        )
        for count in (2, 1000)
    ),
]

#: Settings of the question, by the base class of the method.
QUESTIONS = {
    DenoisingReducer: {"max_new_tokens": 4, "steps": 2, "prefix_cache": True},
    Focused: {"max_new_tokens": 3},
}


@pytest.mark.sampled
@pytest.mark.parametrize(("method", "words"), OTHERS)
def test_methods_of_every_kind_are_checked_alike(
    model: Any, denoising: Any, method: Any, words: tuple[str, ...]
) -> None:
    settings = [value for kind, value in QUESTIONS.items() if isinstance(method, kind)]
    loaded = denoising if isinstance(method, DenoisingReducer) else model
    line = str(refusal(loaded, method, question=dict(*settings)))
    assert [word for word in words if word not in line] == []


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (lambda ratio, steps: 0.5, "`ratios` returns 0.5; valid: a tuple of"),
        (lambda ratio, steps: (ratio,), "`ratios` returns (0.0,)"),
        (lambda ratio, steps: (2.0,) * steps, "numbers in [0, 1]"),
        (lambda ratio, steps: ratio / 0, "`ratios` failed"),
    ],
)
def test_shares_of_denoising_steps_are_checked_first(denoising: Any, rule: Any, words: str) -> None:
    assert words in str(refusal(denoising, Steps(rule), early=True))


@pytest.mark.parametrize("count", [0, 2.5, None, "always"])
def test_the_window_of_a_decoder_is_checked_first(model: Any, count: Any) -> None:
    error = refusal(model, Guide(first, count), early=True)
    assert f"method Guide: `window` is {count!r}; valid" in str(error)


def test_a_command_ends_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Uniform, "plan", lambda self, view, keep: fails(view, keep))
    argv = ["method=uniform", "ratio=0.9", "benchmark=seedling_vqa", "limit=1"]
    assert run.main([*argv, f"store={tmp_path}"]) == 2
    (line,) = [text for text in capsys.readouterr().err.splitlines() if "error: " in text]
    assert "method Uniform at prefix 0: `plan` failed at " in line
    assert "ZeroDivisionError" in line
    assert "Traceback" not in line


@pytest.mark.slow
def test_methods_import_with_torch_alone() -> None:
    code = (
        "import sys, espalier.methods.base, espalier.methods.compressor, espalier.methods.blame\n"
        "assert not [name for name in sys.modules if name.startswith(('espalier.harness', 'transformers'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("amount", [{"ratio": 0.9}, {"keep": 20}])
def test_a_method_without_a_site_removes_nothing(model: Any, denoising: Any, amount: Any) -> None:
    for loaded in (model, denoising):
        with pytest.raises(
            espalier.UserError,
            match=r"^(ratio=0.9|keep=20): method='Mine' removes nothing.*`sites`",
        ):
            espalier.apply(loaded, Mine(first, (), ()), **amount)
        espalier.apply(loaded, "none", **amount)
    espalier.apply(model, Mine(first, (), ()), ratio=0.0)
