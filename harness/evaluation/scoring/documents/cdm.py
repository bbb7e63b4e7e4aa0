"""Compare formulas as rendered (CDM), with lmms-eval's copy of the released code, if its tools are installed."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from espalier.harness.errors import UserError
from espalier.harness.evaluation.scoring.documents.omnidoc_page import PageFormula

#: Programs that draw the formulas: TeX with Chinese fonts, ImageMagick and Node.js.
PROGRAMS = ("xelatex", "magick", "node")
PACKAGES = ("skimage",)
MODULE = "lmms_eval.tasks.mdpbench.cdm_metric"

#: A formula that a working installation finds equal to itself.
KNOWN = PageFormula("\\[a^{2}+b^{2}=c^{2}\\]", "\\[a^{2}+b^{2}=c^{2}\\]")


def missing() -> list[str]:
    """Return the programs and packages that are missing."""
    return [name for name in PROGRAMS if shutil.which(name) is None] + [
        name for name in PACKAGES if importlib.util.find_spec(name) is None
    ]


def check(key: str) -> None:
    """Raise UserError unless formulas can be compared here.

    The code gives 0 to a formula that it cannot draw, so it must find a formula equal to itself.
    """
    absent = missing()
    if absent:
        raise UserError(
            f"{key}: formula_cdm needs {', '.join(absent)}, which this machine does not have; "
            "valid: a machine with TeX (xelatex, xeCJK and its fonts), ImageMagick, Node.js and scikit-image, or "
            "benchmark=omnidocbench, which compares formulas by edit distance"
        )
    if scores([KNOWN]) != [1.0]:
        raise UserError(
            f"{key}: formula_cdm finds a formula unequal to itself; valid: xelatex, magick and node that draw formulas"
        )


def scores(formulas: Sequence[PageFormula]) -> list[float]:
    """Return the CDM of each formula: 1 is equal, a formula missing in the answer has 0.

    Cost: a TeX run or two each, about a second.
    """
    # Imported here: it needs optional packages.
    module: Any = importlib.import_module(MODULE)
    with TemporaryDirectory(prefix="cdm-") as place:
        judge = module.CDM(output_root=str(Path(place)))
        return [
            float(judge.evaluate(reference, answer, str(number))["F1_score"])
            if (reference := _bare(formula.reference)) and (answer := _bare(formula.answer))
            else 0.0
            for number, formula in enumerate(formulas)
        ]


def _bare(latex: str) -> str:
    latex = latex.strip().strip("$").strip()
    inside = latex.startswith("\\[") and latex.endswith("\\]") and latex.count("\\[") == 1
    return latex[2:-2].strip() if inside else latex
