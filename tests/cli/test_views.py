"""Output for people: sizes, bars, states and progress."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from cortex.cli.commands.status import render
from cortex.cli.fleet_view import DeviceView, FleetView, HeldModel, NodeView
from cortex.cli.output import PlainConsole, bar, console, size, table
from cortex.cli.views import ProgressView, describe, show_status
from cortex.wire.node.protocol import ModelLoad, ModelState, ModelStatus, Progress
from cortex.wire.words import duration, plural


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (2048, "2 KiB"), (98 << 20, "98 MiB"), (25_275_125_760, "23.5 GiB"), (150 << 30, "150 GiB")],
)
def test_size_has_a_readable_unit(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (3, "3 s"),
        (0.2, "1 s"),
        (119, "119 s"),
        (150, "2 min 30 s"),
        (599.1, "10 min"),
        (3600 * 24, "24 h"),
        (3600 * 3 - 0.5, "3 h"),
        (3600 * 3 + 1, "3 h 1 min"),
        (86400 * 3, "3 d"),
        (86400 * 3 + 60, "3 d 1 h"),
        (math.inf, "∞ s"),
    ],
)
def test_duration_has_a_readable_unit_and_is_never_too_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("is_terminal", "shown"), [(True, "a]0;b[bold]c[2J"), (False, "a\x1b]0;b[bold]c\x9b[2J")])
@pytest.mark.parametrize("in_table", [True, False])
def test_text_of_others_cannot_command_the_terminal(in_table: bool, is_terminal: bool, shown: str) -> None:
    hostile, rows, out = "a\x1b]0;b[bold]c\x9b[2J", table("MODEL"), io.StringIO()
    rows.add_row(hostile)
    PlainConsole(file=out, force_terminal=is_terminal, width=60, color_system=None).print(rows if in_table else hostile)
    assert out.getvalue().splitlines()[-1].strip() == shown


@pytest.mark.parametrize("fraction", [-1.0, 0.0, 0.01, 0.5, 0.999, 1.0, 7.0])
def test_bar_always_has_its_width(fraction: float) -> None:
    assert len(bar(fraction, width=12).plain) == 12


def loading(done: int) -> ModelStatus:
    progress = Progress(stage="read", done_bytes=done, total_bytes=100, eta_s=3.2)
    return ModelStatus(id="m", state=ModelState.LOADING, progress=progress)


def test_describes_state_and_progress() -> None:
    assert describe(loading(42)) == "loading: read 42%, 4 s left"
    waits = Progress(stage="resolve", waits_for="waits for the load of n on device 0")
    assert describe(ModelStatus(id="m", state=ModelState.LOADING, progress=waits)) == f"loading: {waits.waits_for}"
    assert describe(ModelStatus(id="m", state=ModelState.READY)) == "ready"
    replicated = ModelStatus(id="m", state=ModelState.READY, replica_devices=((0, 1), (2, 3)))
    assert describe(replicated) == "ready: 2 replicas on devices 0+1, 2+3"


def test_model_asleep_is_shown_with_its_host_memory() -> None:
    asleep = HeldModel(id="m", state=ModelState.ASLEEP, devices=(0,), measured_bytes=24 << 30, host_bytes=15 << 30)
    node = NodeView(name="beast", kind="neuron", up=True, models=(asleep,))
    out = io.StringIO()
    Console(file=out, width=120).print(render(FleetView(version="1", nodes=(node,))))
    shown = out.getvalue()
    assert "asleep" in shown
    assert "15.0 GiB in RAM" in shown
    assert "24" not in shown


def test_ceilings_of_node_and_device_are_shown() -> None:
    card = DeviceView(index=0, name="card", total_bytes=24 << 30, free_bytes=20 << 30, ceiling_bytes=12 << 30)
    node = NodeView(name="beast", kind="neuron", up=True, ceiling_bytes=20 << 30, devices=(card,))
    out = io.StringIO()
    Console(file=out, width=120).print(render(FleetView(version="1", nodes=(node,))))
    assert "models take at most 12.0 GiB" in out.getvalue()
    assert "models take at most 20.0 GiB of this node" in out.getvalue()


def test_requests_of_a_node_that_is_down_are_not_shown() -> None:
    """They are those of its last report."""
    lost = HeldModel(id="m", state=ModelState.UNREACHABLE, load=ModelLoad(running=3, tokens_per_s=77.0))
    node = NodeView(name="beast", kind="neuron", up=False, problem="connection refused", models=(lost,))
    out = io.StringIO()
    Console(file=out, width=120).print(render(FleetView(version="1", nodes=(node,))))
    assert "running" not in out.getvalue()
    assert "77" not in out.getvalue()


def test_prints_one_line_per_step_without_a_terminal() -> None:
    out = io.StringIO()
    with ProgressView(Console(file=out), ["m"]) as view:
        for done in (1, 2, 3):
            show_status(view, loading(done))
        show_status(view, ModelStatus(id="m", state=ModelState.READY))
        show_status(view, ModelStatus(id="another", state=ModelState.READY))
    assert out.getvalue().splitlines() == ["m: loading (read)", "m: ready"]


def test_piped_table_has_no_trailing_spaces(capsys: pytest.CaptureFixture[str]) -> None:
    rows = table("NAME", "NOTE")
    rows.add_row("a", "a long note")
    rows.add_row("b", "")
    console().print(rows)
    assert capsys.readouterr().out.splitlines() == ["NAME  NOTE", "a     a long note", "b"]


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 nodes"), (1, "1 node"), (2, "2 nodes"), (1200, "1,200 nodes"), (0.5, "0.5 nodes")]
)
def test_count_agrees_with_its_noun(count: float, text: str) -> None:
    assert plural(count, "node") == text
    assert plural(1, "request waits", "requests wait") == "1 request waits"
