"""Names of quantisations: what each spelling means. The only parser of them, for gateway, node, engine and commands."""

from __future__ import annotations

import re
from typing import Final

_BARE_BITS: Final = re.compile(r"(?:Q|INT)?(\d)(?:BITS?)?")
_OF_BITS: Final = ("Q{}", "Q{}KM", "Q{}KS", "Q{}KL", "Q{}KXL", "Q{}K", "Q{}0", "Q{}1", "IQ{}XS", "IQ{}NL")
"""What bits alone mean, the recommended kind first."""
_MIXTURES: Final = ("", "M", "S", "L", "XL")
"""What `Q4_K` and other names mean, after which files name the size of a mixture of formats."""
_DENSE: Final = ("BF16", "F16", "F32")
_AT_LOAD: Final = re.compile(r"Q?([4568])[01K]?(?:XS|S|M|L|XL)?")
_AT_LOAD_BY_BITS: Final = {"4": "q4_k", "5": "q5_k", "6": "q6_k", "8": "q8_0"}
_LABEL: Final = re.compile(
    r"(?<![A-Z0-9])(?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP4(?:_MOE)?|BF16|FP?16|FP?32)(?![A-Z0-9])", re.IGNORECASE
)


def plain(name: str) -> str:
    """A spelling without case, signs and what does not change the format: `UD-Q4_K_XL` is `Q4KXL`, `fp16` `F16`, `int4`
    and `4bit` are `Q4`."""
    letters = re.sub(r"[^A-Z0-9]", "", name.strip().upper().removeprefix("UD-"))
    if match := _BARE_BITS.fullmatch(letters):
        return f"Q{match[1]}"
    return re.sub(r"FP(16|32)", r"F\1", letters)


def meanings(quant: str) -> list[str]:
    """The plain names that a spelling can mean, the recommended one first."""
    name = plain(quant)
    if match := _BARE_BITS.fullmatch(name):
        return [kind.format(match[1]) for kind in _OF_BITS]
    return [name + mixture for mixture in _MIXTURES]


def at_load(quant: str) -> str | None:
    """The format into which dense weights are quantised at load for a spelling: `q4_k`, `q5_k`, `q6_k`, `q8_0` or
    `fp8`; None where there is none."""
    name = plain(quant)
    if name == "FP8":
        return "fp8"
    match = _AT_LOAD.fullmatch(name)
    return _AT_LOAD_BY_BITS[match[1]] if match else None


def bits(quant: str) -> int:
    """The bits that a spelling names; 0 for none."""
    digits = re.search(r"\d+", quant)
    return int(digits[0]) if digits else 0


def label_in(text: str) -> str | None:
    """The last name of a quantisation in the name of a file."""
    labels: list[str] = _LABEL.findall(text)
    return labels[-1].upper() if labels else None


def is_same_quant(wanted: str, requested: str | None, stored: str | None) -> bool:
    """Whether a model in memory is what `wanted` means, in any spelling. `requested`: the quantisation that its load
    named; `stored`: the format of most of its weights, None for dense ones."""
    loaded = requested or stored
    if requested is not None and _is_bits(requested) and not _is_bits(wanted):
        loaded = stored or requested  # bits alone do not say which kind the load found
    if loaded is None:
        return plain(wanted) in _DENSE
    return plain(loaded) in meanings(wanted) or plain(wanted) in meanings(loaded)


def _is_bits(quant: str) -> bool:
    return _BARE_BITS.fullmatch(plain(quant)) is not None
