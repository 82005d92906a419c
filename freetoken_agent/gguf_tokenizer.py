# SPDX-License-Identifier: Apache-2.0
"""A tokenizer from GGUF metadata: byte-level BPE, built directly from the vocabulary and merges.

`tokenizer.ggml.pre` names how text is split before merging. The splits here are those of the
models' own tokenizer.json and of llama.cpp's table of pre-tokenizers. For SmolLM2 (`smollm`) each
digit stands alone: transformers' own GGUF conversion leaves that out, so strings in which blanks or
other digits touch a digit differ from its ids (and agree with the model's original tokenizer).
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freetoken_storage.gguf import GgufDamaged, GgufValue, read_gguf

from .errors import TokenizerUnsupported
from .hf_tokenizer import HFTokenizer, TokenizerFiles
from .pieces import BYTE_ALPHABET

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_GPT2 = [{**_BYTES, "use_regex": True}]
_DIGITS = [{"type": "Digits", "individual_digits": True}, *_GPT2]


def _split(pattern: str) -> list[dict[str, Any]]:
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return [split, _BYTES]


_PRETOKENIZERS: Mapping[str, list[dict[str, Any]]] = {
    "gpt-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "llama3": _split(_LLAMA3),
    "llama-v3": _split(_LLAMA3),
    "llama-bpe": _split(_LLAMA3),
    "qwen2": _split(_QWEN2),
    "deepseek-r1-qwen": _split(_QWEN2),
}
_WHOLE_WORDS = frozenset(("llama3", "llama-v3", "llama-bpe"))  # a word of the vocabulary wins
_NFC = frozenset(("qwen2", "deepseek-r1-qwen"))
_CONTROL, _USER_DEFINED = 3, 4
_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_STOPS = ("eos_token_id", "eot_token_id", "eom_token_id")


def load_gguf_tokenizer(path: str | Path) -> HFTokenizer:
    """The tokenizer of a .gguf file. TokenizerUnsupported if it is of a kind not built here."""
    return HFTokenizer(from_metadata(read_metadata(path)))


def read_metadata(path: str | Path) -> Mapping[str, GgufValue]:
    """Every key of the file. TokenizerUnsupported, naming the file, if it is not a whole GGUF."""
    try:
        return read_gguf(path).metadata
    except (GgufDamaged, OSError) as error:
        raise TokenizerUnsupported(
            "not a readable GGUF file",
            value=f"{path}: {error.detail if isinstance(error, GgufDamaged) else error}",
            remedy="download the file again",
        ) from error


def from_metadata(metadata: Mapping[str, GgufValue]) -> TokenizerFiles:
    """A tokenizer.json, and what goes with it, from GGUF metadata."""
    model = metadata.get("tokenizer.ggml.model")
    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if model != "gpt2" or not isinstance(pre, str) or pre not in _PRETOKENIZERS:
        raise TokenizerUnsupported(
            "this kind of GGUF tokenizer is not built here",
            value=f"model {model!r}, pre {pre!r}",
            limit="model 'gpt2' with pre " + ", ".join(_PRETOKENIZERS),
            remedy="use the model's folder with its tokenizer.json",
        )
    tokens = _strings(metadata, "tokens")
    merges = _strings(metadata, "merges")
    types = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != len(tokens):
        types = [1] * len(tokens)
    definition = {
        "version": "1.0",
        "added_tokens": _added(tokens, types),
        "normalizer": {"type": "NFC"} if pre in _NFC else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRETOKENIZERS[pre]},
        "post_processor": None,
        "decoder": {**_BYTES, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in merges],
            "ignore_merges": pre in _WHOLE_WORDS,
        },
    }
    special = {name: tokens[token_id] for name, token_id in _ids(metadata, _SPECIAL, tokens)}
    stops = [token_id for _, token_id in _ids(metadata, {name: name for name in _STOPS}, tokens)]
    hashed = hashlib.sha256(json.dumps([definition, special], sort_keys=True).encode())
    template = metadata.get("tokenizer.chat_template")
    return TokenizerFiles(
        definition,
        hashed.hexdigest(),
        special,
        tuple(stops),
        template if isinstance(template, str) else None,
    )


def _strings(metadata: Mapping[str, GgufValue], name: str) -> list[str]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise TokenizerUnsupported(
            f"the GGUF file has no tokenizer.ggml.{name}", remedy="download the file again"
        )
    return [str(item) for item in value]


def _ids(
    metadata: Mapping[str, GgufValue], keys: Mapping[str, str], tokens: list[str]
) -> list[tuple[str, int]]:
    found = []
    for name, key in keys.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}")
        if token_id is None:
            continue
        if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
            raise TokenizerUnsupported(
                f"tokenizer.ggml.{key} is not in the vocabulary",
                value=token_id,
                limit=f"{len(tokens)} tokens",
                remedy="download the file again",
            )
        found.append((name, token_id))
    return found


def _added(tokens: list[str], types: list[Any]) -> list[dict[str, Any]]:
    """Control and user-defined tokens. A control token that is not spelled in the byte alphabet
    is a mislabel of the converter's: as an added token it could never be matched."""
    return [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if (kind == _CONTROL and all(letter in BYTE_ALPHABET for letter in token))
        or kind == _USER_DEFINED
    ]
