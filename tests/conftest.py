"""Fixtures and hooks for every test: GPU tests are skipped without a GPU, and the user's settings are removed.

The hooks also decide which tests share a process, and report slow tests.
"""

from __future__ import annotations

import atexit
import gc
import itertools
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import hypothesis.strategies
import pytest

from .forked_run import ForkedRun

if TYPE_CHECKING:
    from .certificates import Authority
    from .telemetry.otlp_collector import Collector

BUDGET_S = 20.0
"""Time limit of one phase of a test on a machine with two slow cores. Slower tests are reported at the end."""

SHARED = ("tests/e2e", "tests/e2e/daemon/shared", "tests/browser")
"""The tests of the files right in these folders share one `cortex up`, one daemon, or one chromium."""

NEURON = "tests/neuron/"
KERNELS = NEURON + "kernels/"
"""Tests of these files share nothing."""

ENGINE_WORKERS = NEURON + "node with the engine"
WITH_ENGINE_WORKERS = {
    f"{NEURON}node/{file}.py"
    for file in (
        *("bench/test_benches", "divided/test_pipeline_parallel", "divided/test_tensor_parallel"),
        *("test_pooling", "test_real_engine"),
    )
}
"""The tests of these files share a fork server that has imported the engine, which takes four seconds."""

_PROPERTIES = hypothesis.settings(
    deadline=None,  # examples are slow on a busy machine
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
# The same examples in every run, so that more of them would only take longer: `make fuzz` explores.
hypothesis.settings.register_profile("suite", _PROPERTIES, derandomize=True, max_examples=20)
hypothesis.settings.register_profile("fuzz", _PROPERTIES, derandomize=False, max_examples=1000, print_blob=True)
hypothesis.settings.load_profile("suite")

# torch reads them when it is imported: the conftest of a folder that is named on the command line imports it before the
# options are parsed. With more threads, the tests' processes would wait for each other, and for ever for the threads of
# the process that they are forked from.
for name, value in (("GOMP_SPINCOUNT", "1000"), ("ONEDNN_JIT_PROFILE", "0"), ("OMP_NUM_THREADS", "1")):
    os.environ.setdefault(name, value)
# Without compiled files, each of the many programs that tests start would compile the sources again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# To ask whether there is a device must not make a context, which does not survive that the processes are forked.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
gc.disable()  # until the tests are collected: little of what is imported is garbage


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--processes",
        type=lambda text: min(3 * len(os.sched_getaffinity(0)), 8) if text == "auto" else int(text),
        default=0,
        metavar="N",
        help="run the tests in N processes, forked after the collection; auto: three per core, at most 8",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("usepdb") or config.getoption("trace"):
        config.option.processes = 0  # a debugger needs the terminal
    if num_processes := config.getoption("processes"):
        config.pluginmanager.register(ForkedRun(num_processes, _group, owners=SHARED))


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


@pytest.fixture
def restored_logging() -> Iterator[None]:
    """For tests that configure or hold the log of their own process, which other tests share."""
    root, ours = logging.getLogger(), logging.getLogger("cortex")
    before = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """A certificate authority."""
    from .certificates import Authority

    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make certificates")
    return Authority.create(tmp_path_factory.mktemp("authority"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests, and skip `gpu` tests without a CUDA device.

    One process runs the fast tests first. Several begin at both ends, and end with short files: no core idles for long.
    """
    items.sort(key=lambda item: item.get_closest_marker("ends_shared") is not None)
    if config.getoption("processes"):
        items.sort(key=_place)
    else:
        items.sort(key=lambda item: item.get_closest_marker("e2e") is not None)
    if not Path("/dev/nvidiactl").exists():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device; none on this machine"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude the objects of imported modules from garbage collection: they live until the end.

    Let torch's loggers propagate, too: pytest adds a handler to each that does not, six times in every test. And let
    hypothesis read its tables of characters before the processes are forked: in a fresh checkout it computes them.
    """
    if any(item.get_closest_marker("hypothesis") for item in session.items):
        hypothesis.strategies.text().validate()
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # extension modules report objects as leaked that are still frozen at exit


def _place(item: pytest.Item) -> int:
    """Where a test is in the queue: first the longest groups and programs, last the engine, and short files between.

    Half of the processes begin at the end, so the workers that a group shares are there."""
    group = _group(item.nodeid)
    if group in SHARED:
        return SHARED.index(group)
    if item.get_closest_marker("e2e"):
        return len(SHARED)
    if group == ENGINE_WORKERS:
        return len(SHARED) + 3
    return len(SHARED) + (2 if item.nodeid.startswith(NEURON) else 1)


def _group(nodeid: str) -> str:
    """Tests of the same group run in the same process."""
    file = nodeid.partition("::")[0]
    if file.startswith(KERNELS):
        return nodeid.partition("[")[0]
    if file in WITH_ENGINE_WORKERS:
        return ENGINE_WORKERS
    folder = file.rpartition("/")[0]
    return folder if folder in SHARED else file


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """List the slow tests. They do not fail, because the machine may be slow."""
    reports = [
        each for each in itertools.chain(*terminalreporter.stats.values()) if isinstance(each, pytest.TestReport)
    ]
    slow = sorted((each for each in reports if each.duration > BUDGET_S), key=lambda each: -each.duration)
    if slow:
        terminalreporter.section(f"slower than {BUDGET_S:g} s", yellow=True)
        for report in slow:
            terminalreporter.write_line(f"{report.duration:7.1f} s {report.when:<8} {report.nodeid}")
