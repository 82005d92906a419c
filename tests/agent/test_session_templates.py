# SPDX-License-Identifier: Apache-2.0
"""Sessions on real chat templates: random programs keep ids, pairing, turns and undo whatever the
template does, and an edit it refuses changes nothing."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from freetoken_agent.errors import TemplateUnsupported
from freetoken_agent.plain_session import Entry, Line
from freetoken_agent.segments import Segment
from freetoken_agent.session import Session
from freetoken_agent.session_operations import Writer
from freetoken_agent.session_programs import OPERATIONS, Program
from freetoken_agent.testing import Raw, ScriptedModel

TEMPLATES = Path(__file__).parents[2].parent / "shared" / "templates"
NAMES = sorted(path.name for path in TEMPLATES.glob("*.jinja"))
WITHOUT_DISK = [name for name in OPERATIONS if name != "reopen"]


def _writer(model: ScriptedModel) -> Writer:
    """Lets the model write one short text."""
    stop = min(model.format.closers)
    texts = iter(range(10**6))

    def write(
        session: Session, line: Line, a: int, b: int
    ) -> tuple[Sequence[Segment], list[Entry], str]:
        text = f"m{next(texts)}"
        model.extend(Raw([*text.encode(), stop]))
        written = session.generate_sync().segments
        return written, [Entry(segment.kind, text) for segment in written], "closed"

    return write


def _run(name: str, seed: int) -> None:
    try:
        model = ScriptedModel(template=(TEMPLATES / name).read_text())
    except TemplateUnsupported as error:
        pytest.skip(f"the template cannot be learned: {error}")
    choose = random.Random(seed)

    def small() -> int:
        return choose.randrange(12)

    steps = [(small(), choose.choice(WITHOUT_DISK), small(), small()) for _ in range(30)]
    program = Program(":memory:", model, write=_writer(model), foreign=True)
    program.run(steps)
    assert program.num_refused < 10, "most edits must be possible"


EACH = pytest.mark.parametrize(
    "name", NAMES or [pytest.param("", marks=pytest.mark.skip("../shared/templates is not there"))]
)


@EACH
def test_session_program_on_a_real_template(name: str) -> None:
    """Oracle: plain lists, after every operation. The spelling of calls and blanks is the
    template's; everything else must be as in the lists."""
    _run(name, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
@EACH
def test_session_programs_on_a_real_template(name: str, seed: int) -> None:
    """Oracle: as above, on five more programs."""
    _run(name, seed)
