"""Token ids beside the originals' procedure, on tokenizers that mark the start of a text and on one that does not."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from espalier.harness.models import conversations
from espalier.harness.models.build_adapter import load_adapter
from espalier.harness.models.conversations import other_template, sha256_of
from espalier.harness.specs.run_spec import VideoSpec
from espalier.harness.tools.benchmarks.checkpoint_prompts import (
    SEEN,
    PromptTokens,
    compare_tokens,
    piecewise_ids,
)
from tests.families import FAMILIES
from tests.family_runs import saved
from tests.tiny import load_tiny, picture


def sentences(begin: bool, prepend: str = "always") -> PreTrainedTokenizerFast:
    """Llama's kind: a blank before a text, as `▁`; with or without a begin token before that."""
    letters = ["<s>", "</s>", "<pad>", "<image>", "\n", "▁", *"USERA:Qn?"]
    vocabulary = {letter: number for number, letter in enumerate(dict.fromkeys(letters))}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    inner.decoder = decoders.Metaspace()
    if begin:
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def spelt(tokenizer: Any, ids: list[int]) -> list[str]:
    return [
        "picture" if token_id == SEEN else tokenizer.convert_ids_to_tokens(token_id)
        for token_id in ids
    ]


def test_pieces_are_tokenised_alone_and_begin_once() -> None:
    tokenizer = sentences(begin=True)
    tokens = spelt(tokenizer, piecewise_ids(tokenizer, "USER: <image>\nQ?", ["<image>"]))
    # Each piece has a blank of its own before it; the begin token stands once.
    assert tokens == ["<s>", "▁", *"USER:", "▁", "picture", "▁", "\n", "Q", "?"]
    once = spelt(tokenizer, tokenizer("USER: \nQ?")["input_ids"])
    assert once == [
        "<s>",
        "▁",
        *"USER:",
        "▁",
        "\n",
        "Q",
        "?",
    ]  # no blank behind where the picture was


def test_two_pictures_and_a_prompt_without_any() -> None:
    tokenizer = sentences(begin=True)
    tokens = spelt(tokenizer, piecewise_ids(tokenizer, "<image><image>Q", ["<image>"]))
    assert tokens == ["<s>", "picture", "picture", "▁", "Q"]
    assert piecewise_ids(tokenizer, "Q", ["<image>"]) == tokenizer("Q")["input_ids"]


def test_a_begin_token_written_into_the_prompt_costs_later_pieces_their_first_token() -> None:
    """The trap of LLaDA's conversation: the text begins with the token, the tokenizer adds none."""
    tokenizer = sentences(begin=False, prepend="never")
    tokens = spelt(tokenizer, piecewise_ids(tokenizer, "<s>USER: <image>\nQ?", ["<image>"]))
    assert tokens == ["<s>", *"USER:", "▁", "picture", "Q", "?"]
    plain = spelt(
        tokenizer, piecewise_ids(tokenizer, "<s><image>\nQ?", ["<image>"], keeps_begin=True)
    )
    assert plain == ["<s>", "picture", "\n", "Q", "?"]


def test_the_first_difference_is_told() -> None:
    assert PromptTokens("", (0, SEEN, 5), (0, SEEN, 5), {0: "<s>", 5: "▁"}).difference is None
    different = PromptTokens("", (0, SEEN, 4), (0, SEEN, 5, 4), {0: "<s>", 4: "\n", 5: "▁"})
    assert different.difference == "token 2: here 4 '\\n', in the original 5 '▁'; 3 and 4 tokens"
    longer = PromptTokens("", (0, 4, 4), (0, 4), {0: "<s>", 4: "\n"})
    assert longer.difference == "token 2: here 4 '\\n', in the original the end; 3 and 2 tokens"


@pytest.mark.parametrize(
    "name", ["llava", "llava_next", "onevision_image", "qwen2_vl", "internvl", "deepseek_ocr"]
)
def test_a_tokenizer_of_bytes_gives_the_same_either_way(name: str) -> None:
    adapter = load_tiny(FAMILIES[name].spec, saved(name))
    parts = [{"type": "image", "image": picture(0, 56, 42)}, {"type": "text", "text": "What?"}]
    tokens = compare_tokens(adapter, [{"role": "user", "content": parts}])
    assert (tokens.difference, tokens.ours.count(SEEN)) == (None, 1)
    assert "What?" in tokens.prompt


@pytest.mark.parametrize(("pieces", "differs"), [("alone", True), ("whole", False)])
def test_a_blank_that_only_pieces_have_is_told(pieces: str, differs: bool) -> None:
    """A fake adapter with a tokenizer that marks only the start of the prompt."""
    tokenizer = sentences(begin=True, prepend="first")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    seen = tokenizer.convert_tokens_to_ids("<image>")
    batch = tokenizer(["USER: <image><image>\nQ?"], return_tensors="pt")
    adapter: Any = SimpleNamespace(
        processor=SimpleNamespace(tokenizer=tokenizer),
        spec=SimpleNamespace(video=VideoSpec()),
        data=SimpleNamespace(pieces=pieces, placeholders=("<image>",)),
        load_media=lambda chat: [],
        prompt_text=lambda chat, media: "USER: <image>\nQ?",
        prepare=lambda chats: batch,
        items=lambda inputs: {seen: []},
    )
    tokens = compare_tokens(adapter, [])
    assert tokens.ours.count(SEEN) == 1  # two placeholders side by side are one picture
    assert (tokens.difference is not None) == differs
    if tokens.difference is not None:
        assert re.fullmatch(
            r"token \d+: here \d+ '\\n', in the original \d+ '▁'; \d+ and \d+ tokens",
            tokens.difference,
        )


def test_another_template_beside_the_weights_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(conversations.log, "warning", lambda form, line: lines.append(form % line))
    spec = replace(FAMILIES["llava"].spec, path=saved("llava"), weights="trained", dtype="float32")
    sha256 = sha256_of(load_adapter(spec).shipped_template)
    assert not lines  # nothing is known, so nothing is another
    load_adapter(replace(spec, template_sha256="0" * 64))
    (line,) = lines
    assert f"has sha256 {sha256}, not {'0' * 64} (model.template_sha256)" in line
    assert other_template(replace(spec, template_sha256=sha256_of("a")), "a") is None
    assert other_template(replace(spec, template_sha256=sha256_of("a")), "b") is not None
