# SPDX-License-Identifier: Apache-2.0
"""What runs use that were given no session: a conversation in memory, on a model that is loaded
once, by the first run that names it."""

import atexit
from threading import Lock

from ..errors import NothingToGenerate
from ..model import Model
from ..session import Session
from ..store import MEMORY, Store

_models: dict[str, Model] = {}
_loading = Lock()


def shared_model(name: str) -> Model:
    """The model of this name or path, loaded with the default configuration. It stays loaded until
    the process ends. The errors are those of `LocalModel.load`."""
    from ..local_model import LocalModel

    with _loading:
        if name not in _models:
            if not _models:
                atexit.register(_close_all)
            _models[name] = LocalModel.load(name)
        return _models[name]


def session_in_memory(name: str, model: Model | str | None) -> Session:
    """A conversation that ends with the process. NothingToGenerate without a model."""
    if model is None:
        raise NothingToGenerate(
            "the agent has no model, and the run no session",
            value=name,
            remedy="Agent(model=…), or run(…, session=…)",
        )
    return Store(MEMORY).create(name, shared_model(model) if isinstance(model, str) else model)


def _close_all() -> None:
    for model in _models.values():
        model.close()
    _models.clear()
