# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention (arXiv 2510.26692): the gated delta rule with a decay per key channel.

    S_t = exp(g_t) ⊙ S_{t-1}               g_t [Dk]: every channel of the key decays by itself
    S_t = S_t + k_t ⊗ beta_t · (v_t - S_tᵀ k_t)
    o_t = S_tᵀ q_t

Keys and queries arrive normalised, queries scaled; as many heads of one as of the other. The state
is [H, Dk, Dv] fp32.
"""
