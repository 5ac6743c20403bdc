"""Serves the requests of one connection, one at a time."""

from __future__ import annotations

import logging
import socket

from cortex.ipc.channel import BlockingChannel
from cortex.neuron.hub_process.protocol import Failed, Fetched, FetchFiles, HubReply, HubRequest, Listed, ListFiles
from cortex.neuron.hub_process.remote_listing import fetch_listing
from cortex.neuron.hub_process.transfer import fetch_files
from cortex.neuron.weights.errors import HubError

log = logging.getLogger(__name__)


def serve(control: socket.socket) -> None:
    """Returns when the other side closes its end."""
    channel: BlockingChannel[HubRequest] = BlockingChannel(control, HubRequest)
    for requests in channel.receive():
        for request in requests:
            channel.send([_reply(request)])


def _reply(request: HubRequest) -> HubReply:
    try:
        match request:
            case ListFiles(endpoint, repository, revision):
                return Listed(fetch_listing(endpoint, repository, revision))
            case FetchFiles():
                fetch_files(request)
                return Fetched()
    except HubError as error:
        return Failed.of(error)
    except Exception as error:
        log.exception("a request to the hub failed unexpectedly")
        return Failed.of(HubError(f"{type(error).__name__}: {error}; see the node's log"))
