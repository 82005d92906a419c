# SPDX-License-Identifier: Apache-2.0
"""Attention and Mamba-2 side by side in one layer, as in Falcon-H1."""

from dataclasses import dataclass, replace

from ..spec import StateSpec
from .attention import AttentionSpec
from .mamba import Mamba2Spec
from .rope import RopeSpec


@dataclass(frozen=True)
class ParallelSpec:
    """a_out · attention(a_in · x) + m_out · mamba(m_in · x). The layer's state is both states: the
    attention's rows and what the recurrence overwrites."""

    attention: AttentionSpec
    mamba: Mamba2Spec
    attention_in: float = 1.0
    attention_out: float = 1.0
    mamba_in: float = 1.0
    mamba_out: float = 1.0

    @property
    def rope(self) -> RopeSpec | None:
        return self.attention.rope

    def parameter_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Both mixers' weights by name, those of the recurrence as `mamba.<name>`."""
        own = self.mamba.parameter_shapes(hidden_size)
        return self.attention.parameter_shapes(hidden_size) | {
            f"mamba.{name}": shape for name, shape in own.items()
        }

    def state(self) -> StateSpec:
        return replace(self.attention.state(), fixed=self.mamba.state().fixed)
