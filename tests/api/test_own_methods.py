"""Mistakes in users' methods: each is one line with the method, the mistake and the remedy."""

from __future__ import annotations

import re
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
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mine(TokenReducer):
    """Answers by a function of the view and the budget."""

    rule: Callable[..., Any]
    where: tuple[Site, ...] = (Site("layer", 2),)
    read: Any = (Need("last_attention"),)

    def sites(self, depth: int) -> Any:
        return self.where

    def needs(self, site: Site) -> Any:
        return self.read

    def plan(self, view: Any, keep: int) -> Any:
        return self.rule(view, keep)


def first(view: Any, keep: int, start: int = 0) -> torch.Tensor:
    rows = view.tokens.shape[0]
    return torch.arange(start, start + keep).expand(rows, keep)


def fails(view: Any, keep: int) -> Plan:
    return Plan(first(view, keep)[:, : 1 // (keep - keep)])


class OwnError(Exception):
    """Derived from nothing that a harness could list."""


def raises(view: Any, keep: int) -> Plan:
    raise OwnError("two\nlines")


@pytest.fixture(scope="module")
def model() -> Any:
    return espalier.load("seedling", device="cpu")


@pytest.fixture(scope="module")
def denoising() -> Any:
    return espalier.load("seedling_diffusion", device="cpu")


def refusal(model: Any, method: Any) -> espalier.UserError:
    with (
        pytest.raises(espalier.UserError) as caught,
        espalier.apply(model, method, ratio=0.9) as pruned,
    ):
        pruned.ask(PICTURE, "what is it ?")
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
        ("scores: 144 of 144 values are NaN or infinite",),
    ),
    "weight": (
        lambda view, keep: Plan(
            first(view, keep), Assignment(first(view, 144) % 14, torch.full((1, 144), torch.nan))
        ),
        ("Assignment.weight holds NaN or infinity",),
    ),
    "field": (lambda view, keep: setattr(view, "tokens", 0), ("cannot assign to field 'tokens'",)),
    "failure": (fails, ("`plan` failed", f"{__file__}:", "ZeroDivisionError")),
    "own error": (raises, ("OwnError: two lines", f"{__file__}:")),
}


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


@pytest.mark.parametrize(
    ("where", "read", "words"),
    [
        (Site("layer", 2), (), ("`sites` returns Site(", "a tuple of espalier.methods.base.Site")),
        (
            ("layer", 2),
            (),
            ("`sites` returns ('layer', 2)", "a tuple of espalier.methods.base.Site"),
        ),
        (None, (), ("`sites` returns None",)),
        (
            (Site("layer", 2),),
            ("last_attention",),
            ("`needs` returns", "espalier.methods.base.Need"),
        ),
        ((Site("layer", 2),), None, ("`needs` returns None", "espalier.methods.base.Need")),
        ((Site("layer", 2),), (Need("last_atention"),), ("did you mean last_attention",)),
        ((Site("layer", 99),), (), ("layer=99", "valid for layer: 0 to 5")),
        ((Site("layr", 2),), (), ("'layr'", "valid for where: tower")),  # type: ignore[arg-type]
        ((Site("layer", 4), Site("layer", 2)), (), ("layer=4", "valid: first to last")),
    ],
)
def test_what_a_method_declares_is_checked_first(
    model: Any, where: Any, read: Any, words: tuple[str, ...]
) -> None:
    with pytest.raises(espalier.UserError) as caught:
        espalier.apply(model, Mine(first, where, read), ratio=0.9)
    assert [word for word in (*words, "Mine") if word not in str(caught.value)] == []


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


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        (lambda share, n_sites: None, "`fractions` returns None"),
        (lambda share, n_sites: (share, share), "valid: a tuple of 1 numbers"),
        (lambda share, n_sites: (float("nan"),), "returns (nan,)"),
        (lambda share, n_sites: (share / 0,), "`fractions` failed"),
    ],
)
def test_shares_of_sites_are_checked_first(model: Any, shares: Any, words: str) -> None:
    @dataclass(frozen=True)
    class Shared(Mine):
        def fractions(self, share: float, n_sites: int) -> Any:
            return shares(share, n_sites)

    with pytest.raises(espalier.UserError) as caught:
        espalier.apply(model, Shared(first), ratio=0.9)
    assert "method Shared" in str(caught.value)
    assert words in str(caught.value)


def test_an_unknown_rule_of_positions_is_refused_first(model: Any) -> None:
    @dataclass(frozen=True)
    class Closed(Mine):
        def positions(self, depth: int) -> Any:
            return "closed"

    with pytest.raises(espalier.UserError, match="`positions` returns 'closed'; valid: original"):
        espalier.apply(model, Closed(first), ratio=0.9, positions="method")


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
            inputs = pruned._opened.codec.encode([chat])
            more = {"max_new_tokens": 2, "output_logits": True}
            generated = pruned._opened.generator.generate(inputs, ["0"], **more)
        assert generated.logits is not None
        return generated.logits

    assert torch.equal(logits(written), logits(merged))


@dataclass(frozen=True)
class Scores(CacheCompressor):
    """Scores by a function of the view; the other calls by functions where they are given."""

    rule: Callable[..., Any] = len
    calls: Any = ()

    def score(self, view: Any) -> Any:
        return self.rule(view)

    def allocate(self, scores: Any, total: int) -> Any:
        rule = dict(self.calls).get("allocate", super().allocate)
        return rule(scores, total)

    def keep(self, scores: Any, count: int) -> Any:
        rule = dict(self.calls).get("keep", super().keep)
        return rule(scores, count)

    def merge(self, scores: Any, kept: Any) -> Any:
        rule = dict(self.calls).get("merge", super().merge)
        return rule(scores, kept)


def by_key(view: Any) -> torch.Tensor:
    norms: torch.Tensor = view.keys[:1, view.candidates].norm(dim=-1)
    return norms


def written_keys(view: Any) -> torch.Tensor:
    view.keys.div_(2)
    return by_key(view)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (lambda view: None, ("what `score` returns is a NoneType",)),
        (lambda view: torch.ones(3, len(view.candidates)), ("3 rows", "valid: 1")),
        (lambda view: torch.ones(1, 5), ("(1, 5)", "(K, 144) of a floating type")),
        (lambda view: view.nothing, ("`score` failed", "AttributeError")),
        (lambda view: by_key(view) / 0, ("scores: 144 of 144 values",)),
        (written_keys, ("`score` writes into view.keys or view.queries", "view.keys.clone()")),
    ],
)
def test_a_compressor_is_checked_alike(model: Any, rule: Any, words: tuple[str, ...]) -> None:
    line = str(refusal(model, Scores(rule=rule)))
    assert [word for word in words if word not in line] == []


@pytest.mark.parametrize(
    ("call", "rule", "words"),
    [
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
    ],
)
def test_every_call_of_a_compressor_is_checked(
    model: Any, call: str, rule: Any, words: str
) -> None:
    assert words in str(refusal(model, Scores(rule=by_key, calls=((call, rule),))))


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
    with pytest.raises(espalier.UserError) as caught:
        espalier.apply(denoising, Steps(rule), ratio=0.9)
    assert "method Steps" in str(caught.value)
    assert words in str(caught.value)


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


@pytest.mark.parametrize(
    ("choose", "merge", "words"),
    [
        (lambda attention, keep: None, fails, "`chosen` returns is a NoneType"),
        (lambda attention, keep: torch.zeros(1, keep).long(), fails, "holds 0 more than once"),
        (top, lambda entries: 5, "`merged` failed"),
        (
            top,
            lambda entries: (entries.prompt.keys.rows, entries.prompt.values.rows),
            "keys that `merged` returns is",
        ),
    ],
)
def test_entries_of_a_cached_prompt_are_checked(
    denoising: Any, choose: Any, merge: Any, words: str
) -> None:
    method = Entered(lambda ratio, steps: (0.0, *(ratio,) * (steps - 1)), choose, merge)
    with (
        pytest.raises(espalier.UserError) as caught,
        espalier.apply(denoising, method, ratio=0.9) as pruned,
    ):
        pruned.ask(PICTURE, "what is it ?", max_new_tokens=4, steps=2, prefix_cache=True)
    assert "method Entered at block 1" in str(caught.value)
    assert words in str(caught.value)


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


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (lambda view, keep: Plan(first(view, keep)), ("what `choose` returns is a Plan",)),
        (lambda view, keep: first(view, keep, 140), ("method Guide", "[0, 144)")),
        (lambda view, keep: first(view, keep - 1), ("keeps 13 tokens, the budget asks for 14",)),
        (fails, ("`choose` failed", "ZeroDivisionError")),
    ],
)
def test_a_decoder_is_checked_alike(model: Any, rule: Any, words: tuple[str, ...]) -> None:
    with (
        pytest.raises(espalier.UserError) as caught,
        espalier.apply(model, Guide(rule), ratio=0.9, transport="sequential") as pruned,
    ):
        pruned.ask(PICTURE, "what is it ?")
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize("count", [0, 2.5, None, "always"])
def test_the_window_of_a_decoder_is_checked_first(model: Any, count: Any) -> None:
    with pytest.raises(espalier.UserError, match=f"method Guide: `window` is {count!r}; valid"):
        espalier.apply(model, Guide(first, count), ratio=0.9, transport="sequential")


@dataclass(frozen=True)
class Focused(Mine):
    """Attends by a function at each decoding step."""

    def decode_site(self, depth: int) -> Site | None:
        return Site("decode", 3)

    def attend(self, view: Any, last: Attended | None) -> Any:
        return self.rule(view, 0)

    def plan(self, view: Any, keep: int) -> Plan:
        return Plan(first(view, keep))


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (lambda view, keep: None, "`attend` returns a NoneType"),
        (
            lambda view, keep: Attended(torch.ones(1, 2), torch.ones(1)),
            "Attended.entries is (1, 2) of torch.float32",
        ),
    ],
)
def test_a_decode_site_is_checked_alike(model: Any, rule: Any, words: str) -> None:
    with (
        pytest.raises(espalier.UserError, match=re.escape(words)),
        espalier.apply(model, Focused(rule), ratio=0.9) as pruned,
    ):
        pruned.ask(PICTURE, "what is it ?", max_new_tokens=3)


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


@pytest.mark.parametrize("layer", [1.5, 2.0, "2", None, True])
def test_a_layer_is_a_whole_number(model: Any, layer: Any) -> None:
    line = str(refusal(model, Mine(first, (Site("layer", layer),), ())))
    assert "valid for layer: 0 to 5" in line


@pytest.mark.parametrize("count", [2, 1000])
def test_a_site_stands_once(model: Any, count: int) -> None:
    line = str(refusal(model, Mine(first, (Site("layer", 2),) * count, ())))
    assert "returns Site(where='layer', layer=2) twice; valid: once" in line


@pytest.mark.parametrize("spare", [10**6, 15, -1])
def test_spare_tokens_are_among_the_kept(model: Any, spare: int) -> None:
    def rule(view: Any, keep: int) -> Plan:
        return Plan(first(view, keep), spare=torch.full((1,), spare))

    assert "Plan.spare must lie in [0, 14]" in str(refusal(model, Mine(rule)))


@pytest.mark.parametrize("places", [slice(None), 0])
def test_scores_are_numbers(model: Any, places: Any) -> None:
    def rule(view: Any, keep: int) -> Plan:
        scores = torch.full(view.tokens.shape[:2], -torch.inf)
        scores[:, places] = torch.nan
        return Plan(first(view, keep), scores=scores)

    assert "Plan.scores holds NaN" in str(refusal(model, Mine(rule)))
