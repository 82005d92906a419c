# SPDX-License-Identifier: Apache-2.0
"""Which strings may be names. Names are only ever keys, never paths."""

import unicodedata

from .errors import InvalidName

MAX_NAME_BYTES = 128
MAX_OWNER_BYTES = 400
# Control characters, surrogates, and the line and paragraph separators: none can be typed on
# purpose, all of them break a listing.
FORBIDDEN_CATEGORIES = frozenset({"Cc", "Cs", "Zl", "Zp"})


def encode_name(what: str, name: str, max_bytes: int = MAX_NAME_BYTES) -> bytes:
    """`name` as the bytes of a key. `what` ("session name") begins the message of InvalidName."""
    if not isinstance(name, str):
        raise InvalidName(f"{what} is not a text", value=type(name).__name__)
    if not name:
        raise InvalidName(f"{what} is empty", value=name, limit=f"1 to {max_bytes} bytes")
    for character in name:
        if unicodedata.category(character) in FORBIDDEN_CATEGORIES:
            raise InvalidName(
                f"{what} contains the character U+{ord(character):04X}",
                value=name[:40],
                limit="no control characters",
            )
    encoded = name.encode()
    if len(encoded) > max_bytes:
        raise InvalidName(
            f"{what} is too long: {len(encoded)} bytes",
            value=name[:40] + "…",
            limit=f"{max_bytes} bytes of UTF-8",
            remedy="choose a shorter one",
        )
    return encoded


def encode_prefix(prefix: str) -> bytes:
    """The beginning of a name, possibly empty, as the beginning of a key. InvalidName."""
    try:
        return prefix.encode()
    except UnicodeEncodeError as error:
        raise InvalidName("the prefix is not valid text", value=repr(prefix)) from error
