"""docs/models.md follows from conf, adapters and tests; each check that it lists is a test that runs."""

from __future__ import annotations

import pytest

from espalier.harness.cli.convert import FORMATS
from espalier.harness.errors import UserError
from espalier.harness.models.families import ADAPTERS, GENERIC
from espalier.harness.paths import CONF
from lab.pages.family_checks import CHECKS, Check, families_of
from lab.pages.models_page import CONVERTED, PAGE, page
from tests.families import FAMILIES
from tests.families.llada import DENOISING

pytestmark = pytest.mark.slow  # imports the test modules that it reads


@pytest.fixture(scope="module")
def text() -> str:
    """The page, written once."""
    return page()


def test_the_page_is_what_the_code_says(text: str) -> None:
    assert PAGE.read_text() == text, "python -m lab.pages.models_page --write docs/models.md"


def test_every_file_and_every_family_has_a_row(text: str) -> None:
    files = {path.stem for path in (CONF / "model").glob("*.yaml")}
    for file in files:
        assert f"\n| `{file}` | " in text
    for family in set(ADAPTERS.names()) - {GENERIC}:
        # One row of the families, one of the checks; one of a file that has the family's name.
        assert text.count(f"\n| `{family}` | `") == 2 + (family in files)


def test_every_family_is_compared_and_every_name_is_known() -> None:
    compared = [families_of(check.subjects()) for check in CHECKS]
    assert set().union(*compared) == set(ADAPTERS.names()) - {GENERIC}
    assert all(compared)
    autoregressive = {instance.spec.adapter for instance in FAMILIES.values()}
    assert compared[0] == autoregressive
    assert autoregressive.isdisjoint(instance.spec.adapter for instance in DENOISING.values())
    assert set(CONVERTED.values()) == set(FORMATS)


@pytest.mark.parametrize(
    ("test", "axis"),
    [
        ("tests/models/test_families.py::test_nothing", "name"),
        ("tests/models/test_families.py::test_ratio_zero_is_bit_identical", "family"),
    ],
)
def test_a_test_that_is_not_there_is_refused(test: str, axis: str) -> None:
    with pytest.raises(UserError, match=f"{test} has no parameter '{axis}'"):
        Check("something", test, axis).subjects()


def test_values_of_several_parameters_are_told_apart() -> None:
    @pytest.mark.parametrize(("size", "name"), [(1, "a"), pytest.param(2, "b", id="second")])
    @pytest.mark.parametrize("kind", ["c"])
    def example(size: int, name: str, kind: str) -> None:
        del size, name, kind

    from lab.pages.family_checks import _values

    assert _values(example, "name") == {"a", "b"}
    assert _values(example, "kind") == {"c"}
    assert _values(example, "other") is None
