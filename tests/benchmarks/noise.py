"""Answers that say nothing about any picture, of the kinds that a broken model gives."""

from __future__ import annotations

#: None of them has a word, a letter alone or a number of a right answer in the fixtures.
NOISE = {
    "empty": "",
    "signs": "; ; ; , . !! ?? --- ``` $$ ||",
    "special tokens": "<|im_end|></s><loc_16><loc_3><unk><pad><|endoftext|>",
    "debris": "<loc_5> ; ; ; ; <0x0A> \ufffd\ufffd\ufffd",
    "random words": "qqq zorp blimf wug dax toma fep",
    "repeated token": "zorp zorp zorp zorp zorp zorp zorp zorp",
    "long loop": "wug dax fep " * 20,
    "loop of letters": "\u54c8" * 300,
    "another language": "\u0437\u043e\u0440\u043f \u0431\u043b\u0438\u043c \u0444\u0443\u0433",
    "garbled": "\u00c3\u00a4\u00c2\u00b8\u00c2\u00ad \u00ef\u00bf\u00bd \u0102\u20ac\u2122 \u011e\u0178",
    "markup": "<div><span>zorp</span></div> **wug** \\text{dax}",
}

#: Those that nobody can take for an answer of words.
ILLEGIBLE = ("empty", "signs", "special tokens", "debris")
#: Those that are words, or look like them, without end.
LOOPS = ("repeated token", "long loop", "loop of letters")
