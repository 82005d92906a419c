# SPDX-License-Identifier: Apache-2.0
"""Sessions on scripted models, in memory."""

from collections.abc import Callable, Iterator

import pytest

from freetoken_agent import Session, Store
from freetoken_agent.testing import ScriptedModel


@pytest.fixture
def memory_store() -> Iterator[Store]:
    with Store(":memory:") as store:
        yield store


@pytest.fixture
def begin(memory_store: Store) -> Callable[..., Session]:
    """`begin(*script, **model options)`: a session that waits for its first reply."""

    def begin(*script: object, **options: object) -> Session:
        model = ScriptedModel(script, **options)  # type: ignore[arg-type]
        session = memory_store.create("s", model, system="You are helpful.")
        session.append("user", "Hi")
        return session

    return begin
