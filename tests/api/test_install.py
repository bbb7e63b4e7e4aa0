"""The package as it is installed: its requirements, a wheel outside the repository, and `pip install -e .`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from distutils.core import run_setup
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

import espalier
from espalier.harness.paths import ROOT
from espalier.harness.runs.run_key import key_parts, run_key
from espalier.harness.specs.catalogue import build_method
from espalier.harness.store.files.digests import Digests
from espalier.serve.plugin import TESTED
from tests import commands

#: What the package is made from, and a run that needs neither network nor GPU.
FOLDERS = (
    *("espalier", "harness", "methods", "serve", "tasks", "conf"),
    *("results/papers", "results/demo", "results/demo_speculative"),
)
FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "requirements.txt", "README.md", "LICENSE")
OFFLINE = ("--no-deps", "--no-index")
RUN = ("method=fastv", "ratio=0.9", "limit=20")

#: A Python that has torch and numpy, and no package of an extra.
BASE_ALONE = """
import sys
from importlib.metadata import packages_distributions
from packaging.utils import canonicalize_name

extras = {canonicalize_name(name) for name in EXTRAS}
hidden = {
    module
    for module, packages in packages_distributions().items()
    if extras & {canonicalize_name(name) for name in packages}
}
assert {"transformers", "hydra", "omegaconf", "wandb", "submitit"} <= hidden

# An import of one of these fails as if it were not there.
sys.modules.update(dict.fromkeys(hidden))
"""


def requirements() -> dict[str, list[str]]:
    """Return the names of the requirements of the package (``) and of its extras."""
    former = Path.cwd()
    os.chdir(ROOT)
    try:
        package = run_setup("setup.py", stop_after="init")
        package.parse_config_files()
    finally:
        os.chdir(former)
    lists = {"": package.install_requires, **package.extras_require}
    return {extra: [Requirement(line).name for line in lines] for extra, lines in lists.items()}


def run(
    *command: str | Path, cwd: Path | None = None, env: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Run Python with arguments; it must end well."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=env,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_requirements_are_those_of_requirements_txt_by_extra() -> None:
    lists = requirements()
    assert lists[""] == ["torch", "numpy"]
    assert {"transformers", "hydra-core", "lmms-eval"} <= {*lists["run"]}
    assert lists["slurm"] == ["espalier-vlm", "submitit"]
    assert lists["wandb"] == ["espalier-vlm", "wandb"]
    assert lists["dask"] == ["espalier-vlm", "distributed"]
    assert lists["ray"] == ["espalier-vlm", "ray"]
    assert {"pytest", "ruff", "mypy"} <= {*lists["dev"]}
    assert lists["explore"] == ["espalier-vlm", "gradio"]
    listed = (ROOT / "requirements.txt").read_text().splitlines()
    installed = [Requirement(line).name for line in listed if line and not line.startswith("#")]
    beside = ("notebooks", "explore", "ray")
    by_extra = [name for extra, names in lists.items() if extra not in beside for name in names]
    assert sorted(installed) == sorted(name for name in by_extra if name != "espalier-vlm")


@pytest.mark.slow
def test_the_base_alone_imports_all_methods_and_names_the_extra_of_what_is_absent(
    tmp_path: Path,
) -> None:
    lists = requirements()
    extras = [name for extra in ("run", "slurm", "wandb") for name in lists[extra]]
    script = BASE_ALONE.replace("EXTRAS", repr([name for name in extras if name != "espalier-vlm"]))
    script += """
from importlib import import_module
from pathlib import Path
import espalier
import espalier.methods
names = [path.stem for path in Path(espalier.methods.__file__).parent.glob("*.py")]
methods = [import_module(f"espalier.methods.{name}") for name in names]
from espalier.harness.specs.catalogue import METHODS, build_method
built = [build_method(name, {}) for name in METHODS.names()]
print(len(methods), len(built))
try:
    espalier.load
except espalier.UserError as error:
    print(error)
from espalier.__main__ import main
for line in (["run", "method=fastv"], ["store", "ls"], ["tables", "d2pruner"], ["doctor"]):
    assert main(line) == 2, line
"""
    done = run("-c", script, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    counts, line = done.stdout.splitlines()
    assert all(int(count) > 20 for count in counts.split())
    lines = [line, *(line.removeprefix("error: ") for line in done.stderr.splitlines())]
    assert len(lines) == 5
    for line in lines:
        expected = r"the package \w+ is not installed; valid: pip install 'espalier-vlm\[run\]'"
        assert re.fullmatch(expected, line), line


def test_an_import_that_fails_in_a_users_module_is_not_a_missing_extra(tmp_path: Path) -> None:
    from espalier.harness.errors import missing_extra

    (tmp_path / "mine.py").write_text("import nothing_of_that_name\n")
    code = compile((tmp_path / "mine.py").read_text(), "mine.py", "exec")
    with pytest.raises(ModuleNotFoundError) as caught:
        exec(code, {"__name__": "mine"})
    assert missing_extra(caught.value) is None
    with pytest.raises(ModuleNotFoundError) as caught:
        exec(code, {"__name__": "espalier.harness.mine"})
    assert "pip install 'espalier-vlm[run]'" in str(missing_extra(caught.value))


def copied(place: Path) -> Path:
    """Return a copy of what the package is made from."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, place / name, symlinks=True, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, place / name)
    return place


def pip(*arguments: str | Path) -> None:
    run("-m", "pip", "--quiet", "--disable-pip-version-check", *arguments)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wheel")
    source = copied(place / "source")
    pip("wheel", source, *OFFLINE, "--no-build-isolation", "--wheel-dir", place)
    shutil.rmtree(source)
    (file,) = place.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def site(wheel: Path) -> Path:
    """A folder with the installed wheel."""
    pip("install", wheel, *OFFLINE, "--target", wheel.parent / "site")
    return wheel.parent / "site"


class Installed:
    """The commands of an installed wheel, in a folder outside the repository."""

    def __init__(self, site: Path, folder: Path) -> None:
        self.site, self.folder = site, folder

    def run(self, *words: str | Path) -> str:
        """Return the standard output of Python."""
        return run(*words, cwd=self.folder, env=self.variables).stdout

    @property
    def variables(self) -> dict[str, str]:
        """Those of Python, which finds the wheel, and few of this process."""
        kept = ("PATH", "HOME", "OMP_NUM_THREADS")
        variables = {name: os.environ[name] for name in kept if name in os.environ}
        return {**variables, "PYTHONPATH": str(self.site)}

    def espalier(self, *words: str) -> str:
        """Return the standard output of the console script."""
        return self.run(self.site / "bin" / "espalier", *words)


@pytest.fixture
def installed(site: Path, tmp_path: Path) -> Installed:
    return Installed(site, tmp_path)


def printed_installs() -> set[str]:
    """Return what every `pip install` of pages, notebooks, messages and images asks for, if it is this package."""
    places = ("docs", "notebooks", "harness", "serve", "lab", "tasks", "README.md", "Dockerfile")
    files = [file for place in places for file in (ROOT / place, *(ROOT / place).rglob("*"))]
    texts = (
        file.read_text(encoding="utf-8")
        for file in files
        if file.suffix in ("", ".md", ".py", ".ipynb", ".sh") and file.is_file()
    )
    lines = (line for text in texts for line in re.findall(r"pip install (.*)", text))
    words = (word.strip("'\"`,;:)\\") for line in lines for word in line.split())
    return {word for word in words if re.match(r"espalier(?![\w/.])", word.replace("-vlm", ""))}


def test_each_printed_pip_install_names_this_distribution() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {Requirement(word.replace("{extra}", "run")).name for word in printed_installs()}
    assert names == {project["name"]}


def test_each_printed_image_is_a_stage_and_that_of_vllm_has_a_tested_version() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    bases = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE))
    stages = ["${" + name + "}" for name in bases]
    for origin, stage in re.findall(r"^FROM (\S+) AS (\w+)$", text, re.MULTILINE):
        assert origin in stages
        stages.append(stage)
    assert {*re.findall(r"--from=(\w+)", text)} <= {*stages}
    for form in re.findall(r"^(?:ENTRYPOINT|CMD) (.*)$", text, re.MULTILINE):
        assert all(isinstance(word, str) for word in json.loads(form))
    pages = text + (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert {*re.findall(r"--target (\w+)", pages)} == {"cpu", "cuda", "serve"} & {*stages}
    assert bases["VLLM"].rpartition(":v")[2] in TESTED


@pytest.mark.slow
def test_each_printed_pip_install_finds_the_wheel_of_this_checkout(wheel: Path) -> None:
    installs = printed_installs()
    assert {"espalier-vlm", "espalier-vlm[run]", "espalier-vlm[run,slurm]"} <= installs
    with ZipFile(wheel) as file:
        (record,) = (name for name in file.namelist() if name.endswith("/METADATA"))
        extras = re.findall(r"^Provides-Extra: (.*)$", file.read(record).decode(), re.MULTILINE)
    for install in installs:
        wanted = install.replace("{extra}", "run")
        pip("install", wanted, "--dry-run", "--ignore-installed", *OFFLINE, f"-f{wheel.parent}")
        assert Requirement(wanted).extras <= {*extras}, install


@pytest.mark.slow
def test_a_wheel_holds_one_name_and_every_file_of_the_package(site: Path) -> None:
    assert {path.name for path in site.iterdir()} == {
        "bin",
        "espalier",
        f"espalier_vlm-{espalier.__version__}.dist-info",
    }
    for folder in FOLDERS:
        place = site / "espalier" / ("" if folder == "espalier" else Path(folder).name)
        names = {
            path.relative_to(ROOT / folder)
            for path in (ROOT / folder).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        assert all((place / name).is_file() for name in names), folder
    assert not any(path.is_symlink() for path in site.rglob("*"))


@pytest.mark.exhaustive
def test_a_wheel_of_the_source_archive_has_the_same_files(site: Path, tmp_path: Path) -> None:
    source = copied(tmp_path / "source")
    run("-c", "from setuptools.build_meta import build_sdist; build_sdist('..')", cwd=source)
    shutil.rmtree(source)
    (archive,) = tmp_path.glob("*.tar.gz")
    pip("wheel", archive, *OFFLINE, "--no-build-isolation", "--wheel-dir", tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    with ZipFile(wheel) as file:
        names = {name for name in file.namelist() if name.startswith("espalier/")}
    installed_files = (path for path in (site / "espalier").rglob("*") if path.is_file())
    installed_names = {path.relative_to(site).as_posix() for path in installed_files}
    assert names == {name for name in installed_names if "__pycache__" not in name}


@pytest.mark.slow
def test_commands_run_outside_the_repository(installed: Installed) -> None:
    row = json.loads(installed.espalier("run", *RUN, "json=true").splitlines()[-1])
    assert (row["method"], row["n_samples"]) == ("fastv", 20)
    assert row["extra"]["environment"]["commit"] == f"espalier-{espalier.__version__}"
    assert (installed.folder / "results/runs" / row["run_key"] / "row.json").is_file()

    # The same files are the same run.
    spec = commands.spec_of(*RUN)
    method = build_method(spec.method.name, spec.method.params)
    assert run_key(key_parts(spec, method, Digests())) == row["run_key"]

    assert row["run_key"][:8] in installed.espalier("store", "ls")
    table = installed.espalier("tables", "d2pruner", "3", "--model", "seedling")
    assert "espalier run" in table
    assert "run.py" not in table
    assert "run  " in installed.espalier("--help")
    installed.espalier("report", "--no-overlays", "--store", "results", "--out", "page.html")
    assert (installed.folder / "page.html").is_file()


@pytest.mark.exhaustive
def test_a_wheel_finds_nothing_wrong_with_the_machine(installed: Installed) -> None:
    assert "0 failed" in installed.espalier("doctor")


@pytest.mark.exhaustive
def test_cells_run_as_jobs_from_a_wheel(installed: Installed) -> None:
    line = ("-m", "method=none,fastv", "limit=2", "cluster=joblib", "engine.paired=0")
    out = installed.espalier("run", *line, "json=true")
    assert [json.loads(text)["n_samples"] for text in out.splitlines() if text[:1] == "{"] == [2, 2]


@pytest.mark.slow
def test_python_works_from_a_wheel(installed: Installed) -> None:
    code = """
import json
import espalier
from PIL import Image
from transformers import AutoProcessor, LlavaForConditionalGeneration
from espalier.harness.seedling import weights_dir

picture = Image.new("RGB", (96, 96))
model = espalier.load("seedling", device="cpu")
with espalier.apply(model, "divprune", ratio=0.75) as pruned:
    answer = pruned.ask(picture, "is there a star ?", max_new_tokens=2)
hf_model = LlavaForConditionalGeneration.from_pretrained(weights_dir("seedling"))
hf_processor = AutoProcessor.from_pretrained(weights_dir("seedling"))
with espalier.apply(espalier.wrap(hf_model, hf_processor), "fastv", ratio=0.75) as pruned:
    wrapped = pruned.ask(picture, "is there a star ?", max_new_tokens=2)
rows = espalier.results.load(espalier.harness.paths.DEMO)
print(json.dumps([answer.kept, wrapped.kept, len(rows), espalier.__file__]))
"""
    kept, wrapped, n_rows, file = json.loads(installed.run("-c", code).splitlines()[-1])
    assert (kept, wrapped) == (36, 36)
    assert n_rows > 100
    assert file == str(installed.site / "espalier" / "__init__.py")


@pytest.mark.exhaustive
def test_an_editable_install_works_from_another_folder(tmp_path: Path) -> None:
    checkout, target = copied(tmp_path / "checkout"), tmp_path / "site"
    pip(
        *("install", "--no-deps", "--no-index", "--no-build-isolation", "--target", target),
        *("--editable", checkout),
    )
    code = f"""
import json, site
site.addsitedir({str(target)!r})
import espalier, espalier.harness.paths
model = espalier.load('seedling', device='cpu')
print(json.dumps([espalier.__file__, str(espalier.harness.paths.ROOT)]))
"""
    (tmp_path / "elsewhere").mkdir()
    assert json.loads(run("-c", code, cwd=tmp_path / "elsewhere").stdout.splitlines()[-1]) == [
        str(checkout / "espalier" / "__init__.py"),
        str(checkout),
    ]
