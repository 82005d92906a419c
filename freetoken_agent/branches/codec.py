# SPDX-License-Identifier: Apache-2.0
"""What the storage layer keeps for us: msgpack maps with a version, and nothing executable.

    segment   v id kind content text ids origin name arguments call_id error replaces source meta
    node      v gap text joins stale
    branch    v tail position tip pins calls      log entry   v label node tail time
    session   v model tokenizer template fingerprint variables now_s history_thinking meta initial

Token ids are packed as little-endian uint32, integers beyond 64 bits as decimal digits. A higher
version is StoreNewer, anything else that does not read is StoreDamaged. A purged segment leaves a
tombstone: its id and nothing else.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import msgpack  # type: ignore[import-untyped]

from freetoken_storage.errors import StoreDamaged, StoreNewer

from .path import Body, Place, Tail

VERSION = 1
_INTEGER = 1  # extension type of an integer beyond 64 bits
_SURROGATES = "surrogatepass"  # a model may write "\\ud800" into the arguments of a call


@dataclass(frozen=True)
class Head:
    """Where a branch stands: a node (0 is the empty path) and the state of the turn there."""

    node: int
    tail: Tail


CallState = Literal["approved", "denied", "running", "ended", "finished"]


@dataclass(frozen=True)
class CallMark:
    """How far an open call has come; `segment` is the call's. `text` and `error`: why it was
    denied, or the result of one that has ended (a hook is still to see it) or finished, before it
    enters the path; `live`: what the model is to see instead of that result."""

    segment: str
    state: CallState
    text: str = ""
    error: bool = False
    live: str | None = None


@dataclass(frozen=True)
class BranchBody:
    """`position`: how many log steps are applied. `tip`: the head behind the last step, kept while
    some are undone. `pins`: segment ids whose states are protected. `calls`: of the open calls at
    the head, those that were decided or started; `rewind`, `undo` and `redo` forget them."""

    tail: Tail = "closed"
    position: int = 0
    tip: Head | None = None
    pins: tuple[str, ...] = ()
    calls: tuple[CallMark, ...] = ()


@dataclass(frozen=True)
class LogEntry:
    """A step: its label, and the head it started from. Where it led is the next entry's start."""

    label: str
    before: Head
    time_s: float


@dataclass(frozen=True)
class Initial:
    """A preamble asked for at creation and not yet committed."""

    system: str | None
    tools: str | None


@dataclass(frozen=True)
class SessionBody:
    """What a session fixes at creation, and the digests that bind it to a model."""

    model: str
    tokenizer: str
    template: str
    fingerprint: Mapping[str, str]
    fingerprint_digest: bytes
    variables: Mapping[str, Any]
    now_s: float
    history_thinking: str
    meta: Mapping[str, Any] = field(default_factory=dict)
    initial: Initial | None = None


def pack_segment(body: Body) -> bytes:
    return _pack(
        {
            "id": body.id,
            "kind": body.kind,
            "content": body.content,
            "text": None if body.text == body.content else body.text,
            "ids": _pack_ids(body.ids),
            "origin": body.origin,
            "name": body.name,
            "arguments": body.arguments,
            "call_id": body.call_id,
            "error": body.error,
            "replaces": body.replaces,
            "source": body.source,
            "meta": body.meta,
        }
    )


def unpack_segment(data: bytes) -> Body | None:
    """None for a tombstone."""
    fields = _unpack(data)
    if "purged" in fields:
        return None
    with _Reading():
        fields["ids"] = _unpack_ids(fields["ids"])
        if fields["text"] is None:
            fields["text"] = fields["content"]
        return Body(**fields)


def pack_tombstone(segment_id: str) -> bytes:
    return _pack({"purged": segment_id})


def pack_node(place: Place) -> bytes:
    return _pack_node(place.gap_ids, place.gap_text, place.joins, place.stale)


@lru_cache(maxsize=4096)  # a session has few different gaps and an early edit writes them all
def _pack_node(gap_ids: tuple[int, ...], gap_text: str, joins: bool, stale: bool) -> bytes:
    return _pack({"gap": _pack_ids(gap_ids), "text": gap_text, "joins": joins, "stale": stale})


def unpack_node(data: bytes, body: Body, node: int) -> Place:
    fields = _unpack(data)
    with _Reading():
        return Place(
            body=body,
            gap_ids=_unpack_ids(fields["gap"]),
            gap_text=fields["text"],
            joins=fields["joins"],
            stale=fields["stale"],
            node=node,
        )


def pack_branch(body: BranchBody) -> bytes:
    tip = None if body.tip is None else [body.tip.node, body.tip.tail]
    calls = [list(astuple(mark)) for mark in body.calls]
    return _pack(
        {
            "tail": body.tail,
            "position": body.position,
            "tip": tip,
            "pins": list(body.pins),
            **({"calls": calls} if calls else {}),
        }
    )


def unpack_branch(data: bytes) -> BranchBody:
    """An empty body is a branch that was just created."""
    if not data:
        return BranchBody()
    fields = _unpack(data)
    with _Reading():
        tip = None if fields["tip"] is None else Head(*fields["tip"])
        calls = tuple(CallMark(*mark) for mark in fields.get("calls", ()))
        return BranchBody(fields["tail"], fields["position"], tip, tuple(fields["pins"]), calls)


def without_tip(body: BranchBody) -> BranchBody:
    """The head behind the last undone step is gone, so that step cannot be redone."""
    return replace(body, tip=None)


def pack_log(entry: LogEntry) -> bytes:
    before = entry.before
    return _pack(
        {"label": entry.label, "node": before.node, "tail": before.tail, "time": entry.time_s}
    )


def unpack_log(data: bytes) -> LogEntry:
    fields = _unpack(data)
    with _Reading():
        return LogEntry(fields["label"], Head(fields["node"], fields["tail"]), fields["time"])


def pack_session(body: SessionBody) -> bytes:
    fields = dict(vars(body))
    initial = body.initial
    fields["initial"] = None if initial is None else [initial.system, initial.tools]
    return _pack(fields)


def started(body: SessionBody) -> SessionBody:
    """Without the preamble it was waiting for."""
    return replace(body, initial=None)


def unpack_session(data: bytes) -> SessionBody:
    fields = _unpack(data)
    with _Reading():
        initial = fields["initial"]
        fields["initial"] = None if initial is None else Initial(*initial)
        return SessionBody(**fields)


class _Reading:
    """Turns what a malformed record raises into StoreDamaged."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if isinstance(error, KeyError | TypeError | ValueError | struct.error):
            raise StoreDamaged(
                "a record of the session store does not have its fields",
                value=str(error),
                remedy="run `freetoken-agent sessions verify`",
            ) from error


def _pack(fields: Mapping[str, Any]) -> bytes:
    packed: bytes = msgpack.packb(
        {"v": VERSION, **fields}, unicode_errors=_SURROGATES, default=_pack_integer
    )
    return packed


def _pack_integer(value: object) -> msgpack.ExtType:
    """An integer beyond 64 bits, which JSON has and msgpack has not, as decimal digits."""
    if not isinstance(value, int):
        raise TypeError(f"not a value of a record: {type(value).__name__}")
    return msgpack.ExtType(_INTEGER, str(value).encode())


def _unpack_extension(code: int, data: bytes) -> int:
    if code != _INTEGER:
        raise ValueError(f"unknown extension {code}")
    return int(data)


def _unpack(data: bytes) -> dict[str, Any]:
    try:
        fields: dict[str, Any] = msgpack.unpackb(
            data, unicode_errors=_SURROGATES, ext_hook=_unpack_extension
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise StoreDamaged(
            "a record of the session store is not msgpack",
            value=str(error),
            remedy="run `freetoken-agent sessions verify`",
        ) from error
    version = fields.pop("v", None) if isinstance(fields, dict) else None
    if not isinstance(version, int):
        raise StoreDamaged("a record of the session store has no version", value=version)
    if version > VERSION:
        raise StoreNewer(
            "the session was written by a newer version",
            value=version,
            limit=VERSION,
            remedy="update freetoken-agent",
        )
    return fields


def _pack_ids(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


def _unpack_ids(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // 4}I", data)
