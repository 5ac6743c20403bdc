"""The shared memory that the kernels take on a device. They are compiled for the device, not run.

    python bench/kernel_fit.py --capability 8.6

Prints one line for each kernel and model shape. The exit status is 1 when one does not fit. Needs
Triton and a few minutes, no GPU. An A100 is 8.0, an RTX 30 card 8.6, an RTX 40 8.9, an RTX 50 12.0, a H100 or H200 9.0,
a B200 10.0.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from cortex.neuron.kernels import activations as relu_squared_module
from cortex.neuron.kernels import jit
from cortex.neuron.kernels.activations import relu_squared_
from cortex.neuron.kernels.attention.decode import decode_attention
from cortex.neuron.kernels.attention.prefill import prefill_attention
from cortex.neuron.kernels.attention.rules import AttentionRules
from cortex.neuron.kernels.batch import Batch, PrefillRow
from cortex.neuron.kernels.delta.chunks import delta_chunks
from cortex.neuron.kernels.delta.rules import DeltaRules, DeltaState
from cortex.neuron.kernels.delta.step import delta_step
from cortex.neuron.kernels.dense.matrix import DenseMatrix, small_product
from cortex.neuron.kernels.expert_pairs import ExpertChoice, PairLists
from cortex.neuron.kernels.float8 import product as float8_product_module
from cortex.neuron.kernels.float8 import support
from cortex.neuron.kernels.float8.codes import empty_float8_codes
from cortex.neuron.kernels.float8.layout import FLOAT8_BLOCKS, FLOAT8_ROWS, Float8Layout
from cortex.neuron.kernels.float8.one_row import one_row_float8_product
from cortex.neuron.kernels.float8.product import float8_product, widened_product
from cortex.neuron.kernels.float8.rows import float8_rows
from cortex.neuron.kernels.latent.decode import decode_latent_attention
from cortex.neuron.kernels.latent.heads import product_by_head
from cortex.neuron.kernels.latent.inputs import store_latents
from cortex.neuron.kernels.latent.prefill import prefill_latent_attention
from cortex.neuron.kernels.latent.rules import LatentRules
from cortex.neuron.kernels.layouts import DeviceLayout
from cortex.neuron.kernels.mamba import norm as mamba_norm_module
from cortex.neuron.kernels.mamba.chunks import mamba_chunks
from cortex.neuron.kernels.mamba.norm import group_norm
from cortex.neuron.kernels.mamba.rules import MambaRules, MambaState
from cortex.neuron.kernels.mamba.step import mamba_step
from cortex.neuron.kernels.matrix import BARE, PLAIN, Epilogue, ExpertMatrix, Prologue
from cortex.neuron.kernels.products.grouped import expert_load
from cortex.neuron.kernels.quantised.codes import empty_codes, pack_codes, pack_values
from cortex.neuron.kernels.quantised.few_rows import few_rows_product, max_few_rows
from cortex.neuron.kernels.quantised.layout import FP4, IQ4, Q2, Q3, Q4, Q5, Q6, Q8, Layout
from cortex.neuron.kernels.quantised.one_row import long_row_product, one_row_product
from cortex.neuron.kernels.quantised.product import small_batch_product
from cortex.neuron.kernels.recurrent.causal_conv import conv_chunks
from cortex.neuron.kernels.recurrent.short_conv import short_conv_step
from cortex.neuron.kernels.shared_memory import SharedMemory
from cortex.neuron.kernels.storages import empty_device_matrix

SHARED_KB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
FITTED = (
    "attention.decode",
    "attention.prefill",
    "dense.small_batch",
    "dense.experts",
    "dense.matrix",
    "delta.chunks",
    "latent.decode",
    "latent.prefill",
    "mamba.chunks",
    "quantised.product",
    "quantised.experts",
    "float8.product",
    "float8.experts",
)
KIND = torch.bfloat16


class Offline:
    """A Triton driver with a target and no device."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


class Compiler:
    """Replaces a launch: compiles for the target and prints the shared memory that the kernel takes."""

    def __init__(self, limit_bytes: int) -> None:
        self.what = ""
        self.num_too_large = 0
        self._limit_bytes = limit_bytes
        self._run: Any = JITFunction.run

    def __call__(self, kernel: Any, *args: Any, **options: Any) -> None:
        start = time.perf_counter()
        compiled = self._run(kernel, *args, **options | {"grid": (1, 1, 1), "warmup": True})
        shared_bytes = compiled.metadata.shared
        too_large = shared_bytes > self._limit_bytes
        self.num_too_large += too_large
        print(
            f"{self.what:32} {kernel.__name__:20} {shared_bytes / 1024:7.1f} KB  {time.perf_counter() - start:5.1f} s"
            + ("  does not fit" if too_large else ""),
            flush=True,
        )


def empty(*shape: int, kind: torch.dtype = KIND) -> Tensor:
    return torch.empty(shape, dtype=kind)


def some_batch(decodes: int, max_length: int) -> Batch:
    return Batch(
        tokens=empty(0),
        positions=empty(decodes + 128, kind=torch.int64),
        slots=empty(decodes + 128, kind=torch.int64),
        rows=empty(decodes + 1, kind=torch.int64),
        lengths=empty(decodes + 1, kind=torch.int32),
        page_table=empty(4, 4, kind=torch.int32),
        num_decodes=decodes,
        max_length=max_length,
        prefills=(PrefillRow(0, 0, 128, decodes),),
        prefill_offsets=empty(2, kind=torch.int32),
        prefill_tiles=empty(1, 2, kind=torch.int32),
        prefill_cuts=empty(1, 2, kind=torch.int32),
    )


def attention(dim: int, heads: int, kv_heads: int, decodes: int, window: int | None = None) -> None:
    """One row is split over many programs, 64 rows are not."""
    rules = AttentionRules(dim**-0.5, empty(64, dim, kind=torch.float32), empty(dim), empty(dim), 1e-6, window)
    batch = some_batch(decodes, 40_960)
    q, k, v = (empty(decodes + 128, count, dim) for count in (heads, kv_heads, kv_heads))
    keys, values = empty(2, 4, 32, kv_heads, dim)
    if window is None:
        decode_attention(q, k, v, rules, batch, keys, values, q)
    prefill_attention(q[decodes:], rules, batch, keys, values, q[decodes:])


def latent_attention(heads: int, decodes: int) -> None:
    """With the sizes of GLM-4.7-Flash."""
    rope, weight = empty(64, 64, kind=torch.float32), empty(heads, 192 + 256, 512)
    rules = LatentRules(0.1, rope, None, empty(512), 1e-6, None, weight=weight, latent=512, interleaved=True)
    batch, pages = some_batch(decodes, 40_960), empty(4, 32, 1, 576)
    q, query, mixed = (empty(decodes + 128, heads, dim) for dim in (256, 576, 512))
    store_latents(q, empty(decodes + 128, 576), rules, batch, pages, query)
    product_by_head(q[:decodes], rules.key_weight(256).transpose(1, 2), query)
    product_by_head(mixed[:decodes], rules.value_weight(256), q)
    decode_latent_attention(query, rules, batch, pages, mixed)
    prefill_latent_attention(query[decodes:], rules, batch, pages, mixed[decodes:])


GATED = Epilogue(activation="silu")
COUNTERS = torch.zeros(1024, dtype=torch.int32)


def normed(inputs: int) -> Prologue:
    return Prologue(empty(inputs), 1e-6)


def products(inputs: int, outputs: int, rows: int) -> None:
    x, weight, out = empty(rows, inputs), empty(outputs, inputs), empty(rows, outputs)
    small_product(x, weight, COUNTERS, normed(inputs), BARE, out)
    small_product(x, weight, COUNTERS, PLAIN, Epilogue(residual=empty(rows, outputs)), out)


def gated(rows: int) -> None:
    small_product(empty(rows, 4096), empty(24_576, 4096), COUNTERS, normed(4096), GATED, empty(rows, 12_288))


def experts(tokens: int) -> None:
    gate_up, down = empty(1).expand(128 * 1536, 2048), empty(1).expand(128 * 2048, 768)
    mixture(DenseMatrix(gate_up), DenseMatrix(down), tokens)


def mixture(gate_up: ExpertMatrix, down: ExpertMatrix, tokens: int) -> None:
    x, inner, out = empty(tokens, 2048), empty(tokens * 8, 768), empty(tokens * 8, 2048)
    if tokens == 1:
        choice = ExpertChoice(empty(1, 8, kind=torch.int32), empty(1, 8, kind=torch.float32))
        gate_up.expand_rows(x, choice, normed(2048), "silu", inner)
        down.contract_rows(inner, choice, x)
        return
    lists = PairLists(empty(tokens, 8), empty(128, kind=torch.int32), empty(128, tokens, kind=torch.int32))
    load = expert_load(tokens * 8, 128)
    gate_up.grouped(x, lists, inner, pairs_per_row=8, activation="silu", load=load)
    down.grouped(inner, lists, out, pairs_per_row=1, activation=None, load=load)


def packed(layout: Layout, rows: int) -> None:
    codes = empty_codes(layout, 4096, 4096, torch.device("cpu"))
    x, out = empty(rows, 4096), empty(rows, 4096)
    if rows == 1:
        one_row_product(x, codes, out, normed(4096), BARE)
        one_row_product(x, codes, empty(1, 2048), normed(4096), GATED)
        long = empty_codes(layout, 4096, 12288, torch.device("cpu"))
        long_row_product(empty(1, 12288), long, out, Epilogue(residual=out))
    elif rows <= max_few_rows(layout, 4096):
        few_rows_product(x, codes, out, normed(4096), Epilogue(residual=out))
        few_rows_product(x, codes, empty(rows, 2048), normed(4096), GATED)
    else:
        small_batch_product(x, codes, out, Epilogue(residual=out))


def packing(layout: Layout) -> None:
    rows = empty_codes(layout, 64, 4096, torch.device("cpu")).tensors
    scale = empty(64, 4096 // layout.group, kind=torch.float32)
    pack_codes(empty(64, 4096, kind=torch.uint8), scale, scale, layout, *rows)
    for kind in () if layout.codebook else (torch.bfloat16, torch.float16, torch.float32):
        pack_values(empty(64, 4096, kind=kind), layout, *rows)


def float8(layout: Float8Layout, rows: int) -> None:
    """On FP8 tensor cores where the target has them, as the kernels find out by themselves."""
    codes = empty_float8_codes(layout, 4096, 4096, torch.device("cpu"))
    x, out = empty(rows, 4096), empty(rows, 4096)
    if rows == 1:
        one_row_float8_product(x, codes, out, normed(4096), BARE)
        one_row_float8_product(x, codes, empty(1, 2048), normed(4096), GATED)
    elif support.has_float8_products(x.device):
        rounded = float8_rows(x, normed(4096), grouped=layout.block > 0)
        float8_product(rounded, codes, Epilogue(residual=out))
        if not layout.block:
            float8_product(rounded, codes, GATED)
        float8_rows(empty(rows, 8192), Prologue(activation="silu"), grouped=layout.block > 0)
    else:
        widened_product(x, codes, Epilogue(residual=out), out)


def packed_experts(gate_up_layout: DeviceLayout, down_layout: DeviceLayout, tokens: int) -> None:
    device = torch.device("cpu")
    gate_up = empty_device_matrix(gate_up_layout, 128 * 1536, 2048, device)
    mixture(gate_up, empty_device_matrix(down_layout, 128 * 2048, 768, device), tokens)


def gated_delta(dim: int) -> None:
    channels = (2 * 16 + 32) * dim
    decay = empty(32, kind=torch.float32)
    rules = DeltaRules(16, 32, dim, dim, empty(4, channels), decay, decay, empty(dim), 1e-6)
    state = DeltaState(empty(4, 4, channels), empty(4, 32, dim, dim, kind=torch.float32))
    batch = some_batch(1, 40_960)
    projected, out = empty(129, rules.projected_size), empty(129, rules.value_size)
    delta_step(projected, rules, batch, state, out)
    delta_chunks(projected[1:], rules, batch, state, out[1:])


def mamba_2(heads: int, dim: int, groups: int, state_dim: int) -> None:
    """One row, as many as fill the device, and a prompt."""
    channels = heads * dim + 2 * groups * state_dim
    bias, by_head = empty(channels, kind=torch.float32), empty(heads, kind=torch.float32)
    rules = MambaRules(heads, dim, groups, state_dim, empty(4, channels), bias, by_head, by_head, by_head)
    state = MambaState(empty(4, 4, channels), empty(4, heads, state_dim, dim, kind=torch.float32))
    for decodes in (1, 64):
        batch = some_batch(decodes, 40_960)
        projected = empty(decodes + 128, rules.inner + channels + heads)
        out = empty(decodes + 128, rules.inner, kind=torch.float32)
        mamba_step(projected, rules, batch, state, out)
    mamba_chunks(projected[decodes:], rules, batch, state, out[decodes:])
    group_norm(out, empty(rules.inner), rules.inner // groups, 1e-6, KIND)


def short_convolution(channels: int) -> None:
    batch, weight, recent = some_batch(1, 40_960), empty(3, channels), empty(4, 3, channels)
    short_conv_step(empty(129, 3 * channels), weight, batch, recent, empty(129, channels))
    conv_chunks(empty(128, channels), weight, recent, batch, empty(128, channels), activates=False)
    relu_squared_(empty(1, channels))


def cases() -> Iterator[tuple[str, Any]]:
    for dim, heads, kv_heads in ((64, 32, 8), (128, 32, 8), (256, 16, 2), (512, 16, 2)):
        for decodes in (1, 64):
            yield f"attention {dim}, {decodes} rows", lambda s=(dim, heads, kv_heads, decodes): attention(*s)
        yield f"attention {dim}, window", lambda s=(dim, heads, kv_heads, 1, 512): attention(*s)
    for heads in (20, 128):
        for decodes in (1, 64):
            yield f"latents, {heads} heads, {decodes} rows", lambda s=(heads, decodes): latent_attention(*s)
    for inputs, outputs in ((4096, 6144), (12_288, 4096), (4096, 131_072)):
        for rows in (1, 16, 32):
            yield f"{inputs} to {outputs}, {rows} rows", lambda s=(inputs, outputs, rows): products(*s)
    for rows in (16, 32):
        yield f"gated 4096 to 12288, {rows} rows", lambda count=rows: gated(count)
    for tokens in (64, 512, 2048):
        yield f"experts, {tokens} tokens", lambda count=tokens: experts(count)
    for layout in (Q2, Q3, Q4, Q5, Q6, Q8, IQ4, FP4):
        codebook = f" of a codebook to {max(layout.codebook)}" if layout.codebook else ""
        for rows in (1, 16, 64):
            yield f"{layout.bits} bits{codebook}, {rows} rows", lambda s=(layout, rows): packed(*s)
        yield f"packing {layout.bits} bits{codebook}", lambda chosen=layout: packing(chosen)
    for blocks in (FLOAT8_BLOCKS, FLOAT8_ROWS):
        for rows in (1, 16, 64):
            yield f"fp8, scales by {blocks.block or 'row'}, {rows} rows", lambda s=(blocks, rows): float8(*s)
    mixed: tuple[tuple[str, DeviceLayout, DeviceLayout], ...] = (
        ("4 and 6 bits", Q4, Q6),
        ("4 bits of a codebook", IQ4, IQ4),
        ("fp8 in blocks", FLOAT8_BLOCKS, FLOAT8_BLOCKS),
        ("fp8", FLOAT8_ROWS, FLOAT8_ROWS),
    )
    for what, *both in mixed:
        for tokens in (1, 16, 512, 4096):
            yield f"experts of {what}, {tokens} tokens", lambda s=(*both, tokens): packed_experts(*s)
    yield "gated delta net 128", lambda: gated_delta(128)
    for shape in ((64, 64, 8, 128), (128, 64, 1, 128), (128, 64, 1, 256)):
        yield f"Mamba-2 of {shape[0]} heads, state {shape[3]}", lambda s=shape: mamba_2(*s)
    yield "short convolution", lambda: short_convolution(2048)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", default="8.6", help="compute capability (default: 8.6)")
    parser.add_argument("--only", default="", help="part of the names of the shapes to compile")
    options = parser.parse_args()
    capability = round(float(options.capability) * 10)
    if capability not in SHARED_KB:
        parser.error(f"unknown capability; known are {', '.join(f'{known / 10:.1f}' for known in SHARED_KB)}")
    shared = SharedMemory(SHARED_KB[capability] << 10, copies=2 if capability // 10 in (9, 10) else 1)
    compiler = Compiler(shared.num_bytes)
    triton.runtime.driver.set_active(Offline(capability))  # type: ignore[arg-type]  # only the part that compilation needs
    print(f"compute capability {options.capability}: {SHARED_KB[capability]} KB a program, Triton {triton.__version__}")
    with ExitStack() as patches:
        compile_instead = mock.patch.object(JITFunction, "run", lambda *args, **given: compiler(*args, **given))
        patches.enter_context(compile_instead)
        patches.enter_context(mock.patch.object(jit, "overlaps", return_value=capability >= 90))
        for owner in (jit, float8_product_module, mamba_norm_module, relu_squared_module):
            patches.enter_context(mock.patch.object(owner, "has_kernels", return_value=True))
        has_float8 = mock.patch.object(support, "capability_of", return_value=divmod(capability, 10))
        patches.enter_context(has_float8)
        for name in FITTED:
            module = importlib.import_module(f"cortex.neuron.kernels.{name}")
            patches.enter_context(mock.patch.object(module, "shared_memory", return_value=shared))
        for what, compile_all in cases():
            compiler.what = what
            if options.only in what:
                compile_all()
    return int(compiler.num_too_large > 0)


if __name__ == "__main__":
    sys.exit(main())
