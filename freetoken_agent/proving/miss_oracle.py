# SPDX-License-Identifier: Apache-2.0
"""Why it missed, by lists: what a plan must name, from the ids of every path that was forwarded and
the positions where a state was kept. Position, anchor, cost and gap follow by comparing lists, the
segment by counting tokens; the reply afterwards must cost what was said, in rows that the engine
counted. For tests.
"""

import asyncio
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..local_model import LocalModel
from ..segments import Miss, Segment
from ..session import Session
from ..store import Store

if TYPE_CHECKING:
    from freetoken_runtime import EngineConfig

OPENER = "<|im_end|>\n<|im_start|>assistant\n"
OPENERS = {"user": OPENER, "tool_result": OPENER, "thinking": "\n</think>\n\n"}  # of ChatML
SYSTEM = "You are helpful. Answer in one sentence."


def tool(name: str, description: str) -> dict[str, Any]:
    """A tool without parameters, as a chat template gets it."""
    function = {"name": name, "description": description, "parameters": {"type": "object"}}
    return {"type": "function", "function": function}


WEATHER = tool("get_weather", "The weather.")


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading ids two lists share."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def ends(session: Session) -> list[int]:
    """For each segment of the path the position after its last token."""
    return list(accumulate(s.frame_tokens + s.num_tokens for s in session.path()))


class MissOracle:
    """A tiny ChatML model, a store, and what has been computed in it, as plain lists. `cuttable`:
    the model's state can be restored at any position."""

    def __init__(
        self, folder: Path, tmp_path: Path, config: "EngineConfig", *, cuttable: bool
    ) -> None:
        self.folder, self.tmp_path, self.config = folder, tmp_path, config
        self.cuttable = cuttable
        self.model = LocalModel.load(folder, config=config)
        self.store = Store(":memory:")
        self.computed: list[tuple[list[int], set[int]]] = []

    def close(self) -> None:
        """The store lets the model finish its writes."""
        self.store.close()
        self.model.close()

    def on_disk(self) -> None:
        """Go on in a folder."""
        self.store.close()
        self.store = Store(self.tmp_path / "store")

    def restart(self, model: LocalModel | None = None) -> Session:
        """Everything is on disk; another process goes on, with `model` if it is another one."""
        self.close()
        self.model = model or LocalModel.load(self.folder, config=self.config)
        self.store = Store(self.tmp_path / "store")
        return self.store.open("s", self.model)

    def warm(self, session: Session) -> None:
        asyncio.run(session.warm())
        self.computed.append((session.ids(), {*ends(session)}))

    def talk(self, **options: Any) -> Session:
        """A conversation with every kind of segment, forwarded as a whole."""
        tools = options.pop("tools", [WEATHER])
        session = self.store.create("s", self.model, system=SYSTEM, tools=tools, **options)
        session.append("user", "How is the weather in Oslo?")
        session.append("thinking", "I should look it up.")
        call = session.append_call("get_weather", {"city": "Oslo"})
        session.append_result(call, "sunny, 21 degrees, no wind")
        session.append("assistant", "It is sunny: bring sunglasses.")
        session.append("user", "Thanks. And tomorrow?")
        self.warm(session)
        return session

    def squeeze(self, enough: Callable[[], bool]) -> None:
        """Take memory away until that is so, then give it back."""
        stats = self.model.stats()
        fixed = stats.weights_bytes + stats.working_bytes
        for step in range(400):
            self.model.set_budget(ram_bytes=fixed + int(stats.state_bytes * 0.97**step))
            if enough():
                break
        self.model.set_budget(ram_bytes=stats.ram_budget_bytes)

    def expects(self, ids: Sequence[int]) -> tuple[int, int, int]:
        """Position, anchor and rows to forward, of a path that is not known as a whole with the
        state at its end."""
        known = [(common(path, ids), anchors) for path, anchors in self.computed]
        rows = max((shared for shared, _ in known), default=0)
        limit = min(rows, len(ids) - 1)
        at = limit
        if not self.cuttable:
            states = (p for shared, anchors in known for p in anchors if p <= min(shared, limit))
            at = max(states, default=0)
        return limit, at, len(ids) - at

    def head_ids(self, session: Session) -> list[int]:
        """What the next request forwards."""
        opener = OPENERS.get(session.path()[-1].kind, "")
        return session.ids() + list(self.model.tokenizer.encode_frame(opener))

    def check(
        self,
        session: Session,
        cause: str,
        segment: Segment | None,
        change: str | None = None,
        was: Segment | None = None,
    ) -> Miss:
        """The plan says this, and it is what happens."""
        ids = self.head_ids(session)
        position, anchor, tokens = self.expects(ids)
        plan = session.plan()
        miss = plan.miss
        assert miss is not None
        assert (miss.cause, miss.change) == (cause, change)
        assert (miss.position, miss.anchor or 0, miss.tokens) == (position, anchor, tokens)
        assert miss.gap == position - anchor
        assert (plan.input_tokens, plan.prefill_tokens) == (len(ids), tokens)
        assert (miss.segment and miss.segment.id) == (segment and segment.id)
        assert (miss.was and miss.was.id) == (was and was.id)
        self._check_place(session, miss)
        self._check_paid(session, miss)
        return miss

    def _check_place(self, session: Session, miss: Miss) -> None:
        """The segment holds the position, where the miss says."""
        place = next((i for i, end in enumerate(ends(session)) if miss.position < end), None)
        if place is None:
            assert (miss.segment, miss.part) == (None, "opener")
            return
        named = session.path()[place]
        assert miss.segment is not None and miss.segment.id == named.id
        content = ends(session)[place] - named.num_tokens
        assert miss.part == ("frame" if miss.position < content else "content")
        assert named.id in miss.explain()

    def _check_paid(self, session: Session, miss: Miss) -> None:
        rows = self.model.stats().forward_rows
        if session.path()[-1].kind in OPENERS:
            reply = session.generate_sync(max_tokens=1)
            usage = reply.usage
        else:
            usage = asyncio.run(session.warm())
        assert self.model.stats().forward_rows - rows == usage.prefill_tokens == miss.tokens
        assert usage.miss == miss
