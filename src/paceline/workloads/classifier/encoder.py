"""A transformer encoder over packed texts, with mean pooling and a head."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.data.corpora.bpe import MASK_ID
from paceline.nn.packed import Packed, attend, drop, drop_tokens, mean_of_texts
from paceline.workloads.classifier.sections import ClassifierModel


class EncoderLayer(nn.Module):
    """Pre-norm attention and feed-forward. Projections carry no bias: a key bias has no gradient but noise."""

    def __init__(self, shape: ClassifierModel, site: int) -> None:
        super().__init__()
        width, ffn = shape.width, shape.ffn
        self.heads, self.dropout, self.site = shape.heads, shape.dropout, site
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, ffn)
        self.down = nn.Linear(ffn, width)

    def forward(self, x_TD: Tensor, packed: Packed) -> Tensor:
        tokens, width = x_TD.shape
        q, k, v = self.qkv(self.norm1(x_TD)).view(tokens, 3, self.heads, width // self.heads).unbind(1)
        x_TD = x_TD + self._drop(self.out(attend(q, k, v, packed).reshape(tokens, width)), packed, 0)
        return x_TD + self._drop(self.down(F.gelu(self.up(self.norm2(x_TD)))), packed, 1)

    def _drop(self, x_TD: Tensor, packed: Packed, which: int) -> Tensor:
        if not (self.training and self.dropout):
            return x_TD
        return drop(x_TD, self.dropout, packed, self.site + which)


class Encoder(nn.Module):
    def __init__(self, shape: ClassifierModel, vocab: int, longest: int, classes: int) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(vocab, shape.width)
        self.positions = nn.Embedding(longest, shape.width)
        self.layers = nn.ModuleList(EncoderLayer(shape, site=2 + 2 * i) for i in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, classes)
        self._initialise()

    def _initialise(self) -> None:
        """What is added to the stream starts small, and so does the head: the first loss is that of a guess."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                shrink = 0.1 if name == "head" else 1.0
                if name.endswith((".out", ".down")):
                    shrink = 1 / math.sqrt(2 * len(self.layers))
                nn.init.normal_(module.weight, std=shrink / math.sqrt(module.in_features))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.1)

    def forward(self, packed: Packed) -> Tensor:
        shape, tokens = self.shape, packed.tokens
        if self.training and shape.word_dropout:
            tokens = drop_tokens(packed, shape.word_dropout, site=0, replacement=MASK_ID)
        x_TD = self.tokens(tokens) + self.positions(packed.positions)
        if self.training and shape.dropout:
            x_TD = drop(x_TD, shape.dropout, packed, site=1)
        for layer in self.layers:
            x_TD = layer(x_TD, packed)
        return self.head(mean_of_texts(self.norm(x_TD), packed))
