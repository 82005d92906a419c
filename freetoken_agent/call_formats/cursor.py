# SPDX-License-Identifier: Apache-2.0
"""A position in a text that is read from left to right."""

import re

_BLANKS = re.compile(r"\s*")


class Cursor:
    """What reads literals of a syntax of its own extends it. ValueError for what does not fit."""

    def __init__(self, text: str, at: int) -> None:
        self.text, self.at = text, at

    def match(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.at)
        if match is None:
            raise ValueError("a word is missing")
        self.at = match.end()
        return match[0]

    def takes(self, character: str) -> bool:
        """Whether it comes next, behind blanks; then it is behind the position."""
        self.skip_blanks()
        if not self.text.startswith(character, self.at):
            return False
        self.at += 1
        return True

    def expect(self, character: str) -> None:
        if not self.takes(character):
            raise ValueError(f"{character} is missing")

    def skip_blanks(self) -> None:
        match = _BLANKS.match(self.text, self.at)
        assert match is not None, "the pattern matches nothing, too"
        self.at = match.end()
