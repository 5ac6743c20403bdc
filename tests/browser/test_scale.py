"""A large fleet: 50 nodes that list 100 models each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cortex.wire.node.protocol import ModelLoad, ModelState

from ..gateway.fake_neuron import GB
from .stage import DirectedNode, Stage

if TYPE_CHECKING:
    from playwright.sync_api import Page


NUM_NODES = 50
NUM_MODELS = 100
MAX_ELEMENTS = 12_000


@pytest.fixture(scope="module")
def lively(stage: Stage) -> DirectedNode:
    """One node that a test changes; the other 49 are one process under 49 names."""
    models = {f"org/model-{number:03d}": GB for number in range(NUM_MODELS)}
    shared = DirectedNode("unused", sizes=models)
    shared.states = dict.fromkeys(list(models)[:3], ModelState.READY)
    stage.call(shared.start())
    started = stage.add(DirectedNode("lively", sizes=models))
    others = [f'[[neurons]]\nname = "node-{n:02d}"\nendpoint = "{shared.endpoint}"' for n in range(1, NUM_NODES)]
    stage.open_gateway(extra_nodes="\n".join(others), poll_interval_s=10.0)  # a busy machine misses no poll
    return started


def test_change_of_one_node_redraws_one_card_of_fifty(page: Page, lively: DirectedNode) -> None:
    page.goto("#/fleet")
    cards = page.locator("article.node")
    cards.nth(NUM_NODES - 1).wait_for()
    assert page.evaluate("document.querySelectorAll('*').length") < MAX_ELEMENTS
    page.evaluate("""() => {
        window.redrawn = new Set();
        new MutationObserver((changes) => changes.forEach(({ target }) => {
            const card = (target.closest ? target : target.parentElement)?.closest("article.node");
            if (card) window.redrawn.add(card.getAttribute("aria-label"));
        })).observe(document.body, { subtree: true, childList: true, attributes: true, characterData: true });
    }""")
    lively.states["org/model-007"] = ModelState.READY
    lively.loads["org/model-007"] = ModelLoad(running=3)
    page.get_by_label("Node lively").get_by_text("3 in flight").wait_for()
    redrawn = page.evaluate("[...window.redrawn]")
    assert "Node lively" in redrawn
    assert len(redrawn) < NUM_NODES // 2, "a poll that is missed redraws a card, too; not so many"
    page.get_by_label("Filter nodes and models").fill("lively")
    cards.nth(1).wait_for(state="detached")


def test_every_model_is_listed_once(page: Page, lively: DirectedNode) -> None:
    page.goto("#/models")
    rows = page.locator(".catalogue > li")
    rows.nth(NUM_MODELS - 1).wait_for(timeout=120_000)
    assert rows.count() == NUM_MODELS
    page.get_by_label("Filter models").fill("model-09")
    rows.nth(10).wait_for(state="detached")
    assert rows.count() == 10
    page.get_by_text("fits on 50 nodes").first.wait_for()
