"""A text classifier that was trained with Paceline, and does not need it: torch, tokenizers and safetensors do.

    from load import load
    classifier = load()                      # of the folder that this file is in
    classifier.predict(["some text", ...])   # [("Sports", 0.93), ...]

python load.py "some text"
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ExportedLayer(nn.Module):
    """Pre-norm attention and feed-forward. Projections have no bias: the gradient of a key bias is noise."""

    def __init__(self, width: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, ffn), nn.Linear(ffn, width)

    def forward(self, x_BSD: Tensor, mask_BS: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x_BSD)).unflatten(2, (3, self.heads, -1)).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_BS[:, None, None, :])
        x_BSD = x_BSD + self.out(seen.transpose(1, 2).flatten(2))
        return x_BSD + self.down(F.gelu(self.up(self.norm2(x_BSD))))


class ExportedClassifier(nn.Module):
    """Logits (B, classes) of token ids (B, S); the mask (B, S) is true where there is a token."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width = config["width"]
        self.config = config
        self.tokenizer: Any = None
        self.tokens, self.positions = nn.Embedding(config["vocab"], width), nn.Embedding(config["max_length"], width)
        layers = [ExportedLayer(width, config["heads"], config["ffn"]) for _ in range(config["layers"])]
        self.layers, self.norm = nn.ModuleList(layers), nn.LayerNorm(width)
        self.head = nn.Linear(width, len(config["classes"]))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x_BSD = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x_BSD = layer(x_BSD, mask)
        weight_BS1 = mask[:, :, None].to(x_BSD.dtype)
        return self.head((self.norm(x_BSD) * weight_BS1).sum(1) / weight_BS1.sum(1))

    def encode(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        """Return (ids, mask) of texts, padded to the longest."""
        found = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        tokens = [one.ids or [self.config["empty"]] for one in found]
        rows = [torch.tensor(ids) for ids in tokens]
        mask = [torch.ones(len(ids), dtype=torch.bool) for ids in tokens]
        return (
            nn.utils.rnn.pad_sequence(rows, batch_first=True),
            nn.utils.rnn.pad_sequence(mask, batch_first=True),
        )

    @torch.no_grad()
    def predict(self, texts: list[str]) -> list[tuple[str, float]]:
        """Return the likeliest class of each text, and its probability."""
        best = self(*self.encode(texts)).softmax(1).max(1)
        names = [self.config["classes"][number] for number in best.indices]
        return list(zip(names, best.values.tolist(), strict=True))


def load(folder: str | Path = Path(__file__).parent) -> ExportedClassifier:
    from safetensors.torch import load_file
    from tokenizers import Tokenizer

    folder = Path(folder)
    model = ExportedClassifier(json.loads((folder / "config.json").read_text("utf-8")))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    model.tokenizer = Tokenizer.from_str((folder / "tokenizer.json").read_text("utf-8"))
    return model.eval()


if __name__ == "__main__":
    for answer in load().predict(sys.argv[1:]):
        print(*answer)
