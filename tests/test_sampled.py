"""Which instances of a sampled test the everyday run takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import VARIANTS, pytest_collection_modifyitems


def item(test: str, value: str, *marks: pytest.MarkDecorator) -> Any:
    found = {one.name: one for one in marks}
    return SimpleNamespace(
        nodeid=f"{test}[{value}]",
        callspec=SimpleNamespace(params={"name": value}),
        get_closest_marker=found.get,
        add_marker=lambda mark: found.setdefault(mark.name, mark),
    )


def test_every_nth_instance_of_each_test_is_everydays_and_variants_do_not_count() -> None:
    third = pytest.mark.sampled(3)
    items = [
        *(item("a.py::one", value, third) for value in ("a", VARIANTS[0], "b", "c", "d")),
        *(item("a.py::other", value, third) for value in "ef"),
        *(item("a.py::whole", value) for value in "gh"),
    ]
    pytest_collection_modifyitems(items)
    everyday = [one.nodeid[-2] for one in items if one.get_closest_marker("slow") is None]
    assert everyday == list("ad" + "e" + "gh")
