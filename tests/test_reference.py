# SPDX-License-Identifier: Apache-2.0
"""docs/reference/ is what docs/reference_pages.py writes now, and has every public name."""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from freetoken_agent import FreetokenError

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md")}


@pytest.fixture(scope="module")
def generator() -> Iterator[ModuleType]:
    """docs/reference_pages.py as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        yield importlib.import_module("reference_pages")
    for name in ("reference_pages", "reference_text"):
        del sys.modules[name]


def test_the_pages_are_current(generator: ModuleType) -> None:
    """Oracle: the generator's output now. It refuses what is public and not explained."""
    assert generator.pages() == PAGES, "run `make docs` again"


def test_every_public_name_has_a_section(generator: ModuleType) -> None:
    """Oracle: `__all__` of the modules, and the errors, as Python imports them; the generator reads
    their text."""
    sections = [
        imported
        for page in PAGES.values()
        for imported in re.findall(r"^## .*\n\n`from ([\w.]+ import \w+)`$", page, re.M)
    ]
    public = {
        f"{package} import {name}": getattr(importlib.import_module(package), name)
        for package in generator.PUBLIC
        for name in importlib.import_module(package).__all__
    }
    exported = [one for one in public.values() if isinstance(one, type)]
    for module in generator.ERRORS:
        for name, one in vars(importlib.import_module(module)).items():
            is_error = isinstance(one, type) and issubclass(one, FreetokenError)
            if is_error and one.__module__ == module and one not in exported:
                public[f"{module} import {name}"] = one
    assert sorted(sections) == sorted(public)


@pytest.mark.parametrize("name", ["Session", "Agent", "Tool", "Store", "ScriptedModel"])
def test_every_public_method_has_a_section(generator: ModuleType, name: str) -> None:
    """Oracle: the attributes of the class itself, but for those that the generator names as
    internal, or as explained elsewhere."""
    module = "freetoken_agent" if name != "ScriptedModel" else "freetoken_agent.testing"
    kind: Any = getattr(importlib.import_module(module), name)
    text = sys.modules["reference_text"]
    shown = {
        *re.findall(rf"^### {name}\.(\w+)$", "\n".join(PAGES.values()), re.M),
        *text.INTERNAL.get(name, ()),
        *getattr(kind, "__dataclass_fields__", ()),
    }
    if name in text.IMPLEMENTS:
        shown |= set(dir(importlib.import_module("freetoken_agent").Model))
    assert {one for one in dir(kind) if not one.startswith("_")} <= shown


def test_what_nobody_explained_is_refused(
    generator: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the same sources without one docstring, one comment and one page."""
    found = generator.Sources()
    segment = found.find("freetoken_agent.segments.Segment")
    segment.members["num_tokens"].lines_collection[segment.filepath] = [
        line.partition("  # ")[0] for line in segment.lines_collection[segment.filepath]
    ]
    found.find("freetoken_agent.store.Store").members["flush"].docstring = None
    monkeypatch.setattr(generator, "Sources", lambda: found)
    monkeypatch.setattr(
        generator, "AREAS", [area for area in generator.AREAS if area.file != "storage.md"]
    )
    with pytest.raises(generator.Unexplained) as refused:
        generator.pages()
    said = str(refused.value)
    for missing in ("Segment.num_tokens:", "Store.flush: no doc", "Database: on no page"):
        assert missing in said


def test_errors_that_are_raised_are_named(generator: ModuleType) -> None:
    """Oracle: the `raise` statements of what is public. Each error is named in the docstring of the
    function, or of its class, or where these are explained instead."""
    text, sources = sys.modules["reference_text"], generator.Sources()
    unnamed = []
    for path, found in sources.public.items():
        if text.is_error(found) or not (found.is_class or found.is_function):
            continue
        kinds = [found, *found.mro()] if found.is_class else []
        if found.name in text.IMPLEMENTS:
            kinds.append(sources.find(text.IMPLEMENTS[found.name]))
        functions = {m.name: m for k in reversed(kinds) for m in k.functions.values()} or {
            "": found
        }
        for name, function in functions.items():
            if name.startswith("_") and name not in ("__init__", "__post_init__"):
                continue
            explaining = [function, found, *kinds, *(k.members.get(name) for k in kinds)]
            said = " ".join(one.docstring.value for one in explaining if one and one.docstring)
            raised = re.findall(r"\braise ([A-Z]\w+)\(", function.source or "")
            unnamed += [f"{path}.{name}: {error}" for error in raised if error not in said]
    assert unnamed == []
