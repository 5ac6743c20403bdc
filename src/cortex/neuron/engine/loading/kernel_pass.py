"""The kernels of a model, compiled before its first step: while its weights are read, or without any.

The model's steps run on torch's `meta` device, with one layer of each kind, and compute nothing: their launches are the
kernels to compile (`kernels/compilation.py`), those of the first response first. A note in Triton's cache records that
all of a model's kernels exist, so that later loads do not search for them.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from cortex.neuron.engine.execution.batch_invariant import BLOCK_TOKENS
from cortex.neuron.engine.execution.graphs import Graph, Outputs
from cortex.neuron.engine.execution.runner import Runner, RunnerConfig
from cortex.neuron.engine.loading.meta_shapes import light_shapes
from cortex.neuron.engine.memory.plan import PAGE_TOKENS, STEP_TOKENS, StateSlots
from cortex.neuron.engine.memory.sequences import SequenceMemory
from cortex.neuron.kernels import jit
from cortex.neuron.kernels.compilation import POLL_S, KernelCompiler, Report
from cortex.neuron.kernels.device_properties import DeviceProperties, pretend, properties_of
from cortex.neuron.kernels.jit import TRITON, triton
from cortex.neuron.kernels.layouts import MatrixLayout
from cortex.neuron.layers.configs import Shard
from cortex.neuron.layers.parallel import SINGLE_RANK, ParallelGroup, SingleRank
from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.models.architecture import Architecture
from cortex.neuron.models.decoder import Decoder, DecoderLayer
from cortex.neuron.private_api.triton import COLLECTED_LAUNCHES, cache_folder

log = logging.getLogger(__name__)

META = torch.device("meta")
_PACKED_ROWS = 256
_SLOTS = 1
"""The number of states does not affect kernels."""


@dataclass(frozen=True, slots=True)
class ModelToCompile:
    """The facts of a model on which its kernels depend."""

    architecture: Architecture
    packing: Mapping[str, MatrixLayout]
    dtype: torch.dtype
    kv_dtype: torch.dtype
    shard: Shard
    max_rows: int
    context_tokens: int
    deterministic: bool = False
    checks_drafts: bool = True

    def digest(self, properties: DeviceProperties) -> str:
        """Differs if kernels may differ."""
        layouts = sorted((name, repr(self.packing[name])) for name in self.packing) or repr(self.packing)
        parts = (
            sorted((name, repr(value)) for name, value in self.architecture.raw.items()),
            [repr(layer) for _, layer in self.architecture.named_layers()],
            layouts,
            (self.dtype, self.kv_dtype, self.shard, self.max_rows, self.context_tokens),
            (self.deterministic, self.checks_drafts),
            (properties, triton.__version__, torch.__version__, _sources()),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def runner(self) -> Runner:
        """Its steps on the `meta` device."""
        group: ParallelGroup = SINGLE_RANK if self.shard.is_whole else _Rank(self.shard)
        parameters = Parameters(META, self.dtype, self.packing, group)
        model = Decoder(self.architecture, parameters, self.context_tokens, STEP_TOKENS["cuda"])
        _keep_one_of_each(model)
        num_pages = dict.fromkeys(self.architecture.windows, 2)
        memory = SequenceMemory(model, num_pages, PAGE_TOKENS, StateSlots(_SLOTS), self.dtype, META, self.kv_dtype)
        config = RunnerConfig(
            self.max_rows,
            self.context_tokens,
            STEP_TOKENS["cuda"],
            block_tokens=BLOCK_TOKENS if self.deterministic else None,
            checks_drafts=self.checks_drafts,
        )
        return Runner(model, memory, config, capture=_passed)


class _Rank(SingleRank):
    """One rank of a model on the `meta` device: has the right shapes and communicates with no one."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard

    def all_gather(self, part: Tensor) -> Tensor:
        return part.repeat(1, self.shard.size)


class _NoGraph:
    def replay(self, rows: int) -> None:
        del rows


def _passed(step: Callable[[], Outputs]) -> tuple[Graph, Outputs]:
    return _NoGraph(), step()


def _keep_one_of_each(model: Decoder) -> None:
    """Removes the layers whose kernels are those of another one."""
    stored: dict[str, list[tuple[str, str]]] = {}
    for binding in model.parameters.packed_bindings:
        layout = repr(model.parameters.packing[binding.source])
        for name, _ in model.architecture.named_layers():
            if binding.source.startswith(f"{name}."):
                stored.setdefault(name, []).append((binding.source.removeprefix(name), layout))
    kept: dict[tuple[object, ...], DecoderLayer] = {}
    for (name, config), layer in zip(model.architecture.named_layers(), model.layers, strict=True):
        kept.setdefault((repr(config), tuple(stored.get(name, ()))), layer)
    model.layers = list(kept.values())


def _pack_one_of_each(parameters: Parameters) -> None:
    """Fills some rows of a matrix in each layout, as a load that quantises does."""
    bindings = {repr(parameters.packing[binding.source]): binding for binding in parameters.packed_bindings}
    for binding in bindings.values():
        if getattr(parameters.packing[binding.source], "codebook", ()):
            continue  # such codes come with a checkpoint, and are only moved
        rows = min(binding.num_rows, _PACKED_ROWS)
        values = torch.empty(rows, binding.matrix.inputs, dtype=parameters.dtype, device=META)
        binding.matrix.put_values(binding.first_row, values)


class _PassEnded(Exception):
    pass


class KernelPass:
    """Compiles the kernels of one model in threads of its own. `ready` returns when those of a short response are
    compiled; the others follow."""

    def __init__(self, model: ModelToCompile, properties: DeviceProperties) -> None:
        """`properties`: of the card, the only one for which this process compiles kernels."""
        pretend(properties)
        self._model = model
        self._note = cache_folder() / "models" / model.digest(properties)
        self._compiler = KernelCompiler()
        self._first: list[BaseException | None] = []
        self._num_first = 0
        """Kernels that a short response needs, collected first."""
        self._is_collected = threading.Event()
        self._is_closed = False
        self.is_cached = self._note.exists()
        """Whether an earlier pass has compiled all of them."""
        self.has_failed = False
        """Whether some kernels are compiled on first use, while a request waits."""
        # Not a daemon: one that is inside torch when the process ends would abort it.
        self._thread = threading.Thread(target=self._run, name="kernel-pass")

    def start(self) -> None:
        if not self.is_cached:
            self._thread.start()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            with torch.inference_mode():
                with self._compiler.collected(), light_shapes():
                    runner = self._model.runner()
                    _pack_one_of_each(runner.model.parameters)
                    runner.prepare_first()
                self._num_first = self._compiler.num_kernels
                self._is_collected.set()
                self._compiler.ended(self._go_on)  # with all cores: the others would delay them
                with self._compiler.collected(), light_shapes():
                    while runner.prepare():
                        self._go_on()
                    runner.compute_draws()
                    runner.compute_prompt(STEP_TOKENS["cuda"])  # longer than any graph: other tiles are chosen
            self._compiler.wait(self._go_on)
            self._note.parent.mkdir(parents=True, exist_ok=True)
            self._note.touch()
        except _PassEnded:
            self._compiler.close()
        except Exception as raised:  # a step compiles what is missing, and reports what is wrong with it
            if not self._is_closed:  # then the compiler takes no more kernels
                log.warning("compiling kernels ahead failed; each is compiled when it is first used", exc_info=raised)
                self.has_failed = True
                error = raised
        finally:
            self._first.append(error)
            self._is_collected.set()
            self._compiler.finish()

    def _go_on(self, *_: int) -> None:
        """Raises _PassEnded if the rest is no longer needed, because the model is closed or the process ends."""
        if self._is_closed or not threading.main_thread().is_alive():
            raise _PassEnded

    def ready(self, poll: Callable[[], None]) -> None:
        """Waits for the kernels of a short prompt and its response, calling `poll`, whose exceptions end the wait."""
        if self.is_cached:
            return
        while not self._is_collected.wait(POLL_S):
            poll()
        self._compiler.ended(lambda *_: poll(), self._num_first)

    def wait(self, report: Report = lambda *_: None) -> int:
        """Waits for all kernels and returns their number. Raises the error of a failed pass."""
        if self.is_cached:
            return 0
        while self._thread.is_alive():
            self._compiler.wait(report)
            self._thread.join(0.05)
        if self._first and self._first[0] is not None:
            raise self._first[0]
        return self._compiler.num_kernels

    def close(self) -> None:
        """Compiles no more."""
        self._is_closed = True
        self._compiler.close()


def kernel_pass(model: ModelToCompile, device: torch.device) -> KernelPass | None:
    """Begins the pass of a model that is about to be loaded. None on a device without kernels, if Triton cannot compile
    ahead, or for a model of another library or a stage, whose steps are not captured."""
    architecture = model.architecture
    is_known = architecture.backend == "native" and architecture.stage is None and architecture.pooling is None
    if device.type != "cuda" or not TRITON or not is_known or not COLLECTED_LAUNCHES.is_usable:
        return None
    begun = KernelPass(model, properties_of(device))
    begun.start()
    return begun


@cache
def _sources() -> str:
    """A digest of all kernels' sources."""
    digest = hashlib.sha256()
    for path in sorted(Path(jit.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
