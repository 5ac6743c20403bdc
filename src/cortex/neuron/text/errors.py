"""Errors from a model's text files. Plain exceptions, so that the engine can import them."""


class TextModelError(Exception):
    """Base class: the model's tokenizer or template files cannot be used. The message says what to do."""


class TokenizerMissing(TextModelError):
    """The model has no tokenizer file of a supported kind."""


class TokenizerUnsupported(TextModelError):
    """The model has a tokenizer of a kind that is not supported."""


class TextFileMalformed(TextModelError):
    """A JSON or tokenizer file of the model is damaged."""


class GrammarRejected(TextModelError):
    """A grammar cannot be compiled for this model's vocabulary."""


class GrammarUnspellable(GrammarRejected):
    """No token of the model's vocabulary spells what the grammar needs next."""
