"""How a router's scores become the experts and weights of a token. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RouterRule:
    """What differs between families, besides the number of experts of a token."""

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """What turns a score into a weight: the softmax over all experts, or the sigmoid of the score alone."""
    scale: float = 1.0
    """A factor of the weights of routed experts."""
    groups: int = 1
    """Groups of equally many experts, of which a token uses the best `kept_groups`. A group is as good as its best
    expert or, where the choice has a bias, as its two best together."""
    kept_groups: int = 1
    gates_shared: bool = True
    """Whether shared experts are weighted by the sigmoid of a score of their own; otherwise by one."""


DEFAULT_RULE = RouterRule()
