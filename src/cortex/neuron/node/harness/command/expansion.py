"""The command of a server with its variables replaced. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cortex.neuron.servers.entry import HarnessEntry
from cortex.wire.errors import LoadFailed

_VARIABLE = re.compile(r"\$\{([^}]*)\}")


def expanded_texts(entry: HarnessEntry, rank: int | None, *, has_context: bool = True) -> tuple[str, ...]:
    """Where the variables of a server are replaced. `rank`: of a member of a group."""
    ends = (text for name in ("cmd_stop", "cmd_kill", "cmd_pid") for text in entry.commands[name])
    return (*entry.argv(has_gpus=True, has_context=has_context, rank=rank), *ends, *entry.env.values())


def uses(entry: HarnessEntry, variable: str, rank: int | None) -> bool:
    """Whether the server's command or environment has `${variable}`."""
    return any(f"${{{variable}}}" in text for text in expanded_texts(entry, rank))


@dataclass(frozen=True, slots=True)
class Expansion:
    """Replaces the variables of one load. A value is never divided into several arguments, and not replaced again."""

    values: Mapping[str, str | None]
    """None: it is not known for this model."""
    env: Mapping[str, str]
    harness: str
    """For messages."""

    def command(self, command: Sequence[str]) -> list[str]:
        """Raises LoadFailed for a variable that does not exist, or has no value for this model."""
        return [self.text(argument) for argument in command]

    def text(self, text: str) -> str:
        """Raises LoadFailed."""
        return _VARIABLE.sub(lambda found: self._value(found[1]), text)

    def _value(self, name: str) -> str:
        if name.startswith("env."):
            variable = name.removeprefix("env.")
            if variable not in self.env:
                raise LoadFailed(
                    f"the harness {self.harness} needs the environment variable {variable}, which the node does not "
                    "have; set it where the node is started"
                )
            return self.env[variable]
        if name not in self.values:
            known = ", ".join(f"${{{each}}}" for each in (*self.values, "env.NAME"))
            raise LoadFailed(f"the harness {self.harness} uses ${{{name}}}, which does not exist; there are {known}")
        if (value := self.values[name]) is None:
            setting = "context_tokens" if name == "CONTEXT" else "nodes"
            raise LoadFailed(f"the harness {self.harness} needs ${{{name}}}; set `{setting}` of the model")
        return value
