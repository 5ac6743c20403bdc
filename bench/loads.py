"""Times loads of dense and quantised checkpoints, each in a fresh process, from the files to the first token.

    PYTHONPATH=src python bench/loads.py --only gguf,bf16,fp8,q4,q8,q6_k,q5_k --json out.json
    PYTHONPATH=src python bench/loads.py --shape tiny --device cpu

Writes a GGUF file (4 bits, some matrices in 6) and a bfloat16 checkpoint of the shape with random weights, into
`--folder` or a temporary folder, as far as the variants need them. `gguf` and `bf16` are loaded as they are, the other
variants are the checkpoint quantised at load. The files are in the page cache. Each variant runs `--runs` times; the
fastest run is printed, because the first one compiles kernels.

open   files opened, memory for the weights allocated
read   weights read, copied to the device, and quantised or repacked there; GB/s are those of the files. Of this time:
       launch   the loading thread is inside the code that quantises or repacks; `processor` is the time of all threads
       device   from the first to the last operation of every piece that is quantised or repacked, added up
pages  memory for sequences
warm   warm-up
token  a request of one token

On a GPU the memory that the load took beyond the weights is compared with one layer as it is stored: the exit status is
1 when it was more.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.errors import LoadError
from cortex.neuron.engine.request import EngineRequest, LoadSpec, SamplingParams
from cortex.neuron.weights.checkpoint import open_checkpoint
from cortex.neuron.weights.placement import PackedTarget, WeightPiece
from random_checkpoint import write_checkpoint, write_gguf
from shapes import SHAPES
from workloads import table_row

VARIANTS = ("gguf", "bf16", "fp8", "q4", "q8", "q6_k", "q5_k")
AS_STORED = ("gguf", "bf16")
MIB = 1 << 20


class Stopwatch:
    """When each stage of a load began, and the memory that it took."""

    def __init__(self, device: torch.device) -> None:
        self.is_gpu = device.type == "cuda"
        self.began_s: dict[str, float] = {}
        self.processor_s: dict[str, float] = {}
        self.before_bytes = 0
        self.peak_bytes = 0
        self._writes_s = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def mark(self, stage: str, *_: int) -> None:
        """Call it as the progress of a load, too."""
        if stage in self.began_s:
            return
        if self.is_gpu and stage == "read":
            self.before_bytes = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        if self.is_gpu and stage == "place":
            self.peak_bytes = torch.cuda.max_memory_allocated()
        self.began_s[stage], self.processor_s[stage] = time.perf_counter(), time.process_time()

    def timed_write(self, target: PackedTarget, piece: WeightPiece, raw: torch.Tensor) -> None:
        """`PackedTarget.write`, measured."""
        began_s, first = time.perf_counter(), self._event()
        _write(target, piece, raw)
        last = self._event()
        if first is not None and last is not None:
            self._events.append((first, last))
        self._writes_s += time.perf_counter() - began_s

    def _event(self) -> torch.cuda.Event | None:
        if not self.is_gpu:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def figures(self) -> dict[str, float]:
        names = {"resolve": "open s", "read": "read s", "place": "pages s", "warm": "warm s", "token": "token s"}
        ends = [*list(self.began_s.values())[1:], time.perf_counter()]
        spans = {names[stage]: end - self.began_s[stage] for stage, end in zip(self.began_s, ends, strict=True)}
        figures = {**spans, "total s": sum(spans.values()), "launch s": self._writes_s}
        figures["processor s"] = self.processor_s["place"] - self.processor_s["read"]
        if self.is_gpu:
            figures["device s"] = sum(first.elapsed_time(last) for first, last in self._events) / 1e3
            figures["peak MiB"] = self.peak_bytes / MIB
            figures["beyond weights MiB"] = (self.peak_bytes - self.before_bytes) / MIB
        return figures


_write = PackedTarget.write


def measure(path: Path, quant: str | None, device: torch.device) -> dict[str, float]:
    """Loads a model and generates a token, in this process."""
    torch.zeros(1, device=device)  # the context of the device is not part of a load
    watch = Stopwatch(device)
    spec = LoadSpec(str(path), quant=quant)
    with patch.object(PackedTarget, "write", lambda *arguments: watch.timed_write(*arguments)):
        engine = Engine.load(spec, device, watch.mark, lambda: False)
    watch.mark("token")
    engine.submit(EngineRequest("first", (1, 2, 3), 1, SamplingParams(temperature=0.0)))
    while engine.has_work:
        engine.step()
    if watch.is_gpu:
        torch.cuda.synchronize()
    figures = watch.figures()
    checkpoint = open_checkpoint(path)
    tensors = checkpoint.tensors
    checkpoint.close()
    stored = sum(info.num_bytes for info in tensors.values())
    figures |= {
        "GB": stored / 1e9,
        "weights MiB": engine.info.weight_bytes / MIB,
        "GB/s": stored / 1e9 / figures["read s"],
    }
    layer = sum(info.num_bytes for name, info in tensors.items() if name.startswith("model.layers.0."))
    return figures | {"layer MiB": layer / MIB}


def written(variants: list[str], shape: str, folder: Path) -> dict[str, Path]:
    """The model of each variant. What an earlier run did not write is written, and all is in the page cache."""
    dense, gguf = folder / "bf16", folder / "model.gguf"
    began_s = time.perf_counter()
    if set(variants) - {"gguf"} and not (dense / "model.safetensors.index.json").exists():
        write_checkpoint(SHAPES[shape], dense)
    if "gguf" in variants and not gguf.exists():
        write_gguf(SHAPES[shape], gguf)
    for file in folder.rglob("*.*"):
        with file.open("rb", buffering=0) as opened:
            buffer = bytearray(16 * MIB)
            while opened.readinto(buffer):
                pass
    print(f"files written and read in {time.perf_counter() - began_s:.1f} s", flush=True)
    return {variant: gguf if variant == "gguf" else dense for variant in variants}


def measured_apart(variant: str, path: Path, device: str) -> dict[str, Any]:
    """The figures of a fresh process, or `{"rejected": reason}`."""
    command = [sys.executable, __file__, "--device", device, "--only", variant, "--alone", str(path)]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--only", default=",".join(VARIANTS), help="variants, separated by commas")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where to write and keep the files")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--alone", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    variants: list[str] = options.only.split(",")
    if unknown := set(variants) - set(VARIANTS):
        parser.error(f"unknown variants: {', '.join(sorted(unknown))}; choose from {', '.join(VARIANTS)}")
    if options.alone is not None:
        quant = None if variants[0] in AS_STORED else variants[0]
        try:
            print(json.dumps(measure(options.alone, quant, torch.device(options.device))))
        except LoadError as error:
            print(json.dumps({"rejected": str(error)}))
        return 0
    results: dict[str, dict[str, float]] = {}
    is_bounded = True
    with ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loads-bench-")))
        for variant, path in written(variants, options.shape, folder).items():
            runs = [measured_apart(variant, path, options.device) for _ in range(options.runs)]
            if "rejected" in runs[0]:
                print(f"{variant:15} rejected: {runs[0]['rejected']}", flush=True)
                continue
            figures = results[variant] = min(runs, key=lambda run: float(run["total s"]))
            print(table_row(variant, figures), flush=True)
            is_bounded &= figures.get("beyond weights MiB", 0.0) <= figures["layer MiB"]
    if not is_bounded:
        print("a load took more memory beyond the weights than one layer", flush=True)
    if options.json:
        report = {"model": options.shape, "device": options.device, "results": results}
        options.json.write_text(json.dumps(report, indent=1))
    return 0 if is_bounded else 1


if __name__ == "__main__":
    sys.exit(main())
