"""The forward of the block of examples/gpt.h with PyTorch."""
from torch import nn


class Block(nn.Module):
    def __init__(self, channels, heads, dropout):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.c_attn, self.attn_proj = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.c_fc, self.mlp_proj = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.drop, self.act = nn.Dropout(dropout), nn.GELU(approximate="tanh")

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.attn_proj(y.transpose(1, 2).flatten(2)))
        return x + self.drop(self.mlp_proj(self.act(self.c_fc(self.ln_2(x)))))
