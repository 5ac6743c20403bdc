"""How models write tool calls: the shapes of a syntax, and the syntaxes that belong to no family.

A family with a syntax of its own has it in its descriptor. `text/tools/` reads and writes each kind.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final, Literal

_NAME: Final = r"(?P<name>[^\s\[\]{}<>|()]+?)"


@dataclass(frozen=True, slots=True)
class CallFrame:
    """The markers around a call, and the layout between them and the call."""

    opening: str
    before: str
    after: str
    closing: str
    """Empty if the end of the call suffices."""
    is_control: bool = False
    """Whether the markers are control tokens, which are never text."""
    section: tuple[str, ...] = ()
    """The markers before the first call of a turn and after the last."""

    @property
    def openings(self) -> tuple[str, ...]:
        """What begins a call: its own marker, or that of all calls."""
        return (self.opening, *self.section[:1])

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.opening, *((self.closing,) if self.closing else ()), *self.section)


@dataclass(frozen=True, slots=True)
class TagForm:
    """How a function and its parameters are written between tags. Names may be quoted."""

    frame: CallFrame
    function_open: str
    """Empty if the name follows the frame's opening."""
    function_name_close: str
    function_close: str
    """The frame's closing marker if there is no other."""
    parameter_open: str
    parameter_name_close: tuple[str, ...]
    """What follows the name of a parameter, up to its value; white space may be between."""
    parameter_close: str
    quote: str = ""
    """The text that the model was trained to write around names."""
    value_break: str = ""
    """A line break next to the value that is layout."""
    token: str = ""
    """A control token in the markers."""
    says_type: bool = False
    """Whether an attribute of each parameter says if its value is text: ` string="true"`, or JSON."""

    @property
    def closing(self) -> str:
        """What may follow the end of the function."""
        return "" if self.function_close == self.frame.closing else self.frame.closing


@dataclass(frozen=True, slots=True)
class NamedForm:
    """The text between the opening of a call and its JSON arguments."""

    head: re.Pattern[str]
    """A pattern of everything that may precede the arguments, with the group `name`."""
    before: tuple[str, ...] = ()
    """What the model was trained to write before the name, and after it."""
    between: tuple[str, ...] = ()
    separators: tuple[str, ...] = ()
    """The markers in `head`."""


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """One syntax of tool calls."""

    name: str
    kind: Literal["json", "plain", "python_tag", "tags", "named", "python", "unquoted", "harmony"] = "json"
    """`json`: objects between markers, alone or in a list. `plain`: bare objects. `python_tag`: those, and behind a
    marker. `tags`: see `TagForm`. `named`: see `NamedForm`. `python`: `f(a=1)`. `unquoted`: `call:f{a:1}`."""
    markers: tuple[tuple[str, ...], ...] = ()
    """A chat template that contains all of one group means this syntax."""
    precedence: int = 0
    """Among the syntaxes whose markers a template contains, the lowest decides, and then the one with the most
    markers."""
    frame: CallFrame | None = None
    tags: TagForm | None = None
    named: NamedForm | None = None
    """Syntaxes of the kind `json` may have one: models sometimes write a name before the object."""
    keys: tuple[str, str] = ("name", "arguments")
    """The keys of a JSON call's name and arguments."""

    def __str__(self) -> str:
        return self.name


def framed_json(name: str, opening: str, closing: str, *, is_control: bool = False, precedence: int = 0) -> ToolSyntax:
    """A list of JSON calls between markers."""
    frame = CallFrame(opening, "[", "]", closing, is_control)
    return ToolSyntax(name, markers=((opening,),), precedence=precedence, frame=frame)


def tagged(name: str, *markers: str, form: TagForm) -> ToolSyntax:
    return ToolSyntax(name, "tags", (markers,), frame=form.frame, tags=form)


def named_form(
    pattern: str, *, before: tuple[str, ...] = (), between: tuple[str, ...] = (), also: str = ""
) -> NamedForm:
    """`pattern` has `NAME` for the name, and white space that may be anywhere. `also`: a marker that may be in it."""
    head = re.compile(r"\s*" + pattern.replace(" ", r"\s*").replace("NAME", _NAME) + r"\s*")
    markers = tuple(part for part in (*before, *between) if part.startswith(("<", "[")))
    return NamedForm(head, before, between, (*markers, *filter(None, (also,))))


def _dsml(name: str, section: str, *markers: str) -> ToolSyntax:
    """As DeepSeek V3.2 and V4 write it."""
    form = TagForm(
        CallFrame(f"<｜DSML｜{section}>", "\n", "\n", f"</｜DSML｜{section}>"),
        *("<｜DSML｜invoke name=", ">", "</｜DSML｜invoke>"),
        *("<｜DSML｜parameter name=", (">",), "</｜DSML｜parameter>"),
        quote='"',
        token="｜DSML｜",
        says_type=True,
    )
    return tagged(name, "｜DSML｜", *markers, form=form)


PYTHON_TAG: Final = "<|python_tag|>"
TOOL_CALL: Final = CallFrame("<tool_call>", "\n", "\n", "</tool_call>")

HARMONY: Final = ToolSyntax("harmony", "harmony", (("<|channel|>", "<|message|>"),), precedence=-1)
HERMES_JSON: Final = ToolSyntax("hermes_json", markers=((TOOL_CALL.opening,),), precedence=2, frame=TOOL_CALL)
PLAIN_JSON: Final = ToolSyntax("plain_json", "plain")
NAME_LINE: Final = ToolSyntax(
    "name_line", "named", (("<|observation|>", "metadata"),), precedence=4, named=named_form("NAME", between=("\n",))
)
_GIGACHAT: Final = replace(
    framed_json("gigachat_json", "<|function_call|>", "", precedence=3),
    frame=CallFrame("<|function_call|>", "", "", "", is_control=True),
)
_SOLAR: Final = ToolSyntax(
    "solar",
    "named",
    (("<|tool_call:args|>",),),
    frame=CallFrame(
        *("<|tool_call:begin|>", "", "", "<|tool_call:end|>"), is_control=True, section=("<|tool_calls|>", "<|calls|>")
    ),
    named=named_form(
        r"(?:<\|tool_call:begin\|>)? (?:[\w-]+ <\|tool_call:name\|>)? NAME (?:<\|tool_call:args\|>)?",
        before=("0", "<|tool_call:name|>"),
        between=("<|tool_call:args|>",),
    ),
)
OTHERS: Final = (
    *(HARMONY, HERMES_JSON, PLAIN_JSON, NAME_LINE, _GIGACHAT, _SOLAR),
    *(_dsml("dsml", "function_calls", "function_calls>"), _dsml("dsml_calls", "tool_calls")),
)
