# SPDX-License-Identifier: Apache-2.0
"""A grammar at work on token ids: which may come next, and which must.

`llguidance` does the work. A vocabulary is prepared once for a tokenizer, a grammar is compiled
once for a demand; each generation gets a copy. Once the grammar is complete only the ids that end
a turn may follow.
"""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import llguidance
import numpy as np

from freetoken_storage.errors import FreetokenError

from ..model import InvalidSampling
from ..tokenizers.tokenizer import Tokenizer

Row = np.ndarray[Any, np.dtype[np.float32]]

_KEPT_GRAMMARS = 32
# Twenty times what llguidance allows by default: where markers are plain text, several of them are
# looked for in a thought at once.
_LIMITS = llguidance.LLParserLimits(step_lexer_fuel=4_000_000, initial_lexer_fuel=4_000_000)


class UnsupportedSchema(FreetokenError):
    """A JSON schema that cannot be enforced while the model writes; the message names the keyword.
    What was written may still be checked afterwards."""

    code = "unsupported_schema"


class GrammarTooComplex(FreetokenError):
    """What may come next takes too long to find out, with this template and these schemas."""

    code = "grammar_too_complex"


class GrammarConstraint:
    """A `TokenConstraint` of the engine. Mutable; one per generation, used by one thread."""

    def __init__(self, matcher: llguidance.LLMatcher, stops: Sequence[int]) -> None:
        """`stops`: the ids that may follow a complete output."""
        self._matcher = matcher
        self._stops = tuple(stops)

    @property
    def accepting(self) -> bool:
        """Whether the output so far may end here."""
        accepting = self._matcher.is_accepting()
        self._check()
        return accepting

    def mask(self, row: Row) -> None:
        """Set what may not come next to -inf, in place."""
        allowed = np.zeros(len(row), dtype=bool)
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        if self._matcher.is_stopped():
            allowed[list(self._stops)] = True
        else:
            bits = np.unpackbits(words, bitorder="little")[: len(row)]
            allowed[: len(bits)] = bits
        row[~allowed] = -np.inf

    def accept(self, token_id: int) -> None:
        """InvalidSampling if the id was not allowed: it was forced from outside."""
        self._check()
        if self._matcher.is_stopped():
            return
        if not self._matcher.validate_tokens([token_id]):
            raise InvalidSampling(
                "a forced id does not fit the grammar of the step",
                value=token_id,
                remedy="leave force out, or the options that bind what the model writes",
            )
        self._matcher.consume_token(token_id)
        self._check()

    def forced(self) -> Sequence[int]:
        """The ids that must come next in any case."""
        forced: Sequence[int] = self._matcher.compute_ff_tokens()
        self._check()
        return forced

    def _check(self) -> None:
        """The matcher never raises; once it has failed it only knows that it has stopped."""
        if self._matcher.is_error():
            raise GrammarTooComplex(
                "what the model may write next cannot be worked out",
                value=self._matcher.get_error().strip().splitlines()[0][:200],
                remedy="offer fewer tools, or simpler schemas",
            )

    def copy(self) -> "GrammarConstraint":
        return GrammarConstraint(self._matcher.deep_copy(), self._stops)


class Vocabulary:
    """A tokenizer as llguidance sees it, with the grammars compiled for it. Any thread may ask."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[int]) -> None:
        self._stops = tuple(sorted(stops))
        wrapped = llguidance.TokenizerWrapper(_Wrapped(tokenizer, self._stops[0]))
        self._tokens = llguidance.LLTokenizer(wrapped, eos_token=list(self._stops))
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._lock = Lock()

    def constraint(self, lark: str) -> GrammarConstraint:
        """UnsupportedSchema with llguidance's words if the grammar is refused."""
        with self._lock:
            matcher = self._compiled.get(lark)
            if matcher is None:
                grammar = llguidance.LLMatcher.grammar_from_lark(lark)
                matcher = llguidance.LLMatcher(self._tokens, grammar, log_level=0, limits=_LIMITS)
                if matcher.is_error():
                    raise _refused(matcher.get_error())
                self._compiled[lark] = matcher
                if len(self._compiled) > _KEPT_GRAMMARS:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(lark)
            return GrammarConstraint(matcher.deep_copy(), self._stops)


class _Wrapped:
    """What llguidance asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int) -> None:
        ids = range(tokenizer.vocab_size)
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_id
        self.tokens = [tokenizer.piece(token_id) for token_id in ids]
        self.special_token_ids = [i for i in ids if tokenizer.is_control(i)]

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode_content(text if isinstance(text, str) else text.decode())


_vocabularies: WeakKeyDictionary[Tokenizer, dict[frozenset[int], Vocabulary]] = WeakKeyDictionary()
_preparing = Lock()


def vocabulary(tokenizer: Tokenizer, stops: frozenset[int]) -> Vocabulary:
    """The vocabulary of a tokenizer and the ids that end a turn; prepared when it is first asked
    for, which takes about 0.2 s for 50,000 ids."""
    with _preparing:
        of_tokenizer = _vocabularies.setdefault(tokenizer, {})
        if stops not in of_tokenizer:
            of_tokenizer[stops] = Vocabulary(tokenizer, sorted(stops))
        return of_tokenizer[stops]


def check_schema(schema: Mapping[str, Any]) -> None:
    """UnsupportedSchema if a JSON schema holds what cannot be enforced while a model writes."""
    fault = _fault_of(json.dumps(schema))
    if fault:
        raise _refused(fault)


@lru_cache(maxsize=512)  # every step of a run asks about the same tools
def _fault_of(schema: str) -> str:
    """What llguidance says of a schema; '' if it can be enforced."""
    grammar = llguidance.LLMatcher.grammar_from_json_schema(
        schema, overrides={"coerce_one_of": True}
    )
    failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar)
    return messages[0] if failed else ""


def _refused(message: str) -> UnsupportedSchema:
    return UnsupportedSchema(
        "the schema cannot be enforced while the model writes",
        value=" ".join(message.split())[:200],
        remedy="leave the keyword out, or check what was written afterwards (validate_after=True)",
    )
