# SPDX-License-Identifier: Apache-2.0
"""Safetensors files tensor by tensor: the library's own writer wants all of them at once."""

import json
import os
import struct
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

import torch

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}


def write_safetensors(
    file: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterator[torch.Tensor],
    dtype: torch.dtype = torch.float32,
) -> Iterator[int]:
    """Write tensors of one dtype one after another, in the order of `shapes`, yielding the bytes of
    each; the file is durable when the iterator ends."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + dtype.itemsize * prod(shape)
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for shape, tensor in zip(shapes.values(), tensors, strict=True):
            assert tuple(tensor.shape) == shape and tensor.dtype is dtype, shape
            yield out.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        out.flush()
        os.fsync(out.fileno())
