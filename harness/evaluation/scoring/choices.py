"""Strict readers of short answers: the option that an answer states, or yes or no.

An answer that states nothing clearly gives "", such as a hedge, two options, or a letter inside a word.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

#: Special tokens as tokenizers write them, such as <|im_end|>, </s>, <loc_16> and [PAD].
SPECIAL = re.compile(r"<[^<>\s]{1,40}>|\[/?[A-Z]{2,}\d*\]")

#: A text of this many words, or letters of its only word, is a loop if each occurs ten times on average.
LONG, OFTEN = 20, 10
#: So many equal words alone are a loop.
EQUAL = 4

#: The most words of a short answer: several times the longest reference of data sets that ask for a word or phrase.
MOST_WORDS = 30


def has_words(answer: str) -> bool:
    """Return whether an answer has a letter or a digit outside of special tokens."""
    return any(map(str.isalnum, SPECIAL.sub(" ", answer)))


def is_legible(answer: str) -> bool:
    """Return whether an answer has a letter or a digit outside of special tokens, and is no loop."""
    if not has_words(answer):
        return False
    words = SPECIAL.sub(" ", answer).casefold().split()
    units = words if len(words) > 1 else list(words[0])
    loops = len(units) >= LONG and OFTEN * len(set(units)) <= len(units)
    return not loops and not (len(words) >= EQUAL and len(set(words)) == 1)


def is_brief(answer: str) -> bool:
    """Return whether an answer is legible and has at most MOST_WORDS words."""
    return is_legible(answer) and len(answer.split()) <= MOST_WORDS


#: Values of a missing option in a table, besides NaN.
ABSENT = (None, "", "nan")

#: Brackets as round ones, quotation marks as plain ones.
PLAIN = str.maketrans("{}[]<>【】「」『』\u2018\u2019\u201c\u201d", "()()()()()()''\"\"")
#: Marks of Markdown and LaTeX without meaning here, and the tags of an answer.
MARKUP = re.compile(r"</?answer>|\\(?:boxed|text(?:bf|it)?|math(?:rm|bf|it)?)\b|[*_`$\"«»#]")
QUOTES = re.compile(r"(?<![A-Za-z])'|'(?![A-Za-z])")
ENDS = string.punctuation + string.whitespace + "。、·"

#: Characters that may not be next to an option's letter: letters of words, digits.
WORD = "A-Za-z0-9À-ɏ"
BEFORE, AFTER = rf"(?<![{WORD}'])", rf"(?!-?[{WORD}'])"
#: "A stem is drawn" starts with an article, "A is right" with an option.
NOUN = (
    r"(?!\s+(?!(?:is|it|was|because|since|as|and|or|but|would|seems|appears|matches|which|with|for)\b)"
    rf"[{WORD}])"
)

ANSWER = "answer|response|solution|réponse|respuesta|antwort|risposta|resposta|ответ|정답|답|答案|答え|正解"
OPTION = "option|choice|letter|one|옵션|选项|選項|选择|選擇"
CHOOSE = "选择|選擇|选|選|应选"
LINK = (
    r"is|are|be|was|would|should|must|will|most|likely|clearly|definitely|therefore|thus|to|for|this|question|the|"
    r"est|es|ist|è|é|是|为|為|应该|应|應該|应当|选项|选|選|项|は|은|는|correct|option|choice|letter"
)
VERB = "choose|chose|pick|select|say|think|guess|with|is|it's|be|so|thus|hence|therefore|option|choice|letter|labell?ed"
NEGATED = re.compile(
    r"\b(?:not|never|neither|nor|cannot|incorrect|wrong|exclude|unlikely|except)\b|n't\b|不|错",
    re.I,
)
DENIED = re.compile(r"\)?\s*(?:is|was|are)?\s*(?:not|n't|wrong|incorrect|false|不|错)\b", re.I)
HEDGED = re.compile(
    r"\b(?:not|no|never|neither|none|nothing|cannot|both|either|unclear|unsure|maybe|perhaps|all of)\b|n't\b|不|无法",
    re.I,
)

#: Phrases of an answer that knows no option.
IGNORANT = re.compile(
    r"\b(?:can ?not|can't|unable to|(?:not |im)possible to|(?:hard|difficult) to)\s+(?:be\s+)?(?:\w+ly\s+)?"
    r"(?:tell|told|say|said|answer|determine|know|judge|decide|confirm|verify|assess)"
    r"|\b(?:not|n't)\s+(?:\w+ly\s+)?(?:sure|certain|clear|know|enough|sufficient)"
    r"|\bno\s+(?:idea|way|information|answer|clue|telling|opinion|comment|one|body)\b|\b(?:could|might|may)\s+be\b"
    r"|\b(?:unsure|unclear|uncertain|unknown|undetermined|dunno|maybe|perhaps|possibly|depends)\b",
    re.I,
)
LEAD = re.compile(
    r"(?:(?:so|therefore|thus|hence|well|okay|ok)\b[\s,]*)?"
    r"(?:(?:the|my)\s+)?(?:(?:final|correct|short|best)\s+)?(?:(?:answer|response)\b"
    r"(?:\s+to\s+(?:this|the)\s+question)?(?:\s+is\b|\s+would\s+be\b)?[\s:=-]*)?"
)


def lettered(texts: Iterable[Any]) -> dict[str, str]:
    """Return options by letter, from A on; None, NaN, "" and "nan" are missing options."""
    pairs = zip(string.ascii_uppercase, texts, strict=False)
    # NaN is unequal to itself.
    return {name: str(text) for name, text in pairs if text not in ABSENT and text == text}


def letter(answer: str, options: Mapping[str, str] | Sequence[str]) -> str:
    """Return the letter of the single option that an answer states, "" if it states none or several.

    Args:
        answer: the answer.
        options: capital letters, with the options' texts if they are known.
    """
    texts = options if isinstance(options, Mapping) else dict.fromkeys(options, "")
    text = _plain(answer)
    core = text.strip(ENDS)
    if len(core) == 1 and core.upper() in texts:
        return core.upper()
    same_text = [
        name
        for name, option_text in texts.items()
        if option_text and _core(option_text) == core.casefold()
    ]
    if same_text or not core:
        return same_text[0] if len(same_text) == 1 else ""
    forms = _letter_patterns("".join(texts))
    stated = _stated(forms["stated"], text, forms["another"])
    if stated is not None:
        return stated
    first = forms["first"].match(text)
    if first:
        listed = _stated(forms["listed"], text, forms["another"])
        denied = first["marked"] is None and DENIED.match(text, first.end())
        several = listed == "" or _several(first, text, forms["another"])
        return "" if denied or several else _of(first)
    last_word = text.rstrip().rpartition("\n")[2].strip(ENDS)
    if len(last_word) == 1 and last_word.upper() in texts:
        return last_word.upper()
    for pattern in (forms["bracketed"], forms["last"]):
        stated = _stated(pattern, text, forms["another"])
        if stated is not None:
            return stated
    return _named(text, texts)


def yes_or_no(answer: str) -> str:
    """Return "yes" or "no" if an answer states exactly one of them, else ""."""
    text = " ".join(_plain(answer).replace("(", " ").replace(")", " ").lower().split())
    if IGNORANT.search(text):
        return ""
    opening = text[LEAD.match(text).end() :].lstrip(ENDS)  # type: ignore[union-attr]  # it matches the empty text as well
    first = re.match(r"(?:(yes|yeah|yep|no|nope)\b|([yn])[.!]?$)", opening)
    if first:
        stated = "yes" if first[0].startswith("y") else "no"
        return (
            ""
            if re.match(r"[\s,.;:!?|/&-]*(?:(?:and|or)\b|yes\b|no\b)", opening[first.end() :])
            else stated
        )
    clear = set(re.findall(r"\b(?:yes|no)\b(?=\s*(?:$|[.,;!]))", text))
    if re.match(r"there(?:\s+(?:is|are)\s+(?:no|not)\b|\s+(?:isn't|aren't)\b)", opening):
        clear.add("no")
    either = clear | set(re.findall(r"\b(?:yes|no)\b", text))
    return clear.pop() if clear and len(either) == 1 else ""


def _plain(answer: str) -> str:
    text = MARKUP.sub("", unicodedata.normalize("NFKC", answer)).translate(PLAIN)
    return QUOTES.sub("", text).strip()


def _core(text: str) -> str:
    return _plain(text).strip(ENDS).casefold()


@cache
def _letter_patterns(letters: str) -> dict[str, re.Pattern[str]]:
    capital, small = f"[{letters}]", f"[{letters.lower()}]"
    noun = "".join(
        rf"(?!{article}{NOUN.replace('(?!', '(?=', 1)})" for article in "AI" if article in letters
    )
    letter_alone = rf"{BEFORE}{noun}(?P<capital>{capital}){AFTER}"
    end = r"(?=\s*\)?\s*(?:$|[.,;:!?\n]))"
    ended = rf"{BEFORE}(?P<small>{small}){AFTER}{end}"
    either = rf"\(?\s*(?:{letter_alone}|{ended})"
    linked = rf"[\s:=→>-]*(?:(?i:{LINK})[\s:=,]*)*"
    must = rf"\s*(?:(?i:is|are|be)\b|[:=是为は은])[\s:=]*(?:(?i:{LINK})[\s:=,]*)*"
    capitals = rf"\(?{capital}{AFTER}"
    return dict(
        stated=re.compile(
            rf"(?:(?i:{ANSWER}){linked}|(?i:{OPTION}){must}|(?:{CHOOSE})[\s:]*){either}"
        ),
        first=re.compile(
            rf"\(?\s*(?:(?i:option|choice|letter)\s+)?\(?(?:(?P<marked>{capital}|{small})\s*[).:;、](?=\W|[^\W\d_]{{2}}|$)"
            rf"|(?P<alone>{capital})\s*\n|{letter_alone})|(?i:option|choice|letter)\s+\(?{ended}"
        ),
        bracketed=re.compile(rf"\(\s*(?P<capital>{capital})\s*\)"),
        last=re.compile(
            rf"(?:\b(?i:{VERB})\b|[:=→是项])[\s,:]*(?:(?i:option|choice|letter|answer)\s+)?{letter_alone}"
            r"(?=\s*(?:$|[.,;!?\n]|because\b|since\b|as\b|is\s+(?:the\s+)?(?:correct|right|best|true)\b))"
        ),
        another=re.compile(
            rf"\s*\)?\s*(?:(?:,\s*)?(?:\b(?i:and|or|nor)\b|[&/+和或与及])\s*"
            rf"(?:(?i:option|maybe|perhaps|possibly|also)\s+)?{capitals}"
            rf"|,\s*{capitals}\)?\s*(?:,|\band\b|\bor\b|$|\.))"
        ),
        listed=re.compile(
            rf"(?:^|\s)(?:(?i:option|choice)\s+\(?{letter_alone}|\(?(?P<marked>{capital})[).:]\s)"
        ),
    )


def _of(match: re.Match[str]) -> str:
    return next(value for value in match.groupdict().values() if value).upper()


def _several(match: re.Match[str], text: str, another: re.Pattern[str]) -> bool:
    return another.match(text, match.end()) is not None


def _stated(pattern: re.Pattern[str], text: str, another: re.Pattern[str]) -> str | None:
    """Return the letter of all matches, "" if they disagree; None without a match."""
    stated = set()
    for match in pattern.finditer(text):
        clause = re.split(r"[.!?;,\n。，]", text[: match.end()])[-1]
        if NEGATED.search(clause) or DENIED.match(text, match.end()):
            continue
        stated.add("" if _several(match, text, another) else _of(match))
    return None if not stated else stated.pop() if len(stated) == 1 else ""


def _named(text: str, texts: Mapping[str, str]) -> str:
    """Return the letter of the only option with its text in an answer, if the answer has no negation or doubt."""
    if HEDGED.search(text) or IGNORANT.search(text):
        return ""
    cores = {name: _core(option_text) for name, option_text in texts.items() if option_text}
    option_text = text.casefold()
    contained = {
        name: core
        for name, core in cores.items()
        # A short word may be part of any answer.
        if (len(core) > 2 or core.isdigit() or not core.isascii())
        and holds_words(option_text, core)
    }
    longest = [
        name
        for name, core in contained.items()
        if not any(core != longer and core in longer for longer in contained.values())
    ]
    return longest[0] if len(longest) == 1 else ""


def holds_words(text: str, sought: str) -> bool:
    """Return whether a text contains another as whole words."""
    if not sought.isascii():
        # Chinese and Japanese words have no blanks between them.
        return sought in text
    return re.search(rf"(?<!\w){re.escape(sought)}(?!\w)", text) is not None
