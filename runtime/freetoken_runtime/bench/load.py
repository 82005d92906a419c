# SPDX-License-Identifier: Apache-2.0
"""From the start of a process to its first token: converted weights against safetensors in bf16,
held in the same form, with the files in the page cache and without.

Weights are random, in shapes of published models: Qwen3-0.6B, and two layers of Qwen3-30B-A3B with
half of their experts. Each start is a process of its own; the kinds take turns. The default
configuration hashes safetensors at each load; beside it stands what they take where the hash is
remembered. Memory is sampled in further processes that load the weights and nothing else: RssAnon
over its value after the imports.
"""

import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ..conversion import convert
from ..random_checkpoint import write_random_checkpoint
from ..weight_source import Quant
from .contestants import ContestantFailed
from .first_token import IMPORTED, Seen, Start
from .page_cache import drop, resident
from .timing import Figure, OnTurn, Target, Turn, interleave, paired_ratio

Cache = Literal["cold", "warm"]

FASTER = Target("at_least", 1.3)
MEMORY = Target("at_most", 1.1)
REMEMBERED = "safetensors, their hash remembered"
FORMS: tuple[Quant | None, ...] = (None, "int8", "int4")
COLD_AT_MOST = 0.01  # of the files' pages may be in the cache
_SAMPLE_S = 0.002
_TIMEOUT_S = 600.0

_QWEN3: Mapping[str, Any] = {
    "hidden_act": "silu",
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "dense": {
        **_QWEN3,
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "mixture": {
        **_QWEN3,
        "model_type": "qwen3_moe",
        "vocab_size": 32_768,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
}


@dataclass(frozen=True)
class LoadSettings:
    """`forms`: of the weights, None for bf16 as it is stored."""

    shape: str = "dense"
    forms: Sequence[Quant | None] = FORMS
    rounds: int = 3
    threads: int | None = None


@dataclass(frozen=True)
class Started:
    """One process: seconds to its first token (or until the weights are loaded), and how far its
    anonymous memory rose over what the imports take."""

    seen: Seen
    seconds: float
    anonymous_bytes: int


@dataclass(frozen=True)
class Contestant:
    """A folder and how it is loaded."""

    folder: Path
    start: Start

    @property
    def files(self) -> list[Path]:
        return sorted(path for path in self.folder.iterdir() if path.is_file())

    def run(self) -> Started:
        return run(self.folder, self.start)


def measure(
    settings: LoadSettings,
    folder: Path,
    *,
    config: Mapping[str, Any] | None = None,
    on_turn: OnTurn | None = None,
) -> list[Figure]:
    """Figures of one shape. `folder`: where the models are kept, 1.2 to 4 GB; those that are there
    are used. `config`: another shape than `settings.shape`, for tests. ContestantFailed."""
    base = folder / settings.shape
    prepare(base, config or SHAPES[settings.shape], settings.forms, on_turn=on_turn)
    figures: list[Figure] = []
    for form in settings.forms:
        pair = _contestants(base, form, settings.threads)
        for cache in ("cold", "warm"):
            label = f"{settings.shape}, {form or 'none'}, {cache}"
            figures += _times(label, pair, cache, settings, form, on_turn)
        figures += _memory(f"{settings.shape}, {form or 'none'}", pair)
    return figures


def prepare(
    base: Path,
    config: Mapping[str, Any],
    forms: Sequence[Quant | None],
    *,
    on_turn: OnTurn | None = None,
) -> None:
    """Write what is not there yet: the checkpoint, and its conversions."""
    source = base / "safetensors"
    if not (source / "config.json").is_file():
        write_random_checkpoint(source, config, on_progress=on_turn)
    for form in forms:
        target = base / (form or "none")
        if not target.exists():
            convert(source, target, quant=form, on_progress=on_turn)


def run(folder: Path, start: Start) -> Started:
    """Start a process and watch it. ContestantFailed with its output if it ends without a token."""
    command = [sys.executable, "-m", "freetoken_runtime.bench.first_token", str(folder)]
    command.append(json.dumps(asdict(start)))
    begun = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            seen, after, peak = _watch(process, begun)
        finally:
            process.kill()
    return Started(seen, after, peak)


def _watch(process: subprocess.Popen[bytes], begun: float) -> tuple[Seen, float, int]:
    assert process.stdout is not None and process.stderr is not None
    at_imports: int | None = None
    peak, pending = 0, b""
    while time.perf_counter() < begun + _TIMEOUT_S:
        if at_imports is not None:
            peak = max(peak, anonymous_bytes(process.pid) or 0)
        if not select.select([process.stdout], [], [], _SAMPLE_S)[0]:
            continue
        part = os.read(process.stdout.fileno(), 1 << 16)
        after = time.perf_counter() - begun
        pending += part
        if not part:
            break
        if at_imports is None and pending.startswith(f"{IMPORTED}\n".encode()):
            at_imports = anonymous_bytes(process.pid) or 0
            pending = pending.partition(b"\n")[2]
        if at_imports is not None and pending.endswith(b"\n"):
            return Seen(**json.loads(pending)), after, max(0, peak - at_imports)
    process.kill()
    said = process.stderr.read().decode(errors="replace").strip()
    raise ContestantFailed("a model could not be loaded", value=said[-2000:] or "no token in time")


def anonymous_bytes(pid: int) -> int | None:
    """RssAnon of a process; None if it has ended or the system does not tell."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return None


def _contestants(base: Path, form: Quant | None, threads: int | None) -> dict[str, Contestant]:
    dtype = "bfloat16" if form is None else "float32"
    start = Start(None, dtype, threads)
    plain = replace(start, quant=form)
    hashes = str(base / "hashes.json")
    return {
        "converted": Contestant(base / (form or "none"), start),
        "safetensors": Contestant(base / "safetensors", plain),
        REMEMBERED: Contestant(base / "safetensors", replace(plain, hash_cache=hashes)),
    }


def _times(
    label: str,
    pair: Mapping[str, Contestant],
    cache: Cache,
    settings: LoadSettings,
    form: Quant | None,
    on_turn: OnTurn | None,
) -> list[Figure]:
    tokens: set[int | None] = set()
    cached: list[float | None] = []

    def turn(contestant: Contestant) -> Callable[[int], Turn]:
        def take(number: int) -> Turn:
            if cache == "cold":
                cached.append(drop(contestant.files))
            else:
                _read_all(contestant.files)
            started = contestant.run()
            tokens.add(started.seen.token)
            return Turn(started.seconds, 1)

        return take

    turns = interleave(
        {name: turn(contestant) for name, contestant in pair.items()},
        settings.rounds,
        on_turn=on_turn,
    )
    if len(tokens) != 1:
        raise ContestantFailed("the kinds of files gave different tokens", value=tokens)
    judged = {"safetensors": FASTER if cache == "cold" or form is not None else None}
    ours = turns.pop("converted")
    return [
        Figure(
            f"{label}: first token after",
            1e3 * statistics.median(turn.seconds for turn in ours),
            "ms",
            baseline=1e3 * statistics.median(turn.seconds for turn in theirs),
            ratio=paired_ratio(ours, theirs),
            target=judged.get(name),
            note=name + _coldness(cached),
        )
        for name, theirs in turns.items()
    ]


def _coldness(cached: Sequence[float | None]) -> str:
    """What is to be said of files that should not be in the page cache."""
    if not cached:
        return ""
    known = [part for part in cached if part is not None]
    if len(known) < len(cached):
        return "; whether the page cache was empty is not known here"
    most = max(known)
    return f"; {most:.0%} of the files stayed in the page cache" if most > COLD_AT_MOST else ""


def _read_all(files: Sequence[Path]) -> None:
    """Bring the files into the page cache, if they are not there."""
    if resident(files) == 1.0:
        return
    buffer = bytearray(1 << 20)
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def _memory(label: str, pair: Mapping[str, Contestant]) -> list[Figure]:
    figures = []
    for name in ("converted", "safetensors"):
        contestant = pair[name]
        alone = replace(contestant.start, weights_only=True)
        started = replace(contestant, start=alone).run()
        weights = started.seen.weights_bytes
        figures.append(
            Figure(
                f"{label}, {name}: anonymous memory while loading",
                started.anonymous_bytes / 2**20,
                "MiB",
                baseline=weights / 2**20,
                ratio=started.anonymous_bytes / weights,
                target=MEMORY,
                note="weights",
            )
        )
    return figures
