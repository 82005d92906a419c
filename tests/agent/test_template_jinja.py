# SPDX-License-Identifier: Apache-2.0
"""The sandbox that chat templates run in."""

import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from freetoken_agent.chat_templates import jinja
from freetoken_agent.chat_templates.jinja import JinjaTemplate
from freetoken_agent.errors import TemplateUnsupported
from freetoken_agent.template import ChatFormat
from freetoken_agent.tokenizers.byte_tokenizer import ByteTokenizer

MESSAGES = [{"role": "user", "content": 'Grüße, "you" <b>'}, {"role": "assistant", "content": "ok"}]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "é <x>", "parameters": {}}}]


def render(source: str, **more: Any) -> str:
    return JinjaTemplate(source, {"bos_token": "<s>"}).render(MESSAGES, **more)


@pytest.mark.parametrize(
    "source",
    [
        "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m.content }}\n"
        "  {% endif %}\n{% endfor %}",
        "{% for m in messages %}{{ m | tojson }}{% endfor %}",
        "{{ tools | tojson(indent=2) }}",
        "{{ messages | tojson(separators=(',', ':'), sort_keys=true) }}",
        "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
        "{{ ns.n }}",
        "{{ dict(a=1).a }}{{ messages[0].get('content') }}{{ messages[-1]['role'] }}",
        "{{ add_generation_prompt }}{{ documents is none }}{{ unknown is defined }}",
        "{{ 'a' * 3 ~ 'b' ~ 1 ~ none }}{{ 2 ** 3 }}{{ '%s!' % 'x' }}{{ range(3) | list }}",
        "{{ 'a b' | replace('a', 'x') | center(9) }}{{ ['a', 1] | join('-') }}",
        "{{ 'a\\nb' | indent }}",
        "{{ 'a,b'.split(',') | join }}{{ ', '.join(['a']) }}{{ 'ab'.replace('a', 'c') }}",
        "{% macro m(x) %}<{{ x }}{{ caller() if caller }}>{% endmacro %}{{ m(1) }}"
        "{% call m(2) %}in{% endcall %}",
    ],
)
def test_rendering_equals_transformers(source: str) -> None:
    """Oracle: transformers' own rendering of the same arguments."""
    (wanted,), _ = render_jinja_template(
        [MESSAGES], tools=TOOLS, chat_template=source, bos_token="<s>"
    )
    assert render(source, tools=TOOLS) == wanted


def test_the_clock_is_frozen_in_utc() -> None:
    """Oracle: the standard library's strftime of the same moment."""
    now_s = 1_700_000_000.0
    wanted = datetime.fromtimestamp(now_s, UTC).strftime("%Y-%m-%d %H:%M %A")
    assert render("{{ strftime_now('%Y-%m-%d %H:%M %A') }}", now_s=now_s) == wanted


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(x=1) }}",
        "{{ raise_exception('not like this') }}",
        "{{ messages[0].content.nothing.more }}",
        "{{ 1 / 0 }}",
        "{{ messages[7].content }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% include 'other.jinja' %}",
        "{% import 'os' as os %}",
        "{{ none + 'x' }}",
    ],
)
def test_what_a_template_may_not_do_is_unsupported(source: str) -> None:
    """Oracle: one error type with a stable code, and nothing else."""
    with pytest.raises(TemplateUnsupported) as caught:
        render(source)
    assert caught.value.code == "template_unsupported"


def test_the_templates_own_words_are_in_the_error() -> None:
    """Oracle: the message given to raise_exception."""
    with pytest.raises(TemplateUnsupported, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize("source", ["{% for %}", "{{ messages | nosuchfilter }}", "{% endif %}"])
def test_a_template_that_does_not_compile_is_unsupported(source: str) -> None:
    """Oracle: the error at construction, not at the first rendering."""
    with pytest.raises(TemplateUnsupported, match="compile"):
        JinjaTemplate(source, {})


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        "{{ 'x' * 999999999999 }}",
        "{{ 999999999999 * ['x'] }}",
        "{% set ns = namespace(s='x') %}{% for i in range(64) %}{% set ns.s = ns.s + ns.s %}"
        "{% endfor %}{{ ns.s }}",
        "{% set ns = namespace(s='x') %}{% for i in range(64) %}{% set ns.s = ns.s ~ ns.s %}"
        "{% endfor %}{{ ns.s }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ '%999999999999d' % 1 }}",
        "{{ 'x' | center(999999999999) }}",
        "{{ 'x' | batch(999999999, 'y') | list | length }}",
        "{{ 'x' | slice(slices=999999999) | list | length }}",
        "{{ ('x' * 99999) | replace('x', 'y' * 99999) }}",
        "{{ range(99999999) | list | length }}",
        "{{ ('x' * 9999).join(range(9999) | map('string') | list) }}",
        "{{ range(9999) | join('x' * 9999) }}",
        "{{ 'x'.ljust(999999999999) }}{{ 'x' | indent(99999999) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{% set ns = namespace(n=9) %}{% for i in range(64) %}{% set ns.n = ns.n * ns.n %}"
        "{% endfor %}{{ ns.n > 0 }}",
    ],
)
def test_output_and_memory_are_bounded(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: a clear error before a small limit is passed by far."""
    monkeypatch.setattr(jinja, "MAX_OUTPUT", 1 << 20)
    with pytest.raises(TemplateUnsupported):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) ~ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    ],
)
def test_time_is_bounded(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the thread's clock: a second of work, not years."""
    monkeypatch.setattr(jinja, "MAX_CPU_S", 0.2)
    started = time.thread_time()
    with pytest.raises(TemplateUnsupported, match="too long"):
        render(source)
    assert time.thread_time() - started < 5.0


@pytest.mark.parametrize(
    "source",
    ["", "nothing at all", "{{ messages[0].content }}", "{{ raise_exception('no') }}", "{% for %}"],
)
def test_a_template_that_cannot_be_learned_says_so(source: str) -> None:
    """Oracle: the error's type and code, at load."""
    with pytest.raises(TemplateUnsupported) as caught:
        ChatFormat.learn(source, ByteTokenizer())
    assert caught.value.code == "template_unsupported"


def test_many_slow_renderings_share_one_allowance() -> None:
    """Learning renders a template a hundred times: a template that stays just under the limit of
    one rendering must not take a hundred times that. Oracle: the thread's own clock."""
    slow = (
        "{% for a in range(99999) %}{% endfor %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    template = JinjaTemplate(slow, {})
    template.render([])  # alone it is fine
    started = time.thread_time()
    with pytest.raises(TemplateUnsupported, match="too long"), template.together(0.3):
        for _ in range(1000):
            with suppress(TemplateUnsupported):  # as a probe takes it for a refusal
                template.render([])
    assert time.thread_time() - started < 3
    template.render([])  # the allowance ended with its block
