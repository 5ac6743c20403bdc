"""Adds up the metrics of several processes."""

from __future__ import annotations

from collections.abc import Iterable


def merged(expositions: Iterable[bytes]) -> bytes:
    """One exposition with the sum of every series. Valid for counters, histograms, and gauges that only one process
    reports."""
    headers: dict[str, list[str]] = {}
    families: dict[str, dict[str, float]] = {}
    for exposition in expositions:
        name = ""
        for line in exposition.decode().splitlines():
            if line.startswith("# "):
                name = line.split(" ", 3)[2]
                known = headers.setdefault(name, [])
                if line not in known:
                    known.append(line)
                families.setdefault(name, {})
            elif line:
                series, _, value = line.rpartition(" ")
                sums = families[name]
                sums[series] = sums.get(series, 0.0) + float(value)
    lines = []
    for name, sums in families.items():
        lines += headers[name]
        lines += [f"{series} {value}" for series, value in sums.items()]
    return "\n".join([*lines, ""]).encode()
