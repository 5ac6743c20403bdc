"""Benchmarks each GPU kernel alone, with its lower bound and torch's libraries for the same work.

    PYTHONPATH=src python bench/kernels.py
    PYTHONPATH=src python bench/kernels.py prompts mixtures --json out.json

A time is that of one call in a captured chain of calls, in the fastest of its replays. The chain uses enough distinct
buffers that none is still in the L2 cache when it is read again. The floor is the time for the bytes that must be read,
or the operations that must be computed, at the limits measured in the same run. Sizes are those of Qwen3-8B, of
Qwen3-30B-A3B for mixtures, of Qwen3-Next for gated delta nets, of GLM-4.7-Flash for latent attention, and of
Nemotron-H-8B for Mamba-2.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cortex.neuron.engine.memory.device_limits import best_device_s
from cortex.neuron.kernels.attention.decode import decode_attention
from cortex.neuron.kernels.attention.prefill import prefill_attention
from cortex.neuron.kernels.attention.rules import AttentionRules
from cortex.neuron.kernels.batch import PREFILL_TILE, Batch, PrefillRow
from cortex.neuron.kernels.delta.gated_delta import gated_delta
from cortex.neuron.kernels.delta.rules import DeltaRules, DeltaState
from cortex.neuron.kernels.dense.matrix import DenseMatrix
from cortex.neuron.kernels.latent.attention import latent_attention
from cortex.neuron.kernels.latent.rules import LatentRules
from cortex.neuron.kernels.mamba.rules import MambaRules, MambaState
from cortex.neuron.kernels.mamba.scan import mamba
from cortex.neuron.kernels.matrix import BARE, PLAIN, Epilogue, Prologue
from cortex.neuron.kernels.moe.experts import Experts
from cortex.neuron.kernels.moe.mixture import mixture
from cortex.neuron.kernels.moe.routing import choose_reference
from engine import matrix_limit, read_limit

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
COLD_BYTES = 256 << 20
"""Larger than the L2 cache of any GPU."""
HIDDEN, FFN, VOCAB, HEADS, KV_HEADS, DIM = 4096, 12288, 151936, 32, 8, 128
PAGE, CONTEXT, EPS = 32, 40960, 1e-6


@dataclass(frozen=True, slots=True)
class Row:
    kernel: str
    size: str
    us: float
    floor_us: float
    library_us: float | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    bytes_per_s: float
    flops_per_s: float

    def floor_us(self, read_bytes: float, flops: float) -> float:
        return max(read_bytes / self.bytes_per_s, flops / self.flops_per_s) * 1e6


def chain_us(calls: Sequence[Callable[[], object]]) -> float:
    """Microseconds per call, when all calls are captured in one graph."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for call in calls:  # compiles the kernels, and lets the libraries allocate their workspaces
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return best_device_s(graph.replay) * 1e6 / len(calls)


def copies(read_bytes: float) -> int:
    """The number of buffers in a chain, so that each is cold when it is read."""
    return max(2, min(24, int(COLD_BYTES / read_bytes) + 1))


def normal(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype).mul_(float(shape[-1]) ** -0.5)


def attention_rules() -> AttentionRules:
    return AttentionRules(DIM**-0.5, normal(CONTEXT, DIM, dtype=torch.float32), normal(DIM), normal(DIM), EPS)


def decode_batch(rows: int, length: int, table: Tensor, longest: int | None = None) -> Batch:
    """One token for each row, after `length - 1` others, or after `longest - 1` in the last row."""
    index = torch.arange(rows, device=DEVICE)
    lengths = torch.full((rows,), length, dtype=torch.int32, device=DEVICE)
    lengths[-1] = longest or length
    newest = (lengths - 1).long()
    return Batch(
        tokens=index,
        positions=newest,
        slots=table[index, newest // PAGE].long() * PAGE + newest % PAGE,
        rows=index,
        lengths=lengths,
        page_table=table,
        num_decodes=rows,
        max_length=CONTEXT,
    )


def prompt_batch(start: int, count: int, table: Tensor) -> Batch:
    """`count` tokens of one prompt, from position `start` on."""
    tiles = [(0, first) for first in range(0, count, PREFILL_TILE)][::-1]
    return Batch(
        tokens=torch.empty(0),
        positions=torch.arange(start, start + count, device=DEVICE),
        slots=torch.empty(0),
        rows=torch.zeros(1, dtype=torch.int64, device=DEVICE),
        lengths=torch.tensor([start + count], dtype=torch.int32, device=DEVICE),
        page_table=table,
        num_decodes=0,
        max_length=start + count,
        prefills=(PrefillRow(0, start, count, 0),),
        prefill_offsets=torch.tensor([0, count], dtype=torch.int32, device=DEVICE),
        prefill_tiles=torch.tensor(tiles, dtype=torch.int32, device=DEVICE),
        prefill_cuts=torch.zeros((1, 2), dtype=torch.int32, device=DEVICE),
    )


def page_table(rows: int, length: int) -> Tensor:
    """Pages for `rows` rows of `length` tokens, in random order. Page 0 is unused."""
    pages = -(-length // PAGE)
    return torch.randperm(rows * pages, device=DEVICE).reshape(rows, pages).to(torch.int32) + 1


def matrices(limits: Limits) -> Iterator[Row]:
    """The products of a decode step, with the norm, gate or addition that is fused into them."""
    shapes = {
        "q/k/v": (HIDDEN, (HEADS + 2 * KV_HEADS) * DIM),
        "output": (HEADS * DIM, HIDDEN),
        "gate, up": (HIDDEN, 2 * FFN),
        "down": (FFN, HIDDEN),
        "head": (HIDDEN, VOCAB),
    }
    gain = normal(HIDDEN)
    for name, (inputs, outputs) in shapes.items():
        read = 2 * inputs * outputs
        weights = [normal(outputs, inputs) for _ in range(copies(read))]
        for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            x = normal(rows, inputs)
            library = chain_us([partial(F.linear, x, weight) for weight in weights])
            ours, prologue, epilogue = library, Prologue(gain, EPS), BARE
            if name == "gate, up":
                epilogue = Epilogue(activation="silu")
            elif outputs == HIDDEN:
                prologue, epilogue = PLAIN, Epilogue(residual=normal(rows, outputs))
            held = [DenseMatrix(each) for each in weights]
            if held[0].fuses(PLAIN, x) or (epilogue.activation is not None and held[0].gates(x)):
                ours = chain_us([partial(each.product, x, prologue, epilogue) for each in held])
            floor = limits.floor_us(read, 2 * rows * inputs * outputs)
            yield Row(f"matrix, {name}", f"{rows} rows", ours, floor, library)


def attention(limits: Limits) -> Iterator[Row]:
    """One new token per row."""
    rules = attention_rules()
    even = [(rows, 640, 640) for rows in (1, 8, 32, 64, 128, 256)]
    for rows, length, longest in (*even, (1, 16384, 16384), (48, 640, 4096), (32, 640, 32768)):
        read = 2 * (rows * length + longest - length) * KV_HEADS * DIM * 2
        table = page_table(rows, longest)
        batch = decode_batch(rows, length, table, longest)
        caches = [normal(2, table.numel() + 1, PAGE, KV_HEADS, DIM) for _ in range(copies(read))]
        q, k, v = normal(rows, HEADS + 2 * KV_HEADS, DIM).split([HEADS, KV_HEADS, KV_HEADS], 1)
        out = torch.empty(rows, HEADS, DIM, device=DEVICE, dtype=DTYPE)
        us = chain_us([partial(decode_attention, q, k, v, rules, batch, keys, values, out) for keys, values in caches])
        size = f"{rows} × {length}" + (f", one {longest}" if longest > length else "")
        yield Row("attention, one token", size, us, limits.floor_us(read, 0))


def prompts(limits: Limits) -> Iterator[Row]:
    """A chunk of one prompt, attending to itself and to all positions before it."""
    rules = attention_rules()
    for start, count in ((0, 512), (0, 2048), (6144, 2048), (0, 8192), (0, 16384)):
        table = page_table(1, start + count)
        keys, values = normal(2, table.numel() + 1, PAGE, KV_HEADS, DIM)
        q = normal(count, HEADS, DIM)
        batch = prompt_batch(start, count, table)
        us = chain_us([partial(prefill_attention, q, rules, batch, keys, values, torch.empty_like(q))] * 2)
        library = None
        if start == 0:
            wide, key, value = (normal(1, heads, count, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                attend = partial(F.scaled_dot_product_attention, wide, key, value, is_causal=True, enable_gqa=True)
                library = chain_us([attend] * 2)
        flops = 4 * HEADS * DIM * count * (start + count / 2)
        yield Row("attention, prompt", f"{count} after {start}", us, limits.floor_us(0, flops), library)


def mixtures(limits: Limits) -> Iterator[Row]:
    """The whole block: norm, routing, experts, sum."""
    hidden, inner, count, top_k = 2048, 768, 128, 8
    layers = [
        Experts(
            normal(count, hidden),
            DenseMatrix(normal(count * 2 * inner, hidden)),
            DenseMatrix(normal(count * hidden, inner)),
            top_k,
            True,
        )
        for _ in range(4)
    ]
    gain = normal(hidden)
    for tokens in (1, 2, 4, 8, 16, 32, 64, 256, 2048, 8192):
        x = normal(tokens, hidden)
        used = [choose_reference(F.linear(x, each.router), each).experts.unique().numel() for each in layers]
        read = sum(used) / len(layers) * 3 * hidden * inner * 2
        us = chain_us([partial(mixture, x, gain, EPS, each) for each in layers])
        yield Row("mixture", f"{tokens} tokens", us, limits.floor_us(read, 6 * tokens * top_k * hidden * inner))


def deltas(limits: Limits) -> Iterator[Row]:
    """A gated delta net between its projections."""
    rules = DeltaRules(
        key_heads=16,
        value_heads=32,
        key_dim=128,
        value_dim=128,
        conv_weight=normal(4, 8192),
        decay_rate=torch.rand(32, device=DEVICE),
        decay_bias=torch.randn(32, device=DEVICE),
        norm_weight=torch.rand(128, device=DEVICE, dtype=DTYPE),
        eps=EPS,
    )
    cells = rules.value_heads * rules.key_dim * rules.value_dim

    def state(rows: int) -> DeltaState:
        memory = normal(rows, rules.value_heads, rules.key_dim, rules.value_dim, dtype=torch.float32)
        return DeltaState(normal(rows, 4, rules.channels), memory)

    for rows in (1, 8, 64, 192):
        moved = 2 * rows * cells * 4  # read and written
        batch = decode_batch(rows, 100, page_table(rows, 100))
        projected = normal(rows, rules.projected_size)
        states = [state(rows) for _ in range(copies(moved))]
        for kind, each_batch in one_token_each(batch).items():
            us = chain_us([partial(gated_delta, projected, rules, each_batch, each) for each in states])
            yield Row(f"delta net, {kind}", f"{rows} rows", us, limits.floor_us(moved, 0))
    for tokens in (2048, 16384):
        moved = tokens * (rules.projected_size + rules.value_size) * 2
        batch = prompt_batch(0, tokens, page_table(1, tokens))
        projected = normal(tokens, rules.projected_size)
        us = chain_us([partial(gated_delta, projected, rules, batch, state(1))] * 2)
        # A token recalls from, corrects and reads the matrix of each head: three products.
        yield Row("delta net, prompt", f"{tokens} tokens", us, limits.floor_us(moved, 6 * tokens * cells))


def mambas(limits: Limits) -> Iterator[Row]:
    """A Mamba-2 layer between its projections, one token of each row."""
    heads, head_dim, groups, state_dim = 128, 64, 8, 128
    inner, channels = heads * head_dim, heads * head_dim + 2 * groups * state_dim
    rate, bias, skip = torch.rand(3, heads, device=DEVICE)
    rules = MambaRules(heads, head_dim, groups, state_dim, normal(4, channels), None, rate, bias, skip)
    for rows in (1, 8, 64, 192):
        moved = 2 * rows * heads * head_dim * state_dim * 4  # read and written
        batch = decode_batch(rows, 100, page_table(rows, 100))
        projected = normal(rows, inner + channels + heads)
        states = [
            MambaState(normal(rows, 4, channels), normal(rows, heads, state_dim, head_dim, dtype=torch.float32))
            for _ in range(copies(moved))
        ]
        for kind, each_batch in one_token_each(batch).items():
            us = chain_us([partial(mamba, projected, rules, each_batch, each) for each in states])
            yield Row(f"Mamba-2, {kind}", f"{rows} rows", us, limits.floor_us(moved, 0))


def one_token_each(batch: Batch) -> dict[str, Batch]:
    """The kernel of ordinary steps, and that of steps which check drafts, for the same tokens."""
    return {"one token": batch, "as drafts": replace(batch, shares_rows=True)}


def latents(limits: Limits) -> Iterator[Row]:
    """Latent attention between its projections, with the products by head."""
    heads, latent, plain, rotated, value = 20, 512, 192, 64, 256

    def rules() -> LatentRules:
        rope, weight = normal(CONTEXT, rotated, dtype=torch.float32), normal(heads, plain + value, latent)
        return LatentRules(0.1, rope, k_scale=normal(latent), eps=EPS, weight=weight, latent=latent, interleaved=True)

    for rows, length in ((1, 640), (1, 16384), (8, 640), (64, 640), (64, 4096)):
        read = rows * length * (latent + rotated) * 2 + heads * (plain + value) * latent * 2
        table = page_table(rows, length)
        batch = decode_batch(rows, length, table)
        q, own = normal(rows, heads, plain + rotated), normal(rows, latent + rotated)
        layers = [(rules(), normal(table.numel() + 1, PAGE, 1, latent + rotated)) for _ in range(copies(read))]
        us = chain_us([partial(latent_attention, q, own, each, batch, pages) for each, pages in layers])
        yield Row("latents, one token", f"{rows} × {length}", us, limits.floor_us(read, 0))
    for start, count in ((0, 2048), (6144, 2048), (0, 8192)):
        table = page_table(1, start + count)
        batch = prompt_batch(start, count, table)
        place = torch.arange(start, start + count, device=DEVICE)
        batch = replace(batch, slots=table[0, place // PAGE].long() * PAGE + place % PAGE)
        q, own = normal(count, heads, plain + rotated), normal(count, latent + rotated)
        pages = normal(table.numel() + 1, PAGE, 1, latent + rotated)
        us = chain_us([partial(latent_attention, q, own, rules(), batch, pages)] * 2)
        flops = 2 * heads * count * ((2 * latent + rotated) * (start + count / 2) + (plain + value) * latent)
        yield Row("latents, prompt", f"{count} after {start}", us, limits.floor_us(0, flops))


SECTIONS = {each.__name__: each for each in (matrices, attention, prompts, latents, mixtures, deltas, mambas)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if unknown := set(arguments.sections) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    if not torch.cuda.is_available():
        parser.exit(1, "kernels.py needs a CUDA device; the kernels' tests run without one: make kernels\n")
    limits = Limits(read_limit(DEVICE), matrix_limit(DEVICE))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"limits: {limits.bytes_per_s / 1e12:.2f} TB/s, {limits.flops_per_s / 1e12:.0f} TFLOP/s")
    print(f"{'':22}{'':16}{'µs':>9}{'floor':>9}{'share':>7}{'library':>9}")
    rows: list[Row] = []
    for name in arguments.sections or SECTIONS:
        torch.cuda.empty_cache()
        with torch.inference_mode():
            for row in SECTIONS[name](limits):
                rows.append(row)
                library = "" if row.library_us is None else f"{row.library_us:9.1f}"
                figures = f"{row.us:9.1f}{row.floor_us:9.1f}{row.floor_us / row.us:7.0%}{library}"
                print(f"{row.kernel:22}{row.size:16}{figures}", flush=True)
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"limits": asdict(limits), "rows": [asdict(row) for row in rows]}, indent=1)
        )


if __name__ == "__main__":
    main()
