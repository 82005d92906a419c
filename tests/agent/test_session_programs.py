# SPDX-License-Identifier: Apache-2.0
"""Random programs of edits against plain lists (`freetoken_agent.proving.plain_session`): ids,
contents, pairing, text, branches, undo and redo, batches, reopenings. Rules 1, 3, 4, 7, 8 and case
S12."""

import tempfile
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freetoken_agent.proving.plain_session import Entry, Line, render_chatml
from freetoken_agent.proving.session_programs import OPERATIONS, Program, Step
from freetoken_agent.segments import Segment
from freetoken_agent.session import Session
from freetoken_agent.testing import Call, Raw, ScriptedModel, Think

STEPS = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.sampled_from(OPERATIONS),
        st.integers(0, 11),
        st.integers(0, 11),
    ),
    min_size=5,
    max_size=40,
)
QUICK = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


class _Script:
    """Scripts what the model writes, so that it is known beforehand."""

    def __init__(self) -> None:
        self.model = ScriptedModel()
        self._texts = 0

    def text(self) -> str:
        self._texts += 1
        return f"m{self._texts}"

    def write(
        self, session: Session, line: Line, a: int, b: int
    ) -> tuple[Sequence[Segment], list[Entry], str]:
        entries = [Entry("text", self.text())]
        script: list[str | Think | Call | Raw] = [entries[0].text]
        goes_on = line.tail != "closed"
        if line.tail == "partial" and line.path[-1].kind == "thinking":
            entries = [Entry("thinking", self.text()), Entry("text", self.text())]
            script = [Raw(f"{entries[0].text}\n</think>\n\n{entries[1].text}<|im_end|>")]
        elif not goes_on and a % 3 == 0:
            entries.insert(0, Entry("thinking", self.text()))
            script.insert(0, Think(entries[0].text))
        if not goes_on and b % 3 == 0:
            tool = f"t{b % 2}"
            text = f'<tool_call>\n{{"name": "{tool}", "arguments": {{"n": {b}}}}}\n</tool_call>'
            entries.append(Entry("tool_call", text, tool=tool, number=b))
            script.append(Call(tool, {"n": b}))
        self.model.extend(script)
        return session.generate_sync().segments, entries, "closed"


def _run(steps: Sequence[Step]) -> None:
    script = _Script()
    with tempfile.TemporaryDirectory() as folder:
        Program(folder, script.model, write=script.write, render=render_chatml).run(steps)


@QUICK
@given(STEPS)
def test_session_programs_equal_plain_lists(steps: list[Step]) -> None:
    """Oracle: plain lists and a rendering by hand, after every operation, on every branch."""
    _run(steps)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(QUICK, max_examples=600)
@given(STEPS)
def test_session_many_programs_equal_plain_lists(steps: list[Step]) -> None:
    """Oracle: as above, on 600 programs."""
    _run(steps)
