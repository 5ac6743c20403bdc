"""The schema of a load: every option of how a model is loaded, with type, bounds, default and help text.

Each option is declared here once. `models.toml`, `neuron.toml`, load requests, orders about files and a model of
a node are subclasses, the reference page and flags of commands are generated from them, and `shared_with` copies
options from one form to another by name. So a new option is one declaration here, and the code that uses it. The engine
imports no msgspec, so its `LoadSpec` names the options that it reads, and a test compares them with these.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, inspect

from cortex.wire.fields.body import MAX_MODEL_NAME


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling defaults of the model. Absent values come from the model's own files (`generation_config.json`, or the
    metadata of a GGUF file)."""

    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    """0 always picks the most likely token."""
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Sample from the most likely tokens whose probabilities add up to this."""
    top_k: Annotated[int, Meta(ge=0)] | None = None
    """Sample from this many of the most likely tokens; 0: from all."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Exclude tokens less likely than this fraction of the most likely one."""
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    """Penalises tokens that were used before; 1 has no effect."""

    @property
    def given(self) -> dict[str, float]:
        """The keys that have a value."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}

    def over(self, other: SamplingDefaults) -> SamplingDefaults:
        """These values, and those of `other` where there are none."""
        return msgspec.structs.replace(other, **self.given)


_DEFAULT: Final = "default"


def _unless_given(value: str) -> Meta:
    """The default of an option whose value None means "not given"."""
    return Meta(extra={_DEFAULT: value})


Count = Annotated[int, Meta(ge=1)]
ShortText = Annotated[str, Meta(max_length=MAX_MODEL_NAME)]
KVDtype = Literal["auto", "fp8"]
"""The dtype of a model's KV cache; `auto`: the dtype that the model computes in."""
Vision = Literal["device", "cpu", "off"]
"""The place of a model's vision tower."""
Speculation = Annotated[str, Meta(max_length=4096)]
"""The source of draft tokens: see `checked_speculation`."""
_DRAFT: Final = "draft:"
HostWeights = Literal["auto", "off"] | Annotated[int, Meta(ge=1)]
"""The weights that may be in host memory: those that do not fit the devices, none, or a limit in megabytes."""


ENGINE: Final = "torch"
"""The name of the built-in engine as a harness."""
_FORMER_ENGINE: Final = "candle"
"""Its name in earlier programs, whose configurations are still in use."""


def harness_name(name: str) -> str:
    """The present name of the harness that `name` stands for."""
    return ENGINE if name == _FORMER_ENGINE else name


_PATH_PREFIXES = ("/", "./", "../", "~")


def is_path(source: str) -> bool:
    """Whether a source is written as a path, and never a repository of the hub."""
    return source.startswith(_PATH_PREFIXES)


def checked_speculation(speculation: str | None, draft: str | None) -> str | None:
    """The setting as `off`, `lookup`, `mtp` or `draft:NAME`, from the two options that may give it.

    Raises ValueError for another value, and for two that differ."""
    named = None if draft is None else f"{_DRAFT}{draft}"
    if named is not None and speculation not in (None, named):
        raise ValueError(f"`draft` is the same as speculation = {named!r}, but speculation is {speculation!r}")
    found = named or speculation
    if found is not None and found not in ("off", "lookup", "mtp") and not draft_of(found):
        raise ValueError(
            f'speculation is {found[:80]!r}; it is "off", "lookup", "mtp" or "draft:" and the name of a smaller model '
            "with the same tokenizer"
        )
    return found


def draft_of(speculation: str | None) -> str | None:
    """The name of the draft model that a setting asks for; None: it asks for none."""
    return speculation.removeprefix(_DRAFT).strip() if speculation and speculation.startswith(_DRAFT) else None


Options = TypeVar("Options", bound="LoadOptions")


class FileOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which files a model has, and what runs it."""

    source: Annotated[str, Meta(max_length=4096)] | None = None
    """Hub id, directory or GGUF file on the node; the id itself when absent."""
    harness: ShortText | None = None
    """The harness that runs it: `torch`, the built-in engine (old name `candle`), or one of the node's `harnesses`;
    `torch` when absent."""
    quant: ShortText | None = None
    """Which of a repository's GGUF files to take, in any spelling (`Q4_K_M`, `q6k`, `int8`), or else how to quantise
    dense weights at load: `q4_k`, `q5_k`, `q6_k`, `q8_0` or, on a GPU, `fp8`."""

    def __post_init__(self) -> None:
        if self.harness is not None:
            msgspec.structs.force_setattr(self, "harness", harness_name(self.harness))

    def shared_with(self, form: type) -> dict[str, Any]:
        """The options that another form has, too."""
        return {name: getattr(self, name) for name in _shared(type(self), form)}


class LoadOptions(FileOptions, frozen=True, kw_only=True):
    """The options that operators and clients may set, everywhere. One that has its default here is not given: `over`
    takes it from another place."""

    context_tokens: Annotated[int, Meta(ge=2)] | None = None
    """Maximum sequence length, with at least one prompt token and one generated token. Idle models are evicted for all
    of it. When absent: the model's own limit, or as much of it as memory allows, and idle models are evicted for at
    least 32,768 tokens."""
    kv_dtype: Annotated[KVDtype | None, _unless_given("auto")] = None
    """`fp8`: keys and values of the cache take one byte each, for about twice the context in the same memory. It needs
    an Ada, Hopper or Blackwell GPU, or a CPU. `auto`, the default: the dtype of the model's arithmetic."""
    deterministic: bool = False
    """A request with a seed, or at temperature 0, gets the same tokens regardless of batch, cache and division into
    steps. Slower; not for models that are divided among devices."""
    speculation: Annotated[Speculation | None, _unless_given("lookup")] = None
    """`lookup`, the default: while few requests run, a step also checks tokens that are likely to come next, from the
    text so far, a request's `prediction` or its grammar. The output is the same, edits of long texts come several times
    as fast. `mtp`: also from the prediction head that some models are published with, such as Qwen3-Next, Qwen3.5 and
    GLM. `draft:` and the name of a smaller model with the same tokenizer: also from that model, which is loaded
    together with it. `off`: one token per step."""
    draft: Annotated[str, Meta(max_length=4000)] | None = None
    """The name of a smaller model with the same tokenizer; equivalent to `speculation = "draft:NAME"`."""
    vision: Annotated[Vision | None, _unless_given("device")] = None
    """The place of the vision tower, if the model takes pictures. `device`, the default: on its device. `cpu`: in host
    memory, where pictures take seconds but no device memory. `off`: not loaded, and the model reads text only."""
    host_weights: HostWeights | None = None
    """Which weights of a model that does not fit its device are in host memory. Absent: experts of a mixture that do
    not fit. `auto`: for any model, as the last resort also feed-forward blocks of layers without experts, which is
    slow. A number: the same, up to that many megabytes. `off`: none. The node's `limits.host_mb` bounds them."""
    tensor_parallel: Count = 1
    """Number of devices among which every layer is divided; it must divide the model's heads and inner width. A gateway
    uses more if a share would not fit."""
    pipeline_parallel: Count = 1
    """Number of devices among which the model's layers are divided, by free memory. For devices of different sizes and
    slow links; not combined with `tensor_parallel`."""
    control_tokens_in_messages: bool = False
    """Treat `<|im_start|>` and the like in the text of messages as control tokens, as the reference library does. By
    default they are plain text, so that clients cannot forge turns. Raw prompts (`/v1/completions`) always allow them.
    """
    chat_template: Annotated[str, Meta(max_length=65536)] | None = None
    """A Jinja chat template that replaces the one in its files. For the built-in engine only; servers have their own
    options. It may use `{{ document_start }}`, the token that begins every prompt of the model."""
    sampling: SamplingDefaults = SamplingDefaults()
    """Sampling defaults, such as `{ temperature = 0.7 }`; absent values are those recommended by its files."""

    def __post_init__(self) -> None:
        super().__post_init__()
        speculation = checked_speculation(self.speculation, self.draft)
        msgspec.structs.force_setattr(self, "speculation", speculation)
        msgspec.structs.force_setattr(self, "draft", None)

    def over(self, base: Options) -> Options:
        """`base`, overridden by every option that is given here and that it has; `sampling` is merged value by value.
        Empty text counts as not given."""
        values = {field.name: (getattr(self, field.name), field.default) for field in msgspec.structs.fields(self)}
        given = {name: value for name, (value, default) in values.items() if value and value != default}
        given["sampling"] = self.sampling.over(base.sampling)
        return msgspec.structs.replace(base, **{name: given[name] for name in base.__struct_fields__ if name in given})

    def _fill_defaults(self) -> None:
        """Set options that are not given to their defaults. For `__post_init__` of loaded models."""
        for name, default in defaults_unless_given().items():
            if getattr(self, name) is None:
                msgspec.structs.force_setattr(self, name, default)


@cache
def _shared(*forms: type) -> tuple[str, ...]:
    """The options of the schema that all of them have."""
    return tuple(name for name in LoadOptions.__struct_fields__ if all(hasattr(form, name) for form in forms))


@cache
def defaults_unless_given() -> dict[str, Any]:
    """The defaults of the options whose value None means "not given"."""
    kinds = ((field.name, field.type) for field in inspect.type_info(LoadOptions).fields)  # type: ignore[attr-defined]
    extras = ((name, kind.extra or {}) for name, kind in kinds if isinstance(kind, inspect.Metadata))
    return {name: extra[_DEFAULT] for name, extra in extras if _DEFAULT in extra}


class PlacedOptions(LoadOptions, frozen=True, kw_only=True):
    """Additional options of `neuron.toml` and load requests, which a catalogue leaves to placement."""

    devices: Annotated[tuple[int, ...], Meta(max_length=1024)] = ()
    """Indices of the devices that it may use. Absent: all."""
