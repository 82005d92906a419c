# SPDX-License-Identifier: Apache-2.0
"""Which scheme a checkpoint is quantised by, as its config.json says."""

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import UnsupportedQuantization
from ..models.config_reader import QUANTISATION_KEYS
from .compressed_tensors import CompressedScheme
from .fp8 import Fp8Scheme
from .mxfp4 import Mxfp4Scheme
from .tensors import Scheme

_SCHEMES: Mapping[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "fp8": Fp8Scheme.read,
    "compressed-tensors": CompressedScheme.read,
    "mxfp4": Mxfp4Scheme.read,
}


def read_scheme(config: Mapping[str, Any]) -> Scheme | None:
    """None if the weights are not quantised. UnsupportedQuantization naming any other method,
    UnsupportedConfig naming a setting."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        for key in QUANTISATION_KEYS:
            settings = part.get(key)
            if settings is not None:
                return _read(key, settings)
    return None


def _read(key: str, settings: object) -> Scheme:
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    if not isinstance(settings, Mapping) or not isinstance(method, str) or method not in _SCHEMES:
        raise UnsupportedQuantization(
            f"the weights are stored quantised (config key {key!r}), which is not supported",
            value=method or settings,
            limit=", ".join(_SCHEMES),
            remedy="use the model's float32, bfloat16 or float16 weights, and quant=",
        )
    return _SCHEMES[method](settings)
