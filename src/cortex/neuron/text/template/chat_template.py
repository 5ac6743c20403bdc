"""A model's own chat template, rendered as the reference library renders it.

If a template fails, that is an error with the template's own reason. There is no fallback: a prompt in the wrong shape
would silently break the model. Jinja is imported on first use: the daemon never uses it, and may not have it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from cortex.wire.errors import TemplateRenderFailed, shorten

if TYPE_CHECKING:
    import jinja2

CHATML: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""The template for models without one."""

_READS_CALLS: Final = re.compile(r"(?<![<|｜\w])tool_calls(?![\w>|])")
"""The field, not a marker of that name."""


class ChatTemplate:
    """One template, compiled on first use. Immutable and safe to share between threads.

    Jinja computes the constants of a template while it compiles and even analyses it, for as long as that takes. The
    daemon therefore does neither: it gets these facts from processes with limits.
    """

    def __init__(self, source: str, *, takes_tools: bool | None = None) -> None:
        """`takes_tools`: as another process determined it."""
        self.source = source
        self._takes_tools = takes_tools

    def render(self, variables: Mapping[str, Any]) -> str:
        """The prompt; raises TemplateRenderFailed with the template's own reason."""
        from cortex.neuron.text.template import jinja_environment as jinja

        try:
            return self._compiled.render(**variables)
        except jinja.SyntaxProblem as error:
            raise TemplateRenderFailed(
                f"the model's chat template is not valid, in line {error.lineno}: {shorten(error.message or '')}; "
                "the file of the model that has it must be corrected"
            ) from error
        except jinja.FAILURES as error:
            reason = str(error) or type(error).__name__
            raise TemplateRenderFailed(
                f"the model's chat template rejected this conversation: {shorten(reason)}; "
                "check the order of roles, the tool calls and the chat_template_kwargs"
            ) from error

    @cached_property
    def variables(self) -> frozenset[str]:
        """The variables that the template reads; empty if it does not parse."""
        from cortex.neuron.text.template.jinja_environment import variables_of

        return variables_of(self.source)

    @property
    def takes_tools(self) -> bool:
        """Whether it has a place for the descriptions of tools."""
        return "tools" in self.variables if self._takes_tools is None else self._takes_tools

    @cached_property
    def literals(self) -> frozenset[str]:
        """The strings in its expressions, such as words that it looks for; none for a template that does not parse."""
        from cortex.neuron.text.template.jinja_environment import literals_of

        return literals_of(self.source)

    def mentions(self, word: str) -> bool:
        """Whether the template's source contains `word`: a field that it reads or a marker that it writes."""
        return word in self.source

    @cached_property
    def shows_calls(self) -> bool:
        """Whether it reads the tool calls of earlier turns."""
        return _READS_CALLS.search(self.source) is not None

    @cached_property
    def _compiled(self) -> jinja2.Template:
        from cortex.neuron.text.template.jinja_environment import ENVIRONMENT

        return ENVIRONMENT.from_string(self.source)
