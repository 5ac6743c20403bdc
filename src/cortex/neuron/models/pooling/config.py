"""The pooling of a text's last hidden states, and the chain of small steps after it. Imports no torch.

`weights/pooling_files.py` reads it from a model's files, checks it, and puts it into the config as plain values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from cortex.neuron.models.config import UnsupportedModel
from cortex.neuron.weights.pooling_files import POOLING_KEY

Task = Literal["embed", "score"]
PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len", "weighted_mean", "last"]
"""In the order in which the results of several are concatenated."""
StepActivation = Literal["identity", "tanh", "gelu", "gelu_tanh", "relu", "silu", "sigmoid"]


@dataclass(frozen=True, slots=True)
class DenseStep:
    """activation(x Wᵀ + b)"""

    source: str
    """The tensors of the checkpoint, without `.weight`."""
    inputs: int
    outputs: int
    bias: bool = True
    activation: StepActivation = "identity"


@dataclass(frozen=True, slots=True)
class NormStep:
    """A layer norm."""

    source: str
    size: int
    eps: float
    bias: bool = False


@dataclass(frozen=True, slots=True)
class NormalizeStep:
    """The vector at length one."""


@dataclass(frozen=True, slots=True)
class DifferenceStep:
    """The first of two elements, less the second."""


@dataclass(frozen=True, slots=True)
class LogitStep:
    """The logit of one token, less that of another."""

    true_token: int
    false_token: int | None = None


Step = DenseStep | NormStep | NormalizeStep | DifferenceStep | LogitStep
_STEPS: Final[Mapping[str, Callable[..., Step]]] = {
    "dense": DenseStep,
    "norm": NormStep,
    "normalize": NormalizeStep,
    "difference": DifferenceStep,
    "logit": LogitStep,
}


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    task: Task
    modes: tuple[PoolingMode, ...]
    steps: tuple[Step, ...] = ()
    activation: StepActivation = "identity"
    """Applied to a score, unless a request asks for raw scores."""
    max_tokens: int | None = None
    """The longest text that the model was made for; None: as long as its positions reach."""
    lowercase: bool = False
    """Whether texts are converted to lower case first."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Texts that precede a text, by the purpose that requests name."""
    default_prompt: str | None = None
    dimensions: tuple[int, ...] = ()
    """The lengths of vectors that the model was trained for, if it names them."""
    template: str | None = None
    """How a reranker without pairs of segments reads a query and a document: with `{instruction}`, `{query}` and
    `{document}`."""

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> PoolingConfig | None:
        """None for a model that generates text."""
        raw = config.get(POOLING_KEY)
        if raw is None:
            return None
        steps = tuple(_STEPS[kind](**options) for kind, options in raw["steps"])
        found = {**raw, "modes": tuple(raw["modes"]), "dimensions": tuple(raw.get("dimensions", ())), "steps": steps}
        return cls(**found)

    @property
    def compares_logits(self) -> bool:
        return any(isinstance(step, LogitStep) for step in self.steps)

    def width(self, hidden: int) -> int:
        """The length of the vectors. Raises UnsupportedModel for steps that do not fit each other."""
        size = hidden * len(self.modes)
        for step in self.steps:
            match step:
                case DenseStep():
                    inputs, outputs = step.inputs, step.outputs
                case NormStep():
                    inputs, outputs = step.size, step.size
                case DifferenceStep():
                    inputs, outputs = 2, 1
                case LogitStep():
                    inputs, outputs = hidden, 1
                case NormalizeStep():
                    inputs, outputs = size, size
            if inputs != size:
                raise UnsupportedModel(f"a step after the pooling expects {inputs} elements, but gets {size}")
            size = outputs
        return size

    def check(self, hidden: int) -> None:
        """Raises UnsupportedModel for a pooling that cannot be computed."""
        if not self.modes:
            raise UnsupportedModel("the pooling config of the model selects no mode")
        size = self.width(hidden)
        if self.task == "score" and size != 1:
            raise UnsupportedModel(f"a reranker has one score for each text; this model has {size} labels")
