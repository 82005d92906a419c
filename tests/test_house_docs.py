# SPDX-License-Identifier: Apache-2.0
"""What the documents say is so: links lead somewhere, commands exist, tables are whole."""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

import freetoken_agent
import freetoken_runtime
import freetoken_storage
from freetoken_agent import LocalModel, Model, Session, Store
from freetoken_agent.call_formats.named_formats import FORMATS
from freetoken_agent.cli.main import app
from freetoken_runtime.state import digest
from freetoken_storage import keys, values
from freetoken_storage.errors import FreetokenError

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, language: str) -> list[str]:
    return [code for kind, code in FENCE.findall(path.read_text()) if kind == language]


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_lead_somewhere(document: Path) -> None:
    """Every relative link is a file of the repository; anchors are headings of it."""
    text = re.sub(FENCE, "", document.read_text())
    for target in LINK.findall(text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), f"{name(document)} links to {target}"
        if anchor:
            heads = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            assert anchor in {slug(head) for head in heads}, f"{name(document)} links to {target}"


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-")


def test_every_document_is_reachable() -> None:
    """A page that no other page links to is lost. People enter at the README or the index."""
    linked = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in DOCUMENTS
        for target in LINK.findall(page.read_text())
        if "://" not in target
    }
    entered = {ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "docs" / "index.md"}
    assert set(DOCUMENTS) - entered <= linked


def test_every_example_is_in_the_index() -> None:
    """Oracle: the files of examples/."""
    page = (ROOT / "docs" / "index.md").read_text()
    listed = re.findall(r"^\| `(examples/\w+\.py)` \| \S", page, re.M)
    assert sorted(listed) == sorted(name(path) for path in (ROOT / "examples").glob("*.py"))


def test_the_readme_program_is_the_example() -> None:
    """The README shows examples/edit_tool_result.py, in at most 25 lines."""
    (shown,) = blocks(ROOT / "README.md", "python")
    example = (ROOT / "examples" / "edit_tool_result.py").read_text()
    assert shown == example.split("\n", 1)[1]  # without the licence line
    assert len(shown.splitlines()) <= 25


def test_the_readme_opens_with_the_two_commands() -> None:
    """`make demo` and `make test` are the first things to type, and are targets."""
    first = blocks(ROOT / "README.md", "bash")[0]
    assert [line.split("#")[0].strip() for line in first.splitlines()] == ["make demo", "make test"]
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    shown = re.compile(r"(?:`|^)make (\w+)", re.MULTILINE)
    named = {target for page in DOCUMENTS for target in shown.findall(page.read_text())}
    assert {"demo", "test"} | named <= set(targets)


WRITTEN = re.compile(r"(?:^|`)(?:\$ )?freetoken-agent ((?:[^`\n]|(?<= )`)*)", re.MULTILINE)


def commands_in(document: Path) -> list[list[str]]:
    """The words after `freetoken-agent`, wherever a line or a code span begins with it: up to what
    is a comment or stands two spaces away; `a|b|c` taken apart, brackets off."""
    found = []
    for line in WRITTEN.findall(document.read_text()):
        words = re.split(r" {2,}|\s#", line.strip())[0].translate(BRACKETS).split()
        for index, word in enumerate(words[:2]):
            if "|" in word:
                found += [[*words[:index], one, *words[index + 1 :]] for one in word.split("|")]
                break
        else:
            found.append(words)
    return found


BRACKETS = str.maketrans("", "", "[]…")


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_commands_in_documents_exist(document: Path) -> None:
    """Oracle: the application's own parameters. Each command that a page shows is one, and has the
    options that the page gives it."""
    for words in commands_in(document):
        command, rest = typer.main.get_command(app), list(words)
        while isinstance(command, TyperGroup) and rest:
            assert rest[0] in command.commands, words
            command = command.commands[rest.pop(0)]
        options = {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
        assert {word for word in rest if word.startswith("-")} <= options, words


def test_every_command_is_documented() -> None:
    """Oracle: the commands the application registers."""
    page = (ROOT / "docs" / "command-line.md").read_text()
    for command in app.registered_commands:
        assert f"freetoken-agent {command.name}" in page
    for group in app.registered_groups:
        assert f"freetoken-agent {group.name}" in page
        assert group.typer_instance is not None
        for command in group.typer_instance.registered_commands:
            assert re.search(rf"[ |]{command.name}\b", page), command.name


# What the layers above call on a session or model; users do not.
INTERNAL = {
    "Session": {"begin_generation", "begin_run", "history_thinking", "restore_pins"},
    "Store": {"create_with", "models"},
    "LocalModel": set(dir(Model)) | {"engine"},
}


@pytest.mark.parametrize(
    ("kind", "handle"), [(Session, "s"), (Store, "store"), (LocalModel, "model")]
)
def test_the_api_page_names_what_there_is(kind: type, handle: str) -> None:
    """Every public attribute is on the page, every name on the page is an attribute, and keyword
    arguments that the page shows are parameters."""
    page = (ROOT / "docs" / "api.md").read_text()
    named = set(re.findall(rf"\b{handle}\.(\w+)", page))
    public = {name for name in dir(kind) if not name.startswith("_")}
    assert named <= public
    assert public - INTERNAL[kind.__name__] - {"load"} <= named
    for name, arguments in re.findall(rf"`(?:await )?{handle}\.(\w+)\(([^`]*)\)", page):
        parameters = inspect.signature(getattr(kind, name)).parameters
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            continue
        for keyword in re.findall(r"(\w+)=", arguments):
            assert keyword in parameters, f"{name}({keyword}=…)"


def test_the_error_table_is_the_error_tree() -> None:
    """Oracle: every subclass of FreetokenError in the three packages; each code is explained once,
    and no code is explained that does not exist."""
    for package in (freetoken_storage, freetoken_runtime, freetoken_agent):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith(("_main__", "worker_main", ".triton")):  # of an extra
                importlib.import_module(module.name)
    ours = ("freetoken_storage", "freetoken_runtime", "freetoken_agent")
    codes = {c.code for c in subclasses(FreetokenError) if c.__module__.startswith(ours)}
    rows = re.findall(r"^\| ((?:`\w+` ?)+)\|", (ROOT / "docs" / "errors.md").read_text(), re.M)
    listed = [code for row in rows for code in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == sorted(codes)


def test_the_store_format_page_names_every_key_and_limit() -> None:
    """Oracle: the constants of the storage. Each kind of key is in the table of its database."""
    page = (ROOT / "docs" / "store-format.md").read_text()
    sessions, states = page.split("## Keys of `")[1:]
    both = {keys.FORMAT, keys.COUNTERS, keys.PIECE}
    of_sessions = {*keys.SESSION_KINDS, keys.META, keys.NAME} | both
    of_states = {keys.RECORD, keys.CHILD, keys.USE, keys.CHUNK, keys.WRITING, keys.OWNER} | both
    for text, expected in ((sessions, of_sessions), (states, of_states)):
        listed = re.findall(r"^\| `(\w)`", text, re.M)
        assert sorted(listed) == sorted(kind.decode() for kind in expected)
    assert f"{values.PAYLOAD_BYTES:,} bytes" in page
    assert f"d({digest.BLOCK})" in page


def test_the_tools_page_names_every_call_format() -> None:
    """Oracle: the formats that can be chosen."""
    page = (ROOT / "docs" / "tools.md").read_text()
    (names,) = re.findall(r"There are\n\n((?:`\w+`\s)+)", page)
    assert sorted(re.findall(r"\w+", names)) == sorted(FORMATS)


def subclasses(root: type[FreetokenError]) -> Iterator[type[FreetokenError]]:
    for child in root.__subclasses__():
        yield child
        yield from subclasses(child)


def test_every_decision_is_in_the_index() -> None:
    """docs/decisions/README.md lists each note once, by its number and title."""
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text()
    notes = sorted(path for path in folder.glob("*.md") if path.name != "README.md")
    assert notes
    for note in notes:
        title = note.read_text().splitlines()[0].removeprefix("# ")
        assert title.split()[0] == note.name[:4], f"{note.name}: the title begins with the number"
        assert index.count(f"[{title}]({note.name})") == 1, note.name
    numbers = [note.name[:4] for note in notes]
    assert len(set(numbers)) == len(numbers), "two notes share a number"
