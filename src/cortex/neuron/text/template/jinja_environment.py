"""The environment that chat templates are rendered in, as that of the reference library: an immutable sandbox with
trimmed blocks, loop controls, `raise_exception`, `strftime_now`, a `tojson` without HTML escapes, and an ignored
`generation` tag.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

SyntaxProblem = jinja2.TemplateSyntaxError

# Expressions of a template can raise these besides Jinja's own errors, for example `none + 'text'`.
FAILURES: Final = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


def variables_of(source: str) -> frozenset[str]:
    """The variables that a template reads; empty for one that does not parse."""
    try:
        return frozenset(jinja2.meta.find_undeclared_variables(ENVIRONMENT.parse(source)))
    except jinja2.TemplateError:
        return frozenset()


def literals_of(source: str) -> frozenset[str]:
    """The strings in its expressions; empty for a template that does not parse."""
    try:
        constants = ENVIRONMENT.parse(source).find_all(jinja2.nodes.Const)
        return frozenset(constant.value for constant in constants if isinstance(constant.value, str))
    except jinja2.TemplateError:
        return frozenset()


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


ENVIRONMENT: Final = _environment()
