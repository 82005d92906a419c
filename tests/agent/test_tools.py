# SPDX-License-Identifier: Apache-2.0
"""What can be a tool, under which name, with which options; what is refused where it is made."""

import enum
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from freetoken_agent import (
    InvalidTool,
    ResultLimit,
    RunContext,
    Session,
    Store,
    Tool,
    tool,
)
from freetoken_agent.testing import ScriptedModel
from freetoken_agent.tool_testing import call_tool
from freetoken_agent.tools import as_tool


@tool
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


def test_a_tool_is_still_the_function() -> None:
    """Oracle: what the function returns, by position, by name and by default."""
    assert (add(1, 2), add(a=1), add(2, b=5)) == (3, 2, 7)


def test_a_bare_tool_has_the_defaults() -> None:
    """Oracle: the documented defaults."""
    assert (add.name, add.description) == ("add", "Add two numbers.")
    assert (add.timeout, add.needs_approval, add.retries) == (None, False, 1)
    assert (add.result_limit, add.validate_after, add.takes_context) == (None, False, False)


def test_options_are_kept() -> None:
    """Oracle: what was given; the name and the description replace the function's own."""
    limit = ResultLimit(10)

    @tool(
        name="plus",
        description="Sum.",
        timeout=2.5,
        needs_approval=True,
        retries=0,
        result_limit=limit,
        validate_after=True,
    )
    def add_up(a: int) -> int:
        """Not this."""
        return a

    assert (add_up.name, add_up.description, add_up.timeout) == ("plus", "Sum.", 2.5)
    assert (add_up.needs_approval, add_up.retries) == (True, 0)
    assert add_up.result_limit is limit
    assert add_up.validate_after


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("timeout", 0),
        ("timeout", -1),
        ("timeout", True),
        ("timeout", "5"),
        ("timeout", math.inf),
        ("timeout", math.nan),
        ("retries", -1),
        ("retries", 1.0),
        ("retries", True),
        ("retries", None),
        ("needs_approval", 1),
        ("validate_after", None),
        ("result_limit", 100),
        ("description", None),
        ("name", 7),
        ("retry", 1),
    ],
)
def test_a_wrong_option_is_named(option: str, value: object) -> None:
    """Oracle: the documented error, which names the option and holds the value."""
    with pytest.raises(InvalidTool, match=option) as caught:
        tool(**{option: value})  # type: ignore[call-overload]
    assert caught.value.value == value or math.isnan(caught.value.value)  # type: ignore[arg-type]
    assert caught.value.code == "invalid_tool"


@pytest.mark.parametrize("name", ["", "a b", "2nd", "-x", "a.b", "naïve", "x" * 65, "a\n"])
def test_a_name_that_models_cannot_write_is_refused(name: str) -> None:
    """Oracle: the documented limit."""
    with pytest.raises(InvalidTool, match="name"):
        tool(name=name)(lambda: 1)


def test_a_lambda_needs_a_name() -> None:
    """Its own is no name; the remedy says what to pass."""
    with pytest.raises(InvalidTool, match="name="):
        tool(lambda: 1)
    assert tool(lambda: 1, name="one")() == 1


class Counter:
    """Counts."""

    def __init__(self, start: int) -> None:
        self.count = start

    @tool(retries=3)
    def step(self, by: int) -> int:
        """Count on."""
        self.count += by
        return self.count

    @tool
    def typed(self: "Counter", by: int) -> int:
        return self.count * by

    @tool
    def with_context(self, context: RunContext[str], by: int) -> str:
        return f"{context.deps} {self.count + by}"

    @staticmethod
    def twice(by: int) -> int:
        """Double it."""
        return 2 * by

    @tool
    @staticmethod
    def thrice(by: int) -> int:
        return 3 * by

    @classmethod
    def made(cls, start: int) -> int:
        return cls(start).count

    def plain(self, by: int) -> int:
        return self.count * by

    def __call__(self, by: int) -> int:
        """Multiply."""
        return self.count * by


async def test_a_method_is_a_tool_of_its_instance() -> None:
    """Oracle: the state of two instances; the instance is no parameter."""
    one, two = Counter(1), Counter(10)
    assert set(one.step.parameters["properties"]) == {"by"}
    assert one.step(1) == 2
    assert (await call_tool(two.step, {"by": 5})).text == "15"
    assert (one.count, two.count) == (2, 15)
    assert (one.step.retries, one.step.name) == (3, "step")
    assert set(one.typed.parameters["properties"]) == {"by"}
    assert Counter.step.is_method and not one.step.is_method


async def test_a_method_may_take_a_context() -> None:
    """Oracle: the instance comes first, then the context, then the model's arguments."""
    outcome = await call_tool(Counter(1).with_context, {"by": 2}, deps="sum")
    assert outcome.text == "sum 3"
    assert set(Counter.with_context.parameters["properties"]) == {"by"}


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: tool(Counter(2).plain), 8),
        (lambda: tool(Counter.twice), 8),
        (lambda: Counter.thrice, 12),
        (lambda: Counter(1).thrice, 12),
        (lambda: tool(Counter.made), 4),
        (lambda: tool(Counter(5), name="times"), 20),
        (lambda: tool(functools.partial(lambda by, k: by * k, k=9), name="nine"), None),
    ],
    ids=["bound", "static", "static in class", "static of instance", "class", "object", "untyped"],
)
async def test_every_kind_of_callable(make: Callable[[], Tool[..., Any]], expected: object) -> None:
    """Oracle: what calling it with 4 gives; a lambda's parameters have no types."""
    if expected is None:
        with pytest.raises(InvalidTool, match="no type"):
            make()
        return
    made = make()
    assert set(made.parameters["properties"]) & {"by", "start"}
    (key,) = made.parameters["properties"]
    assert (await call_tool(made, {key: 4})).text == str(expected)


def test_an_object_takes_its_docstring_from_call() -> None:
    """Not from its class, whose text is about the object."""
    assert tool(Counter(1), name="times").description == "Multiply."


def scale(value: float, factor: float, shift: float = 0.0) -> float:
    """Scale a value.

    Args:
        value: What to scale.
        factor: By how much.
    """
    return value * factor + shift


async def test_what_a_partial_binds_is_not_the_models() -> None:
    """Oracle: the schema has what is left, under the function's name; the bound values count."""
    double = tool(functools.partial(scale, factor=2.0))
    assert (double.name, double.description) == ("scale", "Scale a value.")
    assert list(double.parameters["properties"]) == ["value", "shift"]
    assert (await call_tool(double, {"value": 4, "shift": 1})).text == "9.0"
    ten = tool(functools.partial(scale, 10.0), name="ten")
    assert list(ten.parameters["properties"]) == ["factor", "shift"]
    assert (await call_tool(ten, {"factor": 3})).text == "30.0"


async def test_a_wrapped_function_keeps_its_signature() -> None:
    """functools.wraps is followed for types and docstring; the wrapper is what is called."""

    @functools.wraps(scale)
    def wrapper(*args: Any, **kwargs: Any) -> float:
        return scale(*args, **kwargs) + 100

    wrapped = tool(wrapper)
    assert wrapped.parameters == tool(scale).parameters
    assert (await call_tool(wrapped, {"value": 1, "factor": 2})).text == "102.0"


def rest(*paths: str) -> str:
    return ""


def options(**settings: str) -> str:
    return ""


def untyped(city) -> str:  # type: ignore[no-untyped-def]
    return ""


def unknown(city: "Town") -> str:  # type: ignore[name-defined]  # noqa: F821
    return ""


def late(city: str, context: RunContext[str]) -> str:
    return ""


def by_name(*, context: RunContext[str]) -> str:
    return ""


def stream(n: int) -> Iterator[int]:
    yield n


def not_json(callback: Callable[[int], int]) -> str:
    return ""


def bad_bound(ok: int, city: "Bounded") -> str:
    return ""


class Bounded:
    """Pydantic knows nothing of it."""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (rest, r"any number of arguments; got '\*paths'"),
        (options, r"any number of arguments; got '\*\*settings'"),
        (untyped, "has no type; got 'city'"),
        (unknown, "cannot be resolved; got .*Town"),
        (late, "RunContext in the wrong place; got 'context'"),
        (by_name, "RunContext in the wrong place; got 'context'"),
        (stream, "one result, not a stream"),
        (not_json, "'callback' of tool 'not_json' has a type that no JSON schema"),
        (bad_bound, "'city' of tool 'bad_bound' has a type that no JSON schema"),
        (Counter, "a tool is a function"),
        (classmethod(lambda cls: cls), "a tool is a function"),
        (3, "a tool is a function"),
        (add, "a tool already; got 'add'"),
        (print, "any number of arguments"),
        (min, "no signature"),
    ],
    ids=lambda value: getattr(value, "__name__", None) if callable(value) else None,
)
def test_what_no_model_can_call_is_refused_where_it_is_made(function: Any, message: str) -> None:
    """Oracle: the error says what, the value, and a remedy."""
    with pytest.raises(InvalidTool, match=message) as caught:
        tool(function, name="not_json" if function is not_json else function_name(function))
    assert caught.value.remedy


def function_name(function: Any) -> str:
    return getattr(function, "__name__", "thing")


def test_a_context_that_exists_only_for_type_checkers_is_explained() -> None:
    """The remedy says where to import it."""
    with pytest.raises(InvalidTool, match="outside of TYPE_CHECKING"):
        tool(unknown)


def test_types_of_an_enclosing_function_are_found() -> None:
    """A hint in quotes may name a class that only exists where the tool is made."""

    class Local(enum.Enum):
        ONE = "one"

    @tool
    def greet(names: "list[Local] | None" = None) -> str:
        return str(names)

    hint = list[Local] | None
    assert greet.parameters == tool(name="x")(with_hint(hint)).parameters


def with_hint(hint: Any) -> Callable[..., str]:
    def greet(names: Any = None) -> str:
        return ""

    greet.__annotations__["names"] = hint
    return greet


def test_a_tool_of_a_schema_is_one_dict() -> None:
    """Oracle: the given schema, titles left out; options as with `@tool`."""
    schema = {
        "title": "Args",
        "properties": {"title": {"type": "string", "title": "T"}},
        "type": "object",
    }
    made = Tool.from_schema("far_away", schema, lambda arguments: arguments, timeout=3)
    expected = {"type": "object", "properties": {"title": {"type": "string"}}}
    assert (made.name, made.parameters, made.timeout) == ("far_away", expected, 3)
    assert Tool.from_schema("empty", {}, dict).parameters == {"type": "object", "properties": {}}


def test_a_schema_that_is_no_object_is_refused() -> None:
    """Arguments are named; and what JSON does not have is no schema."""
    with pytest.raises(InvalidTool, match="no object; got 'array'"):
        Tool.from_schema("wrong", {"type": "array"}, dict)
    with pytest.raises(InvalidTool, match="no JSON schema"):
        Tool.from_schema("wrong", {"default": {1, 2}}, dict)


def test_as_tool_takes_tools_and_functions() -> None:
    """A tool stays the same object; a function becomes what `@tool` makes."""
    assert as_tool(add) is add
    assert as_tool(scale).parameters == tool(scale).parameters


def test_a_tool_cannot_be_changed() -> None:
    """Neither its fields nor its schema: sessions may hold it."""
    with pytest.raises(AttributeError):
        add.name = "sub"  # type: ignore[misc]
    with pytest.raises(TypeError):
        add.parameters["properties"]["a"] = {}


def test_a_session_takes_tools_as_they_are(memory_store: Store) -> None:
    """Oracle: the template's rendering holds name, description and schema."""
    session: Session = memory_store.create("s", ScriptedModel(), tools=[add])
    shown = session.render()
    assert '"name": "add", "description": "Add two numbers."' in shown
    assert '"a": {"type": "integer"}, "b": {"type": "integer", "default": 1}' in shown
    assert not session.set_tools([add])  # nothing changed
