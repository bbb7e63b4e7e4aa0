"""`pip install -e .`: it needs requirements.txt without its development part, and works from elsewhere."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("espalier", "harness", "methods", "tasks", "conf")
FILES = ("pyproject.toml", "setup.py", "requirements.txt", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> tuple[Path, Path]:
    """A copy of the checkout, and the folder that it is installed into."""
    place = tmp_path_factory.mktemp("install")
    checkout, target = place / "checkout", place / "site"
    for name in PARTS:
        shutil.copytree(
            ROOT / name,
            checkout / name,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    for name in FILES:
        shutil.copy(ROOT / name, checkout / name)
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    done = subprocess.run(
        [*install, "--disable-pip-version-check", "--target", target, "--editable", checkout],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return checkout, target


@pytest.mark.slow
def test_it_works_from_another_folder_in_a_fresh_process(installed, tmp_path):
    checkout, target = installed
    code = (
        f"import json, site; site.addsitedir({str(target)!r})\n"
        "import espalier, espalier.harness.paths\n"
        "model = espalier.load('seedling', device='cpu')\n"
        "from PIL import Image\n"
        "with espalier.apply(model, 'divprune', ratio=0.75) as pruned:\n"
        "    answer = pruned.ask(Image.new('RGB', (96, 96)), 'is there a star ?', max_new_tokens=2)\n"
        "print(json.dumps([answer.kept, espalier.__file__, str(espalier.harness.paths.ROOT)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [
        36,
        str(checkout / "espalier" / "__init__.py"),
        str(checkout),
    ]


def test_development_is_an_extra(installed):
    _, target = installed
    (metadata,) = target.glob("espalier-*.dist-info/METADATA")
    needs = message_from_string(metadata.read_text()).get_all("Requires-Dist")
    run = {one.partition(";")[0].strip() for one in needs if "extra" not in one}
    develop = {one.partition(";")[0].strip() for one in needs if "dev" in one.partition(";")[2]}

    def names(those: set[str]) -> set[str]:
        return {one.replace("=", "<").replace(">", "<").partition("<")[0] for one in those}

    listed = (ROOT / "requirements.txt").read_text().splitlines()
    assert len(run) + len(develop) == sum(
        bool(line) and not line.startswith("#") for line in listed
    )
    assert {"torch", "transformers", "hydra-core", "lmms-eval"} <= names(run)
    assert {"pytest", "ruff", "mypy", "pre-commit"} <= names(develop)
    assert not names(run) & names(develop)
