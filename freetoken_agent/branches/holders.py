# SPDX-License-Identifier: Apache-2.0
"""Who else holds a purged text: other segments, other places of the session, other sessions."""

import json
from collections.abc import Iterable, Iterator, Mapping

from freetoken_storage.records import SessionRecord

from . import codec, lookups
from .codec import SessionBody
from .handle import Context
from .path import Body


class Needles:
    """The texts of a purged segment: what its caller gave and what the template made of it; of a
    call its unit and its arguments. Blanks at the ends do not count. Its name and meta data are
    not searched for: they are often a word that anything may hold."""

    def __init__(self, body: Body) -> None:
        texts = [body.content, body.text]
        if body.arguments:
            texts.append(_canonical(body.arguments))
        self._texts = {text.strip() for text in texts} - {""}

    def in_any(self, texts: Iterable[str]) -> bool:
        """Whether one of these texts contains one of the purged ones."""
        return any(needle in text for text in texts for needle in self._texts)


def other_segments(context: Context, needles: Needles) -> set[str]:
    """Ids of the session's segments whose text, call or meta data contain the text."""
    return {
        body.id for body in lookups.all_bodies(context) if needles.in_any(_texts_of_segment(body))
    }


def other_places(context: Context, needles: Needles) -> tuple[str, ...]:
    """What of the session itself contains the text, in words."""
    name = context.name
    body = codec.unpack_session(context.sessions.get(name).body)
    places = {**_session_texts(body), "labels of undo steps": [], "branch names": []}
    for record in context.sessions.branches(name):
        places["branch names"].append(record.name)
        entries = context.sessions.log(name, record.name)
        places["labels of undo steps"] += [codec.unpack_log(e.body).label for e in entries]
    return tuple(where for where, texts in places.items() if needles.in_any(texts))


def other_sessions(context: Context, needles: Needles) -> tuple[str, ...]:
    """Names of the store's other sessions that hold the text anywhere."""
    return tuple(
        record.name
        for record in context.sessions.list()
        if record.name != context.name and needles.in_any(_all_texts(context, record))
    )


def _all_texts(context: Context, record: SessionRecord) -> Iterator[str]:
    yield record.name
    for texts in _session_texts(codec.unpack_session(record.body)).values():
        yield from texts
    for branch in context.sessions.branches(record.name):
        yield branch.name
        for entry in context.sessions.log(record.name, branch.name):
            yield codec.unpack_log(entry.body).label
    for stored in context.sessions.all_segments(record.name):
        body = codec.unpack_segment(stored.body)
        if body is not None:
            yield from _texts_of_segment(body)


def _texts_of_segment(body: Body) -> Iterator[str]:
    yield from (body.content, body.text, body.name or "", body.call_id or "")
    if body.arguments is not None:
        yield _canonical(body.arguments)
        yield from _leaves(body.arguments)
    yield from _leaves(body.meta)


def _session_texts(body: SessionBody) -> dict[str, list[str]]:
    return {
        "session meta": list(_leaves(body.meta)),
        "template options": list(_leaves(body.variables)),
    }


def _leaves(value: object) -> Iterator[str]:
    """Every key and scalar of a JSON value as text."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value if isinstance(value, str) else json.dumps(value)


def _canonical(arguments: Mapping[str, object]) -> str:
    return json.dumps(arguments, sort_keys=True, ensure_ascii=False)
