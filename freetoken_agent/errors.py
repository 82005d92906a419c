# SPDX-License-Identifier: Apache-2.0
"""The errors of the SDK. They extend the tree that freetoken_storage.errors draws.

FreetokenError
├── SegmentError
│   ├── SegmentNotFound      not on this branch's path; `.reason` says why
│   ├── SegmentReplaced      the path holds a newer version; `.current` is that segment
│   ├── SegmentInUse         a purge of what a branch still holds; `.branches` names them
│   └── FrameNotEditable     a frame is not a position and cannot be edited
├── PairingError             the edit would part a tool call from its result
├── NothingToGenerate        the assistant turn at the head is closed, or a call has no result
├── NothingToUndo / NothingToRedo
├── SessionBusy              a generation is writing this branch, or another run is on it
├── SessionReadOnly          opened without a model, or with a tokenizer or template not its own
├── InvalidEdit              arguments of an edit that do not go together
├── TemplateUnsupported      the chat template refuses, moves or drops what was asked
├── UnknownCallFormat        a name of a call format that there is not
├── UnsupportedContent       a content part that is not text
├── TokenizerUnsupported     a tokenizer that cannot keep contents and control tokens apart
├── InvalidMessages          a message list that breaks its own format
├── InvalidTool              a function that cannot be a tool
│   └── ToolNameTaken        two tools of one name
├── InvalidOutputType        a type that cannot be an output type
├── InvalidAgent             fields of an agent that do not go together
├── InvalidRule              fields of a context rule that do not go together
├── RunError                 a run of an agent ended without an answer; `.result` is what there is
│   ├── RunLimit             a limit was reached
│   └── InvalidOutput        the answer is not of the output type, and no attempt is left
├── RunUnfinished            the result of a run that has not ended
├── InvalidDecision          a decision about no call of the session, or one that comes too late
├── PromptDiffers            the session's preamble is not the agent's, and must not be replaced
├── MCPMissing               the package mcp is not installed
├── MCPServerFailed          an MCP server that does not start, answer, or stay
├── ModelRetry               raised by a tool: the model shall try again, with this text
├── ToolFailed               raised by a tool: this text is its result, an error
└── StorageError
    └── SessionConflict
        └── GenerationConflict   a generation was saved on another branch; `.branch` names it
"""

from typing import TYPE_CHECKING, Any, Literal

from freetoken_storage.errors import FreetokenError, SessionConflict

if TYPE_CHECKING:
    from .agent import Result
    from .segments import Segment

MissingReason = Literal["deleted", "other_branch", "purged", "unknown"]


class SegmentError(FreetokenError):
    """A segment that cannot serve as the position or target of an edit."""

    code = "segment_error"


class SegmentNotFound(SegmentError):
    """The segment is not on this branch's path, and no version of it is. `reason`: it was deleted,
    is on another branch, was purged, or never was one of this session."""

    code = "segment_not_found"

    def __init__(self, what: str, *, segment: str, reason: MissingReason, remedy: str) -> None:
        super().__init__(what, value=segment, remedy=remedy)
        self.reason: MissingReason = reason


class SegmentReplaced(SegmentError):
    """The path holds another version of the segment, `current`."""

    code = "segment_replaced"

    def __init__(self, what: str, *, segment: str, current: "Segment") -> None:
        super().__init__(what, value=segment, remedy=f"use {current.id!r}, the current version")
        self.current = current


class SegmentInUse(SegmentError):
    """A branch's path still holds the segment. `branches`: the names of all that do."""

    code = "segment_in_use"

    def __init__(self, what: str, *, segment: str, branches: tuple[str, ...]) -> None:
        super().__init__(
            what,
            value=segment,
            limit=f"branches {', '.join(branches)}",
            remedy="delete it there, or delete those branches, then purge",
        )
        self.branches = branches


class FrameNotEditable(SegmentError):
    """Frames follow from their neighbours; name a content segment instead."""

    code = "frame_not_editable"


class PairingError(FreetokenError):
    """Tool calls and results go together. Nothing was changed."""

    code = "pairing_error"


class NothingToGenerate(FreetokenError):
    """Nothing for the model to write here."""

    code = "nothing_to_generate"


class NothingToUndo(FreetokenError):
    """The branch's log holds no such step, or a purge removed it."""

    code = "nothing_to_undo"


class NothingToRedo(FreetokenError):
    """No undone step is left on this branch."""

    code = "nothing_to_redo"


class SessionBusy(FreetokenError):
    """A generation is writing this branch; reading, planning and forking it work meanwhile."""

    code = "session_busy"


class SessionReadOnly(FreetokenError):
    """This handle cannot change the session; the message says why."""

    code = "session_read_only"


class InvalidEdit(FreetokenError):
    """Arguments that do not go together, or a place where the edit makes no sense."""

    code = "invalid_edit"


class TemplateUnsupported(FreetokenError):
    """The chat template cannot express this, or cannot be learned. Nothing was changed."""

    code = "template_unsupported"


class ArgumentUnwritable(TemplateUnsupported):
    """An argument holds the literal that ends a value in the model's format of calls, which knows
    no escapes. Nothing was changed."""

    code = "argument_unwritable"


class UnknownCallFormat(FreetokenError):
    """There is no call format of this name; the message lists those that there are."""

    code = "unknown_call_format"


class UnsupportedContent(FreetokenError):
    """A content part that is not text."""

    code = "unsupported_content"


class TokenizerUnsupported(FreetokenError):
    """The tokenizer cannot be used: foreign files, or contents that could form control tokens."""

    code = "tokenizer_unsupported"


class InvalidMessages(FreetokenError):
    """A message list that its own format does not allow."""

    code = "invalid_messages"


class InvalidTool(FreetokenError):
    """A function that cannot be a tool; raised where it is made one."""

    code = "invalid_tool"


class ToolNameTaken(InvalidTool):
    """Two tools of one agent have the same name."""

    code = "tool_name_taken"


class InvalidOutputType(FreetokenError):
    """A type that JSON cannot hold, or that cannot be validated."""

    code = "invalid_output_type"


class ModelRetry(FreetokenError):
    """Raise it in a tool: the model sees the text as an error and is asked to call again, at most
    `retries` times in a row."""

    code = "model_retry"


class ToolFailed(FreetokenError):
    """Raise it in a tool: the model sees the text as the call's result, marked as an error."""

    code = "tool_failed"


class MCPMissing(FreetokenError):
    """MCP needs the package mcp, which is an extra."""

    code = "mcp_missing"


class MCPServerFailed(FreetokenError):
    """An MCP server could not be started, reached, or asked for its tools."""

    code = "mcp_server_failed"


class GenerationConflict(SessionConflict):
    """Another handle moved the branch during a generation, which was saved on `branch`."""

    def __init__(self, what: str, *, branch: str) -> None:
        super().__init__(what, value=branch, remedy="reload() this handle, or open that branch")
        self.branch = branch


class InvalidAgent(FreetokenError):
    """Fields of an agent that are none, or do not go together."""

    code = "invalid_agent"


class InvalidRule(FreetokenError):
    """Fields of a context rule that are none, or do not go together."""

    code = "invalid_rule"


class RunError(FreetokenError):
    """A run ended without an answer. `result` is what there is until then; the session keeps it."""

    code = "run_error"

    def __init__(
        self, what: str, *, result: "Result[Any]", value: object = None, limit: object = None
    ) -> None:
        super().__init__(what, value=value, limit=limit, remedy="look at .result, and run again")
        self.result = result


class RunLimit(RunError):
    """A run reached one of its limits."""

    code = "run_limit"


class InvalidOutput(RunError):
    """The model's answers are not of the output type, and no attempt is left."""

    code = "invalid_output"


class RunUnfinished(FreetokenError):
    """The result of a run was asked for before its end."""

    code = "run_unfinished"


class InvalidDecision(FreetokenError):
    """A decision that is none, is about no call of the session, or denies one that has run. Nothing
    was run."""

    code = "invalid_decision"


class PromptDiffers(FreetokenError):
    """The session's system text or tools are not the agent's, which must not replace them."""

    code = "prompt_differs"
