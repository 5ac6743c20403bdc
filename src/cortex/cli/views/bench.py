"""The result of a measurement, as a small table: speeds, and shares of what the machine could do."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from cortex.cli.output import table
from cortex.wire.node.bench import BenchResult
from cortex.wire.words import duration, plural


def parse_bench(value: Any) -> BenchResult | None:
    return None if value is None else msgspec.convert(value, BenchResult)


def show_bench(out: Console, result: BenchResult) -> None:
    rows = table("  MEASURED", ">SPEED", ">TIME", ">OF THE LIMIT")
    for each in result.streams:
        step = f"{each.streams / each.tokens_per_s * 1e3:.1f} ms a token" if each.tokens_per_s else ""
        rows.add_row(f"  {plural(each.streams, 'stream')}", _rate(each.tokens_per_s), step, _share(each.share))
    if result.prompt_tokens_per_s:
        taken = f"{result.prompt_tokens / result.prompt_tokens_per_s * 1e3:,.0f} ms"
        named = f"  prompt of {result.prompt_tokens:,} tokens"
        rows.add_row(named, _rate(result.prompt_tokens_per_s), taken, _share(result.prompt_share))
    for name, seconds in (("wake", result.wake_s), ("load", result.load_s)):
        if seconds is not None:
            rows.add_row(f"  {name}", "", duration(seconds) if seconds >= 10 else f"{seconds:.2f} s", "")
    out.print(rows)
    if result.bytes_per_s and result.flops:
        limit = f"  the limit, measured: {_scaled(result.bytes_per_s, 'B/s')} read, {_scaled(result.flops, 'FLOP/s')}"
        if result.host_bytes_per_s and result.bus_bytes_per_s:
            limit += f"; host memory {_scaled(result.host_bytes_per_s, 'B/s')}"
            limit += f", copied to the device at {_scaled(result.bus_bytes_per_s, 'B/s')}"
        out.print(Text(limit, style="dim"), soft_wrap=True)
    for note in result.notes:
        out.print(Text(f"  {note}", style="yellow"), soft_wrap=True)


def when_measured(result: BenchResult) -> str:
    return f"measured {datetime.fromtimestamp(result.measured_at):%Y-%m-%d %H:%M} with version {result.version}"


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f} tok/s" if tokens_per_s >= 100 else f"{tokens_per_s:,.1f} tok/s"


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}" if share >= 0.01 else "< 1%"


def _scaled(value: float, unit: str) -> str:
    """`4.21 TB/s`"""
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"
