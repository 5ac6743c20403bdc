"""Metrics of several processes as one: the same series, added up."""

from __future__ import annotations

from collections.abc import Iterable


def merged(expositions: Iterable[bytes]) -> bytes:
    """Every series of every exposition, summed. Only for what may be summed: counters and histograms, and gauges
    that one process alone reports."""
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
