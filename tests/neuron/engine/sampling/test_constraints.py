"""Output of a random model under a grammar: without the mask it would be noise."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.errors import FaultyRequest, RequestError
from cortex.neuron.engine.loading.loading import load_model
from cortex.neuron.engine.request import EngineRequest, LoadSpec, SamplingParams
from cortex.neuron.engine.sampling.constraints import Constraint, Constraints
from cortex.neuron.engine.sampling.sampler import Drawn, Sampler
from cortex.neuron.kernels.sampling.rows import MASKED_BY, Draws, number
from cortex.neuron.models.decoder import Decoder
from cortex.neuron.text.grammar.matcher import MatchState

from ... import engine_runs
from ...engine_runs import tokens_of
from ...tiny_models import tiny_sizes

END = 256
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "bb"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tokenizer]:
    """A random Llama whose vocabulary is every byte and an end token."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        **tiny_sizes(vocab_size=258, hidden_size=32, num_hidden_layers=1, max_position_embeddings=512), eos_token_id=END
    )
    LlamaForCausalLM(config).save_pretrained(path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: index for index, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return path, tokenizer


@pytest.fixture(params=[False, True], ids=["read at once", "read late"])
def engine(model: tuple[Path, Tokenizer], request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Also one that reads a step after the next is launched, as on a GPU."""
    engine = new_engine(model, late=request.param)
    yield engine
    engine.close()


def new_engine(
    model: tuple[Path, Tokenizer], *, late: bool, speculation: Literal["off", "lookup"] = "lookup"
) -> Engine:
    spec = LoadSpec(str(model[0]), dtype="float32", max_num_seqs=4, speculation=speculation)
    cpu = torch.device("cpu")
    return Engine(load_model(spec, cpu, lambda *_: None, lambda: False), spec, overlaps=late)


def run(
    engine: Engine, *requests: EngineRequest, errors: dict[str, str] | None = None
) -> tuple[dict[str, list[int]], dict[str, str | None]]:
    found = engine_runs.run(engine, *requests)
    if errors is not None:
        errors |= {name: error for name, outputs in found.items() for output in outputs if (error := output.error)}
    return (
        {name: tokens_of(outputs) for name, outputs in found.items()},
        {name: outputs[-1].finish for name, outputs in found.items()},
    )


def request(name: str, grammar: str | None, **sampling: Any) -> EngineRequest:
    return EngineRequest(name, (10, 11, 12), 200, SamplingParams(**sampling), stop_token_ids=(END,), grammar=grammar)


def json_grammar() -> str:
    import llguidance

    grammar: str = llguidance.LLMatcher.grammar_from_json_schema(SCHEMA)
    return grammar


def test_output_under_a_schema_always_conforms(engine: Engine, model: tuple[Path, Tokenizer]) -> None:
    requests = [request(str(seed), json_grammar(), temperature=2.0, seed=seed) for seed in range(12)]
    tokens, finish = run(engine, *requests)
    for name, ids in tokens.items():
        value = json.loads(model[1].decode([token for token in ids if token != END]))
        assert isinstance(value["ok"], bool)
        assert value["kind"] in ("a", "bb")
        assert finish[name] == "stop"


def test_unconstrained_request_is_unchanged_beside_a_constrained_one(engine: Engine) -> None:
    free = request("free", None, temperature=1.0, seed=5)
    alone, _ = run(engine, free)
    together, _ = run(engine, free, request("bound", json_grammar(), temperature=1.0, seed=6))
    assert together["free"] == alone["free"]


def test_rejects_a_grammar_that_does_not_compile_without_holding_memory(engine: Engine) -> None:
    with pytest.raises(RequestError, match="grammar"):
        engine.submit(request("bad", "start: nonsense ("))
    assert not engine.has_work
    engine.check_integrity()


def test_grammar_that_begins_with_no_allowed_token_is_rejected(engine: Engine) -> None:
    with pytest.raises(RequestError, match="allowed_token_ids"):
        engine.submit(request("none", 'start: "ab"', allowed_token_ids=(END,)))
    assert not engine.has_work


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_grammar_that_no_allowed_token_continues_rejects_the_request(
    engine: Engine, model: tuple[Path, Tokenizer], temperature: float
) -> None:
    a, b = (model[1].get_vocab()[letter] for letter in "ab")
    errors: dict[str, str] = {}
    written = request("written", 'start: "ab" "ba"', temperature=temperature, allowed_token_ids=(a, b))
    ending = request("ending", 'start: "ab" "c"', temperature=temperature, allowed_token_ids=(a, b))
    tokens, finish = run(engine, written, ending, errors=errors)
    assert (tokens["written"], finish["written"]) == ([a, b, b, a], "stop")
    assert (tokens["ending"], finish["ending"]) == ([a, b], "rejected")
    assert "allowed_token_ids" in errors["ending"]
    engine.check_integrity()


@pytest.mark.parametrize(("grammar", "drawn"), [('start: "}"', 0), ('start: "a}"', 1), ('start: "ab" "}" "c"', 2)])
def test_grammar_that_the_vocabulary_cannot_spell_rejects_the_request(
    model: tuple[Path, Tokenizer], tmp_path: Path, grammar: str, drawn: int
) -> None:
    shutil.copytree(model[0], tmp_path, dirs_exist_ok=True)
    alphabet = [byte for byte in sorted(pre_tokenizers.ByteLevel.alphabet()) if byte != "}"]
    poor = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    poor.model = models.BPE({byte: index for index, byte in enumerate(alphabet)}, [])
    poor.save(str(tmp_path / "tokenizer.json"))
    engine, errors = new_engine((tmp_path, poor), late=False), dict[str, str]()
    tokens, finish = run(engine, request("x", grammar), errors=errors)
    assert (finish["x"], len(tokens["x"])) == ("rejected", drawn)
    assert "vocabulary" in errors["x"]
    engine.close()


def test_token_that_is_drawn_where_no_token_is_allowed_rejects_the_request(
    engine: Engine, model: tuple[Path, Tokenizer]
) -> None:
    """As after drafts, whose masks are made before the output gets there."""
    a, b, c = (model[1].get_vocab()[letter] for letter in "abc")
    for drawn in (a, c):
        constraint = Constraints(model[0], 258, torch.device("cpu")).compile(
            'start: "ab" "c"', allowed_token_ids=(a, b)
        )
        assert [constraint.is_complete_after(token) for token in (a, b, drawn)] == [False, False, True]
        assert constraint.is_contradiction
        assert constraint.failure is not None


def test_token_outside_the_grammar_ends_its_request_with_a_short_error(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = Sampler.draw

    def without_mask(sampler: Sampler, logits: torch.Tensor, draws: Draws, rows: NDArray[np.int64]) -> Drawn:
        lines = draws.lines.clone()
        lines[:, number(MASKED_BY)] = -1
        return draw(sampler, logits, replace(draws, lines=lines), rows)

    free = request("free", None, temperature=1.0, seed=5)
    alone, _ = run(engine, free)
    monkeypatch.setattr(Sampler, "draw", without_mask)
    errors: dict[str, str] = {}
    tokens, finish = run(engine, free, request("bound", json_grammar(), temperature=2.0, seed=6), errors=errors)
    assert finish["bound"] == "error"
    assert "does not fit the grammar" in errors["bound"]
    assert len(errors["bound"]) < 120
    assert "\n" not in errors["bound"]
    assert tokens["free"] == alone["free"]


@pytest.mark.parametrize("method", ["fill_mask", "accept"])
def test_error_in_the_grammar_library_ends_only_its_own_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    free = request("free", None, temperature=1.0, seed=5)
    alone, _ = run(engine, free)

    def failing(*_: object) -> None:
        raise OverflowError("out of range integral type conversion attempted")

    monkeypatch.setattr(MatchState, method, failing)
    errors: dict[str, str] = {}
    tokens, finish = run(engine, free, request("bound", json_grammar(), temperature=1.0, seed=6), errors=errors)
    assert finish["bound"] == "error"
    assert errors["bound"] == "the grammar could not be followed (OverflowError); simplify it and try again"
    assert tokens["free"] == alone["free"]


def test_grammar_that_fails_among_others_ends_only_its_own_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The masks of several requests are filled in one call, which does not say whose failed."""
    bound = [request(str(seed), json_grammar(), temperature=1.5, seed=seed) for seed in range(3)]
    alone, _ = run(engine, *bound)
    failing: list[MatchState] = []
    compile_grammar, fill_mask, fill_masks = Constraints.compile, MatchState.fill_mask, MatchState.fill_masks

    def compiled(constraints: Constraints, *arguments: Any) -> Any:
        constraint = compile_grammar(constraints, *arguments)
        failing.append(constraint.state)
        return constraint

    def fill_one(state: MatchState, row: torch.Tensor) -> None:
        if state is failing[1]:
            raise OverflowError("out of range")
        fill_mask(state, row)

    def fill_all(states: Any, rows: torch.Tensor) -> None:
        fill_masks(states, rows)
        if any(state is failing[1] for state, _ in states):
            raise OverflowError("out of range")

    monkeypatch.setattr(Constraints, "compile", compiled)
    monkeypatch.setattr(MatchState, "fill_mask", fill_one)
    monkeypatch.setattr(MatchState, "fill_masks", staticmethod(fill_all))
    errors: dict[str, str] = {}
    tokens, finish = run(engine, *bound, errors=errors)
    assert [finish[name] for name in "012"] == ["stop", "error", "stop"]
    assert list(errors) == ["1"]
    assert (tokens["0"], tokens["2"]) == (alone["0"], alone["2"])


def test_error_in_the_callback_of_a_mask_is_blamed_on_its_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device computes the step when the callback raises: what the step before drew is not lost."""
    free = request("free", None, temperature=1.0, seed=5)
    alone, _ = run(engine, free)
    mask, num_masks = Constraints.mask, 0

    def failing(constraints: Constraints, drawing: Any) -> Any:
        nonlocal num_masks
        num_masks += 1
        if num_masks > 2 and any(constraint is not None for constraint, _ in drawing):
            raise RuntimeError("no page-locked memory")
        return mask(constraints, drawing)

    monkeypatch.setattr(Constraints, "mask", failing)
    engine.submit(free)
    engine.submit(request("bound", json_grammar(), temperature=1.0, seed=6))
    tokens: dict[str, list[int]] = {"free": [], "bound": []}
    finish: dict[str, str | None] = {}
    blamed: list[str] = []
    while engine.has_work:
        try:
            outputs = engine.step()
        except FaultyRequest as error:
            blamed.append(error.request_id)
            engine.cancel(error.request_id)
            continue
        except RuntimeError:
            assert engine.isolate()
            continue
        for output in outputs:
            tokens[output.request_id] += output.tokens
            finish[output.request_id] = output.finish
    assert blamed == ["bound"]
    assert finish == {"free": "stop" if alone["free"][-1] == END else "length", "bound": "cancelled"}
    assert tokens["free"] == alone["free"]
    engine.check_integrity()


def test_step_is_computed_before_the_grammar_knows_the_last_token(
    model: tuple[Path, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the draw waits for the mask, and the output is that of an engine that reads each step at once."""
    events: list[str] = []
    compute, fill = Decoder.__call__, Constraints.mask

    def computed(decoder: Decoder, *arguments: Any) -> torch.Tensor:
        events.append("compute")
        return compute(decoder, *arguments)

    def filled(constraints: Constraints, *arguments: Any) -> Any:
        events.append("mask")
        return fill(constraints, *arguments)

    bound = [request(str(seed), json_grammar(), temperature=1.5, seed=seed) for seed in range(3)]
    expected, _ = run(new_engine(model, late=False, speculation="off"), *bound)
    late = new_engine(model, late=True, speculation="off")
    monkeypatch.setattr(Decoder, "__call__", computed)
    monkeypatch.setattr(Constraints, "mask", filled)
    tokens, _ = run(late, *bound)
    assert tokens == expected
    assert events[:4] == ["compute", "mask"] * 2
    late.check_integrity()


def bits(row: torch.Tensor) -> set[int]:
    flags = np.unpackbits(row.numpy().view(np.uint8), bitorder="little")
    return {int(token) for token in np.flatnonzero(flags)}


def test_masks_of_several_sequences_with_drafts_equal_those_one_by_one(model: tuple[Path, Tokenizer]) -> None:
    constraints = Constraints(model[0], 258, torch.device("cpu"))
    letters = model[1].get_vocab()
    drafts = [[letters[letter] for letter in text] for text in ("", "abc", "a", "")]
    bound = [constraints.compile(r"start: /[a-z]{2,9}!/") for _ in drafts]
    bound[0].is_complete_after(letters["z"])
    drawing = [(bound[0], drafts[0]), (None, [5, 6]), *zip(bound[1:], drafts[1:], strict=True)]
    for _ in range(2):  # drafts leave the states as they were
        mask = constraints.mask(drawing)
        assert mask is not None
        assert mask.rows.tolist() == [0, -1, -1, -1, 1, 2, 3, 4, 5, 6, 7]
        for first, each, drafted in zip((0, 1, 5, 7), bound, drafts, strict=True):
            expected = torch.full((1 + len(drafted), mask.words.shape[1]), -1, dtype=torch.int32)
            each.fill_masks(expected, drafted)
            for got, want in zip(mask.words[first : first + len(expected)], expected, strict=True):
                assert bits(got) == bits(want)
                assert letters["a"] in bits(got)
                assert END not in bits(got)
    assert all(each.failure is None for each in bound)


def test_tokens_of_several_sequences_are_matched_as_one_by_one(model: tuple[Path, Tokenizer]) -> None:
    constraints, letters = Constraints(model[0], 258, torch.device("cpu")), model[1].get_vocab()
    texts = ("ab", "az", "ab")
    bound = [constraints.compile('start: "a" "b"', allowed_token_ids=allowed) for allowed in ((), (), (letters["a"],))]
    for place, ended in ((0, [False] * 3), (1, [True] * 3)):
        drawn = [(each, letters[text[place]]) for each, text in zip(bound, texts, strict=True)]
        Constraint.accept_all(drawn)
        assert [each.is_complete_after(token) for each, token in drawn] == ended
    assert bound[0].failure is None
    assert bound[1].failure is not None
    assert "does not fit the grammar" in bound[1].failure
    assert bound[2].is_contradiction
