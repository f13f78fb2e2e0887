"""Makes the golden data of the GPT-2 tests: Hugging Face's GPT2LMHeadModel at odd small sizes, without dropout.

Weights, tokens and targets come from counter-based random numbers that t_model.c makes again (see `fill`), so only results
are stored.  These are the loss for every seed, logits and every gradient for the first seeds (of an fp64 run, rounded to
fp32), and the RMS over all seeds of PyTorch's own error in fp32 and under bf16 and fp16 autocast.
"""
import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import common

# name, vocabulary, tokens per sequence, channels, heads, layers, batch, seeds, seeds stored whole
CASES = [
    ("odd", 61, 13, 20, 4, 3, 3, 1, 1),
    ("short", 61, 7, 20, 4, 3, 3, 1, 1),
    ("seeds", 31, 7, 12, 3, 2, 3, common.SEEDS, common.WHOLE),
]
MAX_POSITIONS = 13


def fill(parameters, seed):
    """Parameter i of the module, in its own order and layout, is uniform stream i: norm weights around 1, biases and
    embeddings of amplitude 1/4, matrices sqrt(3 / inputs), which keeps activations near 1 and attention uneven."""
    with torch.no_grad():
        for i, (name, p) in enumerate(parameters):
            if ".ln_" in name and name.endswith("weight"):
                scale, shift = 0.25, 1.0
            elif name.endswith("bias") or "wte" in name or "wpe" in name:
                scale, shift = 0.25, 0.0
            else:
                scale, shift = np.sqrt(np.float32(3.0) / np.float32(p.shape[0])), 0.0
            p.copy_(torch.from_numpy(common.uniform(seed, i, tuple(p.shape), scale, shift)))


def layer_of(name):
    """wte and wpe are one layer, each block is one, the last norm is one; logits are their own."""
    parts = name.split(".")
    if "h" in parts:
        return ".".join(parts[:3])
    return parts[0] if name == "logits" else "ln_f" if "ln_f" in parts else "embedding"


def case_runs(v, t, c, heads, layers, batch, seeds):
    def run(seed):
        def build():
            config = GPT2Config(vocab_size=v, n_positions=MAX_POSITIONS, n_embd=c, n_head=heads, n_layer=layers,
                                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
                                attn_implementation="sdpa")
            model = GPT2LMHeadModel(config).train()
            fill(list(model.named_parameters()), seed)
            return model

        tokens = torch.from_numpy(common.integers(seed, 1000, (batch, t), v)).long()
        targets = torch.from_numpy(common.integers(seed, 1001, (batch, t), v)).long()

        def forward(model):
            logits = model(tokens, use_cache=False).logits
            return logits, torch.nn.functional.cross_entropy(logits.reshape(-1, v), targets.reshape(-1))
        return build, forward
    return [run(seed) for seed in range(seeds)]


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    records = {}
    for name, v, t, c, heads, layers, batch, seeds, whole in CASES:
        runs = case_runs(v, t, c, heads, layers, batch, seeds)
        records.update(common.model_records(name, runs, layer_of, whole))
    common.write_golden("gpt2.bin", records, common.model_bound)


if __name__ == "__main__":
    main()
