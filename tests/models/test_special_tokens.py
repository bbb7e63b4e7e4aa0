"""Special tokens that both a chat template and a tokenizer write stand once, as in the library's own call."""

from __future__ import annotations

import json
from copy import copy, deepcopy
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers.processors import TemplateProcessing

from espalier.harness.errors import UserError
from espalier.harness.models.adapter import Adapter
from espalier.harness.runs.served.engine_server import EngineServer
from espalier.harness.runs.served.served_session import served_prompt
from tests.families import FAMILIES
from tests.family_runs import adapter_of
from tests.models.test_generic import REFUSED, load
from tests.models.unlisted_models import UNLISTED, save_unlisted
from tests.tiny import picture

CHATS = [
    [{"role": "user", "content": [{"type": "image", "image": picture(0, 28, 28)}, text]}]
    for text in ({"type": "text", "text": "What?"}, {"type": "text", "text": "And what is this?"})
]
WORDS = [[{"role": "user", "content": [{"type": "text", "text": "What?"}]}]]


def with_tokens(adapter: Adapter, lead: str, adds_end: bool) -> Adapter:
    """Return an adapter with a tokenizer that adds special tokens, and a template that begins with `lead`."""
    changed = copy(adapter)
    changed.processor = deepcopy(adapter.processor)
    tokenizer = changed.processor.tokenizer
    begin, end = tokenizer.bos_token, tokenizer.eos_token
    pieces = [begin, "$A", *([end] if adds_end else [])]
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in (begin, end)}
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=pieces, special_tokens=list(ids.items())
    )
    around = [getattr(changed.processor, f"image_{end}_token", "") for end in ("start", "end")]
    mark = type(adapter).data.placeholders[0].join(around)
    changed.processor.chat_template = (
        f"{lead}{{% for turn in messages %}}{{% for part in turn.content %}}"
        f"{{{{ {mark!r} if part.type == 'image' else part.text }}}}{{% endfor %}}{{% endfor %}}"
    )
    return changed


def check(adapter: Adapter) -> None:
    for lead in ("{{ bos_token }}", "", "{{ ' ' + bos_token }}"):
        for adds_end in (False, True):
            changed = with_tokens(adapter, lead, adds_end)
            library = deepcopy(changed.processor)
            for chats in (CHATS, CHATS[:1], WORDS):
                expected = library.apply_chat_template(
                    deepcopy(chats),
                    tokenize=True,
                    return_dict=True,
                    return_tensors="pt",
                    processor_kwargs={"padding": True},
                )
                batch = changed.prepare(chats)
                assert batch["input_ids"].tolist() == expected["input_ids"].tolist()
                assert batch["attention_mask"].tolist() == expected["attention_mask"].tolist()


@pytest.mark.sampled
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_the_library(name: str) -> None:
    check(adapter_of(name))


@pytest.mark.sampled(30)
@pytest.mark.parametrize("name", [name for name in UNLISTED if name not in REFUSED])
def test_tokens_of_classes_without_a_file_are_those_of_the_library(
    name: str, tmp_path: Path
) -> None:
    check(load(name, save_unlisted(name, tmp_path)))


def test_one_call_is_not_made_for_prompts_with_and_without_the_token() -> None:
    lead = "{% if messages[0].content | length == 1 %}{{ bos_token }}{% endif %}"
    adapter = with_tokens(adapter_of("llava"), lead, adds_end=False)
    for chat in (CHATS[0], WORDS[0]):
        ids = adapter.prepare([chat])["input_ids"][0].tolist()
        assert ids.count(adapter.processor.tokenizer.bos_token_id) == 1
    with pytest.raises(UserError, match=r"of a batch begin with '<s>'.*valid: engine.batch_size=1"):
        adapter.prepare([CHATS[0], WORDS[0]])


@pytest.mark.parametrize("lead", ["{{ bos_token }}", ""])
def test_another_engine_gets_the_same_tokens(lead: str) -> None:
    adapter = with_tokens(adapter_of("llava"), lead, adds_end=False)
    prompt = served_prompt(adapter, CHATS[0])
    assert prompt.ids.count(adapter.processor.tokenizer.bos_token_id) == 1
    assert len(prompt.ids) - 1 == prompt.text  # the placeholder
    bodies: list[dict[str, Any]] = []

    def reply(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        choice = {"token_ids": [1], "finish_reason": "stop"}
        return httpx.Response(200, json={"choices": [choice], "usage": {}, "prompt_token_ids": [1]})

    server = object.__new__(EngineServer)
    server._url, server._name, server._place = "http://server", "llava", "the server"
    server._http = httpx.Client(transport=httpx.MockTransport(reply))
    request = {"words": prompt.words, "media": (), "setting": {}, "sampling": {}}
    server.ask([{**request, "adds_special": prompt.adds_special}])
    (body,) = bodies
    assert body["add_special_tokens"] == (lead == "")
    (part,) = body["messages"][0]["content"]
    tokenizer = adapter.processor.tokenizer
    ids = tokenizer(part["text"], add_special_tokens=body["add_special_tokens"])["input_ids"]
    assert tuple(ids) == prompt.ids
