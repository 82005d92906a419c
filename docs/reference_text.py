# SPDX-License-Identifier: Apache-2.0
"""What a page of docs/reference/ says of a class, a function or a type: griffe's objects as
Markdown."""

import io
import re
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import griffe

WIDTH = 90

# What the layers above call on an object that users hold; users do not.
INTERNAL = {
    "Session": {"begin_generation", "begin_run", "history_thinking", "restore_pins"},
    "Store": {"create_with", "models"},
    "LocalModel": {"engine", "__init__"},
    "MCPServer": {"__init__"},
    "Engine": {"__init__"},
    "Generation": {"__init__"},
    "Run": {"__init__"},
    "Agent": {"output", "known_tools"},
    "Tool": {"reader"},
}
# What these do not explain themselves is explained there.
IMPLEMENTS = {
    "LocalModel": "freetoken_agent.model.Model",
    "ScriptedModel": "freetoken_agent.model.Model",
    "ToolList": "freetoken_agent.tooling.toolsets.Toolset",
    "MemoryDatabase": "freetoken_storage.database.Database",
}


class Page:
    """Renders the names of one page; `missing` collects what is not explained."""

    def __init__(
        self,
        find: Callable[[str], griffe.Object | None],
        homes: Mapping[str, str],
        file: str,
    ) -> None:
        """`find`: what an import path leads to. `homes`: of each documented name its file and
        anchor."""
        self._find = find
        self._homes = homes
        self._file = file
        self._types: dict[str, griffe.Object] = {}  # that signatures name and no page has
        self.missing: list[str] = []

    def render(self, found: Mapping[str, griffe.Object]) -> str:
        names = {path: path.rpartition(".")[2] for path in found}
        lines = [
            f"- [`{name}`](#{anchor(name, found[path])}): {summary(found[path])}"
            for path, name in names.items()
        ]
        for path, it in found.items():
            package, _, name = path.rpartition(".")
            lines += ["", f"## {heading(name, it)}", "", f"`from {package} import {name}`", ""]
            lines += self._body(it)
        lines += ["", "## Types in the signatures"] if self._types else []
        shown = 0
        while shown < len(self._types):  # showing one may add others
            it = list(self._types.values())[shown]
            lines += ["", f"### {it.name}", "", *self._body(it)]
            shown += 1
        return "\n" + "\n".join(lines) + "\n"

    def _body(self, it: griffe.Object) -> list[str]:
        if isinstance(it, griffe.Class):
            return self._class(it)
        if isinstance(it, griffe.Function):
            return [*self._signature(it), *self._text(it, it.name)]
        assert isinstance(it, griffe.Attribute), it.path
        value = f" = {self._typed(it.value)}"
        shown = ["```py", it.name + (value if len(value) < 200 else ": str"), "```"]
        is_documented = it.name in self._homes or it.docstring is not None
        return [*shown, *(self._text(it, it.name) if is_documented else ())]

    def _class(self, it: griffe.Class) -> list[str]:
        members = self._members(it)
        init = it.members.get("__init__") if "__init__" not in INTERNAL.get(it.name, ()) else None
        if isinstance(init, griffe.Function) and not is_error(it) and "dataclass" not in it.labels:
            lines = self._signature(init, f"class {it.name}")
            about = self._text(init, it.name) if init.docstring is not None else []
        else:
            bases = ", ".join(str(base) for base in it.bases if not str(base).startswith("_"))
            lines = ["```py", f"class {it.name}({bases})".removesuffix("()"), "```"]
            about = []
        lines += [*self._text(it, it.name), *about]
        if it.name in IMPLEMENTS:
            there = self._linked(f"`{IMPLEMENTS[it.name].rpartition('.')[2]}`", it.name)
            lines += ["", f"What it has of {there} is explained there."]
        if is_error(it):
            lines += ["", f"`code`: {spelled(str(it['code'].value))}"]
        lines += self._fields(it, [m for m in members if is_field(m)])
        for member in members:
            if not is_field(member):
                title = f"{it.name}.{member.name}"
                lines += ["", f"### {title}", ""]
                lines += [*self._member(member), *self._text(member, title)]
        return lines

    def _members(self, it: griffe.Class) -> list[griffe.Object]:
        """Its public ones, and those of bases that have no page."""
        found: dict[str, griffe.Object] = {}
        for kind in (it, *(base for base in it.mro() if base.name not in self._homes)):
            for name, member in kind.members.items():
                if isinstance(member, griffe.Function | griffe.Attribute):
                    found.setdefault(name, member)
        hidden = {"code", "model_config", *INTERNAL.get(it.name, ())}
        elsewhere = {name for kind in self._explaining(it) for name in kind.members}
        own = self._named(it)
        return [
            member
            for name, member in found.items()
            if not name.startswith("_") and name not in hidden
            if member.docstring is not None
            or name in own
            or name not in elsewhere
            or (name in it.members and "class-attribute" in member.labels)
        ]

    def _explaining(self, it: griffe.Class) -> list[griffe.Object]:
        """The classes whose sections explain what it says nothing about."""
        found = [self._find(IMPLEMENTS[it.name])] if it.name in IMPLEMENTS else []
        found += [base for base in it.mro() if base.name in self._homes]
        return [kind for kind in found if kind is not None]

    def _named(self, it: griffe.Class) -> set[str]:
        """What its docstring names, and that of its bases which have no page."""
        kinds = (it, *(base for base in it.mro() if base.name not in self._homes))
        said = "\n".join(kind.docstring.value for kind in kinds if kind.docstring is not None)
        code = " ".join(re.findall(r"`[^`]+`|^\w+(?=  )", said, re.M))
        return set(re.findall(r"\w+", code))

    def _member(self, member: griffe.Object) -> list[str]:
        if isinstance(member, griffe.Function):
            return self._signature(member)
        assert isinstance(member, griffe.Attribute), member.path
        return ["```py", f"{member.name}: {self._typed(member.annotation)}", "```"]

    def _fields(self, owner: griffe.Class, fields: Sequence[griffe.Object]) -> list[str]:
        named = self._named(owner)
        lines = ["", "| field | type | default | |", "|---|---|---|---|"] if fields else []
        for field in fields:
            assert isinstance(field, griffe.Attribute)
            about = comment(field)
            if not about and field.name not in named and field.name != "type":
                self.missing.append(f"{owner.name}.{field.name}: its class does not name it")
            cells = (field.name, self._typed(field.annotation), default_of(field))
            shown = [f"`{cell}`".replace("|", "\\|") if cell else "" for cell in cells]
            said = self._linked(about, owner.name).replace("|", "\\|")
            lines.append(f"| {' | '.join(shown)} | {said} |")
        return lines

    def _signature(self, it: griffe.Function, name: str = "") -> list[str]:
        start = name or f"{'async ' if 'async' in it.labels else ''}def {it.name}"
        lines = ["```py"]
        for variant in it.overloads or [it]:
            for annotation in (*(p.annotation for p in variant.parameters), variant.returns):
                self._typed(annotation)
            text = variant.signature(return_type=not name).partition("(")[2]
            lines += ["@classmethod"] if "classmethod" in it.labels else []
            lines += wrapped(spelled(f"{start}({text}"))
        return [*lines, "```"]

    def _typed(self, annotation: str | griffe.Expr | None) -> str:
        """An annotation as written. Types of ours in it that no page has are shown on this one."""
        if isinstance(annotation, griffe.Expr):
            for part in annotation.iterate(flat=True):
                if isinstance(part, griffe.ExprName):
                    self._note_type(self._find(part.canonical_path))
        return spelled("Any" if annotation is None else str(annotation))

    def _note_type(self, it: griffe.Object | None) -> None:
        if it is None or it.name in self._homes:
            return
        if isinstance(it, griffe.Attribute):
            shown = not re.search(r"TypeVar|ParamSpec", str(it.value))
        else:
            shown = isinstance(it, griffe.Class) and any(
                "TypedDict" in str(base) for kind in (it, *it.mro()) for base in kind.bases
            )
        if shown:
            self._types.setdefault(it.name, it)

    def _text(self, it: griffe.Object, title: str) -> list[str]:
        """The docstring, with names as links; aligned columns become lists, indented lines stay."""
        if it.docstring is None or not it.docstring.value.strip():
            self.missing.append(f"{title}: no docstring")
            return []
        lines: list[str] = []
        for paragraph in re.split(r"\n\s*\n", it.docstring.value.strip("\n")):
            rows = paragraph.splitlines()
            if all(row.startswith("    ") for row in rows):
                lines += ["", "```text", *rows, "```"]
            else:
                lines += ["", self._linked("\n".join(listed(rows)), title)]
        return lines

    def _linked(self, text: str, inside: str) -> str:
        """Names of other documented things lead to where they are."""

        def link(match: re.Match[str]) -> str:
            name = match[1] or match[2]
            home = self._homes.get(name)
            if home is None or name == inside.partition(".")[0]:
                return match[0]
            return f"[`{name}`]({home.removeprefix(self._file)})"

        name = re.compile(r"`(\w+)`|\b([A-Z][a-z]+[A-Z]\w+)\b")

        def shown(piece: str) -> str:
            if not piece.startswith("`"):
                return name.sub(link, piece.replace("<", r"\<"))
            return name.sub(link, piece) if name.fullmatch(piece) else piece

        return "".join(map(shown, re.split(r"(`[^`]*`)", text)))


def heading(name: str, it: griffe.Object) -> str:
    """Of its section. `tool` and `Tool` would have one anchor."""
    return f"{name} (function)" if isinstance(it, griffe.Function) else name


def anchor(name: str, it: griffe.Object) -> str:
    """What its heading can be reached by."""
    return re.sub(r"[^\w\- ]", "", heading(name, it)).lower().replace(" ", "-")


def spelled(text: str) -> str:
    """Without the quotes around types that are defined later; strings quoted as everywhere."""
    return re.sub(r"\"([A-Z][\w.\[\], |]*)\"", r"\1", text).replace("'", '"')


def wrapped(signature: str) -> Iterator[str]:
    """One parameter a line where the whole is too long."""
    if len(signature) <= WIDTH:
        yield signature
        return
    depth, start = 0, signature.index("(") + 1
    yield signature[:start]
    for token in tokenize.generate_tokens(io.StringIO(signature).readline):
        closes = token.string in (")", "]", "}")
        if depth == 1 and (token.string == "," or closes):
            yield f"    {signature[start : token.start[1]].strip()},"
            start = token.end[1]
        depth += (token.string in ("(", "[", "{")) - closes
        if closes and depth == 0:
            yield signature[token.start[1] :]
            return


def summary(it: griffe.Object) -> str:
    """The first sentence of its docstring."""
    text = " ".join(it.docstring.value.partition("\n\n")[0].split()) if it.docstring else ""
    sentence = re.match(r"(?:`[^`]*`|[^`])*?[.:;](?=\s|$)", text)
    return (sentence[0] if sentence else text).rstrip(".:;")


def listed(rows: Sequence[str]) -> list[str]:
    """Lines of two aligned columns as a list; others as they are."""
    if len(rows) < 2 or not all(re.match(r"\S+(?: \S+)* {2,}\S| {8}", row) for row in rows):
        return list(rows)
    return [re.sub(r"^ {8,}", "  ", re.sub(r"^(\S.*?) {2,}", r"- `\1`: ", row)) for row in rows]


def is_field(it: griffe.Object) -> bool:
    return isinstance(it, griffe.Attribute) and "property" not in it.labels


def is_error(it: griffe.Object) -> bool:
    return isinstance(it, griffe.Class) and any(
        kind.name == "FreetokenError" for kind in (it, *it.mro())
    )


def default_of(field: griffe.Attribute) -> str:
    """What a field is when it is not given; nothing for what must be, or is set by the class."""
    text = spelled(str(field.value or ""))
    if "class-attribute" not in field.labels:
        return ""
    made = re.fullmatch(r"field\(.*?default_factory=(\w+).*\)", text)
    if made:
        return {"dict": "{}", "list": "[]", "tuple": "()"}.get(made[1], f"{made[1]}()")
    given = re.fullmatch(r"field\((?:.*, )?default=([^,)]+).*\)", text)
    return given[1] if given else "" if text.startswith("field(") else text


def comment(field: griffe.Attribute) -> str:
    """What stands behind a field, above it, or in a string below it."""
    if field.docstring is not None:
        return " ".join(field.docstring.value.split())
    assert field.lineno is not None and field.endlineno is not None
    assert isinstance(field.filepath, Path), field.path
    lines = field.lines_collection[field.filepath]
    behind = lines[field.endlineno - 1].rpartition("  # ")
    if behind[1] and not behind[2].startswith("type: ignore"):
        return behind[2]
    start = field.lineno - 1
    while lines[start - 1].lstrip().startswith("# "):
        start -= 1
    return " ".join(line.strip(" #") for line in lines[start : field.lineno - 1])
