"""How a model is loaded: the options that a load request, an entry of `neuron.toml` and a model of a node share."""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from cortex.wire.fields.body import MAX_MODEL_NAME
from cortex.wire.node.sampling import SamplingDefaults

Count = Annotated[int, Meta(ge=1)]
ShortText = Annotated[str, Meta(max_length=MAX_MODEL_NAME)]
KVDtype = Literal["auto", "fp8"]
"""The dtype of a model's KV cache; `auto`: the dtype that the model computes in."""
Vision = Literal["device", "cpu", "off"]
"""Where a model's vision tower is."""
Speculation = Annotated[str, Meta(max_length=4096)]
"""Where draft tokens come from: see `checked_speculation`."""
_DRAFT: Final = "draft:"


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


def draft_of(speculation: str) -> str | None:
    """The name of the draft model that a setting asks for; None: it asks for none."""
    return speculation.removeprefix(_DRAFT).strip() if speculation.startswith(_DRAFT) else None


def drafts_from(speculation: str) -> Literal["off", "lookup", "mtp", "draft"]:
    """What a checked setting asks for, without the name of a draft model."""
    match speculation:
        case "off" | "lookup" | "mtp":
            return speculation
        case _:
            return "draft"


Options = TypeVar("Options", bound="LoadOptions")


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An option that has its default is not given: `over` takes it from another place."""

    source: Annotated[str, Meta(max_length=4096)] | None = None
    """Hub id, directory or GGUF file; the id itself when absent."""
    harness: ShortText | None = None
    """What runs it: `torch`, the built-in engine, or its old name `candle`, or one of the node's `harnesses`; `torch`
    when absent."""
    quant: ShortText | None = None
    """Which of a repository's GGUF files to take, in any spelling (`Q4_K_M`, `q6k`, `int8`). Where none is quantised
    so, its dense weights are, at load: `q4_k`, `q5_k`, `q6_k`, `q8_0` or, on a GPU, `fp8`."""
    context_tokens: Annotated[int, Meta(ge=2)] | None = None
    """Maximum sequence length, with at least one prompt token and one generated token; the model's own limit when
    absent."""
    kv_dtype: KVDtype | None = None
    """`fp8`: keys and values of the cache take one byte each, for about twice the context in the same memory. It needs
    an Ada, Hopper or Blackwell GPU, or a CPU. `auto`, also when absent: they have the dtype that the model computes
    in."""
    deterministic: bool = False
    """A request with a seed, or at temperature 0, gets the same tokens whatever else is in the batch or cached, and
    however its prompt is divided into steps. Slower; not for models that are divided among devices."""
    speculation: Speculation | None = None
    """`lookup`, also when absent: while few requests run, a step also checks tokens that are likely to come next, from
    the text so far, a request's `prediction` or its grammar. The output is the same, edits of long texts come several
    times as fast. `mtp`: also from the head for further tokens that the model is published with, as Qwen3-Next,
    Qwen3.5 and GLM are. `draft:` and the name of a smaller model with the same tokenizer: also from that model, which
    is loaded with it. `off`: one token per step."""
    draft: Annotated[str, Meta(max_length=4000)] | None = None
    """The name of a smaller model with the same tokenizer: the same as `speculation = "draft:NAME"`."""
    vision: Vision | None = None
    """Where the vision tower of a model that takes images is. `device`, also when absent: on the model's device. `cpu`:
    in the memory of the host, where images take seconds and no memory of the device. `off`: it is not loaded, and the
    model reads text only."""
    tensor_parallel: Count = 1
    """Number of devices that the model is divided among; it must divide the model's heads and inner width."""
    pipeline_parallel: Count = 1
    """Number of devices that the model's layers are divided among, by their free memory. For devices of different sizes
    and slow links; not together with `tensor_parallel`."""
    devices: Annotated[tuple[int, ...], Meta(max_length=1024)] = ()
    """Indices of the devices it may use; the node chooses when absent."""
    control_tokens_in_messages: bool = False
    """Read `<|im_start|>` and the like in the text of messages as control tokens, as the reference library does. By
    default they are only text, so that clients cannot forge turns. Raw prompts (`/v1/completions`) always have them."""
    sampling: SamplingDefaults = SamplingDefaults()
    """How it samples where a request says nothing, such as `{ temperature = 0.7 }`; as its files recommend where
    absent."""

    def __post_init__(self) -> None:
        speculation = checked_speculation(self.speculation, self.draft)
        msgspec.structs.force_setattr(self, "speculation", speculation)
        msgspec.structs.force_setattr(self, "draft", None)

    def over(self, base: Options) -> Options:
        """`base` with every option that is given here and that it has; `sampling` value by value. Empty text gives
        nothing."""
        values = {field.name: (getattr(self, field.name), field.default) for field in msgspec.structs.fields(self)}
        given = {name: value for name, (value, default) in values.items() if value and value != default}
        given["sampling"] = self.sampling.over(base.sampling)
        return msgspec.structs.replace(base, **{name: given[name] for name in base.__struct_fields__ if name in given})
