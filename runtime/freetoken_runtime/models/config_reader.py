# SPDX-License-Identifier: Apache-2.0
"""Reading a `config.json` so that no key goes unread.

A family takes the keys it understands; `finish` refuses whatever is left, unless it is listed here
as changing no logit.
"""

import re
from collections.abc import Mapping
from typing import Any

from ..errors import UnsupportedConfig

# Training, generation defaults, file bookkeeping: none of them changes a logit at inference.
HARMLESS_KEYS = frozenset(
    """
    _attn_implementation_autoset _flash_attn_2_enabled _name_or_path architectures
    attention_dropout auto_map bad_words_ids begin_suppress_tokens bos_token_id cache_implementation
    chunk_size_feed_forward classifier_dropout cross_attention_hidden_size decoder_start_token_id
    diversity_penalty do_sample dtype early_stopping embd_pdrop encoder_no_repeat_ngram_size
    eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id hidden_dropout id2label initializer_range is_decoder is_encoder_decoder
    is_llama_config label2id length_penalty max_length max_window_layers min_length model_type
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions
    output_hidden_states output_scores pad_token_id prefix pretraining_tp problem_type
    pruned_heads remove_invalid_values repetition_penalty resid_pdrop return_dict
    return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature
    tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript
    transformers.js_config transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16
    use_cache
    """.split()
)

QUANTISATION_KEYS = ("quantization_config", "compression_config")

# Of a multimodal model's own keys, those that do not reach its text part.
_WRAPPER_KEY = re.compile(
    r".*_config|.*_token_(id|index)|.*_token|vision_.*|audio_.*|image_.*|video_.*|mm_.*"
    r"|multimodal_projector_bias|projector_hidden_act|spatial_merge_size|language_model_only"
)


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of the text model inside a multimodal one; any other as it is.

    How weights are quantised is left out: whoever reads them asks for it. UnsupportedConfig for
    keys beside `text_config` that may change the text model."""
    text = config.get("text_config")
    source = text if isinstance(text, Mapping) else config
    inner = {key: value for key, value in source.items() if key not in QUANTISATION_KEYS}
    if source is config:
        return inner
    tied = config.get("tie_word_embeddings")
    if tied is not None:
        inner["tie_word_embeddings"] = tied  # the head belongs to the wrapper
    for key, value in config.items():
        if key in HARMLESS_KEYS or _WRAPPER_KEY.fullmatch(key) or inner.get(key) == value:
            continue
        raise UnsupportedConfig(
            f"config key {key!r} beside 'text_config' is unknown and may change the maths",
            value=value,
        )
    return inner


class ConfigReader:
    """One pass over a configuration. Mutable: it remembers which keys were read."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._unread = set(config) - HARMLESS_KEYS

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or `default` where the key is absent or null."""
        self._unread.discard(key)
        value = self._config.get(key)
        return default if value is None else value

    def has(self, key: str) -> bool:
        """Whether the key is there, be it null."""
        return key in self._config

    def whole(self, key: str, default: int | None = None, *, maximum: int = 2**31 - 1) -> int:
        """A positive integer; required without a default."""
        value = self.get(key, default)
        if value is None:
            raise UnsupportedConfig(f"config key {key!r} is missing", remedy="complete config.json")
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= maximum:
            raise UnsupportedConfig(f"config key {key!r}", value=value, limit=f"1 to {maximum}")
        return value

    def number(self, key: str, default: float) -> float:
        """A positive, finite number."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UnsupportedConfig(f"config key {key!r}", value=value, limit="a number")
        if not 0 < value < float("inf"):
            raise UnsupportedConfig(f"config key {key!r}", value=value, limit="positive and finite")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise UnsupportedConfig(f"config key {key!r}", value=value, limit="true or false")
        return value

    def require(self, key: str, *supported: Any) -> None:
        """Read a key that may be absent or null but otherwise must have one of these values."""
        value = self.get(key)
        if value is not None and value not in supported:
            names = ", ".join(repr(item) for item in supported) or "only null"
            raise UnsupportedConfig(
                f"config key {key!r} is not supported", value=value, limit=names
            )

    def finish(self) -> None:
        """UnsupportedConfig naming the first key that nobody read and nobody knows harmless."""
        for key in sorted(self._unread):
            raise UnsupportedConfig(
                f"config key {key!r} is unknown and may change the maths",
                value=self._config[key],
                remedy="use a model of a supported family, or remove the key if it has no effect",
            )
