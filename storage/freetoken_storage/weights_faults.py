# SPDX-License-Identifier: Apache-2.0
"""Random damage to a folder of weights, as disks, downloads and people do it. For tests."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from .weights import HEADER_NAME, RECORD_ALIGNMENT, VERSION, decode


def damage(folder: Path, seed: int, other: Path | None = None) -> str:
    """Damage the folder in one way, chosen and placed by the seed; says how. Every file is changed
    under a new name, so that what is mapped already stays as it was. `other`: a sound folder of the
    same shapes, of which files may take the place of this one's."""
    chance = random.Random(seed)
    kinds = dict(_KINDS)
    if other is not None:
        kinds["replaced"] = lambda folder, chance: _replace(folder, chance, other)
    kind = chance.choice(list(kinds))
    return f"{kind}: {kinds[kind](folder, chance)}"


def _flip_bits(folder: Path, chance: random.Random) -> str:
    path, stored = _pick(folder, chance)
    places = [chance.randrange(len(stored)) for _ in range(chance.choice((1, 1, 1, 8)))]
    for place in places:
        stored[place] ^= 1 << chance.randrange(8)
    return _put(path, stored, f"at {places}")


def _cut(folder: Path, chance: random.Random) -> str:
    path, stored = _pick(folder, chance)
    kept = chance.randrange(len(stored))
    return _put(path, stored[:kept], f"to {kept} of {len(stored)} bytes")


def _lengthen(folder: Path, chance: random.Random) -> str:
    path, stored = _pick(folder, chance)
    return _put(path, stored + chance.randbytes(chance.choice((1, 512, 4096))), "by some bytes")


def _shift(folder: Path, chance: random.Random) -> str:
    """One byte lost and one gained: the size stays."""
    path, stored = _pick(folder, chance)
    lost = chance.randrange(len(stored))
    return _put(path, stored[:lost] + stored[lost + 1 :] + b"\0", f"from {lost}")


def _overwrite(folder: Path, chance: random.Random) -> str:
    path, stored = _pick(folder, chance)
    start = chance.randrange(len(stored))
    size = min(len(stored) - start, chance.choice((1, 64, 4096)))
    filler = bytes(size) if chance.random() < 0.5 else chance.randbytes(size)
    stored[start : start + size] = filler
    return _put(path, stored, f"{size} bytes at {start}")


def _swap_blocks(folder: Path, chance: random.Random) -> str:
    """Blocks of the disk in each other's place."""
    path, stored = _pick(folder, chance)
    size = chance.choice((16, 512, RECORD_ALIGNMENT))
    count = max(1, len(stored) // size)
    a, b = (chance.randrange(count) * size for _ in range(2))
    first, second = stored[a : a + size], stored[b : b + size]
    stored[a : a + len(second)], stored[b : b + len(first)] = second, first
    return _put(path, stored, f"{size} bytes at {a} and {b}")


def _swap_records(folder: Path, chance: random.Random) -> str:
    """Two records of one layout, such as two experts: each is sound, at the wrong place."""
    header, _ = decode((folder / HEADER_NAME).read_bytes(), folder)
    groups: dict[object, list[int]] = {}
    for index, record in enumerate(header.records):
        groups.setdefault(record.layout, []).append(index)
    a, b = chance.sample(chance.choice([x for x in groups.values() if len(x) > 1]), 2)
    one, other = header.records[a], header.records[b]
    files = {name: bytearray((folder / name).read_bytes()) for name in (one.shard, other.shard)}
    first = files[one.shard][one.offset : one.stop]
    second = files[other.shard][other.offset : other.stop]
    files[one.shard][one.offset : one.stop] = second
    files[other.shard][other.offset : other.stop] = first
    for name, stored in files.items():
        _put(folder / name, stored, "")
    return f"{one.name} and {other.name}"


def _swap_files(folder: Path, chance: random.Random) -> str:
    names = sorted(path.name for path in folder.iterdir())
    one, other = chance.sample(names, 2)
    (folder / one).rename(folder / "between")
    (folder / other).rename(folder / one)
    (folder / "between").rename(folder / other)
    return f"{one} and {other}"


def _delete(folder: Path, chance: random.Random) -> str:
    path, _ = _pick(folder, chance)
    path.unlink()
    return path.name


def _empty(folder: Path, chance: random.Random) -> str:
    path, _ = _pick(folder, chance)
    return _put(path, bytearray(), "")


def _zero_pages(folder: Path, chance: random.Random) -> str:
    """What a file system may leave of writes that were not synced."""
    path, stored = _pick(folder, chance)
    first = chance.randrange(-(-len(stored) // RECORD_ALIGNMENT)) * RECORD_ALIGNMENT
    stop = min(len(stored), first + RECORD_ALIGNMENT * chance.choice((1, 1, 3)))
    stored[first:stop] = bytes(stop - first)
    return _put(path, stored, f"from {first} to {stop}")


def _write_newer(folder: Path, chance: random.Random) -> str:
    path = folder / HEADER_NAME
    stored = bytearray(path.read_bytes())
    version = chance.randrange(VERSION + 1, 1 << 32)
    stored[8:12] = version.to_bytes(4, "little")
    return _put(path, stored, f"of version {version}")


def _replace(folder: Path, chance: random.Random, other: Path) -> str:
    """A file of another model in the place of this one's."""
    name = chance.choice(sorted(path.name for path in other.iterdir() if path.suffix == ".ftw"))
    new = folder / f"{name}.new"
    shutil.copyfile(other / name, new)
    os.replace(new, folder / name)
    return name


_KINDS: dict[str, Callable[[Path, random.Random], str]] = {
    "bits flipped": _flip_bits,
    "cut": _cut,
    "lengthened": _lengthen,
    "shifted": _shift,
    "overwritten": _overwrite,
    "blocks swapped": _swap_blocks,
    "records swapped": _swap_records,
    "files swapped": _swap_files,
    "deleted": _delete,
    "emptied": _empty,
    "pages zeroed": _zero_pages,
    "newer": _write_newer,
}


def _pick(folder: Path, chance: random.Random) -> tuple[Path, bytearray]:
    """A file of the folder; the header and the records most of the time."""
    shards = sorted(folder.glob("records-*.ftw"))
    others = sorted(path for path in folder.iterdir() if path.suffix != ".ftw")
    path = chance.choice([folder / HEADER_NAME] * 4 + [chance.choice(shards)] * 5 + others[:1])
    return path, bytearray(path.read_bytes())


def _put(path: Path, stored: bytearray, how: str) -> str:
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(stored)
    os.replace(new, path)
    return f"{path.name} {how}"
