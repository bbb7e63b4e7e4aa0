"""Names of metrics and methods in print: in words, and escaped for LaTeX."""

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
