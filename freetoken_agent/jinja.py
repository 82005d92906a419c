# SPDX-License-Identifier: Apache-2.0
"""Chat templates are programs from strangers: run them in a sandbox, with a frozen clock.

The environment equals the one that `transformers` renders chat templates with (trimmed blocks,
`loopcontrols`, `{% generation %}`, a `tojson` that escapes no HTML), plus limits: a rendering may
not exceed `MAX_OUTPUT` characters or `MAX_CPU_S` seconds of its thread's CPU time. Every refusal,
the template's own `raise_exception` included, is a TemplateUnsupported.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from jinja2.ext import Extension, loopcontrols

from .errors import TemplateUnsupported

MAX_OUTPUT = 64 << 20  # characters
MAX_CPU_S = 20.0


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}` marks assistant text; here it only renders."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox with a tick at the head of every loop body and a bound on built strings."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        self.limit = threading.local()  # deadline_s of the rendering on this thread

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(jinja2.nodes.For)):
            tick = jinja2.nodes.Call(
                jinja2.nodes.Name("_tick", "load"), [], [], None, None, lineno=loop.lineno
            )
            loop.body.insert(0, jinja2.nodes.ExprStmt(tick, lineno=loop.lineno))
        return tree

    def tick(self) -> None:
        if time.thread_time() > self.limit.deadline_s:
            raise TemplateUnsupported(
                "the chat template runs too long",
                limit=f"{MAX_CPU_S:g} s of CPU time",
                remedy="use another chat template",
            )

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator in ("*", "**"):
            _check_product(operator, left, right)
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, str) and len(result) > MAX_OUTPUT:
            raise _too_long()
        return result


def _too_long() -> TemplateUnsupported:
    return TemplateUnsupported(
        "the chat template's output is too long",
        limit=f"{MAX_OUTPUT} characters",
        remedy="use another chat template or a shorter conversation",
    )


def _check_product(operator: str, left: Any, right: Any) -> None:
    for value, times in ((left, right), (right, left)):
        if isinstance(value, str | list | tuple) and isinstance(times, int):
            if len(value) * times > MAX_OUTPUT:
                raise _too_long()
    if operator == "**" and isinstance(right, int | float) and abs(right) > 64:
        raise TemplateUnsupported("the chat template computes a huge power", value=right, limit=64)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _clock(now_s: float) -> Callable[[str], str]:
    moment = datetime.fromtimestamp(now_s, UTC)
    return moment.strftime


class JinjaTemplate:
    """A compiled chat template. Rendering is pure: the same arguments give the same text. Any
    thread may render; the time limit counts the rendering thread's own CPU time."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._environment = _Environment()
        self._environment.filters["tojson"] = _tojson
        self._environment.globals["raise_exception"] = _raise_exception
        self._environment.globals["_tick"] = self._environment.tick
        self._special_tokens = dict(special_tokens)
        self.uses_clock = "strftime_now" in source
        try:
            self._template = self._environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateUnsupported(
                "the chat template does not compile", value=str(error), remedy="fix the template"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
        now_s: float = 0.0,
    ) -> str:
        """The template's text. Whatever goes wrong in it becomes a TemplateUnsupported."""
        arguments: dict[str, Any] = dict(self._special_tokens)
        arguments.update(documents=None, strftime_now=_clock(now_s))
        arguments.update(variables or {})
        arguments.update(
            messages=list(messages), tools=tools, add_generation_prompt=add_generation_prompt
        )
        self._environment.limit.deadline_s = time.thread_time() + MAX_CPU_S
        blocks: list[str] = []
        size = 0
        try:
            for block in self._template.generate(arguments):
                blocks.append(block)
                size += len(block)
                if size > MAX_OUTPUT:
                    raise _too_long()
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise TemplateUnsupported(
                "the chat template refuses this conversation",
                value=str(error) or type(error).__name__,
                remedy="change the order or the kinds of the messages",
            ) from error
        except (RecursionError, ArithmeticError, MemoryError) as error:
            raise TemplateUnsupported(
                "the chat template fails", value=type(error).__name__, remedy="fix the template"
            ) from error
        return "".join(blocks)
