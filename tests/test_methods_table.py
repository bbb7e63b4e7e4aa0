"""docs/methods.md is what the code says, and misses no method and no config file."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.config.compose import CONF
from harness.config.spec import ROOT
from harness.methods_table import main, page, places
from methods.base import Decoder, Site, TokenReducer
from methods.registry import METHODS, names_of

PAGE = ROOT / "docs" / "methods.md"


def cells_of(text: str, first: str) -> list[str]:
    """Cells of the one row that begins with a cell."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {first}")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_page_is_what_the_code_says() -> None:
    written = PAGE.read_text()
    assert written == page(), "python -m harness.methods_table --write docs/methods.md"


def test_every_method_and_every_config_file_has_a_row() -> None:
    text = page()
    for base, width in ((TokenReducer, 6), (Decoder, 9)):
        for name in names_of(base):
            assert len(cells_of(text, f"[{name}](")) == width
    for path in CONF.joinpath("method").glob("*.yaml"):
        assert len(cells_of(text, f"`{path.stem}` |")) == 4


def test_a_row_names_place_signals_cost_paper_and_tests() -> None:
    row = cells_of(page(), "[fastv](")
    assert row[:3] == ["[fastv](../methods/fastv.py)", "layer 2", "`last_attention`"]
    assert row[3].startswith("O(N log N)")
    assert "https://arxiv.org/abs/2403.06764" in row[4]
    assert "[test_method_rules.py](../tests/test_method_rules.py)" in row[5]
    assert cells_of(page(), "[none](")[1:5] == ["-", "-", "-", "control"]


def test_every_method_states_its_cost_and_all_but_controls_a_paper() -> None:
    text = page()
    rows = {name: cells_of(text, f"[{name}](") for name in METHODS.names()}
    reducers, decoders = set(names_of(TokenReducer)), set(names_of(Decoder))
    # Those that choose nothing have no cost of choosing.
    assert {name for name in reducers if rows[name][3] == "-"} == {"none"}
    choosing = {name for name in decoders if rows[name][7] != "-"}
    assert choosing == {"specvlm_sd", "std", "parallelvlm"}
    controls = {"none", "random", "uniform", "pooled", "autoregressive"}
    assert {name for name, row in rows.items() if "control" in row[4:]} == controls


def test_a_decoders_row_says_who_drafts_when_and_what_it_sees() -> None:
    text = page()
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


def test_every_reducer_has_a_test_file_of_its_own() -> None:
    text = page()
    assert all(cells_of(text, f"[{name}](")[5] != "-" for name in names_of(TokenReducer))


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


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--write", str(tmp_path / "methods.md")]) == 0
    assert main([]) == 0
    assert capsys.readouterr().out == (tmp_path / "methods.md").read_text() == page()
