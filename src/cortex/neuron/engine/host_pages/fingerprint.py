"""Names a loaded model by its content, so that blocks of other weights or layouts never match.

The sum of each row of words is weighted by position, and the sums of all rows are hashed: on a GPU it takes a few
milliseconds per 10 GB. Files are not consulted: the same weights at another path match, and other bytes at the same
path do not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import torch

from cortex.neuron.engine.loading.loading import LoadedModel
from cortex.neuron.engine.request import LoadSpec
from cortex.neuron.models.decoder import Decoder

KV_VERSION = 2
"""Version of the contents of blocks, which outlast the program on disk. Change it with the order or the meaning of the
values in a page or a state, and where earlier programs may have written wrong ones."""
_ROW_WORDS = 4096
_CHUNK_BYTES = 64 << 20


def fingerprint(loaded: LoadedModel, spec: LoadSpec) -> bytes:
    """Equal for two loads whose blocks are interchangeable."""
    memory = loaded.memory
    models = [loaded.model] if loaded.draft is None else [loaded.model, loaded.draft.model]
    storages = [storage for model in models for storage in _weights(model)]
    facts = {
        "version": KV_VERSION,
        "config": loaded.body.architecture.raw,
        "device": computed_by(loaded.body.parameters.device, deterministic=spec.deterministic),
        "dtype": str(loaded.dtype),
        "blocks": [[(str(each.dtype), each.shape[0], *each.shape[2:]) for each in part] for part in memory.blocks],
        "page_tokens": memory.page_tokens,
        "deterministic": spec.deterministic,
        "quant": spec.quant,
        "vision": spec.vision,
        "rank": None if spec.rank is None else (spec.rank.rank, spec.rank.size),
        "stages": [(stage.first_layer, stage.num_layers) for stage in spec.stages],
        "turns": [model.ropes.turns() for model in models],
        "storages": [storage.nbytes() for storage in storages],
    }
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True, default=str).encode(), digest_size=16)
    digest.update(content_sums(storages))
    return digest.digest()


def computed_by(device: torch.device, *, deterministic: bool) -> str:
    """The kind of GPU, because kinds round differently, as batches of different sizes do. Used only for models whose
    responses must be bit-equal."""
    return torch.cuda.get_device_name(device) if deterministic and device.type == "cuda" else device.type


def _weights(model: Decoder) -> list[torch.UntypedStorage]:
    """The model's weights, wherever they are, without its position tables, which steps with pictures write and whose
    length depends on the context."""
    tables = {storage.data_ptr() for storage in model.ropes.storages()}
    weights = [storage for storage in model.storages() if storage.data_ptr() not in tables]
    weights += model.parameters.host_storages()
    tower = model.tower
    if tower is not None and tower.parameters.device != model.parameters.device:
        weights += tower.parameters.storages()
    return weights


def content_sums(storages: Sequence[torch.UntypedStorage]) -> bytes:
    """The weighted sums of all rows, in order, and the bytes of each storage that fill no row."""
    if not storages:
        return b""
    device = storages[0].device
    generator = torch.Generator().manual_seed(0)
    limit = 1 << 62
    weights = (torch.randint(-limit, limit, (_ROW_WORDS,), generator=generator) | 1).to(device)
    row_bytes = _ROW_WORDS * 8
    sums, rests = [], []
    with torch.inference_mode():
        for storage in storages:
            octets = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            whole = len(octets) // row_bytes * row_bytes
            for start in range(0, whole, _CHUNK_BYTES):
                words = octets[start : min(start + _CHUNK_BYTES, whole)].view(torch.int64).view(-1, _ROW_WORDS)
                sums.append((words * weights.to(words.device)).sum(1).to(device))
            rests.append(octets[whole:].cpu())
    joined = [torch.cat(sums).cpu().view(torch.uint8)] if sums else []
    return torch.cat([*joined, *rests]).numpy().tobytes()
