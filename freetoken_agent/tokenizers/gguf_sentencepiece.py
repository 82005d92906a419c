# SPDX-License-Identifier: Apache-2.0
"""A SentencePiece BPE vocabulary (`tokenizer.ggml.model` "llama") as parts of a tokenizer.json.

A file has pieces with scores; SentencePiece joins, again and again, the two neighbours whose joined
piece has the best score. The same as merges: every way to cut a piece into two others, best score
first. Only normal pieces are joined, as in SentencePiece: text that spells a control token or
`<0x0A>` stays letters, also where llama.cpp would find it in its table.

A blank before text, unless `add_space_prefix` is false (Gemma), is put after every added token,
as by llama.cpp and by the tokenizer.json of Llama 2 and Mistral. transformers' own GGUF conversion
puts it only before a whole text, and not where the text has one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from freetoken_storage.gguf import GgufValue

from ..errors import TokenizerUnsupported

_NORMAL, _UNKNOWN = 1, 2
_BLANK = "\u2581"
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_REMEDY = "use the model's folder with its tokenizer.json"


def stages(
    metadata: Mapping[str, GgufValue], tokens: Sequence[str], types: Sequence[Any]
) -> dict[str, Any]:
    """Normalizer, pre-tokenizer, decoder and model. TokenizerUnsupported."""
    stored = metadata.get("tokenizer.ggml.merges")
    if isinstance(stored, list):
        merges = [str(merge).split(" ", 1) for merge in stored]
    else:
        merges = _merges(tokens, types, _scores(metadata, len(tokens)))
    blanks = [{"type": "Replace", "pattern": {"String": " "}, "content": _BLANK}]
    prefixes = metadata.get("tokenizer.ggml.add_space_prefix", True)
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                *([{"type": "Prepend", "prepend": _BLANK}] if prefixes else ()),
                *blanks,
            ],
        },
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _BLANK}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *([strip] if prefixes else ()),
            ],
        },
        "model": {
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": merges,
            "unk_token": _unknown(metadata, tokens, types),
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def _scores(metadata: Mapping[str, GgufValue], count: int) -> Sequence[float]:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != count or isinstance(scores[0], str):
        raise TokenizerUnsupported(
            "the GGUF file has neither merges nor a score for each token",
            value=len(scores) if isinstance(scores, list) else None,
            limit=count,
            remedy="download the file again",
        )
    return [float(score) for score in scores]


def _merges(
    tokens: Sequence[str], types: Sequence[Any], scores: Sequence[float]
) -> list[list[str]]:
    """Best score first; where scores are equal, as for the ways to cut one piece, the longest left
    part, as transformers orders them."""
    normal = {
        token: score
        for token, kind, score in zip(tokens, types, scores, strict=True)
        if kind == _NORMAL
    }
    found = []
    for token, score in normal.items():
        for cut in range(1, len(token)):
            left = token[:cut]
            if left in normal and token[cut:] in normal:
                found.append((-score, -cut, -len(token), left, token[cut:]))
    found.sort(key=lambda merge: merge[:3])
    return [[left, right] for *_, left, right in found]


def _unknown(
    metadata: Mapping[str, GgufValue], tokens: Sequence[str], types: Sequence[Any]
) -> str | None:
    """The token of what nothing spells. With all bytes there is no such thing."""
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    if isinstance(unknown, int) and 0 <= unknown < len(tokens):
        return tokens[unknown]
    if _UNKNOWN in types:
        return tokens[types.index(_UNKNOWN)]
    if missing := sorted(set(_BYTES) - set(tokens)):
        raise TokenizerUnsupported(
            "the vocabulary has no token for unknown text, nor all bytes",
            value=missing[:3],
            limit="256 bytes",
            remedy=_REMEDY,
        )
    return None
