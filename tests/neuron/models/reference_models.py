"""Random models of the reference library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers.models.llama.modeling_llama  # noqa: F401 - what all models import; see below
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.initialization import no_init_weights

get_checkpoint_conversion_mapping("llama")  # two seconds once, here, rather than in each process that is forked later


def randomised(build: Callable[[], Any], std: float, vector_std: float) -> Any:
    """A model whose every parameter matters: the library initialises norms and biases to one or zero."""
    torch.manual_seed(0)
    with no_init_weights():
        reference = build()
    reference.tie_weights()
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=vector_std if parameter.dim() == 1 else std)
    for name, buffer in reference.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            torch.nn.init.normal_(buffer, std=0.5)
        if name.endswith("layer_scalar"):
            torch.nn.init.uniform_(buffer, 0.5, 1.5)
    return reference.eval()
