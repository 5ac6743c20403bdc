"""Writes docs/models.md from the code's tables: `python -m cortex.neuron.models_page docs/models.md`."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import getmodule
from pathlib import Path
from types import ModuleType
from typing import Any

from cortex.neuron.families import registry
from cortex.neuron.families.family import ModelFamily
from cortex.neuron.families.tool_calls import HERMES_JSON, PLAIN_JSON
from cortex.neuron.kernels.quantised.layout import GGML_LAYOUTS
from cortex.neuron.kernels.quantised.recipes import RECIPES
from cortex.neuron.models.architecture import Architecture, TextPart
from cortex.neuron.models.registry import ENCODERS, FAMILIES
from cortex.neuron.models.transformers.library import COMPARED, EXTRA
from cortex.neuron.text.template.detect import MARKERS
from cortex.neuron.weights.safetensors.published import MODELOPT_ALGORITHMS, READABLE_METHODS

Family = Callable[[Mapping[str, Any]], Architecture]

INTRODUCTION = """\
# Models

Generated from the tables of the code by `make docs`; edit those, not this page. How to add a family:
[adding-a-model.md](adding-a-model.md).

`cortex models` shows the backend of every model: `native`, which are the families of this page, or `transformers`.

## Native families

A model's family follows from the `model_type` of its `config.json`. **Formats**: all are read from safetensors, dense
and [quantised](#formats); GGUF has the architecture's name in such files. **Divided**: `tensor_parallel` divides every
layer, `pipeline_parallel` divides by layers. **Tools** and **reasoning** are what the published models write
([below](#tool-calls-and-reasoning)); — if they do not reason. **Pictures**: whether
those in prompts are read, in families that are published with a vision tower: from safetensors, and from GGUF with the
model's `mmproj` file in the same directory, which is downloaded with it; — without a tower.
"""

ENCODED = """\
## Encoders

They make vectors and scores of texts (`/v1/embeddings`, `/v1/rerank`), on one device. Decoders do so too where their
files describe a pooling: Qwen3-Embedding and Qwen3-Reranker (`qwen3`), EmbeddingGemma (`gemma3_text`), and
jina-embeddings-v5's repositories for one task (`qwen3`, `eurobert`). Its repositories with adapters for four tasks get
that for retrieval.
"""

FORMATS = """\
## Formats

- **safetensors** in float32, float16 and bfloat16, and quantised by {methods} (`quant_method` of the config),
  or by NVIDIA's `modelopt` as {modelopt}.
- **GGUF**: {ggml}, F32, F16 and BF16. Matrices stay quantised in memory.
- **quantised at load**: `quant = "…"` makes {recipes} of dense weights.
- **tokenizers**: `tokenizer.json`, Mistral's `tekken.json`, and the vocabularies of GGUF files. Where a repository has
  only `tekken.json` and no chat template, conversations are written as its version says (v3, v7, v11 or v13).
"""

LIBRARY = """\
## Everything else: `transformers`

With `pip install '{extra}'` in a checkout, a node also runs models that no native family has, if the
installed `transformers` library has a causal language model of their `model_type` which accepts other attention
implementations. The library's modules compute; weights, KV pages, batches, prefix cache, sleep and quantised linear
layers are those of the native families.

- From safetensors. Code in a model's repository is never run.
- `tensor_parallel` divides the linear layers that the library has a plan for; experts and embeddings are whole on
  every device. `pipeline_parallel` is rejected.
- `quant` applies to linear layers; experts and embeddings stay dense.
- Rejected by name, before any weight is read: encoder-decoder models, recurrent or convolutional states, attention
  with a mask of its own or an option that is not implemented, rope scalings that depend on a sequence's length
  (`dynamic`, `longrope`).
- On a GPU, steps of single tokens are captured as graphs where all operations of the modules can be.

Compared with the library, logit by logit, by the tests: {compared}.
"""

SYNTAXES = """\
## Tool calls and reasoning

They follow from the chat template of the checkpoint, whichever family and backend it has. The first row whose marks
the template contains decides. With none of them, the marks among the model's tokens do, and else calls are `{plain}`.
A template without tools gets `{hermes}`.
"""


def models_page() -> str:
    """The whole page as Markdown."""
    methods, ggml = (", ".join(f"`{name}`" for name in names) for names in (READABLE_METHODS, GGML_LAYOUTS))
    recipes = ", ".join(f"`{name}`" for name in RECIPES)
    compared = ", ".join(f"`{name}`" for name in COMPARED)
    return "\n".join(
        [
            INTRODUCTION,
            *_table(
                ["`model_type`", "models", "formats", "divided", "tools", "reasoning", "pictures"], sorted(_rows())
            ),
            "",
            ENCODED,
            *_table(["`model_type`", "models", "GGUF"], sorted(_encoder_rows())),
            "",
            LIBRARY.format(extra=EXTRA, compared=compared),
            FORMATS.format(methods=methods, modelopt=" or ".join(MODELOPT_ALGORITHMS), ggml=ggml, recipes=recipes),
            SYNTAXES.format(plain=PLAIN_JSON, hermes=HERMES_JSON),
            *_table(["marks", "tool calls"], ([_code(*marks), f"`{syntax}`"] for marks, syntax in MARKERS)),
            "",
            "Reasoning is what a model writes between a pair of marks that its template contains:\n",
            *_table(["begin", "end"], ([_code(pair.open), _code(pair.close)] for pair in registry.REASONING_MARKERS)),
            "",
        ]
    )


def _rows() -> Iterator[list[str]]:
    """A row for each family: the types that one class or function reads."""
    for family, names in _grouped(FAMILIES):
        rows: defaultdict[tuple[Any, ...], list[str]] = defaultdict(list)
        for name in names:
            described = registry.BY_TYPE[name]
            rows[described.models, described.tool_syntaxes, described.reasoning].append(name)
        for (models, syntaxes, markers), types in rows.items():
            known = _code(*dict.fromkeys(file for name in types for file in _files(registry.BY_TYPE[name])))
            formats = f"safetensors, GGUF ({known})" if known else "safetensors"
            tools = ", ".join(f"`{syntax}`" for syntax in syntaxes)
            reasoning = _code(markers.open) if markers is not None else "—"
            yield [_code(*types), models, formats, _division(family), tools, reasoning, _pictures(family) or "—"]


def _files(family: ModelFamily) -> Iterator[str]:
    """The architectures of GGUF files with models of a family, or with their language model."""
    yield from (architecture.name for architecture in family.gguf)
    yield from family.also_gguf
    for language in (registry.BY_TYPE[name] for names in family.projectors.values() for name in names):
        yield from (architecture.name for architecture in language.gguf if not architecture.pools)


def _encoder_rows() -> Iterator[list[str]]:
    for _, names in _grouped(ENCODERS):
        files = dict.fromkeys(file for name in names for file in _files(registry.BY_TYPE[name]))
        yield [_code(*names), registry.BY_TYPE[names[0]].models, _code(*files)]


def _grouped(families: Mapping[str, Family]) -> Iterator[tuple[Family, list[str]]]:
    """Each class or function, and the types that it reads."""
    types: defaultdict[Family, list[str]] = defaultdict(list)
    for model_type, family in families.items():
        types[family].append(model_type)
    yield from types.items()


def _division(family: Family) -> str:
    has_stages = not isinstance(family, type) or not issubclass(family, Architecture) or family.has_stages
    return "tensor, pipeline" if has_stages else "tensor"


def _pictures(family: Family) -> str:
    """A function chooses among the text parts of its module."""
    parts = [family] if isinstance(family, type) else vars(_module(family)).values()
    is_part = any(isinstance(each, type) and issubclass(each, TextPart) and each is not TextPart for each in parts)
    if not is_part:
        return ""
    has_tower = any(each.tower for name, each in registry.BY_TYPE.items() if FAMILIES.get(name) is family)
    return "read" if has_tower else "not read"


def _module(family: Family) -> ModuleType:
    module = getmodule(family)
    assert module is not None
    return module


def _code(*texts: str) -> str:
    return ", ".join(f"`{text}`" for text in texts).replace("|", r"\|")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(models_page(), encoding="utf-8")
