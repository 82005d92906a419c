# SPDX-License-Identifier: Apache-2.0
"""`demo` on the real model, as `make demo` runs it. It checks its claims; here they are read."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from freetoken_agent.cli import demo, demo_acts


@pytest.mark.smollm2
def test_the_story_and_its_figures(smollm2_path: Path) -> None:
    """Killed with SIGKILL, continued from disk, equal to the cold prefill of the same ids."""
    done = subprocess.run(
        [sys.executable, "-m", "freetoken_agent.cli", "demo", "--json"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    for act in ("first", "second", "continued", "cold"):
        assert told[act]["text"] and told[act]["ttft_s"] > 0
    assert told["first"]["text"] != told["second"]["text"]
    edited = told["edited"]
    assert edited["reused"] + edited["prefilled"] == edited["input"]
    assert (told["second"]["reused"], told["second"]["prefilled"]) == (
        edited["reused"],
        edited["prefilled"],
    )
    assert told["acknowledged"]["ids"] == told["reopened"]["ids"]
    assert told["continued"]["source"] == "disk"
    assert told["cold"]["reused"] == 0
    total = told["continued"]["reused"] + told["continued"]["prefilled"]
    assert total == told["cold"]["prefilled"]
    assert told["continued"]["text"] == told["cold"]["text"]
    assert [name for name, _ in told["agent"]["calls"]] == ["get_weather", "find_hotel"]
    assert told["agent"]["steps"] == 3
    assert told["agent"]["text"] != told["corrected"]["text"]
    assert told["corrected"]["prefilled"] == told["corrected"]["planned"] < 150
    assert told["corrected"]["reused"] > told["corrected"]["prefilled"]
    for said in ("SIGKILL", "acknowledged segments are there", told["second"]["text"].strip()):
        assert said in done.stderr


def test_a_claim_that_does_not_hold_ends_the_demo() -> None:
    """What was claimed and what was seen are in the error."""
    with pytest.raises(demo_acts.DemoFailed, match="predicted = paid.*'paid': 3"):
        demo_acts.claim(False, "predicted = paid", predicted=2, paid=3)


def test_an_error_in_an_act_is_the_demos_error(tmp_path: Path) -> None:
    """A model that is not there: the child's error, not a traceback."""
    with pytest.raises(demo_acts.DemoFailed) as caught:
        demo.Story("no-such-model").play("edit", tmp_path / "store")
    assert caught.value.value == "model_not_found"


def test_lost_segments_would_be_noticed() -> None:
    """The check that the demo makes after the kill, given a path with one segment less."""
    before: dict[str, Any] = {"segments": ["a", "b"], "ids": [1, 2, 3]}
    after: dict[str, Any] = {"segments": ["a"], "ids": [1]}
    with pytest.raises(demo_acts.DemoFailed, match="every acknowledged segment"):
        demo._check_nothing_lost(before, after)
