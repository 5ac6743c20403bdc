"""The fleet of most tests: two nodes behind an open gateway, and one that is down."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cortex.wire.node.protocol import ModelLoad, ModelState

from ..gateway.fake_neuron import GB, opened_gate
from .stage import REPLY, DirectedNode, Stage

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

EVIL = "<img src=x onerror=window.hacked=1>"
"""A model may have any name, and any text in its responses."""


class SmallFleet(NamedTuple):
    node: DirectedNode
    """The node of most tests."""
    wide: DirectedNode
    """A node with one model over both of its devices, which the catalogue pins, and no room for sleeping models."""

    @classmethod
    def opened(cls, stage: Stage) -> SmallFleet:
        wide = DirectedNode("wide", sizes={"wide-model": 20 * GB}, kv={"wide-model": 4 * GB}, total_bytes=12 * GB)
        wide.device_names, wide.places, wide.can_sleep = ("GPU", "GPU"), {"wide-model": (0, 1)}, False
        wide.states["wide-model"] = ModelState.READY
        stage.add(wide)
        sizes = {"small": 2 * GB, "large": 20 * GB, "cold": 4 * GB, f"org/{EVIL}": GB}
        node = stage.add(DirectedNode("beast", sizes=sizes, kv={"small": GB}, foreign_bytes=GB))
        node.states["small"] = ModelState.READY
        node.states[f"org/{EVIL}"] = ModelState.FAILED
        node.reasons[f"org/{EVIL}"] = EVIL
        gone = stage.add(DirectedNode("cellar"))
        stage.open_gateway(models='[[models]]\nid = "small"\n[[models]]\nid = "wide-model"\npinned_on = ["wide"]')
        stage.call(gone.stop())
        return cls(node, wide)

    def as_before(self) -> SmallFleet:
        """The node as every test finds it."""
        node = self.node
        node.script, node.load_gate = list(REPLY), opened_gate()
        node.progress.clear()
        node.capabilities.clear()
        for model in ("large", "cold"):
            node.states.pop(model, None)
        node.states["small"] = ModelState.READY
        node.loads["small"] = ModelLoad(running=2, tokens_per_s=40.0)
        return self


def card(page: Page, name: str) -> Locator:
    return page.locator(f"article[aria-label='Node {name}']")
