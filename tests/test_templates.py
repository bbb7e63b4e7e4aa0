"""Templates of others end with a text or one line; what a question needs is rendered as Jinja does."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import pytest
from PIL import Image

from espalier.harness.errors import UserError
from espalier.harness.models.conversations import FRAMES, TAGGED
from espalier.harness.specs.question_templates import checked_template, question_text
from espalier.harness.specs.run_spec import CHECKPOINT
from tests.family_runs import Tiny
from tests.refused import refused
from tests.tiny import chat

SAMPLE = {"q": "hi", "options": ["a", "b"], "number": 123456789}

#: Templates that would take memory without end, or make too long a text.
BOMBS = (
    "{{ 'x' * 10**10 }}",
    "{{ 10**10 * [1] }}",
    "{{ 2**(10**9) }}",
    "{% for i in range(10**9) %}{% endfor %}",
    "{% for i in range(99999) %}{{ q }} twelve letters{% endfor %}",
    "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
)

#: Templates that fail.
FAILURES = (
    *("{{ 1/0 }}", "{{ 1//0 }}", "{{ 9.0**999999 }}", "{{ q.index('z') }}", "{{ q|xmlattr }}"),
    *("{{ q.encode('nosuch') }}", "{{ cycler() }}", "{{ q|truncate(-5) }}", "{% include 'x' %}"),
    *("{{ lipsum(5) }}", "{{ ''.__class__ }}", "{{ -q }}", "{{ [3, 'a']|sort }}"),
)

PLAIN = (
    ("What is {{ q }}?\n", "What is hi?\n"),
    (
        "{% for o in options %}{{ loop.index }}/{{ loop.length }}{{ o }}{% if not loop.last %}, {% endif %}"
        "{% endfor %}",
        "1/2a, 2/2b",
    ),
    ("{{ q ~ ' ' ~ options|join('+') ~ number }}", "hi a+b123456789"),
    ("{{ '%.2f' % 1.234 }}{{ '{:>5}'.format(q) }}{{ q.replace('h', 'H') }}", "1.23   hiHi"),
    ("{{ '%d' % number }} {{ 'id {}'.format(number) }}", "123456789 id 123456789"),
    ("{{ 2 * 3 + 4 ** 2 // 5 }}{{ range(3)|list }}", "9[0, 1, 2]"),
    ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(q) }}{{ options|map('upper')|join }}", "<hi>AB"),
    ("{% for x in options|reverse %}{{ loop.revindex }}{{ x }}{% endfor %}", "2b1a"),
    ("{% for x in [] %}{% else %}none{% endfor %}", "none"),
    ("{% for k, v in sample.items() if v %}{{ k }}{% endfor %}", "qoptionsnumber"),
)


@pytest.mark.sampled
@pytest.mark.parametrize("template", [*BOMBS, *FAILURES])
def test_a_template_is_refused(template: str) -> None:
    with pytest.raises(UserError):
        question_text(checked_template("benchmark.text", template), SAMPLE, "row 0")


@pytest.mark.parametrize(("template", "text"), PLAIN)
def test_a_template_is_rendered_as_jinja_does(template: str, text: str) -> None:
    assert question_text(checked_template("benchmark.text", template), SAMPLE, "row 0") == text


def test_an_image_is_shown_as_its_class() -> None:
    """Its own text has an address, which would make every run's question another one."""
    sample = {"image": Image.new("RGB", (2, 2)), "turns": [{"image": Image.new("L", (1, 1))}]}
    assert question_text("{{ image }} {{ turns }}", sample, "row 0") == (
        "<Image> [{'image': '<Image>'}]"
    )


@pytest.fixture(scope="module")
def adapter():
    tiny = copy(Tiny("llava").adapter)
    tiny.processor = copy(tiny.processor)
    tiny.spec = replace(tiny.spec, conversation=CHECKPOINT)
    return tiny


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for i in range(99999) %}twelve letters{% endfor %}", "makes too long a text"),
        (
            "{{ raise_exception('roles\nmust alternate') }}",
            "TemplateError: roles must alternate; valid: null",
        ),
    ],
)
def test_a_checkpoint_s_template_that_fails_is_one_line(template: str, words: str, adapter) -> None:
    adapter.processor.chat_template = template
    assert words in refused(adapter.render, chat("w1"))


@pytest.mark.parametrize(
    "template",
    [
        *(frame.template(TAGGED) for frame in FRAMES.values()),
        "{% generation %}{{ messages|tojson }}{% endgeneration %}{{ bos_token }}{{ enable_thinking }}",
        "{%- for m in messages %}\n  {{ m.role }}{% if loop.index > 1 %}{% break %}{% endif %}\n{% endfor %}\n",
        "{{ strftime_now('%B')|length > 2 }}{{ namespace(a=1).a }}{{ messages[0].content[0].image }}",
    ],
)
def test_a_chat_is_rendered_as_the_library_does(template: str, adapter) -> None:
    adapter.processor.chat_template = template
    turns = chat("w1 w2", 0)
    expected = adapter.processor.apply_chat_template(turns, add_generation_prompt=True)
    assert adapter.render(turns) == expected
