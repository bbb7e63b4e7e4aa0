"""`engine.energy`: counters of GPUs that this test makes up, read around real answers on the CPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from espalier.harness.cost.meters import open_meter
from espalier.harness.cost.meters.energy import EnergyMeter
from espalier.harness.engine.record import GeneratedBatch
from espalier.harness.errors import UserError
from espalier.harness.evaluation import metered
from espalier.harness.evaluation.metered import cost_means
from espalier.harness.paths import ROOT
from espalier.harness.reports import results
from espalier.harness.runs.console import print_rows
from espalier.harness.specs.catalogue import build_method
from espalier.harness.specs.run_spec import METERS
from run import main
from tests.runs.helpers import fake_record
from tests.runs.test_keys import spec_of

#: Joules that a batch draws from each GPU.
STEP = 6.0


class Nvml:
    """What the meter uses of pynvml: every GPU's counter grows by STEP from one reading to the next."""

    class NVMLError(Exception):
        pass

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.log: list[str] = []
        self.counts: dict[str, int] = {}

    def nvmlInit(self) -> None:
        self._fail("nvmlInit")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self._fail("nvmlDeviceGetHandleByUUID")
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        self._fail("nvmlDeviceGetTotalEnergyConsumption")
        self.log.append(handle)
        self.counts[handle] = self.counts.get(handle, 10**9) + int(1e3 * STEP)
        return self.counts[handle]

    def _fail(self, function: str) -> None:
        if function == self.failing:
            raise self.NVMLError("Not Supported")


def gpus(monkeypatch: pytest.MonkeyPatch, nvml: Nvml | None) -> None:
    """Make the machine have GPUs, the first also under its short name, and this NVML; None: no package."""

    def properties(name: str) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"card{name.partition(':')[2] or 0}")

    def synchronize(name: str) -> None:
        nvml.log.append(f"wait for {name}")

    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)


def test_gpus_add_up_and_each_counts_once_after_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    gpus(monkeypatch, nvml)
    meter = open_meter("energy", ("cpu", "cuda:0", "cuda", "cuda:1"))
    assert isinstance(meter, EnergyMeter)
    first = meter.read()
    nvml.log.clear()
    assert meter.read() - first == pytest.approx(2 * STEP)
    assert sorted(nvml.log[:2]) == ["wait for cuda:0", "wait for cuda:1"]
    assert sorted(nvml.log[2:]) == ["GPU-card0", "GPU-card1"]


@pytest.mark.parametrize(
    ("nvml", "devices", "words"),
    [
        (Nvml(), ["cpu"], ("model.device='cpu'", "model.device=cuda")),
        (None, ["cuda"], ("nvidia-ml-py", "not installed")),
        (Nvml("nvmlInit"), ["cuda"], ("no energy counter of cuda (Not Supported)", "Volta")),
        (Nvml("nvmlDeviceGetHandleByUUID"), ["cuda:1"], ("cuda:1", "Volta")),
        (Nvml("nvmlDeviceGetTotalEnergyConsumption"), ["cuda"], ("Not Supported", "Volta")),
    ],
)
def test_a_machine_without_counters_is_refused(
    monkeypatch: pytest.MonkeyPatch, nvml: Nvml | None, devices: Sequence[str], words: Sequence[str]
) -> None:
    gpus(monkeypatch, nvml)
    with pytest.raises(
        UserError, match=r"engine\.energy=true.*valid: engine\.energy=false"
    ) as error:
        open_meter("energy", devices)
    assert all(word in str(error.value) for word in words)


ASKED = ("benchmark=seedling_vqa", "ratio=0.5", "limit=6", "engine.batch_size=4")


@pytest.fixture
def answer(
    tmp_path: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Any:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def run(*arguments: str) -> tuple[dict[str, Any], str]:
        shared = (f"store={tmp_path}", "model.device=cpu", "engine.paired=0", "json=true")
        method = () if any("method=" in text for text in arguments) else ("method=fastv",)
        code = main([*ASKED, *shared, *method, *arguments])
        printed = capsys.readouterr()
        lines = printed.out.splitlines()
        return (json.loads(lines[-1]) if code == 0 else {"code": code}), printed.err

    return run


@pytest.mark.slow
def test_a_row_has_the_energy_of_its_answers_and_no_other_number_changes(
    answer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    plain, _ = answer()
    gpus(monkeypatch, Nvml())
    monkeypatch.setattr(metered, "_devices", lambda model: ["cuda:0", "cuda:1"])
    row, _ = answer("engine.energy=true")
    cost = row["extra"]["costs"]["energy"]
    # Six answers in two batches, each of which adds a step to two counters; the warm-up is not counted.
    assert cost["mean"] == pytest.approx(2 * 2 * STEP / 6)
    assert cost["per_token"] == pytest.approx(cost["mean"] / row["extra"]["new_tokens"])
    assert cost["error"] > 0
    assert (cost["unit"], cost["answers"]) == ("J", 6)
    for full in (True, False):
        print_rows([row], out := StringIO(), full=full)
        assert "4 ± " in out.getvalue()
        assert ("J an answer" in out.getvalue()) == full
    table = results.load(tmp_path).set_index("run_key").energy
    assert table[row["run_key"]].iloc[0] == pytest.approx(cost["mean"])
    assert table[plain["run_key"]].isna().all()
    assert row["settings"]["engine"].pop("energy") is True
    for same in ("settings", "metrics", "tokens", "flops"):
        assert row[same] == plain[same]
    assert row["extra"]["answers"] == plain["extra"]["answers"]
    assert row["run_key"] != plain["run_key"]
    assert "costs" not in plain["extra"]


def test_a_batch_shares_its_cost_and_the_variance_of_its_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metered, "perf_counter", iter((0.0, 2.0, 2.0, 3.0)).__next__)
    gpus(monkeypatch, Nvml())
    record = fake_record(spec_of(ROOT), build_method("fastv", {}), "t/0")

    class Inner:
        def generate(self, inputs: Any, samples: Any, **generation: Any) -> GeneratedBatch:
            return GeneratedBatch(torch.zeros(len(samples), 1), (record,) * len(samples))

    generator = metered.MeteredGenerator(Inner(), {"energy": open_meter("energy", ["cuda"])})
    records = [
        *generator.generate({}, ["0", "1", "2"]).records,
        *generator.generate({}, ["3"]).records,
    ]
    cost = cost_means(records)["energy"]
    assert cost["mean"] == pytest.approx(2 * STEP / 4)
    # Watts of each batch times the lag, once for its beginning and once for its end.
    variance = ((STEP / 2 * 0.1) ** 2 + (STEP / 1 * 0.1) ** 2) / 6
    assert cost["error"] == pytest.approx(variance**0.5 / 4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("engine.energy=true",), ("model.device='cpu'",)),
        (("engine.energy=1",), ("engine.energy=1", "true or false")),
        (("engine.energy=true", "engine.rescore=true"), ("engine.rescore=false",)),
        (("engine.energy=true", "method=pearl"), ("engine.compare=false",)),
    ],
)
def test_what_cannot_be_counted_is_refused_in_one_line(
    answer: Any, monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str], words: Sequence[str]
) -> None:
    if words != ("model.device='cpu'",):
        monkeypatch.setattr(metered, "_devices", lambda model: ["cuda"])
        gpus(monkeypatch, Nvml())
    code, line = answer(*arguments)
    assert (code, len(line.splitlines())) == ({"code": 2}, 1)
    assert all(word in line for word in words)


def test_every_meter_has_its_file_and_every_file_its_setting() -> None:
    files = {path.stem for path in (ROOT / "harness/cost/meters").glob("*.py")} - {"__init__"}
    assert files == set(METERS)
