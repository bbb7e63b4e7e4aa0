"""docs/methods.md is what the code says, and misses no method and no config file."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from espalier.harness.paths import CONF, ROOT
from espalier.harness.specs.catalogue import METHODS, build_method, names_of
from espalier.methods.base import Decoder, Site, TokenReducer
from espalier.methods.compressor import CacheCompressor
from espalier.methods.denoiser import DenoisingReducer
from lab.pages.methods_page import BLOCKS, DEPTH, main, page, places
from lab.pages.proofs import KINDS, Subject, kinds_of

PAGE = ROOT / "docs" / "methods.md"
FILES = sorted((CONF / "method").glob("*.yaml"))


@pytest.fixture(scope="module")
def text() -> str:
    """The page, written once."""
    return page()


def cells_of(text: str, first: str) -> list[str]:
    """Cells of the one row that begins with a cell."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {first}")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_page_is_what_the_code_says(text: str) -> None:
    written = PAGE.read_text()
    assert written == text, "python -m lab.pages.methods_page --write docs/methods.md"


def test_every_method_and_every_config_file_has_a_row(text: str) -> None:
    for base, width in (
        (TokenReducer, 6),
        (Decoder, 9),
        (CacheCompressor, 6),
        (DenoisingReducer, 6),
    ):
        for name in names_of(base):
            assert len(cells_of(text, f"[{name}](")) == width
    for path in CONF.joinpath("method").glob("*.yaml"):
        assert len(cells_of(text, f"`{path.stem}` |")) == 4


def test_a_row_names_place_signals_cost_paper_and_tests(text: str) -> None:
    row = cells_of(text, "[fastv](")
    assert row[:3] == ["[fastv](../methods/fastv.py)", "layer 2", "`last_attention`"]
    assert row[3].startswith("O(N log N)")
    assert "https://arxiv.org/abs/2403.06764" in row[4]
    assert row[5] == "[test_rules.py](../tests/methods/test_rules.py): slow version"
    assert cells_of(text, "[none](")[1:5] == ["-", "-", "-", "control"]


def test_every_method_that_chooses_states_its_cost(text: str) -> None:
    for name in METHODS.names():
        method, row = build_method(name, {}), cells_of(text, f"[{name}](")
        if isinstance(method, Decoder):
            cost, acts = row[7], method.guided
        else:
            cost, acts = row[3], bool(method.read_sites(BLOCKS, DEPTH))
        assert (cost != "-") == acts, name


def test_controls_name_no_paper_and_published_methods_do(text: str) -> None:
    rows = {name: cells_of(text, f"[{name}](") for name in METHODS.names()}
    controls = {"none", "random", "uniform", "pooled", "center", "autoregressive"}
    controls |= {"random_kv", "uniform_kv", "recent_kv"}
    assert all("control" in rows[name][4:] for name in controls)
    official = {
        config.name for config in map(OmegaConf.load, FILES) if config.variant == "official"
    }
    assert len(official) > 5
    assert not [name for name in official if "control" in rows[name][4:]]


def test_a_decoders_row_says_who_drafts_when_and_what_it_sees(text: str) -> None:
    assert cells_of(text, "[autoregressive](")[1:8] == ["nobody", *["-"] * 6]
    assert cells_of(text, "[onsd](")[1:5] == ["a draft model", "in turn", "5", "words alone"]
    assert cells_of(text, "[pearl](")[1:5] == ["a draft model", "at once", "auto", "everything"]
    assert cells_of(text, "[sd_tree](")[3] == "tree of 25 on 5 levels"
    assert cells_of(text, "[std](")[1:7] == [
        "the target",
        "in turn",
        "9",
        "words, and what the target chooses in each layer",
        "layer 32",
        "`text_attention`",
    ]
    assert cells_of(text, "[parallelvlm](")[4:6] == [
        "words, and what the target chooses",
        "layer 20",
    ]


@pytest.mark.parametrize(
    ("sites", "words"),
    [
        ([], "-"),
        ([Site("prefix")], "prefix"),
        ([Site("layer", 2)], "layer 2"),
        ([Site("layer", layer) for layer in (8, 16, 24)], "layers 8, 16, 24"),
        ([Site("layer", layer) for layer in range(1, 32)], "layers 1 to 31"),
        ([Site("tower", block) for block in range(2, 23, 3)], "tower 2 to 20 by 3"),
        ([Site("vision"), Site("layer", 16)], "vision, layer 16"),
        ([Site("prefix"), Site("decode", 3)], "prefix, decoding from layer 3"),
    ],
)
def test_places_in_words(sites: list[Site], words: str) -> None:
    assert places(sites) == words


@pytest.mark.slow
def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--write", str(tmp_path / "methods.md")]) == 0
    assert main([]) == 0
    assert capsys.readouterr().out == (tmp_path / "methods.md").read_text() == page()


#: Several methods in one file, and each way in which a test may come by a method or by a slow version of it.
SHARED = """
from methods.one import One
from methods.two import Two

METHOD = One()
EVERY = pytest.mark.parametrize("method", [Two(k=1)])

def slow_one(method: Two, view): ...
def compared(method): return slow_one(method, None)
def slow_nobody(): ...

@pytest.fixture
def built(): return build_method("two", {})

def test_through_a_helper_and_a_constant(): compared(METHOD)
@EVERY
def test_by_hand(method): ...
def test_as_published(built): ...
test_four = check_method("four", slow_four, released=lambda case: None)
def test_of_a_method_that_is_only_annotated(other: Two): slow_nobody()
def test_of_neither_with_a_worked_example(): recall(), kept_by(), build(("three", {}))
def helper_of_two(): return Two(), slow_one()
"""


@pytest.mark.parametrize(
    ("name", "cls", "kinds"),
    [
        ("one", "One", ("slow version",)),
        ("two", "Two", ("worked example", "published figures")),
        ("three", "Three", ("worked example", "planted signal", "tiny models")),
        ("four", "Four", ("slow version", "published figures")),
        ("five", "Five", ()),
    ],
)
def test_a_file_says_of_each_method_what_its_own_tests_do(name, cls, kinds) -> None:
    assert kinds_of(SHARED, Subject(name, cls)) == kinds


def test_a_slow_version_is_claimed_of_every_reducer_that_chooses(text: str) -> None:
    claimed = {
        name: [kind for kind in KINDS if kind in cells_of(text, f"[{name}](")[5]]
        for name in names_of(TokenReducer)
    }
    assert {name for name, kinds in claimed.items() if "slow version" not in kinds} == {"none"}
    assert claimed["visionzip"] == ["slow version", "published figures"]
    assert claimed["none"] == []
