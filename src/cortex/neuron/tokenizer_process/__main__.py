"""`python -m cortex.neuron.tokenizer_process`: started by the daemon for one model, ends with the daemon.

It reads the model's text files, which takes a second for a large vocabulary, and forks workers that share them. The
workers render, tokenise and compile grammars, one job each at a time.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from cortex.ipc.child import attach_to_parent, name_thread
from cortex.ipc.limits import lift_cpu_limit, limit_cpu, limit_memory
from cortex.ipc.pool_process import serve_pool
from cortex.neuron.text.errors import TextFileMalformed
from cortex.neuron.text.model import TextModel
from cortex.neuron.text.preparation import prepare
from cortex.neuron.text.template.prompt import check_size
from cortex.neuron.text.tokenizer.local import read_text
from cortex.neuron.tokenizer_process import protocol
from cortex.neuron.tokenizer_process.protocol import Job, Reply
from cortex.wire.errors import CortexError, InvalidValue
from cortex.wire.packed_request import unpack
from cortex.wire.rejection import rejected

log = logging.getLogger(__name__)


def main() -> None:
    parser = argparse.ArgumentParser(prog="cortex.neuron.tokenizer_process", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the model's directory or GGUF file")
    parser.add_argument("--fingerprint", help="of the facts that the daemon read from these files before")
    parser.add_argument("--memory-bytes", type=int, help="the most that reading the files and one job may allocate")
    parser.add_argument("--read-cpu-s", type=int, required=True, help="the most that reading the files may compute")
    options, control = attach_to_parent(parser)
    name_thread("neuron-tokenize")
    if options.memory_bytes is not None:
        limit_memory(options.memory_bytes)
    limit_cpu(options.read_cpu_s)
    service = TokenizerService.open(options.model, options.fingerprint)
    lift_cpu_limit()
    serve_pool(control, Job, service.run, memory_bytes=options.memory_bytes)


class TokenizerService:
    """Serves one model's text, or the error that reading it ended in."""

    def __init__(self, text: tuple[protocol.Described, TextModel] | Exception) -> None:
        self._text = text

    @classmethod
    def open(cls, model: Path, fingerprint: str | None) -> TokenizerService:
        """Reads the model's text files. Never raises: each job gets the error instead."""
        try:
            facts, encoder = read_text(model)
            text = TextModel.of(facts, encoder)
        except MemoryError:
            return cls(TextFileMalformed(f"the text files of {model} take more memory than this node allows"))
        except Exception as error:  # whatever it is, the daemon must get it
            log.debug("cannot read the text files of %s", model, exc_info=True)
            return cls(error)
        described = protocol.Described(facts, protocol.fingerprint_of(facts), text.reasoning_end, text.takes_tools)
        if fingerprint not in (None, described.fingerprint):
            # The daemon still decodes tokens with the facts that it read first.
            return cls(TextFileMalformed(f"the text files of {model} changed while the node runs; restart the node"))
        return cls((described, text))

    def run(self, job: Job) -> Reply:
        if isinstance(self._text, Exception):
            return protocol.unreadable(self._text)
        described, text = self._text
        encoder = text.tokenizer.encoder
        before = encoder.num_tokenised
        try:
            match job:
                case protocol.Describe():
                    return described
                case protocol.Encode(characters, rules):
                    check_size(characters, rules)
                    return protocol.Encoded(protocol.packed(text.encode(characters)))
                case protocol.EncodeTexts(texts, rules):
                    for characters in (*texts.texts, *texts.queries):
                        check_size(characters, rules)
                    return protocol.pack_texts(encoder.encode_texts(texts))
                case protocol.Count(whole, rules):
                    num_tokens = len(text.render(unpack(whole), rules).ids)
                    return protocol.Counted(num_tokens, encoder.num_tokenised - before)
                case protocol.Prepare(whole, rules, with_text):
                    request = unpack(whole)
                    prepared, with_text = prepare(text, request, rules), with_text or request.echo
                    return protocol.pack_prepared(prepared, encoder.num_tokenised - before, with_text=with_text)
        except CortexError as error:
            return rejected(error)
        except MemoryError:
            return rejected(protocol.out_of_memory())
        except RecursionError:
            return rejected(InvalidValue("The request is nested too deeply to be prepared; flatten it."))
        except Exception:
            log.exception("preparing a request failed")
            return rejected(
                CortexError("Internal error while the request was prepared; the node's log has the details.")
            )


if __name__ == "__main__":
    main()
