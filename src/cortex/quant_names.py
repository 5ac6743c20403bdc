"""Names of quantisations: which spellings mean the same one."""

from __future__ import annotations

import re
from typing import Final

_BARE_BITS: Final = re.compile(r"(?:Q|INT)?(\d)(?:BITS?)?")
_OF_BITS: Final = ("Q{}", "Q{}KM", "Q{}KS", "Q{}KL", "Q{}KXL", "Q{}K", "Q{}0", "Q{}1", "IQ{}XS", "IQ{}NL")
"""What bits alone mean, the recommended kind first."""
_MIXTURES: Final = ("", "M", "S", "L", "XL")
"""What `Q4_K` and other names mean, after which files name the size of a mixture of formats."""
_DENSE: Final = ("BF16", "F16", "F32")


def plain(name: str) -> str:
    """A spelling without case, signs and what does not change the format: `UD-Q4_K_XL` is `Q4KXL`, `fp16` `F16`."""
    letters = re.sub(r"[^A-Z0-9]", "", name.strip().upper().removeprefix("UD-"))
    return re.sub(r"FP(16|32)", r"F\1", letters)


def meanings(quant: str) -> list[str]:
    """The plain names that a spelling can mean, the recommended one first."""
    name = plain(quant)
    if match := _BARE_BITS.fullmatch(name):
        return [kind.format(match[1]) for kind in _OF_BITS]
    return [name + mixture for mixture in _MIXTURES]


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
