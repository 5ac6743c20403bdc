"""Takes the screenshots of the documentation: `python -m tests.browser.screenshots docs/images [VIEW…]`.

The gateway is real. The nodes are directed, so that the pictures show a busy fleet on any machine.
"""

from __future__ import annotations

import json
import random
import re
import sqlite3
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

from cortex.gateway.ledger.keys import NewKey, generate
from cortex.gateway.ledger.store import open_store
from cortex.wire.events import Usage
from cortex.wire.node.load_options import SamplingDefaults
from cortex.wire.node.orders import HubRepository, HubVariant
from cortex.wire.node.protocol import DiskUse, ModelLoad, ModelState, Progress

from ..gateway.fake_neuron import GB
from . import chromium
from .stage import DirectedNode, Stage

SIZE = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 800}
CODER, CHAT, SMALL = "Qwen/Qwen3-Coder-30B-A3B-Instruct-GGUF", "Qwen/Qwen3-32B-GGUF", "Qwen/Qwen3-8B"
VISION, TINY, LARGE = "google/gemma-3-27b-it-GGUF", "Qwen/Qwen3-0.6B", "meta-llama/Llama-3.3-70B-Instruct-GGUF"
MODELS = f"""
[[models]]
id = "{CODER}"
cost = {{ input = 0.10, cached_input = 0.01, output = 0.40 }}
[[models]]
id = "{CHAT}"
cost = {{ input = 0.20, cached_input = 0.02, output = 0.60 }}
[[models]]
id = "{SMALL}"
cost = {{ input = 0.05, cached_input = 0.005, output = 0.20 }}
[aliases]
fast = "{SMALL}"
coder = "{CODER}"
"""
OFFERED = "unsloth/Qwen3-30B-A3B-Instruct-2507-GGUF"
OFFER = tuple(
    HubVariant(quant=quant, num_bytes=int(size * GB), num_files=files)
    for quant, size, files in (
        ("Q2_K", 10.5, 1), ("Q3_K_M", 13.7, 1), ("Q4_K_M", 17.3, 1), ("Q5_K_M", 20.2, 1), ("Q6_K", 23.4, 1),
        ("Q8_0", 30.3, 1), ("BF16", 56.9, 2),
    )
)  # fmt: skip
CHANCE = random.Random(11)
ANSWER = (
    "A **prefix cache** keeps the key and value pages of prompts that were computed before. "
    "A new prompt that starts with the same tokens reuses them:\n\n"
    "1. Pages are named by a hash of their tokens *and* of the page before.\n"
    "2. A request looks up its pages from the start, and stops at the first miss.\n"
    "3. Only the rest of the prompt is computed.\n\n"
    '```python\ndef match(tokens, pages, size=16):\n    parent, found = b"", []\n'
    "    for start in range(0, len(tokens) - size + 1, size):\n"
    "        parent = digest(parent, tokens[start : start + size])\n"
    "        if parent not in pages:\n            break\n        found.append(pages[parent])\n    return found\n```\n"
)
ANNA, BEN, AGENTS = (
    generate("anna", operator=True),
    generate("ben", models=("Qwen/*",), window_tokens=4_000_000),
    generate("agents", balance_tokens=900_000_000, requests_per_min=120, expires="2027-06-30"),
)


def build(stage: Stage, directory: Path, keys: tuple[NewKey, ...]) -> None:
    """Four nodes of different kinds, and a month of usage."""
    beast = DirectedNode("beast", device_names=("NVIDIA RTX 4090", "NVIDIA RTX 4090"), foreign_bytes=GB)
    beast.sizes = {CHAT: 33 * GB, SMALL: 9 * GB, TINY: 2 * GB}
    beast.states = {CHAT: ModelState.READY, TINY: ModelState.ASLEEP}
    beast.places, beast.kv = {CHAT: (0, 1)}, {CHAT: 9 * GB}
    beast.temperature_c, beast.utilisation = 67.0, 0.91
    attic = DirectedNode("attic", device_names=("NVIDIA RTX 3090",), foreign_bytes=GB // 2)
    attic.sizes = {CODER: 17 * GB, SMALL: 9 * GB, VISION: 18 * GB}
    attic.states = {CODER: ModelState.LOADING}
    attic.progress = {CODER: Progress(stage="read", done_bytes=11 * GB, total_bytes=17 * GB, eta_s=6.0)}
    studio = DirectedNode("studio", device_names=("NVIDIA RTX 6000 Ada",), total_bytes=48 * GB)
    studio.sizes = {VISION: 18 * GB, SMALL: 9 * GB, LARGE: 36 * GB}
    studio.states = {VISION: ModelState.READY, SMALL: ModelState.READY}
    studio.kv = {VISION: 4 * GB, SMALL: 3 * GB}
    studio.temperature_c, studio.utilisation = 54.0, 0.42
    offer = HubRepository(repository=OFFERED, commit="c0ffee", variants=OFFER)
    for node, pace_s in ((beast, 0.016), (attic, 0.01), (studio, 0.007)):
        words = [{"content": part} for part in re.findall(r"\S+\s*|\s+", ANSWER)]
        node.script = [{"reasoning_content": "Explain what is stored, then the lookup. "}, *words]
        node.first_pause_s, node.pause_s = partial(CHANCE.uniform, 0.15, 0.6), pace_s
        node.usage = partial(spent, len(words))
        node.disk = DiskUse(total_bytes=2000 * GB, free_bytes=1240 * GB, models_bytes=310 * GB)
        node.hub = {OFFERED: offer}
        node.sampling = dict.fromkeys(node.sizes, SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20))
        stage.add(node)
    cellar = '[[neurons]]\nname = "cellar"\nendpoint = "http://127.0.0.1:9"'
    if keys:
        record_usage(directory)
    stage.open_gateway(*(key.section for key in keys), models=MODELS, extra_nodes=cellar)
    threading.Thread(target=_sway, args=(beast, studio), daemon=True).start()


def spent(num_words: int) -> Usage:
    """Tokens of a turn in a conversation whose earlier turns are cached."""
    prompt = int(CHANCE.lognormvariate(7.6, 0.7))
    cached = prompt * CHANCE.randint(5, 9) // 10 // 16 * 16
    completion = int(num_words * CHANCE.uniform(1.1, 2.2))
    return Usage(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=completion)


def _sway(beast: DirectedNode, studio: DirectedNode) -> None:
    """Load that changes, for the sparklines."""
    while True:
        busy = ModelLoad(running=5, waiting=1, kv_used_fraction=0.62, tokens_per_s=random.uniform(150, 240))
        beast.loads[CHAT] = busy
        studio.loads[SMALL] = ModelLoad(running=2, kv_used_fraction=0.18, tokens_per_s=random.uniform(60, 120))
        time.sleep(0.8)


def record_usage(directory: Path) -> None:
    """Rows as a gateway writes them."""
    path = directory / "cortex-spend.db"
    open_store(str(path)).close_connection()
    chance = random.Random(7)
    with sqlite3.connect(path) as database:
        for day in range(30):
            minute = int(time.time() // 60) - day * 1440 - 60
            weekend = time.gmtime(minute * 60).tm_wday >= 5
            for key, model, scale in ((ANNA, CHAT, 1.0), (BEN, SMALL, 0.7), (AGENTS, CODER, 3.0), (AGENTS, SMALL, 0.5)):
                requests = int(chance.uniform(120, 320) * scale * (0.3 if weekend else 1.0))
                prompt = requests * int(chance.uniform(2500, 5200))
                cached = int(prompt * chance.uniform(0.55, 0.8))
                completion = requests * int(chance.uniform(250, 520))
                labels = (minute, key.section.id, key.section.name, model, "beast")
                row = (*labels, requests, prompt, cached, completion, 0)
                columns = "minute, key_id, key_name, model, node, requests, prompt_tokens, cached_tokens"
                columns += ", completion_tokens, reasoning_tokens"
                database.execute(f"INSERT INTO spend ({columns}) VALUES ({', '.join('?' * len(row))})", row)


def make_requests(stage: Stage, keys: tuple[NewKey, ...]) -> None:
    """Some requests for the view of activity."""
    asked = ((ANNA, CHAT), (AGENTS, SMALL), (BEN, SMALL), (ANNA, VISION), (BEN, VISION))
    for number in range(14):
        key, model = asked[CHANCE.randrange(len(asked)) if number > 4 else number]
        path = ("chat/completions", "chat/completions", "messages", "responses")[CHANCE.randrange(4)]
        body = {"model": model, "messages": [{"role": "user", "content": "hello " * number}], "stream": True}
        if path == "responses":
            body = {"model": model, "input": "hello", "stream": True}
        headers = {"content-type": "application/json"}
        if keys:
            headers["authorization"] = f"Bearer {key.text}"
        request = urllib.request.Request(f"{stage.url}v1/{path}", json.dumps(body).encode(), headers)
        try:
            urllib.request.urlopen(request).read()
        except urllib.error.HTTPError:
            continue  # one that the key may not use belongs in the picture


def chat(page: Page) -> None:
    page.get_by_label("Model", exact=True).select_option(CHAT)
    page.get_by_label("Message", exact=True).fill("How does a prefix cache work?")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Regenerate").wait_for()


def load(page: Page) -> None:
    page.get_by_label("Node studio").get_by_text("not loaded").click()
    page.get_by_label("Node studio").get_by_role("button", name="Load…").click()
    page.locator(".explanation").wait_for()


def pull(page: Page) -> None:
    page.get_by_role("button", name="Pull from the hub").click()
    page.get_by_label("Repository").fill(OFFERED)
    page.get_by_role("radio", name="Q4_K_M").wait_for()


def compare(page: Page) -> None:
    page.get_by_role("button", name="New chat").click()
    page.get_by_label("Model", exact=True).select_option(SMALL)
    page.get_by_role("button", name="Compare").click()
    page.get_by_label("Second model").select_option(VISION)
    page.get_by_label("Message", exact=True).fill("How does a prefix cache work?")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Regenerate").nth(1).wait_for()


ORDER = """async (model) => fetch(`fleet/models/${model}/load`, {
    method: "POST", body: '{"node": "studio"}', headers: { "content-type": "application/json", "x-cortex-page": "1" },
})"""


def decisions(page: Page) -> None:
    """A large model takes the place of another, which returns."""
    page.get_by_role("button", name="Decisions").click()
    for model in (LARGE, VISION):
        page.wait_for_timeout(2000)
        page.evaluate(ORDER, model)


def request_in_full(page: Page) -> None:
    page.locator("table.requests tbody tr").first.click()
    page.get_by_role("dialog").wait_for()


VIEWS: dict[str, tuple[str, Callable[[Page], Any] | None]] = {
    "fleet": ("fleet", None),
    "eviction": ("fleet", load),
    "models": ("models", None),
    "pull": ("models", pull),
    "playground": ("playground", chat),
    "compare": ("playground", compare),
    "activity": ("activity", None),
    "request": ("activity", request_in_full),
    "decisions": ("activity", decisions),
    "history": ("history", None),
    "usage": ("usage", None),
}


def sign_in(page: Page, url: str) -> None:
    page.goto(url)
    page.get_by_label("API key").fill(ANNA.text)
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("navigation").wait_for()


def main(target: Path, wanted: list[str]) -> None:
    target.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp())
    stage = Stage(directory)
    build(stage, directory, (ANNA, BEN, AGENTS))
    make_requests(stage, (ANNA,))
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium.executable(), args=chromium.ARGUMENTS)
        for theme in ("light", "dark"):
            context = browser.new_context(viewport=SIZE, color_scheme=theme)  # type: ignore[arg-type]
            page = context.new_page()
            if not wanted or "sign-in" in wanted:
                page.goto(stage.url)
                page.get_by_label("API key").wait_for()
                page.screenshot(path=target / f"sign-in-{theme}.png")
            sign_in(page, stage.url)
            for name, (view, act) in VIEWS.items():
                if wanted and name not in wanted:
                    continue
                page.goto(f"{stage.url}#/{view}")
                page.wait_for_timeout(62_000 if name == "fleet" else 2500)  # a minute fills the sparklines
                if act is not None:
                    act(page)
                    page.wait_for_timeout(800)
                page.mouse.move(0, 0)
                page.screenshot(path=target / f"{name}-{theme}.png")
                page.keyboard.press("Escape")
            page.set_viewport_size(PHONE)  # type: ignore[arg-type]
            for name in ("fleet", "models", "playground", "activity", "usage"):
                if not wanted or f"phone-{name}" in wanted:
                    page.goto(f"{stage.url}#/{name}")
                    page.wait_for_timeout(2500)
                    page.screenshot(path=target / f"phone-{name}-{theme}.png")
            context.close()
    stage.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
