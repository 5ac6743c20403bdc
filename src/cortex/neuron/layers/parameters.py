"""Where a model's tensors live and which tensor of the checkpoint fills each.

Layers allocate through `Parameters` as they are built. On the `meta` device nothing is allocated: that is how a
model is sized before a byte of memory is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Binding:
    """A tensor of the checkpoint and the memory it belongs in."""

    source: str
    destination: Tensor
    """A view into a parameter, of the source's shape (after `transform`)."""
    transform: Callable[[Tensor], Tensor] | None = None
    """Applied to the source before it is copied, where the checkpoint's layout is not ours."""
    parts: tuple[Binding, ...] = ()
    """What fills the same memory where the checkpoint has no `source` but its pieces."""


class Parameters:
    """Allocates a model's tensors on one device and keeps the list of what fills them."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self.bindings: list[Binding] = []
        self.num_bytes = 0

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Memory for a parameter, contents undefined until its bindings are loaded."""
        tensor = torch.empty(shape, device=self.device, dtype=dtype or self.dtype)
        self.num_bytes += tensor.numel() * tensor.element_size()
        return tensor

    def bind(
        self,
        source: str,
        destination: Tensor,
        transform: Callable[[Tensor], Tensor] | None = None,
        *,
        parts: Sequence[Binding] = (),
    ) -> None:
        self.bindings.append(Binding(source, destination, transform, tuple(parts)))

    def bindings_from(self, names: Container[str]) -> list[Binding]:
        """What fills this model from a checkpoint that holds tensors of these names."""
        return [
            chosen
            for binding in self.bindings
            for chosen in (binding.parts if binding.parts and binding.source not in names else (binding,))
        ]

    def load(self, source: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A parameter filled by one tensor of the checkpoint, as it is."""
        tensor = self.empty(*shape, dtype=dtype)
        self.bind(source, tensor)
        return tensor

    def storages(self) -> list[torch.UntypedStorage]:
        """The memory behind all parameters, each piece once however many tensors share it."""
        destinations = [part.destination for binding in self.bindings for part in (binding, *binding.parts)]
        return list({tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in destinations}.values())
