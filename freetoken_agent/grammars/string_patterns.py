# SPDX-License-Identifier: Apache-2.0
"""What a JSON schema says of strings, as regular expressions that match the whole string, for call
formats in which strings stand without quotes. In JSON `llguidance` does the same."""

import re
from collections.abc import Mapping

from .lark import ANY

_YEAR = r"(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_DAY = (
    r"((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    r"|02-(0[1-9]|[12][0-9]))"
)
_DATE = f"{_YEAR}-{_DAY}"
_TIME = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?"
    r"(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_OCTET = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = r"[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_WORD = r"[a-zA-Z0-9_+-]{1,32}"

FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"{_OCTET}(\.{_OCTET}){{3}}",
    "email": rf"{_WORD}(\.{_WORD}){{0,3}}@{_LABEL}(\.{_LABEL}){{1,3}}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,3}}",
}
"""Of other formats any text is taken, and checked by the tool's type afterwards."""


def searched(pattern: str | None) -> str:
    """A pattern that may match anywhere, as one that matches the whole; '' where its anchors stand
    inside of groups."""
    alternatives = [] if pattern is None else _split(pattern)
    whole = []
    for one in alternatives:
        begins, ends = one.startswith("^"), one.endswith("$") and not one.endswith("\\$")
        inner = one[begins : len(one) - ends]
        if re.search(r"(?<![\\\[])[\^$]", inner):
            return ""
        whole.append(f"{'' if begins else ANY}({inner}){'' if ends else ANY}")
    return re.sub(r"(?<!\\)/", r"\/", "|".join(whole)).replace("\n", "\\n")


def _split(pattern: str) -> list[str]:
    """At the bars outside of groups and classes."""
    parts, depth, begin = [], 0, 0
    for match in re.finditer(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()|]", pattern):
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        if match[0] == "|" and not depth:
            parts.append(pattern[begin : match.start()])
            begin = match.end()
    return [*parts, pattern[begin:]]
