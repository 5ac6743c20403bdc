"""Fixtures and hooks for every test: GPU tests are skipped without a GPU, and the user's settings are removed.

The hooks also decide which tests share a process, and report slow tests.
"""

from __future__ import annotations

import gc
import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

if TYPE_CHECKING:
    from .certificates import Authority
    from .telemetry.otlp_collector import Collector

BUDGET_S = 20.0
"""Time limit of one phase of a test on a machine with two slow cores. Slower tests are reported at the end."""

SHARED_UP = "tests/e2e"
"""The tests of the files right in this folder share one `cortex up`."""

hypothesis.settings.register_profile(
    "no deadline",
    deadline=None,  # examples are slow on a busy machine
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("no deadline")

# torch reads both when it is imported, here and in the programs that tests start.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the workers have it
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a process per core: more threads would wait for each other


@pytest.fixture(autouse=True, scope="session")
def _plain_environment() -> None:
    """Remove settings of the shell from the environment of the tests."""
    for name in list(os.environ):
        if name.startswith(("CORTEX_", "NEURON_")) and name != "CORTEX_CACHE":
            del os.environ[name]


@pytest.fixture
def collector() -> Iterator[Collector]:
    """A running collector of traces."""
    from .telemetry.otlp_collector import Collector  # only its tests need the telemetry packages

    with Collector() as listening:
        yield listening


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """A certificate authority."""
    from .certificates import Authority

    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make certificates")
    return Authority.create(tmp_path_factory.mktemp("authority"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests, and skip `gpu` tests without a CUDA device.

    One process runs the fast tests first. Several processes begin with `e2e`, whose files take longest.
    """
    is_parallel = hasattr(config, "workerinput")
    items.sort(key=lambda item: (item.get_closest_marker("e2e") is None) == is_parallel)
    if is_parallel:
        items.sort(key=lambda item: _scope(item.nodeid) != SHARED_UP)
    if not Path("/dev/nvidiactl").exists():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device; none on this machine"))


def pytest_collection_finish() -> None:
    """Exclude the objects of imported modules from garbage collection: they live until the end."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Extension modules report objects as leaked that are still frozen at exit."""
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """A process per core, and one more where tests wait for programs that they started."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    return len(os.sched_getaffinity(0)) + bool(config.getoption("dist") == "loadfile")


def _scope(nodeid: str) -> str:
    """Tests of the same scope run in the same process."""
    file = nodeid.partition("::")[0]
    return SHARED_UP if file.rpartition("/")[0] == SHARED_UP else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run the tests of a file in one process, and so all that share a `cortex up`."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class SharedPrograms(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _scope(nodeid)

    config.option.loadscopereorder = False  # keep the order of the collection
    return SharedPrograms(config, log)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """List the slow tests. They do not fail, because the machine may be slow."""
    reports = [
        each for each in itertools.chain(*terminalreporter.stats.values()) if isinstance(each, pytest.TestReport)
    ]
    slow = sorted((each for each in reports if each.duration > BUDGET_S), key=lambda each: -each.duration)
    if slow:
        terminalreporter.section(f"slower than {BUDGET_S:g} s", yellow=True)
        for report in sorted(slow, key=lambda each: -each.duration):
            terminalreporter.write_line(f"{report.duration:7.1f} s {report.when:<8} {report.nodeid}")
