# SPDX-License-Identifier: Apache-2.0
"""Random programs of edits, forks, rewinds, undos, evictions and reopenings on real models: the
session equals plain lists, every price comes true, and every state is GOLD."""

import random
import tempfile
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from freetoken_agent import LocalModel, Segment, Session
from freetoken_agent.proving.plain_session import Entry, Line, render_chatml
from freetoken_agent.proving.proofs import Gold
from freetoken_agent.proving.session_programs import OPERATIONS, Program, Step
from freetoken_agent.testing import CHATML

OPENING: list[Step] = [
    (0, "append", 0, 1),
    (0, "generate", 0, 0),
    (0, "append_result", 0, 0),
    (0, "generate", 0, 1),
    (0, "append", 0, 1),
]
"""A first turn with a thought, a call and its result, so that edits find something."""


def random_program(seed: int) -> tuple[int, list[Step]]:
    chance = random.Random(seed)
    count = chance.randrange(10, 40)
    return seed, OPENING + [
        (chance.randrange(6), chance.choice(OPERATIONS), chance.randrange(12), chance.randrange(12))
        for _ in range(count)
    ]


PROGRAMS = st.integers(0, 1 << 32).map(random_program)
SETTINGS = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    phases=[Phase.generate],  # a program follows from its seed: nothing to shrink
)


class Observer:
    """Lets a real model write known texts, and checks prices and states as the program runs.

    Its account of what the engine can reuse is a list of forwarded paths; from the first eviction
    on that is only a lower bound of zero, since disk and RAM then hold different parts.
    """

    def __init__(self, model: LocalModel, gold: Gold, seed: int, room_bytes: int) -> None:
        self._model = model
        self._gold = gold
        self._random = random.Random(seed)
        self._forwarded: list[list[int]] = []
        self._room_bytes = room_bytes
        self._evicted = False
        self._texts = self._checks = 0
        self._heads: dict[str, list[int]] = {}
        self.disk_hits = 0

    def check(self, session: Session) -> None:
        """After each operation, for each branch: now and then evict, now and then compare."""
        ids = self._heads[session.branch] = session.ids()
        self._checks += 1
        evict = self._checks % 20 == 19
        if evict:
            self.evict()
        if ids and (evict or self._random.random() < 0.25):
            self.compare(ids)

    def finish(self) -> None:
        """After the last operation: every head, then the engine forgets this program."""
        heads = [ids for ids in self._heads.values() if ids]
        for number, ids in enumerate(heads):
            self.compare(ids, num_tokens=8 if number else 64)
        for ids in self._forwarded[:1]:  # all paths begin with the same id
            self._model.forget(ids, 0)

    def compare(self, ids: list[int], num_tokens: int = 0) -> None:
        """The price of a path is the rows then forwarded, and its state is a cold prefill's."""
        plan = self._model.plan(ids)
        self.disk_hits += plan.source == "disk"
        if not self._evicted:
            known = max((common(path, ids) for path in self._forwarded), default=0)
            assert plan.reused_tokens in (known, known - (known == len(ids)))
        before = self._model.stats().forward_rows
        self._model.warm(ids)
        assert self._model.stats().forward_rows - before == plan.prefill_tokens
        self._forwarded.append(ids)
        self._gold.check(self._model.engine, ids, num_tokens=num_tokens)

    def evict(self) -> None:
        """Leave room for the states of one block only; what was written to disk stays there."""
        stats = self._model.stats()
        self._model.flush()
        needed = stats.weights_bytes + stats.working_bytes
        self._model.set_budget(ram_bytes=needed + self._room_bytes)
        self._model.set_budget(ram_bytes=stats.ram_budget_bytes)
        self._evicted = True

    def write(
        self, session: Session, line: Line, a: int, b: int
    ) -> tuple[Sequence[Segment], list[Entry], str]:
        """A reply whose ids are forced, so that its segments are known beforehand."""
        entries, ids = self._script(session, line, a, b)
        plan = session.plan()
        path = session.ids()
        reply = session.generate_sync(force=ids, max_tokens=len(ids))
        usage = reply.usage
        assert usage.reused_tokens + usage.prefill_tokens == usage.input_tokens
        assert usage.prefill_tokens == plan.prefill_tokens, "the plan did not come true"
        assert usage.output_tokens == len(ids)
        assert session.ids()[: len(path)] == path
        self._forwarded.append(session.ids())
        return reply.segments, entries, "closed"

    def _script(
        self, session: Session, line: Line, a: int, b: int
    ) -> tuple[list[Entry], list[int]]:
        encode = session.model.tokenizer.encode_frame
        text = Entry("text", self._text())
        if line.tail == "partial" and line.path[-1].kind == "thinking":
            thought = Entry("thinking", self._text())
            raw = f"{thought.text}\n</think>\n\n{text.text}<|im_end|>"
            return [thought, text], encode(raw)
        if line.tail != "closed":
            return [text], encode(f"{text.text}<|im_end|>")
        entries, raw = [text], text.text
        if a % 3 == 0:
            entries.insert(0, Entry("thinking", self._text()))
            raw = f"<think>\n{entries[0].text}\n</think>\n\n{raw}"
        if b % 3 == 0:
            call = f'<tool_call>\n{{"name": "t", "arguments": {{"n": {b}}}}}\n</tool_call>'
            entries.append(Entry("tool_call", call, tool="t", number=b))
            raw += f"\n{call}"
        return entries, encode(f"{raw}<|im_end|>")

    def _text(self) -> str:
        self._texts += 1
        return f"m{self._texts}"


def common(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def run_program(
    model: LocalModel, gold: Gold, program: tuple[int, list[Step]], room_bytes: int
) -> int:
    """Returns how many of the compared states came from disk."""
    seed, steps = program
    observer = Observer(model, gold, seed, room_bytes)
    chatml = model.tokenizer.chat_template == CHATML
    render = render_chatml if chatml else _unknown
    with tempfile.TemporaryDirectory() as folder:
        Program(folder, model, write=observer.write, render=render, check=observer.check).run(steps)
    observer.finish()
    return observer.disk_hits


def _unknown(path: list[Entry]) -> None:
    """A template that nobody has written down by hand."""


def run_programs(model: LocalModel, gold: Gold, count: int, room_bytes: int) -> None:
    disk_hits = 0

    @settings(SETTINGS, max_examples=count)
    @given(PROGRAMS)
    def run(program: tuple[int, list[Step]]) -> None:
        nonlocal disk_hits
        disk_hits += run_program(model, gold, program, room_bytes)

    run()
    assert disk_hits, "no program restored a state from disk"


def test_programs_on_the_tiny_model(tiny: LocalModel, tiny_gold: Gold) -> None:
    """Oracles: plain lists, a list of forwarded paths, rows counted by the runner, and cold
    prefills."""
    run_programs(tiny, tiny_gold, 25, 64 << 10)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_300_programs_on_the_tiny_model(tiny: LocalModel, tiny_gold: Gold) -> None:
    """As above."""
    run_programs(tiny, tiny_gold, 300, 64 << 10)


@pytest.mark.smollm2
def test_programs_on_smollm2(smollm2: LocalModel, smollm2_gold: Gold) -> None:
    """As above, without the rendering by hand."""
    run_programs(smollm2, smollm2_gold, 2, 3 << 20)


@pytest.mark.slow
@pytest.mark.smollm2
@pytest.mark.timeout(3600)
def test_20_programs_on_smollm2(smollm2: LocalModel, smollm2_gold: Gold) -> None:
    """As above."""
    run_programs(smollm2, smollm2_gold, 20, 3 << 20)
