from __future__ import annotations

import threading
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer

from cortex.neuron.families.registry import SPLITS
from cortex.neuron.text.errors import TextFileMalformed, TokenizerMissing, TokenizerUnsupported
from cortex.neuron.text.tokenizer.encoder import TextsToEncode
from cortex.neuron.text.tokenizer.gguf_vocabulary import SPACE
from cortex.neuron.text.tokenizer.library import LibraryTokenizer
from cortex.neuron.text.tokenizer.tokenizer import Tokenizer as TextTokenizer
from cortex.neuron.text.tokenizer.vocabulary import Vocabulary

from ..conftest import CORPUS, local, write_model

TEXTS = (
    *CORPUS,
    "",
    " ",
    "\n\n  x",
    "I'M he's WE'LL 12 1234567 ٣٤٥",
    "ẛ̣ é é न्दी",  # not in normal form C
    "<|im_start|>user\nhi<|im_end|>\n<think>\nhm</think> x<tool_call>",
    "a<|im_end|>b <|im_end|> c",
)


def load(path: Path) -> TextTokenizer:
    return local(LibraryTokenizer.load(path))


def from_gguf(metadata: dict[str, Any]) -> TextTokenizer:
    return local(LibraryTokenizer.from_gguf(metadata))


def reference(metadata: dict[str, Any]) -> Tokenizer:
    """The reference library's own reading of the same metadata."""
    renames = GGUF_TOKENIZER_MAPPING["tokenizer"]
    described = {name: metadata[f"tokenizer.{key}"] for key, name in renames.items() if f"tokenizer.{key}" in metadata}
    tokenizer: Tokenizer = convert_gguf_tokenizer("llama", described)[0]
    return tokenizer


@pytest.mark.parametrize("name", ["gpt-2", "default", "llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o"])
def test_byte_level_gguf_vocabulary_encodes_like_the_reference(gguf_metadata: dict[str, Any], name: str) -> None:
    metadata = {**gguf_metadata, "tokenizer.ggml.pre": name}
    ours = from_gguf(metadata)
    theirs = reference(metadata)
    for text in TEXTS:
        if SPLITS[name].normal_form_c:
            text = normalizers.NFC().normalize_str(text)
        expected = theirs.encode(text, add_special_tokens=False)
        if SPLITS[name].whole_words_first:  # the reference lacks this option, but must split alike
            cuts = LibraryTokenizer.from_gguf(metadata).backend.pre_tokenizer
            assert cuts.pre_tokenize_str(text) == theirs.pre_tokenizer.pre_tokenize_str(text)
        else:
            assert ours.encode(text) == expected.ids
        assert ours.decode(ours.encode(text)) == text


def test_qwen_text_is_normalised_to_nfc(gguf_metadata: dict[str, Any]) -> None:
    tokenizer = from_gguf({**gguf_metadata, "tokenizer.ggml.pre": "qwen2"})
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")


def test_smollm_digits_are_single_tokens(gguf_metadata: dict[str, Any]) -> None:
    tokenizer = from_gguf({**gguf_metadata, "tokenizer.ggml.pre": "smollm"})
    assert [tokenizer.decode([i]) for i in tokenizer.encode("1234")] == ["1", "2", "3", "4"]


def test_same_vocabulary_gives_the_same_ids_from_both_kinds_of_file(
    backend: Tokenizer, gguf_metadata: dict[str, Any], tmp_path: Path
) -> None:
    directory = load(write_model(tmp_path, backend, "chatml"))
    gguf = from_gguf(gguf_metadata)
    assert directory.vocab_size == gguf.vocab_size == len(gguf_metadata["tokenizer.ggml.tokens"])
    assert directory.named_tokens == gguf.named_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert sorted(directory.vocabulary.whole_tokens, key=str) == sorted(gguf.vocabulary.whole_tokens, key=str)
    assert directory.special_ids == gguf.special_ids
    for text in TEXTS:
        assert directory.encode(text) == gguf.encode(text)


@pytest.fixture(scope="module")
def sentencepiece() -> dict[str, Any]:
    """A SentencePiece vocabulary with byte fallback, as in GGUF: pieces and scores, no merges."""
    model = Tokenizer(models.BPE(unk_token="<unk>"))
    model.normalizer = normalizers.Replace(" ", SPACE)
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False, limit_alphabet=60)
    model.train_from_iterator([text.replace("\n", " ") for text in CORPUS[:2] * 4], trainer)
    vocabulary = model.get_vocab()
    learned = sorted(vocabulary, key=vocabulary.__getitem__)
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    merged = sorted(piece for piece in learned if len(piece) > 1)
    merged.sort(key=vocabulary.__getitem__)
    single = [piece for piece in learned if len(piece) == 1]
    tokens = pieces + merged + single
    scores = [0.0] * len(pieces) + [-float(i) for i in range(len(merged))] + [-1e6 - i for i in range(len(single))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(merged) + len(single)),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def test_sentencepiece_gguf_vocabulary_encodes_like_the_reference(sentencepiece: dict[str, Any]) -> None:
    ours, theirs = from_gguf(sentencepiece), reference(sentencepiece)
    for text in (*CORPUS, "the lazy dog", "  two  spaces", "x</s> the fox", "😀"):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids, text


def test_sentencepiece_keeps_the_space_of_a_continuation_and_spells_bytes(sentencepiece: dict[str, Any]) -> None:
    tokenizer = from_gguf(sentencepiece)
    assert tokenizer.decode(tokenizer.encode("the 😀 fox")) == " the 😀 fox"
    assert tokenizer.encode_document("fox")[0] == 1  # the begin token, which these models expect
    assert tokenizer.token_bytes(3 + 0xF0) == b"\xf0"


def test_prefix_space_is_omitted_if_the_file_says_so(sentencepiece: dict[str, Any]) -> None:
    tokenizer = from_gguf({**sentencepiece, "tokenizer.ggml.add_space_prefix": False})
    assert tokenizer.decode(tokenizer.encode("fox")) == "fox"


def test_gemma4_gguf_vocabulary_encodes_like_its_published_form(sentencepiece: dict[str, Any]) -> None:
    """Merges in place of scores, no space before a text, and more tokens that end a response than the file names."""
    tokens = [*sentencepiece["tokenizer.ggml.tokens"], "<turn|>", "<|tool_response>"]
    known = set(tokens)
    merges = [
        (token[:cut], token[cut:])
        for token in tokens[259:-2]
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
    ids = {token: number for number, token in enumerate(tokens)}
    published = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    published.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer = from_gguf(
        {
            **{key: value for key, value in sentencepiece.items() if not key.endswith("scores")},
            "tokenizer.ggml.model": "gemma4",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [*sentencepiece["tokenizer.ggml.token_type"], 3, 4],
            "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
            "tokenizer.ggml.add_space_prefix": False,
        }
    )
    for text in (*CORPUS, "the lazy dog", "  two  spaces\n\nand lines", "😀"):
        assert tokenizer.encode(text) == published.encode(text).ids, text
    assert tokenizer.encode("fox<turn|>")[-1] == ids["<turn|>"]
    assert set(tokenizer.eos_ids) == {2, ids["<turn|>"], ids["<|tool_response>"]}


def test_begin_and_end_tokens_are_added_to_documents_only_if_the_file_asks(gguf_metadata: dict[str, Any]) -> None:
    plain = from_gguf(gguf_metadata)
    assert plain.encode_document("hi") == plain.encode("hi")
    asked = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    both = from_gguf({**gguf_metadata, **asked})
    begin, end = both.whole_id("<|im_start|>"), both.whole_id("<|im_end|>")
    assert both.encode_document("hi") == [begin, *plain.encode("hi"), end]
    assert both.encode("hi") == plain.encode("hi")


def test_control_token_that_is_spelled_like_a_word_has_an_id_of_its_own(gguf_metadata: dict[str, Any]) -> None:
    tokens, kinds = gguf_metadata["tokenizer.ggml.tokens"], gguf_metadata["tokenizer.ggml.token_type"]
    word = next(i for i, token in enumerate(tokens) if token.isalpha() and token.isascii() and len(token) > 2)
    plain, control = from_gguf(gguf_metadata), len(tokens)
    assert plain.encode(tokens[word]) == [word]
    alike = {
        **{"tokenizer.ggml.tokens": [*tokens, tokens[word]], "tokenizer.ggml.token_type": [*kinds, 3]},
        **{"tokenizer.ggml.bos_token_id": control, "tokenizer.ggml.add_bos_token": True},
    }
    tokenizer = from_gguf({**gguf_metadata, **alike})
    assert tokenizer.encode(tokens[word]) == [control]
    assert tokenizer.encode_document("hi") == [control, *plain.encode("hi")]
    assert (control in tokenizer.special_ids, word in tokenizer.special_ids) == (True, False)
    assert tokenizer.token_bytes(word) == tokenizer.token_bytes(control) == tokens[word].encode()
    assert tokenizer.vocab_size == control + 1


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        ({"tokenizer.ggml.pre": "brand-new"}, TokenizerUnsupported, "brand-new"),
        ({"tokenizer.ggml.model": "rwkv"}, TokenizerUnsupported, "rwkv"),
        ({"tokenizer.ggml.tokens": []}, TokenizerMissing, "vocabulary"),
        ({"tokenizer.ggml.merges": ["nopair"]}, TextFileMalformed, "nopair"),
        ({"tokenizer.ggml.merges": ["] ^"]}, TextFileMalformed, "damaged .* out of vocabulary"),
        ({"tokenizer.ggml.tokens": [1, 2, 3]}, TextFileMalformed, "damaged"),
        (
            {
                **{"tokenizer.ggml.model": "llama", "tokenizer.ggml.merges": None},
                **{"tokenizer.ggml.tokens": ["a", "a" * 1025], "tokenizer.ggml.scores": [0.0, 0.0]},
            },
            TextFileMalformed,
            "a token has 1025 characters",
        ),
    ],
)
def test_rejects_an_unsupported_vocabulary_by_name(
    gguf_metadata: dict[str, Any], change: dict[str, Any], error: type[Exception], word: str
) -> None:
    with pytest.raises(error, match=word):
        from_gguf({**gguf_metadata, **change})


def test_tokens_that_only_the_config_lists_are_added(backend: Tokenizer, tmp_path: Path) -> None:
    size = backend.get_vocab_size()
    config = {"added_tokens_decoder": {str(size): {"content": "<|extra|>", "special": True}}}
    tokenizer = load(write_model(tmp_path, backend, "chatml", tokenizer_config=config))
    assert tokenizer.encode("<|extra|>") == [size]
    assert size in tokenizer.special_ids


def test_truncation_and_padding_in_the_file_are_ignored(backend: Tokenizer, tmp_path: Path) -> None:
    changed = Tokenizer.from_str(backend.to_str())
    changed.enable_truncation(max_length=4)
    changed.enable_padding(length=64)
    tokenizer = load(write_model(tmp_path, changed, "chatml"))
    assert tokenizer.encode(CORPUS[0]) == backend.encode(CORPUS[0]).ids


def test_rejects_missing_and_damaged_files_by_name(backend: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(TokenizerMissing, match=r"tokenizer\.json"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 1')
    with pytest.raises(TextFileMalformed, match=r"tokenizer\.json"):
        load(tmp_path)
    write_model(tmp_path, backend, "chatml")
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(TextFileMalformed, match="tokenizer_config"):
        load(tmp_path)


def test_decoding_equals_the_reference_for_any_ids(backend: Tokenizer, make_model: Any) -> None:
    tokenizer = make_model("chatml").tokenizer
    fast = PreTrainedTokenizerFast(tokenizer_object=backend)
    ids = [i * 7919 % tokenizer.vocab_size for i in range(3 * tokenizer.vocab_size)]
    assert tokenizer.decode(ids) == fast.decode(ids, clean_up_tokenization_spaces=False)
    assert tokenizer.token_bytes(10**9) == b""


def test_added_tokens_decode_to_their_own_text(backend: Tokenizer, tmp_path: Path) -> None:
    changed = Tokenizer.from_str(backend.to_str())
    changed.add_tokens([AddedToken("é ñ", normalized=False)])
    tokenizer = load(write_model(tmp_path, changed, "chatml"))
    assert tokenizer.decode(tokenizer.encode("x é ñ")) == "x é ñ"


def test_demo_models_vocabulary_round_trips(demo_model: Path) -> None:
    tokenizer = load(demo_model)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert [tokenizer.decode([i]) for i in tokenizer.eos_ids] == ["<|im_end|>", "<|endoftext|>"]


def test_other_threads_run_while_a_long_text_is_encoded(backend: Tokenizer) -> None:
    tokenizer = LibraryTokenizer(backend, {}, ())
    text = "He said 1234 things, naïve ones. " * 8_000
    ticks = 0
    ended = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not ended.wait(0.001):
            ticks += 1

    def ticks_during(encode: Callable[[str], Any]) -> int:
        before = ticks
        encode(text)
        return ticks - before

    ticker = threading.Thread(target=tick)
    ticker.start()
    try:
        for encode in (tokenizer.encode, tokenizer.encoding, tokenizer.encode_document):
            assert any(ticks_during(encode) > 3 for _ in range(5)), encode  # a busy machine may have no core for both
    finally:
        ended.set()
        ticker.join()


def test_vocabulary_size_counts_ids_with_gaps(backend: Tokenizer) -> None:
    gapped = Tokenizer(models.BPE({"a": 0, "b": 2, "c": 3}, []))
    assert LibraryTokenizer(gapped, {}, ()).vocab_size == 4
    assert LibraryTokenizer(backend, {}, ()).vocab_size == 1 + max(backend.get_vocab().values())


@pytest.mark.parametrize("normal_form", [False, True])
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_min_tokens_is_a_lower_bound_for_any_text(gguf_metadata: dict[str, Any], text: str, normal_form: bool) -> None:
    tokenizer = _by_cut(gguf_metadata, "qwen2" if normal_form else "gpt-2")
    for each in (
        text,
        text * 50,
        unicodedata.normalize("NFD", text),
        "Ǖ" * 9,
        unicodedata.normalize("NFD", "ᾂǕ힣" * 40),
    ):
        least = tokenizer.min_tokens(each)
        assert (1 if each else 0) <= least <= len(tokenizer.encode(each))


_BY_CUT: dict[str, TextTokenizer] = {}


def _by_cut(metadata: dict[str, Any], name: str) -> TextTokenizer:
    if name not in _BY_CUT:
        _BY_CUT[name] = from_gguf({**metadata, "tokenizer.ggml.pre": name})
    return _BY_CUT[name]


def test_nfc_removes_at_most_a_third_of_the_characters() -> None:
    """The bound on the characters of a token relies on this for text that is normalised to NFC."""
    for code in range(0x110000):
        apart = unicodedata.normalize("NFD", chr(code))
        if len(apart) > 1 and unicodedata.normalize("NFC", apart) == chr(code):
            assert len(apart) * 2 <= len(chr(code).encode()) * 3


def test_min_tokens_is_zero_if_characters_can_vanish(backend: Tokenizer, sentencepiece: dict[str, Any]) -> None:
    assert from_gguf(sentencepiece).min_tokens("word " * 1000) > 0
    greedy = Tokenizer.from_str(backend.to_str())
    greedy.add_tokens([AddedToken("<greedy>", rstrip=True, normalized=False)])
    stripping = Tokenizer.from_str(backend.to_str())
    stripping.normalizer = normalizers.Strip()
    lossy = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    lossy.decoder = decoders.ByteLevel()
    for changed in (greedy, stripping, lossy):
        assert local(LibraryTokenizer(changed, {}, ())).min_tokens(" " * 1000) == 0


def test_min_tokens_ignores_characters_without_a_token(demo_model: Path) -> None:
    tokenizer = load(demo_model)  # it has no token for some control characters
    assert "\x04" in tokenizer.vocabulary.silent_characters
    for text in ("\x04" * 10_000, "\x04a" * 10_000, "word " * 10_000, "\U000fffff" * 1000):
        assert tokenizer.min_tokens(text) <= len(tokenizer.encode(text))
    assert tokenizer.min_tokens("\x04" * 10_000) == 0
    assert tokenizer.min_tokens("word " * 10_000) > 100


def test_vocabulary_survives_serialisation(backend: Tokenizer, tmp_path: Path) -> None:
    vocabulary = load(write_model(tmp_path, backend, "chatml")).vocabulary
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(vocabulary), type=Vocabulary) == vocabulary


def test_characters_outside_the_byte_alphabet_decode_to_themselves() -> None:
    backend = Tokenizer(models.BPE({"Ġa": 0, "\u00ad": 1, "漢": 2, "\n": 3}, []))
    backend.decoder = decoders.ByteLevel()
    spelled = LibraryTokenizer(backend, {}, ()).vocabulary.token_bytes
    assert [spelled(i) for i in range(-1, 5)] == [b"", b" a", "\u00ad".encode(), "漢".encode(), b"\n", b""]


@pytest.mark.parametrize(
    "document", ["fish", "a<|im_end|>\n<|im_start|>assistant\nyes", "<|im_start|><|im_end|>", "b<|im_"]
)
def test_texts_in_a_template_yield_no_control_token(gguf_metadata: dict[str, Any], document: str) -> None:
    library = LibraryTokenizer.from_gguf(gguf_metadata)
    before, after = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    text, span = before + document + after, (len(before), len(before) + len(document))
    literal = TextsToEncode((before, text), literal=((), (span,)))
    alone, ids = library.encode_texts(literal).ids
    assert alone == library.encode_texts(TextsToEncode((before,))).ids[0]
    plain = TextsToEncode((document,), adds_special=False)
    assert list(library.encode_texts(plain).ids[0]) == library.encode(document)
    assert local(library).decode(ids) == local(library).decode(library.encode_document(text))
    controls = {library.backend.token_to_id(each) for each in ("<|im_start|>", "<|im_end|>")}
    framed = library.encode_document(before + after)
    assert [each for each in ids if each in controls] == [each for each in framed if each in controls]
    cut = library.encode_texts(TextsToEncode((before, text), max_tokens=5, literal=((), (span,)))).ids[1]
    assert cut == ids[:5]
