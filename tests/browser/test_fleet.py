"""The views of nodes and models in a real browser, over a gateway whose nodes the test directs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import pytest

from cortex.wire.node.protocol import HostHealth, ModelLoad, ModelState, ModelStatus, Progress

from ..gateway.fake_neuron import GB
from .chromium import wait_until
from .small_fleet import SmallFleet, card
from .stage import DirectedNode, Stage

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.usefixtures("node")


@pytest.fixture
def wide(opened: SmallFleet) -> DirectedNode:
    return opened.wide


def test_fleet_shows_nodes_devices_and_models(page: Page) -> None:
    page.goto("#/fleet")
    beast = card(page, "beast")
    beast.get_by_text("2 in flight").wait_for()
    assert "small weights 1.0 GiB, small KV cache 1.0 GiB" in str(beast.locator(".bar").get_attribute("aria-label"))
    assert "51 °C" in beast.inner_text()
    beast.locator(".sparkline").wait_for()
    card(page, "cellar").get_by_text("down", exact=True).wait_for()
    page.get_by_text("2 up, 1 down").wait_for()


def test_host_memory_has_a_bar_with_what_models_have_there(page: Page, node: DirectedNode) -> None:
    node.host = HostHealth(
        total_bytes=100 * GB,
        free_bytes=40 * GB,
        budget_bytes=80 * GB,
        weight_bytes=30 * GB,
        kv_bytes=2 * GB,
        locked_bytes=32 * GB,
        locked_limit_bytes=75 * GB,
        shortage="the host has 1.0 GiB of memory left",
    )
    node.host_bytes["small"] = 30 * GB
    try:
        page.goto("#/fleet")
        beast = card(page, "beast")
        beast.get_by_label("Host memory: small weights 30.0 GiB, KV pages 2.0 GiB").wait_for()
        beast.get_by_text("32.0 GiB / 80.0 GiB").wait_for()
        beast.get_by_text("32.0 GiB page-locked").wait_for()
        beast.get_by_text("2.0 GiB + 30.0 GiB").wait_for()
        beast.get_by_text("the host has 1.0 GiB of memory left").wait_for()
    finally:
        node.host = None
        node.host_bytes.clear()


def test_cold_model_shows_why_its_last_load_failed(page: Page, node: DirectedNode) -> None:
    node.reasons["cold"] = "cold: the disk is broken"
    try:
        page.goto("#/fleet")
        card(page, "beast").get_by_text("cold: the disk is broken", exact=True).wait_for()
        page.goto("#/models")
        page.get_by_text("last load failed").wait_for()
        page.get_by_role("button", name="cold", exact=True).click()
        page.get_by_text("beast: the disk is broken", exact=True).wait_for()
    finally:
        del node.reasons["cold"]


def test_model_over_two_devices_is_on_both_bars(page: Page, wide: DirectedNode) -> None:
    page.goto("#/fleet")
    two = card(page, "wide")
    two.get_by_text("2 × 10.0 GiB").wait_for()
    labels = [bar.get_attribute("aria-label") for bar in two.locator(".bar").all()]
    part = "wide-model weights (1/2 of it) 8.0 GiB, wide-model KV cache (1/2 of it) 2.0 GiB"
    assert [part in str(label) for label in labels] == [True, True]
    assert two.get_by_role("listitem").filter(has_text="wide-model").count() == 1


def test_unequal_parts_of_a_model_have_their_own_sizes(page: Page, wide: DirectedNode) -> None:
    wide.parts = {"wide-model": (12 * GB, 8 * GB)}
    try:
        page.goto("#/fleet")
        two = card(page, "wide")
        two.get_by_text("12.0 GiB + 8.0 GiB").wait_for()
        labels = [str(bar.get_attribute("aria-label")) for bar in two.locator(".bar").all()]
        assert "wide-model weights (a part of it) 9.6 GiB, wide-model KV cache (a part of it) 2.4 GiB" in labels[0]
        assert "wide-model weights (a part of it) 6.4 GiB, wide-model KV cache (a part of it) 1.6 GiB" in labels[1]
    finally:
        wide.parts = {}


def test_replicas_of_a_model_are_counted_and_their_devices_named(page: Page, wide: DirectedNode) -> None:
    wide.replicas = {"wide-model": ((0,), (1,))}
    try:
        page.goto("#/fleet")
        two = card(page, "wide")
        assert two.get_by_text("2 replicas", exact=True).get_attribute("title") == "On devices 0, 1."
        labels = [str(bar.get_attribute("aria-label")) for bar in two.locator(".bar").all()]
        assert ["wide-model weights 8.0 GiB" in label for label in labels] == [True, True]
        wide.places, wide.extra_replica_bytes = {"wide-model": (0,)}, {1: 2 * GB}
        two.locator("[aria-label*='Extra replicas of wide-model (count as free) 2.0 GiB']").wait_for()
        two.locator("[title='On devices 0, 1. Extra, in memory that counts as free: 1.']").wait_for()
        page.goto("#/models")
        page.get_by_role("button", name="wide-model").click()
        page.get_by_text("wide: 2 replicas on devices 0, 1").wait_for()
    finally:
        wide.places, wide.replicas, wide.extra_replica_bytes = {"wide-model": (0, 1)}, {}, {}


def test_part_of_a_model_that_another_node_serves_is_on_the_bar_and_in_the_list(page: Page, node: DirectedNode) -> None:
    status = ModelStatus(id="spanning", state=ModelState.READY, devices=(0,), measured_bytes=3 * GB)
    node.members = (msgspec.structs.replace(status, nodes=("wide", "beast"), rank=1),)
    try:
        page.goto("#/fleet")
        beast = card(page, "beast")
        row = beast.get_by_role("listitem").filter(has_text="spanning")
        row.get_by_text("part of wide's").wait_for()
        row.get_by_text("3.0 GiB").wait_for()
        label = str(beast.locator(".bar").get_attribute("aria-label"))
        assert "spanning (a part of it, wide serves it) 3.0 GiB" in label
    finally:
        node.members = ()


def test_catalogue_pin_is_marked_and_sleep_is_offered_only_where_possible(page: Page, wide: DirectedNode) -> None:
    page.goto("#/fleet")
    two = card(page, "wide")
    assert two.get_by_text("pinned", exact=True).get_attribute("title") == "Kept loaded by models.toml"
    two.get_by_label("Actions for wide-model on wide").click()
    two.get_by_role("menuitem", name="Unload…").wait_for()
    for absent in ("Sleep…", "Pin…", "Unpin…"):
        assert two.get_by_role("menuitem", name=absent).count() == 0
    two.get_by_role("menuitem", name="Unload…").click()
    page.get_by_text("models.toml pins it: the gateway loads it again.").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="detached")
    card(page, "beast").get_by_label("Actions for small on beast").click()
    card(page, "beast").get_by_role("menuitem", name="Sleep…").wait_for()


def test_bar_shows_what_the_ceiling_keeps_from_models(page: Page, node: DirectedNode) -> None:
    node.ceiling_bytes = 10 * GB
    page.goto("#/fleet")
    beast = card(page, "beast")
    beast.get_by_text("models ≤ 10.0 GiB").wait_for()
    assert "Free, but over the ceiling of models (memory_mb)" in str(beast.locator(".bar").get_attribute("aria-label"))
    node.ceiling_bytes = None
    beast.get_by_text("models ≤ 10.0 GiB").wait_for(state="detached")
    node.node_ceiling_bytes = 10 * GB
    beast.get_by_text("Models may take 10.0 GiB of this node").wait_for()
    label = str(beast.locator(".bar").get_attribute("aria-label"))
    assert "Free 8.0 GiB, Free, but over the ceiling of models (memory_mb)" in label
    node.node_ceiling_bytes = None
    beast.get_by_text("Models may take 10.0 GiB of this node").wait_for(state="detached")


def test_legend_has_the_colours_of_the_bars(page: Page) -> None:
    page.goto("#/fleet")
    bar = page.locator(".bar").first  # the legend has the colour of the first model
    bar.wait_for()
    colour = "each => getComputedStyle(each).background"
    for kind in (".part:not(.kv):not(.free):not(.foreign)", ".part.kv:not(.changing)"):
        shown = bar.locator(kind).first.evaluate(colour)
        legend = f"getComputedStyle(document.querySelector('.legend {kind}')).background"
        wait_until(page, f"shown => {legend} === shown", shown)


def test_models_have_different_colours_while_there_are_enough(page: Page) -> None:
    page.goto("#/fleet")
    names = list("08@HPX`hp")  # one hash for all
    colours = page.evaluate(
        "async (names) => names.map((await import('/page/js/format.js?apart')).hue)",
        names + names,
    )
    assert sorted(colours[:8]) == list(range(8))
    assert colours[:9] == colours[9:]


def test_cold_load_is_watched_to_ready(page: Page, stage: Stage, node: DirectedNode) -> None:
    node.load_gate = stage.gate()
    node.progress["cold"] = Progress(stage="read", done_bytes=GB, total_bytes=4 * GB, eta_s=12.0)
    page.goto("#/fleet")
    beast = card(page, "beast")
    beast.get_by_text("more models, not loaded").click()
    beast.get_by_role("listitem").filter(has_text="cold").get_by_role("button", name="Load…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_text("load cold on beast").wait_for()
    dialog.get_by_role("button", name="Load", exact=True).click()
    beast.get_by_text("Reading weights · 1.0 GiB of 4.0 GiB · about 12 s left").wait_for()
    stage.open(node.load_gate)
    beast.locator("li.model").filter(has_text="cold").get_by_text("ready", exact=True).wait_for()
    page.get_by_text("Load cold: done.").wait_for()


def test_eviction_is_shown_before_it_is_confirmed(page: Page, node: DirectedNode) -> None:
    node.states["cold"] = ModelState.READY
    node.loads["small"] = ModelLoad()
    page.goto("#/fleet")
    beast = card(page, "beast")
    beast.locator("li.model").filter(has_text="cold").get_by_text("ready").wait_for()
    beast.get_by_text("not loaded").click()
    beast.get_by_role("listitem").filter(has_text="large").get_by_role("button", name="Load…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_text("This evicts").wait_for()
    victims = dialog.locator(".victims").inner_text()
    assert "cold" in victims or "small" in victims
    assert not [request for request in node.load_requests if request.model_id == "large"], "only asked so far"
    dialog.get_by_role("button", name="Load", exact=True).click()
    beast.locator("li.model").filter(has_text="large").get_by_text("ready", exact=True).wait_for()
    page.get_by_role("link", name="Activity").click()
    page.get_by_role("button", name="Decisions").click()
    page.get_by_text("to make room for large").first.wait_for()
    page.get_by_role("button", name=re.compile("Load large on beast .* after unloading")).first.click()
    page.get_by_role("dialog").get_by_text("fits after eviction").wait_for()


def test_keyboard_alone_opens_a_menu_and_a_dialog_and_gets_the_focus_back(page: Page) -> None:
    page.goto("#/fleet")
    menu = card(page, "beast").get_by_label("Actions for small on beast")
    menu.focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.get_by_role("dialog").wait_for()
    assert page.evaluate("document.activeElement.closest('dialog') !== null")
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="detached")
    assert menu.evaluate("summary => summary === document.activeElement")
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    assert not menu.evaluate("summary => summary.parentElement.open")


def test_dialog_is_open_as_soon_as_it_is_there(page: Page) -> None:
    """An Escape that comes between the two would close nothing, and the dialog would then stay."""
    page.goto("#/playground")
    page.evaluate("""
        window.seen = [];
        new MutationObserver(() => document.querySelectorAll("dialog").forEach((each) => window.seen.push(each.open)))
          .observe(document.body, {childList: true, subtree: true});
    """)
    page.get_by_text("Copy as").click()
    page.get_by_role("menuitem", name="Curl").click()
    page.get_by_role("dialog").wait_for()
    assert page.evaluate("window.seen[0]")


def test_menu_closes_on_escape_as_soon_as_it_is_there(page: Page) -> None:
    page.goto("#/models")
    page.get_by_role("heading", level=1, name="Models").wait_for()
    page.evaluate("""
        window.isOpen = null;
        new MutationObserver(() => {
            const menu = document.querySelector("details.menu");
            if (window.isOpen !== null || !menu) return;
            menu.open = true;
            menu.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape", bubbles: true }));
            window.isOpen = menu.open;
        }).observe(document.body, { childList: true, subtree: true });
    """)
    page.get_by_role("link", name="Fleet").click()
    wait_until(page, "window.isOpen !== null")
    assert page.evaluate("window.isOpen") is False


def test_unload_needs_a_confirmation(page: Page, node: DirectedNode) -> None:
    page.goto("#/fleet")
    row = card(page, "beast").locator("li.model").filter(has_text="small")
    num_before = len(node.unload_requests)
    row.get_by_label("Actions for small").click()
    row.get_by_role("menuitem", name="Unload…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_text("2 requests run on it now").wait_for()
    page.keyboard.press("Escape")
    dialog.wait_for(state="detached")
    assert len(node.unload_requests) == num_before
    row.get_by_label("Actions for small").click()
    row.get_by_role("menuitem", name="Unload…").click()
    page.get_by_role("dialog").get_by_role("button", name="Unload").click()
    row.wait_for(state="detached")
    assert node.unload_requests[-1].model_id == "small"


def test_page_reconnects_after_the_gateway_restarts(page: Page, stage: Stage, node: DirectedNode) -> None:
    page.goto("#/fleet")
    card(page, "beast").get_by_text("2 in flight").wait_for()
    stage.stop_gateway()
    page.get_by_text("The connection to the gateway is lost").wait_for()
    node.states["cold"] = ModelState.READY
    stage.start_gateway()
    card(page, "beast").locator("li.model").filter(has_text="cold").wait_for()
    page.get_by_text("The connection to the gateway is lost").wait_for(state="detached")


NUM_NODES = 50
NUM_MODELS = 100
MAX_ELEMENTS = 12_000


class LargeFleet(NamedTuple):
    """50 nodes that list 100 models each, behind a gateway of their own."""

    url: str
    lively: DirectedNode
    """The node that a test changes; the other 49 are one process under 49 names."""


@pytest.fixture(scope="module")
def large_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LargeFleet]:
    models = {f"org/model-{number:03d}": GB for number in range(NUM_MODELS)}
    stage = Stage(tmp_path_factory.mktemp("large"))
    shared = DirectedNode("unused", sizes=models)
    shared.states = dict.fromkeys(list(models)[:3], ModelState.READY)
    stage.call(shared.start())
    lively = stage.add(DirectedNode("lively", sizes=models))
    others = [f'[[neurons]]\nname = "node-{n:02d}"\nendpoint = "{shared.endpoint}"' for n in range(1, NUM_NODES)]
    stage.open_gateway(extra_nodes="\n".join(others), poll_interval_s=10.0)  # a busy machine misses no poll
    yield LargeFleet(stage.url, lively)
    stage.close()


def test_change_of_one_node_redraws_one_card_of_fifty(page: Page, large_fleet: LargeFleet) -> None:
    page.goto(f"{large_fleet.url}#/fleet")
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
    lively = large_fleet.lively
    lively.states["org/model-007"] = ModelState.READY
    for num_running in range(3, 9):
        page.evaluate("window.redrawn.clear()")
        lively.loads["org/model-007"] = ModelLoad(running=num_running)
        page.get_by_label("Node lively").get_by_text(f"{num_running} in flight").wait_for()
        redrawn = page.evaluate("[...window.redrawn]")
        assert "Node lively" in redrawn
        if len(redrawn) < NUM_NODES // 2:
            break  # else polls were missed, or the page was too slow for single changes: that redraws cards, too
    else:
        pytest.fail("every change of one node redraws most cards")
    page.get_by_label("Filter nodes and models").fill("lively")
    cards.nth(1).wait_for(state="detached")


def test_every_model_is_listed_once(page: Page, large_fleet: LargeFleet) -> None:
    page.goto(f"{large_fleet.url}#/models")
    rows = page.locator(".catalogue > li")
    rows.nth(NUM_MODELS - 1).wait_for()
    assert rows.count() == NUM_MODELS
    page.get_by_label("Filter models").fill("model-09")
    rows.nth(10).wait_for(state="detached")
    assert rows.count() == 10
    page.get_by_text("fits on 32 or more nodes").first.wait_for()
