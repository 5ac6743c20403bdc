"""Scores texts with llama.cpp: run by `perplexity.py`, in a Python that has llama-cpp-python.

Reads lists of token ids as JSON on stdin, and prints the log-probability of every token after the first of its list.
"""

from __future__ import annotations

import json
import sys

import numpy as np
from llama_cpp import Llama

windows = json.load(sys.stdin)
model = Llama(sys.argv[1], n_ctx=max(map(len, windows)), logits_all=True, verbose=False)
scores: list[float] = []
for window in windows:
    model.reset()
    model.eval(window)
    logits = model.scores[: len(window) - 1].astype(np.float64)
    largest = logits.max(1, keepdims=True)
    totals = np.log(np.exp(logits - largest).sum(1)) + largest[:, 0]
    scores += (logits[np.arange(len(logits)), window[1:]] - totals).tolist()
print(json.dumps(scores))
