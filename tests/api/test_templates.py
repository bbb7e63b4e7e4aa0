"""Prompts of a folder follow its chat template from any of its files; another format is logged."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import espalier
from espalier.harness.models import conversations as templates
from espalier.harness.models.build_adapter import load_adapter
from espalier.harness.models.families import ADAPTERS
from espalier.harness.specs.run_spec import CHECKPOINT
from tests.families import FAMILIES
from tests.family_runs import saved

CHAT = [
    {
        "role": "user",
        "content": [{"type": "image", "image": None}, {"type": "text", "text": "What is it?"}],
    }
]


def parts(head: str, end: str, answer: str, mark: str) -> str:
    return (
        f"{{% for m in messages %}}{{{{ {head} }}}}{{% for p in m['content'] %}}{{% if p['type'] == 'image' %}}"
        f"{{{{ {mark + chr(10)!r} }}}}{{% else %}}{{{{ p['text'] }}}}{{% endif %}}{{% endfor %}}{{{{ {end!r} }}}}"
        f"{{% endfor %}}{{{{ {answer!r} }}}}"
    )


#: Family, template of pictures and texts, template of texts alone, and the prompt of both.
CASES = {
    "mistral": (
        "llava_next",
        parts("'[INST] '", " [/INST]", "", "<image>"),
        "{% for m in messages %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% endfor %}",
        "[INST] <image>\nWhat is it? [/INST]",
    ),
    "chatml": (
        "llava_next",
        parts(
            "'<|im_start|>' + m['role'] + '\n'",
            "<|im_end|>\n",
            "<|im_start|>assistant\n",
            "<image>",
        ),
        "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        "<|im_start|>user\n<image>\nWhat is it?<|im_end|>\n<|im_start|>assistant\n",
    ),
    "llama3": (
        "llava_next",
        parts(
            "'<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n'",
            "<|eot_id|>",
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            "<image>",
        ),
        "{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] + "
        "'<|eot_id|>' }}{% endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}",
        "<|start_header_id|>user<|end_header_id|>\n\n<image>\nWhat is it?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "internvl3": (
        "internvl",
        parts(
            "'<|im_start|>' + m['role'] + '\n'",
            "<|im_end|>\n",
            "<|im_start|>assistant\n",
            "<IMG_CONTEXT>",
        ),
        "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
        "{{ '<|im_start|>assistant\n' }}",
        "<|im_start|>user\n<IMG_CONTEXT>\nWhat is it?<|im_end|>\n<|im_start|>assistant\n",
    ),
}
LAYOUTS = (
    *("chat_template.jinja", "chat_template.json", "processor_config.json"),
    *("tokenizer_config.json", "tokenizer_config.json, named", "tokenizer_config.json, texts"),
)


def folder_of(family: str, layout: str, template: str | None, texts: str, to: Path) -> Path:
    """Return the folder of a tiny model with its chat template in one file, None: in none."""
    shutil.copytree(saved(family), to, dirs_exist_ok=True)
    for name in templates.TEMPLATE_FILES:
        file = to / name
        if "template" in name:
            file.unlink(missing_ok=True)
        elif file.is_file():
            config = json.loads(file.read_text())
            config.pop("chat_template", None)
            file.write_text(json.dumps(config))
    if template is None:
        return to
    name, _, form = layout.partition(", ")
    file = to / name
    if name.endswith(".jinja"):
        file.write_text(template)
        return to
    config = json.loads(file.read_text()) if file.is_file() else {}
    value: Any = texts if form == "texts" else template
    if form == "named":
        value = [{"name": "default", "template": template}, {"name": "tool_use", "template": "-"}]
    file.write_text(json.dumps({**config, "chat_template": value}))
    return to


def prompt(model: espalier.Model) -> str:
    with model.open_adapter() as adapter:
        return adapter.render(CHAT)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    logged: list[str] = []
    monkeypatch.setattr(templates.log, "warning", lambda form, line: logged.append(form % line))
    return logged


@pytest.mark.sampled(18)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_a_folder_is_asked_in_its_own_format(
    case: str, layout: str, tmp_path: Path, lines: list[str]
) -> None:
    family, template, texts, expected = CASES[case]
    folder = folder_of(family, layout, template, texts, tmp_path)
    assert prompt(espalier.load(folder, device="cpu")) == expected
    assert lines == []
    spec = replace(FAMILIES[family].spec, path=folder, weights="trained", conversation=CHECKPOINT)
    assert load_adapter(spec).render(CHAT) == expected
    if "texts" not in layout:
        assert templates.local_template(spec) == template


@pytest.mark.sampled
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_familys_own_format_is_told_where_the_folder_has_another(
    layout: str, tmp_path: Path, lines: list[str]
) -> None:
    family, template, texts, expected = CASES["mistral"]
    folder = folder_of(family, layout, template, texts, tmp_path)
    spec = replace(FAMILIES[family].spec, path=folder, weights="trained", conversation=None)
    adapter = load_adapter(spec)
    assert adapter.render(CHAT) != expected
    (line,) = lines
    assert "prompts follow the family's own format" in line
    assert "model.conversation=checkpoint" in line
    assert prompt(espalier.load(folder, device="cpu", conversation=None)) == adapter.render(CHAT)
    assert len(lines) == 2


def test_a_folder_without_a_template_has_the_familys(tmp_path: Path, lines: list[str]) -> None:
    folder = folder_of("llava_next", "", None, "", tmp_path)
    assert "USER: <image>\nWhat is it? ASSISTANT:" in prompt(espalier.load(folder, device="cpu"))
    assert lines == []


@pytest.mark.sampled
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_wrapped_processor_is_asked_alike(layout: str, tmp_path: Path) -> None:
    family, template, texts, expected = CASES["chatml"]
    folder = folder_of(family, layout, template, texts, tmp_path)
    spec = replace(FAMILIES[family].spec, path=folder, weights="trained")
    adapter = ADAPTERS.load(spec.adapter)
    model = adapter.data.model_class.from_pretrained(folder)
    assert prompt(espalier.wrap(model, adapter.load_processor(spec))) == expected
