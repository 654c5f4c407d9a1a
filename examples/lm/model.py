"""A small byte-level transformer: pre-norm, causal, with learned positions and no biases."""

import torch
from torch import nn
from torch.nn import functional

__all__ = ["LanguageModel"]


class Block(nn.Module):
    """Causal self-attention, then a two-layer perceptron, each applied to a normalized copy of its input.

    Parameters
    ----------
    width
        Features per position; a multiple of ``heads``.
    heads
        Number of attention heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, length, width) to the same shape."""
        qkv = self.attention_in(self.attention_norm(x))
        query, key, value = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        hidden: torch.Tensor = self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x))))
        return x + hidden


class LanguageModel(nn.Module):
    """Predict every next byte of a window.

    Under qcomp's default policy only the scales of the norms stay exact: there are no biases, and each matrix has more
    than 10 000 elements.
    """

    def __init__(self, width: int = 128, layers: int = 4, heads: int = 4, context: int = 128) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(256, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.final_norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, 256, bias=False)
        self.apply(initialize)
        with torch.no_grad():  # the sum over the residual stream keeps its size, whatever the depth
            for name, parameter in self.named_parameters():
                if name.endswith(("attention_out.weight", "mlp_out.weight")):
                    parameter.div_((2 * layers) ** 0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map bytes (batch, length) to the logits of the byte after each (batch, length, 256)."""
        x = self.token_embedding(tokens) + self.position_embedding.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.final_norm(x))
        return logits

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy in nats per byte of windows of ``context + 1`` bytes."""
        logits = self(windows[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def initialize(module: nn.Module) -> None:
    """Draw matrices from N(0, 0.02), as GPT-2 does."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
