# SPDX-License-Identifier: Apache-2.0
"""Models that agents name: each is loaded once, by the first run that needs it."""

import atexit
from threading import Lock

from .model import Model

_models: dict[str, Model] = {}
_loading = Lock()


def shared_model(name: str) -> Model:
    """The model of this name or path, loaded with the default configuration. It stays loaded until
    the process ends. The errors are those of `LocalModel.load`."""
    from .local_model import LocalModel

    with _loading:
        if name not in _models:
            if not _models:
                atexit.register(_close_all)
            _models[name] = LocalModel.load(name)
        return _models[name]


def _close_all() -> None:
    for model in _models.values():
        model.close()
    _models.clear()
