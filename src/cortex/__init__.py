"""cortex: a handful of mismatched GPU boxes behind one OpenAI + Anthropic endpoint."""

__version__ = "0.1.0"
