"""The facts of the installed `transformers` library about a model. Only workers import the library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from cortex.neuron.models.config import UnsupportedModel
from cortex.neuron.private_api.transformers import Unreadable, library_version, model_classes

EXTRA: Final = ".[neuron,transformers]"
COMPARED: Final = (
    *("apertus", "arcee", "cohere", "cwm", "gemma", "gemma2", "glm", "gpt2", "gpt_bigcode", "gpt_neox", "granite_swa"),
    *("granitemoe", "helium", "minicpm3", "mixtral", "nemotron", "olmo", "olmoe", "opt", "persimmon", "phi", "phimoe"),
    *("qwen2_moe", "starcoder2"),
)
"""Types whose every logit the tests compare with the library's own."""
_OTHER_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "num_attention_groups", "multi_query_group_num"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_sequence_length", "seq_length", "max_seq_len"),
}
"""Names in published configs that the library's own table of names lacks."""


@dataclass(frozen=True, slots=True)
class LibraryModel:
    """A causal language model of the library."""

    class_name: str
    defaults: Mapping[str, Any]
    """Options that configs may leave out."""
    options: frozenset[str]
    """The names of all options that it reads."""
    aliases: Mapping[str, str]
    """A size's common name → its name in configs of this type."""
    tp_plan: Mapping[str, str]
    """How modules are divided among devices, by patterns of their names in the base model; empty: they cannot be."""
    base_prefix: str
    """The name of the base model in the whole one."""
    tied: tuple[str, ...]
    """Parameters that share the memory of others if the embeddings are tied."""
    unread: tuple[str, ...]
    """Expressions for tensors of checkpoints that the model does not have."""
    has_transposed_linears: bool
    """Whether matrices are stored with a row for each input."""

    def option(self, config: Mapping[str, Any], name: str) -> Any:
        """The value of an option under its common name; None if neither config nor library has one."""
        names = (self.aliases.get(name, name), name, *_OTHER_NAMES.get(name, ()))
        for source in (config, self.defaults):
            for each in names:
                if source.get(each) is not None and (each in self.options or not self.options):
                    return source[each]
        return None


@cache
def library_model(model_type: str) -> LibraryModel:
    """Raises UnsupportedModel if the library is not installed, or cannot run models of this type here."""
    version = library_version()
    if version is None:
        raise UnsupportedModel(
            "the transformers library, which may have it, is not installed where the node runs: run "
            f"`pip install '{EXTRA}'` in a checkout of cortex"
        )
    installed = f"the installed transformers {version}"
    try:
        found = model_classes(model_type)
    except Unreadable as error:
        raise UnsupportedModel(f"{installed} cannot be used: {error}") from error
    if found is None:
        raise UnsupportedModel(f"{installed} has no causal language model of model_type {model_type!r}")
    if found.model.get("_is_stateful"):
        raise UnsupportedModel(
            f"{found.class_name} of {installed} keeps a recurrent state, which only native families can"
        )
    if found.model.get("_supports_attention_backend") is not True:
        raise UnsupportedModel(f"{found.class_name} of {installed} does not support other attention implementations")
    aliases = _mapping(found.config.get("attribute_map"))
    return LibraryModel(
        class_name=found.class_name,
        defaults={name: value for name, value in found.config.items() if not name.startswith("base_model_")},
        options=frozenset(found.options) | frozenset(aliases),
        aliases=aliases,
        tp_plan=_mapping(found.config.get("base_model_tp_plan")),
        base_prefix=str(found.model.get("base_model_prefix") or "model"),
        tied=tuple(_mapping(found.model.get("_tied_weights_keys"))),
        unread=tuple(map(str, found.model.get("_keys_to_ignore_on_load_unexpected") or ())),
        has_transposed_linears=found.has_transposed_linears,
    )


def _mapping(value: Any) -> dict[str, str]:
    return {str(name): str(other) for name, other in value.items()} if isinstance(value, dict) else {}
