# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints in safetensors files: a matrix and its scales are several tensors there,
and one here. A file per scheme; `config` tells which one a checkpoint has."""
