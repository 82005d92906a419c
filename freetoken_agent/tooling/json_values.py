# SPDX-License-Identifier: Apache-2.0
"""Values that JSON has: what arguments, meta data and schemas may hold, and when two are equal."""

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

from ..errors import InvalidEdit

MAX_DEPTH = 64  # levels of lists and objects; templates and encoders recurse


def plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a JSON object. InvalidEdit for anything that JSON does not have."""
    try:
        text = json.dumps(dict(value), allow_nan=False, ensure_ascii=False)
        copied: dict[str, Any] = json.loads(text.encode())
    except (TypeError, ValueError) as error:
        raise InvalidEdit("this must be a JSON object", value=str(error)) from error
    except RecursionError as error:
        raise _too_deep() from error
    if not is_plain(copied):
        raise _too_deep()
    return copied


class _Frozen:
    """Refuses every change; a copy, also a deep one or through pickle, is an ordinary value."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError(
            "a segment is a snapshot and cannot be changed: change a copy.deepcopy() of this"
        )

    __setitem__ = __delitem__ = _refuse
    clear = pop = _refuse


class FrozenDict(_Frozen, dict[str, Any]):
    """A JSON object that does not change."""

    __ior__ = _Frozen._refuse
    popitem = setdefault = update = _Frozen._refuse

    def __copy__(self) -> dict[str, Any]:
        return dict(self)

    def __deepcopy__(self, _: object) -> dict[str, Any]:
        return {key: thawed(value) for key, value in self.items()}

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (dict(self),)


class FrozenList(_Frozen, list[Any]):
    """A JSON array that does not change."""

    __iadd__ = __imul__ = _Frozen._refuse
    append = extend = insert = remove = reverse = sort = _Frozen._refuse

    def __copy__(self) -> list[Any]:
        return list(self)

    def __deepcopy__(self, _: object) -> list[Any]:
        return [thawed(value) for value in self]

    def __reduce__(self) -> tuple[type[list[Any]], tuple[list[Any]]]:
        return list, (list(self),)


def frozen(value: Mapping[str, Any]) -> FrozenDict:
    """A copy of a JSON object, at every depth one that refuses changes. It is a dict, so that
    encoders take it as one."""
    return FrozenDict({key: _frozen(item) for key, item in value.items()})


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return frozen(value)
    if isinstance(value, list | tuple):
        return FrozenList(_frozen(item) for item in value)
    return value


def thawed(value: Any) -> Any:
    """A copy of a JSON value that may be changed."""
    if isinstance(value, Mapping):
        return {key: thawed(item) for key, item in value.items()}
    return [thawed(item) for item in value] if isinstance(value, list | tuple) else value


def read(text: str) -> Any:
    """The value of a JSON text. ValueError for what JSON does not have, or what is too deep."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is too deep") from error
    if not is_plain(value):
        raise ValueError(f"it is deeper than {MAX_DEPTH} levels, or holds a number that is none")
    return value


def is_plain(value: object) -> bool:
    """Whether a parsed value is within the depth limit and holds no NaN or infinity."""
    level: list[object] = [value]
    for _ in range(MAX_DEPTH + 1):
        deeper: list[object] = []
        for item in level:
            if isinstance(item, dict):
                deeper += item.values()
            elif isinstance(item, list):
                deeper += item
            elif isinstance(item, float) and not math.isfinite(item):
                return False
        if not deeper:
            return True
        level = deeper
    return False


def whole_characters(value: Any) -> Any:
    """A parsed value with U+FFFD for halves of surrogate pairs, which JSON can write but no
    encoding holds."""
    text = json.dumps(value, ensure_ascii=False)
    kept = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value if kept == text else json.loads(kept)


def equal(left: object, right: object) -> bool:
    """Whether two values are the same JSON: the order of keys does not count, and 1.0 is 1, but
    true is not."""
    return _canonical(left) == _canonical(right)


def _canonical(value: object) -> str:
    return json.dumps(_one_number(value), sort_keys=True)


def _one_number(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _one_number(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_one_number(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _too_deep() -> InvalidEdit:
    return InvalidEdit("a JSON value is too deep", limit=f"{MAX_DEPTH} levels")
