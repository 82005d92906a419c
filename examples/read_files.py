# SPDX-License-Identifier: Apache-2.0
"""A coding agent that reads files of one folder: tools with dependencies, and a model that is told
what was wrong with a call."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from freetoken_agent import Agent, ModelRetry, RunContext, tool
from freetoken_agent.testing import Call, ScriptedModel


@dataclass(frozen=True)
class Project:
    """What the tools may look at."""

    root: Path

    def file(self, path: str) -> Path:
        found = (self.root / path).resolve()
        if not found.is_relative_to(self.root.resolve()) or not found.is_file():
            raise ModelRetry(f"There is no file {path!r}. Call list_files to see what there is.")
        return found


@tool
def list_files(context: RunContext[Project]) -> list[str]:
    """List the files of the project."""
    root = context.deps.root
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())


@tool
def read_file(context: RunContext[Project], path: str) -> str:
    """Read a file of the project.

    Args:
        path: Its path, as list_files gives it.
    """
    return context.deps.file(path).read_text()


# With a pulled model: Agent("smollm2", …)
model = ScriptedModel(
    [
        Call("read_file", {"path": "../secret.txt"}),  # the tool refuses, and says what to do
        Call("list_files", {}),
        [Call("read_file", {"path": "main.py"}), Call("read_file", {"path": "lib/area.py"})],
        "area() takes the height twice: return width * height.",
    ]
)
coder = Agent(model, instructions="Find the fault.", tools=[list_files, read_file])

with TemporaryDirectory() as folder:
    root = Path(folder)
    (root / "lib").mkdir()
    (root / "main.py").write_text("from lib.area import area\n\nprint(area(2, 3))\n")
    (root / "lib" / "area.py").write_text("def area(width, height):\n    return height * height\n")
    result = coder.run_sync("The area of 2 x 3 is 9. Why?", deps=Project(root))

refused, *others = result.session.find(kind="tool_result")
assert refused.error and "list_files" in refused.content
assert len(others) == 3 and not any(answer.error for answer in others)
print(result.output)
