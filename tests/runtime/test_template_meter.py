"""Bounds on templates: they stop what runs away, and change nothing else."""

import itertools
from typing import Any

import pytest
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sapwood.runtime.errors import RequestError
from sapwood.runtime.template_meter import METER, Meter, RenderLimits, metered

EVERY_KIND = """
{%- macro shout(text, mark='!') %}{{ text | upper ~ mark }}{{ caller() if caller }}{% endmacro %}
{{- shout('q') }}{% call shout('z', mark='?') %}inside{% endcall %}
{%- filter upper %}filtered{% endfilter %}
{%- set trimmed | trim %}  block  {% endset %}[{{ trimmed }}]
{%- set plain %} block {{ trimmed }} {% endset %}[{{ plain }}]
{%- set shown | trim | upper %} {{ plain }} {% endset %}[{{ shown }}]
{%- for item in tree recursive %}({{ item.n }}{{ loop(item.below) if item.below }}
{{- loop.length }}{{ loop.last }}{{ loop.index0 }}){% else %}nothing{% endfor %}
{%- for x in [1, 2, 3, 4] if x % 2 == 0 %}{{ x + 1 }}{% if x == 4 %}{% break %}{% endif %}
{%- endfor %}
{%- set ns = namespace(total=0) %}
{%- for x in range(4) %}{% set ns.total = ns.total + x * 2 %}{% endfor %}{{ ns.total }}
{{- tree | map(attribute='n') | join(',') }}{{ '%s-%s' % (1, 2) }}{{ 'a{}'.format(3) }}
{{- tree | selectattr('n', 'equalto', 1) | list | length }}{{ (1, 2) | first }}
{{- {'a': 'b'}.items() | list }}{{ 'a b'.split()[-1] }}{{ nothing is defined }}
"""
TREE = [{"n": 1, "below": [{"n": 2}, {"n": 3}]}, {"n": 4}]


def environment() -> Any:
    return ImmutableSandboxedEnvironment(extensions=[loopcontrols])


def render(source: str, limits: RenderLimits | None = None, **variables: Any) -> str:
    """Each look at the clock finds it one second later."""
    env, clock = environment(), itertools.count()
    meter = Meter(limits or RenderLimits(max_seconds=10_000), lambda: float(next(clock)))
    return meter.joined(metered(env, source).generate({METER: meter, **variables}))


def test_a_metered_template_renders_what_it_rendered() -> None:
    expected = environment().from_string(EVERY_KIND).render(tree=TREE)
    assert "Z?inside" in expected
    assert render(EVERY_KIND, tree=TREE) == expected
    assert render(EVERY_KIND, tree=[]) == environment().from_string(EVERY_KIND).render(tree=[])


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(100) %}{% for b in range(100) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for item in tree recursive %}{{ loop(tree) }}{{ loop(tree) }}{% endfor %}",
        "{% for a in range(9999) if a %}{{ a | string | upper }}{% endfor %}",
    ],
)
def test_a_template_that_runs_on_is_stopped_by_the_clock(source: str) -> None:
    with pytest.raises(RequestError, match="more than 5 s") as refusal:
        render(source, RenderLimits(max_seconds=5), tree=TREE)
    assert refusal.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99) %}{{ 'chunk' }}{% endfor %}",
        "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}"
        "{% endfor %}",
        "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}"
        "{% endfor %}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}"
        "{% endfor %}",
        "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set s %}{{ ns.s }}{{ ns.s }}"
        "{% endset %}{% set ns.s = s %}{% endfor %}",
        "{{ ('x' * 101) | length }}",
        "{{ 'x' | center(101) | length }}",
        "{{ 'x'.ljust(101) | length }}",
        "{{ ('%101s' % 'x') | length }}",
        "{{ text }}",
    ],
)
def test_what_grows_too_large_is_stopped_within_and_at_the_end(source: str) -> None:
    with pytest.raises(RequestError, match="more than 100 characters"):
        render(source, RenderLimits(max_seconds=10_000, max_chars=100), text="x" * 101)


def test_what_just_fits_is_left_alone() -> None:
    assert render("{{ text ~ '' }}", RenderLimits(10_000, max_chars=100), text="x" * 100)
