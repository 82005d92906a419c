# SPDX-License-Identifier: Apache-2.0
"""A `Tokenizer` over the `tokenizers` library, from a model folder or a parsed tokenizer.json.

Contents are encoded by a copy of the tokenizer that has no added tokens. Their vocabulary entries,
which merges, `ignore_merges` or a Unigram model could still reach, are taken out of the copy too.
At load each literal is encoded by the copy, alone and inside text; if its id appears all the same,
the tokenizer is refused. Runs of white space that are added tokens but not special ones (Gemma's
line ends, GPT-NeoX's indents) control nothing and stay in the copy: without them a model would read
line ends as bytes that it never saw.

Some byte-level vocabularies lack bytes (SmolLM2's has no 0x1D), and the library drops those without
a word. Here a character that cannot be spelled becomes U+FFFD, so that the stored text shows it.
"""

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from ..errors import TokenizerUnsupported
from ..model_calls.pieces import BYTE_ALPHABET, PieceDecoder, PieceTable, is_byte_level
from .tokenizer import encode_mixed

_CONTEXTS = ("{}", "a{}", "{}a", " {}", "{} ", "a {} b", "\n{}\n", "<{}>", "{0}{0}")
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


@dataclass(frozen=True)
class TokenizerFiles:
    """What a model says about its tokenizer, whatever the files were.

    `definition`: the content of a tokenizer.json. `digest`: hex, over everything that decides ids.
    """

    definition: Mapping[str, Any]
    digest: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    stop_tokens: tuple[str | int, ...] = ()
    chat_template: str | None = None


class HFTokenizer:
    """A `Tokenizer`: frames by the full tokenizer, contents by a copy without added tokens."""

    def __init__(self, files: TokenizerFiles) -> None:
        self._files = files
        definition = _plain(files.definition)
        try:
            self._full = tokenizers.Tokenizer.from_str(json.dumps(definition))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerUnsupported(
                "the tokenizer cannot be read", value=str(error), remedy="download it again"
            ) from error
        self._vocab_size = 1 + max(
            self._full.get_vocab(with_added_tokens=True).values(), default=-1
        )
        self._added = {
            token_id: token.content
            for token_id, token in self._full.get_added_tokens_decoder().items()
        }
        self._prefix = _PrefixSpace.of(definition)
        blanks = _blank_tokens(definition, self._prefix)
        self._controls = frozenset(self._added) - {token["id"] for token in blanks}
        walled = self._controls - self._unknown_ids(definition)
        bare = {**definition, "added_tokens": blanks, "post_processor": None}
        self._content = _ContentEncoders(bare, self._added, walled, self._prefix)
        self._pieces = PieceTable(self._full, definition, self._added)
        self._stop_ids = self._find_stops()

    @classmethod
    def load(cls, folder: str | Path) -> "HFTokenizer":
        """The tokenizer of a Hugging Face folder. TokenizerUnsupported names what is missing."""
        return cls(read_folder(Path(folder)))

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def digest(self) -> str:
        return self._files.digest

    @property
    def stop_ids(self) -> frozenset[int]:
        return self._stop_ids

    @property
    def special_tokens(self) -> Mapping[str, str]:
        return self._files.special_tokens

    @property
    def chat_template(self) -> str | None:
        return self._files.chat_template

    def encode_frame(self, text: str) -> list[int]:
        return list(encode_mixed(self, [(text, False)]))

    def encode_content(self, text: str, *, after: int | None = None) -> list[int]:
        if not text:
            return []
        return self._content.encode(text, after_added=after in self._controls)

    def split_frame(self, text: str) -> list[str | int]:
        encoding = self._full.encode(text, add_special_tokens=False)
        parts: list[str | int] = []
        end = 0
        for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id not in self._controls:
                continue
            if start > end:
                parts.append(text[end:start])
            parts.append(token_id)
            end = stop
        if end < len(text):
            parts.append(text[end:])
        return parts

    def decode(self, ids: Sequence[int], *, after: Sequence[int] = ()) -> str:
        decoder = self.stream(after=after)
        return "".join(map(decoder.feed, ids)) + decoder.flush()

    def stream(self, *, after: Sequence[int] = ()) -> PieceDecoder:
        strip_after = self._controls if self._prefix.after_added else frozenset()
        return PieceDecoder(self._pieces, strip_after, after)

    def piece(self, token_id: int) -> bytes:
        return self._pieces[token_id]

    def is_control(self, token_id: int) -> bool:
        return token_id in self._controls

    def _unknown_ids(self, definition: Mapping[str, Any]) -> frozenset[int]:
        """The unknown token stands for characters the vocabulary lacks, so contents may hold it.
        A byte-level vocabulary lacks none."""
        unknown = definition["model"].get("unk_token")
        token_id = self._full.token_to_id(unknown) if unknown else definition["model"].get("unk_id")
        return frozenset() if token_id is None else frozenset([token_id])

    def _find_stops(self) -> frozenset[int]:
        stops = set()
        for token in self._files.stop_tokens:
            token_id = token if isinstance(token, int) else self._full.token_to_id(token)
            if token_id is None or not 0 <= token_id < self._vocab_size:
                raise TokenizerUnsupported(
                    "a stop token is not in the vocabulary",
                    value=token,
                    limit=f"{self._vocab_size} ids",
                    remedy="correct eos_token in the tokenizer's or generation's configuration",
                )
            stops.add(token_id)
        return frozenset(stops)


@dataclass(frozen=True)
class _PrefixSpace:
    """Whether the tokenizer puts a space before text: at the very start, or also directly after
    an added token (Metaspace `always`, and the older Prepend normalizer)."""

    after_added: bool

    @classmethod
    def of(cls, definition: Mapping[str, Any]) -> "_PrefixSpace":
        for stage in _stages(definition.get("normalizer"), "normalizers"):
            if stage["type"] == "Prepend":
                return cls(after_added=True)
        for stage in _stages(definition.get("pre_tokenizer"), "pretokenizers"):
            if stage["type"] == "Metaspace":
                return cls(after_added=stage.get("prepend_scheme", "always") == "always")
            if stage.get("add_prefix_space"):
                return cls(after_added=True)
        return cls(after_added=False)


def _blank_tokens(definition: Mapping[str, Any], prefix: _PrefixSpace) -> list[dict[str, Any]]:
    """Added tokens that are white space and no more. Not where a blank is put after added tokens:
    there it could not be told from one of the text."""
    if prefix.after_added:
        return []
    return [
        token
        for token in definition.get("added_tokens") or ()
        if token["content"].isspace() and not token["special"]
    ]


def _stages(stage: Any, name: str) -> list[dict[str, Any]]:
    """The parts of a normalizer or pre-tokenizer, sequences unrolled."""
    if stage is None:
        return []
    if stage["type"] == "Sequence":
        return [part for inner in stage[name] for part in _stages(inner, name)]
    return [stage]


def _without_prefix(definition: Mapping[str, Any]) -> dict[str, Any]:
    """The same tokenizer, never putting a space before text."""
    plain = copy.copy(dict(definition))
    normalizers = [
        stage
        for stage in _stages(definition.get("normalizer"), "normalizers")
        if stage["type"] != "Prepend"
    ]
    plain["normalizer"] = {"type": "Sequence", "normalizers": normalizers} if normalizers else None
    pretokenizers = [
        dict(stage) for stage in _stages(definition.get("pre_tokenizer"), "pretokenizers")
    ]
    for stage in pretokenizers:
        if stage["type"] == "Metaspace":
            stage["prepend_scheme"] = "never"
            stage.pop("add_prefix_space", None)
        elif "add_prefix_space" in stage:
            stage["add_prefix_space"] = False
    plain["pre_tokenizer"] = (
        {"type": "Sequence", "pretokenizers": pretokenizers} if pretokenizers else None
    )
    return plain


class _ContentEncoders:
    """The copies without control tokens: one that never prefixes a space, and where the scheme asks
    for it one that does, for text directly after an added token."""

    def __init__(
        self,
        bare: dict[str, Any],
        added: Mapping[int, str],
        controls: frozenset[int],
        prefix: _PrefixSpace,
    ) -> None:
        self._added = added
        self._controls = controls
        self._missing = _missing_bytes(bare)
        self._plain = self._walled(_without_prefix(bare))
        self._prefixed = self._walled(bare) if prefix.after_added else self._plain

    def encode(self, text: str, *, after_added: bool) -> list[int]:
        encoder = self._prefixed if after_added else self._plain
        raw = text.encode("utf-8", "replace")
        if len(raw.translate(None, self._missing)) < len(raw):
            text = "".join(map(self._spellable, text))
        ids: list[int] = encoder.encode(text, add_special_tokens=False).ids
        return ids

    def _spellable(self, character: str) -> str:
        raw = character.encode("utf-8", "replace")
        return character if raw == raw.translate(None, self._missing) else "\ufffd"

    def _walled(self, definition: dict[str, Any]) -> tokenizers.Tokenizer:
        model = dict(definition["model"])
        if model["type"] == "Unigram":
            # A piece with a blank is out of reach: the pre-tokenizer turns every blank into U+2581.
            model["vocab"] = [
                [f" {index}", score] if index in self._controls else [piece, score]
                for index, (piece, score) in enumerate(model["vocab"])
            ]
        else:
            _remove_pieces(model, self._controls)
        encoder = tokenizers.Tokenizer.from_str(json.dumps({**definition, "model": model}))
        if leaks := self._leaks(encoder):
            raise TokenizerUnsupported(
                "contents could form control tokens with this tokenizer",
                value=[self._added[token_id] for token_id in sorted(leaks)][:5],
                remedy="use the model's own tokenizer files",
            )
        return encoder

    def _leaks(self, encoder: tokenizers.Tokenizer) -> set[int]:
        texts = [
            context.format(self._added[token_id])
            for token_id in self._controls
            for context in _CONTEXTS
        ]
        found: set[int] = set()
        for encoding in encoder.encode_batch_fast(texts, add_special_tokens=False):
            found.update(encoding.ids)
        return found & self._controls


def _remove_pieces(model: dict[str, Any], ids: frozenset[int]) -> None:
    """Take pieces, and the merges that make or use them, out of a BPE or WordPiece vocabulary."""
    removed = {piece for piece, token_id in model["vocab"].items() if token_id in ids}
    model["vocab"] = {piece: i for piece, i in model["vocab"].items() if piece not in removed}
    if "merges" in model:
        pairs = (
            merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]
        )
        model["merges"] = [
            [left, right] for left, right in pairs if not removed & {left, right, left + right}
        ]


def _missing_bytes(definition: Mapping[str, Any]) -> bytes:
    """Bytes that a byte-level vocabulary without an unknown token cannot spell."""
    model = definition["model"]
    if not is_byte_level(definition.get("decoder")) or model.get("unk_token"):
        return b""
    vocabulary = model["vocab"]
    return bytes(byte for letter, byte in BYTE_ALPHABET.items() if letter not in vocabulary)


def _plain(definition: Mapping[str, Any]) -> dict[str, Any]:
    """The definition without what would cut, pad or drop out at random."""
    plain = {**definition, "truncation": None, "padding": None}
    if not isinstance(plain.get("model"), dict):
        raise TokenizerUnsupported("tokenizer.json has no model", remedy="download it again")
    plain["model"] = {**plain["model"], "dropout": None}
    return plain


def read_folder(folder: Path) -> TokenizerFiles:
    """Reads tokenizer.json, and beside it what names the special tokens, the stop ids and the
    chat template."""
    raw = _read(folder / "tokenizer.json")
    if raw is None:
        raise TokenizerUnsupported(
            "the folder has no tokenizer.json",
            value=str(folder),
            remedy="save the tokenizer with transformers' save_pretrained",
        )
    config = _read_json(folder / "tokenizer_config.json")
    special = _special_tokens({**_read_json(folder / "special_tokens_map.json"), **config})
    stops: list[str | int] = []
    for name in ("generation_config.json", "config.json"):
        eos = _read_json(folder / name).get("eos_token_id")
        if eos is not None:
            stops.extend(eos if isinstance(eos, list) else [eos])
            break
    if special.get("eos_token"):
        stops.append(special["eos_token"])
    definition = _parse(raw, folder / "tokenizer.json")
    template = _chat_template(folder, config)
    return TokenizerFiles(definition, digest(raw, special), special, tuple(stops), template)


def definition_bytes(definition: Mapping[str, Any]) -> bytes:
    """A tokenizer.json as it is written here, so that its digest is that of what it came from."""
    return json.dumps(definition, ensure_ascii=False).encode()


def digest(definition: bytes, special: Mapping[str, str]) -> str:
    """Over everything that decides ids: the bytes of tokenizer.json, and the special tokens."""
    hashed = hashlib.sha256(definition)
    hashed.update(json.dumps(special, sort_keys=True).encode())
    return hashed.hexdigest()


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    special = {}
    for name in _SPECIAL_NAMES:
        token = config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            special[name] = token
    return special


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    raw = _read(folder / "chat_template.jinja")
    if raw is not None:
        return raw.decode("utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("tool_use", named.get("default"))
    return template if isinstance(template, str) else None


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TokenizerUnsupported("a file cannot be read", value=f"{path}: {error}") from error


def _parse(raw: bytes, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except ValueError as error:
        raise TokenizerUnsupported(
            "a file is not JSON", value=f"{path}: {error}", remedy="download it again"
        ) from error
    if not isinstance(value, dict):
        raise TokenizerUnsupported("a file is not a JSON object", value=str(path))
    return value


def _read_json(path: Path) -> dict[str, Any]:
    raw = _read(path)
    return {} if raw is None else _parse(raw, path)
