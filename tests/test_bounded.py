"""Templates of others end within seconds, with a text or one line; what a question needs is rendered as ever."""

from __future__ import annotations

import os
import resource
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from espalier.harness.errors import UserError
from espalier.harness.models.conversations import FRAMES, TAGGED
from espalier.harness.specs.bounded_templates import (
    _renderer,
    checked_template,
    question_text,
    render,
)
from espalier.harness.specs.run_spec import CHECKPOINT
from espalier.harness.specs.template_child import MEMORY
from tests.family_runs import Tiny
from tests.refused import refused
from tests.tiny import chat

SAMPLE = {"q": "hi", "options": ["a", "b"], "number": 123456789}

#: Templates that would take memory or time without end.
BOMBS = (
    "{{ 'x' * 10**10 }}",
    "{{ 10**10 * [1] }}",
    "{{ 2**(10**9) }}",
    "{% for i in range(10**9) %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{{ q }} twelve letters{% endfor %}",
    "{{ 'x'.center(10**10) }}",
    "{{ 'x'|center(10000000000) }}",
    "{{ ['x']|map('center', 10**10)|list }}",
    "{{ '1'.zfill(10**10) }}",
    "{{ ('x'*10**6).replace('x', 'y'*10**6) }}",
    "{{ ('x'*10**6)|list|join('y'*10**6) }}",
    "{{ '%010000000000d' % 1 }}",
    "{{ '%*d' % (10**10, 1) }}",
    "{{ '{:{w}}'.format(1, w=10**10) }}",
    "{{ 'x'.translate({120: 'y'*10**9}) }}",
    "{{ [1]|batch(10**10, 'x')|list }}",
    "{{ {'a': 1}|tojson(indent=10**10) }}",
    "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for i in [1, 2, 3] recursive %}{{ loop([1, 2, 3]) }}{% endfor %}",
    "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
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


@pytest.mark.parametrize("template", [*BOMBS, *FAILURES])
def test_a_template_is_refused_within_seconds(template: str) -> None:
    start = time.process_time()
    with pytest.raises(UserError):
        question_text(checked_template("benchmark.text", template), SAMPLE, "row 0")
    assert time.process_time() - start < 20


@pytest.mark.parametrize(("template", "text"), PLAIN)
def test_a_template_is_rendered_as_jinja_does(template: str, text: str) -> None:
    assert question_text(checked_template("benchmark.text", template), SAMPLE, "row 0") == text


#: Chat templates of checkpoints, with all that transformers defines for them.
ATTACKS = (
    "{% if strftime_now('%Y') %}{% endif %}{% set x = 'x' * 4000000000 %}",
    "{% if lipsum %}{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}{% endif %}",
    "{% set a = ([[1,2,3,4,5]]*30000)|sum(start=[]) %}",
    "{% set a = (1).to_bytes(4000000000, 'big') %}",
    "{% if '' == strftime_now('x' * 900000000) %}{% endif %}",
    "{% set a = lipsum(n=9999999) %}",
    "{% set a = ('a' * 400000)|wordwrap(1)|title|urlize * 9999 %}",
    "{% set a = messages|tojson(indent=999999999) %}",
)


@pytest.fixture(scope="module")
def adapter():
    tiny = Tiny("llava").adapter
    tiny.spec = replace(tiny.spec, conversation=CHECKPOINT)
    return tiny


@pytest.mark.parametrize("template", ATTACKS)
def test_a_checkpoint_s_template_takes_no_more_than_its_share(template: str, adapter) -> None:
    adapter.processor.chat_template = template
    with pytest.raises(UserError, match="it takes too much time or memory") as caught:
        adapter.render(chat("w1"))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("kind", ["chat", "question"])
def test_the_kernel_holds_the_program_to_its_limits(kind, adapter) -> None:
    values = {"conversations": [chat("w1")]} if kind == "chat" else SAMPLE
    render(kind, "w", {**values, "add_generation_prompt": True})
    program = _renderer(kind, os.getpid())._idle
    assert program is not None
    assert resource.prlimit(program.pid, resource.RLIMIT_AS)[0] == MEMORY
    assert resource.prlimit(program.pid, resource.RLIMIT_CPU)[0] < 60


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


def test_a_template_that_fails_is_one_line(adapter) -> None:
    adapter.processor.chat_template = "{{ raise_exception('roles\nmust alternate') }}"
    assert "TemplateError: roles must alternate; valid: null" in refused(adapter.render, chat("w1"))


def test_an_interrupted_template_leaves_no_text_to_the_next() -> None:
    loop = "{% for i in range(99999) %}{% for j in range(30) %}{% endfor %}{% endfor %}{{ a }}"

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    assert render("question", "{{ a }}", {"a": 1}) == "1"
    handler = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        with pytest.raises(KeyboardInterrupt):
            render("question", loop, {"a": 2})
    finally:
        signal.signal(signal.SIGALRM, handler)
    assert render("question", "{{ a }}", {"a": 3}) == "3"


def test_a_column_that_is_no_text_is_its_kind(tmp_path: Path) -> None:
    sample = {"picture": Image.new("RGB", (2, 2)), "file": tmp_path, "counts": [1, 2.5, None]}
    assert question_text("{{ picture }} {{ counts }}", sample, "row 0") == "<Image> [1, 2.5, None]"
    assert "PosixPath" in question_text("{{ file }}", sample, "row 0")


def test_a_program_that_another_one_killed_is_started_again() -> None:
    assert render("question", "{{ q }}", SAMPLE) == "hi"
    child = _renderer("question", os.getpid())._idle
    assert child is not None
    os.kill(child.pid, signal.SIGKILL)
    assert render("question", "{{ q }}", SAMPLE) == "hi"
