"""Models, activity, usage and keys, as an operator and as a user sees them after signing in."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import pytest

from cortex.gateway.ledger.keys import generate
from cortex.wire.node.orders import HubRepository, HubVariant
from cortex.wire.node.protocol import ModelState

from ..gateway.fake_neuron import GB
from . import chromium
from .stage import DirectedNode, Stage

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route


OPERATOR = generate("anna", operator=True)
USER = generate("ben", models=("small",), window_tokens=1_000_000)


MODELS = """
[[models]]
id = "small"
cost = { input = 100.0, cached_input = 10.0, output = 1000.0 }
[aliases]
fast = "small"
"""


@pytest.fixture(scope="module")
def node(stage: Stage) -> DirectedNode:
    """One node behind a gateway with keys, and some requests that have been made."""
    started = stage.add(DirectedNode("beast", sizes={"small": 2 * GB, "huge": 90 * GB, "spare": 4 * GB}))
    started.states["small"] = ModelState.READY
    stage.open_gateway(OPERATOR.section, USER.section, models=MODELS)
    for key, model in ((OPERATOR, "small"), (USER, "small")):
        ask(stage, key.text, model)
    with pytest.raises(urllib.error.HTTPError, match="403"):
        ask(stage, USER.text, "huge")
    return started


def ask(stage: Stage, key: str, model: str) -> None:
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "secret prompt"}], "stream": True})
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    urllib.request.urlopen(urllib.request.Request(f"{stage.url}v1/chat/completions", body.encode(), headers)).read()


SignIn = Callable[..., None]
"""`(key, view)`: signs in on the page."""


@pytest.fixture
def sign_in(page: Page, node: DirectedNode) -> SignIn:
    def sign(key: str, view: str = "") -> None:
        page.goto(f"./#/{view}")
        page.get_by_label("API key").fill(key)
        page.get_by_role("button", name="Sign in").click()
        page.get_by_role("navigation").wait_for()

    return sign


def test_operator_signs_in_and_sees_everything(page: Page, sign_in: SignIn) -> None:
    page.goto("./")
    page.get_by_label("API key").fill("ck-wrong")
    page.get_by_role("button", name="Sign in").click()
    page.get_by_text("This API key is unknown").wait_for()
    sign_in(OPERATOR.text)
    assert page.get_by_role("navigation").get_by_role("link").all_inner_texts() == [
        "Fleet", "Models", "Playground", "Activity", "History", "Usage",
    ]  # fmt: skip
    page.locator("article[aria-label='Node beast']").wait_for()
    assert page.evaluate("document.cookie") == "", "scripts cannot read the session"
    page.reload()
    page.get_by_role("link", name="Fleet").wait_for()
    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("API key").wait_for()
    page.reload()
    page.get_by_label("API key").wait_for()


def test_user_sees_models_playground_and_own_usage_only(page: Page, sign_in: SignIn) -> None:
    sign_in(USER.text, "fleet")
    assert page.get_by_role("navigation").get_by_role("link").all_inner_texts() == [
        "Models", "Playground", "Activity", "Usage",
    ]  # fmt: skip
    page.get_by_label("Message", exact=True).fill("hello")
    page.keyboard.press("Enter")
    page.get_by_text("3 out").wait_for()
    page.get_by_role("link", name="Models").click()
    page.get_by_role("button", name="small").wait_for()
    assert page.get_by_text("huge").count() == 0
    assert page.get_by_role("button", name="Pull from the hub").count() == 0
    page.get_by_role("link", name="Activity").click()
    page.locator("table.requests tbody tr").first.wait_for()
    assert page.get_by_text("anna").count() == 0
    page.get_by_role("link", name="Usage").click()
    page.get_by_role("heading", name="Your key").wait_for()
    assert "of 1M in 24 h" in page.locator("meter + span").inner_text()
    assert page.get_by_text("anna").count() == 0
    assert page.get_by_role("button", name="Make a key").count() == 0


def test_models_show_what_they_are_and_what_fits_where(page: Page, sign_in: SignIn) -> None:
    sign_in(OPERATOR.text, "models")
    row = page.get_by_role("listitem").filter(has=page.get_by_role("button", name="small", exact=True))
    row.get_by_text("100.00 in, 10.00 cached, 1000.00 out per million").wait_for()
    assert "fast" in row.inner_text()
    assert "2.0 GiB BF16" in row.inner_text()
    huge = page.get_by_role("listitem").filter(has=page.get_by_role("button", name="huge", exact=True))
    huge.get_by_text("fits nowhere").wait_for()
    huge.get_by_role("button", name="huge").click()
    huge.get_by_text("too small").first.wait_for()
    page.get_by_label("Filter models").fill("hug")
    row.wait_for(state="detached")
    page.get_by_label("Filter models").fill("fast")
    row.get_by_role("link", name="Chat").click()
    assert page.get_by_label("Model", exact=True).input_value() == "small"


def test_model_is_pulled_with_progress_cancelled_and_deleted(page: Page, node: DirectedNode, sign_in: SignIn) -> None:
    sign_in(OPERATOR.text, "models")
    page.get_by_role("button", name="Pull from the hub").click()
    page.get_by_label("Repository").wait_for()
    assert page.evaluate("document.activeElement.closest('label')?.innerText.startsWith('Repository')")
    page.get_by_label("Repository").fill("org/new-model")
    page.get_by_label("Quantisation").fill("Q4_K_M")
    page.get_by_role("dialog").get_by_role("button", name="Pull", exact=True).click()
    jobs = page.get_by_role("list", name="Jobs")
    jobs.get_by_text("Downloading").wait_for()
    assert node.pull_requests[-1].quant == "Q4_K_M"
    jobs.get_by_role("button", name="Cancel").click()
    jobs.get_by_text("cancelled").wait_for()
    page.get_by_text("Disks:").click()
    page.get_by_text("500 B of 1000 B free").wait_for()
    page.get_by_role("button", name="spare", exact=True).click()
    page.get_by_role("button", name="Delete…").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete", exact=True).click()
    page.get_by_text(re.compile("spare: .* deleted from beast")).wait_for()


def test_sizes_of_a_repository_are_shown_before_the_pull(page: Page, node: DirectedNode, sign_in: SignIn) -> None:
    node.hub["org/new-model"] = HubRepository(
        repository="org/new-model",
        commit="c0ffee",
        variants=(
            HubVariant(quant="Q4_K_M", num_bytes=5 * GB, num_files=1),
            HubVariant(quant="Q8_0", num_bytes=9 * GB, num_files=2),
            HubVariant(quant="<b>BF16</b>", num_bytes=90 * GB, num_files=9),
        ),
    )
    sign_in(OPERATOR.text, "models")
    page.get_by_role("button", name="Pull from the hub").click()
    page.get_by_label("Repository").fill("org/unknown")
    page.get_by_text("The sizes are not known. beast: the hub has no such repository").wait_for()
    page.get_by_label("Repository").fill("org/new-model")
    variants = page.get_by_role("group", name="What to download")
    variants.get_by_text("9.0 GiB").wait_for()
    assert page.get_by_label("Quantisation").count() == 0
    assert variants.get_by_role("radio", name="Q4_K_M").is_checked()
    huge = variants.get_by_role("listitem").filter(has_text="<b>BF16</b>")
    assert "fits nowhere" in huge.inner_text()
    variants.get_by_role("radio", name="Q8_0").check()
    page.get_by_role("dialog").get_by_role("button", name="Pull", exact=True).click()
    page.get_by_role("list", name="Jobs").get_by_text("Downloading").wait_for()
    assert (node.pull_requests[-1].model_id, node.pull_requests[-1].quant) == ("org/new-model", "Q8_0")


def test_activity_is_live_and_shows_a_request_in_full(page: Page, stage: Stage, sign_in: SignIn) -> None:
    sign_in(OPERATOR.text, "activity")
    rows = page.locator("table.requests tbody tr")
    rows.filter(has_text="403").first.wait_for()
    page.get_by_label("Status").select_option("ok")
    rows.filter(has_text="403").first.wait_for(state="detached")
    num_before = rows.count()
    ask(stage, OPERATOR.text, "small")
    rows.nth(num_before).wait_for()
    rows.first.click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_text("7, of them 4 from the prefix cache").wait_for()
    assert "secret prompt" not in dialog.inner_text()
    page.keyboard.press("Escape")
    dialog.wait_for(state="detached")
    page.get_by_role("button", name="Decisions").click()
    happened = page.locator(".timeline li").filter(has_text="beast is up")
    happened.first.wait_for()  # before the page was opened
    num_shown = happened.count()
    page.reload()
    page.get_by_role("button", name="Decisions").click()
    happened.first.wait_for()
    assert happened.count() == num_shown


def test_activity_is_redrawn_a_few_times_a_second_however_many_requests_end(
    page: Page, stage: Stage, sign_in: SignIn
) -> None:
    sign_in(OPERATOR.text, "activity")
    page.locator("table.requests tbody tr").first.wait_for()
    page.evaluate("""() => {
        window.drawn = [];
        const remember = (changes) => {
            if (changes.some(({ addedNodes }) => addedNodes.length)) window.drawn.push(performance.now());
        };
        new MutationObserver(remember).observe(document.querySelector("table.requests tbody"), { childList: true });
    }""")
    with ThreadPoolExecutor(4) as clients:
        list(clients.map(lambda _: ask(stage, OPERATOR.text, "small"), range(80)))
    page.locator("table.requests tbody tr").nth(80).wait_for()
    drawn = page.evaluate("window.drawn")
    assert len(drawn) <= 2 + (drawn[-1] - drawn[0]) / 240


def test_request_that_runs_is_cancelled(page: Page, stage: Stage, node: DirectedNode, sign_in: SignIn) -> None:
    script, node.script = node.script, [{"content": "once"}, stage.gate()]
    with ThreadPoolExecutor(1) as client:
        running = client.submit(ask, stage, USER.text, "small")
        try:
            sign_in(OPERATOR.text, "activity")
            runs = page.get_by_role("region", name="Requests that run")
            runs.get_by_text("generates").wait_for()
            assert "ben" in runs.inner_text()
            runs.get_by_role("button", name="Cancel the request for small").click()
            runs.wait_for(state="detached")
            page.locator("table.requests tbody tr").filter(has_text="cancelled").wait_for()
            running.result()
        finally:
            node.script = script


def test_batches_show_their_progress_and_are_cancelled(page: Page, stage: Stage, sign_in: SignIn) -> None:
    params = {"model": "huge", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
    body = {"requests": [{"custom_id": str(number), "params": params} for number in range(3)]}
    headers = {"content-type": "application/json", "authorization": f"Bearer {OPERATOR.text}"}
    request = urllib.request.Request(f"{stage.url}v1/messages/batches", json.dumps(body).encode(), headers)
    made = json.load(urllib.request.urlopen(request))
    sign_in(OPERATOR.text, "activity")
    page.get_by_role("button", name="Batches").click()
    batches = page.get_by_role("region", name="Batches")
    batches.get_by_text("0 of 3").wait_for()
    assert "anna" in batches.inner_text()
    batches.get_by_role("button", name=f"Cancel the batch {made['id']}").click()
    batches.get_by_text("cancelled").wait_for()
    batches.get_by_text("3 of 3").wait_for()


def test_history_plots_traffic_and_the_memory_of_devices(page: Page, sign_in: SignIn) -> None:
    sign_in(OPERATOR.text, "history")
    for title in ("Tokens per second", "Time to the first token", "Waiting requests", "Loads and evictions"):
        page.get_by_role("img", name=title).locator("canvas").wait_for()
    page.get_by_role("button", name="Day").click()
    page.get_by_role("img", name=re.compile("Memory by model: ")).first.wait_for()
    page.get_by_role("searchbox", name="Node").fill("no such node")
    page.get_by_text("No such node").wait_for()


def test_usage_has_cost_plot_and_csv(page: Page, sign_in: SignIn) -> None:
    sign_in(OPERATOR.text, "usage")
    page.locator(".plot canvas").wait_for()
    by_key = page.locator("section").filter(has=page.get_by_role("heading", name="By key"))
    by_key.get_by_text("ben").first.wait_for()
    with page.expect_download() as download:
        page.get_by_text("CSV", exact=True).click()
        page.get_by_role("menuitem", name="By key", exact=True).click()
    assert "anna" in Path(download.value.path()).read_text()


def test_operator_sees_the_tokens_of_every_key_on_every_model(page: Page, sign_in: SignIn) -> None:
    sign_in(OPERATOR.text, "usage")
    both = page.get_by_role("region", name="By key and model")
    both.wait_for()
    assert both.locator("thead th").all_inner_texts() == ["Key", "Total", "small"]
    assert {row.split("\t")[0] for row in both.locator("tbody tr").all_inner_texts()} == {"anna", "ben"}
    page.get_by_role("button", name="Sign out").click()
    sign_in(USER.text, "usage")
    page.get_by_role("heading", name="By model").wait_for()
    assert both.count() == 0


def test_table_of_fifty_keys_and_twelve_models_is_sorted_and_keeps_its_heads(page: Page, sign_in: SignIn) -> None:
    def many(route: Route) -> None:
        rows = [
            {"id": f"{key:06}", "name": f"key-{key}", "model": f"org/model-{model}", "requests": 1, "cost": 0.5,
             "prompt_tokens": 1000 * (model + 1), "cached_tokens": 0, "completion_tokens": key if model else 100 - key}
            for key in range(50) for model in range(12) if key or model == 3
        ]  # fmt: skip
        asked = parse_qs(urlsplit(route.request.url).query)
        spans.append((int(asked["until"][0]) - int(asked["since"][0])) // 86400)
        route.fulfill(json={"by": "key-model", "is_recorded": True, "rows": rows})

    spans: list[int] = []
    page.route("**/fleet/usage?by=key-model&*", many)
    sign_in(OPERATOR.text, "usage")
    table = page.get_by_role("region", name="By key and model")
    keys, models, rows = table.locator("tbody th"), table.locator("thead th"), table.locator("tbody tr")
    keys.nth(49).wait_for()
    assert keys.all_inner_texts() == [f"key-{key}" for key in range(49, -1, -1)], "most tokens first"
    assert models.all_inner_texts() == ["Key", "Total", *(f"org/model-{model}" for model in range(11, -1, -1))]
    assert rows.last.locator("td").all_inner_texts() == ["4K", *[""] * 8, "4K", *[""] * 3]
    table.get_by_role("button", name="org/model-0").click()
    assert keys.all_inner_texts() == [f"key-{key}" for key in range(1, 50)] + ["key-0"]
    table.get_by_role("button", name="Cost").click()
    assert rows.first.locator("td").first.inner_text() == "6.00"
    heads = (table.locator(".matrix"), models.first)
    heads[0].evaluate("element => element.scrollTo(element.scrollWidth, element.scrollHeight)")
    frame, corner = (each.bounding_box() for each in heads)
    assert frame is not None
    assert corner is not None
    assert (corner["x"], corner["y"]) == pytest.approx((frame["x"], frame["y"]), abs=3), "names of both stay in sight"
    page.get_by_role("button", name="7 days").click()
    keys.nth(49).wait_for()
    chromium.wait_until(page, "document.querySelector('[aria-label=Span] [aria-pressed=true]').innerText == '7 days'")
    assert spans[0] == 30
    assert spans[-1] == 7


def test_key_is_made_limited_and_revoked(page: Page, stage: Stage, sign_in: SignIn) -> None:
    sign_in(OPERATOR.text, "usage")
    page.get_by_role("button", name="Make a key").click()
    page.get_by_label("Name of its owner").fill("carl")
    page.get_by_label("Requests per minute").fill("30")
    page.get_by_label("Cost per window").fill("2.5")
    page.get_by_label("Group").fill("nobodys")
    page.get_by_role("button", name="Make the key").click()
    page.get_by_role("dialog").get_by_text("nobodys").wait_for()  # there is no such group
    page.get_by_label("Group").fill("")
    page.get_by_role("button", name="Make the key").click()
    text = page.locator(".made-key").inner_text()
    assert re.fullmatch(r"ck-\w{8}-\w{43}", text)
    page.get_by_role("button", name="Done").click()
    row = page.get_by_role("row").filter(has_text="carl")
    row.get_by_text("30", exact=True).wait_for()
    row.get_by_label("Cost left").wait_for()
    ask(stage, text, "small")
    row.get_by_label("Actions for key carl").click()
    row.get_by_role("menuitem", name="Limits and expiry…").click()
    page.get_by_label("Expires at the start of").fill("2020-01-01")
    page.get_by_role("button", name="Save").click()
    row.get_by_text("expired").wait_for()
    row.get_by_label("Actions for key carl").click()
    row.get_by_role("menuitem", name="Revoke…").click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    row.wait_for(state="detached")


def test_group_is_made_shared_and_removed_and_keys_of_the_file_have_no_actions(page: Page, sign_in: SignIn) -> None:
    sign_in(OPERATOR.text, "usage")
    page.get_by_role("button", name="Make a group").click()
    page.get_by_label("Name", exact=True).fill("lab")
    page.get_by_label("Tokens in its whole life").fill("5000")
    page.get_by_role("button", name="Make the group").click()
    group = page.get_by_role("row").filter(has=page.get_by_label("Actions for group lab"))
    group.get_by_label("Tokens left").wait_for()
    page.get_by_role("button", name="Make a key").click()
    page.get_by_label("Name of its owner").fill("dora")
    page.get_by_label("Group, whose").fill("lab")
    page.get_by_role("button", name="Make the key").click()
    page.get_by_role("button", name="Done").click()
    group.get_by_title("dora").wait_for()
    assert page.get_by_label("Actions for key dora").count() == 1
    assert page.get_by_label("Actions for key anna").count() == 0, "it is in the file"
    for label, verb in (("key dora", "Revoke"), ("group lab", "Remove")):
        page.get_by_label(f"Actions for {label}").click()
        page.get_by_role("menuitem", name=f"{verb}…").click()
        page.get_by_role("dialog").get_by_role("button", name=verb).click()
        page.get_by_label(f"Actions for {label}").wait_for(state="detached")


NAMELESS = """() =>
    [...document.querySelectorAll("button, a, summary, input, select, textarea, [role=img], progress, meter")]
    .filter((each) => !(each.getAttribute("aria-label") || each.textContent.trim() || each.labels?.length))
    .map((each) => each.outerHTML)"""


def test_every_view_fits_a_phone_and_names_its_controls(page: Page, sign_in: SignIn) -> None:
    sign_in(OPERATOR.text)
    page.set_viewport_size({"width": 360, "height": 740})
    for view in ("Fleet", "Models", "Playground", "Activity", "Usage"):
        page.get_by_role("link", name=view).click()
        page.get_by_role("heading", level=1, name=view).or_(page.get_by_label("Message", exact=True)).first.wait_for()
        page.locator(".loading").first.wait_for(state="detached")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, view
        assert page.evaluate(NAMELESS) == [], view


def test_page_and_session_work_behind_a_path_prefix(page: Page, stage: Stage, node: DirectedNode) -> None:
    with stage.proxied("/some/where/") as url:
        page.goto(url)
        page.get_by_label("API key").fill(OPERATOR.text)
        page.get_by_role("button", name="Sign in").click()
        page.locator("article[aria-label='Node beast']").wait_for()
        (cookie,) = page.context.cookies()
        assert cookie["path"] == "/some/where"
        page.get_by_role("link", name="Playground").click()
        page.get_by_label("Message", exact=True).fill("hello")
        page.keyboard.press("Enter")
        page.get_by_text("3 out").wait_for()


def test_session_that_ends_leads_back_to_the_sign_in(page: Page, sign_in: SignIn) -> None:
    sign_in(USER.text, "playground")
    page.get_by_label("Message", exact=True).wait_for()
    page.context.clear_cookies()
    page.get_by_role("link", name="Models").click()
    page.get_by_label("API key").wait_for()
