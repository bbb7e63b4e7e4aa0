"""What is printed: templates of pages and tables, and names of metrics and methods, in words and for LaTeX."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

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
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        "\\": r"\textbackslash{}",
    }
)


def escape_latex(text: str) -> str:
    """Return text with the special characters of LaTeX escaped."""
    return text.translate(TEX)


#: Display names of metrics; all others replace underscores with spaces.
METRICS = {
    "acc_at_50": "boxes right (IoU of at least 0.5)",
    "anls": "ANLS",
    "gpt_eval_score": "accuracy",
    "m_avg": "mean accuracy",
    "mathvision_standard_eval": "accuracy",
    "mme_total": "MME score",
    "mmmu_acc": "accuracy",
    "object_recall": "objects named",
    "one_minus_ned": "text read right (1 - edit distance)",
    "pope_f1_mean": "mean F1",
    "relaxed_overall": "relaxed accuracy",
    "rouge_l": "ROUGE-L",
}


def readable(metric: str) -> str:
    """Return a metric's display name."""
    return METRICS.get(metric, metric.replace("_", " "))


def markdown_table(heads: Sequence[str], lines: Iterable[Sequence[str]], align: str = "lr") -> str:
    """Return a table with a heading for each column; `align` has l or r for each, the last one for all further."""
    sides = align.ljust(len(heads), align[-1])
    rule = ["---:" if side == "r" else "---" for side in sides[: len(heads)]]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (heads, rule, *lines))


#: Templates of templates/; HTML escapes values, Markdown and LaTeX do not.
TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=select_autoescape(("html",)),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
TEMPLATES.filters |= {"tex": escape_latex}


def render(template: str, **values: object) -> str:
    """Return a template with its values."""
    return TEMPLATES.get_template(template).render(values)
