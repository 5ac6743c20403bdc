"""A worker process: the data path by itself, with the main process's desk."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import shutil
import signal
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
from cortex.ipc.message_channel import MessageChannel
from cortex.telemetry import logs, open_tracer

log = logging.getLogger(__name__)

COUNT_EVERY_S = 1.0
_decoder = msgspec.msgpack.Decoder[ToWorker](ToWorker)


def encode_config(config: Config) -> bytes:
    return msgspec.msgpack.encode(config, enc_hook=str)


def decode_config(data: bytes) -> Config:
    return msgspec.msgpack.decode(data, type=Config, dec_hook=lambda kind, value: kind(value))


class Worker:
    """Everything one worker process owns. Made once the main process has told it the configuration."""

    def __init__(self, setup: messages.Setup, channel: MessageChannel[ToWorker], api_socket: Path) -> None:
        loop = asyncio.get_running_loop()
        config = decode_config(setup.config)
        logs.configure(config.gateway.log_format, config.gateway.log_level)
        self._setup = setup
        self._channel = channel
        self._ticker = Ticker(loop)
        self._nodes: dict[str, NodeClient] = {}
        self._metrics = Metrics(tuple)
        self._tracer = open_tracer(config.telemetry, "cortex")
        self.admission = RemoteAdmissionController(channel.send, config.keys)
        self._services = Services(
            config=config.gateway,
            admission=self.admission,
            nodes=self._nodes,
            metrics=self._metrics,
            tracer=self._tracer,
            ticker=self._ticker,
            disconnected_usage=DisconnectedUsage(),
            clock=loop.time,
        )
        self._inference = Inference(self._services)
        self._main = Pool("http://cortex", self._ticker, unix_socket=api_socket)
        self._server = api_server(self._handle, config, self._ticker, self._metrics, self.admission.authenticate)
        self._join(config)

    async def start(self) -> None:
        await self._server.listen(self._setup.host, self._setup.port, reuse_port=True)
        self._channel.send(messages.Ready(os.getpid()))

    def reconfigure(self, config: Config) -> None:
        """As in the main process: running answers are untouched."""
        self._services.config = config.gateway
        self.admission.keyring = Keyring(config.keys)
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

    def count(self) -> None:
        """Tell the main process what was counted."""
        self._channel.send(messages.MetricsSnapshot(self._metrics.exposition()))

    async def close(self, grace_s: float) -> None:
        self._inference.closing = True
        await self._server.close(grace_s)
        self._main.close()
        await self._services.disconnected_usage.close()
        for node in self._nodes.values():
            node.pool.close()
        self.count()
        await asyncio.to_thread(self._tracer.close)

    def _handle(self, exchange: Exchange) -> None:
        route = ROUTES.get(exchange.request.path)
        if route is not None and exchange.request.method == b"POST":
            self._inference.begin(exchange, route)
        else:
            Forward(exchange, self._main, self._ticker)


async def run(channel_socket: Path, api_socket: Path) -> None:
    """Serve until the main process says so, or is gone. Its signals are the main process's business."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, lambda: None)
    setups: list[messages.Setup] = []
    told = asyncio.Event()
    ending: asyncio.Future[float] = loop.create_future()
    worker: Worker | None = None

    def receive(message: ToWorker) -> None:
        if isinstance(message, messages.Close):
            if not ending.done():
                ending.set_result(message.grace_s)
        elif isinstance(message, messages.Setup):
            setups.append(message)
            told.set()
            if worker is not None:
                worker.reconfigure(decode_config(message.config))
        elif worker is not None:
            match message:
                case messages.Granted():
                    worker.admission.granted(message)
                case messages.Admitted():
                    worker.admission.on_admitted(message)
                case messages.Rejected():
                    worker.admission.rejected(message)

    def lost() -> None:
        told.set()
        if not ending.done():
            log.error("the gateway's main process is gone; this worker ends")
            ending.set_result(0.0)

    channel: MessageChannel[ToWorker] = MessageChannel(_decoder, receive, lost=lost)
    await loop.create_unix_connection(lambda: channel, str(channel_socket))
    await told.wait()
    if not setups:
        return
    worker = Worker(setups[-1], channel, api_socket)
    await worker.start()
    gc.collect()
    gc.freeze()  # as in the main process
    while not ending.done():
        await asyncio.wait({ending}, timeout=COUNT_EVERY_S)
        worker.count()
    await worker.close(ending.result())
    if channel.is_lost:
        shutil.rmtree(channel_socket.parent, ignore_errors=True)  # nobody else is left to do it
    channel.close()
