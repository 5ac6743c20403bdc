"""The syntaxes of tool calls by their upper-case names: `S.HERMES_JSON`."""

from __future__ import annotations

from types import SimpleNamespace

from cortex.neuron.families.registry import SYNTAXES

S = SimpleNamespace(**{name.upper(): syntax for name, syntax in SYNTAXES.items()})
