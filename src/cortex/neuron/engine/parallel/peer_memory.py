"""Memory shared by all ranks of a model, on GPUs of one host with access to each other's memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from cortex.neuron.engine.request import RankSpec
from cortex.neuron.kernels.jit import TRITON
from cortex.neuron.kernels.peer_buffer import BUFFER_BYTES, MAX_BYTES, buffer_bytes
from cortex.neuron.kernels.peer_exchange import SUM_DTYPES, peer_gather, peer_sum
from cortex.neuron.layers.configs import Shard
from cortex.neuron.private_api.torch import offer_memory, offered_memory

log = logging.getLogger(__name__)

_PROBLEM = "error: "

Exchange = Callable[[str, str], list[str]]
"""Called with a name and this rank's text; returns the texts of all ranks."""


def may_share(spec: RankSpec, device_kind: str, environment: Mapping[str, str]) -> bool:
    """Whether the ranks try to share memory. NCCL's own switch, for hosts whose links are broken, counts here too."""
    is_allowed = environment.get("NCCL_P2P_DISABLE", "0") == "0"
    has_buffer = buffer_bytes(spec.size, device_kind) > 0
    return TRITON and has_buffer and is_allowed


class PeerMemory:
    """The buffers of all ranks, as mapped in this one. Calls are ordered by the current stream and can be part of a
    CUDA graph. If another rank does not make a call in time, the device fails and this process can no longer use it."""

    num_bytes = BUFFER_BYTES
    """What one rank allocates."""

    def __init__(self, shard: Shard, buffers: Sequence[Tensor]) -> None:
        """`buffers`: [BUFFER_BYTES] uint8 of each rank, zeroed by its owner, at its address in this process."""
        self._shard = shard
        self._buffers = tuple(buffers)
        self.addresses = torch.tensor([each.data_ptr() for each in buffers], device=buffers[shard.rank].device)
        """[ranks] int64: where each buffer begins in this process."""

    @classmethod
    def connect(cls, shard: Shard, device: torch.device, exchange: Exchange) -> PeerMemory | None:
        """Maps the buffers of all ranks; None if any rank cannot."""
        try:
            own = torch.zeros(BUFFER_BYTES, dtype=torch.uint8, device=device)
            torch.cuda.synchronize(device)  # before another rank writes to it
            offer = offer_memory(own)
        except RuntimeError as error:
            offer = f"{_PROBLEM}{error}"
        offers = exchange("offer", offer)
        outcome = next((each for each in offers if each.startswith(_PROBLEM)), "mapped")
        buffers: list[Tensor] = []
        if outcome == "mapped":
            try:
                buffers = [
                    own if rank == shard.rank else offered_memory(each, device) for rank, each in enumerate(offers)
                ]
            except RuntimeError as error:
                outcome = f"{_PROBLEM}{error}"
        problems = [each for each in exchange("mapped", outcome) if each.startswith(_PROBLEM)]
        if problems:
            log.info("messages between the ranks use no peer memory: %s", problems[0].splitlines()[0])
            return None
        return cls(shard, buffers)

    def can_sum(self, part: Tensor) -> bool:
        return part.dtype in SUM_DTYPES and self.can_gather(part)

    def can_gather(self, part: Tensor) -> bool:
        return part.is_cuda and 0 < part.nbytes <= MAX_BYTES

    def sum(self, part: Tensor) -> Tensor:
        """The sum over all ranks; may overwrite `part`."""
        return peer_sum(part.contiguous(), self.addresses, self._shard.rank)

    def gather(self, part: Tensor) -> Tensor:
        """[rows, n] → [rows, ranks · n]"""
        return peer_gather(part.contiguous(), self.addresses, self._shard.rank)
