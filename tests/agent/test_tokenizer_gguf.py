# SPDX-License-Identifier: Apache-2.0
"""SmolLM2's tokenizer from its GGUF file, against an independent encoder and transformers."""

import shutil
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import regex  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken_agent.catalog import ModelNotFound, resolve
from freetoken_agent.cli.convert import folder_files
from freetoken_agent.errors import TokenizerUnsupported
from freetoken_agent.model_calls.pieces import BYTE_ALPHABET
from freetoken_agent.tokenizers.gguf_tokenizer import (
    from_metadata,
    load_gguf_tokenizer,
    read_metadata,
)
from freetoken_agent.tokenizers.hf_tokenizer import HFTokenizer
from freetoken_agent.upcycled import _write_tokenizer
from freetoken_storage.gguf import GgufValue

TEXTS = (
    "Hello, world!", "  two  blanks  ", "1234567", "a1b22c333", "3 4  55   6", "x = 10  # ten",
    " 7", "  7", "\n\n8\n", "tab\t9", "it's we'll I'd", "naïve café — “quotes”", "日本語のテキスト",
    "😀 emoji 👩‍👩‍👧",
    "def f(x):\n    return x**2\n", "", " ", "\n", "½ ² ٣", "e\u0301", "\x00\x7f\x1b[1m",
    "<|im_start|>user\nhi<|im_end|>", "price: $12,345.67", "v1.2.3-rc4", "a\u00a0b", "​",
)  # fmt: skip


@pytest.fixture(scope="module")
def path() -> Path:
    try:
        return resolve("smollm2")
    except ModelNotFound:
        pytest.skip("SmolLM2 is not pulled: freetoken-agent pull smollm2")


@pytest.fixture(scope="module")
def metadata(path: Path) -> Mapping[str, GgufValue]:
    return read_metadata(path)


@pytest.fixture(scope="module")
def tokenizer(metadata: Mapping[str, GgufValue]) -> HFTokenizer:
    return HFTokenizer(from_metadata(metadata))


class Reference:
    """llama.cpp's rule for `smollm`, written out: digits apart, GPT-2's pattern, then merges by
    rank. Characters with bytes that the vocabulary lacks are U+FFFD first. It shares no code with
    the `tokenizers` library."""

    PATTERN = regex.compile(
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    )

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        tokens = metadata["tokenizer.ggml.tokens"]
        self.ids = {token: index for index, token in enumerate(tokens)}
        merges = metadata["tokenizer.ggml.merges"]
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self.letters = {byte: letter for letter, byte in BYTE_ALPHABET.items()}
        self.lacking = {byte for byte in range(256) if self.letters[byte] not in self.ids}

    def spelled(self, text: str) -> str:
        return "".join("\ufffd" if self.lacking & set(c.encode()) else c for c in text)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for section in regex.split(r"(\p{N})", self.spelled(text)):
            for word in self.PATTERN.findall(section):
                ids.extend(self.ids[piece] for piece in self.merge(word))
        return ids

    def merge(self, word: str) -> list[str]:
        pieces = [self.letters[byte] for byte in word.encode()]
        while True:
            ranked = [
                (self.ranks[pair], index)
                for index, pair in enumerate(zip(pieces, pieces[1:], strict=False))
                if pair in self.ranks
            ]
            if not ranked:
                return pieces
            _, at = min(ranked)
            pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


@pytest.mark.smollm2
def test_contents_follow_llama_cpp_rule(
    tokenizer: HFTokenizer, metadata: Mapping[str, GgufValue]
) -> None:
    """Oracle: the rule written out in plain Python."""
    reference = Reference(metadata)
    for text in TEXTS:
        assert tokenizer.encode_content(text) == reference.encode(text), text


@pytest.mark.smollm2
def test_any_text_follows_llama_cpp_rule(
    tokenizer: HFTokenizer, metadata: Mapping[str, GgufValue]
) -> None:
    """Oracle: the rule written out in plain Python, on random text rich in digits and blanks."""
    reference = Reference(metadata)
    alphabet = st.one_of(
        st.sampled_from(" \n\t0123456789ab.,'<|>_é½"), st.characters(codec="utf-8")
    )

    @settings(max_examples=200, deadline=None)
    @given(st.text(alphabet, max_size=40))
    def check(text: str) -> None:
        ids = tokenizer.encode_content(text)
        assert ids == reference.encode(text)
        assert tokenizer.decode(ids) == reference.spelled(text)
        assert not any(map(tokenizer.is_control, ids))

    check()


@pytest.mark.smollm2
def test_only_digits_differ_from_transformers(
    tokenizer: HFTokenizer, path: Path, tmp_path: Path
) -> None:
    """Oracle: transformers' own GGUF conversion, which leaves the digit split out: equal on text
    without digits, and on digits seen to differ (so this stays a known difference)."""
    transformers = pytest.importorskip("transformers")
    shutil.copy(path, tmp_path / "model.gguf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    for text in TEXTS:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        if not regex.search(r"\p{N}", text):
            assert tokenizer.encode_frame(text) == ids, text
    theirs.save_pretrained(tmp_path / "saved")
    saved = HFTokenizer.load(tmp_path / "saved")  # a folder as transformers writes it
    assert saved.stop_ids == tokenizer.stop_ids
    assert saved.chat_template == tokenizer.chat_template
    for text in TEXTS:
        assert saved.encode_frame(text) == theirs(text, add_special_tokens=False)["input_ids"]
    differing = theirs("3 4  55   6", add_special_tokens=False)["input_ids"]
    assert tokenizer.encode_frame("3 4  55   6") != differing


@pytest.mark.smollm2
def test_s55_every_control_literal_is_plain_text_in_contents(tokenizer: HFTokenizer) -> None:
    """Oracle: the frame encoder, which gives the control id for the same literal."""
    literals = [
        tokenizer.decode([i]) for i in range(tokenizer.vocab_size) if tokenizer.is_control(i)
    ]
    assert "<|im_end|>" in literals and len(literals) == 17
    for literal in literals:
        for text in (literal, f"a{literal}b", f" {literal}\n{literal}"):
            ids = tokenizer.encode_content(text)
            assert not any(map(tokenizer.is_control, ids))
            assert tokenizer.decode(ids) == text
            assert any(map(tokenizer.is_control, tokenizer.encode_frame(text)))


@pytest.mark.smollm2
def test_bytes_the_vocabulary_lacks_are_seen_not_dropped(tokenizer: HFTokenizer) -> None:
    """Oracle: U+FFFD stands where the library alone drops the character."""
    assert tokenizer.decode(tokenizer.encode_content("a\x1db\U00040000c")) == "a\ufffdb\ufffdc"


@pytest.mark.smollm2
def test_facts_of_the_file(tokenizer: HFTokenizer) -> None:
    """Oracle: the model card."""
    assert tokenizer.vocab_size == 49152
    assert [tokenizer.decode([i]) for i in tokenizer.stop_ids] == ["<|im_end|>"]
    assert tokenizer.special_tokens["bos_token"] == "<|im_start|>"
    assert tokenizer.chat_template is not None and "SmolLM" in tokenizer.chat_template


@pytest.mark.smollm2
def test_digest_is_stable_and_names_the_content(
    tokenizer: HFTokenizer, metadata: Mapping[str, GgufValue], path: Path
) -> None:
    """Oracle: a second load, and a load with one merge fewer."""
    assert load_gguf_tokenizer(path).digest == tokenizer.digest
    merges = metadata["tokenizer.ggml.merges"]
    assert isinstance(merges, list)
    changed = {**metadata, "tokenizer.ggml.merges": merges[:-1]}
    assert from_metadata(changed).digest != tokenizer.digest


def tiny(changes: Mapping[str, GgufValue] | None = None) -> dict[str, GgufValue]:
    """Metadata of a byte-level tokenizer of 256 letters, one merge and one control token."""
    tokens = [*sorted(BYTE_ALPHABET, key=BYTE_ALPHABET.__getitem__), "ab", "<|end|>"]
    made: dict[str, GgufValue] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*[1] * 257, 3],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 257,
    }
    return made | dict(changes or {})


def test_a_tiny_tokenizer_from_metadata() -> None:
    """Oracle: ids worked out by hand."""
    tokenizer = HFTokenizer(from_metadata(tiny()))
    assert tokenizer.encode_frame("ab<|end|>c") == [256, 257, ord("c")]
    assert tokenizer.encode_content("<|end|>") == list(b"<|end|>")
    assert tokenizer.stop_ids == {257}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.pre": "unheard-of"}, "'unheard-of'"),
        ({"tokenizer.ggml.tokens": 3}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": [1, 2]}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.eos_token_id": 258}, "eos_token_id"),
        ({"tokenizer.ggml.merges": ["no such pieces"]}, "cannot be read"),
    ],
)
def test_metadata_that_cannot_be_used_is_refused(
    changes: Mapping[str, GgufValue], says: str
) -> None:
    """Oracle: the error's type, code and what it names."""
    with pytest.raises(TokenizerUnsupported, match=says) as caught:
        HFTokenizer(from_metadata(tiny(changes)))
    assert caught.value.code == "tokenizer_unsupported"


@pytest.mark.parametrize("writer", ["converted", "mixture"])
def test_a_folder_made_of_a_file_has_its_digest(writer: str, small: Path, tmp_path: Path) -> None:
    """Else sessions of the one would open read-only with the other. Oracle: the digest of the file
    itself. `eos_token` is in both, and decides as much."""
    files = from_metadata(read_metadata(small))
    folder = tmp_path / "made"
    folder.mkdir()
    if writer == "converted":
        for name, content in folder_files(files).items():
            (folder / name).write_bytes(content)
    else:
        _write_tokenizer(small, folder)
    assert HFTokenizer.load(folder).digest == HFTokenizer(files).digest == files.digest
    (folder / "tokenizer_config.json").write_text('{"eos_token": "ab"}')
    assert HFTokenizer.load(folder).digest != files.digest


def pack(value: GgufValue) -> bytes:
    """A value as GGUF writes it, without its type."""
    if isinstance(value, str):
        raw = value.encode()
        return struct.pack("<Q", len(raw)) + raw
    assert isinstance(value, int)
    return struct.pack("<I", value)


def gguf(pairs: Mapping[str, GgufValue], version: int = 3) -> bytes:
    """A GGUF file without tensors."""
    data = b"GGUF" + struct.pack("<IQQ", version, 0, len(pairs))
    for key, value in pairs.items():
        data += pack(key)
        if isinstance(value, list):
            kind = 8 if isinstance(value[0], str) else 4
            data += struct.pack("<IIQ", 9, kind, len(value)) + b"".join(map(pack, value))
        else:
            data += struct.pack("<I", 8 if isinstance(value, str) else 4) + pack(value)
    return data


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "small.gguf"
    file.write_bytes(gguf(tiny()))
    yield file


def test_a_file_of_ones_own_is_read(small: Path) -> None:
    """Oracle: the metadata it was written from."""
    assert read_metadata(small) == tiny()
    assert load_gguf_tokenizer(small).encode_frame("ab<|end|>") == [256, 257]


def test_every_truncation_is_refused_by_name(small: Path) -> None:
    """Oracle: the whole file, which is accepted."""
    whole = small.read_bytes()
    for size in (*range(0, 200), *range(200, len(whole), 97)):
        small.write_bytes(whole[:size])
        with pytest.raises(TokenizerUnsupported, match=r"small\.gguf"):
            read_metadata(small)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\x03\x04" + bytes(64),
        gguf({}, version=1),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60),
        gguf({"k": "v"})[:-17] + struct.pack("<Q", 1 << 62) + b"v",
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pack("k") + struct.pack("<IIQ", 9, 8, 1 << 60),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pack("k") + struct.pack("<IIQ", 9, 4, 1 << 60),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pack("k") + struct.pack("<I", 99),
    ],
)
def test_hostile_files_are_refused(small: Path, data: bytes) -> None:
    """Oracle: a clear error instead of a huge allocation."""
    small.write_bytes(data)
    with pytest.raises(TokenizerUnsupported):
        read_metadata(small)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """Oracle: the error's message."""
    with pytest.raises(TokenizerUnsupported, match=r"gone\.gguf"):
        read_metadata(tmp_path / "gone.gguf")
