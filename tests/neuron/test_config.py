from pathlib import Path

import pytest

from cortex.neuron.config import NeuronConfig, load
from cortex.settings import SettingsError

EXAMPLE = """
port = 14000
[[harnesses]]
name = "torch"
[harness.torch]
hf_cache = "/models/hub"
[limits]
prefill_chunk_tokens = 512
max_queue = 7
[[models]]
id = "little"
source = "/models/little.gguf"
[[default_models]]
id = "Qwen/Qwen3-0.6B"
harness = "torch"
quant = "q8_0"
tensor_parallel = 2
devices = [0, 1]
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "neuron.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(("value", "port"), [("tcp://10.0.0.1:80", 13131), ("14000", 14000)])
def test_port_is_a_key_beside_the_link_to_a_kubernetes_service(value: str, port: int) -> None:
    assert load(None, {"NEURON_SERVICE_HOST": "10.0.0.1", "NEURON_PORT": value}).address.port == port


def test_every_key_has_a_default() -> None:
    config = load(None, {})
    assert config == NeuronConfig()
    assert (config.address.host, config.address.port) == ("0.0.0.0", 13131)


def test_reads_a_file_and_overrides_from_the_environment(tmp_path: Path) -> None:
    config = load(write(tmp_path, EXAMPLE), {"NEURON_LIMITS__MAX_QUEUE": "9"})
    assert config.address == "0.0.0.0:14000"
    assert config.harness.torch.hf_cache == Path("/models/hub")
    assert (config.limits.prefill_chunk_tokens, config.limits.max_queue) == (512, 9)
    assert config.default_models[0].devices == (0, 1)
    assert config.models[0].source == "/models/little.gguf"


@pytest.mark.parametrize("name", ["torch", "candle"])
def test_accepts_every_name_of_the_engine(tmp_path: Path, name: str) -> None:
    text = f"[[harnesses]]\nname = '{name}'\n[[models]]\nid = 'a'\nharness = '{name}'\n"
    config = load(write(tmp_path, text), {})
    assert (config.harnesses[0].name, config.models[0].harness) == ("torch", "torch")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[limits]\nmax_qeue = 3", "max_queue"),
        (
            "[[models]]\nid = 'a'\ntensor_parallel = 2\npipeline_parallel = 2",
            "`a` has tensor_parallel and pipeline_parallel; choose one of them",
        ),
        (
            "[[models]]\nid = 'a'\ntensor_parallel = 2\n[[default_models]]\nid = 'a'\npipeline_parallel = 2",
            "`a` has tensor_parallel and pipeline_parallel; choose one of them",
        ),
        ("[[models]]\nid = 'a'\n[[models]]\nid = 'a'", "twice"),
        ("[[models]]\nid = 'a'\ncontext_tokens = 1", "context_tokens.*expected whole number ≥ 2, got 1"),
        ("[[default_models]]\nid = 'a'\nharness = 'vlm'", "no harness `vlm`; choose one of torch"),
        ("[[harnesses]]\nname = 'mine'", "the harness `mine` has no cmd"),
        ("[[harnesses]]\nname = 'docker'", "the harness `docker` needs `args`: the image"),
        ("[[harnesses]]\nname = 'a'\nlike = 'b'", "is like `b`, which is not ready-made; there are llama-server"),
        ("[[harnesses]]\nname = 'vllm'\nsleep = { path = 's' }", "the path 's'; a path begins with a slash"),
        ("[[harnesses]]\nname = 'sglang'\nsleep = { path = '/s' }", "has one of `sleep` and `wake`"),
        ("[[harnesses]]\nname = 'torch'\ncmd = 'x ${PORT}'", "is the built-in engine"),
        ("[[harnesses]]\nname = 'vllm'\ncmd = 'vllm serve'", r"has \$\{PORT\} neither in cmd nor in env"),
        ("[[harnesses]]\nname = 'vllm'\ncmd = 'vllm \"${PORT}'", "cmd of the harness `vllm` cannot be divided"),
        (
            "[[models]]\nid = 'a'\nmax_replicas = 2\ntensor_parallel = 2",
            "has `max_replicas`, which is for models on one",
        ),
    ],
)
def test_rejects_a_mistake_with_a_hint(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load(write(tmp_path, text), {})


def test_settings_under_the_former_name_of_the_engine_are_those_of_the_engine(tmp_path: Path) -> None:
    text = "[harness.candle]\nhf_cache = '/srv/hub'\n"
    config = load(write(tmp_path, text), {"NEURON_HARNESS__CANDLE__DTYPE": "float32"})
    assert (config.harness.torch.hf_cache, config.harness.torch.dtype) == (Path("/srv/hub"), "float32")
    with pytest.raises(SettingsError, match=r"harness.torch is given twice in .* line 3: it is the same as `candle`"):
        load(write(tmp_path, f"{text}[harness.torch]\ndtype = 'float32'\n"), {})


def test_rejects_unknown_environment_variable() -> None:
    with pytest.raises(SettingsError, match="NEURON_LIMITS_MAX_QUEUE: did you mean NEURON_LIMITS__MAX_QUEUE"):
        load(None, {"NEURON_LIMITS_MAX_QUEUE": "3"})
