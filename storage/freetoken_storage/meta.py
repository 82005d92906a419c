# SPDX-License-Identifier: Apache-2.0
"""Small values of the layer above: what may be one."""

from .errors import InvalidRecord
from .names import encode_name
from .values import PAYLOAD_BYTES


def check_meta(key: str, value: bytes = b"") -> str:
    """`key`, if it may name `value`. InvalidName, InvalidRecord."""
    encode_name("meta key", key)
    if len(value) > PAYLOAD_BYTES:
        raise InvalidRecord(
            f"the value {key!r} is too long", value=len(value), limit=f"{PAYLOAD_BYTES} bytes"
        )
    return key
