# SPDX-License-Identifier: Apache-2.0
"""The FTW format, read by its own text, and everything that is refused by name."""

import hashlib
import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from threading import Event, Timer
from typing import Any

import pytest
import xxhash

from freetoken_storage import weights
from freetoken_storage.weights import (
    FtwAltered,
    FtwError,
    FtwForeign,
    FtwNewer,
    FtwTooLarge,
    FtwTruncated,
)
from freetoken_storage.weights_direct import AlignedBuffer, DirectReader
from freetoken_storage.weights_faults import damage
from freetoken_storage.weights_file import CHECK_THREADS, WeightsFile
from freetoken_storage.weights_writer import WeightsWriter

Content = dict[str, dict[str, tuple[str, tuple[int, ...], bytes]]]
FILES = {"tokenizer.json": b'{"model": {}}', "chat_template.jinja": "{{ messages }} ü".encode()}
META = {"spec": {"layers": 2}, "text": "ü"}


def random_content(seed: int) -> Content:
    """Records as a model has them: experts of one layout, matrices, vectors."""
    chance = random.Random(seed)

    def field(dtype: str, *shape: int) -> tuple[str, tuple[int, ...], bytes]:
        size = weights.ELEMENT_BYTES[dtype]
        for extent in shape:
            size *= extent
        return dtype, shape, chance.randbytes(size)

    content: Content = {"embedding": {"values": field("int8", 50, 48)}}
    for expert in range(8):
        content[f"layers.0.experts.{expert}"] = {
            "gate up.packed": field("uint8", 64, 33),
            "gate up.scales_zeros": field("bfloat16", 2, 64, 2),
            "down.packed": field("uint8", 128, 31),
        }
    content["layers.0.router"] = {"weight": field("float32", 8, 37)}
    content["norm"] = {"weight": field("float16", 3)}
    return content


def write(folder: Path, content: Content, **sizes: int) -> None:
    with WeightsWriter(folder, {"job": 1}, **sizes) as writer:
        for name, fields in content.items():
            with writer.record(name) as out:
                for field, (dtype, shape, stored) in fields.items():
                    out.begin(field, dtype, shape)
                    cut = len(stored) // 3  # however it comes
                    out.write(stored[:cut])
                    out.write(memoryview(stored)[cut:])
        writer.finish(META, FILES)


@pytest.fixture(scope="module")
def content() -> Content:
    return random_content(7)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory, content: Content) -> Path:
    folder = tmp_path_factory.mktemp("intact") / "model.ftw"
    write(folder, content, shard_bytes=20_000)
    return folder


@pytest.fixture
def folder(intact: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(intact, tmp_path / "model.ftw"))


def test_the_bytes_are_where_the_text_says(intact: Path, content: Content) -> None:
    """Oracle: the docstring of `weights`, followed by hand: struct, json, sha256, xxh3."""
    stored = (intact / "model.ftw").read_bytes()
    magic, version, zero, length = struct.unpack_from("<8sIIQ", stored)
    assert (magic, version, zero) == (b"FTWEIGHT", 1, 0)
    assert len(stored) == 56 + length
    assert stored[24:56] == hashlib.sha256(stored[:24] + stored[56:]).digest()
    header = json.loads(stored[56:])
    assert header["meta"] == META
    assert [name for name, *_ in header["records"]] == list(content)
    assert len(header["shards"]) > 1
    assert len(header["layouts"]) == 4, "the eight experts share one"
    for name, layout, shard, offset, xxh3 in header["records"]:
        file, size = header["shards"][shard]
        shard_bytes = (intact / file).read_bytes()
        assert len(shard_bytes) == size and offset % 4096 == 0
        record_size, fields = header["layouts"][layout]
        record = shard_bytes[offset : offset + record_size]
        assert xxhash.xxh3_128_hexdigest(record) == xxh3
        assert not any(shard_bytes[offset + record_size : (offset + record_size + 4095) & ~4095])
        covered = bytearray(record)
        for field, dtype, shape, at in fields:
            expected = content[name][field]
            assert (dtype, tuple(shape)) == expected[:2] and at % 64 == 0
            assert record[at : at + len(expected[2])] == expected[2]
            covered[at : at + len(expected[2])] = bytes(len(expected[2]))
        assert not any(covered), "between fields there is 0"
    for name, size, xxh3 in header["files"]:
        assert (intact / name).read_bytes() == FILES[name] and size == len(FILES[name])
        assert xxhash.xxh3_128_hexdigest(FILES[name]) == xxh3
    assert {path.name for path in intact.iterdir()} == {
        "model.ftw",
        *FILES,
        *(name for name, _ in header["shards"]),
    }


def check_whole(file: WeightsFile, content: Content) -> None:
    """Every record through both readers; raises what they raise."""
    assert file.header.meta == META
    assert list(file.records) == list(content)
    room = max(file.extent(name).room for name in content)
    buffer = AlignedBuffer(room)
    with DirectReader(2) as reader:
        for name, fields in content.items():
            for view in (file.mapped(name), file.read(name, reader, buffer.view)):
                layout = file.records[name].layout
                for field, (dtype, shape, stored) in fields.items():
                    found = layout.field(field)
                    assert found is not None and (found.dtype, found.shape) == (dtype, shape)
                    assert view[found.offset : found.stop] == stored
                assert len(view) == layout.size_bytes


def test_what_was_written_is_read_by_both_readers(intact: Path, content: Content) -> None:
    """Oracle: the bytes that were written."""
    check_whole(WeightsFile(intact), content)


def test_equal_content_gives_equal_bytes_and_any_other_another_digest(
    intact: Path, content: Content, tmp_path: Path
) -> None:
    """Oracle: the files' bytes; then one changed byte of one record."""
    write(tmp_path / "again", content, shard_bytes=20_000)
    for path in intact.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()
    dtype, shape, stored = content["norm"]["weight"]
    other = {**content, "norm": {"weight": (dtype, shape, stored[:-1] + b"\x5a")}}
    write(tmp_path / "other", other, shard_bytes=20_000)
    assert WeightsFile(tmp_path / "other").digest != WeightsFile(intact).digest


def test_a_mapped_record_is_checked_once_per_opening_and_costs_no_write(
    folder: Path, content: Content
) -> None:
    """Altered before its first use it is refused; what a program writes into a mapped record stays
    in the program."""
    shard = folder / WeightsFile(folder).records["norm"].shard
    file = WeightsFile(folder)
    before = shard.read_bytes()
    view = file.mapped("norm")
    view[0] ^= 255
    assert shard.read_bytes() == before
    assert file.mapped("norm")[0] == view[0], "the same pages"
    record = file.records["norm"]
    with shard.open("r+b") as stored:
        stored.seek(record.offset)
        stored.write(bytes([before[record.offset] ^ 1]))
    file.mapped("norm")  # was checked already
    with pytest.raises(FtwAltered, match="record 'norm' in .*checksum"):
        WeightsFile(folder).mapped("norm")


class Reads:
    """Counts reads of each record through the page cache, by where they begin; stops at some."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begins: list[int] = []
        self.entered, self.go_on = Event(), Event()
        self.go_on.set()
        original = os.preadv

        def preadv(descriptor: int, buffers: Any, offset: int) -> int:
            self.begins.append(offset)
            self.entered.set()
            assert self.go_on.wait(20)
            return original(descriptor, buffers, offset)

        monkeypatch.setattr(os, "preadv", preadv)


def test_records_checked_ahead_are_not_checked_again(
    folder: Path, content: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the order in which they are asked for, and before or after the block. Oracle: the
    reads; each record begins once."""
    file, reads = WeightsFile(folder), Reads(monkeypatch)
    names = list(content)
    with file.ahead(names):
        for name in reversed(names):
            fields = content[name]
            first = next(iter(fields.values()))[2]
            assert file.mapped(name)[: len(first)] == first
    check_whole(file, content)
    assert len(reads.begins) == len(names)


def test_damage_found_ahead_is_raised_where_the_record_is_used(
    folder: Path, content: Content
) -> None:
    """The others are served; outside the block it is found again."""
    file = WeightsFile(folder)
    record = file.records["layers.0.router"]
    with (folder / record.shard).open("r+b") as stored:
        stored.seek(record.offset)
        stored.write(b"altered!")
    with file.ahead(list(content)):
        for name in content:
            if name != record.name:
                file.mapped(name)
        with pytest.raises(FtwAltered, match=r"layers\.0\.router"):
            file.mapped(record.name)
    with pytest.raises(FtwAltered, match=r"layers\.0\.router"):
        file.mapped(record.name)


def test_who_leaves_early_waits_for_no_further_record(
    folder: Path, content: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks under way end, the rest never begins; what was not checked is, when it is used."""
    file, reads = WeightsFile(folder), Reads(monkeypatch)
    reads.go_on.clear()
    with pytest.raises(KeyError, match="over"):
        with file.ahead(list(content)):
            assert reads.entered.wait(20)
            Timer(0.2, reads.go_on.set).start()
            raise KeyError("over")
    assert len(reads.begins) <= 2 * CHECK_THREADS < len(content)
    check_whole(file, content)


def test_a_direct_read_is_checked_every_time(folder: Path) -> None:
    """The same record, sound at first, altered on the disk later."""
    file = WeightsFile(folder)
    extent = file.extent("embedding")
    buffer = AlignedBuffer(extent.room)
    with DirectReader(1) as reader:
        file.read("embedding", reader, buffer.view)
        with extent.path.open("r+b") as stored:
            stored.seek(extent.offset + 5)
            byte = stored.read(1)[0]
            stored.seek(extent.offset + 5)
            stored.write(bytes([byte ^ 64]))
        with pytest.raises(FtwAltered, match="record 'embedding'"):
            file.read("embedding", reader, buffer.view)


def test_mapped_records_outlive_the_folder(folder: Path, content: Content) -> None:
    """As an open model does when its files are replaced."""
    view = WeightsFile(folder).mapped("norm")
    shutil.rmtree(folder)
    assert view[:6] == content["norm"]["weight"][2]


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the header's JSON and give it its right checksum, as a hostile writer would."""
    path = folder / "model.ftw"
    content = json.loads(path.read_bytes()[56:])
    change(content)
    seal(path, json.dumps(content).encode())


def seal(path: Path, text: bytes, version: int = 1) -> None:
    fixed = struct.pack("<8sIIQ", b"FTWEIGHT", version, 0, len(text))
    path.write_bytes(fixed + hashlib.sha256(fixed + text).digest() + text)


HOSTILE: dict[str, tuple[type[FtwError], Callable[[dict[str, Any]], None]]] = {
    "a shard outside the folder": (FtwAltered, lambda h: h["shards"][0].__setitem__(0, "../x")),
    "an absolute shard": (FtwAltered, lambda h: h["shards"][0].__setitem__(0, "/etc/passwd")),
    "a shard without a name": (FtwAltered, lambda h: h["shards"][0].__setitem__(0, "..")),
    "a name with a null byte": (FtwAltered, lambda h: h["shards"][0].__setitem__(0, "a\0b")),
    "a file outside the folder": (FtwAltered, lambda h: h["files"][0].__setitem__(0, "a/../../b")),
    "a long name": (FtwAltered, lambda h: h["files"][0].__setitem__(0, "x" * 256)),
    "the header as a file": (FtwAltered, lambda h: h["files"][0].__setitem__(0, "model.ftw")),
    "a record outside its shard": (FtwAltered, lambda h: h["records"][0].__setitem__(3, 1 << 20)),
    "a record at an odd offset": (FtwAltered, lambda h: h["records"][0].__setitem__(3, 64)),
    "a negative offset": (FtwAltered, lambda h: h["records"][0].__setitem__(3, -4096)),
    "a float as offset": (FtwAltered, lambda h: h["records"][0].__setitem__(3, 0.0)),
    "true as a shard": (FtwAltered, lambda h: h["records"][0].__setitem__(2, True)),
    "a layout from the end": (FtwAltered, lambda h: h["records"][0].__setitem__(1, -1)),
    "an unknown layout": (FtwAltered, lambda h: h["records"][0].__setitem__(1, 99)),
    "overlapping records": (
        FtwAltered,
        lambda h: h["records"][2].__setitem__(3, h["records"][1][3]),
    ),
    "a record twice": (FtwAltered, lambda h: h["records"][1].__setitem__(0, h["records"][0][0])),
    "a huge shape": (FtwAltered, lambda h: h["layouts"][0][1][0].__setitem__(2, [1 << 40] * 4)),
    "an empty shape": (FtwAltered, lambda h: h["layouts"][0][1][0].__setitem__(2, [0])),
    "an unknown dtype": (FtwAltered, lambda h: h["layouts"][0][1][0].__setitem__(1, "int3")),
    "overlapping fields": (FtwAltered, lambda h: h["layouts"][1][1][1].__setitem__(3, 64)),
    "a layout of another size": (FtwAltered, lambda h: h["layouts"][0].__setitem__(0, 9)),
    "a layout without fields": (FtwAltered, lambda h: h["layouts"][0].__setitem__(1, [])),
    "a list as meta": (FtwAltered, lambda h: h.__setitem__("meta", [])),
    "a missing key": (FtwAltered, lambda h: h.pop("shards")),
    "a checksum that is none": (FtwAltered, lambda h: h["records"][0].__setitem__(4, "zz")),
    "an unknown key": (FtwNewer, lambda h: h.__setitem__("compression", "zstd")),
    "too many fields": (FtwAltered, lambda h: h["layouts"][0].__setitem__(1, [[]] * 65)),
    "too many files": (FtwTooLarge, lambda h: h.__setitem__("files", [[]] * 65)),
    "too many layouts": (FtwTooLarge, lambda h: h.__setitem__("layouts", [[]] * 10_001)),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_header_that_lies_is_refused(folder: Path, case: str) -> None:
    """Its checksum is right; what it says is not."""
    error, change = HOSTILE[case]
    rewrite(folder, change)
    with pytest.raises(error, match=r"model\.ftw"):
        WeightsFile(folder)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (b"[" * 100_000, FtwAltered),
        (b'{"meta": NaN}', FtwAltered),
        (b"\xff\xfe", FtwAltered),
        (b"null", FtwAltered),
        (b"9" * 10_000, FtwAltered),
    ],
    ids=["nested", "nan", "no text", "null", "a long number"],
)
def test_json_that_is_no_header_is_refused(
    folder: Path, text: bytes, error: type[FtwError]
) -> None:
    seal(folder / "model.ftw", text)
    with pytest.raises(error, match=r"model\.ftw"):
        WeightsFile(folder)


def test_foreign_newer_truncated_altered_and_too_large_are_told_apart(folder: Path) -> None:
    """One change each to the first bytes; the errors name the file."""
    path = folder / "model.ftw"
    whole = path.read_bytes()
    cases: list[tuple[bytes, type[FtwError]]] = [
        (b"GGUF" + whole[4:], FtwForeign),
        (b"", FtwTruncated),
        (whole[:5], FtwTruncated),
        (whole[:55], FtwTruncated),
        (whole[:-1], FtwTruncated),
        (whole + b"\0", FtwAltered),
        (whole[:30] + b"\0" + whole[31:], FtwAltered),
        (whole[:-3] + b"\0" + whole[-2:], FtwAltered),
        (struct.pack("<8sIIQ", b"FTWEIGHT", 2, 0, len(whole) - 56) + whole[24:], FtwNewer),
        (struct.pack("<8sIIQ", b"FTWEIGHT", 1, 1, len(whole) - 56) + whole[24:], FtwNewer),
        (struct.pack("<8sIIQ", b"FTWEIGHT", 1, 0, 1 << 60) + whole[24:], FtwTooLarge),
    ]
    for stored, error in cases:
        path.write_bytes(stored)
        with pytest.raises(error, match=r"model\.ftw") as caught:
            WeightsFile(folder)
        assert type(caught.value) is error


def test_m6_missing_truncated_empty_and_longer_shards_are_named(folder: Path) -> None:
    """Before any record is read; small files too."""
    shard = sorted(folder.glob("records-*"))[1]
    whole = shard.read_bytes()
    for stored, error in [
        (b"", FtwTruncated),
        (whole[:-1], FtwTruncated),
        (whole + b"x", FtwAltered),
    ]:
        shard.write_bytes(stored)
        with pytest.raises(error, match=shard.name):
            WeightsFile(folder)
    shard.unlink()
    with pytest.raises(FtwTruncated, match=rf"{shard.name} is missing"):
        WeightsFile(folder)
    shard.write_bytes(whole)
    (folder / "tokenizer.json").write_bytes(b'{"model": []}')
    with pytest.raises(FtwAltered, match=r"tokenizer\.json is not the file"):
        WeightsFile(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FtwTruncated, match=r"tokenizer\.json is missing"):
        WeightsFile(folder)


def test_m6_a_shard_that_became_shorter_after_opening_is_refused(folder: Path) -> None:
    """Touching the mapping would kill the process; reading first does not."""
    file = WeightsFile(folder)
    shard = folder / file.records["norm"].shard
    with shard.open("r+b") as stored:
        stored.truncate(file.records["norm"].offset)
    with pytest.raises(FtwTruncated, match=shard.name):
        file.mapped("norm")
    buffer = AlignedBuffer(4096)
    with DirectReader(1) as reader, pytest.raises(FtwTruncated, match=shard.name):
        file.read("norm", reader, buffer.view)


def survives(folder: Path, content: Content) -> str | None:
    """None if every record reads as it was written; the code of the refusal if it is refused."""
    try:
        check_whole(WeightsFile(folder), content)
    except FtwError as error:
        return error.code
    return None


def batter(intact: Path, content: Content, tmp_path: Path, seeds: range) -> dict[str | None, int]:
    """Outcomes of random damage, each from an intact copy. Wrong bytes fail an assertion."""
    outcomes: dict[str | None, int] = {}
    for seed in seeds:
        folder = tmp_path / "battered"
        shutil.copytree(intact, folder)
        how = damage(folder, seed)
        try:
            outcome = survives(folder, content)
        except Exception as error:
            raise AssertionError(f"seed {seed}, {how}") from error
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        shutil.rmtree(folder)
    return outcomes


def test_damage_is_refused_or_harmless(intact: Path, content: Content, tmp_path: Path) -> None:
    """Random flips, cuts, swaps: oracle, the bytes that were written. Most must be refused, and
    each refusal has the code of its kind."""
    outcomes = batter(intact, content, tmp_path, range(150))
    assert outcomes.get(None, 0) < 150 // 3
    assert {"ftw_altered", "ftw_truncated", "ftw_foreign"} <= outcomes.keys()


@pytest.mark.slow
def test_damage_is_refused_or_harmless_in_1000_cases(
    intact: Path, content: Content, tmp_path: Path
) -> None:
    outcomes = batter(intact, content, tmp_path, range(1000, 2000))
    assert sum(outcomes.values()) == 1000
    assert outcomes.get(None, 0) < 1000 // 3
