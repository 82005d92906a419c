# SPDX-License-Identifier: Apache-2.0
"""Copying a session's contents into a new session under another template and tokenizer."""

from typing import TYPE_CHECKING

from ..branches.binding import layout_of, new_session
from ..branches.handle import Handle
from ..branches.path import PREAMBLE_KINDS, New, Path, Place, Slot
from ..model import Model
from .items import Options

if TYPE_CHECKING:
    from ..session import Session


def rerender(handle: Handle, model: Model, name: str) -> "Session":
    """A new session with this path's contents. The clock, the policy, the meta data and the
    variables that the other template reads too stay. TemplateUnsupported creates nothing."""
    context = handle.context
    old = context.body
    body = new_session(
        model,
        options=Options(
            variables={k: v for k, v in old.variables.items() if k in model.format.variables},
            now_s=old.now_s,
        ),
        history_thinking=old.history_thinking,
        meta=old.meta,
        initial=None,
    )
    layout = layout_of(body, model)
    path = handle.path
    contents = [_content(place) for place in path.places]
    length = path.preamble_length
    preamble = {new.kind: new for new in contents[:length] if new.kind in PREAMBLE_KINDS}
    ordered: list[Slot] = [preamble[kind] for kind in layout.preamble_order if kind in preamble]
    laid_out = layout.rewrite(Path(), [*ordered, *contents[length:]], path.tail)
    return context.store.create_with(name, model, body, laid_out)


def _content(place: Place) -> New:
    body = place.body
    return New(
        kind=body.kind,
        text=body.content,
        name=body.name,
        arguments=body.arguments,
        call_id=body.call_id,
        error=body.error,
        joins=place.joins,
        source=body.source,
        meta=body.meta,
    )
