# SPDX-License-Identifier: Apache-2.0
"""LocalModel: a tokenizer, a learned chat format and an engine in this process.

This is where the agent layer meets the runtime. Importing it loads no torch; `load` does.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from freetoken_storage.records import Snapshots
from freetoken_storage.weights_file import read_ahead

from .call_formats.named_formats import named
from .catalog import home, models_dir, resolve
from .errors import TokenizerUnsupported
from .model import (
    NO_IDS,
    Fingerprint,
    ModelUnusable,
    PathMiss,
    PathPlan,
    PathUsage,
    SamplingOptions,
    TokenStream,
)
from .segments import Content, as_text
from .template import ChatFormat
from .tokenizers.gguf_tokenizer import load_gguf_tokenizer
from .tokenizers.hf_tokenizer import HFTokenizer
from .tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    from freetoken_runtime import Engine, EngineConfig, EngineStats

_UNLIMITED = 1 << 62  # without weights nothing is forwarded, so nothing overflows
_NO_WEIGHTS = Fingerprint(b"", {"weights": "not loaded"})


class LocalModel:
    """A model whose engine runs in this process; see the `Model` protocol. A context manager.

    Several sessions may use it at once, from any thread. It holds its weights until `close`.
    """

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        chat_format: ChatFormat,
        engine: "Engine | None",
    ) -> None:
        self._name = name
        self._tokenizer = tokenizer
        self._format = chat_format
        self._engine = engine

    @classmethod
    def load(
        cls,
        source: str | Path,
        *,
        config: "EngineConfig | None" = None,
        weights: bool = True,
        call_format: str | None = None,
    ) -> Self:
        """Load a pulled name, a Hugging Face folder or a GGUF file.

        `weights=False` reads tokenizer and template only: sessions open, count and render, and
        nothing can be forwarded (ModelUnusable). `call_format`: how the model writes tool calls,
        where its template drops them or shows others ("hermes", "lfm2" …); sessions are bound to
        it. Raises ModelNotFound, ModelUnusable (no chat template), TemplateUnsupported,
        UnknownCallFormat, TokenizerUnsupported, and the runtime's errors for weights and
        configurations, each naming the file.
        """
        if call_format is not None:
            named(call_format)  # refused before anything is read
        path = resolve(source)
        if weights:
            read_ahead(path)  # the disk works while tokenizer and torch are loaded
        pulled = path.is_relative_to(models_dir())
        tokenizer = _tokenizer(path, weights)
        if tokenizer.chat_template is None:
            raise ModelUnusable(
                "the model has no chat template",
                value=str(path),
                remedy="use an instruct model, or add chat_template.jinja to its folder",
            )
        chat_format = ChatFormat.learn(tokenizer.chat_template, tokenizer, call_format=call_format)
        engine = None
        if weights:
            from freetoken_runtime import Engine, EngineConfig  # torch loads here, not on import

            config = config or EngineConfig()
            if pulled and config.hash_cache is None:
                config = replace(config, hash_cache=home() / "hashes.json")
            engine = Engine.load(path, config)
        name = path.parent.name if pulled else path.resolve().name
        return cls(name, tokenizer, chat_format, engine)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def name(self) -> str:
        """The pulled name, or the name of its folder or file."""
        return self._name

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def format(self) -> ChatFormat:
        return self._format

    @property
    def engine(self) -> "Engine":
        """The engine, for work on bare ids. ModelUnusable without weights."""
        if self._engine is None:
            raise ModelUnusable(
                "the model was loaded without its weights",
                value=self._name,
                remedy="load it with weights=True",
            )
        return self._engine

    @property
    def fingerprint(self) -> Fingerprint:
        if self._engine is None:
            return _NO_WEIGHTS
        made = self._engine.fingerprint
        return Fingerprint(made.digest, made.parts)

    @property
    def context_limit(self) -> int:
        """How many tokens a path may have."""
        return _UNLIMITED if self._engine is None else self._engine.context_limit

    def count_tokens(self, content: Content) -> int:
        """Tokens of a content by itself, without the frames that a session puts around it."""
        return len(self._tokenizer.encode_content(as_text(content)))

    def set_budget(self, *, ram_bytes: int | None = None, vram_bytes: int | None = None) -> None:
        """Change the memory budgets; what no longer fits is evicted now."""
        self.engine.set_budget(ram_bytes=ram_bytes, vram_bytes=vram_bytes)

    def stats(self) -> "EngineStats":
        """A picture of memory and work. Never waits for a forward pass."""
        return self.engine.stats()

    def attach(self, snapshots: Snapshots) -> None:
        if self._engine is not None:
            self._engine.attach(snapshots)

    def detach(self) -> None:
        if self._engine is not None:
            self._engine.detach()

    def plan(self, ids: Sequence[int]) -> PathPlan:
        if self._engine is None:
            total = len(ids)
            miss = PathMiss(0, "no_weights", total) if total else None
            return PathPlan(total, 0, total, "none", None, miss, math.inf)
        return self._engine.plan(ids)

    def anchors(self, ids: Sequence[int]) -> Sequence[int]:
        return () if self._engine is None else self._engine.anchors(ids)

    def generate(
        self,
        ids: Sequence[int],
        sampling: SamplingOptions,
        *,
        anchors: Sequence[int] = (),
        lasting: Sequence[int] = (),
        anchor_after: frozenset[int] = frozenset(),
        anchor_before: Mapping[int, int] = NO_IDS,
        on_progress: Callable[[int, int], None] | None = None,
        announced: PathPlan | None = None,
    ) -> TokenStream:
        from freetoken_runtime import SamplingParams

        return self.engine.generate(
            ids,
            SamplingParams(**{f.name: getattr(sampling, f.name) for f in fields(sampling)}),
            anchors=anchors,
            lasting=lasting,
            anchor_after=anchor_after,
            anchor_before=anchor_before,
            on_progress=on_progress,
            announced=announced,
        )

    def warm(
        self,
        ids: Sequence[int],
        *,
        anchors: Sequence[int] = (),
        lasting: Sequence[int] = (),
    ) -> PathUsage:
        return self.engine.warm(ids, anchors=anchors, lasting=lasting)

    def forget(self, ids: Sequence[int], start: int) -> int:
        return 0 if self._engine is None else self._engine.forget(ids, start)

    def pin(self, owner: str, paths: Sequence[Sequence[int]]) -> None:
        if self._engine is not None:
            self._engine.pin(owner, paths)

    def flush(self) -> None:
        if self._engine is not None:
            self._engine.flush()

    def close(self) -> None:
        """Finish pending writes and give the memory back. Does nothing the second time."""
        if self._engine is not None:
            self._engine.close()


def _tokenizer(path: Path, weights: bool) -> HFTokenizer:
    try:
        return HFTokenizer.load(path) if path.is_dir() else load_gguf_tokenizer(path)
    except TokenizerUnsupported:
        if weights:
            from freetoken_runtime.weights import open_source

            open_source(path)  # a damaged or foreign model is said to be one
        raise
