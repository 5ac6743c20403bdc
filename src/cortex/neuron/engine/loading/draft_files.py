"""The files of a draft model, and the model made of them. It is loaded together with the model that it drafts for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from cortex.neuron.engine.errors import LoadError
from cortex.neuron.engine.loading.filling import Progress, fill_from
from cortex.neuron.engine.memory.plan import ModelSizes
from cortex.neuron.kernels.layouts import MatrixLayout
from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.models.architecture import Architecture
from cortex.neuron.models.config import UnsupportedModel
from cortex.neuron.models.decoder import Decoder
from cortex.neuron.models.draft_model import DraftModel
from cortex.neuron.models.registry import check_draft, open_model
from cortex.neuron.models.sizes import WeightStorage
from cortex.neuron.text.errors import TextModelError
from cortex.neuron.text.tokenizer.library import LibraryTokenizer
from cortex.neuron.weights.checkpoint import Checkpoint
from cortex.neuron.weights.errors import CheckpointError
from cortex.neuron.weights.stored import TensorInfo


@dataclass(frozen=True, slots=True)
class DraftFiles:
    """Open files; `close` them."""

    checkpoint: Checkpoint
    architecture: Architecture
    packing: Mapping[str, MatrixLayout]

    @classmethod
    def open(
        cls, path: Path, model: Path, layouts: Callable[[Mapping[str, TensorInfo]], Mapping[str, MatrixLayout]]
    ) -> DraftFiles:
        """`model`: the model that it drafts for. `layouts` chooses the matrices that stay quantised.

        Raises LoadError."""
        try:
            checkpoint, architecture = open_model(path)
        except (CheckpointError, UnsupportedModel) as error:
            raise LoadError(f"the draft model cannot be loaded: {error}") from error
        try:
            check_draft(architecture)
            _check_tokenizers(path, model)
            return cls(checkpoint, architecture.without_tower(), layouts(checkpoint.tensors))
        except UnsupportedModel as error:
            checkpoint.close()
            raise LoadError(str(error)) from error
        except BaseException:
            checkpoint.close()
            raise

    def close(self) -> None:
        self.checkpoint.close()

    def sizes(self, item_bytes: int, kv_item_bytes: int) -> ModelSizes:
        return ModelSizes.of(self.architecture, WeightStorage(item_bytes, self.packing, kv_item_bytes))

    def build(
        self,
        device: torch.device,
        dtype: torch.dtype,
        vocab: int,
        num_positions: int,
        progress: Progress,
        cancelled: Callable[[], bool],
    ) -> DraftModel:
        """`vocab` and `num_positions`: of the model that it drafts for. Raises CheckpointError or Cancelled."""
        parameters = Parameters(device, dtype, self.packing)
        model = Decoder(self.architecture, parameters, num_positions)
        fill_from(self.checkpoint, parameters, progress, cancelled)
        return DraftModel(model, vocab)


def _check_tokenizers(draft: Path, model: Path) -> None:
    """Raises LoadError unless the draft model's tokens are tokens of the model, with the same ids."""
    try:
        own, other = (LibraryTokenizer.load(path).backend.get_vocab(with_added_tokens=True) for path in (draft, model))
    except (TextModelError, CheckpointError) as error:
        raise LoadError(f"the tokenizers of the model and its draft model cannot be compared: {error}") from error
    different = [token for token, number in own.items() if other.get(token) != number]
    if different or len(other) > 1.01 * len(own):
        example = f", such as {different[0][:40]!r}" if different else ""
        raise LoadError(
            f"the draft model {draft.name} has another tokenizer than the model: {len(different)} of its {len(own)} "
            f"tokens are others{example}; choose a smaller model of the same family"
        )
