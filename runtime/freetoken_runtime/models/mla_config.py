# SPDX-License-Identifier: Apache-2.0
"""Latent attention in configurations and checkpoints, as DeepSeek spells it."""

from ..errors import UnsupportedConfig
from ..spec import ModelSpec
from ..specs.attention import MlaSpec
from ..specs.rope import RopeSpec
from ..weight_source import Shape, Stored, Ways
from .config_reader import ConfigReader
from .rope_config import read_rope, score_scale
from .weight_names import Naming


def read_mla(
    reader: ConfigReader, rope: RopeSpec | None, *, scaling: float | None = None, pairs: bool
) -> MlaSpec:
    """The mixer of every layer with latent attention. Key and value heads have no number here, and
    `head_dim` follows from the others."""
    heads = reader.whole("num_attention_heads")
    for key in ("num_key_value_heads", "head_dim", "qk_head_dim"):
        reader.get(key)
    nope, turning = reader.whole("qk_nope_head_dim", 128), reader.whole("qk_rope_head_dim", 64)
    rank = reader.whole("kv_lora_rank", 512)
    null = reader.has("q_lora_rank") and reader.get("q_lora_rank") is None
    if pairs and (nope % 2 or turning % 2 or rank % 2):
        raise UnsupportedConfig(
            "a rope that turns neighbours needs even numbers of dimensions and ranks",
            value=(nope, turning, rank),
        )
    return MlaSpec(
        num_heads=heads,
        kv_rank=rank,
        q_rank=None if null else reader.whole("q_lora_rank", 1536),
        nope_dim=nope,
        rope_dim=turning,
        value_dim=reader.whole("v_head_dim", 128),
        rope=rope,
        scaling=scaling,
        bias=reader.flag("attention_bias"),
        pairs=pairs,
    )


def read_deepseek_mla(reader: ConfigReader, context: int, *, pairs: bool) -> MlaSpec:
    """With rope; where it is scaled, `mscale_all_dim` scales the scores too."""
    turning = reader.whole("qk_rope_head_dim", 64)
    width = reader.whole("qk_nope_head_dim", 128) + turning
    rope = read_rope(reader, turning, context)
    return read_mla(reader, rope, scaling=width**-0.5 * score_scale(reader), pairs=pairs)


def mla_names(spec: ModelSpec, module: str = "self_attn") -> dict[str, str | Naming]:
    """Table entries of latent attention. Checkpoints have one matrix for both parts of all queries,
    one for the latent and the key that turns, and one for keys and values."""
    mixer = next(x.mixer for x in spec.layers if isinstance(x.mixer, MlaSpec))
    nope, turning, value = mixer.nope_dim, mixer.rope_dim, mixer.value_dim
    heads, rank, pairs = mixer.num_heads, mixer.kv_rank, mixer.pairs
    queries = "q_proj" if mixer.q_rank is None else "q_b_proj"
    of_head, of_latent = (heads, nope + turning), (1, rank + turning)
    q = f"{module}.{queries}.weight"
    table: dict[str, str | Naming] = {
        "q_down": f"{module}.q_a_proj",
        "q_down_norm": f"{module}.q_a_layernorm",
        "q_nope": _rows(q, of_head, (0, nope), in_pairs=pairs),
        "q_rope": _rows(q, of_head, (nope, nope + turning), in_pairs=pairs, turned=pairs),
        "latent_norm": f"{module}.kv_a_layernorm",
        "k_up": _rows(f"{module}.kv_b_proj.weight", (heads, nope + value), (0, nope)),
        "v_up": _rows(f"{module}.kv_b_proj.weight", (heads, nope + value), (nope, nope + value)),
        "o": f"{module}.o_proj",
    }
    for suffix, kind in (("", "weight"), (".bias", "bias")):
        down = f"{module}.kv_a_proj_with_mqa.{kind}"
        table[f"latent{suffix}"] = _rows(down, of_latent, (0, rank), in_pairs=pairs)
        turned = (rank, rank + turning)
        table[f"k_rope{suffix}"] = _rows(down, of_latent, turned, in_pairs=pairs, turned=pairs)
    return table


def _rows(
    name: str,
    groups: tuple[int, int],
    rows: tuple[int, int],
    *,
    in_pairs: bool = False,
    turned: bool = False,
) -> Naming:
    """A range of rows of every group (how many, of how many rows) of a matrix or bias. `in_pairs`:
    rows are pairs of neighbours; `turned`: take the first of every pair, then the second ones."""
    (count, size), (start, stop) = groups, rows

    def ways(prefix: str, shape: Shape) -> Ways:
        rest = shape[1:]
        stored = (count * size, *rest)
        if not in_pairs:
            part = ((1, start, stop),)
            return ((Stored(prefix + name, stored, (count, size, *rest), part),),)
        view = (count, size // 2, 2, *rest)
        order = (0, 2, 1, *range(3, len(view))) if turned else ()
        part = ((1, start // 2, stop // 2),)
        return ((Stored(prefix + name, stored, view, part, order),),)

    return ways
