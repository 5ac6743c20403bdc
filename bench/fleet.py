"""A large fleet without hardware: simulated nodes drive the gateway's real dispatcher in one process.

    python bench/fleet.py                        # what one event costs with 10, 50, 200 and 500 nodes
    python bench/fleet.py gateways postgresql://…  # the CPU time of one and of four gateways on one database
    python bench/fleet.py drive --nodes 500      # a skewed mix of requests with failures and cold loads, simulated time
    python bench/fleet.py swaps                  # clients that need several models, of which one fits, simulated time

A node lists 20 models and has two of them ready; every model is in the catalogue. `report`: one poll result is taken
over. `warm request`: resolve the name, take a lease and release it, with a report after every 20 requests. `cold
request`: a request for a model that no node has ready, until its load is ordered. `tick`: the work of every second.
Times are CPU time of the one thread, so that other programs on the machine matter little.
"""

from __future__ import annotations

import argparse
import gc
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial

from fleet_simulation.drive import Drive
from fleet_simulation.nodes import SimulatedFleet
from fleet_simulation.swaps import compare

SIZES = ((10, 50), (50, 300), (200, 1000), (500, 3000))
REPORTS_PER_REQUEST = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command")
    costs = commands.add_parser("costs", help="what one event costs (default)")
    drive = commands.add_parser("drive", help="requests, failures and cold loads in simulated time")
    for each in (costs, drive):
        each.add_argument("--seed", type=int, default=1)
    drive.add_argument("--nodes", type=int, default=500)
    drive.add_argument("--models", type=int, default=3000)
    drive.add_argument("--per-second", type=int, default=20_000)
    drive.add_argument("--seconds", type=int, default=60)
    drive.add_argument("--cold-per-second", type=float, default=5.0, help="requests for any model, in addition")
    drive.add_argument("--skew", type=float, default=1.1, help="exponent of the popularity of models (Zipf)")
    commands.add_parser("swaps", help="what clients lose by swaps of models that do not fit together")
    gateways = commands.add_parser("gateways", help="several gateways on one PostgreSQL")
    gateways.add_argument("database", help="postgresql://…")
    gateways.add_argument("--counts", type=int, nargs="+", default=[1, 4])
    gateways.add_argument("--requests", type=int, default=4000)
    arguments = parser.parse_args()
    gc.collect()
    gc.freeze()  # as the gateway does
    if arguments.command == "drive":
        fleet = SimulatedFleet(arguments.nodes, arguments.models, arguments.seed)
        rates = (arguments.per_second, arguments.cold_per_second)
        Drive(fleet, *rates, arguments.seconds, arguments.skew, arguments.seed).run()
    elif arguments.command == "swaps":
        compare()
    elif arguments.command == "gateways":
        from fleet_simulation.gateways import measure

        measure(arguments.database, arguments.counts, arguments.requests)
    else:
        _costs(getattr(arguments, "seed", 1))


def _costs(seed: int) -> None:
    print("| nodes, models | report of one node | warm request p50 / p99 | cold request | tick | memory |")
    print("|---|---|---|---|---|---|")
    for num_nodes, num_models in SIZES:
        fleet = SimulatedFleet(num_nodes, num_models, seed)
        report = statistics.median(_reports(fleet, 100))
        warm = sorted(_warm_requests(fleet, 4000))
        p50, p99 = warm[len(warm) // 2], warm[len(warm) * 99 // 100]
        cold = statistics.median(_cold_requests(fleet, 20))
        tick = statistics.median(_ticks(fleet, 10))
        mebibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"| {num_nodes}, {num_models:,} | {report * 1e3:.2f} ms | {p50 * 1e6:.1f} / {p99 * 1e6:.0f} µs "
            f"| {cold * 1e3:.2f} ms | {tick * 1e3:.2f} ms | {mebibytes:.0f} MB |",
            flush=True,
        )


def _timed(work: Callable[[], object]) -> float:
    begun = time.thread_time()
    work()
    return time.thread_time() - begun


def _reports(fleet: SimulatedFleet, count: int) -> list[float]:
    found = []
    for _ in range(count):
        fleet.now += 1.0 / len(fleet.names)
        node = fleet.random.choice(fleet.names)
        report = fleet.report(node)
        found.append(_timed(partial(fleet.dispatcher.observed, node, *report)))
    return found


def _warm_requests(fleet: SimulatedFleet, count: int) -> list[float]:
    found: list[float] = []
    ready = fleet.ready_models()
    for number in range(count):
        if number % REPORTS_PER_REQUEST == 0:
            _reports(fleet, 1)
        model = fleet.random.choice(ready)
        found.append(_timed(partial(fleet.warm, model)))
    return found


def _cold_requests(fleet: SimulatedFleet, count: int) -> list[float]:
    found = []
    for model in fleet.random.sample(fleet.cold_models(), count):
        fleet.now += 30.0
        for name in fleet.names:  # every node reports between two cold requests
            fleet.dispatcher.observed(name, *fleet.report(name))
        found.append(_timed(partial(fleet.request, model)))
        fleet.settle()
    return found


def _ticks(fleet: SimulatedFleet, count: int) -> list[float]:
    found = []
    for _ in range(count):
        fleet.now += 1.0
        for _ in range(100):
            fleet.warm(fleet.random.choice(fleet.ready_models()))
        found.append(_timed(fleet.dispatcher.tick))
    return found


if __name__ == "__main__":
    main()
