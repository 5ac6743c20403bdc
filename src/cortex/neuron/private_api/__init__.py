"""What the engine uses of torch, Triton and transformers although these libraries do not promise it.

One module per library. Each use is a `PrivateEntry`, with a probe, and a fallback that works where the probe fails. No
other package uses such names (`tests/test_source_rules.py`).
"""
