"""How text is split before byte-level merges apply, by the names that GGUF files use."""

from __future__ import annotations

from tokenizers import Regex, normalizers, pre_tokenizers

from cortex.neuron.families.registry import SPLITS
from cortex.neuron.families.splits import Split
from cortex.neuron.text.errors import TokenizerUnsupported


def split_named(name: str) -> Split:
    """Raises TokenizerUnsupported: a wrong split would silently make the model worse."""
    try:
        return SPLITS[name]
    except KeyError:
        raise TokenizerUnsupported(
            f"the GGUF file names the pre-tokenizer {name!r}, supported are {', '.join(sorted(SPLITS))}; "
            "serve the model from safetensors, or add the name to its family in neuron/families/"
        ) from None


def pre_tokenizer(split: Split) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split.patterns)
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    digits = [pre_tokenizers.Digits(individual_digits=True)] if split.single_digits else []
    return pre_tokenizers.Sequence([*steps, *digits, byte_level]) if steps or digits else byte_level


def normalizer(split: Split) -> normalizers.Normalizer | None:
    return normalizers.NFC() if split.normal_form_c else None
