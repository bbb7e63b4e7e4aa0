"""Tables and pictures of decoders from a store of made-up runs, and the sweeps that bring real ones."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from matplotlib.patches import Rectangle

from espalier.harness.config.build_spec import build_spec
from espalier.harness.config.compose import read_command
from espalier.harness.decoding.speculative.decoding_record import (
    AnswerTimes,
    DecodingRecord,
    ForwardTimes,
    Round,
)
from espalier.harness.decoding.speculative.speculative_summary import speculative_block
from espalier.harness.engine.record import SampleRecord
from espalier.harness.errors import UserError
from espalier.harness.evaluation.samples import Sample
from espalier.harness.paths import CONF
from espalier.harness.reports.curves.decoder_report import (
    REPORT,
    accepted_share,
    decoders,
    draw_decoders,
    draw_guidance,
    draw_ratio,
    guidances,
    main,
    ratios,
    read_decoders,
)
from espalier.harness.specs.catalogue import names_of
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store import Store
from espalier.methods.base import Decoder
from espalier.methods.parallelvlm import ParallelVLM
from tests.report.stored_rows import settings

STEPS = ForwardTimes(target=0.004, draft=0.001)


def decoded(
    accepted: int, judged: int, compared: bool = True, steps: ForwardTimes | None = None
) -> DecodingRecord:
    """Return an answer that took 5 s a token plainly and 2 s with drafts."""
    drafted, plain = AnswerTimes(1.0, 0.0, 8.0, 5), AnswerTimes(1.0, 0.0, 20.0, 5)
    seconds = {"seconds": 4.0, "draft_seconds": 4.0, "target_seconds": 4.0}
    rounds = (Round(0, 4, 0, 0, True), Round(0, 4, judged, accepted, True, **seconds))
    return DecodingRecord(
        gamma=4,
        draft_visual=72.0,
        devices=1,
        first=True,
        degraded=None,
        rounds=rounds,
        spent=drafted,
        plain=plain if compared else None,
        mismatch=None,
        steps=steps,
    )


def add(
    root: Path,
    method: str,
    ratio: float = 0.5,
    records: tuple[DecodingRecord, ...] = (decoded(3, 4, steps=STEPS), decoded(1, 2)),
    overlap: bool = False,
    transport: str = "auto",
    benchmark: str = "captions",
    draft: str | None = "small",
    draft_dtype: str = "float32",
    label: str = "",
    params: dict[str, Any] | None = None,
    journal: bool = True,
    **changes: object,
) -> Path:
    """Write a run; those written later are newer."""
    directory = Store(root).run(f"run{len(list(root.glob('runs/*'))):03}")
    decodings = [record.entry() for record in records]
    if journal:
        directory.journal.append(*(sample(i, decoding) for i, decoding in enumerate(decodings)))
    row = {
        "schema": 1,
        "run_key": directory.path.name,
        "model": "tiny",
        "method": method,
        "variant": "paper",
        "benchmark": benchmark,
        "ratio": ratio,
        "budget_rule": "kept",
        "seed": 0,
        "n_samples": len(records),
        "settings": settings(
            draft=draft and {"name": draft, "dtype": draft_dtype},
            engine_transport=transport if draft else None,
            engine_positions=None,
            engine_compare=records[0].plain is not None,
            method_params=params or {},
        ),
        "extra": {
            "label": label,
            "params": params or {},
            "speculative": speculative_block(decodings, overlap),
            "environment": {"device_name": "abacus", "threads": 1, "dtype": "float32"},
        },
    }
    directory.commit(row | changes)
    order = int(directory.path.name[3:])
    os.utime(directory.path / "row.json", (order, order))
    return directory.path


def sample(number: int, decoding: dict[str, Any]) -> dict[str, Any]:
    record = SampleRecord(
        sample=f"captions/{number}",
        visual=144,
        text=7,
        requested=(),
        kept=(),
        origin=None,
        entering=(144,),
        kv_entries=144,
        kv_bytes=1,
        new_tokens=5,
        decoding=decoding,
    )
    return Sample("captions", number, "a", 151, 5, record).entry()


def guided(root: Path, ratio: float, **settings: Any) -> Path:
    """Write a run of ParallelVLM; `params` name what is off its defaults."""
    changed = settings.pop("params", {})
    return add(
        root,
        "parallelvlm",
        ratio,
        overlap=True,
        label=" ".join(f"{key}={value}" for key, value in changed.items()),
        params=asdict(ParallelVLM(**changed)),
        **settings,
    )


def full_store(root: Path) -> None:
    add(root, "autoregressive", 0, (decoded(0, 0, compared=False),) * 2, draft=None)
    add(root, "vanilla_sd", 0)
    for ratio in (0, 0.5, 0.9):
        guided(root, ratio)
    guided(root, 1, params={"guidance": "none", "text_only": True})
    taking_turns: dict[str, Any] = {"transport": "sequential"}
    for ratio in (0.5, 0.9):
        for guidance in ("random", "self"):
            guided(root, ratio, params={"guidance": guidance}, **taking_turns)
        for layer in (1, 2):
            guided(root, ratio, params={"L": layer}, **taking_turns)
    guided(root, 0, params={"guidance": "none"}, **taking_turns)


@pytest.mark.slow
@pytest.mark.filterwarnings("error::UserWarning")  # a picture whose panels find no room
def test_everything_is_written_from_a_full_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full_store(tmp_path / "store")
    out = tmp_path / "docs" / "speculative"
    assert main(["--store", str(tmp_path / "store"), "--write", str(out)]) == 0
    pictures = {
        f"{name}.{kind}" for name in ("decoders", "ratio", "guidance") for kind in ("png", "svg")
    }
    assert {path.name for path in out.iterdir()} == pictures | {"README.md"}
    printed = capsys.readouterr()
    assert printed.err == ""
    assert set(printed.out.split()) == {str(path) for path in out.iterdir()}
    page = (out / "README.md").read_text()
    for name in ("decoders", "ratio", "guidance"):
        assert f"({name}.png)" in page
    assert "Left out" not in page
    assert "tiny with small as draft; abacus; 1 thread; float32; 2 answers a row" in page


@pytest.mark.slow
def test_the_table_has_the_figures_of_the_rows(tmp_path: Path) -> None:
    full_store(tmp_path / "store")
    REPORT.write(tmp_path / "store", tmp_path / "out")
    page = (tmp_path / "out" / "README.md").read_text()
    part = page[page.index("### captions") : page.index("## parallelvlm by")]
    lines = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| ")]
    heads, _, plain, vanilla, parallel = lines
    # 4 of 6 accepted, 2 s instead of 5 s a token; plain decoding has no speed-up over itself.
    cells = dict(zip(heads, vanilla, strict=True))
    assert (cells["method"], cells["ratio"], cells["accepted"]) == ("vanilla_sd", "0", "66.7%")
    assert (cells["decode"], cells["end to end"], cells["differ"]) == ("2.50", "2.33", "0/2")
    assert (cells["T_p"], cells["T_q"]) == ("5000.00", "1000.00")
    assert (plain[0], dict(zip(heads, plain, strict=True))["decode"]) == ("autoregressive", "-")
    # The ratios and guidances of another decoder's study are not among the decoders.
    assert parallel[:2] == ["parallelvlm", "0.5"]
    assert "| random | its own | 0.9 | 66.7 [50.0, 75.0] | 2.00 |" in page
    assert "| similarity_variation | 2 | 0.5 | 66.7 [50.0, 75.0] | 2.00 |" in page


@pytest.mark.slow
def test_pieces_without_rows_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, out = tmp_path / "store", tmp_path / "out"
    add(store, "vanilla_sd", 0)
    assert main(["--store", str(store), "--write", str(out)]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "left out: no rows for ratio; run: python run.py +experiment=speculative_ratio",
        "left out: no rows for guidance; run: python run.py +experiment=speculative_guidance",
    ]
    assert {path.name for path in out.iterdir()} == {"README.md", "decoders.png", "decoders.svg"}
    assert "- no rows for guidance" in (out / "README.md").read_text()


def test_without_plain_decoding_there_are_tables_and_no_bars(tmp_path: Path) -> None:
    add(tmp_path / "store", "vanilla_sd", 0, (decoded(1, 2, compared=False),))
    paths, missing = REPORT.write(tmp_path / "store", tmp_path / "out")
    assert ([path.name for path in paths], len(missing)) == (["README.md"], 3)
    page = paths[0].read_text()
    assert "| vanilla_sd | 0 |" in page
    assert "decoders.png" not in page


@pytest.mark.parametrize("reducers", [False, True])
def test_a_store_without_decoders_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], reducers: bool
) -> None:
    if reducers:
        add(tmp_path, "fastv", extra={"speculative": None})
    out = tmp_path / "out"
    assert main(["--store", str(tmp_path), "--write", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "holds no finished runs of a decoder; valid: a store of" in error
    assert not out.exists()


def test_several_models_must_be_told_apart(tmp_path: Path) -> None:
    add(tmp_path, "pearl", 0, overlap=True)
    add(tmp_path, "pearl", 0, overlap=True, model="huge")
    with pytest.raises(UserError, match="valid for --model: huge, tiny"):
        read_decoders(tmp_path)
    assert [*read_decoders(tmp_path, "huge").model] == ["huge"]
    with pytest.raises(UserError, match="--model"):
        read_decoders(tmp_path, "large")


def test_rows_of_one_setting_are_compared_and_the_newest_counts(tmp_path: Path) -> None:
    three = (decoded(1, 2, steps=STEPS),) * 3
    add(tmp_path, "pearl", 0, overlap=True)
    newer = add(tmp_path, "pearl", 0, overlap=True)
    add(tmp_path, "vanilla_sd", 0)
    add(tmp_path, "vanilla_sd", 0, three)
    add(tmp_path, "onsd", 1, draft="other")
    compared = decoders(read_decoders(tmp_path))["captions"]
    # Three answers, or another draft, are no measure of the others.
    assert [*zip(compared.curve, compared.n_samples, strict=True)] == [
        ("vanilla_sd", 2),
        ("pearl", 2),
    ]
    assert compared.index[1] == newer


def test_a_row_with_a_speedup_counts_before_a_newer_one_without(tmp_path: Path) -> None:
    older = add(tmp_path, "vanilla_sd", 0)
    add(tmp_path, "vanilla_sd", 0, (decoded(3, 4, compared=False), decoded(1, 2, compared=False)))
    assert [*decoders(read_decoders(tmp_path))["captions"].index] == [older]


def test_taking_turns_is_no_measure_of_side_by_side(tmp_path: Path) -> None:
    add(tmp_path, "vanilla_sd", 0)
    for ratio in (0.5, 0.9):
        guided(tmp_path, ratio, transport="sequential")
    guided(tmp_path, 0.9, transport="sequential", params={"guidance": "uniform"})
    cells = read_decoders(tmp_path)
    assert [*decoders(cells)["captions"].curve] == ["vanilla_sd"]
    assert ratios(cells).empty
    assert len(guidances(cells)) == 3


def test_decoders_are_compared_at_the_ratio_that_most_have(tmp_path: Path) -> None:
    add(tmp_path, "std", 0.75, draft=None)
    add(tmp_path, "vanilla_sd", 0)
    for ratio in (0, 0.25, 0.75):  # as many at 0.25 as at 0.75 without std
        guided(tmp_path, ratio)
    compared = decoders(read_decoders(tmp_path))["captions"]
    expected = [("vanilla_sd", 0), ("std", 0.75), ("parallelvlm", 0.75)]
    assert [*zip(compared.curve, compared.ratio, strict=True)] == expected


def test_windows_are_not_mixed_along_a_line(tmp_path: Path) -> None:
    for ratio in (0, 0.5, 0.9):
        guided(tmp_path, ratio)
    guided(tmp_path, 0.5, params={"gamma": 2})
    guided(tmp_path, 1, params={"guidance": "none", "text_only": True})
    rows = ratios(read_decoders(tmp_path))
    assert [*zip(rows.ratio, rows.gamma, strict=True)] == [
        (ratio, "auto") for ratio in (0, 0.5, 0.9, 1)
    ]


def test_acceptance_is_pooled_and_its_interval_resamples_answers(tmp_path: Path) -> None:
    add(tmp_path, "pearl", records=(decoded(3, 4), decoded(1, 2), decoded(4, 4)))
    add(tmp_path, "pearl", 0.9, records=(decoded(3, 4), decoded(1, 2)), journal=False)
    add(tmp_path, "autoregressive", 0, (decoded(0, 0),) * 2)
    three, bare, nobody = read_decoders(tmp_path).sort_index().result
    share = accepted_share(three)
    assert (
        share.value
        == pytest.approx(three.row["extra"]["speculative"]["acceptance"])
        == pytest.approx(0.8)
    )
    # All three answers may be the worst one or the best one.
    assert [share.low, share.high] == pytest.approx([0.5, 1.0])
    share_of_row = accepted_share(bare)
    assert share_of_row.low == share_of_row.value == share_of_row.high == pytest.approx(4 / 6)
    assert accepted_share(nobody) is None


def test_pictures_say_what_their_rows_say(tmp_path: Path) -> None:
    full_store(tmp_path)
    cells = read_decoders(tmp_path)
    fast = decoders(cells)["captions"]
    bars = draw_decoders({"captions": fast[fast.speedup_decode.notna()]}).axes[0]
    widths = [bar.get_width() for bar in bars.patches if isinstance(bar, Rectangle)]
    assert widths == pytest.approx([2.5, 2.5])
    assert [tick.get_text() for tick in bars.get_yticklabels()] == ["vanilla_sd", "parallelvlm"]
    right = draw_ratio(ratios(cells)).axes[2]
    assert [tick.get_text() for tick in right.get_xticklabels()] == ["0", "50", "90", "words\nonly"]
    panel, deep = draw_guidance(guidances(cells)).axes
    names = [tick.get_text() for tick in panel.get_yticklabels()]
    assert set(names) == {"random", "self", "similarity_variation"}
    assert [tick.get_text() for tick in deep.get_xticklabels()] == ["1", "2"]


# ------------------------------------------------------------------ the sweeps


def preset(name: str) -> dict[str, list[str]]:
    """Return the values that a sweep goes through, by key."""
    config = yaml.safe_load((CONF / "experiment" / f"{name}.yaml").read_text())
    return {
        key: str(value).split(",") for key, value in config["hydra"]["sweeper"]["params"].items()
    }


def specs(*argv: str) -> list[RunSpec]:
    command = read_command(argv)
    assert command.sweep
    return [build_spec(cell) for cell in command.cells]


def test_the_sweep_of_decoders_is_timed_on_one_thread() -> None:
    every = specs("+experiment=speculative", "benchmark=seedling_vqa", "ratio=0.5")
    assert {spec.method.name for spec in every} == set(names_of(Decoder))
    chosen = specs("+experiment=speculative", "method=std,pearl", "benchmark=seedling_vqa")
    assert [spec.method.name for spec in chosen] == ["std", "pearl"]
    assert {
        (spec.engine.threads, spec.benchmark.limit, spec.engine.compare) for spec in chosen
    } == {(1, 200, True)}


def test_the_sweep_of_ratios_and_its_limit() -> None:
    listed = preset("speculative_ratio")["ratio"]
    assert [float(ratio) for ratio in listed] == [0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99]
    (last,) = specs("+experiment=speculative_ratio", "ratio=0.99")
    assert (last.method.name, last.engine.transport) == ("parallelvlm", "auto")
    blind = ("ratio=1", "method.params.guidance=none", "method.params.text_only=true")
    (limit,) = specs("+experiment=speculative_ratio", *blind)
    assert (limit.budget.ratio, limit.method.params["text_only"]) == (1, True)


def test_the_sweep_of_guidances_and_of_layers() -> None:
    listed = preset("speculative_guidance")["method.params.guidance"]
    for guidance in listed:
        ParallelVLM(guidance=guidance)  # type: ignore[arg-type]  # which checks it
    assert len(set(listed)) == 8
    usual = ("method.params.guidance=similarity_variation", "method.params.L=1,5", "ratio=0.9")
    chosen = specs("+experiment=speculative_guidance", *usual)
    assert [(spec.method.params["L"], spec.engine.transport) for spec in chosen] == [
        (1, "sequential"),
        (5, "sequential"),
    ]
