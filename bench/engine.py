"""Benchmarks the engine without a server: random weights of a named shape on one GPU, which needs only torch and
triton, or a checkpoint on a GPU or a CPU.

    PYTHONPATH=src python bench/engine.py --model qwen3-8b --scenarios decode-1,prefill-2048 --json out.json
    GOMP_SPINCOUNT=1000 PYTHONPATH=src python bench/engine.py --checkpoint model.gguf --device cpu

Scenarios with drafts (`edit-1`, `prediction-1`, `widths-7`, `mtp-1`, …; speculation.py says what they are) can be named
here too. They have a model of their own.

The daemon sets the same variable for its workers: waiting threads spin only for a short time.

The speed of a decode scenario is (tokens after the first) / (total time − time of the same run with one output token).
The first streams decode while the prompts of the others are computed; these steps count too, with fewer streams.
Bytes per second count what a step must read: weights once, and the KV and states of each row once. Of experts, those
count that the batch selects under uniform routing. The limit is measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.loading.loading import build_model, load_model
from cortex.neuron.engine.memory.device_limits import measure_limits, product_rate, read_rate
from cortex.neuron.engine.request import EngineRequest, LoadSpec, SamplingParams
from cortex.neuron.kernels.layouts import MatrixLayout
from cortex.neuron.kernels.quantised.layout import FP4, INT4, INT8, OrderedLayout
from cortex.neuron.kernels.quantised.matrix import OrderedMatrix
from cortex.neuron.kernels.quantised.recipes import RECIPES, Recipe, recipe_of
from cortex.neuron.layers.parameters import Parameters
from shapes import SHAPES
from workloads import DECODE_PROMPT_TOKENS, DECODED_TOKENS, Prompt, Workloads, table_row, weights_read

SCENARIOS = (
    "decode-1",
    "decode-8",
    "decode-32",
    "decode-64",
    "decode-256",
    "prefill-2048",
    "prefill-8192",
    "prefill-16384",
    "cached-16384",
    "requests-512",
)
CPU_SCENARIOS = ("prefill-512", "decode-1", "decode-4")
DRAFTED = frozenset({"widths", "edit", "hardedit", "prediction", "lookup", "wrong", "mtp", "mtpwidth"})
GREEDY = SamplingParams(temperature=0.0)


class Everything(Mapping[str, MatrixLayout]):
    """Every matrix in the layout that a recipe gives it."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def __getitem__(self, name: str) -> MatrixLayout:
        return self._recipe.layout_of(name)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


class Published(Mapping[str, MatrixLayout]):
    """Matrices with a part of a name in one layout, those with the part `plain` in another, and all others dense."""

    def __init__(self, layout: MatrixLayout, part: str, plain: tuple[str, MatrixLayout] | None = None) -> None:
        self._layout = layout
        self._part = part
        self._plain = plain

    def __getitem__(self, name: str) -> MatrixLayout:
        if self._part not in name:
            raise KeyError(name)
        return self._layout if self._plain is None or self._plain[0] not in name else self._plain[1]

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


PUBLISHED = {
    "mxfp4": Published(FP4, ".experts."),  # as gpt-oss
    "int4": Published(INT4, "_proj"),  # as AWQ and GPTQ
    "int4-act": Published(OrderedLayout(INT4, "random"), "_proj", ("down_proj", INT4)),  # as GPTQ with desc_act
    "int8": Published(INT8, "_proj"),
}


def packing(quant: str | None) -> Mapping[str, MatrixLayout]:
    if quant is None:
        return {}
    if quant in PUBLISHED:
        return PUBLISHED[quant]
    recipe = recipe_of(quant)
    if recipe is None:
        raise SystemExit(f"--quant {quant} is not known; choose one of {', '.join((*RECIPES, *PUBLISHED))}")
    return Everything(recipe)


def random_four_bits(rows: int, inputs: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and minimums of weights in MXFP4, about as large as those of `random_engine`."""
    assert FP4.zero is not None
    codebook = torch.tensor(FP4.codebook, device=device) + FP4.zero
    codes = codebook[torch.randint(0, len(codebook), (rows, inputs), device=device)].to(torch.uint8)
    scales = torch.full((rows, inputs // FP4.group), 2.0 ** round(math.log2(inputs**-0.5 / 5)), device=device)
    return codes, scales, scales * -FP4.zero


def random_engine(shape: str, device: torch.device, spec: LoadSpec, quant: str | None) -> Engine:
    def fill(parameters: Parameters) -> None:
        for packed in parameters.packed_bindings:
            if isinstance(packed.matrix, OrderedMatrix):
                packed.matrix.put_order(packed.first_row, torch.randperm(packed.matrix.inputs, device=device))
            for first in range(0, packed.num_rows, 4096):
                rows, inputs = min(4096, packed.num_rows - first), packed.matrix.inputs
                if quant == "mxfp4":
                    packed.matrix.put_codes(packed.first_row + first, *random_four_bits(rows, inputs, device))
                else:
                    values = torch.randn(rows, inputs, device=device) * inputs**-0.5
                    packed.matrix.put_values(packed.first_row + first, values)
        for binding in parameters.bindings:
            view = binding.destination
            view.normal_(1.0, 0.1) if view.dim() == 1 else view.normal_(0.0, view.shape[-1] ** -0.5)

    return Engine(build_model(SHAPES[shape], spec, device, fill, packing=packing(quant)), spec)


def device_named(name: str) -> torch.device:
    """With an index, as tensors have it."""
    return torch.device("cuda", 0) if name == "cuda" else torch.device(name)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


class Bench:
    def __init__(self, engine: Engine, device: torch.device) -> None:
        self.engine = engine
        self.device = device
        assert engine.info.work is not None
        self.work = engine.info.work
        self.workloads = Workloads(self.run, engine.info.vocab_size)
        self.next_id = 0

    def run(self, prompts: Sequence[Prompt], max_tokens: int) -> float:
        """Seconds from submission to the last token of all of them."""
        synchronise(self.device)
        start = time.perf_counter()
        for prompt in prompts:
            self.next_id += 1
            self.engine.submit(EngineRequest(str(self.next_id), prompt, max_tokens, GREEDY))
        while self.engine.has_work:
            self.engine.step()
        synchronise(self.device)
        return time.perf_counter() - start

    def decode(self, streams: int, limit_bytes_per_s: float) -> dict[str, float]:
        step_s = self.workloads.decode_step_s(streams)
        read = self.work.read_bytes(streams, DECODE_PROMPT_TOKENS + DECODED_TOKENS // 2)
        return {
            "tok/s": streams / step_s,
            "ms": step_s * 1e3,
            "GB/s": read / step_s / 1e9,
            "of limit": read / step_s / limit_bytes_per_s,
        }

    def prefill(self, tokens: int, limit_flops: float) -> dict[str, float]:
        seconds = self.workloads.prefill_s(tokens)
        flops = self.work.prompt_flops(tokens)
        return {
            "tok/s": tokens / seconds,
            "ms": seconds * 1e3,
            "TFLOP/s": flops / seconds / 1e12,
            "of limit": flops / seconds / limit_flops,
        }

    def cached(self, tokens: int) -> dict[str, float]:
        return {"ms": self.workloads.cached_s(tokens) * 1e3}

    def tail(self, tokens: int) -> dict[str, float]:
        return {"ms": self.workloads.tail_s(tokens) * 1e3}

    def requests(self, count: int) -> dict[str, float]:
        return {"tok/s": self.workloads.requests_tokens_per_s(count)}


def read_limit(device: torch.device) -> float:
    """Bytes per second of a large matrix-vector product on a GPU."""
    return read_rate(device, 151936 * 8192 * 2)


def matrix_limit(device: torch.device) -> float:
    """Floating-point operations per second of a large bf16 product on a GPU."""
    return product_rate(device, 8192)


def measure_drafts(arguments: argparse.Namespace, scenarios: Sequence[str]) -> None:
    """The scenarios of speculation.py, on its scripted model."""
    import speculation  # which uses this module

    arguments.speculation = "mtp" if any(scenario.startswith("mtp") for scenario in scenarios) else "lookup"
    arguments.response_tokens = speculation.RESPONSE_TOKENS
    speculation.measure(arguments, scenarios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--checkpoint", type=Path, help="a model directory or GGUF file, instead of random weights")
    parser.add_argument(
        "--quant", help="of random weights: q4, q5, q6 or q8, in any spelling, fp8, mxfp4, int4, int4-act or int8"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--scenarios", help=f"default: {','.join(SCENARIOS)}; on a CPU {','.join(CPU_SCENARIOS)}")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--deterministic", action="store_true", help="tokens that are independent of the batch")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = device_named(arguments.device)
    is_gpu = device.type == "cuda"
    scenarios = arguments.scenarios.split(",") if arguments.scenarios else SCENARIOS if is_gpu else CPU_SCENARIOS
    if drafted := [scenario for scenario in scenarios if scenario.split("-")[0] in DRAFTED]:
        measure_drafts(arguments, drafted)
        scenarios = [scenario for scenario in scenarios if scenario not in drafted]
    if not scenarios:
        return
    if is_gpu:
        torch.cuda.set_device(0)
    limits = measure_limits(device, 4 << 30)
    assert limits is not None, "that much is enough"
    start = time.perf_counter()
    spec = LoadSpec(
        str(arguments.checkpoint or ""),
        max_num_seqs=arguments.max_num_seqs,
        deterministic=arguments.deterministic,
        speculation="off",  # random models repeat themselves: lookup would measure itself (bench/speculation.py does)
    )
    if arguments.checkpoint is not None:
        engine = Engine(load_model(spec, device, lambda *_: None, lambda: False), spec)
    else:
        engine = random_engine(arguments.model, device, spec, arguments.quant)
    synchronise(device)
    built = time.perf_counter()
    engine.compiled(lambda *_: None, lambda: False)
    engine.warm_up()
    warm = time.perf_counter()
    while engine.prepare():
        pass
    name = torch.cuda.get_device_name() if is_gpu else f"CPU, {torch.get_num_threads()} threads"
    model = arguments.checkpoint.name if arguments.checkpoint is not None else arguments.model
    print(f"{name}, torch {torch.__version__}, {model}, {arguments.quant or engine.info.dtype}")
    print(weights_read(engine.info))
    print(f"limits: {limits.bytes_per_s / 1e12:.3f} TB/s, {limits.flops / 1e12:.2f} TFLOP/s")
    print(
        f"built in {built - start:.1f} s, warmed up in {warm - built:.1f} s, "
        f"all graphs {time.perf_counter() - warm:.1f} s later",
        flush=True,
    )
    bench = Bench(engine, device)
    results: dict[str, dict[str, float]] = {}
    for scenario in scenarios:
        kind, size = scenario.split("-")
        results[scenario] = {
            "decode": lambda n: bench.decode(n, limits.bytes_per_s),
            "prefill": lambda n: bench.prefill(n, limits.flops),
            "cached": bench.cached,
            "tail": bench.tail,
            "requests": bench.requests,
        }[kind](int(size))
        print(table_row(scenario, results[scenario]), flush=True)
    engine.check_integrity()
    if arguments.json:
        report = {"model": model, "limits": asdict(limits), "results": results}
        arguments.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
