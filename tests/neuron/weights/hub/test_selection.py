from __future__ import annotations

import pytest

from cortex.neuron.weights.errors import NotOnHub
from cortex.neuron.weights.hub.selection import Selection, gguf_of, missing_parts, select, variants

QUANTS = ["m-Q2_K.gguf", "m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-Q8_0.gguf", "m-bf16.gguf", "mmproj-m-f16.gguf"]


@pytest.mark.parametrize(
    ("paths", "quant", "chosen"),
    [
        (QUANTS, "Q4_K_M", ["m-Q4_K_M.gguf", "mmproj-m-f16.gguf"]),
        (QUANTS, "q8_0", ["m-Q8_0.gguf", "mmproj-m-f16.gguf"]),
        (QUANTS, "BF16", ["m-bf16.gguf", "mmproj-m-f16.gguf"]),
        (QUANTS, "m-Q4_K_S.gguf", ["m-Q4_K_S.gguf", "mmproj-m-f16.gguf"]),
        ([*QUANTS, "mmproj-m-f32.gguf", "mmproj-m-bf16.gguf"], "Q2_K", ["m-Q2_K.gguf", "mmproj-m-bf16.gguf"]),
        (["m-UD-Q4_K_XL.gguf", "m-Q4_K_M.gguf"], "Q4_K_XL", ["m-UD-Q4_K_XL.gguf"]),
        (["only-IQ4_XS.gguf", "mmproj.gguf"], None, ["only-IQ4_XS.gguf", "mmproj.gguf"]),
        (["unlabelled.gguf", "README.md"], None, ["unlabelled.gguf"]),
        (["Q8_0/m-00001-of-00002.gguf", "Q8_0/m-00002-of-00002.gguf", "m-Q4_0.gguf"], "Q8_0",
         ["Q8_0/m-00001-of-00002.gguf", "Q8_0/m-00002-of-00002.gguf"]),
        (["Q8_0/m.gguf", "mmproj-F16.gguf", "other/mmproj-BF16.gguf"], None, ["Q8_0/m.gguf", "mmproj-F16.gguf"]),
    ],
)  # fmt: skip
def test_selects_one_gguf_model(paths: list[str], quant: str | None, chosen: list[str]) -> None:
    assert select("org/m", paths, quant) == Selection(tuple(chosen), entry=chosen[0])


def test_selects_safetensors_with_companion_files_and_without_other_layouts() -> None:
    paths = [
        "config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors", "merges.txt",
        "model-00002-of-00002.safetensors", "consolidated.safetensors", "original/model.safetensors", "LICENSE.txt",
        "tokenizer.model", "vocab.json", "chat_template.jinja", "m-Q8_0.gguf", "flax_model.msgpack",
    ]  # fmt: skip
    selection = select("org/m", paths, None)
    assert selection.entry is None
    assert set(selection.paths) == {
        "config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors", "merges.txt",
        "model-00002-of-00002.safetensors", "tokenizer.model", "vocab.json", "chat_template.jinja",
    }  # fmt: skip


def test_modules_after_the_pooling_of_an_embedding_model_are_selected() -> None:
    modules = ["1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "modules.json"]
    modules += [f"adapters/retrieval/adapter_{name}" for name in ("config.json", "model.safetensors")]
    others = [
        "adapters/clustering/adapter_model.safetensors",
        "2_Dense/pytorch_model.bin",
        "onnx/model.onnx",
        "onnx/config.json",
        "openvino/model.safetensors",
    ]
    selection = select("org/m", ["config.json", "model.safetensors", *modules, *others], None)
    assert set(selection.paths) == {"config.json", "model.safetensors", *modules}


@pytest.mark.parametrize(
    ("paths", "quant", "message"),
    [
        (QUANTS, "Q4_0", r"nearest is org/m:Q4_K_[MS]"),
        (QUANTS, "Q3_K_M", r"nearest is org/m:Q(2_K|4_K_M)"),
        (QUANTS, "Q6_K", r"nearest is org/m:Q\d_"),
        (["m-IQ4_XS.gguf", *QUANTS[1:]], "q3", r"nearest is org/m:Q4_K_[MS]"),
        (QUANTS, None, r"name one, such as org/m:Q4_K_M"),
        (["pytorch_model.bin"], "Q4_K_M", "has no weights, so no Q4_K_M"),
        (["pytorch_model.bin"], None, "neither safetensors nor GGUF"),
        ([], None, "neither"),
    ],
)
def test_error_lists_the_alternatives_when_no_model_matches(paths: list[str], quant: str | None, message: str) -> None:
    with pytest.raises(NotOnHub, match=message):
        select("org/m", paths, quant)


@pytest.mark.parametrize(
    ("quant", "selected"),
    [
        ("q4_k_m", "m-Q4_K_M.gguf"),
        ("q4km", "m-Q4_K_M.gguf"),
        ("q4", "m-Q4_K_M.gguf"),
        ("q4_k", "m-Q4_K_M.gguf"),
        ("q4k", "m-Q4_K_M.gguf"),
        ("Q4_K_S", "m-Q4_K_S.gguf"),
        ("q3", "m-UD-Q3_K_XL.gguf"),
        ("q3kxl", "m-UD-Q3_K_XL.gguf"),
        ("iq4xs", "m-IQ4_XS.gguf"),
        ("q5", "m.q5.gguf"),
        ("q6k", "m-Q6_K.gguf"),
        (" Q6_K ", "m-Q6_K.gguf"),
        ("q8", "m-Q8_0.gguf"),
        ("int8", "m-Q8_0.gguf"),
        ("8bit", "m-Q8_0.gguf"),
        ("INT4", "m-Q4_K_M.gguf"),
        ("f16", "m-fp16.gguf"),
        ("FP16", "m-fp16.gguf"),
    ],
)
def test_any_spelling_selects_a_gguf(quant: str, selected: str) -> None:
    paths = [
        "m-IQ4_XS.gguf", "m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-Q6_K.gguf", "m-Q8_0.gguf", "m-UD-Q3_K_XL.gguf",
        "m-fp16.gguf", "m.q5.gguf", "model.safetensors",
    ]  # fmt: skip
    assert select("org/m", paths, quant).entry == selected
    assert gguf_of([selected], quant) == selected


def test_bits_alone_select_uneven_levels_where_nothing_else_has_them() -> None:
    assert select("org/m", ["m-IQ4_NL.gguf", "m-Q8_0.gguf"], "q4").entry == "m-IQ4_NL.gguf"


@pytest.mark.parametrize("ggufs", [[], ["m-Q8_0.gguf"], ["m-Q8_0.gguf", "m-Q6_K.gguf", "mmproj-Q4_K_M.gguf"]])
@pytest.mark.parametrize("quant", ["q4", "Q4_K_M", "int4"])
def test_dense_weights_are_selected_where_no_gguf_has_the_quantisation(ggufs: list[str], quant: str) -> None:
    found = select("org/m", ["config.json", "model.safetensors", *ggufs], quant)
    assert found == Selection(("config.json", "model.safetensors"), entry=None)


@pytest.mark.parametrize(
    ("ggufs", "message"),
    [
        ([], "org/m has no q2, and no recipe for it$"),
        (["m-Q4_K_M.gguf"], "has no q2, and no recipe for it; the nearest is org/m:Q4_K_M"),
    ],
)
def test_dense_weights_that_cannot_be_quantised_so_are_not_downloaded(ggufs: list[str], message: str) -> None:
    with pytest.raises(NotOnHub, match=message):
        select("org/m", ["model.safetensors", *ggufs], "q2", objection=lambda _: "no recipe for it")


def test_distinguishes_two_models_of_one_quantisation() -> None:
    paths = ["big-Q4_K_M.gguf", "small-Q4_K_M.gguf", "small-Q8_0.gguf"]
    assert list(variants(paths)) == ["big-Q4_K_M", "small-Q4_K_M", "Q8_0"]
    assert select("org/m", paths, "small-Q4_K_M") == Selection(("small-Q4_K_M.gguf",), "small-Q4_K_M.gguf")
    assert select("org/m", paths, "q8").entry == "small-Q8_0.gguf"
    with pytest.raises(NotOnHub, match="there are big-Q4_K_M, small-Q4_K_M, Q8_0"):
        select("org/m", paths, "q4")
    with pytest.raises(NotOnHub, match="there are big-Q4_K_M, small-Q4_K_M, Q8_0"):
        select("org/m", ["model.safetensors", *paths], "Q4_K_M")


@pytest.mark.parametrize(
    ("path", "quant"), [("m-Q4_K_M.gguf", "q8"), ("m.gguf", "q4"), ("m-Q8_0.gguf", "q"), ("m-IQ4_XS.gguf", "q4_k_m")]
)
def test_a_file_of_another_quantisation_is_not_taken_for_it(path: str, quant: str) -> None:
    assert gguf_of([path], quant) is None


def test_finds_missing_parts_of_a_split_model() -> None:
    assert missing_parts(Selection(("m-00001-of-00003.gguf", "m-00003-of-00003.gguf"), "m-00001-of-00003.gguf")) == [
        "m-00002-of-00003.gguf"
    ]
    assert missing_parts(Selection(("m.gguf",), "m.gguf")) == []
    assert missing_parts(Selection(("model.safetensors",), None)) == []


def test_variants_are_what_select_chooses_by_their_quantisation() -> None:
    paths = [*QUANTS, "Q6_K/m-00001-of-00002.gguf", "Q6_K/m-00002-of-00002.gguf", "model.safetensors", "config.json"]
    found = variants(paths)
    assert list(found) == [None, "Q6_K", "Q2_K", "Q4_K_M", "Q4_K_S", "Q8_0", "BF16"]
    for quant, selection in found.items():
        assert selection == select("org/m", paths, quant)
    assert variants(["README.md", "mmproj-m-f16.gguf"]) == {}
