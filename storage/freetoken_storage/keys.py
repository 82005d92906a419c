# SPDX-License-Identifier: Apache-2.0
"""The keys of both databases. The first byte is the kind; numbers are big-endian, so that key order
is number order; a variable part, where there is one, comes last.

sessions/                                                   value (see values.py for its frame)
    F                                                       format: name, version
    c                                                       the next session number
    m  key                                                  bytes of the layer above (binding)
    n  session name                                         session number, created_s
    i  session:8                                            updated_s, next node, next branch
    d  session:8                                            the session's body
    b  session:8  branch name                               head, version, log length, body …
    l  session:8  branch:8  sequence:8                      one log entry
    t  session:8  node:8                                    parent, depth, hash, segment, body
    s  session:8  segment id                                the segment's body
    x  session:8  hash of the owning key:16  index:4        a piece of a value above 64 KiB

A session has a number, so that its name is stored once and a deleted and recreated session never
meets old values; likewise branches in the keys of their logs.

states/
    F                                                       format: name, version
    c                                                       next blob number, next stamp
    r  digest:32                                            parent, meta, buffer sizes, blob, stamp
    k  parent digest:32  digest:32                          (empty) children of a snapshot
    u  stamp:8  digest:32                                   (empty) oldest use first
    d  blob:8  index:4                                      a piece of a snapshot's buffers
    w  blob:8                                               (empty) a blob still being written
    o  owner                                                digests pinned by this owner
    x  first 8 bytes of owner  hash of that key:16  index:4 a piece of a list of pins above 64 KiB
"""

import struct

import xxhash

FORMAT = b"F"
COUNTERS = b"c"

META = b"m"
NAME = b"n"
INFO = b"i"
BODY = b"d"
BRANCH = b"b"
LOG = b"l"
NODE = b"t"
SEGMENT = b"s"
PIECE = b"x"
SESSION_KINDS = (INFO, BODY, BRANCH, LOG, NODE, SEGMENT, PIECE)  # all keyed by session number

RECORD = b"r"
CHILD = b"k"
USE = b"u"
CHUNK = b"d"
WRITING = b"w"
OWNER = b"o"

DIGEST_BYTES = 32
NUMBER_BYTES = 8
MAX_KEY_BYTES = 511  # LMDB's own limit

MAX_NUMBER = 2**64 - 1
_NUMBER = struct.Struct(">Q")
_PAIR = struct.Struct(">QQ")
_INDEX = struct.Struct(">I")
_BLOB = struct.Struct(">QI")


def meta(key: bytes) -> bytes:
    return META + key


def name(encoded: bytes) -> bytes:
    return NAME + encoded


def scope(kind: bytes, session: int) -> bytes:
    """The prefix of everything of one kind in a session; the whole key of INFO and BODY."""
    return kind + _NUMBER.pack(session)


def branch(session: int, encoded: bytes) -> bytes:
    return scope(BRANCH, session) + encoded


def logs(session: int, branch_number: int) -> bytes:
    """The prefix of one branch's log."""
    return LOG + _PAIR.pack(session, branch_number)


def log(session: int, branch_number: int, sequence: int) -> bytes:
    return logs(session, branch_number) + _NUMBER.pack(sequence)


def node(session: int, node_id: int) -> bytes:
    return NODE + _PAIR.pack(session, node_id)


def segment(session: int, encoded: bytes) -> bytes:
    return scope(SEGMENT, session) + encoded


def pieces(key: bytes) -> bytes:
    """The prefix of the pieces of a long value that belongs under `key`, in the same session."""
    return PIECE + key[1 : 1 + NUMBER_BYTES] + xxhash.xxh3_128_digest(key)


def piece(prefix: bytes, index: int) -> bytes:
    return prefix + _INDEX.pack(index)


def record(digest: bytes) -> bytes:
    return RECORD + digest


def children(parent: bytes) -> bytes:
    """The prefix of the children of a snapshot."""
    return CHILD + parent


def child(parent: bytes, digest: bytes) -> bytes:
    return CHILD + parent + digest


def use(stamp: int, digest: bytes) -> bytes:
    return USE + _NUMBER.pack(stamp) + digest


def chunks(blob: int) -> bytes:
    """The prefix of the chunks of a blob."""
    return CHUNK + _NUMBER.pack(blob)


def chunk(blob: int, index: int) -> bytes:
    return CHUNK + _BLOB.pack(blob, index)


def writing(blob: int) -> bytes:
    return WRITING + _NUMBER.pack(blob)


def owner(encoded: bytes) -> bytes:
    return OWNER + encoded


def last_number(key: bytes) -> int:
    """The number a LOG or NODE key ends with."""
    number: int = _NUMBER.unpack_from(key, len(key) - NUMBER_BYTES)[0]
    return number


def first_number(key: bytes) -> int:
    """The number after the kind: a session, a blob, a stamp."""
    number: int = _NUMBER.unpack_from(key, 1)[0]
    return number


def tail(key: bytes) -> bytes:
    """What follows the kind and that number: a name, a digest."""
    return key[1 + NUMBER_BYTES :]
