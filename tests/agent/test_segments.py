# SPDX-License-Identifier: Apache-2.0
"""The public models, and the package's public names."""

import math
import subprocess
import sys
import time

import pytest
from pydantic import BaseModel, ValidationError

import freetoken_agent
from freetoken_agent import Part, ReusePlan, Segment, segments
from freetoken_agent.branches.path import Body, Place
from freetoken_agent.branches.views import segment as snapshot
from freetoken_agent.segments import Edit, as_text

PLAN = ReusePlan(
    input_tokens=3,
    reused_tokens=1,
    prefill_tokens=2,
    source="ram",
    anchor=1,
    miss=None,
    predicted_s=0.5,
)


def _segment(text: str = "a") -> Segment:
    return Segment(
        id="i", kind="user", role="user", content=text, text=text, num_tokens=1, origin="i"
    )


def test_segments_are_frozen() -> None:
    """Oracle: pydantic's refusal."""
    for value in (_segment(), PLAN, Part(text="x")):
        with pytest.raises(ValidationError):
            value.text = "b"  # type: ignore[union-attr]


def test_segments_snapshots_have_exactly_the_declared_fields() -> None:
    """Oracle: validation of the same values; snapshots are built without it, for speed."""
    body = Body("i", "tool_call", "", "t", (1, 2), "i", name="f", arguments={"a": [1]}, call_id="c")
    made = snapshot(body, place=Place(body, (3,), "g", stale=True), turn=2, anchored=True)
    assert Segment.model_validate(made.model_dump()) == made
    assert set(made.model_dump()) == set(Segment.model_fields)
    assert (made.num_tokens, made.frame_tokens, made.role) == (2, 1, "assistant")
    assert made.arguments is not None
    with pytest.raises(TypeError):
        made.arguments["a"].append(2)
    assert body.arguments == {"a": [1]}


def test_segments_every_public_model_survives_json() -> None:
    """Oracle: equality after a round trip."""
    edit = Edit(added=(_segment(),), plan=PLAN, log_id=1, changed=True)
    assert Edit.model_validate_json(edit.model_dump_json()) == edit
    assert math.isinf(PLAN.model_copy(update={"predicted_s": math.inf}).predicted_s)
    classes = [c for c in vars(segments).values() if isinstance(c, type)]
    models = [c for c in classes if issubclass(c, BaseModel) and c.__module__ == segments.__name__]
    assert all(model.model_config.get("frozen") for model in models)


def test_segments_an_edit_is_falsy_when_nothing_changed() -> None:
    """Oracle: `changed`, not the lists: a cut inside a turn may change only how it stands."""
    assert not Edit(plan=PLAN, changed=False)
    assert Edit(plan=PLAN, changed=True)


def test_segments_preview() -> None:
    """Oracle: one line, at most n characters."""
    assert _segment("two\n  lines").preview() == "two lines"
    assert _segment("x" * 100).preview(10) == "x" * 9 + "…"
    assert _segment("x" * 10).preview(10) == "x" * 10


def test_segments_content_is_text() -> None:
    """Oracle: parts joined as they are."""
    assert as_text([Part(text="a "), {"type": "text", "text": "b"}]) == "a b"
    assert as_text([]) == ""


def test_segments_the_package_exports_exactly_its_names() -> None:
    """Oracle: `__all__`; every name resolves, and nothing else is promised."""
    assert sorted(freetoken_agent.__all__) == freetoken_agent.__all__
    assert set(freetoken_agent._HOME) == set(freetoken_agent.__all__)
    for name in freetoken_agent.__all__:
        assert getattr(freetoken_agent, name) is not None
    assert set(freetoken_agent.__all__) <= set(dir(freetoken_agent))
    with pytest.raises(AttributeError, match="Nonsense"):
        freetoken_agent.Nonsense  # noqa: B018


def test_segments_importing_is_cheap_and_loads_no_torch() -> None:
    """Oracle: a fresh interpreter: time of the import, and the modules it loaded. Sessions and
    stores need no torch either."""
    code = (
        "import sys, time; t = time.perf_counter(); import freetoken_agent;"
        "took = time.perf_counter() - t; light = 'torch' not in sys.modules;"
        "from freetoken_agent import Store, Session; import freetoken_agent.testing;"
        "print(took, light and 'torch' not in sys.modules)"
    )
    best = math.inf
    for _ in range(3):
        out = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
        best = min(best, float(out[0]))
        assert out[1] == "True"
        if best < 0.5:
            break
        time.sleep(0.5)
    assert best < 0.5
