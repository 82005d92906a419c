# SPDX-License-Identifier: Apache-2.0
"""A ModelSpec as JSON and back, so that converted weights need no configuration of another dialect.

A record is an object with the name of its type. Fields that are absent take their defaults, so that
a spec may grow; unknown fields and types are errors.
"""

import math
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from . import spec as specs
from .specs import attention, convolution, gated_delta, mamba, mlp, moe, parallel, rope

_MODULES = (specs, attention, convolution, gated_delta, mamba, mlp, moe, parallel, rope)
_TYPES: Mapping[str, type] = {
    name: kind
    for module in _MODULES
    for name, kind in vars(module).items()
    if isinstance(kind, type) and is_dataclass(kind) and kind.__module__ == module.__name__
}
_INFINITY = "infinity"  # which JSON has no number for
_MAX_WHOLE = 1 << 48


def describe(spec: specs.ModelSpec) -> dict[str, Any]:
    """A spec as JSON values."""
    described: dict[str, Any] = _describe(spec)
    return described


def read(described: object) -> specs.ModelSpec:
    """The spec that was described. ValueError if this is none, or of a newer kind."""
    value = _read(specs.ModelSpec, described)
    assert isinstance(value, specs.ModelSpec)
    return value


def _describe(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_describe(item) for item in value]
    if is_dataclass(value):
        record = {x.name: _describe(getattr(value, x.name)) for x in fields(value)}
        return {"type": type(value).__name__, **record}
    return _INFINITY if value == math.inf else value


def _read(hint: Any, value: Any) -> Any:
    """A value of the annotated type; ValueError for another."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _read_union(get_args(hint), value)
    if origin is Literal:
        return _checked(value, value in get_args(hint), hint)
    if origin is tuple:
        return _read_tuple(get_args(hint), value, hint)
    if hint is float:
        number = math.inf if value == _INFINITY else value
        sound = type(number) in (int, float) and not math.isnan(number)
        return float(_checked(number, sound, hint))
    if hint is int:
        return _checked(value, type(value) is int and abs(value) <= _MAX_WHOLE, hint)
    if hint in (bool, str, types.NoneType):
        return _checked(value, type(value) is hint, hint)
    return _read_record(hint, value)


def _read_union(choices: tuple[Any, ...], value: Any) -> Any:
    for choice in choices:
        try:
            return _read(choice, value)
        except ValueError as error:
            reason = error
    raise reason


def _read_tuple(items: tuple[Any, ...], value: Any, hint: Any) -> tuple[Any, ...]:
    _checked(value, isinstance(value, list), hint)
    if len(items) == 2 and items[1] is Ellipsis:
        return tuple(_read(items[0], item) for item in value)
    _checked(value, len(items) == len(value), hint)
    return tuple(_read(kind, item) for kind, item in zip(items, value, strict=True))


def _read_record(hint: Any, value: Any) -> Any:
    """A dataclass, or any record of ours where the annotation is a protocol."""
    _checked(value, isinstance(value, dict), hint)
    kind = _TYPES.get(value.get("type"))
    allowed = kind is hint if is_dataclass(hint) else hasattr(kind, "parameter_shapes")
    if kind is None or not allowed:
        raise ValueError(f"{value.get('type')!r} is not a kind of {hint.__name__}")
    given = {name: item for name, item in value.items() if name != "type"}
    hints = get_type_hints(kind)
    names = {field.name for field in fields(kind)}
    if given.keys() - names:
        raise ValueError(f"unknown fields of {kind.__name__}: {sorted(given.keys() - names)}")
    try:
        return kind(**{name: _read(hints[name], item) for name, item in given.items()})
    except (TypeError, AssertionError) as error:
        raise ValueError(f"{kind.__name__}: {error}") from error


def _checked(value: Any, sound: bool, hint: Any) -> Any:
    if not sound:
        raise ValueError(f"{value!r} is not {hint}")
    return value
