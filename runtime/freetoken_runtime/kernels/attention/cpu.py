# SPDX-License-Identifier: Apache-2.0
"""Attention over one piece of keys by torch's flash kernel for CPUs, and the merge of pieces.

The kernel kills the process on zero keys or zero queries, and its causal mask starts at the top
left, so `causal` is for a square only: both are asserted here.
"""

import torch

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [n, Hq, D], k and v [S, Hkv, D] -> output [n, Hq, D], log-sum-exp [n, Hq] fp32.

    Any strides; grouped heads are taken as they are. `causal`: row i sees keys 0..i (n = S)."""
    queries, keys = q.shape[0], k.shape[0]
    assert queries and keys and (not causal or queries == keys), (queries, keys, causal)
    out, lse = _flash(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        0.0,
        causal,
        scale=scale,
    )
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def merge(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Outputs over disjoint sets of keys -> the output over all of them, [n, Hq, D]."""
    if len(parts) == 1:
        return parts[0][0]
    outputs = torch.stack([out for out, _ in parts])  # [P, n, Hq, D]
    weights = torch.stack([lse for _, lse in parts]).softmax(0)  # [P, n, Hq]
    return outputs.mul_(weights[..., None]).sum(0)
