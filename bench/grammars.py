"""What grammars add to a step: the host's time for masks and drawn tokens, and on a GPU whole steps.

    PYTHONPATH=src:bench python bench/grammars.py [--vocabulary MODEL.gguf] [--tokens 128256] [--model llama-3.1-8b]

The host's part needs no GPU: for each grammar and number of constrained rows, milliseconds of the engine's thread and
of all threads for the masks of a step, and of the engine's thread to match the drawn tokens. Processor time, so that
other programs matter little. Without a vocabulary, one is trained on the sources of Python's library.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.request import EngineRequest, LoadSpec, SamplingParams
from cortex.neuron.engine.sampling.constraints import Constraint, Constraints
from cortex.neuron.text.tokenizer.library import LibraryTokenizer
from engine import random_engine
from shapes import SHAPES
from workloads import weights_read

_OBJECT = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GRAMMARS = {
    "strings": "start: %json " + json.dumps({"type": "array", "items": {"type": "string"}, "minItems": 900}),
    "objects": "start: %json " + json.dumps({"type": "array", "items": _OBJECT, "minItems": 900}),
    "regex": "start: /[a-z ]{2000,4000}/",
    "names": "start: /([A-Z][a-z]{1,12} ){500}/",
}
ROWS = (1, 64, 256)
STEPS, WARM_STEPS = 40, 10
PROMPT_TOKENS, RESPONSE_TOKENS = 200, 400
GREEDY = SamplingParams(temperature=0.0)


def train(num_tokens: int, folder: Path) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eos>"],
        show_progress=False,
    )
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    tokenizer.train([str(path) for path in sources if not {"site-packages", "test", "tests"} & {*path.parts}], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return folder


def host(constraints: Constraints, grammar: str, num_rows: int) -> str:
    rows = [constraints.compile(grammar) for _ in range(num_rows)]
    source = random.Random(1)
    own_ms, all_ms, matched_ms = [], [], []
    for _ in range(STEPS):
        started, all_started = time.thread_time(), time.process_time()
        mask = constraints.mask([(row, ()) for row in rows])
        own_ms.append((time.thread_time() - started) * 1e3)
        all_ms.append((time.process_time() - all_started) * 1e3)
        assert mask is not None
        drawn = [(row, _token(words, source)) for row, words in zip(rows, mask.words, strict=True)]
        started = time.thread_time()
        Constraint.accept_all(drawn)
        for row, token in drawn:
            row.is_complete_after(token)
        matched_ms.append((time.thread_time() - started) * 1e3)
        assert all(row.failure is None for row in rows)
    masks, threads, matched = (statistics.median(each[WARM_STEPS:]) for each in (own_ms, all_ms, matched_ms))
    return f"masks {masks:.3f} ms (all threads {threads:.3f}), tokens {matched:.3f} ms"


def _token(words: torch.Tensor, source: random.Random) -> int:
    allowed = np.flatnonzero(np.unpackbits(words.numpy().view(np.uint8), bitorder="little"))
    return int(allowed[source.randrange(len(allowed))])


def steps(engine: Engine) -> Iterator[str]:
    source, most = random.Random(2), min(engine.info.vocab_size, 20_000)
    for streams in ROWS:
        free_ms = 0.0
        for name, grammar in (("none", None), *GRAMMARS.items()):
            for constrained in (0,) if grammar is None else sorted({1, streams}):
                for index in range(streams):
                    prompt = tuple(source.randrange(300, most) for _ in range(PROMPT_TOKENS))
                    own = grammar if index < constrained else None
                    engine.submit(EngineRequest(str(index), prompt, RESPONSE_TOKENS, GREEDY, grammar=own))
                _step_ms(engine, 2 * STEPS)
                step_ms = min(_step_ms(engine, STEPS) for _ in range(3))
                free_ms = free_ms or step_ms
                _end(engine, streams)
                yield f"{streams:4} streams, {constrained:3} with {name:8} {step_ms:7.3f} ms, +{step_ms - free_ms:.3f}"


def _step_ms(engine: Engine, count: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        for output in engine.step():
            assert output.error is None, output.error
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count * 1e3


def _end(engine: Engine, streams: int) -> None:
    for index in range(streams):
        engine.cancel(str(index))
    while engine.has_work:
        engine.step()


def report(lines: Callable[[], Iterator[str]]) -> None:
    for line in lines():
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=Path, help="a GGUF file, or a folder with tokenizer.json")
    parser.add_argument("--tokens", type=int, default=24_000, help="of the vocabulary that is trained")
    parser.add_argument("--model", choices=SHAPES, default="llama-3.1-8b", help="the shape of steps on a GPU")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = arguments.vocabulary or train(arguments.tokens, Path(folder))
        size = LibraryTokenizer.load(source).vocab_size
        constraints = Constraints(source, size, torch.device("cpu"))
        print(f"{size:,} tokens", flush=True)
        for name, grammar in GRAMMARS.items():
            for rows in ROWS:
                print(f"{rows:4} rows, {name:8} {host(constraints, grammar, rows)}", flush=True)
        if torch.cuda.is_available():
            device = torch.device("cuda:0")
            torch.cuda.set_device(device)
            spec = LoadSpec(str(source), max_num_seqs=max(ROWS), speculation="off")
            engine = random_engine(arguments.model, device, spec, None)
            engine.warm_up()
            while engine.prepare():
                pass
            print(f"{torch.cuda.get_device_name()}, {arguments.model}, {weights_read(engine.info)}")
            report(lambda: steps(engine))


if __name__ == "__main__":
    main()
