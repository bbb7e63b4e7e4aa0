"""Render pages of PDF files as pictures, with a program or package of this machine."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from espalier.harness.errors import UserError
from espalier.harness.media.images import open_image

#: Poppler's command, and a Python package.
RENDERERS = ("pdftoppm", "pypdfium2")
SECONDS = 120


def renderer() -> str | None:
    """Return the first of `RENDERERS` on this machine; None without any."""
    if shutil.which("pdftoppm"):
        return "pdftoppm"
    return "pypdfium2" if importlib.util.find_spec("pypdfium2") else None


def page_image(path: Path, page: int, longest: int) -> Image.Image:
    """Render a page (counted from 1) so that its longer side has `longest` pixels, as RGB.

    Raises:
        UserError: no renderer on this machine, or the file is missing or damaged.
    """
    backend = renderer()
    if backend is None:
        raise UserError(
            f"{str(path)!r} cannot be rendered; valid: a machine with {' or '.join(RENDERERS)}"
        )
    if not path.is_file():
        raise UserError(f"{str(path)!r} does not exist; valid: a PDF file")
    draw: dict[str, Callable[[Path, int, int], Image.Image]] = {
        "pdftoppm": _by_poppler,
        "pypdfium2": _by_pdfium,
    }
    return draw[backend](path, page, longest)


def _by_poppler(path: Path, page: int, longest: int) -> Image.Image:
    numbers = ["-f", str(page), "-l", str(page), "-singlefile", "-scale-to", str(longest)]
    try:
        done = subprocess.run(
            ["pdftoppm", "-png", *numbers, str(path)], capture_output=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"{str(path)!r}: page {page} takes longer than {SECONDS} s to render"
        ) from error
    if done.returncode or not done.stdout:
        message = next(iter(done.stderr.decode(errors="replace").splitlines()), "no such page")
        raise UserError(f"{str(path)!r}: page {page} cannot be rendered: {message}")
    return open_image(done.stdout)


def _by_pdfium(path: Path, page: int, longest: int) -> Image.Image:
    # Not a dependency of Espalier.
    pdfium = importlib.import_module("pypdfium2")
    try:
        with pdfium.PdfDocument(path) as document:
            sheet = document[page - 1]
            scale = longest / max(sheet.get_size())
            return open_image(sheet.render(scale=scale).to_pil())
    except (pdfium.PdfiumError, IndexError) as error:
        raise UserError(f"{str(path)!r}: page {page} cannot be rendered: {error}") from error
