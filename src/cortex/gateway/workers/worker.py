"""A worker process of the gateway: the data path, with admission by the main process."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
from pathlib import Path

import msgspec

from cortex.gateway.config import Config
from cortex.gateway.dispatch.node_client import NodeClient
from cortex.gateway.ledger.keys import Keyring
from cortex.gateway.metrics import Metrics
from cortex.gateway.proxy.disconnected_usage import DisconnectedUsage
from cortex.gateway.proxy.inference import Inference
from cortex.gateway.proxy.listener import api_server
from cortex.gateway.proxy.routes import ROUTES
from cortex.gateway.proxy.services import Services
from cortex.gateway.workers import messages
from cortex.gateway.workers.forward import Forward
from cortex.gateway.workers.messages import ToWorker
from cortex.gateway.workers.remote_admission import RemoteAdmissionController
from cortex.http.server.exchange import Exchange
from cortex.http.ticker import Ticker
from cortex.http.upstream.pool import Pool
from cortex.ipc.channel import LoopChannel
from cortex.telemetry import logs, open_tracer

log = logging.getLogger(__name__)

METRICS_INTERVAL_S = 1.0


def encode_config(config: Config) -> bytes:
    return msgspec.msgpack.encode(config, enc_hook=str)


def decode_config(data: bytes) -> Config:
    return msgspec.msgpack.decode(data, type=Config, dec_hook=lambda kind, value: kind(value))


class Worker:
    """Everything that one worker process owns. Created when the main process has sent the configuration."""

    def __init__(self, setup: messages.Setup, channel: LoopChannel[ToWorker], api_socket: Path) -> None:
        loop = asyncio.get_running_loop()
        config = decode_config(setup.config)
        logs.configure(config.gateway.log_format, config.gateway.log_level)
        self._setup = setup
        self._channel = channel
        self._ticker = Ticker(loop)
        self._nodes: dict[str, NodeClient] = {}
        self._metrics = Metrics(tuple)
        self._tracer = open_tracer(config.telemetry, "cortex")
        self._admission = RemoteAdmissionController(channel.send, config.keys)
        self._services = Services(
            config=config.gateway,
            admission=self._admission,
            nodes=self._nodes,
            metrics=self._metrics,
            tracer=self._tracer,
            ticker=self._ticker,
            disconnected_usage=DisconnectedUsage(),
            clock=loop.time,
        )
        self._inference = Inference(self._services)
        self._main = Pool("http://cortex", self._ticker, unix_socket=api_socket)
        self._server = api_server(self._handle, config, self._ticker, self._metrics, self._admission.authenticate)
        self._join(config)

    async def start(self) -> None:
        await self._server.listen(self._setup.host, self._setup.port, reuse_port=True)
        self._channel.send(messages.Ready())

    def _reconfigure(self, config: Config) -> None:
        """Applies a reloaded configuration; running responses are not affected."""
        self._services.config = config.gateway
        self._admission.keyring = Keyring(config.keys)
        logs.configure(config.gateway.log_format, config.gateway.log_level)
        wanted = {section.name: section for section in config.neurons}
        for name, node in list(self._nodes.items()):
            if wanted.get(name) != node.section:
                del self._nodes[name]
                node.pool.close()
        self._join(config)

    def _join(self, config: Config) -> None:
        for section in config.neurons:
            if section.name not in self._nodes:
                self._nodes[section.name] = NodeClient.of(section, self._ticker, config.gateway, os.environ)

    def send_metrics(self) -> None:
        self._channel.send(messages.MetricsSnapshot(self._metrics.exposition()))

    async def close(self, grace_s: float) -> None:
        self._inference.closing = True
        await self._server.close(grace_s)
        self._main.close()
        await self._services.disconnected_usage.close()
        for node in self._nodes.values():
            node.pool.close()
        self.send_metrics()
        await asyncio.to_thread(self._tracer.close)

    def receive(self, message: ToWorker) -> None:
        match message:
            case messages.Granted():
                self._admission.granted(message)
            case messages.Admitted():
                self._admission.on_admitted(message)
            case messages.Rejected():
                self._admission.rejected(message)
            case messages.Setup():
                self._reconfigure(decode_config(message.config))

    def _handle(self, exchange: Exchange) -> None:
        route = ROUTES.get(exchange.request.path)
        if route is not None and exchange.request.method == b"POST":
            self._inference.begin(exchange, route)
        else:
            Forward(exchange, self._main, self._ticker)


async def run(control: socket.socket, api_socket: Path) -> None:
    """Serves until the main process sends `Close` or its end of `control` closes."""
    setups: list[messages.Setup] = []
    started = asyncio.Event()
    ending: asyncio.Future[float] = asyncio.get_running_loop().create_future()
    worker: Worker | None = None

    def receive(message: ToWorker) -> None:
        if isinstance(message, messages.Close):
            end(message.grace_s)
        elif worker is None:
            assert isinstance(message, messages.Setup)  # nothing was asked yet
            setups.append(message)
            started.set()
        else:
            worker.receive(message)

    def end(grace_s: float) -> None:
        if not ending.done():
            ending.set_result(grace_s)
        started.set()

    def main_process_lost(reason: str) -> None:
        if not ending.done():
            log.error("lost the gateway's main process (%s); this worker ends", reason)
        end(0.0)

    channel: LoopChannel[ToWorker] = LoopChannel(ToWorker, receive, main_process_lost)
    await channel.attach(control)
    await started.wait()
    if not setups:
        return
    worker = Worker(setups[-1], channel, api_socket)
    await worker.start()
    gc.collect()
    gc.freeze()  # as in the main process
    while not ending.done():
        await asyncio.wait({ending}, timeout=METRICS_INTERVAL_S)
        worker.send_metrics()
    await worker.close(ending.result())
    channel.close()
