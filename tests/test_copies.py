"""Folders given as data sets: only plain files of one data set are read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from espalier.harness.errors import UserError
from espalier.harness.store.files.dataset_copies import Copies, revision
from espalier.harness.store.files.digests import Digests
from tests.refused import refused


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "data"
    data.mkdir()
    (data / "test.jsonl").write_text("{}\n", encoding="utf-8")
    return data


def test_a_folder_without_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match="holds no file of a data set"):
        Copies(tmp_path).check()


def test_links_in_circles_end(folder: Path) -> None:
    plain = revision(folder, Digests())
    for name in "abc":
        (folder / name).mkdir()
        for other in ("x", "y", "z"):
            (folder / name / other).symlink_to(folder)
    Copies(folder).check()
    assert revision(folder, Digests()) == plain


def test_a_folder_linked_twice_counts_twice(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.json").write_text("[]", encoding="utf-8")
    digests = {revision(folder, Digests())}
    for name in "ab":
        (folder / name).symlink_to(other)
        digests.add(revision(folder, Digests()))
    assert len(digests) == 3


def test_pipes_are_passed_over_unless_they_stand_for_data(folder: Path) -> None:
    plain = revision(folder, Digests())
    os.mkfifo(folder / "pipe")
    assert revision(folder, Digests()) == plain
    os.mkfifo(folder / "train.parquet")
    assert "not a plain file" in refused(revision, folder, Digests())


def test_a_link_to_nothing_is_told(folder: Path) -> None:
    (folder / "train.parquet").symlink_to(folder / "nosuch")
    assert "cannot be read: No such file" in refused(revision, folder, Digests())
