# SPDX-License-Identifier: Apache-2.0
"""The bench of the agent layer, in small: that it measures what it names."""

import pytest

from freetoken_agent.cli import bench_agent


def test_the_overhead_is_that_of_steps_and_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the names and targets; a step takes longer than a token."""
    monkeypatch.setattr(bench_agent, "STEPS", 3)
    monkeypatch.setattr(bench_agent, "TEXT_CHARS", 200)
    token, step = bench_agent.measure_overhead(1)
    assert (token.unit, step.unit) == ("ms", "ms") and step.value > token.value
    assert token.target == bench_agent.TOKEN_MS and step.target == bench_agent.STEP_MS
