"""A sleeping model: weights in host memory, device memory free, and the check that it wakes as the same model."""

from __future__ import annotations

import torch

from cortex.formats.units import gib
from cortex.neuron.engine.errors import DamagedError, InsufficientMemory
from cortex.neuron.engine.loading.loading import LoadedModel
from cortex.neuron.engine.memory.device import device_memory
from cortex.neuron.engine.memory.host_weights import HostWeights
from cortex.neuron.engine.request import LoadSpec


class ModelSleep:
    """Built while the model is awake, then `begin`, `end` and `release`. Belongs to the engine thread."""

    def __init__(self, loaded: LoadedModel, response: tuple[int, ...], *, moves_weights: bool) -> None:
        """`moves_weights`: copies the weights to host memory; on a CPU they are there already and stay.

        `response`: the model's response to the self-test, which must be the same when it wakes. Raises SleepError.
        """
        self._loaded = loaded
        self._response = response
        self._weights = HostWeights(loaded.storages()) if moves_weights else None
        self.host_bytes = self._weights.num_bytes if self._weights is not None else loaded.weight_bytes
        self.host_bytes += 0 if loaded.host is None else loaded.host.num_bytes

    @property
    def moved_bytes(self) -> int:
        """Bytes that are copied to the device when the model wakes."""
        return 0 if self._weights is None else self._weights.num_bytes

    def begin(self) -> None:
        """Frees the device memory. Nothing that holds addresses in it, such as a graph, may exist."""
        self._loaded.memory.release()
        if self._loaded.team is not None:
            self._loaded.team.release()
        if self._weights is not None:
            self._weights.vacate()

    def end(self) -> None:
        """Allocates the device memory again: the same weights, and empty memory for sequences.

        If it raises, it may hold some of the memory: call `begin` to free it. Raises DamagedError, or torch's error if
        memory runs out.
        """
        if self._weights is not None:
            self._weights.restore()
        self._loaded.memory.allocate()

    def release(self) -> None:
        """Frees the host memory: the model is awake, or will be closed."""
        if self._weights is not None:
            self._weights.release()

    def check_room(self, spec: LoadSpec, device: torch.device) -> None:
        """Raises InsufficientMemory if the awake model would leave too little of the device for activations.

        The libraries already hold their part of the reserve that a load keeps free, so half of it must be free.
        """
        memory = device_memory(device, spec.num_host_shares)
        need = self._loaded.memory.num_bytes + self.moved_bytes
        have = memory.free_bytes - spec.min_free_bytes - memory.reserve_bytes // 2
        if need > have:
            raise InsufficientMemory(
                f"the model needs {gib(need)} on {device} to wake up, "
                f"but {gib(max(have, 0))} can be used; unload something"
            )

    def check(self, response: tuple[int, ...]) -> None:
        """Raises DamagedError unless the model responds to the self-test as it did before."""
        if response != self._response:
            raise DamagedError("the model responds differently than before it fell asleep; load it again")
