# SPDX-License-Identifier: Apache-2.0
"""docs/mcp.md: its programs run, against a server process of their own."""

from collections.abc import Callable


def test_the_programs_of_the_page_run(
    page_program: Callable[[str, int], str], run_program: Callable[..., str]
) -> None:
    """The python blocks of the page, as one program; torch is not there."""
    run_program(page_program("mcp.md", 2))
