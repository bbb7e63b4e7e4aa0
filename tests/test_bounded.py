"""Templates of others end within seconds, with a text or one line; what a question needs is rendered as ever."""

from __future__ import annotations

import time

import pytest

from espalier.harness.errors import UserError
from espalier.harness.specs.prompt_templates import checked, rendered

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
    with pytest.raises(UserError) as caught:
        rendered(checked("benchmark.text", template), SAMPLE, "row 0")
    assert len(str(caught.value).splitlines()) == 1
    assert time.process_time() - start < 20


@pytest.mark.parametrize(("template", "text"), PLAIN)
def test_a_template_is_rendered_as_jinja_does(template: str, text: str) -> None:
    assert rendered(checked("benchmark.text", template), SAMPLE, "row 0") == text
