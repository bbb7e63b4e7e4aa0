"""README's lists and counts, and its commands, tried in a fresh shell: nothing set but what README says to set."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from PIL import Image

import espalier
from espalier.harness.paths import ROOT
from espalier.harness.tools.rehearsal.rehearse import read_cards
from lab.pages.readme_page import LISTS, page
from tests.api.test_docs import BLOCK
from tests.forks import Forks

README = (ROOT / "README.md").read_text()
WORDS = " ".join(README.split())
ACTIVATE = ". .venv/bin/activate"
#: The environment of these tests stands for the one that `make run` makes.
HERE = Path(sys.prefix) / "bin" / "activate"

#: Composes the command line of run.py that follows, and starts nothing.
COMPOSE = """
import sys
from espalier.harness.config.compose import read_command
command = read_command(sys.argv[1:], typed=True)
assert command.cells
"""

OWN_METHOD = """
from espalier.methods.uniform import Uniform


class MyMethod(Uniform):
    pass
"""


def commands(page: str = README) -> list[str]:
    """Return the lines of all bash blocks in order, without comments."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    lines = [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def shell(*lines: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run lines in a shell that knows nothing of this one, in the repository."""
    command = ["bash", "-c", "\n".join(["set -e", *lines])]
    return subprocess.run(
        command, cwd=ROOT, env=bare(home), capture_output=True, text=True, check=False
    )


def bare(home: Path) -> dict[str, str]:
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(home), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def activate() -> str:
    if not HERE.exists():
        pytest.skip("these tests do not run in a virtual environment")
    return f". {shlex.quote(str(HERE))}"


def composed(activate: str, arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Compose a command line of run.py; of a sweep with hundreds of cells what all of them share."""
    # tests/doctor/test_rehearsal.py rehearses runs.
    arguments, _, cards = arguments.partition(" --rehearse ")
    assert not cards or read_cards(cards.removeprefix("cards="))
    if "+experiment" in arguments:
        return shell(activate, f"python run.py {arguments} --cfg job", home=home)
    return shell(activate, f"python -c {shlex.quote(COMPOSE)} {arguments}", home=home)


def test_the_environment_is_activated_before_python_is_called() -> None:
    lines = commands()
    first = next(i for i, line in enumerate(lines) if line.startswith(("python", "torchrun")))
    assert lines.index(ACTIVATE) < first
    assert any(line.startswith("make run") for line in lines[: lines.index(ACTIVATE)])


def test_ci_calls_the_first_commands_as_they_stand_in_an_environment_of_the_clone() -> None:
    ci = (ROOT / ".ci" / "run").read_text().splitlines()
    first = commands()[: commands().index(ACTIVATE)]
    assert first == ["make run", "make test"]
    assert [line for line in ci if line in first] == first
    # Nothing moves the environment elsewhere.
    assert not any("VENV=" in line.replace("SERVE_VENV=", "") for line in ci)


@pytest.mark.sampled
@pytest.mark.parametrize("line", [line for line in commands() if " run.py" in line])
def test_command_lines_of_run_compose(line: str, activate: str, tmp_path: Path) -> None:
    before, _, arguments = line.partition(" run.py")
    assert before in ("python", "torchrun --nproc_per_node 4")
    (tmp_path / "mine.py").write_text(OWN_METHOD, encoding="utf-8")
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "my.csv").write_text("image,question,answer\na.png,what ?,this\n")
    for words, replacement in {
        "<hub id or folder>": "llava-hf/llava-1.5-7b-hf",
        "mine.py": f"{tmp_path}/mine.py",
        "my.csv": f"{tmp_path}/my.csv",
    }.items():
        arguments = arguments.replace(words, replacement)
    done = composed(activate, arguments, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.sampled
@pytest.mark.parametrize("line", [line for line in commands() if line.startswith("make")])
def test_targets_of_make_exist_and_call_what_is_there(
    line: str, activate: str, tmp_path: Path
) -> None:
    process = shell(f"{line} --dry-run", home=tmp_path)
    assert process.returncode == 0, process.stderr
    called = shlex.split(process.stdout.splitlines()[-1])
    assert called[0] == ".venv/bin/python"
    if called[1] == "run.py":
        done = composed(activate, shlex.join(called[2:]), tmp_path)
        assert done.returncode == 0, done.stderr
    else:
        assert shell(activate, f"python -m {called[2]} --help", home=tmp_path).returncode == 0


@pytest.mark.parametrize("line", [line for line in commands() if line.startswith("python -m")])
def test_commands_of_modules_are_there(line: str, activate: str, tmp_path: Path) -> None:
    module = line.split()[2]
    process = shell(activate, f"python -m {module} --help", home=tmp_path)
    assert process.returncode == 0, process.stderr
    assert process.stdout


def test_every_command_is_of_a_kind_that_is_tried() -> None:
    for line in commands():
        assert (
            line == ACTIVATE or line.startswith(("make", "python -m espalier")) or " run.py" in line
        )


def test_lists_and_counts_are_what_the_code_has() -> None:
    assert page() == README, "python -m lab.pages.readme_page --write README.md"
    assert len(LISTS.findall(README)) == 1


def test_packages_of_the_harness_are_counted() -> None:
    packages = [path for path in (ROOT / "harness").iterdir() if (path / "__init__.py").exists()]
    assert f"in {len(packages)} packages;" in WORDS


def test_the_citation_has_the_version_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == espalier.__version__
    assert f"title = {{{citation['title']}}}," in WORDS
    assert f"version = {{{espalier.__version__}}}," in WORDS


def test_make_lists_every_target_with_what_it_does(tmp_path: Path) -> None:
    lines = shell("make", home=tmp_path).stdout.splitlines()
    (declared,) = re.findall(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {line.split()[0] for line in lines} == set(declared.split())
    assert all(len(line.split()) > 1 for line in lines)


@pytest.mark.slow
def test_its_runs_end_and_their_results_are_shown(python: Forks, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN_METHOD, encoding="utf-8")
    Image.new("RGB", (96, 96)).save(tmp_path / "a.png")
    (tmp_path / "my.csv").write_text("image,question,answer\na.png,is there a star ?,no\n")
    few = f"limit=2 engine.paired=0 model.device=cpu store={tmp_path}/store json=true"
    keys: list[str] = []
    for line in commands():
        if " run.py" in line and not re.search("<hub|--rehearse|experiment", line):
            for name in ("mine.py", "my.csv", "out/a"):
                line = line.replace(name, f"{tmp_path}/{name}")
            printed = python.typed(f"{line} {few}", bare(tmp_path))
            keys += re.findall(r'"run_key": "(\w+)", "model": "seedling"', printed)
    page = (tmp_path / "out" / "a.md").read_text(encoding="utf-8")
    assert "Points above random dropping at the same layer" in page
    (show,) = [line for line in commands() if "store show" in line]
    show = show.replace("KEY", keys[1]).replace("OTHER", keys[2]).replace("broken", f"{tmp_path}/b")
    for line in (show, "python -m espalier store ls"):
        python.typed(f"{line} --store {tmp_path}/store", bare(tmp_path))


@pytest.mark.slow
def test_its_lines_of_python_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (96, 96)).save("picture.png")
    ((_, code),) = BLOCK.findall(README)
    names: dict[str, object] = {}
    exec(compile(code.replace("keep=64", "keep=64, limit=2"), "README.md", "exec"), names)


@pytest.mark.slow
def test_a_mistake_ends_as_printed(activate: str, tmp_path: Path) -> None:
    (mistake,) = re.findall(r"^\$ (python run\.py .*)\n(error: .*)$", README, flags=re.MULTILINE)
    wrong = shell(activate, mistake[0], home=tmp_path)
    assert (wrong.returncode, wrong.stderr.splitlines()) == (2, [mistake[1]])
