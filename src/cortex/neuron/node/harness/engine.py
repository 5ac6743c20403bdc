"""The built-in engine as a harness: models in the workers of the node's devices."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from cortex.neuron.config import NeuronConfig
from cortex.neuron.engine.request import EngineRequest, LoadSpec
from cortex.neuron.kernels.quantised.layout import Layout
from cortex.neuron.kernels.quantised.recipes import Recipe
from cortex.neuron.node.devices import NodeDevices
from cortex.neuron.node.harness.estimates import Footprint
from cortex.neuron.node.harness.forecast import Forecast, wanted_tokens
from cortex.neuron.node.inspection_process.client import InspectionProcess
from cortex.neuron.node.inspection_process.preflight import ModelMetadata
from cortex.neuron.node.inspection_process.reading import Read
from cortex.neuron.node.library import KnownModel, Library
from cortex.neuron.node.memory.allocation import ChosenDevices, DeviceAllocation
from cortex.neuron.node.memory.ceilings import smallest
from cortex.neuron.node.memory.kv_exchange import KvExchange
from cortex.neuron.text.model import TextInspection
from cortex.neuron.worker.hosts.replica import HostReplica
from cortex.neuron.worker.hosts.replicated import ReplicatedHost
from cortex.neuron.worker.model_host import ModelHost
from cortex.system.engine_packages import REMEDY, missing_packages
from cortex.wire.errors import ModelUnsupported, shorten
from cortex.wire.node.load_options import ENGINE


class EngineHarness:
    """Belongs to the daemon's loop."""

    names = (ENGINE,)
    restarts = True

    def __init__(
        self,
        config: NeuronConfig,
        devices: NodeDevices,
        forecast: Forecast,
        inspector: InspectionProcess,
        library: Library,
        kv: KvExchange,
    ) -> None:
        self._library = library
        self._kv = kv
        self.estimates = forecast
        self.max_num_seqs = config.limits.max_num_seqs
        self._inspector = inspector
        self._config = config
        self._devices = devices
        self._objection = _objection(devices)

    @property
    def is_usable(self) -> bool:
        """Whether it can run models on this node at all."""
        return self._objection is None

    def check(self, model: KnownModel) -> None:
        if self._objection is not None:
            raise ModelUnsupported(f"{shorten(model.id)}: {self._objection}")

    def needs_files(self, model: KnownModel) -> bool:  # noqa: ARG002 - as Harness has it
        return True

    async def read(self, model: KnownModel, path: Path) -> tuple[ModelMetadata, dict[str, Footprint]]:
        """Raises LoadFailed for damaged files, and ModelUnsupported for a family that the engine does not have or a
        quantisation that the files are not in, or that the devices do not support at load."""
        self.check(model)
        metadata = await self.inspect(model, path)
        devices = self._devices.all
        if metadata.recipe is not None and not all(self.estimates.quantises(each, metadata.recipe) for each in devices):
            raise _not_quantised(model, metadata.recipe)
        return metadata, await asyncio.to_thread(self.estimates.quantised, model, metadata, devices)

    async def read_text(self, model: KnownModel, path: Path) -> TextInspection:
        return await self._inspector.read_text(path, model.id, model.chat_template)

    async def inspect(self, model: KnownModel, path: Path) -> ModelMetadata:
        """The metadata from config and headers, including those of its draft model if on disk. Raises LoadFailed."""
        metadata = await self._inspector.read(Read(str(path), model.id, model.quant, model.tensor_parallel))
        if model.speculation == "mtp":
            return metadata.with_head(model.id)
        draft = self._library.draft_of(model)
        draft_path = None
        if draft is not None:
            draft_path = await self._inspector.find_local(draft.source, self._library.cache, draft.quant)
        if draft is None or draft_path is None:
            return metadata
        return metadata.with_draft(await self._inspector.read(Read(str(draft_path), draft.id, None, 1)), model.id)

    def spec(self, model: KnownModel, metadata: ModelMetadata, chosen: ChosenDevices) -> LoadSpec:
        """What each device loads; the device with the least available memory decides. A stage has its own limit."""
        ceilings = [self.estimates.ceiling_bytes(model, metadata, device) for device in chosen.devices]
        limits = self._config.limits
        return LoadSpec(
            **model.shared_with(LoadSpec) | {"quant": None if metadata.recipe is None else metadata.recipe.name},
            path=str(metadata.path),
            model_id=model.id,
            dtype=self._config.harness.torch.dtype,
            wanted_tokens=wanted_tokens(model, metadata),
            draft_path="" if metadata.draft is None else str(metadata.draft.path),
            max_num_seqs=limits.max_num_seqs,
            prefill_chunk_tokens=limits.prefill_chunk_tokens,
            step_ms=limits.step_ms,
            memory_bytes=smallest(*ceilings, *chosen.limits),
            min_free_bytes=limits.min_free_vram_mb << 20,
            kv_host_bytes=self._devices.kv_host.limit_bytes,
            kv_disk_dir=str(limits.kv_disk_folder),
            kv_disk_bytes=limits.kv_disk_mb << 20,
            num_host_shares=sum(each.kind == "cpu" for each in self._devices.all) or 1,
            stages=chosen.stages,
            host_weight_bytes=0 if model.host_split is None else model.host_split.host_bytes,
        )

    async def host(
        self, model: KnownModel, metadata: ModelMetadata, room: DeviceAllocation
    ) -> tuple[ModelHost, ChosenDevices]:
        """One replica on each equal part of the devices, the lowest index first."""
        chosen = room.chosen
        spec, indices = self.spec(model, metadata, chosen), sorted(chosen.indices)
        if model.replicas == 1 and not model.may_grow:
            return self._devices.host(indices, spec), chosen
        size = len(indices) // model.replicas
        parts = [indices[start : start + size] for start in range(0, len(indices), size)]
        new_hosts = [partial(self._devices.host, part, spec) for part in parts]
        share = self._share if self._config.limits.kv_disk_mb else None
        return ReplicatedHost(model.id, new_hosts, room.lock_devices, share=share), chosen

    async def _share(self, request: EngineRequest, source: HostReplica, target: HostReplica) -> None:
        places = source.host.device_indices, target.host.device_indices
        if source.host.resident is not None and all(len(each) == 1 for each in places):
            workers = [self._devices.supervisors[index] for (index,) in places]
            # One of them may not have reported its speed yet.
            stats = max(source.stats, target.stats, key=lambda each: each.prompt_token_s)
            await self._kv.share(source.host.resident.info, stats, request, *workers)

    def replica(self, model: KnownModel, metadata: ModelMetadata, chosen: ChosenDevices) -> ModelHost:
        return self._devices.host(chosen.indices, self.spec(model, metadata, chosen))

    def forget_size(self, model_id: str) -> None:
        """Nothing to forget: its sizes are computed."""

    def upstream(self, model: KnownModel) -> None:
        """None: the engine takes tokens."""

    async def close(self) -> None:
        await self._devices.close()


def _objection(devices: NodeDevices) -> str | None:
    """Why the engine cannot run models on this node, and what to do."""
    through = "or name one of the node's [[harnesses]] as the `harness` of the model"
    if missing := missing_packages():
        return (
            f"the engine is not installed on this node ({', '.join(missing)} missing), so it runs models through "
            f"harnesses only; {REMEDY} there, {through}"
        )
    if devices.all[0].kind == "rocm":
        return (
            f"the engine does not run on {devices.all[0].name}, only harnesses do; {through.removeprefix('or ')}, or "
            "start the node with ROCR_VISIBLE_DEVICES set to nothing to run models on its CPU"
        )
    return None


def _not_quantised(model: KnownModel, recipe: Recipe) -> ModelUnsupported:
    remedy = (
        f"for {model.quant} name a GGUF of it as the source (a file, or owner/name-GGUF:{model.quant} on the hub)"
        if isinstance(recipe.matrices, Layout)
        else "choose q8 or q4"  # there are no GGUFs of it
    )
    return ModelUnsupported(
        f"{model.id} is not quantised as {recipe.name} at load on this node, which takes a GPU and the dtype "
        "auto or bfloat16, or for the formats of GGUF files a CPU with asimddp, avx2 or avx512f and the dtype "
        f"auto; {remedy}, or omit `quant`"
    )
