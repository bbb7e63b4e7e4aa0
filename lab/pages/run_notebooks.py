"""Run notebooks from top to bottom without Jupyter: `python -m lab.pages.run_notebooks notebooks/*.ipynb`.

Cells are plain Python. Each notebook runs with a fresh `__main__`, its own folder as the working
directory and discarded figures, or with `--figures <folder>` PNG files.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib

from espalier.harness.errors import UserError
from espalier.harness.specs.commands import command


def cells(path: Path) -> list[str]:
    """Return the code of a notebook, cell by cell.

    Raises:
        UserError: the file is not a notebook of version 4.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        kinds = [(cell["cell_type"], "".join(cell["source"])) for cell in found["cells"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is no notebook ({error}); valid: an .ipynb of version 4"
        ) from error
    return [source for kind, source in kinds if kind == "code"]


def execute(path: Path, figures: Path | None = None) -> dict[str, object]:
    """Run all cells and return the resulting names; errors of cells are raised unchanged.

    Args:
        path: path of the notebook.
        figures: folder for its figures; None discards them.
    """
    matplotlib.use("Agg")
    # The backend must be set first.
    import matplotlib.pyplot as plt

    before = Path.cwd()
    names: dict[str, object] = {"__name__": "__main__"}
    os.chdir(path.parent)
    try:
        for place, source in enumerate(cells(path)):
            exec(compile(source, f"{path.name}, code cell {place + 1}", "exec"), names)
        for number in plt.get_fignums():
            if figures is not None:
                figures.mkdir(parents=True, exist_ok=True)
                plt.figure(number).savefig(figures / f"{path.stem}_{number}.png", dpi=120)
    finally:
        plt.close("all")
        os.chdir(before)
    return names


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run notebooks; exit code 2 and one line if a file is not a notebook."""
    parser = argparse.ArgumentParser(prog="python -m lab.pages.run_notebooks", description=__doc__)
    parser.add_argument("notebooks", type=Path, nargs="+")
    parser.add_argument("--figures", type=Path, help="folder for figures as PNG")
    options = parser.parse_args(argv)
    for path in options.notebooks:
        execute(path.resolve(), options.figures and options.figures.resolve())
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
