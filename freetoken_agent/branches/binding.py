# SPDX-License-Identifier: Apache-2.0
"""Whether a model may write a session: same tokenizer and template, or read-only."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..chat_templates.items import Options
from ..chat_templates.layout import Layout
from ..model import Model
from .codec import Initial, SessionBody

_OPEN_WITH_MODEL = "open it with its model"


@dataclass(frozen=True)
class Binding:
    """How a session and the model it was opened with fit.

    `bound`: as created. `cold`: other weights, quantisation or settings, so that its earlier states
    cannot be reused; everything else works. `read_only`: no model, or one whose tokenizer or
    template differ, so that its ids would mean something else.
    """

    state: Literal["bound", "cold", "read_only"]  # see above
    reason: str | None = None  # a sentence; None if bound
    remedy: str | None = None  # what to do about it, if anything


def bind(session: SessionBody, model: Model | None) -> Binding:
    """Compare what the session was created with to a model."""
    if model is None:
        return Binding("read_only", "no model was given", _OPEN_WITH_MODEL)
    template, _, call_format = session.template.partition("+")
    given_template, _, given_format = model.format.digest.partition("+")
    differing = [
        name
        for name, stored, given in (
            ("tokenizer", session.tokenizer, model.tokenizer.digest),
            ("template", template, given_template),
            ("call format", call_format, given_format),
        )
        if stored != given
    ]
    if differing == ["call format"]:
        return _other_calls(model.name, call_format, given_format)
    if differing:
        return Binding(
            "read_only",
            f"the {' and '.join(differing)} of {model.name!r} differ from those of "
            f"{session.model!r}, which the session was made with",
            "open it with that model, or rerender() it into a new session",
        )
    digests = {session.fingerprint_digest, model.fingerprint.digest}
    if len(digests) == 2 and b"" not in digests:  # without weights there are no states to miss
        parts = differing_parts(session.fingerprint, model.fingerprint.parts)
        return Binding(
            "cold",
            f"its states were made with another {', '.join(parts) or 'configuration'}; "
            "the first forward pass computes the path anew",
        )
    return Binding("bound")


def _other_calls(model: str, stored: str, given: str) -> Binding:
    """The same template with calls of another format."""
    asked = f"call_format={stored!r}" if stored else "no call_format"
    return Binding(
        "read_only",
        f"{model!r} writes calls in {_words(given)}, the session was made for {_words(stored)}",
        f"load the model with {asked}, or rerender() the session into a new one",
    )


def _words(call_format: str) -> str:
    return f"the format {call_format!r}" if call_format else "the template's own format"


def differing_parts(stored: Mapping[str, str], given: Mapping[str, str]) -> list[str]:
    """Names of the fingerprint's parts that differ."""
    names = sorted(stored.keys() | given.keys())
    return [name for name in names if stored.get(name) != given.get(name)]


def new_session(
    model: Model,
    *,
    options: Options,
    history_thinking: str,
    meta: Mapping[str, Any],
    initial: Initial | None,
) -> SessionBody:
    """The record of a session that is being created for a model."""
    return SessionBody(
        model=model.name,
        tokenizer=model.tokenizer.digest,
        template=model.format.digest,
        fingerprint=dict(model.fingerprint.parts),
        fingerprint_digest=model.fingerprint.digest,
        variables=dict(options.variables),
        now_s=options.now_s,
        history_thinking=history_thinking,
        meta=dict(meta),
        initial=initial,
    )


def layout_of(session: SessionBody, model: Model) -> Layout:
    """The model's format with the options the session fixed at creation."""
    options = Options(variables=dict(session.variables), now_s=session.now_s)
    return Layout(model.format, model.tokenizer, options)
