"""README's lists: methods by kind, families of models, counts of models and benchmarks; the rest stays as it is."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from textwrap import fill

from espalier.harness.config.group_table import CONTROLS
from espalier.harness.paths import ROOT
from espalier.harness.runs.interface import choice_frames
from espalier.harness.specs.commands import command
from lab.pages.page_writer import print_or_write

#: Headings of the lists of methods, by kind.
KINDS = {
    "reducer": "token reducers",
    "compressor": "cache compressors",
    "decoder": "speculative decoders",
    "denoiser": "denoisers for diffusion language models",
    "control": "controls to compare them with",
}

LISTS = re.compile(r"- \*\*\d+ token reducers\*\*.*?(?=\n\nEverything else)", re.DOTALL)

WIDTH = 125


def page() -> str:
    """Return README with its lists as the code has them."""
    lines = (
        fill(line, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for line in lists()
    )
    text = "\n".join(lines)
    return LISTS.sub(lambda _: text, (ROOT / "README.md").read_text(encoding="utf-8"))


def lists() -> Iterator[str]:
    """Yield each list as one line."""
    methods = choice_frames.methods().kind
    kinds = methods.where(~methods.index.isin(CONTROLS), "control")
    for kind, title in KINDS.items():
        names = kinds.index[kinds == kind]
        yield f"- **{len(names)} {title}**: {_names(names)}"
    models, benchmarks = choice_frames.models(), choice_frames.benchmarks().index
    families = set(models.family)
    yield (
        f"- **{len(models)} models** of {len(families)} families: {_names(families)}. Of these, "
        f"{sum(models.index.str.startswith('seedling'))} are [embedded](harness/seedling/README.md), and the diffusion "
        "language models are LaViDa, LLaDA-V and DiffusionGemma."
    )
    embedded = sum(benchmarks.str.startswith("seedling"))
    published = len(benchmarks.drop(["data", "latency"])) - embedded
    yield (
        f"- **{len(benchmarks)} benchmarks**: {embedded} of embedded scenes and clips, which need no download, "
        f"{published} of papers, your own data (`data`), `latency`, and any other task of lmms-eval "
        "(`benchmark=task:<name>`)."
    )


def _names(names: Sequence[str] | set[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Print README, or write it."""
    return print_or_write(page, "lab.pages.readme_page", __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
