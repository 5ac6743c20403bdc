"""Compiles the kernels of a model without loading it: for installs, and for images that are built without a GPU."""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path

import torch

from cortex.neuron.engine.errors import LoadError
from cortex.neuron.engine.loading.kernel_pass import META, KernelPass, ModelToCompile
from cortex.neuron.engine.loading.loading import kv_cache_dtype, matrix_layouts
from cortex.neuron.engine.memory.device import compute_dtype
from cortex.neuron.engine.request import LoadSpec
from cortex.neuron.kernels.compilation import Report
from cortex.neuron.kernels.device_properties import CARDS, DeviceProperties, pretend, properties_of
from cortex.neuron.kernels.jit import TRITON
from cortex.neuron.layers.configs import WHOLE, Shard
from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.models.architecture import Architecture
from cortex.neuron.models.config import UnsupportedModel
from cortex.neuron.models.decoder import Decoder
from cortex.neuron.models.registry import open_model, read_architecture
from cortex.neuron.private_api.triton import COLLECTED_LAUNCHES, OFFLINE_DRIVER, use_offline
from cortex.neuron.weights.directory import read_json
from cortex.neuron.weights.errors import CheckpointError
from cortex.neuron.weights.stored import TensorInfo

log = logging.getLogger(__name__)

_GPU = torch.device("cuda")


def warm_kernels(
    path: Path, spec: LoadSpec, properties: DeviceProperties, num_ranks: int, report: Report = lambda *_: None
) -> int:
    """Compiles the kernels of a load of the model at `path` with `spec`. `path` is a directory, which may have only the
    config, or a GGUF file. Returns the number of kernels. This process can launch none afterwards. Raises LoadError."""
    pretend(properties)
    try:
        architecture, tensors = _read(path)
    except (CheckpointError, UnsupportedModel) as error:
        raise LoadError(str(error)) from error
    if architecture.backend != "native" or architecture.pooling is not None:
        raise LoadError(f"{path} is computed by torch's own operations: there is nothing to compile ahead")
    try:
        if num_ranks > 1:
            architecture = architecture.sharded(Shard(0, num_ranks))
    except UnsupportedModel as error:
        raise LoadError(str(error)) from error
    dtype = compute_dtype(spec.dtype, _GPU)
    passed = ModelToCompile(
        architecture,
        matrix_layouts(tensors, spec, _GPU),
        dtype,
        kv_cache_dtype(spec, dtype, META),
        WHOLE if num_ranks == 1 else Shard(0, num_ranks),
        spec.max_num_seqs,
        min(spec.context_tokens or architecture.config.context_tokens, architecture.config.context_tokens),
        spec.deterministic,
        spec.speculation != "off",
    )
    _use_card(properties)
    kernels = KernelPass(passed, properties)
    kernels.start()
    try:
        return kernels.wait(report)
    finally:
        kernels.close()


def _use_card(properties: DeviceProperties) -> None:
    """Compiles for a card that need not be present. Raises LoadError if Triton cannot."""
    if not COLLECTED_LAUNCHES.is_usable:
        raise LoadError(f"the installed Triton cannot compile kernels ahead: {COLLECTED_LAUNCHES.problem}")
    if OFFLINE_DRIVER.is_usable:
        use_offline(properties.capability)
    elif not torch.cuda.is_available() or properties_of(torch.device("cuda", 0)) != properties:
        raise LoadError(f"the installed Triton compiles only for the card that is here: {OFFLINE_DRIVER.problem}")


def _read(path: Path) -> tuple[Architecture, dict[str, TensorInfo]]:
    """The architecture and the tensors of a checkpoint, or those that its config implies. Raises CheckpointError,
    UnsupportedModel or LoadError."""
    has_weights = path.is_file() or any(path.glob("*.safetensors")) or any(path.glob("*.gguf"))
    if has_weights:
        checkpoint, architecture = open_model(path)
        with closing(checkpoint):
            return architecture, dict(checkpoint.tensors)
    try:
        config = read_json(path, "config.json")
    except CheckpointError as error:
        raise LoadError(f"{path} has neither weights nor a config.json that can be read: {error}") from error
    if "quantization_config" in config:
        raise LoadError(f"{path} is a quantised model: the formats of its tensors are in its weights; download them")
    architecture = read_architecture(config)
    parameters = Parameters(META, torch.bfloat16)
    Decoder(architecture, parameters, 1)
    return architecture, {
        binding.source: TensorInfo(tuple(binding.destination.shape), "BF16", binding.destination.nbytes)
        for binding in parameters.bindings
    }


def warm_here(spec: LoadSpec, card: str | None, num_ranks: int, report: Report) -> tuple[str, int] | str:
    """The card and the number of kernels, or an error message. Runs in a separate process."""
    if not TRITON:
        return "this installation of torch is for CPUs and has no Triton: there is nothing to compile"
    if card is not None:
        properties = CARDS[card]
    elif torch.cuda.is_available():
        properties = properties_of(torch.device("cuda", 0))
    else:
        return f"this host has no GPU to compile for; name a card: --card {', '.join(CARDS)}"
    try:
        num_kernels = warm_kernels(Path(spec.path), spec, properties, num_ranks, report)
    except LoadError as error:
        return str(error)
    except Exception as error:  # of any operation or of the compiler
        log.debug("the kernels of %s cannot be compiled", spec.path, exc_info=error)
        return f"the kernels cannot be compiled: {type(error).__name__}: {error}"
    return properties.name, num_kernels
