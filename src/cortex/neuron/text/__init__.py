"""Between text and tokens: tokenizers, chat templates, output parsers, grammars."""
