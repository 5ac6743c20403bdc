"""What reading a model's text files can end in. Plain exceptions, so that the engine side can import them."""


class TextModelError(Exception):
    """Base: the model's tokenizer or template files cannot be used; the message says what to do next."""


class TokenizerMissing(TextModelError):
    """The model has no tokenizer file that is read here."""


class TokenizerUnsupported(TextModelError):
    """There is a tokenizer, of a kind that is not read here."""


class TextFileMalformed(TextModelError):
    """A JSON or tokenizer file of the model is damaged."""


class GrammarRejected(TextModelError):
    """A grammar cannot be compiled for this model's vocabulary."""
