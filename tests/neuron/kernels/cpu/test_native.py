"""What `native/products.c` computes in addition to the GEMM, and hosts on which it cannot be compiled."""

import multiprocessing
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cortex.neuron.engine.memory.dtypes import likely_multiplies_codes
from cortex.neuron.kernels.activations import ACTIVATIONS, activate_reference
from cortex.neuron.kernels.cpu.layout import CpuLayout
from cortex.neuron.kernels.cpu.native import NativeMatrix, multiplies_codes
from cortex.neuron.kernels.matrix import Epilogue, Prologue
from cortex.neuron.kernels.native import library as native_library
from cortex.neuron.kernels.norm import rms_norm_reference

from ....waiting import WAIT_S

OUTPUTS, INPUTS = 200, 96


@pytest.fixture
def matrix() -> NativeMatrix:
    try:
        native_library.native_library()
    except NotImplementedError as error:
        pytest.skip(str(error))
    generator = torch.Generator().manual_seed(0)
    matrix = NativeMatrix(CpuLayout(8, 32, 128), OUTPUTS, INPUTS, torch.device("cpu"))
    code = torch.randint(0, 256, (OUTPUTS, INPUTS), dtype=torch.uint8, generator=generator)
    scale = torch.full((OUTPUTS, INPUTS // 32), 2.0**-10)
    matrix.put_codes(0, code, scale, -128 * scale)
    return matrix


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 4, 7])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("before", ["nothing", "norm", *ACTIVATIONS])
def test_norm_activation_and_residual_are_computed_in_the_same_pass(
    matrix: NativeMatrix, dtype: torch.dtype, rows: int, has_residual: bool, before: str
) -> None:
    generator = torch.Generator().manual_seed(1)
    activation = before if before in ACTIVATIONS else None
    x = (20 * torch.randn(rows, INPUTS * (1 if activation is None else 2), generator=generator)).to(dtype)
    norm = torch.rand(INPUTS, generator=generator).to(dtype) if before == "norm" else None
    residual = torch.randn(rows, OUTPUTS, generator=generator).to(dtype) if has_residual else None
    expected = x.float()
    if norm is not None:
        expected = rms_norm_reference(expected, norm.float(), 1e-5)
    if activation is not None:
        expected = activate_reference(expected, activation)
    expected = expected @ matrix.values().T
    if residual is not None:
        expected += residual.float()
    y = matrix.product(x, Prologue(norm, 1e-5, activation), Epilogue(residual=residual))
    assert (y.shape, y.dtype) == (expected.shape, dtype)
    assert (y.float() - expected).norm() < (2e-4 if dtype == torch.float32 else 5e-3) * expected.norm()


def test_norm_weights_are_not_rounded_to_the_dtype_of_the_input(matrix: NativeMatrix) -> None:
    x = torch.randn(3, INPUTS, generator=torch.Generator().manual_seed(4)).bfloat16()
    weights = torch.full((INPUTS,), 1 + 2.0**-8), torch.ones(INPUTS)  # bfloat16 rounds both to 1
    scaled, plain = (matrix.product(x, Prologue(weight)).float().norm() for weight in weights)
    assert abs(scaled / plain - (1 + 2.0**-8)) < 2.0**-10


def test_norm_weights_may_be_in_half_precision(matrix: NativeMatrix) -> None:
    x = torch.randn(3, INPUTS, generator=torch.Generator().manual_seed(4))
    norm = torch.rand(INPUTS, generator=torch.Generator().manual_seed(5)).bfloat16()
    assert torch.equal(matrix.product(x, Prologue(norm)), matrix.product(x, Prologue(norm.float())))


@pytest.mark.parametrize("number", [-1, OUTPUTS, 1 << 40])
def test_rows_that_do_not_exist_are_rejected(matrix: NativeMatrix, number: int) -> None:
    with pytest.raises(IndexError, match=str(number)):
        matrix.rows(torch.tensor([0, number, 1]), torch.float32)


def test_rows_do_not_depend_on_those_beside_them(matrix: NativeMatrix) -> None:
    x = torch.randn(7, INPUTS, generator=torch.Generator().manual_seed(3))
    assert torch.equal(matrix.product(x), torch.cat([matrix.product(row) for row in x.split(1)]))


def test_threads_change_nothing(matrix: NativeMatrix) -> None:
    rows = 15  # enough to be worth several threads
    x, before = torch.randn(rows, INPUTS, generator=torch.Generator().manual_seed(2)), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(matrix.product(x))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


def test_numbers_without_bounds_stay_visible(matrix: NativeMatrix) -> None:
    x = torch.zeros(2, INPUTS)
    x[1, 40] = float("nan")
    y = matrix.product(x)
    assert y[0].eq(0).all()
    assert y[1].isnan().all()


@pytest.mark.usefixtures("matrix")
@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-38, 1e-37])
def test_products_of_numbers_next_to_zero_are_next_to_zero(size: float) -> None:
    matrix = NativeMatrix(CpuLayout(4, 32, None), OUTPUTS, INPUTS, torch.device("cpu"))
    matrix.put_values(0, torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(9)))
    x = torch.full((1, INPUTS), size)
    x[0, ::40] = 0
    assert matrix.product(x).abs().max() <= matrix.values().abs().sum(1).max() * size


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e6])
def test_scales_that_float16_cannot_hold_stay_visible(matrix: NativeMatrix, number: float) -> None:
    code = torch.full((OUTPUTS, INPUTS), 200, dtype=torch.uint8)
    scale = torch.ones(OUTPUTS, INPUTS // 32)
    scale[70, 1] = number
    matrix.put_codes(0, code, scale, -128 * scale)
    rows = matrix.values()
    assert not rows[70, 32:64].isfinite().any()
    assert int(rows.isfinite().sum()) == rows.numel() - 32
    assert matrix.product(torch.ones(1, INPUTS))[0].isfinite().logical_not().nonzero().tolist() == [[70]]


@pytest.mark.usefixtures("matrix")
@pytest.mark.parametrize("deviation", [1e-6, 1e-4, 1.0])
@pytest.mark.parametrize("zero", [None, 128])
def test_small_numbers_are_quantised_as_exactly_as_large_ones(deviation: float, zero: int | None) -> None:
    values = deviation * torch.randn(64, 256, generator=torch.Generator().manual_seed(6))
    matrix = NativeMatrix(CpuLayout(8, 32, zero), 64, 256, torch.device("cpu"))
    matrix.put_values(0, values)
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(7))
    for ours, exact in ((matrix.values(), values), (matrix.product(x), x @ values.T)):
        assert (ours - exact).norm() < 0.015 * exact.norm()


@pytest.mark.usefixtures("matrix")
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("inputs", [32, 96, 256])
def test_multiples_of_a_unit_are_looked_up_exactly(inputs: int, sign: int) -> None:
    """Q2_K: scales and minimums are products of a float16 and a number of four bits."""
    generator, pairs = torch.Generator().manual_seed(8), -(-inputs // 64)
    matrix = NativeMatrix(CpuLayout(2, 16, None), OUTPUTS, inputs, torch.device("cpu"))
    code = torch.randint(0, 4, (OUTPUTS, inputs), dtype=torch.uint8, generator=generator)
    units = torch.rand(2, OUTPUTS, pairs, 1, generator=generator).mul(sign).half().float()
    multiples = torch.randint(0, 16, (2, OUTPUTS, pairs, 4), generator=generator)
    multiples[:, ::3] *= 0
    scale, minimum = (units * multiples).flatten(2)[..., : inputs // 16]
    matrix.put_codes(0, code, scale, -minimum)
    expected = (code.view(OUTPUTS, -1, 16) * scale[..., None] - minimum[..., None]).flatten(1)
    assert torch.equal(matrix.values(), expected)
    x = torch.randn(5, inputs, generator=generator)
    assert (matrix.product(x) - x @ expected.T).norm() < 2e-4 * (x @ expected.T).norm()


@pytest.mark.usefixtures("matrix")
@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e6])
def test_short_scales_that_float16_cannot_hold_stay_visible(number: float) -> None:
    matrix = NativeMatrix(CpuLayout(2, 16, None), 64, 128, torch.device("cpu"))
    scale = torch.ones(64, 8)
    scale[5, 3] = number
    matrix.put_codes(0, torch.ones(64, 128, dtype=torch.uint8), scale, -scale)
    rows = matrix.values()
    assert not rows[5, :64].isfinite().any()
    assert int(rows.isfinite().sum()) == rows.numel() - 64


def test_scales_in_float16_are_looked_up_exactly(matrix: NativeMatrix) -> None:
    places = torch.arange(OUTPUTS * INPUTS // 32).mul(52).to(torch.int16)
    scale = places.view(torch.float16).view(OUTPUTS, -1).float() / 256
    assert scale.isfinite().all()
    matrix.put_codes(0, torch.full((OUTPUTS, INPUTS), 129, dtype=torch.uint8), scale, -128 * scale)
    assert torch.equal(matrix.values(), scale.repeat_interleave(32, 1))


@pytest.fixture
def fresh() -> Iterator[None]:
    for function in (native_library.native_library_or_none, multiplies_codes):
        function.cache_clear()
    yield
    for function in (native_library.native_library_or_none, multiplies_codes):
        function.cache_clear()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("compiler", ["false", "true", "no-such-compiler"])
def test_weights_are_dense_where_nothing_can_be_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiler: str
) -> None:
    monkeypatch.setenv("CORTEX_CACHE", str(tmp_path))
    monkeypatch.setattr(native_library, "compiler", lambda: shutil.which(compiler))
    with pytest.raises(NotImplementedError):
        native_library.native_library()
    assert not multiplies_codes(torch.float32)
    assert not likely_multiplies_codes(), "estimates follow"
    assert not list(tmp_path.glob("kernels/*.so"))


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return path


@pytest.fixture
def cache(fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, matrix: NativeMatrix) -> Path:
    """An empty cache, on a host whose compiler makes something small of any source."""
    del fresh, matrix
    source = tmp_path / "nothing.c"
    source.write_text("int run(void) { return 0; }\n")
    command = f'exec "{native_library.compiler()}" -shared -fPIC "{source}" "$@"'
    quick = script(tmp_path / "quick", f'while [ "$1" != -o ]; do shift; done\n{command}')
    monkeypatch.setenv("CC", str(quick))
    monkeypatch.setenv("CORTEX_CACHE", str(tmp_path))
    return tmp_path / "kernels"


def load_again() -> None:
    native_library.native_library_or_none.cache_clear()
    native_library.native_library()


def test_products_are_compiled_once_per_host(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    load_again()
    (built,) = cache.iterdir()
    written = built.stat().st_mtime_ns
    load_again()
    assert built.stat().st_mtime_ns == written
    assert caplog.text.count("compiling the functions in C") == 1


def test_processes_that_start_together_compile_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = cache.parent / "calls"
    command = f'echo called >> "{calls}"\nsleep 0.2\nexec "{native_library.compiler()}" "$@"'
    monkeypatch.setenv("CC", str(script(cache.parent / "slow", command)))
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=load_again) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(WAIT_S)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert calls.read_text().split() == ["called"]


def test_damaged_library_is_compiled_again(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    load_again()
    (whole,) = cache.iterdir()
    damaged = tmp_path / "damaged" / "kernels" / whole.name  # elsewhere: a library is opened once per path
    damaged.parent.mkdir(parents=True)
    damaged.touch()
    monkeypatch.setenv("CORTEX_CACHE", str(tmp_path / "damaged"))
    load_again()
    assert damaged.stat().st_size > 0


@pytest.mark.usefixtures("fresh")
def test_reason_of_a_failed_compilation_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CORTEX_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", str(script(tmp_path / "compiler", "echo 'disk is full' >&2\nexit 1")))
    for _ in range(2):
        assert native_library.native_library_or_none() is None
        with pytest.raises(NotImplementedError):
            native_library.native_library()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "disk is full" in caplog.text


@pytest.mark.parametrize("failing", ["_compile", "_load"], ids=["before it fails", "as it fails"])
def test_library_that_another_process_compiles_counts(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failing: str
) -> None:
    load_again()
    (compiled,) = cache.iterdir()
    other = tmp_path / "other" / "kernels"
    monkeypatch.setenv("CORTEX_CACHE", str(other.parent))

    def times_out(*_arguments: object) -> None:
        other.mkdir(parents=True, exist_ok=True)
        (other / compiled.name).write_bytes(compiled.read_bytes())
        raise subprocess.TimeoutExpired("cc", 120)

    monkeypatch.setattr(native_library, failing, times_out)
    native_library.native_library_or_none.cache_clear()
    assert (native_library.native_library_or_none() is not None) == (failing == "_compile")
    assert native_library.may_have_library()


@pytest.mark.usefixtures("fresh")
def test_host_without_a_home_folder_has_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CORTEX_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "~no-such-user/cache")
    assert not native_library.may_have_library()
    assert native_library.native_library_or_none() is None
