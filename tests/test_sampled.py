"""Which instances of a sampled test the everyday run and CI take."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest
from tests.conftest import (
    CI_SHARE,
    FAMILY_CI_SHARE,
    FAMILY_SHARE,
    SAMPLE,
    USUAL,
    USUAL_SHARE,
    VARIANTS,
    pytest_collection_modifyitems,
)
from tests.families import FAMILIES


@pytest.fixture(autouse=True)
def all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """CI runs this file for one part as well."""
    monkeypatch.setattr(conftest, "SLOW_PART", "0/1")


def item(test: str, value: str, *marks: Any) -> Any:
    by_name = {mark.name: mark for mark in marks}
    return SimpleNamespace(
        nodeid=f"{test}[{value}]",
        marks=by_name,
        callspec=SimpleNamespace(params={"name": value}),
        get_closest_marker=by_name.get,
        add_marker=lambda mark: by_name.setdefault(mark.name, mark),
    )


def test_every_nth_instance_of_each_test_is_everydays_and_variants_do_not_count() -> None:
    third = pytest.mark.sampled(3)
    items = [
        *(item("a.py::one", value, third) for value in ("a", VARIANTS[0], "b", "c", "d")),
        *(item("a.py::other", value, third) for value in "ef"),
        *(item("a.py::whole", value) for value in "gh"),
    ]
    pytest_collection_modifyitems(items)
    marked = {"slow", "exhaustive"}
    everyday = [item.nodeid[-2] for item in items if not marked & item.marks.keys()]
    assert everyday == list("ad" + "e" + "gh")
    assert [
        item.nodeid for item in items if VARIANTS[0] in item.nodeid and marked & item.marks.keys()
    ]


def test_ci_takes_its_share_of_the_rest_whatever_the_order_of_the_instances() -> None:
    items = [
        item("a.py::test", f"{number}-{number % 4}", pytest.mark.sampled(4))
        for number in range(1200)
    ]
    pytest_collection_modifyitems(items)
    ci = [number for number, item in enumerate(items) if "slow" in item.marks]
    left = [number for number, item in enumerate(items) if "exhaustive" in item.marks]
    assert sorted(ci + left) == [number for number in range(1200) if number % 4]
    for rest in (1, 2, 3):
        assert sum(number % 4 == rest for number in ci) == pytest.approx(300 / CI_SHARE, abs=15)


def test_parts_of_the_slow_tests_are_as_large_as_each_other_and_are_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = []
    for part in range(3):
        monkeypatch.setattr(conftest, "SLOW_PART", f"{part}/3")
        items = [item("a.py::test", str(number), pytest.mark.slow) for number in range(900)]
        pytest_collection_modifyitems(items)
        taken += [i.nodeid for i in items if i.marks.keys() == {"slow"}]
        assert len(taken) == pytest.approx(300 * (part + 1), abs=60)
    assert len(set(taken)) == len(taken) == 900


def test_each_test_has_half_of_the_usual_families_and_some_of_the_others() -> None:
    tests = [f"a.py::test_{number}" for number in range(60)]
    items = [item(test, name) for test in tests for name in FAMILIES]
    pytest_collection_modifyitems(items)
    everyday = Counter(
        i.callspec.params["name"] for i in items if not {"slow", "exhaustive"} & i.marks.keys()
    )
    for name in USUAL:
        assert everyday[name] == pytest.approx(len(tests) / USUAL_SHARE, abs=12)
    assert not everyday.keys() & set(VARIANTS)
    left = Counter(i.callspec.params["name"] for i in items if "exhaustive" in i.marks)
    assert not left.keys() & set(USUAL)
    for name in set(FAMILIES) - set(USUAL) - set(VARIANTS):
        assert everyday[name] == pytest.approx(len(tests) / FAMILY_SHARE, abs=12)
        left_share = (1 - 1 / FAMILY_SHARE) * (1 - 1 / FAMILY_CI_SHARE)
        assert left[name] == pytest.approx(len(tests) * left_share, abs=14)


def test_a_sampled_test_may_state_the_share_of_ci() -> None:
    items = [item("a.py::test", str(number), pytest.mark.sampled(4, 1)) for number in range(8)]
    pytest_collection_modifyitems(items)
    assert ["slow" in item.marks for item in items] == [number % 4 > 0 for number in range(8)]


def test_a_sampled_test_without_a_number_is_whole_in_ci() -> None:
    items = [item("a.py::test", str(number), pytest.mark.sampled) for number in range(2 * SAMPLE)]
    pytest_collection_modifyitems(items)
    assert ["slow" in item.marks for item in items] == [n % SAMPLE > 0 for n in range(2 * SAMPLE)]
