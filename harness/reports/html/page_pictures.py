"""Pictures of decoders, caches and denoised answers: of the rows at hand, or else those of docs/."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from espalier.harness.errors import UserError
from espalier.harness.paths import ROOT
from espalier.harness.reports.curves.cache_report import write_cache
from espalier.harness.reports.curves.decoder_report import write_decoders
from espalier.harness.reports.curves.diffusion_report import write_diffusion
from espalier.harness.reports.html.page_rows import Gathered


@dataclass(frozen=True)
class Drawn:
    """Pictures of one kind: a row's block that tells of it, who draws them, their folder in docs/, what each shows."""

    title: str
    block: str
    write: Callable[[Path, Path], object]
    folder: str
    captions: dict[str, str]


PICTURES = (
    Drawn(
        "Speculative decoding",
        "speculative",
        write_decoders,
        "lab/measured/speculative",
        {
            "decoders": "Speed-up of each decoder over plain decoding of the same answers.",
            "ratio": "By the share of visual tokens that the draft does without.",
            "guidance": "Drafted tokens accepted, by what chooses the draft's visual tokens.",
        },
    ),
    Drawn(
        "Cache compression",
        "cache",
        write_cache,
        "lab/measured/kv",
        {"curves": "Score by the share of visual cache entries kept."},
    ),
    Drawn(
        "Denoised answers",
        "diffusion",
        write_diffusion,
        "lab/measured/diffusion",
        {"merging": "Score by time, by FLOPs and by denoising steps."},
    ),
)


def pictures(found: Gathered, stores: Sequence[Path]) -> list[dict[str, Any]]:
    """Return titles, captions and pictures; what the rows at hand cannot draw comes from docs/, and says so."""
    shown = []
    for one in PICTURES:
        own = _own(one, found, stores)
        for stem, caption in one.captions.items():
            picture = own.get(stem) or (ROOT / one.folder / f"{stem}.svg").read_bytes()
            source = "from the rows of this report" if stem in own else f"from {one.folder}"
            shown.append(
                {
                    "title": one.title,
                    "caption": f"{caption} Drawn {source}.",
                    "source": _uri(picture),
                }
            )
    return shown


def _own(one: Drawn, found: Gathered, stores: Sequence[Path]) -> dict[str, bytes]:
    """Return the pictures that the first store with such rows gives."""
    if not any(row.row["extra"].get(one.block) for row in found.rows):
        return {}
    with TemporaryDirectory() as folder:
        for store in stores:
            try:
                one.write(store, Path(folder))
            except UserError as error:
                found.drop(f"no picture of {one.title.lower()}", f"{store}: {error}")
                continue
            return {path.stem: path.read_bytes() for path in Path(folder).glob("*.svg")}
    return {}


def _uri(picture: bytes) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(picture).decode()}"
