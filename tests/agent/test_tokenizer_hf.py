# SPDX-License-Identifier: Apache-2.0
"""Tokenizers from tokenizer.json: the wall around contents, prefix spaces, decoding in context.

The tokenizers here are small ones of each family, written out; the `tokenizers` library, encoding a
whole text with added tokens, is the oracle of ids.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken_agent.errors import TokenizerUnsupported
from freetoken_agent.model_calls.pieces import BYTE_ALPHABET
from freetoken_agent.tokenizers.hf_tokenizer import HFTokenizer, TokenizerFiles

BLANK = "\u2581"
LETTERS = "abcdefghijklmnopqrstuvwxyz<>|_/.,!"


_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def added(token_id: int, content: str, *, special: bool = True, **more: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": content, "special": special, **flags, **more}


def byte_level(*, ignore_merges: bool = False, merges: Sequence[str] = ()) -> dict[str, Any]:
    """Byte-level BPE whose control tokens are in the vocabulary too, as in Llama 3's file."""
    tokens = [*sorted(BYTE_ALPHABET, key=BYTE_ALPHABET.__getitem__), "he", "<|end|>", "<tool_call>"]
    tokens += [merge.replace(" ", "") for merge in merges]
    return {
        "version": "1.0",
        "added_tokens": [added(257, "<|end|>"), added(258, "<tool_call>", special=False)],
        "normalizer": None,
        "pre_tokenizer": _BYTES,
        "post_processor": None,
        "decoder": _BYTES,
        "model": {
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(dict.fromkeys(tokens))},
            "merges": [merge.split(" ") for merge in ("h e", *merges)],
            "ignore_merges": ignore_merges,
        },
    }


def sentencepiece(scheme: str) -> dict[str, Any]:
    """SentencePiece-like BPE with byte fallback. `scheme`: Metaspace's, or "legacy" (Llama 2)."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [BLANK, *LETTERS, f"{BLANK}h", "hi"]
    legacy = scheme == "legacy"
    metaspace = {
        "type": "Metaspace",
        "replacement": BLANK,
        "prepend_scheme": scheme,
        "split": False,
    }
    prepend = [
        {"type": "Prepend", "prepend": BLANK},
        {"type": "Replace", "pattern": {"String": " "}, "content": BLANK},
    ]
    return {
        "version": "1.0",
        "added_tokens": [added(0, "<unk>"), added(1, "<s>"), added(2, "</s>")],
        "normalizer": {"type": "Sequence", "normalizers": prepend} if legacy else None,
        "pre_tokenizer": None if legacy else metaspace,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": BLANK}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "byte_fallback": True,
            "fuse_unk": True,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [[BLANK, "h"], ["h", "i"]],
        },
    }


def unigram() -> dict[str, Any]:
    """Unigram: every control token is a piece with a good score, so plain text reaches it."""
    pieces = [["<unk>", 0.0], ["<s>", 0.0], ["</s>", 0.0], ["<mask>", -1.0]]
    pieces += [[BLANK, -3.0], *([letter, -4.0] for letter in LETTERS), ["hello", -5.0]]
    return {
        "version": "1.0",
        "added_tokens": [added(1, "<s>"), added(2, "</s>"), added(3, "<mask>")],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Metaspace", "replacement": BLANK, "prepend_scheme": "always", "split": True,
        },
        "post_processor": None,
        "decoder": {"type": "Metaspace", "replacement": BLANK, "prepend_scheme": "always"},
        "model": {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False},
    }  # fmt: skip


def load(definition: dict[str, Any]) -> HFTokenizer:
    return HFTokenizer(TokenizerFiles(definition, "digest"))


def whole(definition: dict[str, Any], text: str) -> list[int]:
    """The library's own ids of a whole text."""
    ids: list[int] = (
        tokenizers.Tokenizer.from_str(json.dumps(definition))
        .encode(text, add_special_tokens=False)
        .ids
    )
    return ids


FAMILIES: dict[str, Callable[[], dict[str, Any]]] = {
    "byte level": byte_level,
    "byte level, words first": lambda: byte_level(ignore_merges=True),
    "byte level, a merge reaches a control": lambda: byte_level(
        merges=["< |", "<| e", "<|e n", "<|en d", "<|end |", "<|end| >"]
    ),
    "first": lambda: sentencepiece("first"),
    "always": lambda: sentencepiece("always"),
    "never": lambda: sentencepiece("never"),
    "legacy": lambda: sentencepiece("legacy"),
    "unigram": unigram,
}


def spellings(family: str, text: str) -> set[str]:
    """What may come back of a text after a control token: Metaspace `always` puts no blank before
    text that has one, so there the two cannot be told apart."""
    return {text, text.removeprefix(" ")} if family in ("always", "unigram") else {text}


@pytest.mark.parametrize("family", FAMILIES)
def test_s55_no_control_literal_survives_in_contents(family: str) -> None:
    """Oracle: the library, which does give the id for the same literal when added tokens count."""
    definition = FAMILIES[family]()
    tokenizer = load(definition)
    for token in definition["added_tokens"]:
        literal, token_id = token["content"], token["id"]
        assert token_id in whole(definition, literal)
        for text in (literal, f"a{literal}b", f" {literal} ", literal * 2, f"<{literal}>"):
            for after in (None, token_id):
                ids = tokenizer.encode_content(text, after=after)
                assert not any(map(tokenizer.is_control, ids)), (text, ids)
                seen = tokenizer.decode(ids, after=[] if after is None else [after])
                assert seen in spellings(family, text)


@pytest.mark.parametrize("family", ["byte level, words first", "unigram"])
def test_the_wall_is_needed(family: str) -> None:
    """Oracle: the library without added tokens still gives the control id: taking the entry out of
    the copy is what keeps it away."""
    definition = FAMILIES[family]()
    token = definition["added_tokens"][-1]
    bare = {**definition, "added_tokens": []}
    assert token["id"] in whole(bare, token["content"])
    assert token["id"] not in load(definition).encode_content(token["content"])


def test_a_wall_that_cannot_be_built_is_refused() -> None:
    """Oracle: a pre-tokenizer under which a renamed Unigram piece can still be reached."""
    definition = unigram()
    definition["pre_tokenizer"] = None
    definition["model"]["vocab"][3] = [" 3", -1.0]
    definition["added_tokens"][2] = added(3, " 3")
    with pytest.raises(TokenizerUnsupported, match="control tokens"):
        load(definition)


@pytest.mark.parametrize("family", FAMILIES)
def test_frames_equal_the_whole_text_encoding(family: str) -> None:
    """Oracle: the library on the whole text. A text that begins with a control token has no
    unknown context."""
    definition = FAMILIES[family]()
    tokenizer = load(definition)
    first = definition["added_tokens"][-1]["content"]
    for tail in ("", "hi", " hi", f"he{first}hi", f"{first}{first} x", f"x {first}\u00e9"):
        assert tokenizer.encode_frame(first + tail) == whole(definition, first + tail)


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word", "normalized"])
def test_added_tokens_with_flags_match_in_frames_as_the_library_does(flag: str) -> None:
    """Oracle: the library on the whole text: tokens that take blanks with them, or words only."""
    definition = byte_level()
    definition["added_tokens"] = [added(257, "<|end|>", **{flag: True}), added(258, "<tool_call>")]
    tokenizer = load(definition)
    for text in ("<|end|>", "a <|end|> b", "he<|end|>\n\nhe", "<|end|><tool_call> <|end|>x"):
        assert tokenizer.encode_frame(text) == whole(definition, text), text
        assert not any(map(tokenizer.is_control, tokenizer.encode_content(text)))


@pytest.mark.parametrize(
    ("scheme", "after_control", "inside"),
    [
        ("first", False, False),
        ("always", True, False),
        ("never", False, False),
        ("legacy", True, False),
    ],
)
def test_prefix_spaces_come_only_where_the_scheme_puts_them(
    scheme: str, after_control: bool, inside: bool
) -> None:
    """Oracle: the library's ids of `<s>hi` and of `ahi`, with what precedes cut off."""
    definition = sentencepiece(scheme)
    tokenizer = load(definition)
    after = tokenizer.encode_content("hi", after=1)
    assert after == whole(definition, "<s>hi")[1:]
    assert (tokenizer.decode(after) == " hi") == after_control
    assert tokenizer.decode(after, after=[1]) == "hi"
    middle = tokenizer.encode_content("hi", after=ord("a"))
    assert (tokenizer.decode(middle) == " hi") == inside


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_is_the_same_in_any_chunks(family: str) -> None:
    """Oracle: the text, encoded and decoded at once."""
    definition = FAMILIES[family]()
    tokenizer = load(definition)
    first = definition["added_tokens"][-1]["id"]
    letters = (
        st.sampled_from(LETTERS + " ") if family == "unigram" else st.characters(codec="utf-8")
    )

    @settings(deadline=None)
    @given(st.text(letters, max_size=20), st.data())
    def check(text: str, data: st.DataObject) -> None:
        ids = tokenizer.encode_content(text, after=first)
        decoder = tokenizer.stream(after=[first])
        streamed = "".join(map(decoder.feed, ids)) + decoder.flush()
        assert streamed in spellings(family, text)
        cut = data.draw(st.integers(0, len(ids)))
        left = tokenizer.decode(ids[:cut], after=[first])
        right = tokenizer.decode(ids[cut:], after=[first, *ids[:cut]])
        if "\ufffd" not in left:
            assert left + right == streamed

    check()


def test_ids_outside_the_vocabulary_decode_to_nothing() -> None:
    """Oracle: a model's padding rows have no token."""
    assert load(byte_level()).decode([ord("a"), 50_000, ord("b")]) == "ab"


WORD_PIECE = {"type": "WordPiece", "prefix": "##", "cleanup": True}


def save(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        stem, _, ending = name.rpartition("_")
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / f"{stem}.{ending}").write_text(text, encoding="utf-8")
    return folder


def test_a_folder_gives_stops_specials_and_template(tmp_path: Path) -> None:
    """Oracle: the files written here; the .jinja file wins over the configuration."""
    folder = save(
        tmp_path,
        tokenizer_json=byte_level(),
        tokenizer_config_json={
            "eos_token": {"content": "<|end|>", "special": True},
            "bos_token": None,
            "chat_template": "from the configuration",
        },
        generation_config_json={"eos_token_id": [257, 258]},
        chat_template_jinja="{{ 'from the file' }}",
    )
    tokenizer = HFTokenizer.load(folder)
    assert tokenizer.stop_ids == {257, 258}
    assert tokenizer.special_tokens == {"eos_token": "<|end|>"}
    assert tokenizer.chat_template == "{{ 'from the file' }}"
    (folder / "chat_template.jinja").unlink()
    assert HFTokenizer.load(folder).chat_template == "from the configuration"


def test_the_digest_follows_ids_not_stops(tmp_path: Path) -> None:
    """Oracle: which of the files decides ids."""
    folder = save(tmp_path, tokenizer_json=byte_level())
    first = HFTokenizer.load(folder).digest
    save(folder, generation_config_json={"eos_token_id": 258})
    assert HFTokenizer.load(folder).digest == first
    save(folder, tokenizer_json=byte_level(merges=["h i"]))
    assert HFTokenizer.load(folder).digest != first


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "no tokenizer.json"),
        ({"tokenizer_json": ""}, "not JSON"),
        ({"tokenizer_json": "[]"}, "not a JSON object"),
        ({"tokenizer_json": "{}"}, "no model"),
        ({"tokenizer_json": {"model": {"type": "unheard-of"}}}, "cannot be read"),
        ({"tokenizer_json": byte_level() | {"decoder": WORD_PIECE}}, "decoder"),
        ({"tokenizer_json": byte_level(), "generation_config_json": {"eos_token_id": 999}}, "999"),
        ({"tokenizer_json": byte_level(), "config_json": {"eos_token_id": [-1]}}, "-1"),
        ({"tokenizer_json": byte_level(), "tokenizer_config_json": {"eos_token": "<x>"}}, "<x>"),
    ],
)  # fmt: skip
def test_folders_that_cannot_be_used_are_refused(
    tmp_path: Path, files: dict[str, Any], says: str
) -> None:
    """Oracle: the error's type, code and what it names."""
    with pytest.raises(TokenizerUnsupported, match=says) as caught:
        HFTokenizer.load(save(tmp_path, **files))
    assert caught.value.code == "tokenizer_unsupported"
