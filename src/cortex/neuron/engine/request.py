"""The inputs and outputs of an engine: token ids and parameters, no text.

Plain dataclasses and tuples: they import on a bare GPU host, and cross the worker's channel as typed values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from cortex.neuron.engine.errors import RequestError
from cortex.neuron.engine.roofline.step_work import StepWork
from cortex.neuron.pictures.picture import Picture
from cortex.system.fair_turns import DEFAULT

FinishReason = Literal["stop", "length", "cancelled", "error", "rejected"]
"""`rejected`: the request contradicts itself, which shows only in its output."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn. The defaults are plain sampling at temperature 1."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    repetition_window: int = 0
    """Number of latest tokens that `repetition_penalty` applies to; 0 is all of them."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    """The seed of the noise: the same seed draws the same tokens from the same logits. The last bits of logits depend
    on the rest of the batch unless the model is `deterministic`."""
    top_logprobs: int | None = None
    """None: no logprobs. 0: of the drawn token only. N: also of the N top tokens."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that may be drawn; empty for all."""

    def check(self) -> None:
        """Raises RequestError for a value with which single precision may overflow. Integers need no upper bound,
        because they are cut to the vocabulary and the context."""
        for name, (low, high) in _COMPUTABLE.items():
            _check_range(name, getattr(self, name), low, high)
        for token, bias in self.logit_bias:
            _check_range(f"logit_bias of token {token}", bias, -_LARGEST, _LARGEST)
        if self.top_logprobs is not None and self.top_logprobs < 0:
            raise RequestError(f"top_logprobs is {self.top_logprobs}: ask for 0 or more")


_LARGEST = 1e6
_COMPUTABLE = {
    "temperature": (0.0, _LARGEST),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1 / _LARGEST, _LARGEST),
    "presence_penalty": (-_LARGEST, _LARGEST),
    "frequency_penalty": (-_LARGEST, _LARGEST),
}


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # NaN is in no range
        raise RequestError(f"{name} is {value}: it must be between {low:g} and {high:g}")


@dataclass(frozen=True, slots=True)
class PooledTexts:
    """Texts to turn into a vector or a score each, in batches with those of other requests."""

    ids: bytes
    """The token ids of all texts, one text after another, as 32-bit integers."""
    lengths: tuple[int, ...]
    """The tokens of each text."""
    first_segments: tuple[int, ...] = ()
    """The tokens of the first of two segments, for each text; empty: every text is one segment."""
    dimensions: int | None = None
    """Length to which each vector is cut; None for all elements."""
    normalize: bool = False
    """Whether vectors are normalised to length one, after they are cut."""
    num_queries: int = 0
    """Number of queries at the start of the texts: one for each of the others, or one for all. The result is then the
    cosine of each other text with its query, instead of vectors."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to continue, or texts to pool. Immutable; the engine keeps its own state separately."""

    id: str
    prompt: Sequence[int]
    """A tuple; in a worker the received array, which can be neither hashed nor forwarded."""
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    stop_token_ids: tuple[int, ...] = ()
    """EOS ids and the client's; the stop token is counted but not returned as text."""
    min_tokens: int = 0
    grammar: str | None = None
    """A grammar in the form `text.grammar` compiles, constraining the output; None: free."""
    principal: str = ""
    """The unit of fairness for slots (`node/admission.py`) and prefill (`engine/scheduling/budget.py`); empty if
    anonymous."""
    level: int = DEFAULT
    """Of its class (`system/fair_turns.py`): those of lower levels wait, and are preempted first."""
    tenant: bytes = b""
    """Requests of the same tenant share cached prefixes. A digest; empty: shared with all others that have none."""
    checkpoint_at: tuple[int, ...] = ()
    """Prompt positions (turn ends) where a model with recurrent layers should save its state for later turns."""
    prompt_logprobs: int | None = None
    """Log-probabilities of the prompt. None: none. 0: of each prompt token after the first. N: also of the N top tokens
    at its position."""
    prediction: tuple[int, ...] = ()
    """The expected output. Where it is right, several tokens are checked in one step."""
    speculates: bool = True
    """Whether draft tokens may be checked for it, if the model supports that. The output is the same."""
    uses_prefix_cache: bool = True
    """If false, it reuses no prefix, and its pages are not kept in the prefix cache or host memory, where they would
    displace others."""
    transfer: str = ""
    """The name of a transfer that brings KV of its prompt to the disk while the prompt is computed, the last pages
    first; empty: none."""
    pictures: tuple[Picture, ...] = ()
    """In the order of their positions in the prompt, which has a token for each position."""
    texts: PooledTexts | None = None
    """For an embedding or rerank model, which continues no sequence: `prompt` is empty then."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: of the token there, and of the top tokens."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    rank: int | None = None
    """For a token of the prompt: 1 if it is the top token."""


class StepOutput(NamedTuple):
    """The output of one step for one request. The last output of a request has `finish`.

    A named tuple, because one is made, sent to the daemon and read there for every token: it takes a fifth of the time
    of a frozen dataclass.
    """

    request_id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    cached_tokens: int | None = None
    """Prompt tokens taken from the prefix cache; set on the first output of a request."""
    finish: FinishReason | None = None
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """They begin with the second token of the prompt; set on the first output of a request that asks for them."""
    num_drafted: int = 0
    """Draft tokens that the step checked."""
    num_accepted: int = 0
    """Those of `tokens` that were draft tokens."""
    num_predicted: int = 0
    """Those of `tokens` that the request's prediction has at the same place, drafted or not."""
    vectors: bytes = b""
    """The result of a request for texts: their vectors or scores in order, as little-endian float32."""


@dataclass(frozen=True, slots=True)
class RankSpec:
    """One rank of a model that is divided among several devices."""

    rank: int
    """0 is the leader: it plans the steps, draws the tokens and serves the requests."""
    size: int
    directory: str
    """A directory private to this load, through whose files the ranks find each other."""
    backend: Literal["nccl", "sockets"] = "sockets"
    device_locks: tuple[str, ...] = ()
    """A file for each device of the group, in the same order for all models. The leader locks them for each step."""


@dataclass(frozen=True, slots=True)
class StageSpec:
    """The layers of one rank of a model that is divided by layers."""

    first_layer: int
    num_layers: int
    memory_bytes: int | None = None
    """Limit for the weights and KV of this stage; None: as for a whole model."""

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.first_layer + self.num_layers)


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """A load's files and options. `path` is local: a directory with safetensors, or one GGUF file. Options of the load
    schema (`wire/node/load_options.py`) have their names, defaults and meaning, except `quant`."""

    path: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quant: str | None = None
    """How dense matrices are quantised at load (a spelling that `recipe_of` knows); None: not at all."""
    context_tokens: int | None = None
    wanted_tokens: int = 0
    """The context for which captured steps leave room; 0: graphs take precedence."""
    kv_dtype: Literal["auto", "fp8"] = "auto"
    deterministic: bool = False
    speculation: str = "lookup"
    draft_path: str = ""
    """The path of the draft model; empty without one."""
    vision: Literal["device", "cpu", "off"] = "device"
    max_num_seqs: int = 256
    prefill_chunk_tokens: int | None = None
    """Most tokens of prefill in one step; None: the default of the device."""
    step_ms: float = 50.0
    """Expected time that prompts may extend a step to while others wait for it."""
    memory_bytes: int | None = None
    """Limit for weights and KV together; None: all free memory of the device, less a reserve."""
    min_free_bytes: int = 0
    """Always left free on the device."""
    model_id: str = ""
    """The id under which pages in host memory are reported; empty: not reported."""
    rank: RankSpec | None = None
    """The rank to load of a model that is divided among several devices; None: the whole model."""
    kv_host_bytes: int = 0
    """Host memory for pages that leave the device, for all its models; 0: none are kept."""
    host_weight_bytes: int = 0
    """Limit of host memory for weights that do not fit the device; 0: all weights are on the device."""
    kv_disk_dir: str = ""
    kv_disk_bytes: int = 0
    """The folder for pages that leave host memory, and the disk space that they may use; 0: none are kept."""
    num_host_shares: int = 1
    """On a CPU: the number of devices that share the host's memory equally."""
    stages: tuple[StageSpec, ...] = ()
    """The layers of each rank, if the model is divided by layers. Empty: the ranks divide every layer."""

    @property
    def own_host_weight_bytes(self) -> int:
        """The part of `host_weight_bytes` for the rank that this spec loads: as large as its part of the weights."""
        if self.rank is None:
            return self.host_weight_bytes
        if self.stage is None:
            return self.host_weight_bytes // self.rank.size
        num_layers = sum(stage.num_layers for stage in self.stages)
        return self.host_weight_bytes * self.stage.num_layers // num_layers

    @property
    def stage(self) -> StageSpec | None:
        """The layers of the rank that this spec loads, if the model is divided by layers."""
        return self.stages[self.rank.rank] if self.rank is not None and self.stages else None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """A loaded engine's facts, fixed for its lifetime."""

    family: str
    dtype: str
    context_tokens: int
    """Longest sequence that this engine accepts: the model's own limit, or less if its pages hold less."""
    vocab_size: int
    weight_bytes: int
    """Includes the position tables."""
    kv_bytes: int
    """Memory of sequences: KV pages, and recurrent states if the model has them."""
    page_tokens: int
    num_pages: int
    notes: tuple[str, ...] = ()
    """For the user: a vision tower that was not loaded, a context limited by memory."""
    vector_width: int = 0
    """The length of a text's vector, 1 for a score; 0 for a model that generates text."""
    work: StepWork | None = None
    """What its steps read and compute; None if unknown."""
    host_weight_bytes: int = 0
    """Weights in host memory, which `weight_bytes` does not count."""
    host_locked_bytes: int = 0
    """The part of host memory for weights that is page-locked."""
    kv_name: str = ""
    """The name of its blocks on disk, in hex; empty if none are written."""
    computes_fronts: bool = False
    """Whether it computes the front of a prompt while the KV after it is fetched."""

    @property
    def kv_tokens(self) -> int | None:
        """Tokens that fit in the KV pages; None if it has none, or if a server has them."""
        return self.num_pages * self.page_tokens if self.kv_bytes else None

    @property
    def token_bytes(self) -> float:
        """KV bytes per token; 0 without KV."""
        return self.kv_bytes / self.kv_tokens if self.kv_tokens else 0.0


@dataclass(frozen=True, slots=True)
class KeptPages:
    """The KV pages and states of a model in host memory and on disk."""

    num_bytes: int
    """In host memory."""
    num_tokens: int = 0
    """Tokens in these pages; 0 if the model has only states."""
    tokens_per_s: float | None = None
    """Average rate at which they return to the device; None if unknown."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Work done for requests since the load. A sleep does not reset them: the next step loop continues them."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    preemptions: int = 0
    fetched_tokens: int = 0
    """Prompt tokens whose pages were in host memory; they count as cached too."""
    drafted_tokens: Mapping[str, int] = field(default_factory=dict)
    """Draft tokens that were checked, by source."""
    accepted_tokens: Mapping[str, int] = field(default_factory=dict)
    """Those of them that were accepted."""

    def plus(self, more: Counters) -> Counters:
        return Counters(
            steps=self.steps + more.steps,
            prompt_tokens=self.prompt_tokens + more.prompt_tokens,
            cached_tokens=self.cached_tokens + more.cached_tokens,
            completion_tokens=self.completion_tokens + more.completion_tokens,
            preemptions=self.preemptions + more.preemptions,
            fetched_tokens=self.fetched_tokens + more.fetched_tokens,
            drafted_tokens=_sums(self.drafted_tokens, more.drafted_tokens),
            accepted_tokens=_sums(self.accepted_tokens, more.accepted_tokens),
        )


def _sums(first: Mapping[str, int], second: Mapping[str, int]) -> Mapping[str, int]:
    return {kind: first.get(kind, 0) + second.get(kind, 0) for kind in (*first, *second)} if second else first


@dataclass(frozen=True, slots=True)
class EngineStats(Counters):
    """The current load, and counters since the load of the model. Counters only grow."""

    running: int = 0
    waiting: int = 0
    used_pages: int = 0
    cached_pages: int = 0
    """Free pages that contain a reusable prefix."""
    num_pages: int = 0
    graphs: int = 0
    """Steps that are captured, one for each size; `graph_bytes`: device memory that the captures took."""
    graph_bytes: int = 0
    graph_s: float = 0.0
    """The time that the captures took."""
    prompt_token_s: float = 0.0
    """Expected seconds per prompt token, without attention; 0 if unknown."""
    failed_kernel_passes: int = 0
    """1 if the kernels of the model could not be compiled ahead: each is compiled when it is first used."""

    @classmethod
    def summed(cls, parts: Sequence[EngineStats]) -> EngineStats:
        totals: dict[str, Any] = {}
        for name in (each.name for each in fields(cls)):
            values = [getattr(part, name) for part in parts]
            counts = [value for value in values if isinstance(value, dict)]
            totals[name] = dict(sum(map(Counter, counts), Counter())) if counts else sum(values)
        totals["prompt_token_s"] = max((part.prompt_token_s for part in parts), default=0.0)  # no sum: the slowest
        return cls(**totals)
