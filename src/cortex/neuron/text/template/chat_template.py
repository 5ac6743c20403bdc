"""A model's own chat template, rendered as the reference library renders it.

The environment is that of the reference: an immutable sandbox with trimmed blocks, loop controls, `raise_exception`,
`strftime_now`, a `tojson` without HTML escapes, and an ignored `generation` tag. If a template fails, that is an error
with the template's own reason. There is no fallback: a prompt in the wrong shape would silently break the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from functools import cached_property
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

from cortex.wire.errors import TemplateRenderFailed, shorten

CHATML: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""The template of models that have none."""

_READS_CALLS: Final = re.compile(r"(?<![<|｜\w])tool_calls(?![\w>|])")
"""The field, not a marker of that name."""

# Expressions of a template can raise these besides Jinja's own errors, for example `none + 'text'`.
_FAILURES: Final = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class ChatTemplate:
    """One template, compiled on first use. Immutable and safe to share between threads.

    Jinja computes the constants of a template while it compiles and even analyses it, for as long as that takes. The
    daemon therefore does neither: it gets what it has to know from processes with limits.
    """

    def __init__(self, source: str, *, takes_tools: bool | None = None) -> None:
        """`takes_tools`: as another process has found it."""
        self.source = source
        self._takes_tools = takes_tools

    def render(self, variables: Mapping[str, Any]) -> str:
        """The prompt; raises TemplateRenderFailed with the template's own reason."""
        try:
            return self._compiled.render(**variables)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateRenderFailed(
                f"the model's chat template is not valid, in line {error.lineno}: {shorten(error.message or '')}; "
                "the file of the model that has it must be corrected"
            ) from error
        except _FAILURES as error:
            reason = str(error) or type(error).__name__
            raise TemplateRenderFailed(
                f"the model's chat template rejected this conversation: {shorten(reason)}; "
                "check the order of roles, the tool calls and the chat_template_kwargs"
            ) from error

    @cached_property
    def variables(self) -> frozenset[str]:
        """The variables that it reads; empty for a template that does not parse."""
        try:
            return frozenset(jinja2.meta.find_undeclared_variables(_ENVIRONMENT.parse(self.source)))
        except jinja2.TemplateError:
            return frozenset()

    @property
    def takes_tools(self) -> bool:
        """Whether it has a place for the descriptions of tools."""
        return "tools" in self.variables if self._takes_tools is None else self._takes_tools

    @cached_property
    def literals(self) -> frozenset[str]:
        """The strings in its expressions, such as words that it looks for; none for a template that does not parse."""
        try:
            constants = _ENVIRONMENT.parse(self.source).find_all(jinja2.nodes.Const)
            return frozenset(constant.value for constant in constants if isinstance(constant.value, str))
        except jinja2.TemplateError:
            return frozenset()

    def mentions(self, word: str) -> bool:
        """Whether the template's source contains `word`: a field that it reads or a marker that it writes."""
        return word in self.source

    @cached_property
    def shows_calls(self) -> bool:
        """Whether it reads the tool calls of earlier turns."""
        return _READS_CALLS.search(self.source) is not None

    @cached_property
    def _compiled(self) -> jinja2.Template:
        return _ENVIRONMENT.from_string(self.source)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it as a set

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: jinja2.runtime.Macro) -> str:
        return str(caller())


class _Namespace(jinja2.utils.Namespace):
    """`namespace()` without private names, so that a template cannot reach into the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # No parameter `self`: a template may have a namespace variable of that name.
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _reject_private(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _reject_private(name)
        super().__setitem__(name, value)


class _Dict:
    """`dict(...)` without the attributes of the real type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _reject_private(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a chat template may not store {name!r} in a namespace; rename it")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


_ENVIRONMENT: Final = _environment()
