"""A model asleep: its weights in host memory, its device memory given back, and how to tell that it woke up well."""

from __future__ import annotations

import torch

from cortex.neuron.engine.errors import DamagedError, NoRoomError
from cortex.neuron.engine.loading import LoadedModel
from cortex.neuron.engine.memory.device import device_memory
from cortex.neuron.engine.memory.parked_weights import ParkedWeights
from cortex.neuron.engine.request import LoadSpec


class SleepingModel:
    """Made while the model is awake, then `begin`, `end` and `forget`. Belongs to the engine thread."""

    def __init__(self, loaded: LoadedModel, answer: tuple[int, ...], *, moves_weights: bool) -> None:
        """Copies the weights, unless they are in host memory anyway and stay where they are.

        `answer` is what the model says to the question that it is asked again when it wakes. Raises SleepError.
        """
        self._loaded = loaded
        self._answer = answer
        self._parked = ParkedWeights(loaded.model.storages()) if moves_weights else None
        self.host_bytes = self._parked.num_bytes if self._parked is not None else loaded.weight_bytes

    @property
    def moved_bytes(self) -> int:
        """What has to cross to the device when it wakes."""
        return 0 if self._parked is None else self._parked.num_bytes

    def begin(self) -> None:
        """Lets go of the device memory. Nothing that holds addresses in it, such as a graph, may be left."""
        self._loaded.memory.release()
        if self._parked is not None:
            self._parked.vacate()

    def end(self) -> None:
        """Takes the device memory again: weights as they were, and empty memory for sequences. When it raises, some of
        it may be held: `begin` lets go again. Raises DamagedError, or torch's error where memory does not suffice."""
        if self._parked is not None:
            self._parked.restore()
        self._loaded.memory.allocate()

    def forget(self) -> None:
        """Gives the host memory back; the model is awake, or of no use any more."""
        if self._parked is not None:
            self._parked.release()

    def refuse_without_room(self, spec: LoadSpec, device: torch.device) -> None:
        """Raises NoRoomError where waking would leave too little of the device for activations.

        Of the reserve that a load keeps free, the libraries have taken their part by now: half of it has to be left.
        """
        memory = device_memory(device)
        need = self._loaded.memory.num_bytes + self.moved_bytes
        have = memory.free_bytes - spec.min_free_bytes - memory.reserve_bytes // 2
        if need > have:
            raise NoRoomError(
                f"the model needs {need / 1e9:.2f} GB on {device} to wake up, "
                f"but {max(have, 0) / 1e9:.2f} GB can be used; unload something"
            )

    def check(self, answer: tuple[int, ...]) -> None:
        """Raises DamagedError unless the woken model says what it said before."""
        if answer != self._answer:
            raise DamagedError("the model answers differently than before it fell asleep")
