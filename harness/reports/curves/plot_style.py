"""The style of all figures: colours, greys, dashes, markers and sizes; it imports no matplotlib."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from espalier.harness.errors import FOREIGN

#: Errors of drawing names and numbers of rows.
UNDRAWABLE: tuple[type[Exception], ...] = (*FOREIGN, RuntimeError)


#: Okabe and Ito's colour-blind safe palette, without its yellow (too light for lines).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
#: Greys for controls; dashes and markers also distinguish them.
GREYS = ("#4D4D4D", "#7A7A7A", "#A0A0A0")
#: Dash patterns for matplotlib and SVG: lengths drawn and skipped, in line widths.
DASHES = ((), (5.0, 2.0), (1.2, 1.6), (6.0, 1.6, 1.2, 1.6))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
INK = "#222222"
NOTE = "#666666"
GRID = "#E6E6E6"

#: Dots per inch of a PNG.
RESOLUTION = 150

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.edgecolor": "#999999",
    "axes.labelcolor": INK,
    "axes.labelsize": 9,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    # A fixed salt: equal data gives equal bytes.
    "svg.hashsalt": "curves",
    "svg.fonttype": "none",
}


def looks(names: Iterable[tuple[str, bool]]) -> dict[str, dict[str, Any]]:
    """Give each name its own colour, dashes and marker; controls are grey and never solid.

    Args:
        names: (name, whether it is a control) pairs, in any order.
    """
    looks_by_name: dict[str, dict[str, Any]] = {}
    counts = {True: 0, False: 0}
    for position, (name, control) in enumerate(
        sorted(set(names), key=lambda pair: (pair[1], pair[0]))
    ):
        palette = GREYS if control else COLOURS
        round_number, slot = divmod(counts[control], len(palette))
        counts[control] += 1
        dash = (
            1 + (slot + round_number) % (len(DASHES) - 1) if control else round_number % len(DASHES)
        )
        looks_by_name[name] = {
            "color": palette[slot],
            "dashes": DASHES[dash],
            "marker": MARKERS[position % len(MARKERS)],
            "control": control,
        }
    return looks_by_name


def line_look(look: dict[str, Any]) -> dict[str, Any]:
    """Return a look as matplotlib line options; control markers are hollow."""
    control, colour = look["control"], look["color"]
    dashes: Any = (0, look["dashes"]) if look["dashes"] else "-"
    return {
        "color": colour,
        "linestyle": dashes,
        "linewidth": 1.3 if control else 1.6,
        "marker": look["marker"],
        "markersize": 4.8,
        "markerfacecolor": "white" if control else colour,
        "markeredgecolor": colour if control else "white",
        "markeredgewidth": 1.0 if control else 0.6,
        "zorder": 2 if control else 3,
    }
