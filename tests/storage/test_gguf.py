# SPDX-License-Identifier: Apache-2.0
"""GGUF headers against the gguf package, and files that lie about themselves."""

import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken_storage.errors import FreetokenError
from freetoken_storage.gguf import GgufDamaged, read_gguf

WORDS = ["a", "", "word", "ő 日本 😀", "<|end|>"] * 40


def write(file: Path) -> None:
    """A file with every type of value and three tensors, by the gguf package."""
    writer = GGUFWriter(file, "llama")
    writer.add_uint8("t.u8", 200)
    writer.add_int8("t.i8", -100)
    writer.add_uint16("t.u16", 60_000)
    writer.add_int16("t.i16", -30_000)
    writer.add_uint32("t.u32", 4_000_000_000)
    writer.add_int32("t.i32", -2_000_000_000)
    writer.add_uint64("t.u64", 2**64 - 1)
    writer.add_int64("t.i64", -(2**63))
    writer.add_float32("t.f32", 0.5)
    writer.add_float64("t.f64", -1e300)
    writer.add_bool("t.bool", True)
    writer.add_string("t.string", "ő\n日本")
    writer.add_array("t.words", WORDS)
    writer.add_array("t.numbers", [1, -2, 3])
    writer.add_array("t.floats", [0.5, -0.25])
    writer.add_array("t.flags", [True, False])
    writer.add_tensor("one", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("two", np.zeros((4, 2, 5), dtype=np.float16))
    writer.add_tensor("three", np.zeros((3, 18), np.uint8), raw_dtype=GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    write(file)
    return file


def test_a_header_is_what_the_gguf_package_reads(whole: Path) -> None:
    """Oracle: GGUFReader's contents, shapes, types and offsets."""
    header, reader = read_gguf(whole), GGUFReader(whole)
    expected = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert header.metadata == expected
    assert header.metadata["t.words"] == WORDS
    assert header.skipped == frozenset()
    assert header.size_bytes == whole.stat().st_size
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        ours = header.tensors[tensor.name]
        assert ours.shape == tuple(int(n) for n in reversed(tensor.shape))
        assert ours.kind == tensor.tensor_type
        assert header.data_start + ours.offset == tensor.data_offset


def test_arrays_can_be_stepped_over(whole: Path) -> None:
    """Oracle: the same header read whole."""
    full, lean = read_gguf(whole), read_gguf(whole, arrays=False)
    arrays = {key for key, value in full.metadata.items() if isinstance(value, list)}
    assert lean.skipped == arrays == {"t.words", "t.numbers", "t.floats", "t.flags"}
    assert lean.metadata == {k: v for k, v in full.metadata.items() if k not in arrays}
    assert (lean.tensors, lean.data_start) == (full.tensors, full.data_start)


def test_every_truncation_of_the_header_is_named(whole: Path, tmp_path: Path) -> None:
    """Oracle: the whole header, which is accepted; every shorter one is not."""
    data, start = whole.read_bytes(), read_gguf(whole).data_start
    file = tmp_path / "cut.gguf"
    file.write_bytes(data[:start])
    read_gguf(file)
    for size in range(0, start - 32, 3):
        file.write_bytes(data[:size])
        for arrays in (True, False):
            with pytest.raises(GgufDamaged, match=r"cut\.gguf") as error:
                read_gguf(file, arrays=arrays)
            assert error.value.code == "gguf_damaged"
            assert error.value.value == f"{size} bytes"


def _header(tensors: int = 0, pairs: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs)


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


_PAD = bytes(64)
_PAIR = _string(b"k") + struct.pack("<II", 4, 1)
_TENSOR = _string(b"t") + struct.pack("<IQIQ", 1, 4, 0, 0)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "it is empty"),
        (b"PK\x03\x04" + _PAD, "does not begin with GGUF"),
        (b"GGUF", "it ends at byte 4, 8 needed"),
        (_header(version=1), "version 1"),
        (_header(version=3 << 24), "version 50331648"),  # big-endian
        (_header(pairs=2**60) + _PAD, "it ends at byte"),
        (_header(tensors=2**60) + _PAD, "it ends at byte"),
        (_header(pairs=2**63, tensors=2**63), "it ends at byte"),
        (_header(pairs=1) + struct.pack("<Q", 2**62) + _PAD, "it ends at byte"),
        (_header(pairs=1) + _string(b"\xff") + _PAD, "utf-8"),
        (_header(pairs=2) + _PAIR + _PAIR, "'k' is listed twice"),
        (_header(pairs=1) + _string(b"k") + struct.pack("<I", 99) + _PAD, "value type 99"),
        (_header(pairs=1) + _string(b"k") + struct.pack("<IIQ", 9, 8, 2**60), "it ends at byte"),
        (_header(pairs=1) + _string(b"k") + struct.pack("<IIQ", 9, 12, 2**62), "it ends at byte"),
        (_header(pairs=1) + _string(b"k") + struct.pack("<IIQQ", 9, 8, 1, 2**63), "it ends at"),
        (_header(pairs=1) + _string(b"k") + struct.pack("<IIQ", 9, 9, 1) + _PAD, "value type 9"),
        (_header(tensors=2) + _TENSOR + _TENSOR, "tensor 't' is listed twice"),
        (_header(tensors=1) + _string(b"t") + struct.pack("<I", 9) + _PAD * 2, "9 dimensions"),
        (_header(pairs=1) + _string(b"general.alignment") + struct.pack("<II", 4, 0), "alignment"),
        (_header(pairs=1) + _string(b"general.alignment") + struct.pack("<I?", 7, 1), "alignment"),
        (
            _header(pairs=1) + _string(b"general.alignment") + struct.pack("<IQ", 10, 2**40),
            "alignment",
        ),
    ],
)
def test_hostile_headers_are_named_and_allocate_nothing(
    data: bytes, says: str, tmp_path: Path
) -> None:
    """Oracle: the message, and the memory that was allocated on the way to it."""
    file = tmp_path / "x.gguf"
    file.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(GgufDamaged, match=says):
            read_gguf(file)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_flipped_bytes_are_read_or_refused(data: st.DataObject, whole: Path) -> None:
    """Oracle: an error of ours or a header; never another exception."""
    start = read_gguf(whole).data_start
    flipped = bytearray(whole.read_bytes()[:start])
    for at in data.draw(st.lists(st.integers(0, start - 1), min_size=1, max_size=4)):
        flipped[at] ^= data.draw(st.integers(1, 255))
    file = whole.with_name("flipped.gguf")
    file.write_bytes(flipped)
    try:
        read_gguf(file)
    except FreetokenError as error:
        assert isinstance(error, GgufDamaged)


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    """Oracle: the name in it."""
    with pytest.raises(FileNotFoundError, match=r"gone\.gguf"):
        read_gguf(tmp_path / "gone.gguf")


def test_the_reader_needs_neither_torch_nor_numpy() -> None:
    """Oracle: the modules of a fresh process that imported it."""
    code = (
        "import sys, freetoken_storage.gguf; "
        "print([m for m in ('torch', 'numpy', 'gguf') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.stdout.strip() == "[]"
