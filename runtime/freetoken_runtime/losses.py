# SPDX-License-Identifier: Apache-2.0
"""What is lost when weights that are stored quantised are held in another form."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import TypeVar

import torch

from .kernels.integers import Int4Values, Int8Values
from .weight_source import Groups

_SLICE_ELEMENTS = 4 << 20
Held = TypeVar("Held", torch.Tensor, Int8Values, Int4Values)


@dataclass(frozen=True)
class _Loss:
    """Squares, summed over weights: of what was lost, and of what there was."""

    error: float = 0.0
    weight: float = 0.0

    def __add__(self, other: "_Loss") -> "_Loss":
        return _Loss(self.error + other.error, self.weight + other.weight)

    @property
    def relative(self) -> float:
        return sqrt(self.error / self.weight) if self.weight else 0.0


class Losses:
    """Mutable: it sums up, per stored and held format. `stored_format`: how a parameter is
    quantised in the file, None if it is not: then it is the caller's choice what is lost."""

    def __init__(self, stored_format: Callable[[str], str | None]) -> None:
        self._stored_format = stored_format
        self._sums: dict[tuple[str, str], dict[str, _Loss]] = {}  # of matrices, by name

    def add(self, name: str, exact: torch.Tensor | Groups, held: Held) -> Held:
        """A matrix, or some of its rows, as it is stored and as it is held, which is returned."""
        form = self._stored_format(name)
        if form is None:
            return held
        rows = _num_rows(exact)
        step = max(1, _SLICE_ELEMENTS * rows // max(1, _num_elements(exact)))
        error = weight = 0.0
        for start in range(0, rows, step):
            part = slice(start, start + step)
            whole = _exact(exact, part)
            error += float((whole - _held(held, part)).square().sum(dtype=torch.float64))
            weight += float(whole.square().sum(dtype=torch.float64))
        sums = self._sums.setdefault((form, _name(held)), {})
        sums[name] = sums.get(name, _Loss()) + _Loss(error, weight)
        return held

    def notes(self) -> tuple[str, ...]:
        """A sentence each: how much of the norm of the weights the difference is."""
        return tuple(
            _sentence(form, held, losses) for (form, held), losses in sorted(self._sums.items())
        )


def _sentence(form: str, held: str, losses: Mapping[str, _Loss]) -> str:
    whole = sum(losses.values(), _Loss()).relative
    worst = max(losses, key=lambda name: losses[name].relative)
    most = f"{losses[worst].relative:.2%} ({worst})"
    return f"{form} became {held}: {whole:.2%} of the weights' norm lost, at most {most}"


def _num_rows(exact: torch.Tensor | Groups) -> int:
    return len(exact.values if isinstance(exact, Groups) else exact)


def _num_elements(exact: torch.Tensor | Groups) -> int:
    return (exact.values if isinstance(exact, Groups) else exact).numel()


def _name(held: torch.Tensor | Int8Values | Int4Values) -> str:
    if isinstance(held, torch.Tensor):
        return str(held.dtype).removeprefix("torch.")
    return "int8" if isinstance(held, Int8Values) else f"int4 in groups of {held.size}"


def _exact(exact: torch.Tensor | Groups, rows: slice) -> torch.Tensor:
    if isinstance(exact, torch.Tensor):
        return exact[rows].float()
    return _grouped(exact.values[rows], exact.scales[rows], exact.minimums[rows], exact.size)


def _held(held: torch.Tensor | Int8Values | Int4Values, rows: slice) -> torch.Tensor:
    if isinstance(held, torch.Tensor):
        return held[rows].float()
    if isinstance(held, Int8Values):
        return held.values[rows] * held.scales[rows, None].float()
    steps = held.values[rows].float() - 8
    weight = _grouped(steps, held.scales[rows].float(), held.zeros[rows].float(), held.size)
    return weight[:, : held.inputs]


def _grouped(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, size: int
) -> torch.Tensor:
    grouped = values.view(len(values), -1, size)
    return (grouped * scales[..., None] + zeros[..., None]).view(len(values), -1)
