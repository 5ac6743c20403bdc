"""Reports for the API about the node and its models, from configuration, files and controllers."""

from __future__ import annotations

import platform
import socket
import time
from dataclasses import dataclass

import cortex
from cortex.neuron.models.pooling.config import PoolingConfig
from cortex.neuron.node.controller import ModelController
from cortex.neuron.node.library import KnownModel
from cortex.neuron.node.loading.loader import Estimate, Inspection
from cortex.neuron.node.memory.host_budget import can_sleep
from cortex.neuron.worker.discovery import Inventory
from cortex.wire.dialects.registry import DIALECTS
from cortex.wire.errors import CortexError
from cortex.wire.node.bench import BenchResult
from cortex.wire.node.load_options import SamplingDefaults
from cortex.wire.node.protocol import (
    Capabilities,
    Discovery,
    HostKV,
    ModelLoad,
    ModelState,
    ModelStatus,
    QuantisedSize,
)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The part of a model's status that requests need: the whole status takes too long for every request."""

    state: ModelState
    context_tokens: int | None
    sampling: SamplingDefaults
    """The operator's values, else those of the model's files."""
    pooling: PoolingConfig | None = None
    """The pooling task of an embedding or rerank model; None if it generates text or is not known yet."""
    vector_width: int = 0
    """The length of a loaded embedding model's vectors."""
    is_read: bool = True
    """Whether its files have been read, so that its task is known."""


_NOT_IN_MEMORY = (ModelState.COLD, ModelState.FAILED)
_LOADING = (ModelState.DOWNLOADING, ModelState.LOADING)


def describe_node(
    inventory: Inventory, sleep_mb: int | None, harnesses: tuple[str, ...], group_harnesses: tuple[str, ...] = ()
) -> Discovery:
    return Discovery(
        host=socket.gethostname(),
        os=f"{platform.system()} {platform.release()}",
        version=cortex.__version__,
        devices=inventory.devices,
        kernel=platform.release(),
        driver=inventory.driver,
        cuda_version=inventory.cuda_version,
        driver_problem=inventory.driver_problem,
        max_devices_per_model=len(inventory.devices),
        can_sleep=can_sleep(sleep_mb, inventory.devices),
        harnesses=harnesses,
        dialects=tuple(DIALECTS),
        group_harnesses=group_harnesses,
    )


def served_model(model: KnownModel, controller: ModelController | None, inspection: Inspection | None) -> ServedModel:
    instance = controller.instance if controller is not None else None
    if instance is not None:
        context_tokens: int | None = instance.resident.info.context_tokens or None
    else:
        limits = (inspection.metadata.context_tokens if inspection is not None else None, model.context_tokens)
        context_tokens = min((limit for limit in limits if limit), default=None)
    return ServedModel(
        state=controller.life.state if controller is not None else ModelState.COLD,
        context_tokens=context_tokens,
        sampling=model.sampling if inspection is None else model.sampling.over(inspection.text.generation),
        pooling=inspection.metadata.pooling if inspection is not None else None,
        vector_width=instance.resident.info.vector_width if instance is not None else 0,
        is_read=inspection is not None,
    )


def describe_model(
    model: KnownModel,
    controller: ModelController | None,
    inspection: Inspection | None,
    estimate: Estimate | None,
    num_in_preparation: int,
    disk_bytes: int | None,
    max_prompt_tokens: int | None,
    damage: CortexError | None,
    bench: BenchResult | None = None,
    kv_host: HostKV | None = None,
    log_lines: tuple[str, ...] = (),
    allowed_devices: tuple[int, ...] = (),
) -> ModelStatus:
    """`num_in_preparation`: requests that are being tokenised or wait for it, before they reach the instance. `damage`:
    why its files cannot be used."""
    metadata = inspection.metadata if inspection is not None else None
    life = controller.life if controller is not None else None
    instance = controller.instance if controller is not None else None
    resident = instance.resident if instance is not None else None
    served = served_model(model, controller, inspection)
    context_tokens = served.context_tokens
    if instance is None and estimate is not None and estimate.footprint.contexts is not None:
        context_tokens = estimate.footprint.contexts.empty_tokens or context_tokens
    now_s = time.monotonic()
    member = model.member if life is not None and life.state not in _NOT_IN_MEMORY else None
    reason, error = (damage.message, damage) if damage is not None else (None, None)
    if life is not None and life.reason is not None:
        reason, error = life.reason, life.error
    return ModelStatus(
        id=model.id,
        state=life.reported_state(now_s) if life is not None else served.state,
        devices=instance.host.device_indices if instance is not None else model.devices,
        allowed_devices=allowed_devices,
        num_devices=model.num_devices,
        replicas=len(instance.host.replica_devices) if instance is not None else model.replicas,
        replica_devices=instance.host.replica_devices if instance is not None else (),
        stage_layers=instance.stage_layers if instance is not None else estimate.stage_layers if estimate else (),
        device_bytes=resident.device_bytes(len(instance.host.device_indices)) if instance and resident else (),
        parallel="pipeline" if model.pipeline_parallel > 1 else "tensor" if model.tensor_parallel > 1 else None,
        nodes=() if member is None else member.nodes,
        rank=0 if member is None else member.rank,
        log_lines=log_lines if life is not None and life.state in _LOADING else (),
        harness=model.harness,
        family=metadata.family if metadata is not None else None,
        backend=metadata.backend if metadata is not None else None,
        quant=metadata.quant if metadata is not None else model.quant,
        stored=metadata.stored if metadata is not None else None,
        digest=metadata.digest if metadata is not None else None,
        content_digest=inspection.content if inspection is not None else "",
        requested_quant=(model if inspection is None else inspection.model).quant,
        source=model.source,
        estimate_bytes=(estimate.footprint.expected_bytes or None) if estimate is not None else None,
        least_bytes=estimate.footprint.least_bytes if estimate is not None else None,
        contexts=estimate.footprint.contexts if estimate is not None else None,
        quantised=tuple(
            QuantisedSize(
                quant=quant, estimate_bytes=size.expected_bytes, least_bytes=size.least_bytes, contexts=size.contexts
            )
            for quant, size in (inspection.quantised if inspection is not None else {}).items()
        ),
        measured_bytes=resident.measured_bytes if resident is not None else None,
        kv_bytes=resident.info.kv_bytes if resident is not None else None,
        kv_tokens=resident.info.kv_tokens if resident is not None else None,
        kv_host=kv_host,
        host_bytes=instance.host_bytes if instance is not None else 0,
        host_splits=None if estimate is None else estimate.footprint.splits or estimate.footprint.last_resort,
        file_bytes=metadata.file_bytes if metadata is not None else None,
        disk_bytes=disk_bytes,
        context_tokens=context_tokens,
        max_input_tokens=min((limit for limit in (context_tokens, max_prompt_tokens) if limit), default=None),
        max_prompt_tokens=max_prompt_tokens,
        max_output_tokens=context_tokens,
        capabilities=_capabilities(inspection, resident.info.notes if resident is not None else ()),
        sampling=served.sampling,
        progress=controller.progress.snapshot() if controller is not None and controller.progress is not None else None,
        load=instance.load(num_in_preparation) if instance is not None else ModelLoad(),
        reason=reason,
        reason_code=error.code if error is not None else None,
        state_age_s=round(now_s - life.since_s, 3) if life is not None else 0.0,
        idle_s=round(instance.idle_s, 3) if instance is not None else 0.0,
        load_s=controller.load_s if controller is not None else None,
        bench=bench,
        files_changed=instance is not None and instance.files_changed,
    )


def _capabilities(inspection: Inspection | None, engine_notes: tuple[str, ...]) -> Capabilities:
    if inspection is None:
        return Capabilities()
    template, pooling = inspection.text.capabilities, inspection.metadata.pooling
    if pooling is not None:
        embeds = pooling.task == "embed"
        return Capabilities(chat=False, embeddings=embeds, rerank=not embeds, notes=engine_notes)
    return Capabilities(
        chat=template.chat,
        tools=template.tools,
        reasoning=template.reasoning,
        vision=template.vision,
        embeddings=template.embeddings,
        insert=template.insert,
        notes=(*template.notes, *engine_notes),
    )
