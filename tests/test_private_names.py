"""What libraries do not promise is used in one package, where each use has a probe and a fallback."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
PRIVATE = re.compile(
    r"\btorch\.ops\b|\btriton\.(?:runtime|backends|compiler|knobs|JITFunction)\b"
    r"|\btransformers\.(?:conversion_mapping|core_model_loading|integrations)\b"
    r"|\b(?:torch|triton|transformers)(?:\.\w+)*\._(?!_)\w+"
    r"|^\s*from (?:torch|triton|transformers)(?:\.\w+)* import (?:.*\W)?_\w+",
    re.MULTILINE,
)
"""What these libraries do not promise. Members of their objects are the business of the linter (SLF)."""


def private_uses(source: Path) -> list[str]:
    """Lines outside of `private_api` that use what a library does not promise."""
    found = []
    for path in sorted((source / "cortex").rglob("*.py")):
        if "private_api" not in path.parts:
            text = path.read_text(encoding="utf-8")
            if not any(f"{name}." in text for name in ("torch", "triton", "transformers")):
                continue
            lines = {text.count("\n", 0, match.start() + 1) + 1 for match in PRIVATE.finditer(text)}
            found += [f"{path.relative_to(source)}:{line}: belongs into neuron/private_api" for line in sorted(lines)]
    return found


def test_what_libraries_do_not_promise_is_used_in_one_package() -> None:
    assert private_uses(SOURCE) == []


@pytest.mark.parametrize(
    "code",
    [
        "y = torch._addmm_activation(x)",
        "y = torch.ops.aten.mm(x)",
        "from torch.overrides import TorchFunctionMode, _get_current_function_mode",
        "from torch.utils._python_dispatch import TorchDispatchMode",
        "def f():\n    from triton.runtime import driver",
        "from transformers.conversion_mapping import get_model_conversion_mapping",
    ],
)
def test_detects_a_private_name_of_a_library(tmp_path: Path, code: str) -> None:
    for name in ("neuron/kernels", "neuron/private_api"):
        (tmp_path / "cortex" / name).mkdir(parents=True)
        (tmp_path / "cortex" / name / "x.py").write_text(f"import torch\n\n{code}\n")
    line = 4 if code.startswith("def") else 3
    assert private_uses(tmp_path) == [f"cortex/neuron/kernels/x.py:{line}: belongs into neuron/private_api"]
