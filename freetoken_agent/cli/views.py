# SPDX-License-Identifier: Apache-2.0
"""How sessions look on a terminal: paths, trees, plans and usage."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text
from rich.tree import Tree as RichTree

from freetoken_agent.segments import visible

if TYPE_CHECKING:
    from freetoken_agent import Edit, ReusePlan, Segment, Tree, Usage

_STYLES = {
    "system": "magenta",
    "tools": "magenta",
    "user": "cyan",
    "thinking": "dim",
    "text": "green",
    "tool_call": "yellow",
    "tool_result": "yellow",
    "frame": "dim",
}


def path_table(segments: Sequence["Segment"]) -> Table:
    """One row per segment; the number is what commands accept."""
    table = Table("#", "id", "kind", "tokens", "", box=None, pad_edge=False)
    number = 0
    for segment in segments:
        is_frame = segment.kind == "frame"
        number += not is_frame
        table.add_row(
            "" if is_frame else str(number),
            segment.id,
            Text(segment.kind, style=_STYLES[segment.kind]),
            str(segment.num_tokens),
            Text(_marks(segment) + describe(segment)),
        )
    return table


def describe(segment: "Segment", width: int = 60) -> str:
    """One line that says what a segment is about."""
    if segment.kind == "tool_call":
        arguments = ", ".join(
            f"{key}={value!r}" for key, value in (segment.arguments or {}).items()
        )
        line = visible(f"{segment.tool}({arguments})")
        return line if len(line) <= width else line[: width - 1] + "…"
    return segment.preview(width)


def _marks(segment: "Segment") -> str:
    marks = [name for name in ("stale", "error") if getattr(segment, name)]
    return f"[{', '.join(marks)}] " if marks else ""


def tree_view(tree: "Tree", title: str) -> RichTree:
    """The whole tree. A run of segments without a fork is one node of several lines, so that only
    forks indent."""
    root = RichTree(Text(title))
    for name in tree.empty_branches:
        root.add(Text(f"(empty) ← {name}", style="bold"))
    pending = [(root, index) for index in tree.children(None)]
    while pending:
        parent, index = pending.pop(0)
        lines = [_tree_line(tree, index)]
        below = tree.children(index)
        while len(below) == 1:
            lines.append(_tree_line(tree, below[0]))
            below = tree.children(below[0])
        node = parent.add(Text("\n").join(lines))
        pending += [(node, child) for child in below]
    return root


def _tree_line(tree: "Tree", index: int) -> Text:
    node = tree.nodes[index]
    segment = node.segment
    line = Text(f"{segment.kind:<11} ", style=_STYLES[segment.kind])
    line.append(describe(segment), style="" if node.on_path else "dim")
    line.append(f"  {segment.id}", style="dim")
    if node.branches:
        line.append(f" ← {', '.join(node.branches)}", style="bold")
    return line


def plan_line(plan: "ReusePlan") -> str:
    """The price of a path, and why it is not lower."""
    if plan.miss is not None and plan.miss.cause == "no_weights":
        return f"{plan.input_tokens} tokens (priced once the model is loaded: --dry-run does)"
    line = f"{plan.input_tokens} tokens: reuse {plan.reused_tokens}"
    if plan.source != "none":
        line += f" from {'memory' if plan.source == 'ram' else 'disk'}"
    line += f", forward {plan.prefill_tokens} (about {plan.predicted_s:.2f} s)"
    if plan.miss is not None:
        line += f"\n  {plan.miss.explain()}"
    return line


def usage_line(usage: "Usage") -> str:
    """What a reply cost."""
    line = f"reused {usage.reused_tokens} · prefilled {usage.prefill_tokens}"
    line += f" · wrote {usage.output_tokens} · first after {usage.ttft_s:.2f} s"
    if usage.output_tokens > 1 and usage.decode_s > 0:
        line += f" · {(usage.output_tokens - 1) / usage.decode_s:.0f} tokens/s"
    return line + (f" · {usage.changed}" if usage.changed else "")


def edit_lines(edit: "Edit", *, dry_run: bool = False) -> str:
    """What an edit did, or would do."""
    if not edit:
        return "nothing to change"
    verb = "would change" if dry_run else "done"
    counts = f"{len(edit.added)} added, {len(edit.removed)} removed"
    return f"{verb}: {counts}\nnext reply: {plan_line(edit.plan)}"
