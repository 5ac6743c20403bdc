"""The store through which the ranks of one divided model find each other: a file, or a port of the leader.

The store of torch neither encrypts nor authenticates. Its keys have a secret prefix, and its port is open only on the
address of the rendezvous, and only while the leader's worker has the model.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed

from cortex.neuron.engine.errors import LoadCancelled, LoadError
from cortex.neuron.engine.parallel.ports import listening
from cortex.neuron.engine.request import RankSpec, RendezvousAddress

_library: Any = torch.distributed
"""As Any: stores have no or wrong types."""
_PROBE_S = 1.0
_RETRY_S = 0.02


def open_store(spec: RankSpec, poll: Callable[[], None]) -> Any:
    """`poll` is called while the leader does not listen yet. Raises LoadError, LoadCancelled or what `poll` raises."""
    if spec.rendezvous is None:
        return _library.FileStore(str(Path(spec.directory) / "store"), spec.size)
    if spec.rank == 0:
        store = _serve(spec.rendezvous, spec.size)
    else:
        _await_listener(spec.rendezvous, poll)
        try:
            store = _library.TCPStore(
                spec.rendezvous.host, spec.rendezvous.store_port, spec.size, is_master=False, wait_for_workers=False
            )
        except RuntimeError as error:
            raise LoadCancelled(f"the leader of the model ended its load: {error}") from error
    return _library.PrefixStore(spec.rendezvous.secret, store)


def _serve(address: RendezvousAddress, size: int) -> Any:
    try:
        listener = listening(address.host, address.store_port)
        return _library.TCPStore(
            address.host,
            address.store_port,
            size,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    except (OSError, RuntimeError) as error:
        raise LoadError(
            f"no rendezvous of the model's ranks at {address.host}:{address.store_port} ({error}); `peer_address` must "
            "be an address of this host that the other nodes reach"
        ) from error


def _await_listener(address: RendezvousAddress, poll: Callable[[], None]) -> None:
    while True:
        poll()
        try:
            socket.create_connection((address.host, address.store_port), _PROBE_S).close()
        except OSError:
            time.sleep(_RETRY_S)
        else:
            return
