# SPDX-License-Identifier: Apache-2.0
"""`bench load`: converted weights against safetensors, from the start of a process to its first
token. Preparing the models takes a minute and up to 7 GB, so a folder may be named that keeps them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from freetoken_runtime.bench.timing import Figure, OnTurn
from freetoken_runtime.config import Quant

from .bench_measures import Measure, kept_or_temporary


class Shape(StrEnum):
    """What is loaded."""

    DENSE = "dense"
    MIXTURE = "mixture"


class Form(StrEnum):
    """How its matrices are held."""

    NONE = "none"
    INT8 = "int8"
    INT4 = "int4"


_QUANTS: Mapping[Form, Quant | None] = {Form.NONE: None, Form.INT8: "int8", Form.INT4: "int4"}


@dataclass(frozen=True)
class LoadChoice:
    """`folder`: where prepared models are kept; None: nowhere."""

    shapes: tuple[Shape, ...] = tuple(Shape)
    forms: tuple[Form, ...] = tuple(Form)
    folder: Path | None = None
    rounds: int = 3
    threads: int | None = None


def load_measures(choice: LoadChoice) -> dict[str, Measure]:
    """A measurement for each shape, by its label."""
    return {f"load: {shape}": _measure(choice, shape) for shape in choice.shapes}


def _measure(choice: LoadChoice, shape: Shape) -> Measure:
    def measure(on_turn: OnTurn) -> list[Figure]:
        from freetoken_runtime.bench import load  # torch loads here

        forms = tuple(_QUANTS[form] for form in choice.forms)
        settings = load.LoadSettings(shape, forms, choice.rounds, choice.threads)
        with kept_or_temporary(choice.folder) as name:
            return load.measure(settings, Path(name), on_turn=on_turn)

    return measure
