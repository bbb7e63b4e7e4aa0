"""Figures of decoders, caches and denoised answers: from the given results, or else those of the repository."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from tempfile import TemporaryDirectory
from typing import Any

from espalier.harness.errors import UserError
from espalier.harness.paths import ROOT
from espalier.harness.reports.html.page_rows import PageResults


@dataclass(frozen=True)
class PictureSource:
    """Figures of one kind: title, the row block of its results, report, folder in the repository, and captions.

    The report has a name only, because it needs torch, which takes seconds to import.
    """

    title: str
    block: str
    report: str
    folder: str
    captions: dict[str, str]


PICTURES = (
    PictureSource(
        "Speculative decoding",
        "speculative",
        "decoder_report:REPORT",
        "lab/measured/speculative",
        {
            "decoders": "Speed-up of each decoder over plain decoding of the same answers.",
            "ratio": "By the share of visual tokens that the draft does without.",
            "guidance": "Drafted tokens accepted, by what chooses the draft's visual tokens.",
        },
    ),
    PictureSource(
        "Cache compression",
        "cache",
        "cache_report:REPORT",
        "lab/measured/kv",
        {"curves": "Score by the share of visual cache entries kept."},
    ),
    PictureSource(
        "Denoised answers",
        "diffusion",
        "diffusion_report:REPORT",
        "lab/measured/diffusion",
        {"merging": "Score by denoising steps and share kept, with the FLOPs of an answer."},
    ),
)


def pictures(results: PageResults, stores: Sequence[Path]) -> list[dict[str, Any]]:
    """Return titles, captions and figures; one that the results cannot provide is the repository's, if this is it."""
    entries = []
    for kind in PICTURES:
        drawn = _draw(kind, results, stores)
        for stem, caption in kind.captions.items():
            measured = ROOT / kind.folder / f"{stem}.svg"
            if stem not in drawn and not measured.is_file():
                continue
            picture = drawn.get(stem) or measured.read_bytes()
            origin = "from the rows of this report" if stem in drawn else f"from {kind.folder}"
            entries.append(
                {
                    "title": kind.title,
                    "caption": f"{caption} Drawn {origin}.",
                    "source": _uri(picture),
                }
            )
    return entries


def _draw(source: PictureSource, results: PageResults, stores: Sequence[Path]) -> dict[str, bytes]:
    """Return the figures of the first store with results of the kind."""
    if not any(result.row["extra"].get(source.block) for result in results.rows):
        return {}
    report = resolve_name(f"espalier.harness.reports.curves.{source.report}")
    with TemporaryDirectory() as folder:
        for store in stores:
            try:
                report.write(store, Path(folder))
            except UserError as error:
                results.drop(f"no picture of {source.title.lower()}", f"{store}: {error}")
                continue
            return {path.stem: path.read_bytes() for path in Path(folder).glob("*.svg")}
    return {}


def _uri(picture: bytes) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(picture).decode()}"
