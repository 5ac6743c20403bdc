"""The private interfaces of torch that the engine uses, with their fallbacks."""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn

from cortex.neuron.private_api.entries import PrivateEntry, Unusable, require

DispatchMode: Any = object
with contextlib.suppress(ImportError):
    from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode

ShapeRule = Callable[..., Tensor]
_CHECK_TOLERANCE = 0.02
"""Relative to the norm of the expected values, which are computed in float32: bfloat16 and other orders of addition."""


def _operation(namespace: str, name: str, *arguments: str) -> Any:
    """An operation of torch whose arguments, by name, begin with these. Raises Unusable."""
    try:
        found = getattr(getattr(torch.ops, namespace), name).default
    except AttributeError as error:
        raise Unusable(f"this version of torch has no operation {namespace}::{name}") from error
    taken = [argument.name for argument in found._schema.arguments]
    if taken[: len(arguments)] != list(arguments):
        raise Unusable(f"{namespace}::{name} of this version of torch takes other arguments: {', '.join(taken)}")
    return found


def _takes(operation: Any, *names: str) -> None:
    """Raises Unusable unless an operation has these keyword arguments."""
    known = {argument.name for argument in operation._schema.arguments}
    if missing := [name for name in names if name not in known]:
        raise Unusable(f"{operation.name()} of this version of torch does not take {', '.join(missing)}")


def compare(found: Tensor, expected: Tensor) -> None:
    """Raises Unusable for results that are not those of the public function."""
    if found.shape != expected.shape:
        raise Unusable(f"its result has the shape {tuple(found.shape)} instead of {tuple(expected.shape)}")
    error = float((found.float() - expected.float()).norm() / expected.float().norm())
    if not error < _CHECK_TOLERANCE:  # NaN is not either
        raise Unusable(f"its results differ from those of the public function by {error:.3g}")


def noise(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)


# Attention within whole texts that are concatenated


def _probe_flash() -> None:
    lengths = ("cum_seq_q", "cum_seq_k", "max_q", "max_k")
    arguments = ("query", "key", "value", *lengths, "dropout_p", "is_causal", "return_debug_mask")
    _takes(_operation("aten", "_flash_attention_forward", *arguments), "scale", "window_size_left", "window_size_right")


FLASH_ATTENTION = PrivateEntry(
    "torch.ops.aten._flash_attention_forward",
    "embeddings and rerank scores are computed text by text, more slowly",
    _probe_flash,
    kinds=("cuda",),
)


def has_flash_attention(q: Tensor) -> bool:
    """Whether `flash_attention` works on the device of q, which has one of its dtypes."""
    return FLASH_ATTENTION.usable_on((q.device, q.dtype), functools.partial(_check_flash, q.device, q.dtype))


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor | None,
    length: int,
    *,
    scale: float,
    causal: bool,
    window: int | None,
) -> Tensor:
    """q: [tokens, heads, dim], k and v: [tokens, kv heads, dim], offsets: where texts begin, and the end [texts + 1]
    int32, length: of the longest → [tokens, heads, dim]. Its public name has another signature in each version, and
    takes 30 µs longer per call."""
    before = -1 if window is None else window - 1
    out, *_ = torch.ops.aten._flash_attention_forward(
        *(each if each.stride(-1) == 1 else each.contiguous() for each in (q, k, v)),
        offsets,
        offsets,
        length,
        length,
        0.0,  # dropout
        causal,
        False,  # no mask for debugging
        scale=scale,
        window_size_left=before,
        window_size_right=0 if causal else before,
    )
    assert isinstance(out, Tensor)
    return out


def _check_flash(device: torch.device, dtype: torch.dtype) -> None:
    texts, window = (5, 9), 3
    q, k, v = noise(3, sum(texts), 2, 64, device=device, dtype=dtype)
    offsets = torch.tensor([0, texts[0], sum(texts)], dtype=torch.int32, device=device)
    for causal in (True, False):
        expected = []
        for start, count in ((0, texts[0]), texts):
            distance = torch.arange(count)[:, None] - torch.arange(count)
            mask = (distance.abs() < window) & ((distance >= 0) | (not causal))
            query, key, value = (each[start : start + count].float().transpose(0, 1) for each in (q, k, v))
            mixed = F.scaled_dot_product_attention(query, key, value, mask.to(device), scale=0.125)
            expected.append(mixed.transpose(0, 1))
        found = flash_attention(q, k, v, offsets, max(texts), scale=0.125, causal=causal, window=window)
        compare(found, torch.cat(expected))


# A product whose epilogue is an activation


def _probe_gelu() -> None:
    _takes(_operation("aten", "_addmm_activation", "self", "mat1", "mat2"), "use_gelu")
    require(torch, "_addmm_activation")


GELU_EPILOGUE = PrivateEntry(
    "torch._addmm_activation",
    "vision towers apply their activation in a pass of its own",
    _probe_gelu,
    kinds=("cuda",),
)


def gelu_of_product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """gelu(x Wᵀ + b), in its approximation by tanh. x: [rows, in], weight: [out, in], bias: [out] → [rows, out]"""
    if x.is_cuda and GELU_EPILOGUE.usable_on((x.device, x.dtype), functools.partial(_check_gelu, x.device, x.dtype)):
        return _fused_gelu(x, weight, bias)
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def _fused_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch._addmm_activation(bias, x, weight.T, use_gelu=True)


def _check_gelu(device: torch.device, dtype: torch.dtype) -> None:
    x, weight = noise(2, 16, 32, device=device, dtype=dtype)
    bias = noise(16, device=device, dtype=dtype)
    expected = F.gelu(F.linear(x.float(), weight.float(), bias.float()), approximate="tanh")
    compare(_fused_gelu(x, weight, bias), expected)


# What oneDNN multiplies


def _probe_bfloat16() -> None:
    if not isinstance(torch.ops.mkldnn._is_mkldnn_bf16_supported(), bool):
        raise Unusable("it does not return a bool")


ONEDNN_BFLOAT16 = PrivateEntry(
    "torch.ops.mkldnn._is_mkldnn_bf16_supported",
    "torch warns once on processors that do not multiply bfloat16",
    _probe_bfloat16,
    kinds=("cpu",),
    applies=torch.backends.mkldnn.is_available,
)


def onednn_takes_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 on this processor. If that is not known, torch finds out, and warns."""
    return not ONEDNN_BFLOAT16.is_usable or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


# Results of operations on the `meta` device


def _probe_dispatch() -> None:
    if DispatchMode is object:
        raise Unusable("this version of torch has no torch.utils._python_dispatch.TorchDispatchMode")
    require(torch._C, "_dispatch_has_kernel_for_dispatch_key")
    require(torch._C.DispatchKey, "CompositeImplicitAutograd")
    require(torch.ops.aten.mm.default, "_op_dk")


SHAPE_RULES = PrivateEntry(
    "torch.utils._python_dispatch.TorchDispatchMode",
    "kernels are compiled ahead by torch's own rules for shapes, whose import takes seconds",
    _probe_dispatch,
    kinds=("cuda",),
)


def with_shape_rules(rules: Mapping[str, ShapeRule]) -> contextlib.AbstractContextManager[object]:
    """Within it, operations of this thread that make tensors on the `meta` device follow `rules`, by the names of
    operations in aten. Others, and those of other threads, follow torch's rules."""
    return _ShapeMode(rules) if SHAPE_RULES.is_usable else contextlib.nullcontext()


class _ShapeMode(DispatchMode):  # type: ignore[misc]
    def __init__(self, rules: Mapping[str, ShapeRule]) -> None:
        super().__init__()
        self._rules = {operation: rule for name, rule in rules.items() if (operation := _overload(name)) is not None}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what keeps the compiler out of it would import the compiler

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        rule = self._rules.get(func)
        if rule is not None and _is_on_meta(args, kwargs):
            return rule(*args, **kwargs)
        if not _is_composite(func):
            return func(*args, **kwargs)
        with self:  # its parts follow the rules too
            return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


@functools.cache
def _overload(name: str) -> Any:
    """An operation of aten, such as `add.Tensor`; None: this version of torch does not have it."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


@functools.cache
def _is_composite(func: Any) -> bool:
    """Whether an operation consists of others."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), torch._C.DispatchKey.CompositeImplicitAutograd)


def _is_on_meta(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation makes a tensor there."""
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"]).type == "meta"
    given = (each for arg in (*args, *kwargs.values()) for each in (arg if isinstance(arg, (list, tuple)) else (arg,)))
    return any(isinstance(each, Tensor) and each.is_meta for each in given)


# Memory that processes share


PEER_MEMORY = PrivateEntry(
    "torch.UntypedStorage._share_cuda_",
    "the ranks of a divided model exchange all messages through NCCL, with a higher latency",
    lambda: require(torch.UntypedStorage, "_share_cuda_", "_new_shared_cuda"),
    kinds=("cuda",),
)


def offer_memory(buffer: Tensor) -> str:
    """What another process of this host needs to map the memory of `buffer`. Raises RuntimeError."""
    if not PEER_MEMORY.is_usable:
        raise RuntimeError(f"{PEER_MEMORY.name} cannot be used: {PEER_MEMORY.problem}")
    return repr(buffer.untyped_storage()._share_cuda_())


def offered_memory(offer: str, device: torch.device) -> Tensor:
    """The memory of another process: [bytes] uint8. It is mapped for `device`, whatever number the other process gave
    its own: a worker sees no GPU but its own. Raises RuntimeError where the devices cannot reach each other."""
    _, *fields = ast.literal_eval(offer)
    index = torch.cuda.current_device() if device.index is None else device.index
    storage = torch.UntypedStorage._new_shared_cuda(index, *fields)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


# NCCL


def _has_nccl() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_nccl_available()


NCCL_TIMEOUT = PrivateEntry(
    "torch.distributed.ProcessGroupNCCL.Options._timeout",
    "NCCL ends a message that never arrives after its own time-out",
    lambda: require(torch.distributed.ProcessGroupNCCL.Options, "_timeout"),
    kinds=("cuda",),
    applies=_has_nccl,
)


def limit_nccl(options: Any, timeout: timedelta) -> None:
    """Ends messages of a group with these options that take longer."""
    if NCCL_TIMEOUT.is_usable:
        options._timeout = timeout


# Modules


def with_child(module: nn.Module, name: str, child: nn.Module) -> nn.Module:
    """A copy of a module whose child `name` is another one; it shares all others. `copy.copy` shares the table of
    children itself."""
    made = copy.copy(module)
    made.__dict__["_modules"] = {**vars(module)["_modules"], name: child}
    return made


ENTRIES = (
    FLASH_ATTENTION,
    GELU_EPILOGUE,
    ONEDNN_BFLOAT16,
    SHAPE_RULES,
    PEER_MEMORY,
    NCCL_TIMEOUT,
)
