"""Makes the golden data of the encoder tests: a bidirectional transformer encoder with padding, like BERT's, in plain
PyTorch.

It has post-norm layers, erf GELU, self-attention that hides the keys beyond each sequence's length, one label per token,
and cross-entropy over the tokens that are not padding.  Parameters, tokens, labels and lengths come from counter-based
random numbers, which t_model.c makes again.  The stored results are as in gpt2.py.
"""
import numpy as np
import torch
import torch.nn.functional as F

import common

# name, vocabulary, tokens per sequence, channels, heads, hidden, layers, classes, batch, seeds, seeds stored whole
CASES = [
    ("odd", 53, 11, 20, 4, 44, 2, 7, 3, 1, 1),
    ("one", 53, 1, 20, 4, 44, 2, 7, 2, 1, 1),
    ("seeds", 29, 7, 12, 3, 26, 2, 5, 4, common.SEEDS, common.WHOLE),
]


class Layer(torch.nn.Module):
    def __init__(self, channels, heads, hidden):
        super().__init__()
        self.heads = heads
        self.qkv = torch.nn.Linear(channels, 3 * channels)
        self.proj = torch.nn.Linear(channels, channels)
        self.ln1 = torch.nn.LayerNorm(channels)
        self.fc1 = torch.nn.Linear(channels, hidden)
        self.fc2 = torch.nn.Linear(hidden, channels)
        self.ln2 = torch.nn.LayerNorm(channels)

    def forward(self, x, seen):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = self.ln1(x + self.proj(o.transpose(1, 2).reshape(b, t, c)))
        return self.ln2(x + self.fc2(F.gelu(self.fc1(x))))


class Encoder(torch.nn.Module):
    def __init__(self, vocabulary, positions, channels, heads, hidden, layers, classes):
        super().__init__()
        self.token = torch.nn.Embedding(vocabulary, channels)
        self.position = torch.nn.Embedding(positions, channels)
        self.ln = torch.nn.LayerNorm(channels)
        self.layers = torch.nn.ModuleList([Layer(channels, heads, hidden) for _ in range(layers)])
        self.head = torch.nn.Linear(channels, classes)

    def forward(self, ids, lengths):
        t = ids.shape[1]
        seen = (torch.arange(t)[None, :] < lengths[:, None])[:, None, None, :]
        x = self.ln(self.token(ids) + self.position.weight[:t])
        for layer in self.layers:
            x = layer(x, seen)
        return self.head(x)


def fill(parameters, seed):
    """Parameter i is uniform stream i: norm weights around 1, biases and embeddings of amplitude 1/4, matrices of
    amplitude sqrt(3 / inputs)."""
    with torch.no_grad():
        for i, (name, p) in enumerate(parameters):
            if ".ln" in "." + name and name.endswith("weight"):
                scale, shift = 0.25, 1.0
            elif name.endswith("bias") or name.startswith(("token", "position")):
                scale, shift = 0.25, 0.0
            else:
                scale, shift = np.sqrt(np.float32(3.0) / np.float32(p.shape[1])), 0.0
            p.copy_(torch.from_numpy(common.uniform(seed, i, tuple(p.shape), scale, shift)))


def layer_of(name):
    parts = name.split(".")
    if parts[0] == "layers":
        return ".".join(parts[:2])
    return "embedding" if parts[0] in ("token", "position") else parts[0]


def case_runs(v, t, c, heads, hidden, layers, classes, batch, seeds):
    def run(seed):
        def build():
            model = Encoder(v, t, c, heads, hidden, layers, classes)
            fill(list(model.named_parameters()), seed)
            return model

        ids = torch.from_numpy(common.integers(seed, 1000, (batch, t), v)).long()
        labels = torch.from_numpy(common.integers(seed, 1001, (batch, t), classes)).long()
        lengths = 1 + torch.from_numpy(common.integers(seed, 1002, (batch,), t)).long()
        lengths[0] = t                                  # one sequence without padding
        labels[torch.arange(t)[None, :] >= lengths[:, None]] = -100

        def forward(model):
            logits = model(ids, lengths)
            return logits, F.cross_entropy(logits.reshape(-1, classes), labels.reshape(-1))
        return build, forward
    return [run(seed) for seed in range(seeds)]


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    records = {}
    for name, v, t, c, heads, hidden, layers, classes, batch, seeds, whole in CASES:
        runs = case_runs(v, t, c, heads, hidden, layers, classes, batch, seeds)
        records.update(common.model_records(name, runs, layer_of, whole))
    common.write_golden("encoder.bin", records, common.model_bound)


if __name__ == "__main__":
    main()
