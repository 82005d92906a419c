# SPDX-License-Identifier: Apache-2.0
"""Writes docs/reference/: every public name, from its signature and its docstring.

    python docs/reference_pages.py

The sources are read, not imported. What is public and not explained stops it (`Unexplained`): a
name, method or property without a docstring, a field that the docstring of its class does not name
and that has no comment, a name of a module that no page has.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import griffe
from reference_text import Page, anchor, is_error, summary

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "reference"
PACKAGES = ("freetoken_storage", "freetoken_runtime", "freetoken_agent")
ERRORS = ("freetoken_storage.errors", "freetoken_runtime.errors")
PUBLIC = (*PACKAGES, "freetoken_agent.testing", "freetoken_agent.tool_testing")
MADE = "Generated from the docstrings by `docs/reference_pages.py`; a test keeps it current."


@dataclass(frozen=True)
class Area:
    """A page: the public names of these modules, in this order, those of `lead` first. `see`: the
    pages that tell how. Without modules: the errors of all of them."""

    file: str
    title: str
    see: str
    package: str = ""
    modules: str = ""
    lead: str = ""


AGENT, RUNTIME, STORAGE = "freetoken_agent", "freetoken_runtime", "freetoken_storage"
AREAS = (
    Area(
        "agents.md",
        "Agents",
        "[agents](../agents.md)",
        AGENT,
        "agent loop runs.run_context",
        lead="Agent Result Run",
    ),
    Area(
        "tools.md",
        "Tools and MCP",
        "[tools](../tools.md), [MCP](../mcp.md)",
        AGENT,
        "tools tooling.tool_calls tooling.tool_results tooling.toolsets mcp",
        lead="tool Tool",
    ),
    Area(
        "context-rules.md",
        "Context rules",
        "[context rules](../context-rules.md)",
        AGENT,
        "context_rules runs.summaries runs.changes",
        lead="ClearToolResults ClearThinking Summarise ContextRule",
    ),
    Area(
        "sessions.md",
        "Stores and sessions",
        "[quick start](../quickstart.md), [concepts](../concepts.md)",
        AGENT,
        "store session generation segments branches.binding",
        lead="Store Session Generation Reply Segment Edit ReusePlan Usage Miss",
    ),
    Area("events.md", "Events", "[streams](../agents.md#streams)", AGENT, "events"),
    Area("models.md", "Models", "[checkpoints](../checkpoints.md)", AGENT, "local_model model"),
    Area(
        "testing.md",
        "Testing",
        "[testing](../testing.md)",
        AGENT,
        "testing proving.script tool_testing",
        lead="ScriptedModel",
    ),
    Area(
        "engine.md",
        "The engine alone",
        "[bring your own ids](../api.md#engine-alone)",
        RUNTIME,
        "engine config sampler generation reports state.digest",
    ),
    Area(
        "storage.md",
        "The storage alone",
        "[store format](../store-format.md)",
        STORAGE,
        "database memory verification",
    ),
    Area("errors.md", "Errors", "[what to do about each](../errors.md)"),
)


class Unexplained(Exception):
    """What is public and not explained, one a line."""


class Sources:
    """The three packages, as griffe reads them."""

    def __init__(self) -> None:
        paths = [ROOT, ROOT / "runtime", ROOT / "storage"]
        self._loader = griffe.GriffeLoader(search_paths=paths)
        for package in PACKAGES:
            self._loader.load(package)
        self._loader.resolve_aliases(implicit=True)

    def find(self, path: str) -> griffe.Object | None:
        """What an import path leads to; None for what is not of the project."""
        try:
            found = self._loader.modules_collection[path]
        except KeyError:
            return None
        return found.final_target if isinstance(found, griffe.Alias) else found

    @cached_property
    def public(self) -> dict[str, griffe.Object]:
        """What is public, by the name to import it by, in the order of the sources: what packages
        export, and every error."""
        names = {
            f"{package}.{name}": self._loader.modules_collection[f"{package}.{name}"]
            for package in PUBLIC
            for name in self._loader.modules_collection[package].exports or ()
        }
        found = {
            name: it.final_target if isinstance(it, griffe.Alias) else it
            for name, it in names.items()
        }
        known = {it.path for it in found.values()}
        for module in ERRORS:
            for it in self._loader.modules_collection[module].classes.values():
                if not it.is_alias and it.path not in known:
                    found[it.path] = it
        return dict(sorted(found.items(), key=lambda pair: pair[1].lineno or 0))

    def of(self, area: Area) -> dict[str, griffe.Object]:
        """The names of a page."""
        if not area.modules:
            errors = {name: it for name, it in self.public.items() if is_error(it)}
            return dict(sorted(errors.items(), key=lambda pair: pair[0].rpartition(".")[2]))
        homes = [f"{area.package}.{module}" for module in area.modules.split()]
        found = {
            name: it
            for home in homes
            for name, it in self.public.items()
            if it.module.path == home and not is_error(it)
        }
        lead = area.lead.split()
        places = {name: lead.index(it.name) for name, it in found.items() if it.name in lead}
        return dict(sorted(found.items(), key=lambda pair: places.get(pair[0], len(lead))))


def pages() -> dict[str, str]:
    """The text of each file of docs/reference/. Unexplained, with all that is."""
    sources = Sources()
    names = {area: sources.of(area) for area in AREAS}
    everywhere = [home for area in reversed(AREAS) for home in homes(area, names[area])]
    placed = {name for found in names.values() for name in found}
    missing = [f"{name}: on no page" for name in sources.public if name not in placed]
    written = {}
    for area in AREAS:
        here = dict([*everywhere, *homes(area, names[area])])  # before those of the same name
        page = Page(sources.find, here, area.file)
        opening = f"# {area.title}\n\n{MADE} How to use them: {area.see}.\n"
        written[area.file] = opening + page.render(names[area])
        missing += page.missing
    if missing:
        raise Unexplained("\n" + "\n".join(missing))
    return {"README.md": index(names), **written}


def homes(area: Area, found: Mapping[str, griffe.Object]) -> list[tuple[str, str]]:
    """Where each name of a page is explained."""
    names = {path.rpartition(".")[2]: it for path, it in found.items()}
    return [(name, f"{area.file}#{anchor(name, it)}") for name, it in names.items()]


def index(names: Mapping[Area, Mapping[str, griffe.Object]]) -> str:
    """All names, by their pages."""
    lines = ["# Reference", "", MADE, "[API](../api.md) has the rules that hold for all of it."]
    for area in AREAS:
        lines += ["", f"## [{area.title}]({area.file})", "", "| | |", "|---|---|"]
        for path, it in names[area].items():
            name, about = path.rpartition(".")[2], summary(it).replace("|", "\\|")
            lines.append(f"| [`{name}`]({area.file}#{anchor(name, it)}) | {about} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, text in pages().items():
        (FOLDER / file).write_text(text, encoding="utf-8")
