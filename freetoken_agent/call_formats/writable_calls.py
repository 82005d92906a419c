# SPDX-License-Identifier: Apache-2.0
"""Which arguments a format of calls can hold: where strings stand without escapes, none may contain
the literal that ends it, or the call would be read as another one."""

import json
from collections.abc import Iterator
from typing import Any

from ..chat_templates.items import Item
from ..errors import ArgumentUnwritable
from .call_format import CallFormat, QuotedCalls, TaggedCalls


def check_writable(calls: CallFormat | None, item: Item, unit: str) -> None:
    """ArgumentUnwritable if the call of this item, written as `unit`, would not be read back."""
    arguments = item.arguments or {}
    if isinstance(calls, TaggedCalls):
        end, strings = calls.close, _written(arguments)
        broken = unit.count(end) > len(arguments)  # some templates escape what they write as JSON
    elif isinstance(calls, QuotedCalls):
        end, strings = calls.quotes.close, _strings(arguments)
        broken = True
    else:
        return
    for key, text in strings:
        if broken and end in text:
            raise ArgumentUnwritable(
                f"the argument {key!r} of {item.name!r} holds what ends a value in this model's "
                "format of calls",
                value=end,
                remedy="write it otherwise, for example with a blank inside the tag",
            )


def _written(arguments: Any) -> Iterator[tuple[str, str]]:
    """Each argument with its key, as the text that stands between the tags."""
    for key, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        yield key, f"{key} {text}"


def _strings(arguments: Any) -> Iterator[tuple[str, str]]:
    """Every string and key, at any depth, with the key of its argument."""

    def inside(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, list | tuple):
            for one in value:
                yield from inside(one)
        elif hasattr(value, "items"):
            for key, one in value.items():
                yield key
                yield from inside(one)

    for key, value in arguments.items():
        for text in (key, *inside(value)):
            yield key, text
