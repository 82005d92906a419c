# SPDX-License-Identifier: Apache-2.0
"""Chat templates are programs from strangers: run them in a sandbox, with a frozen clock.

The environment equals the one that `transformers` renders chat templates with (trimmed blocks,
`loopcontrols`, `{% generation %}`, a `tojson` that escapes no HTML), plus limits: a rendering may
not exceed `MAX_OUTPUT` characters or `MAX_CPU_S` seconds of its thread's CPU time, nor build a
longer string on the way; the renderings inside a `together` share one allowance. Every refusal, the
template's own `raise_exception` included, is a TemplateUnsupported.
"""

import functools
import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import jinja2
import jinja2.parser
import jinja2.sandbox
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.visitor import NodeTransformer

from ..errors import TemplateUnsupported

MAX_OUTPUT = 64 << 20  # characters
MAX_CPU_S = 20.0
MAX_LEARN_CPU_S = 60.0  # real templates take 0.1 to 2 s
MAX_BITS = 1 << 20  # of a number


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}` marks assistant text; here it only renders."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Watched(NodeTransformer):
    """Puts a tick at the head of every loop and macro, and watches `~`."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.body.insert(0, _tick_at(node.lineno))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        self.generic_visit(node)
        node.body.insert(0, _tick_at(node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        name = nodes.Name("_concat", "load", lineno=node.lineno)
        return nodes.Call(name, node.nodes, [], None, None, lineno=node.lineno)


def _tick_at(line: int) -> nodes.ExprStmt:
    name = nodes.Name("_tick", "load", lineno=line)
    return nodes.ExprStmt(nodes.Call(name, [], [], None, None, lineno=line), lineno=line)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with bounds on time and on what strings and numbers may grow to."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        self.limit = threading.local()  # deadline_s, and in a `together` last_s, of this thread
        self.globals.update(raise_exception=_raise_exception, _tick=self.tick, _concat=_concat)
        self.filters["tojson"] = _tojson
        for name in (_GROWING | _PARTING) & self.filters.keys():
            self.filters[name] = _bounded(name, self.filters[name])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Watched().visit(super()._parse(source, name, filename))
        return tree

    def tick(self) -> None:
        if time.thread_time() > self.limit.deadline_s:
            raise _too_slow(MAX_CPU_S)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        receiver = getattr(function, "__self__", None)
        if isinstance(receiver, str):
            _check_growth(function.__name__, receiver, [*args, *kwargs.values()])
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _check_growth("format", left, [right])
        elif operator == "+" and isinstance(left, str) and isinstance(right, str):
            _check_size(len(left) + len(right))
        elif operator in ("*", "**"):
            _check_product(operator, left, right)
        return super().call_binop(context, operator, left, right)


_GROWING = frozenset(
    "center ljust rjust zfill indent wordwrap replace join format expandtabs".split()
)


_PARTING = frozenset(("batch", "slice"))  # they fill up to, or loop over, the number they get


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that first checks what it is asked to make."""
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0  # a context comes first

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        value, *others = args[skipped:]
        if name == "join":  # the filter's receiver is the list
            value, others = (str(others[0]) if others else ""), [value]
        if name in _PARTING:
            numbers = (n for n in (*others, *kwargs.values()) if isinstance(n, int))
            if max(numbers, default=0) > jinja2.sandbox.MAX_RANGE:
                raise _too_long()
        elif isinstance(value, str):
            _check_growth(name, value, [*others, *kwargs.values()])
        return function(*args, **kwargs)

    return checked


def _check_growth(name: str, text: str, arguments: Sequence[Any]) -> None:
    """Refuse a string method or filter whose result would be huge."""
    if name == "replace" and len(arguments) >= 2 and isinstance(arguments[1], str):
        _check_size(len(text) + text.count(str(arguments[0])) * len(arguments[1]))
    elif name == "join" and arguments and isinstance(arguments[0], Sized):
        _check_size(len(text) * len(arguments[0]))
    elif name == "format" and re.search(r"\d{7}", text):
        raise _too_long()
    elif name in _GROWING:
        widths = [value for value in arguments if isinstance(value, int)]
        _check_size(max(widths, default=0) * (1 + text.count("\n") + text.count("\t")))


def _check_product(operator: str, left: Any, right: Any) -> None:
    for value, times in ((left, right), (right, left)):
        if isinstance(value, str | list | tuple) and isinstance(times, int):
            _check_size(len(value) * times)
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length()
        if bits + right.bit_length() > MAX_BITS:
            raise TemplateUnsupported(
                "the chat template computes a huge number", limit=f"{MAX_BITS} bits"
            )


def _concat(*values: Any) -> str:
    """The operator `~`."""
    texts = [str(value) for value in values]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _check_size(size: int) -> None:
    if size > MAX_OUTPUT:
        raise _too_long()


def _too_long() -> TemplateUnsupported:
    return TemplateUnsupported(
        "the chat template's output is too long",
        limit=f"{MAX_OUTPUT} characters",
        remedy="use another chat template or a shorter conversation",
    )


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


def _too_slow(limit_s: float) -> TemplateUnsupported:
    return TemplateUnsupported(
        "the chat template runs too long",
        limit=f"{limit_s:g} s of CPU time",
        remedy="use another chat template",
    )


# Names in a template that are no options of its own.
_PROVIDED = frozenset(
    "messages tools documents add_generation_prompt bos_token eos_token unk_token pad_token "
    "raise_exception strftime_now _tick _concat range dict lipsum cycler joiner namespace".split()
)


class JinjaTemplate:
    """A compiled chat template. `variables`: what else it reads, which options may set.

    Rendering is pure: the same arguments give the same text. Any thread may render; the time limit
    counts the rendering thread's own CPU time.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._environment = _Environment()
        self._special_tokens = dict(special_tokens)
        try:
            self._template = self._environment.from_string(source)
            found = meta.find_undeclared_variables(self._environment.parse(source))
        except jinja2.TemplateError as error:
            raise TemplateUnsupported(
                "the chat template does not compile", value=str(error), remedy="fix the template"
            ) from error
        self.variables = frozenset(found) - _PROVIDED - self._special_tokens.keys()

    @contextmanager
    def together(self, cpu_s: float = MAX_LEARN_CPU_S) -> Iterator[None]:
        """This thread's renderings inside may take `cpu_s` in all, or TemplateUnsupported; probes
        that take a slow rendering for a refusal do not hide it."""
        limit = self._environment.limit
        limit.last_s = time.thread_time() + cpu_s
        try:
            yield
            if time.thread_time() > limit.last_s:
                raise _too_slow(cpu_s)
        finally:
            del limit.last_s

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
        limit, now = self._environment.limit, time.thread_time()
        limit.deadline_s = min(now + MAX_CPU_S, getattr(limit, "last_s", math.inf))
        if now > limit.deadline_s:
            raise _too_slow(MAX_LEARN_CPU_S)
        blocks: list[str] = []
        size = 0
        try:
            for block in self._template.generate(arguments):
                blocks.append(block)
                size += len(block)
                _check_size(size)
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
