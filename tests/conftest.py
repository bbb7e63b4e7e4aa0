"""One thread for each worker, since several of them share the cores; and which tests are left to CI or to releases."""

import gc
import os
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from zlib import crc32

import pytest

from espalier.harness.paths import ROOT
from espalier.harness.store import Journal, RunDir, Store
from tests.forks import Forks

# Small models gain nothing from more. Read when torch is imported, here and in the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"
# No test reaches the hub, unless it serves one.
os.environ["HF_HUB_OFFLINE"] = "1"

#: Families with the adapter, the tower and the media of another family that the everyday run has.
VARIANTS = (
    *("internvl_6b", "internvl_phi3", "internvl_qwen3", "onevision_video"),
    *("qwen2_vl_video", "qwen2_5_vl_video", "qwen3_vl_video", "qwen3_vl_moe", "glm4v_video"),
    "qwen3_5_moe_mixed",
)

#: Families that every test of families has in CI: a raster and a class token, crops and newlines, packed planes, merged
#: patches with positions on three axes, pixel shuffle, and tokens that see one another.
USUAL = ("llava", "llava_next", "onevision_image", "qwen2_5_vl", "internvl", "gemma3")
#: Of these families, and of its others, a test has one in so many in the everyday run, drawn by its name.
USUAL_SHARE, FAMILY_SHARE = 2, 8

#: Of the instances of variants and of a test `sampled(n)` that are not everyday's, CI takes one in so many; of other
#: families one in two, so that CI and the everyday run have each test on nine of them in sixteen.
CI_SHARE, FAMILY_CI_SHARE = 10, 2
#: Of a test `sampled` without a number the everyday run takes one instance in so many, and CI the others.
SAMPLE = 6


#: Which part of the slow tests a run takes, and how many parts there are: CI takes one of six, by its commit.
SLOW_PART = os.environ.get("SLOW_PART", "0/1")


def pytest_configure(config: pytest.Config) -> None:
    """Run the slow tests of SLOW_PART too, where it is set."""
    if "SLOW_PART" in os.environ:
        config.option.markexpr = config.option.markexpr.replace("not slow and ", "")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let nobody look for garbage in modules and tests, which live as long as the process."""
    gc.disable()
    collected = yield
    gc.enable()
    return collected


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what the everyday run leaves of variants, of families, and of sampled tests as slow or exhaustive."""
    seen: Counter[str] = Counter()
    families = set(getattr(sys.modules.get("tests.families"), "FAMILIES", ()))
    for item in items:
        values = set(map(str, getattr(getattr(item, "callspec", None), "params", {}).values()))
        sampled, ci_share = item.get_closest_marker("sampled"), CI_SHARE
        if not values.isdisjoint(VARIANTS):
            is_everyday = False
        elif sampled is not None:
            test = item.nodeid.partition("[")[0]
            stride, ci_share = (*(sampled.args or (SAMPLE, 1)), CI_SHARE)[:2]
            is_everyday = seen[test] % stride == 0
            seen[test] += 1
        elif not values.isdisjoint(families):
            rare = values.isdisjoint(USUAL)
            share, ci_share = (FAMILY_SHARE, FAMILY_CI_SHARE) if rare else (USUAL_SHARE, 1)
            is_everyday = crc32(f"family {item.nodeid}".encode()) % share == 0
        else:
            continue
        if not is_everyday:
            # A stride would take the same family of each product again and again.
            of_ci = crc32(item.nodeid.encode()) % ci_share == 0
            item.add_marker(pytest.mark.slow if of_ci else pytest.mark.exhaustive)
    part, parts = map(int, SLOW_PART.split("/"))
    for item in items:
        if (
            item.get_closest_marker("slow")
            and crc32(f"part {item.nodeid}".encode()) % parts != part
        ):
            item.add_marker(pytest.mark.exhaustive)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal.jsonl")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """The directory of a run of a store."""
    return Store(tmp_path).run("k1")


@pytest.fixture(scope="session")
def python() -> Iterator[Forks]:
    """Commands in the repository, without what they import."""
    with Forks(os.environ, ROOT) as forks:
        yield forks


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")
