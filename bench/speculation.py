"""Benchmarks several tokens per step: a model of a named shape whose weights make it count, or a checkpoint.

    PYTHONPATH=src python bench/speculation.py --model qwen3-8b --quant q4
    PYTHONPATH=src python bench/speculation.py --model qwen3.5-9b --speculation mtp --scenarios mtp-1,mtpwidth-3
    GOMP_SPINCOUNT=1000 PYTHONPATH=src python bench/speculation.py --checkpoint model.gguf --device cpu

The scripted model's next token is the last one plus one: its embeddings are large, and the head has them one row later.
All of its matrices are computed as in any model. So the right draft is known, and drafts can be right at a fixed rate.
A prediction head is computed as in any model too; only the tokens that it proposes are replaced.
Every scenario checks that the tokens are the ones without drafts. `x plain` is the speed in proportion to a run
without drafts just before it.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any, ClassVar

import torch

from cortex.neuron.engine.engine import STEP_GROWTH, STEP_SIZES, Engine
from cortex.neuron.engine.execution.runner import Runner
from cortex.neuron.engine.loading.loading import build_model, load_model
from cortex.neuron.engine.request import EngineRequest, LoadSpec, SamplingParams
from cortex.neuron.engine.speculation.drafter import NO_DRAFT, Draft, Drafter
from cortex.neuron.engine.speculation.width_rule import FastestWidths
from cortex.neuron.kernels.layouts import MatrixLayout
from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.models.packing import MatrixDevice, with_draft_output
from engine import packing, synchronise
from shapes import SHAPES
from workloads import table_row, weights_read

GREEDY = SamplingParams(temperature=0.0)
PROMPT_TOKENS, RESPONSE_TOKENS = 512, 512
EDIT_ODDS = (0.81, 0.74, 0.70, 0.68, 0.66)
"""How often the tokens of a draft are accepted in edits of code by lookup, as vLLM reports it for five draft tokens:
the share of drafts whose token at this position was accepted. Nothing is known of later positions, so nothing is
drafted there."""
MTP_RATE = 0.8
ROW_BLOCK = 4096
Tokens = tuple[int, ...]


class ReplayDrafter(Drafter):
    """Draft tokens that are right at given rates."""

    responses: ClassVar[dict[Tokens, Tokens]] = {}
    """By the prompt."""
    odds: ClassVar[tuple[float, ...]] = ()
    """Empty: real drafts."""
    proposal_rate: ClassVar[float] = 0.0
    """How often a token that the device proposes is right, if those before it are; 0: what it really proposes."""
    chance: ClassVar[random.Random] = random.Random(0)

    def __init__(self, text: Sequence[int], prediction: Tokens = (), **options: Any) -> None:
        super().__init__(text, prediction, **options)
        self._all = text
        self._num_prompt_tokens = len(text)
        self._response = self.responses.get(tuple(text), ())

    def draft(self, count: int) -> Draft:
        if not self.odds:
            return super().draft(count)
        done = len(self._all) - self._num_prompt_tokens
        tokens = list(self._response[done : done + min(count, len(self.odds))])
        if not tokens:
            return NO_DRAFT
        drawn = self.chance.random()
        num_right = sum(drawn < odds for odds in self.odds)
        if num_right < len(tokens):
            tokens[num_right] = 0 if tokens[num_right] else 1
        return Draft(tuple(tokens), self.odds[: len(tokens)], "lookup")

    def propose(self, tokens: Tokens) -> None:
        """The device has computed as many tokens; they are replaced."""
        if self.proposal_rate:
            done = len(self._all) - self._num_prompt_tokens
            right = self._response[done : done + len(tokens)]
            tokens = tuple(token if self.chance.random() < self.proposal_rate else int(token == 0) for token in right)
        super().propose(tokens)


class SwitchedWidths(FastestWidths):
    """A fixed width while one is set."""

    fixed: ClassVar[int | None] = None

    def widths(self, drafts: Sequence[Draft], num_tokens: int, *, is_mixed: bool) -> list[int]:
        if self.fixed is not None:
            return [0 if is_mixed else self.fixed] * len(drafts)
        return super().widths(drafts, num_tokens, is_mixed=is_mixed)

    def num_proposals(self, odds: Sequence[Sequence[float]], num_rows: int) -> int:
        return super().num_proposals(odds, num_rows) if self.fixed is None else self.fixed


def widths_of(runner: Runner, proposal_cost: float) -> SwitchedWidths:
    kind = runner.device.type
    return SwitchedWidths(STEP_SIZES[kind], STEP_GROWTH[kind], lambda: runner.max_draft_tokens, proposal_cost)


def scripted(parameters: Parameters) -> None:
    """Random weights, except that the token after t is t + 1."""
    names = {"embed": 0, "lm_head": 1}
    device = parameters.device

    def rows(first: int, count: int, inputs: int, vocab: int) -> torch.Tensor:
        """Rows of the embedding; a block of them has a seed."""
        parts = []
        while count:
            block, place = divmod(first % vocab, ROW_BLOCK)
            generator = torch.Generator(device).manual_seed(block)
            size = min(count, ROW_BLOCK - place, vocab - first % vocab)
            parts.append(torch.randn(ROW_BLOCK, inputs, generator=generator, device=device)[place : place + size])
            first, count = first + size, count - size
        return torch.cat(parts)

    def shift_of(source: str) -> int | None:
        return next((shift for name, shift in names.items() if name in source), None)

    for packed in parameters.packed_bindings:
        shift, inputs = shift_of(packed.source), packed.matrix.inputs
        for first in range(0, packed.num_rows, ROW_BLOCK):
            count = min(ROW_BLOCK, packed.num_rows - first)
            if shift is None:
                values = torch.randn(count, inputs, device=device) * inputs**-0.5
            else:
                values = rows(first - shift, count, inputs, packed.num_rows) * (50.0 if not shift else inputs**-0.5)
            packed.matrix.put_values(packed.first_row + first, values)
    for binding in parameters.bindings:
        view, shift = binding.destination, shift_of(binding.source)
        if shift is None or view.dim() == 1:
            view.normal_(1.0, 0.1) if view.dim() == 1 else view.normal_(0.0, view.shape[-1] ** -0.5)
            continue
        vocab, inputs = view.shape
        for first in range(0, vocab, ROW_BLOCK):
            count = min(ROW_BLOCK, vocab - first)
            values = rows(first - shift, count, inputs, vocab) * (50.0 if not shift else inputs**-0.5)
            view[first : first + count] = values.to(view.dtype)


class SpeculationBench:
    def __init__(self, engine: Engine, device: torch.device, response_tokens: int) -> None:
        self.engine = engine
        self.device = device
        self.response_tokens = response_tokens
        self.random = random.Random(1)
        self._next_id = 0

    def run(self, requests: Sequence[tuple[Tokens, Tokens, bool]]) -> tuple[float, float, list[Tokens]]:
        """`requests`: prompts, predictions, and whether drafts are checked. Returns the seconds after the first token
        of each, the seconds per step, and the responses."""
        tokens: dict[str, Tokens] = {}
        for prompt, prediction, speculates in requests:
            self._next_id += 1
            tokens[str(self._next_id)] = ()
            self.engine.submit(
                EngineRequest(
                    str(self._next_id),
                    prompt,
                    self.response_tokens,
                    GREEDY,
                    prediction=prediction,
                    speculates=speculates,
                )
            )
        begun, first_steps = time.perf_counter(), 0
        while self.engine.has_work:
            waiting = not all(tokens.values())
            for output in self.engine.step():
                tokens[output.request_id] += output.tokens
            if waiting and all(tokens.values()):
                begun, first_steps = time.perf_counter(), self.engine.stats().steps
        synchronise(self.device)
        took = time.perf_counter() - begun
        return took, took / max(1, self.engine.stats().steps - first_steps), list(tokens.values())

    def prompts(self, streams: int) -> list[Tokens]:
        top = min(self.engine.info.vocab_size - 2 * self.response_tokens, 100_000)
        return [tuple(self.random.randrange(10, top) for _ in range(PROMPT_TOKENS)) for _ in range(streams)]

    def measure(
        self, prompts: list[Tokens], odds: tuple[float, ...], predict: Callable[[Tokens], Tokens] | None = None
    ) -> dict[str, float]:
        """Replayed drafts at the rates `odds`, or real ones of a prediction."""
        streams = len(prompts)
        self.run([(prompt, (), False) for prompt in prompts])  # fills the prefix cache
        plain_s, _, responses = self.run([(prompt, (), False) for prompt in prompts])
        ReplayDrafter.responses = dict(zip(prompts, responses, strict=True))
        ReplayDrafter.odds = odds
        results = []
        for _ in range(2):  # the first one learns the time of each width
            before = self.engine.stats()
            predictions = [predict(response) if predict else () for response in responses]
            results.append(self.run([(prompt, each, True) for prompt, each in zip(prompts, predictions, strict=True)]))
            after = self.engine.stats()
        fast_s, step_s, said = results[-1]
        ReplayDrafter.odds = ()
        same = sum(one == other for one, other in zip(said, responses, strict=True))
        num_tokens = streams * (self.response_tokens - 1)
        drafted = sum(after.drafted_tokens.values()) - sum(before.drafted_tokens.values())
        accepted = sum(after.accepted_tokens.values()) - sum(before.accepted_tokens.values())
        return {
            "tok/s": num_tokens / fast_s,
            "x plain": plain_s / fast_s,
            "plain tok/s": num_tokens / plain_s,
            "ms/step": step_s * 1e3,
            "tokens/step": num_tokens / streams / max(1, round(fast_s / step_s)),
            "drafted": drafted,
            "accepted": accepted,
            "same": same / streams,
        }

    def widths(self, width: int) -> dict[str, float]:
        """The time of a step that checks `width` right draft tokens."""
        SwitchedWidths.fixed = width
        try:
            return self.measure(self.prompts(1), (1.0,) * width)
        finally:
            SwitchedWidths.fixed = None

    def edit(self, streams: int) -> dict[str, float]:
        return self.measure(self.prompts(streams), EDIT_ODDS)

    def hardedit(self, streams: int) -> dict[str, float]:
        """The rates of an edit read as conditional ones: each position is accepted this often after the one before."""
        return self.measure(self.prompts(streams), tuple(accumulate(EDIT_ODDS, mul)))

    def prediction(self, streams: int) -> dict[str, float]:
        """One line of ten tokens in fifty is another."""

        def predict(response: Tokens) -> Tokens:
            middle = len(response) // 2
            return (*response[:middle], *(5,) * 10, *response[middle + 10 :])

        return self.measure(self.prompts(streams), (), predict)

    def wrong(self, streams: int) -> dict[str, float]:
        """A prediction that never comes true."""
        prompts = self.prompts(streams)
        return self.measure(prompts, (), lambda response: tuple(self.random.randrange(10) for _ in response))

    def mtp(self, streams: int) -> dict[str, float]:
        """The head proposes, and four in five of its tokens are right; needs `--speculation mtp`."""
        return self._proposed(streams, None)

    def mtpwidth(self, width: int) -> dict[str, float]:
        """The same, with a fixed number of draft tokens for one stream."""
        return self._proposed(1, width)

    def _proposed(self, streams: int, width: int | None) -> dict[str, float]:
        ReplayDrafter.proposal_rate, SwitchedWidths.fixed = MTP_RATE, width
        try:
            return self.measure(self.prompts(streams), ())
        finally:
            ReplayDrafter.proposal_rate, SwitchedWidths.fixed = 0.0, None

    def lookup(self, streams: int) -> dict[str, float]:
        """The prompt has the response, with one token in twelve replaced; for the scripted model."""
        prompts = []
        for prompt in self.prompts(streams):
            text = [prompt[0] + number for number in range(self.response_tokens + 8)]
            text[11::12] = [3] * len(text[11::12])
            prompts.append((*prompt[1:32], *text, prompt[1], prompt[0]))
        return self.measure(prompts, ())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--checkpoint", type=Path, help="a model directory or GGUF file, instead of a scripted model")
    parser.add_argument("--quant", help="as in engine.py")
    parser.add_argument("--speculation", choices=("lookup", "mtp"), default="lookup")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--response-tokens", type=int, default=RESPONSE_TOKENS)
    parser.add_argument(
        "--scenarios",
        default="widths-1,widths-3,widths-7,widths-15,widths-31,edit-1,hardedit-1,edit-8,prediction-1,lookup-1,wrong-1,"
        "wrong-64",
    )
    arguments = parser.parse_args()
    measure(arguments, arguments.scenarios.split(","))


def layouts_of(quant: str | None, device: str) -> Mapping[str, MatrixLayout]:
    """How matrices are packed. A head for further tokens gets a smaller output matrix unless that is quantised."""
    return packing(quant) if quant else with_draft_output(MatrixDevice(device, "bfloat16"), {})


def measure(arguments: argparse.Namespace, scenarios: Sequence[str]) -> None:
    """`arguments`: those of `main`."""
    device = torch.device(arguments.device)
    spec = LoadSpec(str(arguments.checkpoint or ""), max_num_seqs=64, speculation=arguments.speculation)
    if arguments.checkpoint is not None:
        loaded = load_model(spec, device, lambda *_: None, lambda: False)
    else:
        layouts = layouts_of(arguments.quant, device.type)
        loaded = build_model(SHAPES[arguments.model], spec, device, scripted, packing=layouts)
    rule = partial(widths_of, proposal_cost=loaded.proposal_cost)
    engine = Engine(loaded, spec, width_rule=rule, new_drafter=ReplayDrafter)
    engine.warm_up()
    start = time.perf_counter()
    while engine.prepare():
        pass
    print(weights_read(engine.info))
    print(f"graphs and plans: {time.perf_counter() - start:.1f} s", flush=True)
    bench = SpeculationBench(engine, device, arguments.response_tokens)
    for scenario in scenarios:
        kind, number = scenario.split("-")
        print(table_row(scenario, getattr(bench, kind)(int(number))), flush=True)
    engine.check_integrity()


if __name__ == "__main__":
    main()
