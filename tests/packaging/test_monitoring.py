"""The dashboard and the alert rules use only metrics and labels that the programs really have."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cortex.gateway.metrics import GAUGES, GaugeSample
from cortex.gateway.metrics import Metrics as GatewayMetrics
from cortex.neuron.api.metrics import Metrics as NodeMetrics
from cortex.neuron.engine.request import EngineStats
from cortex.neuron.node.node import Node
from cortex.wire.events import Finish, TextDelta, Usage
from cortex.wire.node.protocol import DeviceHealth, Fallback, Health, ModelState, ModelStatus

from ..waiting import WAIT_S

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "packaging" / "grafana" / "cortex.json"
PROMETHEUS = ROOT / "packaging" / "prometheus"
OF_PROMETHEUS = frozenset({"instance", "job", "le"})
"""Labels that Prometheus adds, or that histograms have."""
VARIABLES = {"$__rate_interval": "5m", "$model": ".*", "$node": ".*", "$key": ".*"}

_SELECTOR = re.compile(r"\b((?:cortex|neuron)_\w+|up)\b(?:\{([^}]*)\})?")
_GROUPING = re.compile(r"\bby \(([^)]*)\)")


def gateway_exposition() -> bytes:
    """The metrics of a gateway on which everything has happened once."""
    gauges = [GaugeSample(name, 1.0, **dict.fromkeys(labels, "x")) for name, (_, labels) in GAUGES.items()]
    metrics = GatewayMetrics(lambda: gauges)
    traffic = metrics.traffic("m", "n")
    for distribution in (traffic.duration, traffic.first_token, traffic.speed, metrics.overhead):
        distribution.observe(1.0)
    metrics.spend("m", "k").add(Usage(prompt_tokens=1))
    metrics.errors.labels("m", "n", "c").inc()
    metrics.load_seconds.labels("m", "n").observe(1.0)
    for counter in (metrics.cold_starts, metrics.evictions, metrics.retries):
        counter.labels("m", "n").inc()
    for counter in (metrics.disconnects, metrics.config_reloads, metrics.task_restarts):
        counter.labels("x").inc()
    return metrics.exposition()


def node_exposition() -> bytes:
    """The metrics of a node with one model on one device, after one request."""
    without = (Fallback(name="torch._thing", reason="it is gone"),)
    device = DeviceHealth(index=0, total_bytes=10, free_bytes=4, utilisation=0.5, temperature_c=40, fallbacks=without)
    model = ModelStatus(id="m", state=ModelState.READY, measured_bytes=1)
    backend = SimpleNamespace(
        health=lambda: Health(status="ok", uptime_s=1.0, devices=(device,), models=(model,)),
        engine_stats=lambda: {"m": EngineStats(steps=1, preemptions=1, num_pages=1, used_pages=1, cached_pages=1)},
        task_restarts=lambda: {"t": 1},
        texts=SimpleNamespace(tokenised_characters=lambda: {"m": 1}),
    )
    metrics = NodeMetrics(cast("Node", backend))
    with metrics.watch("openai_chat") as watch:
        watch.observe([TextDelta(text="a")])
        watch.observe([Finish(reason="stop", usage=Usage(prompt_tokens=1))])
    return metrics.exposition()


@pytest.fixture(scope="module")
def existing() -> Mapping[str, frozenset[str]]:
    """The names of all series, and their labels."""
    found: dict[str, frozenset[str]] = {"up": frozenset()}
    for text in (gateway_exposition(), node_exposition()):
        for family in text_string_to_metric_families(text.decode()):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, frozenset()) | frozenset(sample.labels)
    return found


def dashboard_queries() -> Iterator[tuple[str, str]]:
    """Every query of the dashboard, with the title of its panel."""
    board = json.loads(DASHBOARD.read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def alert_queries() -> Iterator[tuple[str, str]]:
    """Every expression of the alert rules, with the name of its alert."""
    text = (PROMETHEUS / "alerts.yml").read_text()
    for name, inline, block in re.findall(r"- alert: (\w+)\n +expr: (?:(?!\|)(.+)|\|\n((?: {10}.*\n)+))", text):
        yield name, inline or " ".join(block.split())


def problems(query: str, existing: Mapping[str, frozenset[str]]) -> list[str]:
    """What the query uses and no program has."""
    found, labels = [], set(OF_PROMETHEUS)
    for name, matchers in _SELECTOR.findall(query):
        if name not in existing:
            found.append(f"there is no {name}")
            continue
        labels |= existing[name]
        for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers):
            if label not in existing[name] | OF_PROMETHEUS:
                found.append(f"{name} has no label {label}")
    for grouping in _GROUPING.findall(query):
        found += [
            f"no label {label} to group by" for label in map(str.strip, grouping.split(",")) if label not in labels
        ]
    return found


@pytest.mark.parametrize("exposition", [gateway_exposition, node_exposition])
def test_counters_have_no_series_of_when_they_were_made(exposition: Callable[[], bytes]) -> None:
    prometheus_client.enable_created_metrics()  # type: ignore[no-untyped-call]
    assert b"_created" not in exposition()


def test_every_query_uses_existing_metrics_and_labels(existing: Mapping[str, frozenset[str]]) -> None:
    queries = [*dashboard_queries(), *alert_queries()]
    assert len(queries) > 45
    for where, query in queries:
        assert _SELECTOR.search(query), f"{where}: no metric in {query}"
        assert problems(query, existing) == [], f"{where}: {query}"


def test_all_parts_of_a_query_have_the_same_filters() -> None:
    """A quotient of which one half is filtered is a share of nothing."""
    for where, query in dashboard_queries():
        for variable in ("model", "node", "key"):
            is_filtered = {f'{variable}=~"${variable}"' in matchers for _, matchers in _SELECTOR.findall(query)}
            assert len(is_filtered) == 1, f"{where}: only a part of it has ${variable}: {query}"


def test_a_wrong_name_or_label_is_found(existing: Mapping[str, frozenset[str]]) -> None:
    assert problems("rate(cortex_requests_total[5m])", existing) == []
    assert problems("rate(cortex_request_total[5m])", existing) == ["there is no cortex_request_total"]
    assert problems('cortex_node_up{nodes="a"}', existing) == ["cortex_node_up has no label nodes"]
    assert problems("sum by (key) (cortex_node_up)", existing) == ["no label key to group by"]


def test_every_alert_is_read_by_this_test() -> None:
    text = (PROMETHEUS / "alerts.yml").read_text()
    assert [name for name, _ in alert_queries()] == re.findall(r"- alert: (\w+)", text)


def test_variables_and_legends_of_the_dashboard_exist(existing: Mapping[str, frozenset[str]]) -> None:
    board = json.loads(DASHBOARD.read_text())
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    for where, query in dashboard_queries():
        used = set(re.findall(r"\$(\w+)", query)) - {"__rate_interval"}
        assert used <= variables.keys(), where
    for variable in variables.values():
        if variable["type"] == "query":
            name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["definition"]).groups()  # type: ignore[union-attr]
            assert label in existing[name]
    identifiers = [panel["id"] for panel in board["panels"]]
    assert len(identifiers) == len(set(identifiers))
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            named: set[str] = set(OF_PROMETHEUS)
            for name, _ in _SELECTOR.findall(target["expr"]):
                named |= existing[name]
            assert labels <= named, panel["title"]


def promtool(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    return subprocess.run(
        ["promtool", *arguments], capture_output=True, text=True, check=False, timeout=WAIT_S, **options
    )


def test_promtool_accepts_the_rules_and_their_tests_pass() -> None:
    checked = promtool("check", "rules", str(PROMETHEUS / "alerts.yml"))
    assert checked.returncode == 0, checked.stderr
    tested = promtool("test", "rules", str(PROMETHEUS / "alerts_test.yml"))
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_promtool_parses_every_query_of_the_dashboard(tmp_path: Path) -> None:
    rules = []
    for number, (_, query) in enumerate(dashboard_queries()):
        for variable, value in VARIABLES.items():
            query = query.replace(variable, value)
        rules.append({"record": f"dashboard:query:{number}", "expr": query})
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))  # JSON is YAML
    checked = promtool("check", "rules", str(file))
    assert checked.returncode == 0, checked.stderr
