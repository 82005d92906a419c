# SPDX-License-Identifier: Apache-2.0
"""The formats of calls that can be chosen by name: how families of models write them.

A template that shows calls says how; these are for models whose template drops calls, or that were
trained to write others than it shows. `likely` picks one by what template and tokenizer hold.
"""

from collections.abc import Mapping

from ..errors import UnknownCallFormat
from ..tokenizers.tokenizer import Tokenizer
from .call_spelling import (
    CallSpelling,
    JsonArguments,
    PythonArguments,
    TaggedArguments,
    ValueType,
    parts,
)

_TYPES: tuple[ValueType, ...] = ("string", "integer", "boolean", "null", "array", "object")
_JSON_UNIT = '{"name": "«NAME»", "arguments": «ARGUMENTS»}'


def _tags(open: str, middle: str, close: str, between: str = "\n") -> TaggedArguments:
    return TaggedArguments(open, close, between, dict.fromkeys(_TYPES, middle))


HERMES = CallSpelling(
    "hermes",
    parts(f"<tool_call>\n{_JSON_UNIT}\n</tool_call>"),
    JsonArguments(),
    tool_role=False,
)

_FORMATS = (
    HERMES,
    CallSpelling(
        "qwen3_coder",
        parts("<tool_call>\n<function=«NAME»>\n«ARGUMENTS»\n</function>\n</tool_call>"),
        _tags("<parameter=", ">\n", "\n</parameter>"),
        bare=parts("<tool_call>\n<function=«NAME»>\n</function>\n</tool_call>"),
        after_text="\n\n",
        constants="python",
        signs=("<function=example_function_name>",),
    ),
    CallSpelling(
        "llama3",
        parts('{"name": "«NAME»", "parameters": «ARGUMENTS»}'),
        JsonArguments(),
        between=None,
        signs=("<|python_tag|>",),
    ),
    CallSpelling(
        "mistral_v11",
        parts("[TOOL_CALLS]«NAME»[CALL_ID]«ID»[ARGS]«ARGUMENTS»"),
        JsonArguments(),
        between="",
        after_text="",
        signs=("[CALL_ID]",),
    ),
    CallSpelling(
        "mistral_v13",
        parts("[TOOL_CALLS]«NAME»[ARGS]«ARGUMENTS»"),
        JsonArguments(),
        between="",
        after_text="",
        signs=("[ARGS]",),
    ),
    CallSpelling(
        "mistral_v3",
        parts('{"name": "«NAME»", "arguments": «ARGUMENTS», "id": "«ID»"}'),
        JsonArguments(),
        begin="[TOOL_CALLS][",
        between=", ",
        end="]",
        after_text="",
        signs=("[TOOL_CALLS]",),
    ),
    CallSpelling(
        "deepseek_v3",
        parts(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>«NAME»\n```json\n«ARGUMENTS»\n```"
            "<｜tool▁call▁end｜>"
        ),
        JsonArguments(),
        begin="<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
        after_text="",
        signs=("function<｜tool▁sep｜>",),
    ),
    CallSpelling(
        "deepseek_v31",
        parts("<｜tool▁call▁begin｜>«NAME»<｜tool▁sep｜>«ARGUMENTS»<｜tool▁call▁end｜>"),
        JsonArguments(),
        begin="<｜tool▁calls▁begin｜>",
        between="",
        end="<｜tool▁calls▁end｜>",
        after_text="",
        signs=("<｜tool▁calls▁begin｜>",),
    ),
    CallSpelling(
        "glm",
        parts("<tool_call>«NAME»\n«ARGUMENTS»\n</tool_call>"),
        _tags("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>"),
        bare=parts("<tool_call>«NAME»\n</tool_call>"),
        signs=("<arg_key>",),
    ),
    CallSpelling(
        "kimi",
        parts(
            "<|tool_call_begin|>functions.«NAME»:«INDEX»<|tool_call_argument_begin|>«ARGUMENTS»"
            "<|tool_call_end|>"
        ),
        JsonArguments(),
        begin="<|tool_calls_section_begin|>",
        between="",
        end="<|tool_calls_section_end|>",
        after_text="",
        signs=("<|tool_calls_section_begin|>",),
    ),
    CallSpelling(
        "minimax_m1",
        parts(_JSON_UNIT),
        JsonArguments(),
        begin="<tool_calls>\n",
        end="\n</tool_calls>",
        signs=("<tool_calls>",),
    ),
    CallSpelling(
        "minimax_m2",
        parts('<invoke name="«NAME»">\n«ARGUMENTS»\n</invoke>'),
        _tags('<parameter name="', '">', "</parameter>"),
        bare=parts('<invoke name="«NAME»">\n</invoke>'),
        begin="<minimax:tool_call>\n",
        end="\n</minimax:tool_call>",
        signs=("<minimax:tool_call>",),
    ),
    CallSpelling(
        "harmony",
        parts("to=functions.«NAME»<|channel|>commentary json<|message|>«ARGUMENTS»<|call|>"),
        JsonArguments(),
        begin=" ",
        between=None,
        after_text="<|end|><|start|>assistant",
        signs=("<|channel|>",),
    ),
    CallSpelling(
        "lfm2",
        parts("«NAME»(«ARGUMENTS»)"),
        PythonArguments(),
        begin="<|tool_call_start|>[",
        between=", ",
        end="]<|tool_call_end|>",
        after_text="",
        signs=("<|tool_call_start|>", "<|tool_list_start|>"),
    ),
    CallSpelling(
        "granite",
        parts(_JSON_UNIT),
        JsonArguments(),
        begin="<|tool_call|>[",
        between=", ",
        end="]",
        after_text="",
        signs=("<|tool_call|>",),
    ),
)

FORMATS: Mapping[str, CallSpelling] = {one.name: one for one in _FORMATS}


def named(name: str) -> CallSpelling:
    """A format by its name. UnknownCallFormat."""
    found = FORMATS.get(name)
    if found is None:
        raise UnknownCallFormat(
            "there is no call format of this name",
            value=name,
            limit=", ".join(FORMATS),
            remedy="choose one of these, or none, to write calls as the chat template does",
        )
    return found


def likely(template_source: str, tokenizer: Tokenizer) -> CallSpelling:
    """The format of a model whose template drops calls: the first with a sign in the template, else
    with one among the tokenizer's control tokens; Hermes if there is none."""
    formats = list(FORMATS.values())
    for one in formats:
        if any(sign in template_source for sign in one.signs):
            return one
    for one in formats:
        if any(_is_control(tokenizer, sign) for sign in one.signs):
            return one
    return HERMES


def _is_control(tokenizer: Tokenizer, literal: str) -> bool:
    pieces = tokenizer.split_frame(literal)
    return len(pieces) == 1 and isinstance(pieces[0], int)
