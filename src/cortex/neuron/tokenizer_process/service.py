"""The functions of a tokenizer process: templates, tokenising and grammars of one model.

The process reads the model's text files, which takes a second for a large vocabulary, and its workers share them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cortex.neuron.text.errors import TextFileMalformed
from cortex.neuron.text.local import read_text
from cortex.neuron.text.model import TextModel
from cortex.neuron.text.preparation import prepare
from cortex.neuron.text.template.prompt import PromptRules, check_size
from cortex.neuron.text.tokenizer.encoder import TextsToEncode
from cortex.neuron.tokenizer_process.protocol import (
    Described,
    FilesUnreadable,
    PackedPrepared,
    PackedTexts,
    fingerprint_of,
    pack_prepared,
    pack_texts,
    packed,
    unreadable,
)
from cortex.wire.errors import LoadFailed
from cortex.wire.packed_request import unpack

log = logging.getLogger(__name__)


def functions(model: str, fingerprint: str | None, chat_template: str | None) -> dict[str, Callable[..., Any]]:
    """`fingerprint`: of the facts that the daemon read from these files before. `chat_template`: in place of theirs.
    Never raises: each call gets the error instead."""
    service = TokenizerService(Path(model), fingerprint, chat_template)
    calls = (service.describe, service.encode, service.encode_texts, service.count, service.prepare)
    return {each.__name__: each for each in calls}


class TokenizerService:
    """One model's text, or the error that reading it ended in."""

    def __init__(self, model: Path, fingerprint: str | None, chat_template: str | None = None) -> None:
        self._model = model
        self._opened = _open(model, fingerprint, chat_template)

    @property
    def _text(self) -> TextModel:
        if isinstance(self._opened, Exception):
            raise LoadFailed(f"the tokenizer of {self._model.name} can no longer be read: {self._opened}")
        return self._opened[1]

    def describe(self) -> Described | FilesUnreadable:
        """The facts in the model's text files."""
        return unreadable(self._opened) if isinstance(self._opened, Exception) else self._opened[0]

    def encode(self, text: str, rules: PromptRules) -> bytes:
        """The tokens of a text, packed, including control tokens in it."""
        model = self._text
        check_size(text, rules)
        return packed(model.encode(text))

    def encode_texts(self, texts: TextsToEncode, rules: PromptRules) -> PackedTexts:
        """The tokens of texts that are pooled."""
        encoder = self._text.tokenizer.encoder
        for text in (*texts.texts, *texts.queries):
            check_size(text, rules)
        return pack_texts(encoder.encode_texts(texts))

    def count(self, rules: PromptRules, body: bytes) -> tuple[int, int]:
        """The number of tokens in the prompt of a packed request, and `num_tokenised` as in `PackedPrepared`."""
        text = self._text
        before = text.tokenizer.encoder.num_tokenised
        num_tokens = len(text.render(unpack(body), rules).ids)
        return num_tokens, text.tokenizer.encoder.num_tokenised - before

    def prepare(self, rules: PromptRules, with_text: bool, body: bytes) -> PackedPrepared:
        """The prompts and the grammar of a packed request. `with_text`: with the text of the prompts."""
        text, request = self._text, unpack(body)
        before = text.tokenizer.encoder.num_tokenised
        prepared = prepare(text, request, rules)
        num_tokenised = text.tokenizer.encoder.num_tokenised - before
        return pack_prepared(prepared, num_tokenised, with_text=with_text or request.echo)


def _open(model: Path, fingerprint: str | None, chat_template: str | None) -> tuple[Described, TextModel] | Exception:
    try:
        files, encoder = read_text(model, chat_template)
        text = TextModel.of(files, encoder)
    except MemoryError:
        return TextFileMalformed(f"the text files of {model} take more memory than this node allows")
    except Exception as error:
        log.debug("cannot read the text files of %s", model, exc_info=True)
        return error
    described = Described(files, fingerprint_of(files), text.reasoning_end, text.takes_tools)
    if fingerprint not in (None, described.fingerprint):
        # The daemon still decodes tokens with the facts that it read first.
        return TextFileMalformed(f"the text files of {model} changed while the node runs; restart the node")
    return described, text
