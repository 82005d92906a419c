# SPDX-License-Identifier: Apache-2.0
"""docs/context-rules.md: its programs run, on a scripted model."""

from collections.abc import Callable


def test_the_programs_of_the_page_run(
    page_program: Callable[[str, int], str], run_program: Callable[..., str]
) -> None:
    """The python blocks of the page, as one program; warnings are errors, torch is not there."""
    run_program(page_program("context-rules.md", 4), "-W", "error")
