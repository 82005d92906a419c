# SPDX-License-Identifier: Apache-2.0
"""How models write calls of tools: formats as data, learned from a template or chosen by name."""
