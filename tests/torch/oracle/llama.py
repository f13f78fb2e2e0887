"""Makes the golden data of the Llama tests: Hugging Face's LlamaForCausalLM at odd small sizes, with grouped key and value
heads.

Weights, tokens and targets come from counter-based random numbers that t_model.c makes again (see `fill`), so only results
are stored, as in gpt2.py.
"""
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import common

# name, vocabulary, tokens per sequence, channels, hidden, heads, key and value heads, layers, batch, base, seeds, stored whole
CASES = [
    ("odd", 61, 13, 30, 41, 3, 1, 3, 3, 10000.0, 1, 1),
    ("seeds", 31, 7, 24, 20, 4, 2, 2, 3, 500.0, common.SEEDS, common.WHOLE),
]
EPS = 1e-5


def fill(parameters, seed):
    """Parameter i of the module, in its own order, is uniform stream i: norm weights around 1, the embedding of
    amplitude 1/4, matrices sqrt(3 / inputs)."""
    with torch.no_grad():
        for i, (name, p) in enumerate(parameters):
            if "norm" in name:
                scale, shift = 0.25, 1.0
            elif "embed" in name:
                scale, shift = 0.25, 0.0
            else:
                scale, shift = np.sqrt(np.float32(3.0) / np.float32(p.shape[1])), 0.0
            p.copy_(torch.from_numpy(common.uniform(seed, i, tuple(p.shape), scale, shift)))


def layer_of(name):
    """Each block is one layer; all others are their own."""
    return ".".join(name.split(".")[:3]) if ".layers." in name else name


def config_of(v, t, c, hidden, heads, kv_heads, layers, base):
    return LlamaConfig(vocab_size=v, max_position_embeddings=t, hidden_size=c, intermediate_size=hidden,
                       num_attention_heads=heads, num_key_value_heads=kv_heads, num_hidden_layers=layers,
                       rms_norm_eps=EPS, rope_parameters={"rope_theta": base, "rope_type": "default"},
                       tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, attn_implementation="sdpa")


def case_runs(v, t, c, hidden, heads, kv_heads, layers, batch, base, seeds):
    def run(seed):
        def build():
            model = LlamaForCausalLM(config_of(v, t, c, hidden, heads, kv_heads, layers, base)).train()
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
    for name, v, t, c, hidden, heads, kv_heads, layers, batch, base, seeds, whole in CASES:
        runs = case_runs(v, t, c, hidden, heads, kv_heads, layers, batch, base, seeds)
        records.update(common.model_records(name, runs, layer_of, whole))
    common.write_golden("llama.bin", records, common.model_bound)


if __name__ == "__main__":
    main()
