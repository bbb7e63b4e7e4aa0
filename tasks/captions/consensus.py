"""CIDEr-D over captions (arXiv 1411.5726), by pycocoevalcap with its Penn Treebank tokenizer, which needs Java."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pycocoevalcap.cider.cider import Cider
from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer


def tokenized(captions: Iterable[str]) -> dict[str, str]:
    """Return captions as the metric reads them: lower case, without punctuation. Cost: one start of Java.

    Raises:
        FileNotFoundError: Java is not installed.
    """
    # One line each: the tokenizer splits at further line ends than \n.
    lines = {caption: " ".join(caption.split()) for caption in captions}
    numbered = {number: [{"caption": line}] for number, line in enumerate(lines.values()) if line}
    tokens = PTBTokenizer().tokenize(numbered) if numbered else {}
    return {
        caption: tokens[number][0] if number in tokens else ""
        for number, caption in enumerate(lines)
    }


def cider(samples: Sequence[Mapping[str, Any]], words: Mapping[str, str]) -> float:
    """Return the mean CIDEr-D of samples, with words weighted by the number of samples with them in their references.

    Args:
        samples: each with an `answer` and its `references`.
        words: the tokens of each caption.
    """
    answers = {place: [words[sample["answer"]]] for place, sample in enumerate(samples)}
    references = {
        place: [words[text] for text in sample["references"]]
        for place, sample in enumerate(samples)
    }
    return float(Cider().compute_score(references, answers)[0])
