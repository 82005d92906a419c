# SPDX-License-Identifier: Apache-2.0
"""A tokenizer from GGUF metadata: byte-level BPE, built directly from the vocabulary and merges, or
SentencePiece (see `gguf_sentencepiece`).

Of byte-level ones `tokenizer.ggml.pre` names how text is split before merging. The splits here are
those of the models' own tokenizer.json and of llama.cpp's table of pre-tokenizers. For SmolLM2
(`smollm`) each digit stands alone: transformers' own GGUF conversion leaves that out, so strings in
which blanks or other digits touch a digit differ from its ids (and agree with the model's original
tokenizer).
"""

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from freetoken_storage.gguf import GgufDamaged, GgufValue, read_gguf

from ..errors import TokenizerUnsupported
from ..model_calls.pieces import BYTE_ALPHABET
from .gguf_sentencepiece import stages
from .hf_tokenizer import HFTokenizer, TokenizerFiles, definition_bytes, digest

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _GPT4O.replace(_CONTRACTIONS, "").replace(r"\p{N}{1,3}", r"\p{N}")
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
    "gpt-4o": _split(_GPT4O),
    "tekken": _split(_TEKKEN),
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
    byte_level = model == "gpt2" and isinstance(pre, str) and pre in _PRETOKENIZERS
    if not byte_level and model != "llama":
        raise TokenizerUnsupported(
            "this kind of GGUF tokenizer is not built here",
            value=f"model {model!r}, pre {pre!r}",
            limit="model 'llama', or 'gpt2' with pre " + ", ".join(_PRETOKENIZERS),
            remedy="use the model's folder with its tokenizer.json",
        )
    tokens = _strings(metadata, "tokens")
    types = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != len(tokens):
        types = [1] * len(tokens)
    parts = _byte_level(metadata, tokens) if byte_level else stages(metadata, tokens, types)
    definition = {
        "version": "1.0",
        "added_tokens": _added(tokens, types, BYTE_ALPHABET if byte_level else None),
        "post_processor": None,
        **parts,
    }
    special = {name: tokens[token_id] for name, token_id in _ids(metadata, _SPECIAL, tokens)}
    stops = [token_id for _, token_id in _ids(metadata, {name: name for name in _STOPS}, tokens)]
    template = metadata.get("tokenizer.chat_template")
    return TokenizerFiles(
        definition,
        digest(definition_bytes(definition), special),
        special,
        tuple(stops),
        template if isinstance(template, str) else None,
    )


def _byte_level(metadata: Mapping[str, GgufValue], tokens: list[str]) -> dict[str, Any]:
    pre = str(metadata.get("tokenizer.ggml.pre", "gpt-2"))
    merges = _strings(metadata, "merges")
    return {
        "normalizer": {"type": "NFC"} if pre in _NFC else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRETOKENIZERS[pre]},
        "decoder": {**_BYTES, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in merges],
            "ignore_merges": pre in _WHOLE_WORDS,
        },
    }


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


def _added(
    tokens: list[str], types: list[Any], alphabet: Container[str] | None
) -> list[dict[str, Any]]:
    """Control and user-defined tokens. A control token that is not spelled in the alphabet of a
    byte-level vocabulary is a mislabel of the converter's: as an added token it could never be
    matched."""
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
        if kind == _USER_DEFINED
        or (kind == _CONTROL and (alphabet is None or all(letter in alphabet for letter in token)))
    ]
