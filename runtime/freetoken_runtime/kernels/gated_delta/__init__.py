# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule (arXiv 2412.06464): one decay per head and token.

    S_t = exp(g_t) · S_{t-1}
    S_t = S_t + k_t ⊗ beta_t · (v_t - S_tᵀ k_t)
    o_t = S_tᵀ q_t

Keys and queries arrive normalised, queries scaled. Each of the Hk key heads serves Hv / Hk
consecutive value heads. The state is [Hv, Dk, Dv] fp32.
"""
