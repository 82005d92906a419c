# SPDX-License-Identifier: Apache-2.0
"""A program that loads a model, computes one token and ends: a contestant of `bench load`.

    python -m freetoken_runtime.bench.first_token FOLDER SETTINGS

Its first line says that imports are done; the next one what it saw, as JSON. With `weights_only` it
loads the weights and no engine around them.
"""

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from freetoken_storage.weights_file import read_ahead

IMPORTED = "imported"
PROMPT = tuple(range(3, 35))


@dataclass(frozen=True)
class Seen:
    """`token`: the first one, None with `weights_only`."""

    weights_bytes: int
    token: int | None


@dataclass(frozen=True)
class Start:
    """How the model is loaded: fields of EngineConfig."""

    quant: str | None
    dtype: str
    threads: int | None = None
    hash_cache: str | None = None
    weights_only: bool = False


def _loaded(folder: str, start: Start) -> Seen:
    from ..weights import load

    quant: Any = start.quant
    dtype: Any = start.dtype
    model = load(folder, dtype=dtype, quant=quant)
    return Seen(model.decoder.size_bytes, None)


def _first_token(folder: str, start: Start) -> Seen:
    from .. import Engine, EngineConfig, SamplingParams

    quant: Any = start.quant
    dtype: Any = start.dtype
    cache = None if start.hash_cache is None else Path(start.hash_cache)
    config = EngineConfig(
        quant=quant, dtype=dtype, threads=start.threads, hash_cache=cache, offload="none"
    )
    engine = Engine.load(folder, config)
    token = next(iter(engine.generate(PROMPT, SamplingParams(max_tokens=1, temperature=0.0))))
    return Seen(engine.stats().weights_bytes, token.id)


def main(folder: str, settings: str) -> None:
    start = Start(**json.loads(settings))
    read_ahead(Path(folder))  # as `LocalModel.load` does
    from .. import engine  # noqa: F401 - what is measured begins behind the imports

    _say(IMPORTED)
    seen = _loaded(folder, start) if start.weights_only else _first_token(folder, start)
    _say(json.dumps(asdict(seen)))
    os._exit(0)  # how long an engine takes to end is another question


def _say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
