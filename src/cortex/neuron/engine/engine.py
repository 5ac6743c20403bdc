"""One loaded model, awake or asleep. See the package's docstring for the contract."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from cortex.neuron.engine.errors import RequestError, SleepError
from cortex.neuron.engine.execution.batch_invariant import block_tokens
from cortex.neuron.engine.execution.graphs import MAX_NATIVE_ROWS, SIZES
from cortex.neuron.engine.execution.runner import Runner, RunnerConfig
from cortex.neuron.engine.host_pages.copies import BlockCopies, BlockTensors
from cortex.neuron.engine.host_pages.device_memory import DeviceHostMemory
from cortex.neuron.engine.host_pages.fingerprint import fingerprint
from cortex.neuron.engine.host_pages.rates import prompt_s
from cortex.neuron.engine.host_pages.store import BlockKind
from cortex.neuron.engine.host_pages.tier import FETCHED_PAGES, HostTier, OtherRanks
from cortex.neuron.engine.kv.page_groups import KVPages
from cortex.neuron.engine.kv.pages import Digest, forget_tokens
from cortex.neuron.engine.kv.recurrent_checkpoints import (
    CHECKPOINT_SPACING_TOKENS,
    RESPONSE_SPACING_TOKENS,
    RecurrentCheckpoints,
)
from cortex.neuron.engine.loading.filling import Progress
from cortex.neuron.engine.loading.loading import LoadedModel, load_model, step_tokens
from cortex.neuron.engine.request import Counters, EngineInfo, EngineRequest, EngineStats, LoadSpec, StepOutput
from cortex.neuron.engine.roofline.model_work import work_of
from cortex.neuron.engine.roofline.step_costs import StepCosts
from cortex.neuron.engine.roofline.step_work import DeviceLimits, StepWork
from cortex.neuron.engine.sampling.constraints import Constraints
from cortex.neuron.engine.scheduling.budget import SchedulerLimits
from cortex.neuron.engine.scheduling.scheduler import Scheduler
from cortex.neuron.engine.sleep import ModelSleep
from cortex.neuron.engine.speculation.drafter import Drafter, ProposalKind
from cortex.neuron.engine.speculation.speculation import Speculation
from cortex.neuron.engine.speculation.width_rule import FastestWidths
from cortex.neuron.engine.step_loop import StepLoop
from cortex.neuron.models.decoder import Decoder
from cortex.neuron.models.towers.config import PASS_PATCHES

LEAST_PROMPT_TOKENS = 32
RESERVED_TOKENS = 512
"""Responses up to this length do not preempt each other."""
ASSUMED_LIMITS = {"cuda": DeviceLimits(1e12, 1e14), "cpu": DeviceLimits(2e10, 2e11)}
"""Assumed until steps are measured."""
STEP_SIZES = {
    "cuda": SIZES,
    "cpu": (*range(1, MAX_NATIVE_ROWS + 1), *(size for size in SIZES if size > MAX_NATIVE_ROWS)),
}
"""Token counts: decode steps up to the same count take about equally long. On a CPU steps are not padded."""
STEP_GROWTH = {"cuda": 0.015, "cpu": 0.15}
"""Assumed cost of one extra token per decode step, until measured."""


class RequestLoop(Protocol):
    """Runs the requests of a model that is awake: `StepLoop`, or `PoolingLoop` for texts."""

    @property
    def counters(self) -> Counters: ...

    @property
    def has_work(self) -> bool: ...

    def add(self, request: EngineRequest) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def step(self) -> list[StepOutput]: ...
    def isolate(self) -> bool: ...
    def prepare(self) -> bool: ...
    def prepare_first(self) -> None: ...
    def self_test(self) -> tuple[int, ...]: ...
    def stats(self) -> EngineStats: ...
    def check_integrity(self) -> None: ...


class Engine:
    """Belongs to the engine thread of its device's worker; no other thread may call it."""

    def __init__(
        self,
        loaded: LoadedModel,
        spec: LoadSpec,
        *,
        overlaps: bool | None = None,
        moves_weights: bool | None = None,
        width_rule: Callable[[Runner], FastestWidths] | None = None,
        new_drafter: type[Drafter] = Drafter,
        reserved_tokens: int = RESERVED_TOKENS,
    ) -> None:
        """`overlaps`: see `StepLoop`; `moves_weights`: see `ModelSleep`. By default, a GPU does both. `width_rule`: how
        many draft tokens are checked; None for the fastest number. `new_drafter`: the source of drafts.
        `reserved_tokens`: see `SchedulerLimits`."""
        self.shares_device = False
        """Whether other models have just used the device, so that steps should be short. Set by the worker."""
        self._width_rule = width_rule or self._fastest_widths
        self._new_drafter = new_drafter
        device = loaded.body.parameters.device
        is_gpu = device.type == "cuda"
        memory = loaded.memory
        self._loaded = loaded
        self._spec = spec
        self._device = device
        self._overlaps = is_gpu if overlaps is None else overlaps
        self._moves_weights = is_gpu if moves_weights is None else moves_weights
        most = step_tokens(spec, memory.slots.rows, device)
        self._limits = SchedulerLimits(
            max_rows=memory.slots.rows,
            step_tokens=most,
            step_s=spec.step_ms / 1e3,
            context_tokens=loaded.context_tokens,
            reserved_tokens=reserved_tokens,
            least_prompt_tokens=LEAST_PROMPT_TOKENS,
        )
        self._work = work_of(loaded.body) if isinstance(loaded.body, Decoder) else None
        self._constraints = Constraints(Path(spec.path), loaded.body.config.vocab, device)
        self._counters = Counters()
        self._host_memory: DeviceHostMemory | None = None
        self._fingerprint: bytes | None = None
        self._asleep: ModelSleep | None = None
        self._loop: RequestLoop | None = self._new_loop()
        """None while the model sleeps."""
        self.info = EngineInfo(
            family=str(loaded.body.architecture.raw["model_type"]),
            dtype=str(loaded.dtype).removeprefix("torch."),
            context_tokens=loaded.context_tokens,
            vocab_size=loaded.body.config.vocab,
            weight_bytes=loaded.weight_bytes,
            kv_bytes=memory.num_bytes,
            page_tokens=memory.page_tokens,
            num_pages=self.stats().num_pages,
            notes=loaded.notes,
            work=self._work,
            host_weight_bytes=0 if loaded.host is None else loaded.host.num_bytes,
            host_locked_bytes=0 if loaded.host is None else loaded.host.locked_bytes,
        )

    @classmethod
    def load(
        cls, spec: LoadSpec, device: torch.device | str, progress: Progress, cancelled: Callable[[], bool]
    ) -> Engine:
        """Raises LoadError or LoadCancelled, and then leaves nothing on the device."""
        return cls.start(load_model(spec, torch.device(device), progress, cancelled), spec, progress, cancelled)

    @classmethod
    def start(cls, loaded: LoadedModel, spec: LoadSpec, progress: Progress, cancelled: Callable[[], bool]) -> Engine:
        """An engine that is warm. Raises LoadCancelled."""
        try:
            engine = cls(loaded, spec)
            engine.compiled(progress, cancelled)
            progress("warm", 0, 0)
            engine.warm_up()
        except BaseException:
            loaded.release()
            raise
        return engine

    def compiled(self, progress: Progress, cancelled: Callable[[], bool]) -> None:
        """Waits for the kernels that the first response needs. Raises LoadCancelled."""
        self._loaded.compiled(progress, cancelled)

    def warm_up(self) -> None:
        """Captures the smallest graphs and runs one short prompt through them, which is what the first response needs.
        A wake compares responses before and after, so both use graphs."""
        loop = self._awake()
        loop.prepare_first()
        loop.self_test()

    def _self_test(self) -> tuple[int, ...]:
        return self._awake().self_test()

    @property
    def model(self) -> Decoder:
        return self._loaded.model

    def _new_loop(self) -> RequestLoop:
        """Builds what runs requests. The memory for sequences must be allocated."""
        loaded, limits = self._loaded, self._limits
        memory = loaded.memory
        checkpoints = None
        if self.model.architecture.is_recurrent:
            # Slots: one for each row, one for padding rows, then the checkpoints.
            slots = limits.max_rows + 1, memory.slots.checkpoints
            spacing = (each[self._device.type] for each in (CHECKPOINT_SPACING_TOKENS, RESPONSE_SPACING_TOKENS))
            checkpoints = RecurrentCheckpoints(*slots, *spacing, cuts_rows=not self._spec.deterministic)
        architecture = self.model.architecture
        rules = None if architecture.tower is None else architecture.pictures
        runner, weight_bytes = self._new_runner(), loaded.weight_bytes
        work = self._work or StepWork(weight_bytes, weights_per_token=weight_bytes // loaded.dtype.itemsize)
        costs = StepCosts(work, ASSUMED_LIMITS[self._device.type])
        limits = replace(limits, mixed_sizes=runner.mixed_sizes)
        scheduler = Scheduler(KVPages(memory.num_pages, memory.page_tokens), limits, costs, checkpoints, rules)
        kind: ProposalKind | None = None
        if loaded.proposer is not None:
            kind = "mtp" if loaded.draft is None else "draft"
        speculation = Speculation(
            self._width_rule(runner), self._new_drafter, is_on=self._checks_drafts, proposals=kind
        )
        shared = (self._constraints, self._counters, speculation)
        loop = StepLoop(scheduler, runner, *shared, overlaps=self._overlaps)
        if self._host_memory is not None:
            loop.keep_pages(partial(self._new_tier, self._host_memory))
        return loop

    def _new_tier(self, host: DeviceHostMemory, scheduler: Scheduler) -> HostTier:
        is_gpu = self._device.type == "cuda"
        copies, blocks = BlockCopies(host.slabs, self._device), self._blocks()
        new_kinds = partial(self._kinds_of, blocks, host)
        return HostTier(
            *(host, scheduler.pages, scheduler.checkpoints, blocks, copies, new_kinds),
            copies_ahead=is_gpu,
            min_pages=FETCHED_PAGES[self._device.type],
            others=self._other_ranks(),
            compute_s=partial(prompt_s, scheduler.costs, scheduler.limits.step_tokens),
            from_disk=None if host.disk is None or not self._is_whole else copies.incoming(host.disk.reader.buffers),
        )

    def _other_ranks(self) -> OtherRanks | None:
        return None

    def _blocks(self) -> list[BlockTensors]:
        """The pages of each KV group, then the slots of states if the model has them; without memory for groups of no
        layer here."""
        memory = self._loaded.memory
        blocks = [BlockTensors(tensors) for tensors in memory.blocks]
        if self.model.architecture.is_recurrent and len(blocks) == len(memory.num_pages):
            blocks.append(BlockTensors([]))
        return blocks

    def _kinds_of(self, blocks: Sequence[BlockTensors], host: DeviceHostMemory) -> tuple[BlockKind, ...]:
        memory, sizes = self._loaded.memory, [each.num_bytes for each in blocks]
        name = self._name_by_content()
        num_groups, page_tokens = len(memory.num_pages), memory.page_tokens
        return host.kinds(self._spec.model_id, name, sizes, num_groups, page_tokens, is_whole=self._is_whole)

    @property
    def _is_whole(self) -> bool:
        """Whether no other rank has a part of the model."""
        return self._spec.rank is None

    def _name_by_content(self) -> bytes:
        if self._fingerprint is None:
            self._fingerprint = self._named(fingerprint(self._loaded, self._spec))
        return self._fingerprint

    def _named(self, own: bytes) -> bytes:
        """The name of this model's blocks; `own`: the name of the part loaded here."""
        return own

    def _fastest_widths(self, runner: Runner) -> FastestWidths:
        growth, cost = STEP_GROWTH[self._device.type], self._loaded.proposal_cost
        return FastestWidths(STEP_SIZES[self._device.type], growth, lambda: runner.max_draft_tokens, cost)

    def _new_runner(self) -> Runner:
        return Runner(self.model, self._loaded.memory, self._runner_config, proposer=self._loaded.proposer)

    @property
    def _checks_drafts(self) -> bool:
        return self._spec.speculation != "off"

    @property
    def _runner_config(self) -> RunnerConfig:
        spec, limits = self._spec, self._limits
        return RunnerConfig(
            max_rows=limits.max_rows,
            context_tokens=limits.context_tokens,
            step_tokens=limits.step_tokens,
            block_tokens=block_tokens(self._device) if spec.deterministic and spec.rank is None else None,
            checks_drafts=self._checks_drafts,
            pass_patches=PASS_PATCHES[self._device.type if spec.vision == "device" else "cpu"],
            graph_tokens=self._loaded.graph_tokens,
        )

    def _awake(self) -> RequestLoop:
        if self._loop is None:
            raise RequestError("the model is asleep; wake it first")
        return self._loop

    # -- requests --------------------------------------------------------------------------------------------------

    def compile(self, grammar: str, tenant: bytes) -> None:
        """Compiles a grammar ahead of the `submit` of this tenant's request. Callable on any thread, so that a large
        grammar does not delay steps. Raises RequestError for a grammar that does not compile."""
        self._constraints.compile(grammar, tenant)

    def submit(self, request: EngineRequest) -> None:
        """Raises RequestError if the request can never be served."""
        self._awake().add(request)

    def cancel(self, request_id: str) -> None:
        """Ends a request and frees what it holds at once. Unknown ids are ignored."""
        if self._loop is not None:
            self._loop.cancel(request_id)

    @property
    def has_work(self) -> bool:
        return self._loop is not None and self._loop.has_work

    def step(self) -> list[StepOutput]:
        """Raises FaultyRequest if one request is known to be at fault, and anything else that a step may raise."""
        return self._awake().step()

    def isolate(self) -> bool:
        """After a step that raised for an unknown reason: see `StepLoop.isolate`."""
        return self._awake().isolate()

    def prepare(self) -> bool:
        """While idle, builds one more thing that later steps may use; false if nothing is left."""
        return self._loop is not None and self._loop.prepare()

    # -- sleep -----------------------------------------------------------------------------------------------------

    def sleep(self) -> int:
        """Frees the device memory and keeps the weights in host memory; returns the bytes of host memory.

        Graphs are lost, and so are prefix cache and states unless `keep_pages` gave host memory for them. A sleeping
        model accepts no requests.
        Does nothing if the model is asleep. Raises SleepError, and the model stays awake.
        """
        if self._asleep is not None:
            return self._asleep.host_bytes
        if self.has_work:
            raise SleepError("the model still has requests; cancel them or wait for them to end")
        self._hold_experts(True)  # until the model has responded once more
        try:
            response = self._self_test()
            self.save_pages()
            asleep = ModelSleep(self._loaded, response, moves_weights=self._moves_weights)
        except BaseException:
            self._hold_experts(False)
            raise
        self._fall_asleep(asleep)
        return asleep.host_bytes

    def wake(self, progress: Progress) -> None:
        """Allocates the memory again and checks that the model responds as before. Does nothing if it is awake.

        Raises LoadError (it does not fit now), torch's own error (memory ran out midway) or anything a step raises:
        then the model stays asleep. Raises DamagedError if it is no longer the same model: close it.
        """
        asleep = self._asleep
        if asleep is None:
            return
        asleep.check_room(self._spec, self._device)
        progress("place", 0, asleep.moved_bytes)
        try:
            asleep.end()
            self._loop = self._new_loop()
            progress("warm", 0, 0)
            self.warm_up()
            asleep.check(self._self_test())
        except BaseException:
            self._fall_asleep(asleep)
            raise
        self._asleep = None
        self._hold_experts(False)
        asleep.release()

    def _hold_experts(self, are_held: bool) -> None:
        if self._loaded.team is not None:
            self._loaded.team.holds_places = are_held

    def keep_pages(self, host: DeviceHostMemory | None) -> DeviceHostMemory | None:
        """Keeps pages and states that do not fit the device in this host memory, or in a new one, and returns it."""
        if isinstance(self._loop, StepLoop):
            host = self._host_memory = host or DeviceHostMemory.on(self._device)
            host.open_disk(Path(self._spec.kv_disk_dir), self._spec.kv_disk_bytes, self._device)
            self._loop.keep_pages(partial(self._new_tier, host))
            if (len(host.store) or host.disk is not None) and self._names_alone and self._loop.host is not None:
                self._loop.host.ensure_named()
                if host.disk is not None and self._is_whole:
                    name, computes = self._name_by_content().hex(), self._loop.host.computes_fronts
                    self.info = replace(self.info, kv_name=name, computes_fronts=computes)
        return host

    @property
    def _names_alone(self) -> bool:
        return True

    def save_pages(self, *, to_disk: bool = False) -> bool:
        """Copies pages and states that are not in host memory yet, before the model sleeps or is closed. It must have
        no work. See `HostTier.save`."""
        return isinstance(self._loop, StepLoop) and self._loop.save_pages(to_disk=to_disk)

    @property
    def model_id(self) -> str:
        return self._spec.model_id

    @property
    def tier(self) -> HostTier | None:
        """The model's pages outside of device memory; None while it sleeps, or if it keeps none."""
        return self._loop.host if isinstance(self._loop, StepLoop) else None

    def forget_pages(self, is_chosen: Callable[[Digest], bool]) -> None:
        """Drops the device's cached pages of these prefixes. Running requests keep theirs."""
        forget_tokens()
        if isinstance(self._loop, StepLoop):
            self._loop.forget(is_chosen)

    def _fall_asleep(self, asleep: ModelSleep) -> None:
        self._end_loop()
        asleep.begin()
        self._asleep = asleep
        self._free_caches()

    def _end_loop(self) -> None:
        if self._loop is not None:
            self._end_copies()
            self._counters = self._loop.counters
            self._loop = None

    def _end_copies(self) -> None:
        if isinstance(self._loop, StepLoop):
            self._loop.end_copies()

    # -- facts -----------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        stats = EngineStats(**asdict(self._counters)) if self._loop is None else self._loop.stats()
        return replace(stats, failed_kernel_passes=1) if self._loaded.has_failed_pass else stats

    def check_integrity(self) -> None:
        """Raises AssertionError unless every row and page is accounted for."""
        self._awake().check_integrity()

    def close(self) -> None:
        """Frees everything; the object is unusable afterwards."""
        forget_tokens()
        self._end_copies()
        self._loop = None
        if self._asleep is not None:
            self._asleep.release()
        self._loaded.release()
        del self._loaded, self._asleep
        self._free_caches()

    def _free_caches(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
