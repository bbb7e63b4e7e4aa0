"""CIDEr-D over captions (arXiv 1411.5726), by pycocoevalcap with its Penn Treebank tokenizer, which needs Java."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pycocoevalcap.cider.cider import Cider
from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer


def tokenized(captions: Iterable[str]) -> dict[str, str]:
    """Return captions as the metric sees them: lower case, without punctuation. Cost: one start of Java.

    Raises:
        FileNotFoundError: there is no Java.
    """
    # One line each: other ends of a line than \n would make two of one caption.
    lines = {caption: " ".join(caption.split()) for caption in captions}
    asked = {number: [{"caption": line}] for number, line in enumerate(lines.values()) if line}
    found = PTBTokenizer().tokenize(asked) if asked else {}
    return {
        caption: found[number][0] if number in found else "" for number, caption in enumerate(lines)
    }


def cider(samples: Sequence[Mapping[str, Any]], words: Mapping[str, str]) -> float:
    """Return the mean of the samples' CIDEr-D, words weighted by how many samples' references have them.

    Args:
        samples: each with an `answer` and its `references`.
        words: of every caption among these, its tokens.
    """
    answers = {place: [words[one["answer"]]] for place, one in enumerate(samples)}
    references = {
        place: [words[text] for text in one["references"]] for place, one in enumerate(samples)
    }
    return float(Cider().compute_score(references, answers)[0])
