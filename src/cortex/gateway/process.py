"""The gateway as a process: started, reloaded when its files change, and ended by a signal."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cortex.gateway.config import Config
from cortex.gateway.configuration_files import ConfigurationFiles
from cortex.gateway.listening import ListeningSockets
from cortex.gateway.server import Gateway
from cortex.settings import Stamp
from cortex.system import open_files
from cortex.system.service_manager import READY, STOPPING, ServiceManager
from cortex.telemetry import logs
from cortex.wire.words import duration

log = logging.getLogger(__name__)

WATCH_FILES_S = 2.0


async def serve(config: Config, path: Path | None = None, *, takes_over: bool = False) -> None:
    """Run a gateway until SIGTERM or SIGINT; reload `path` on SIGHUP and when it changes. `takes_over`: see
    `ListeningSockets`.

    Raises SettingsError, CannotListen or StoreError.
    """
    logs.configure(config.gateway.log_format, config.gateway.log_level)
    open_files.raise_limit()
    sockets = ListeningSockets(os.environ, takes_over=takes_over)
    files = ConfigurationFiles(path, os.environ)
    stamps = files.stamps(config)  # before the rest is read: the start takes seconds, and files may change meanwhile
    gateway = Gateway(config, files.read_catalogue(config), files.directory)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(report_unhandled)
    stop, reload = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, reload.set)
    host, port = await gateway.start(sockets)
    # Objects from imports live as long as the process: exclude them from garbage collection.
    gc.collect()
    gc.freeze()
    scheme = "http" if config.gateway.tls_cert is None else "https"
    log.info("cortex listens on %s://%s:%s, nodes: %d", scheme, host, port, len(gateway.config.neurons))
    manager = ServiceManager()
    manager.notify(READY)
    alive = asyncio.create_task(manager.keep_alive())
    reloader = gateway.tasks.start("reload", lambda: _reload_when_needed(gateway, files, stamps, reload))
    try:
        await stop.wait()
        manager.notify(STOPPING)
        log.info("shutting down: draining responses, up to %s", duration(gateway.config.gateway.drain_s))
    finally:
        reloader.cancel()
        await reloader.ended()
        await gateway.close(gateway.config.gateway.drain_s)
        alive.cancel()


def report_unhandled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log unhandled exceptions, except failed lookups: uvloop continues one whose connection was cancelled."""
    if not isinstance(context.get("exception"), socket.gaierror):
        loop.default_exception_handler(context)


async def _reload_when_needed(
    gateway: Gateway, files: ConfigurationFiles, before: Mapping[Path, Stamp], requested: asyncio.Event
) -> None:
    """`before`: the state of the files when the configuration in force was read."""
    stamps = {**files.stamps(gateway.config), **before}  # the first also has the files of nodes that were discovered
    while True:
        try:
            async with asyncio.timeout(WATCH_FILES_S):
                await requested.wait()
        except TimeoutError:
            pass
        found = files.stamps(gateway.config)
        if requested.is_set() or found != stamps:
            requested.clear()
            stamps = found
            await gateway.reload(files)
