"""Requirements of the package and of its extras, read from requirements.txt, the one list of them."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

#: `# [run] what for`: the lines after it are the requirements of the extra `run`.
PART = re.compile(r"# \[(\w+)\]")


def parts(text: str) -> dict[str, list[str]]:
    """Return the requirements of each part."""
    listed: dict[str, list[str]] = {}
    part: list[str] = []
    for line in text.splitlines():
        if heading := PART.match(line):
            part = listed[heading[1]] = []
        elif line and not line.startswith("#"):
            part.append(line)
    return listed


extras = parts(Path(__file__).with_name("requirements.txt").read_text(encoding="utf-8"))
base = extras.pop("base")
for name in ("slurm", "dask", "wandb"):
    extras[name] = ["espalier-vlm[run]", *extras[name]]
extras["dev"] = ["espalier-vlm[slurm,dask,wandb]", *extras["dev"]]
# Developers need no Jupyter: the tests run the cells without it, and `make notebooks` installs it.
extras["notebooks"] = ["espalier-vlm[run]", "jupyterlab>=4.2", "ipywidgets>=8"]
# Gradio 6.31 refuses the Pillow of constraints.txt: `make test-explore` tests it in an environment of its own.
extras["explore"] = ["espalier-vlm[run]", "gradio>=6.29,<7"]

# 240 MB: `make test-ray` tests it in an environment of its own.
extras["ray"] = ["espalier-vlm[run]", "ray>=2.50,<3"]

setup(install_requires=base, extras_require=extras)
