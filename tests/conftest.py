"""One thread for each worker, since several of them share the cores; and which families are left to CI."""

import os

import pytest

# Small models gain nothing from more. Read when torch is imported, here and in the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"

#: Families whose adapter, tower and media have another family in the everyday run; CI takes these too.
VARIANTS = (
    *("internvl_6b", "internvl_phi3", "internvl_qwen3", "onevision_video"),
    *("qwen2_vl_video", "qwen2_5_vl_video", "qwen3_vl_video"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of a variant as slow."""
    for item in items:
        names = getattr(item, "callspec", None)
        if names is not None and any(
            value in VARIANTS for value in map(str, names.params.values())
        ):
            item.add_marker(pytest.mark.slow)
