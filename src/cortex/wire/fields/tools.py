"""Tools and the choice among them, as every dialect reads them."""

from __future__ import annotations

from dataclasses import dataclass, field

from cortex.wire.errors import shorten
from cortex.wire.fields.body import Fields, json_text
from cortex.wire.fields.custom_tools import has_grammar, read_custom_tool
from cortex.wire.requests import Tool, ToolChoice

MAX_TOOLS = 4096
"""Far more than any model can choose from."""


@dataclass(slots=True)
class ToolList:
    """The tools of a request while they are read."""

    tools: list[Tool] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    """Types of tools that run on the vendor's servers, which no model here can use."""
    unenforced: list[str] = field(default_factory=list)
    """Paths of grammars that are not enforced on calls."""

    @property
    def names(self) -> set[str]:
        return {tool.name for tool in self.tools}

    def add(self, tool: Fields, kind: str) -> None:
        """Reads a tool of an OpenAI dialect, whose definition may be nested under its type."""
        definition = tool.object(kind) or tool if kind in ("function", "custom") else tool
        match kind:
            case "function":
                self.tools.append(read_function(definition))
            case "custom":
                self.tools.append(read_custom_tool(definition))
                if has_grammar(definition):
                    self.unenforced.append(definition.param("format"))
            case _:
                self.dropped.append(kind)

    def resolve(
        self,
        fields: Fields,
        mode: str,
        name: str | None,
        *,
        parallel: bool,
        choice: str = "tool_choice",
        listed: str = "tools",
    ) -> ToolChoice:
        """The choice. Raises `InvalidValue` for too many tools, for a tool that the request does not have or that
        cannot run here, and for a request that has only such tools: its response would pretend that they had run.
        `choice`, `listed`: the fields in which the client names its choice and lists its tools."""
        if len(self.tools) > MAX_TOOLS:
            raise fields.invalid(listed, f"it has {len(self.tools)} tools, at most {MAX_TOOLS} are allowed; send fewer")
        kinds = ", ".join(dict.fromkeys(map(shorten, self.dropped)))
        not_run = f"tools of type {kinds} do not run here" if kinds else ""
        match mode:
            case "none":
                return ToolChoice(mode="none", parallel=parallel)
            case "auto":
                if not_run and not self.tools:
                    raise fields.invalid(listed, f"{not_run}; remove them, or add functions that the client runs")
                return ToolChoice(parallel=parallel)
            case "required" | "any":
                if self.tools:
                    return ToolChoice(mode="required", parallel=parallel)
                problem = "it requires a tool call, but " + (not_run or f"'{listed}' is empty")
            case "named":
                if name in self.names:
                    return ToolChoice(mode="named", name=name, parallel=False)  # exactly one call of it
                problem = f"no tool named '{shorten(name or '')}' is in '{listed}'" + (
                    f"; {not_run}" if not_run else ""
                )
            case other:
                problem = f"'{shorten(other)}' is not known; use auto, none, required or name a function"
        raise fields.invalid(choice, problem)

    def restrict(self, choice: ToolChoice, allowed: Fields) -> ToolChoice:
        """`choice` restricted to the tools that `allowed` lists under `tools`; without a list, not restricted.

        Listed tools of types that do not run here are dropped, as they are in the request's own list.
        """
        if "tools" not in allowed or choice.mode == "none":
            return choice
        known = self.names
        names: list[str] = []
        for entry in allowed.objects("tools"):
            kind = entry.text("type") or "function"
            if kind in ("function", "custom"):
                name = (entry.object(kind) or entry).required_text("name")
                if name not in known:
                    raise entry.invalid("name", f"no tool named '{shorten(name)}' is in 'tools'")
                names.append(name)
            elif kind == "namespace":
                group = entry.required_text("name")
                names += [tool.name for tool in self.tools if tool.namespace == group]
            else:
                names += [tool.name for tool in self.tools if tool.shape == kind]
        if not names:
            return ToolChoice(mode="none", parallel=choice.parallel)
        return ToolChoice(mode=choice.mode, parallel=choice.parallel, allowed=tuple(dict.fromkeys(names)))


def read_function(fields: Fields) -> Tool:
    """The definition of a function: name, description, parameters, strict."""
    return Tool(
        name=fields.required_text("name"),
        parameters=fields.mapping("parameters") or {},
        description=fields.text("description"),
        strict=fields.flag("strict") or False,
    )


def read_arguments(fields: Fields, name: str) -> str:
    """The arguments of a call as JSON text, whether the client sent text or an object. Raises InvalidValue."""
    value = fields.raw(name)
    if value is None or value == "":
        return "{}"
    if not isinstance(value, (str, dict)):
        raise fields.invalid(name, "expected JSON as a string, or an object")
    return value if isinstance(value, str) else json_text(value)
