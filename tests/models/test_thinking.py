"""Reasoning: prompts with and without it, its budget, what is scored, and what a row counts."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.harness.cost.budget import Budget
from espalier.harness.engine.generation_loop import CLOSING
from espalier.harness.engine.session import Session
from espalier.harness.errors import UserError
from espalier.harness.models.adapter import Adapter
from espalier.harness.specs.catalogue import build_method
from run import main
from tests.families import FAMILIES
from tests.family_runs import saved
from tests.tiny import chat, load_tiny

TINY = "qwen3_vl"
#: With a switch, as in hybrid releases: without reasoning, the prompt closes it.
HYBRID = (
    "{% for turn in messages %}{% for part in turn.content %}{{ part.text }}{% endfor %}{% endfor %}A:"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>\n{% endif %}"
)
BUDGET = 24


def thinker(value: str | None, folder: Path | None = None) -> Adapter:
    """Return a tiny model with a value of `model.generation.thinking`, and with the template of a folder."""
    spec = FAMILIES[TINY].spec
    generation = {**spec.generation, **({} if value is None else {"thinking": value})}
    conversation = None if folder is None else "checkpoint"
    spec = replace(spec, generation=generation, conversation=conversation)
    return load_tiny(spec, folder or saved(TINY))


@pytest.mark.parametrize(
    ("value", "end", "lead"),
    [
        (None, "A:<think>\n", "<think>"),
        ("strip", "A:<think>\n", "<think>"),
        ("budget:99", "A:<think>\n", "<think>"),
        ("off", "A:<think></think>", ""),
    ],
)
def test_the_checkpoint_s_switch_follows_the_setting(
    tmp_path: Path, value: str | None, end: str, lead: str
) -> None:
    shutil.copytree(saved(TINY), tmp_path / "hybrid")
    (tmp_path / "hybrid" / "chat_template.jinja").write_text(HYBRID)
    adapter = thinker(value, tmp_path / "hybrid")
    assert adapter.render(chat("Why?")) == f"Why?{end}"
    ids = torch.tensor([adapter.processor.tokenizer.encode("It is.")])
    assert adapter.decode(ids) == [f"{lead}It is."]


@pytest.mark.parametrize(("value", "tail"), [(None, ""), ("strip", "<think>\n")])
def test_the_family_s_frame_begins_the_reasoning(value: str | None, tail: str) -> None:
    assert thinker(value).render(chat("Why?")).endswith(f"<|im_start|>assistant\n{tail}")


def test_a_format_without_a_switch_cannot_turn_reasoning_off() -> None:
    with pytest.raises(UserError, match=r"model\.generation\.thinking='off': .*enable_thinking"):
        thinker("off").render(chat("Why?"))


@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_a_budget_writes_the_closing_tag_and_the_answer_continues(ratio: float) -> None:
    adapter = thinker(f"budget:{BUDGET}")
    inputs = adapter.encode([chat("Why?", 1), chat("And why is that so?", 2)])
    method, budget = build_method("divprune", {}), Budget("kept", ratio)
    settings: dict[str, Any] = {
        "do_sample": False,
        "suppress_tokens": [*adapter.items(inputs), *adapter.end_ids],
    }
    with Session(adapter, method, budget) as session:
        limited = session.generate(
            inputs, max_new_tokens=BUDGET + 6, thinking_budget=BUDGET, **settings
        )
        free = session.generate(inputs, max_new_tokens=BUDGET + 6, **settings)
    closing = adapter.processor.tokenizer.encode(CLOSING)
    begin = BUDGET - len(closing)
    assert torch.equal(limited.ids[:, :begin], free.ids[:, :begin])
    assert limited.ids[:, begin:BUDGET].tolist() == [closing, closing]
    # The tokens after the tag are those of a model that wrote it itself.
    if ratio == 0:
        longer = torch.cat([inputs["input_ids"], limited.ids[:, :BUDGET]], 1)
        logits = _logits(adapter, inputs, longer)
        logits[:, settings["suppress_tokens"]] = -torch.inf
        assert torch.equal(limited.ids[:, BUDGET], logits.argmax(-1))


def _logits(adapter: Adapter, inputs: dict[str, Any], ids: torch.Tensor) -> torch.Tensor:
    """Return the logits after (B, T) prompts with the beginnings of answers, without a cache."""
    new = ids[:, inputs["input_ids"].shape[1] :]
    longer = {**inputs, "input_ids": ids}
    for name in ("attention_mask", "mm_token_type_ids"):
        filler = torch.full_like(new, int(name == "attention_mask"))
        longer[name] = torch.cat([inputs[name], filler.to(inputs[name].dtype)], 1)
    others = {name: value for name, value in longer.items() if name != "input_ids"}
    places = adapter.model._prepare_position_ids_for_generation(ids, others)
    with torch.no_grad():
        return adapter.model(**longer, position_ids=places, use_cache=False).logits[:, -1].clone()


def test_an_answer_without_reasoning_has_no_budget() -> None:
    """LLaVA's prompts open no reasoning, and its answers do not."""
    adapter = load_tiny(FAMILIES["llava"].spec, saved("llava"))
    inputs = adapter.encode([chat("Why?", 1)])
    settings: dict[str, Any] = {
        "do_sample": False,
        "max_new_tokens": 20,
        "suppress_tokens": [*adapter.items(inputs)],
    }
    with Session(adapter, build_method("none", {}), Budget("kept", 0.0)) as session:
        plain = session.generate(inputs, **settings).ids
        assert torch.equal(session.generate(inputs, thinking_budget=18, **settings).ids, plain)


@pytest.mark.slow
def test_a_row_counts_reasoning_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Random weights reason until the budget ends it; the tag's tokens are part of it."""
    command = [
        "model=qwen3_vl_2b",
        "model.weights=random",
        "model.scale.layers=1",
        "model.scale.tower_layers=1",
        "++model.facts.text={hidden: 256, intermediate: 512, heads: 2, kv_heads: 2, head_dim: 128}",
        "++model.facts.tower={hidden: 256, intermediate: 512, heads: 4, kv_heads: 4, head_dim: 64}",
        "++model.facts.projector=[1024, 1024, 256]",
    ]
    command += ["method=none", "limit=1", "engine.paired=0", f"store={tmp_path}", "json=true"]
    assert main([*command, f"+model.generation.thinking=budget:{BUDGET}"]) == 0
    assert '"reasoning": {"tokens": ' in capsys.readouterr().out
