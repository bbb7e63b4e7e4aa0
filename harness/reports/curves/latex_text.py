"""Text for LaTeX."""

from __future__ import annotations

#: TeX commands for special characters.
TEX = str.maketrans(
    {
        **{character: f"\\{character}" for character in "%&$#_{}"},
        "†": r"\dag{}",
        "‡": r"\ddag{}",
        "≠": r"$\neq$",
        "²": r"\textsuperscript{2}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "\\": r"\textbackslash{}",
    }
)


def escape_latex(text: str) -> str:
    """Return text with the special characters of LaTeX escaped."""
    return text.translate(TEX)
