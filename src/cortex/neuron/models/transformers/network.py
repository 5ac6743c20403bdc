"""The library's modules of a model, without memory for their parameters, and what their attention does.

One pass on the meta device shows every call of the attention function: its heads, its scale, its window. So a model
that needs what is not implemented is rejected by name before any weight is read. Code of a checkpoint's repository is
never run: only classes of the library are built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cortex.neuron.kernels.attention.paged import attention
from cortex.neuron.kernels.attention.rules import AttentionRules
from cortex.neuron.kernels.batch import Batch
from cortex.neuron.kernels.dense.matrix import DenseMatrix
from cortex.neuron.kernels.matrix import PLAIN, Epilogue, Matrix
from cortex.neuron.layers.attention import LayerCache
from cortex.neuron.layers.configs import AttentionConfig, Shard
from cortex.neuron.layers.parallel import ParallelGroup
from cortex.neuron.models.config import UnsupportedModel
from cortex.neuron.models.transformers.architecture import TransformersArchitecture
from cortex.neuron.private_api.transformers import register_experts


class MatrixLinear(nn.Module):
    """`y = x Wᵀ + b`, the weights in any storage."""

    def __init__(self, matrix: Matrix, bias: Tensor | None) -> None:
        super().__init__()
        self.matrix = matrix
        self.bias = bias
        self.in_features, self.out_features = matrix.inputs, matrix.outputs

    @property
    def weight(self) -> Tensor:
        """Some modules read the dtype of their linear layers, or multiply by the weights themselves."""
        if not isinstance(self.matrix, DenseMatrix):
            raise UnsupportedModel("a module of the library uses a matrix itself, so it cannot be quantised")
        return self.matrix.weight

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in] → [..., out]"""
        rows = x.reshape(-1, x.shape[-1])
        return self.matrix.product(rows, PLAIN, Epilogue(self.bias)).view(*x.shape[:-1], -1)


class RowParallelMatrixLinear(MatrixLinear):
    """The inputs are divided among the ranks: the sum over all ranks is the result. Only the first has a bias."""

    def __init__(self, matrix: Matrix, bias: Tensor | None, group: ParallelGroup) -> None:
        super().__init__(matrix, bias)
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        return self._group.all_reduce(super().forward(x))


class CurrentStep:
    """The step that the modules compute: they pass their attention no argument of ours."""

    batch: Batch


class PagedAttention:
    """The attention of one layer. Reads and writes the pages in `cache`, which the engine sets before the first
    step."""

    cache: LayerCache

    def __init__(self, config: AttentionConfig, rules: AttentionRules, step: CurrentStep, shard: Shard) -> None:
        self.config = config
        self.rules = rules
        self._step = step
        self._shard = shard

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """query: [1, heads, tokens, dim], key and value: [1, kv heads, tokens, dim], sinks: [heads of all ranks] →
        [1, tokens, heads, dim]. Values may have fewer dimensions than keys, or more."""
        dim, cache, rules = self.config.head_dim, self.cache, self.rules
        q, k, v = (_padded(part[0].transpose(0, 1), dim) for part in (query, key, value))
        if sinks is not None:
            heads = query.shape[1]
            first = self._shard.rank * heads if len(sinks) > heads else 0
            rules = replace(rules, sinks=sinks[first : first + heads].float())
        out = attention(q, k, v, rules, self._step.batch.of_group(cache.group), cache.keys, cache.values)
        return out[None, ..., : value.shape[-1]]


def _padded(heads: Tensor, dim: int) -> Tensor:
    """[tokens, heads, ≤ dim] → [tokens, heads, dim]"""
    missing = dim - heads.shape[-1]
    return F.pad(heads, (0, missing)) if missing else heads.contiguous()


class _HiddenOutput:
    """The output of a base model that has only hidden states: each family's output has other parts."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


class GivenHidden(nn.Module):
    """Takes the place of the base model in the whole one, which then computes the logits of hidden states."""

    @property
    def decoder(self) -> GivenHidden:
        """Some models call a part of their base model."""
        return self

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        return _HiddenOutput(inputs_embeds)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,  # noqa: ARG001  # rows and windows say what is visible
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function that is registered with the library. `module.paged` is set when the model is built."""
    paged: PagedAttention = module.paged  # type: ignore[assignment]
    return paged(query, key, value, s_aux), None


@torch.no_grad()
def replace_module(root: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(root.get_submodule(parent), own, module)


PAGED: Final = "cortex_paged"
_TRACED: Final = "cortex_traced"
_TRACED_TOKENS: Final = 3
_NOT_OPTIONS: Final = ("auto_map", "quantization_config", "attn_implementation", "experts_implementation")
"""What a config may have that must not reach the library: it could make it run code, or read weights otherwise."""
_IGNORED: Final = frozenset(
    {
        *("dropout", "is_causal", "position_ids", "position_embeddings", "cache_position", "use_cache", "layer_idx"),
        *("past_key_values", "past_key_value", "layer_past", "output_attentions", "output_hidden_states"),
        *("output_router_logits", "input_ids", "inputs_embeds", "return_dict", "logits_to_keep", "layer_head_mask"),
    }
)
"""Arguments of attention that change nothing here: `is_causal` is checked by itself."""
_KNOWN: Final = frozenset({"scaling", "sliding_window", "softcap", "s_aux", *_IGNORED})


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of the attention function in the traced pass."""

    module: nn.Module
    config: AttentionConfig


@dataclass(frozen=True, slots=True)
class _Mask:
    tensor: Tensor
    is_visible: Callable[..., Tensor]
    size: int | None
    """How long a window, or a chunk, is."""

    def window(self) -> int | None:
        """The window of a causal mask. Raises UnsupportedModel for any other."""
        for window in (None, self.size):
            if _is_causal(self.is_visible, window):
                return window
        raise UnsupportedModel("the model has a mask that is neither causal nor a window, which is not supported")


class _Trace:
    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []
        self.masks: dict[int, _Mask] = {}
        """By the id of the tensor that stands for it."""


_current: ContextVar[_Trace] = ContextVar("trace")
"""The pass that this thread runs: the library calls functions of ours without an argument of ours."""


@dataclass(frozen=True, slots=True)
class Network:
    """The modules of one model, on the meta device."""

    model: Any
    """The library's causal language model."""
    architecture: TransformersArchitecture
    calls: Sequence[AttentionCall]

    @classmethod
    def of(cls, architecture: TransformersArchitecture) -> Network:
        """Raises UnsupportedModel for a model that cannot be run."""
        model = _build(architecture)
        name = type(model).__name__
        for path, module in model.named_modules():
            if isinstance(module, (nn.Conv1d, nn.RNNBase)):
                raise UnsupportedModel(f"{name} has a {type(module).__name__} ({path}), whose state is not kept")
            tables = [own for own, value in vars(module).items() if isinstance(value, Tensor)]
            if tables:
                raise UnsupportedModel(f"{name} has {', '.join(tables)} ({path}) outside of its parameters and buffers")
        traced = _traced(model)
        calls = traced.calls
        _check(name, architecture, traced)
        return cls(model, architecture.with_attentions([call.config for call in calls]), calls)


def _build(architecture: TransformersArchitecture) -> Any:
    import transformers

    transformers.AttentionInterface.register(PAGED, paged_attention)
    transformers.AttentionInterface.register(_TRACED, _record_attention)
    transformers.AttentionMaskInterface.register(_TRACED, _record_mask)
    raw = architecture.raw
    options = {name: value for name, value in raw.items() if name.lstrip("_") not in _NOT_OPTIONS}
    try:
        config = type(transformers.AutoConfig.for_model(raw["model_type"])).from_dict(options)
        with torch.device("meta"):
            # In the default dtype: the library would set another one for all threads of the process.
            chosen = {"attn_implementation": PAGED, "dtype": torch.float32}
            return transformers.AutoModelForCausalLM.from_config(config, **chosen).eval()
    except Exception as error:
        raise UnsupportedModel(
            f"{architecture.library.class_name} of the transformers library rejects the model's config: "
            f"{str(error) or type(error).__name__:.300}"
        ) from error


def _traced(model: Any) -> _Trace:
    """Runs the modules on the meta device."""
    found = _Trace()
    try:
        _current.set(found)
        with _tracing(model), torch.device("meta"), torch.inference_mode():
            tokens = torch.zeros(1, _TRACED_TOKENS, dtype=torch.long)
            model(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                position_ids=torch.arange(_TRACED_TOKENS)[None],
                use_cache=False,
            )
    except UnsupportedModel:
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"the modules of {type(model).__name__} cannot be run without weights, which is how they are checked: "
            f"{str(error) or type(error).__name__:.300}"
        ) from error
    return found


@contextmanager
def _tracing(model: Any) -> Iterator[None]:
    """The model records its attention and skips its experts."""
    skips_experts = register_experts(_TRACED, _skip_experts)
    experts = model.get_experts_implementation() if skips_experts else {}
    model.set_attn_implementation(_TRACED)
    if skips_experts:
        model.set_experts_implementation(_TRACED)
    try:
        yield
    finally:
        model.set_attn_implementation(PAGED)
        if skips_experts:
            model.set_experts_implementation(experts)


def _check(name: str, architecture: TransformersArchitecture, traced: _Trace) -> None:
    calls, config = traced.calls, architecture.config
    if len({id(call.module) for call in calls}) < len(calls):
        raise UnsupportedModel(f"{name} uses the attention of a layer more than once per token")
    if len(calls) != config.num_layers:
        raise UnsupportedModel(
            f"{len(calls)} of the {config.num_layers} layers of {name} use the attention interface; the others keep a "
            "state of their own, which only native families can"
        )


def _is_causal(mask: Callable[..., Tensor], window: int | None) -> bool:
    """Whether a mask shows the last `window` positions, or all up to a token's own; judged by samples."""
    spans = (1, 2, window or 64, 2 * (window or 64) + 3, 8192, 100_000)
    queries = torch.tensor([query for span in spans for query in (span - 1, span, span + 1)], device="cpu")[:, None]
    offsets = torch.tensor([-1, 0, 1, 2, *(span + near for span in spans for near in (-1, 0, 1))], device="cpu")
    keys = (queries - offsets).clamp(min=0)
    zero = torch.zeros((), dtype=torch.long, device="cpu")
    expected = keys <= queries
    if window is not None:
        expected &= keys > queries - window
    seen = torch.as_tensor(mask(zero, zero, queries, keys), device="cpu")
    return bool((seen.expand_as(expected) == expected).all())


def _record_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
) -> tuple[Tensor, None]:
    given = {name for name, option in options.items() if option is not None}
    if given - _KNOWN:
        raise UnsupportedModel(f"{type(module).__name__} needs {', '.join(sorted(given - _KNOWN))} of its attention")
    window = options.get("sliding_window")
    if (mask := _current.get().masks.get(id(attention_mask))) is not None:
        window, attention_mask = mask.window(), None
    if attention_mask is not None or getattr(module, "is_causal", True) is False:
        raise UnsupportedModel(f"{type(module).__name__} has attention that is not causal, or has a mask of its own")
    if len(query) != 1 or {part.shape[2] for part in (query, key, value)} != {_TRACED_TOKENS}:
        raise UnsupportedModel(f"{type(module).__name__} attends to other things than the tokens of its sequence")
    _, heads, _, dim = query.shape
    scale = options.get("scaling")
    config = AttentionConfig(
        hidden=heads * dim,
        heads=heads,
        kv_heads=key.shape[1],
        head_dim=max(dim, value.shape[3]),
        scale=dim**-0.5 if scale is None else float(scale),
        rope=None,
        window=window,
        softcap=options.get("softcap"),
    )
    _current.get().calls.append(AttentionCall(module, config))
    return query.new_empty(1, _TRACED_TOKENS, heads, value.shape[3]), None


def _record_mask(*_: Any, mask_function: Callable[..., Tensor], local_size: int | None = None, **__: Any) -> Tensor:
    mask = _Mask(torch.empty(1, 1, _TRACED_TOKENS, _TRACED_TOKENS, device="meta"), mask_function, local_size)
    _current.get().masks[id(mask.tensor)] = mask
    return mask.tensor


def _skip_experts(module: nn.Module, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:  # noqa: ARG001
    return torch.empty_like(hidden_states)
