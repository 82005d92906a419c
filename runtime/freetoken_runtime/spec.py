# SPDX-License-Identifier: Apache-2.0
"""What a model is, without its weights: shapes, state bytes, rope, context. Knows no torch.

A model is a tuple of layers, each a mixer and a feed-forward; the kinds of both have a file each in
`specs`. Everything else in the runtime branches on these records, never on a model's name.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from math import prod
from typing import Any, Protocol

from .specs.rope import RopeSpec

MAX_LAYERS = 1_000  # with MAX_EXPERTS a bound on what a hostile configuration makes us list


@dataclass(frozen=True)
class BufferSpec:
    """One buffer of a layer's state: its name and the shape of one row of it."""

    name: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class StateSpec:
    """What a mixer keeps of the past.

    `rows`: buffers with one row per `granularity` tokens, from which a shorter prefix can be taken
    at any multiple of it. `fixed`: fp32 buffers that every token overwrites and every anchor
    copies. `carry`: fp32 buffers with the raw rows of the group that is still open, which an anchor
    adds too; between groups there is nothing in them. `volatile`: fp32 buffers that no store keeps:
    after a restore, `replay_tokens` tokens before the position are forwarded again to fill them,
    and nothing else of the state changes. So they must follow from the layer's input at those
    tokens, and that must not depend on the past: layers next to the embedding are such.
    """

    rows: tuple[BufferSpec, ...] = ()
    fixed: tuple[BufferSpec, ...] = ()
    carry: tuple[BufferSpec, ...] = ()
    granularity: int = 1
    volatile: tuple[BufferSpec, ...] = ()
    replay_tokens: int = 0

    def __post_init__(self) -> None:
        assert bool(self.volatile) == bool(self.replay_tokens), self

    @property
    def sliceable(self) -> bool:
        """Whether any shorter prefix can be taken without an anchor."""
        return not self.fixed and self.granularity == 1

    @property
    def overwritten(self) -> tuple[BufferSpec, ...]:
        """What every token overwrites, in the order of `LayerState.fixed`."""
        return (*self.fixed, *self.carry, *self.volatile)

    def bytes_per_token(self, element_bytes: int = 4) -> int:
        """Bytes of rows per token, rounded up where a row serves several tokens."""
        return -(-element_bytes * sum(buffer.elements for buffer in self.rows) // self.granularity)

    def bytes_per_anchor(self) -> int:
        """Bytes of what an anchor copies."""
        return 4 * sum(buffer.elements for buffer in self.overwritten)


class FeedForwardSpec(Protocol):
    """What a layer does to each row by itself: a frozen dataclass."""

    def parameter_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Weights by name within the layer, matrices as [out, in], experts as [E, out, in]."""


class MixerSpec(FeedForwardSpec, Protocol):
    """What mixes the rows of a sequence: a frozen dataclass. `rope`: the positions it is called
    with, None if it needs none."""

    @property
    def rope(self) -> RopeSpec | None: ...

    def state(self) -> StateSpec: ...


@dataclass(frozen=True)
class LayerSpec:
    """x += r · mixer(norm x); x += r · feed_forward(norm x), r = `residual_multiplier`; a block
    that is None is left out with its norm. `post_norms`: a second norm behind each block."""

    mixer: MixerSpec | None
    feed_forward: FeedForwardSpec | None
    post_norms: bool = False
    residual_multiplier: float = 1.0

    def parameter_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Every weight of the layer by name, e.g. `q`, `q.bias`, `mixer_norm`."""
        shapes: dict[str, tuple[int, ...]] = {}
        blocks = (("mixer", self.mixer), ("feed_forward", self.feed_forward))
        for name, block in blocks:
            if block is None:
                continue
            shapes[f"{name}_norm"] = (hidden_size,)
            if self.post_norms:
                shapes[f"{name}_post_norm"] = (hidden_size,)
            own = block.parameter_shapes(hidden_size)
            assert shapes.keys().isdisjoint(own), sorted(shapes.keys() & own.keys())
            shapes |= own
        return shapes


@dataclass(frozen=True)
class ModelSpec:
    """Architecture of one model. `context_limit`: positions it was configured for.

    `norm_offset`: added to the stored weights of the norms (1 where they are stored as w of 1 + w).
    Logits are c · tanh(y / c) with c = `logit_soft_cap`, if there is one, of
    y = `logit_multiplier` · head(x).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    tied_head: bool
    context_limit: int
    norm_offset: float = 0.0
    embedding_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    logit_soft_cap: float | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def states(self) -> tuple[StateSpec, ...]:
        """One per layer; a layer without a mixer keeps nothing."""
        none = StateSpec()
        return tuple(none if x.mixer is None else x.mixer.state() for x in self.layers)

    def bytes_per_token(self, element_bytes: int = 4) -> int:
        return sum(state.bytes_per_token(element_bytes) for state in self.states())

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight by its name here, e.g. `layers.3.q`, `layers.3.q.bias`, with its shape.
        Matrices are [out, in]. A tied head has no entry: it is the embedding."""
        shapes: dict[str, tuple[int, ...]] = {"embedding": (self.vocab_size, self.hidden_size)}
        for index, layer in enumerate(self.layers):
            parts = layer.parameter_shapes(self.hidden_size)
            shapes |= {f"layers.{index}.{part}": shape for part, shape in parts.items()}
        shapes["norm"] = (self.hidden_size,)
        if not self.tied_head:
            shapes["head"] = (self.vocab_size, self.hidden_size)
        return shapes

    def fingerprint_parts(self) -> Mapping[str, str]:
        """Digests of what decides a state besides weights and kernels, each under its own name so
        that a difference can be told: `architecture`, `rope`, `context`."""
        ropes: list[Any] = []
        architecture = _described(self, ropes)
        del architecture["context_limit"]
        return {
            "architecture": _digest(architecture),
            "rope": _digest(ropes),
            "context": str(self.context_limit),
        }


def _described(value: Any, ropes: list[Any]) -> Any:
    """A record as JSON, each with the name of its type: two kinds may have the same numbers. Ropes
    are put aside."""
    if isinstance(value, tuple):
        return [_described(item, ropes) for item in value]
    if not is_dataclass(value):
        return value
    if isinstance(value, RopeSpec):
        ropes.append([value.dim, value.theta, _described(value.scaling, ropes)])
        return None
    record = {x.name: _described(getattr(value, x.name), ropes) for x in fields(value)}
    return {"type": type(value).__name__, **record}


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
