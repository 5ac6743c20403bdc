"""A model with a vision tower whose weights are written by hand: it names the colour of the pictures in its prompt.

The tower turns a patch into its mean colour. The first layer with attention mixes the positions evenly, which leaves
the mean colour of the pictures in the residual stream of each position, and the output matrix reads the first letter of
the colour's name there. After a letter of a name its next letter follows. Everything else is zero.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from torch import nn

from .vision_models import QWEN35, QWEN_TOWER

NAMES = ("red", "lawn", "sky")
"""For red, green and blue. No letter is in two of them, so a letter says which one follows."""
_COLOUR, _MIXED, _LETTER = 0, 3, 6
"""Where in a vector of the decoder: the colour of a position, the mean colour, and a letter."""
_LOUD = 100.0
"""A letter is louder than a colour."""


@torch.no_grad()
def colour_namer(tokenizer: Tokenizer, patch: int, end: str) -> Any:
    """`end`: the token after a name."""
    ids = {name: tokenizer.token_to_id(f"<|{name}|>") for name in ("image_pad", "vision_start", "vision_end")}
    config = transformers.Qwen3_5Config(
        text_config=QWEN35 | {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 4096},
        vision_config=QWEN_TOWER | {"patch_size": patch},
        image_token_id=ids["image_pad"],
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
        video_token_id=ids["vision_end"],
    )
    model = transformers.Qwen3_5ForConditionalGeneration(config)
    for parameter in model.parameters():
        parameter.zero_()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.weight.fill_(1)
    tower, decoder = model.model.visual, model.model.language_model
    for colour in range(3):
        plane = tower.patch_embed.proj.weight[colour, colour]
        plane.fill_(1 / plane.numel())
        tower.merger.linear_fc1.weight[colour, colour] = 1
        tower.merger.linear_fc2.weight[_COLOUR + colour, colour] = 1
        mixer = decoder.layers[QWEN35["layer_types"].index("full_attention")].self_attn
        mixer.v_proj.weight[colour, _COLOUR + colour] = 1
        mixer.o_proj.weight[_MIXED + colour, colour] = 1
    place = _LETTER
    for colour, name in enumerate(NAMES):
        letters = [tokenizer.token_to_id(letter) for letter in name] + [tokenizer.token_to_id(end)]
        model.lm_head.weight[letters[0], _MIXED + colour] = 1
        for letter, following in pairwise(letters):
            decoder.embed_tokens.weight[letter, place] = _LOUD
            model.lm_head.weight[following, place] = 1
            place += 1
    return model
