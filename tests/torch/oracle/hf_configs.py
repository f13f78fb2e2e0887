"""Makes the golden data of models whose config.json is unusual: activations, epsilons, attention scales and windows.

For each case, hf_configs.json has the config.json that transformers writes.  hf_configs.bin has the logits of the model in
fp64, the loss, the norm of all gradients together, and the norm of the word embeddings' gradient.  Weights, tokens, labels
and lengths are those of gpt2.py and hf_encoder.py for seed 3.  t_model.c and t_classifier.c make them again.
"""
import json

import numpy as np
import torch
import transformers as hf
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

import common
import gpt2
import hf_encoder

SEED = 3
VOCAB, POSITIONS, CHANNELS, HEADS, LAYERS, BATCH, SEQ = 31, 13, 12, 3, 3, 2, 7

# Every activation that the operators compute, by all of its names, and what else makes another model.
ACTIVATIONS = ["gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast", "gelu_accurate", "gelu", "gelu_python", "relu",
               "silu", "swish", "tanh"]
GPT = {name: dict(activation_function=name) for name in ACTIVATIONS}
GPT.update({
    "epsilon": dict(layer_norm_epsilon=1e-2),
    "unscaled": dict(scale_attn_weights=False),
    "by_layer": dict(scale_attn_by_inverse_layer_idx=True),
    "unscaled_by_layer": dict(scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True),
    "upcast": dict(scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True),
    "inner": dict(n_inner=4 * CHANNELS, activation_function="silu", layer_norm_epsilon=1e-3),
})
ENCODER = {name: dict(hidden_act=name) for name in ("gelu", "gelu_new", "relu", "silu", "tanh")}
ENCODER["epsilon"] = dict(layer_norm_eps=1e-2)
DEBERTA = {"distances": dict(position_buckets=-1, max_relative_positions=4), "buckets": dict(max_relative_positions=-1)}
BUCKETS = [(256, 512), (32, 512), (64, 128), (4, 9)]        # of DeBERTa's rows of distances from -600 to 600
LONGFORMER = {"windows": dict(attention_window=[8, 4]), "window": dict(attention_window=6)}


def config_text(config):
    """As save_pretrained writes it, but for the version of transformers."""
    text = json.loads(config.to_json_string(use_diff=True))
    text.pop("transformers_version", None)
    return text


def record(name, model, logits, loss):
    loss.backward()
    norms = {n: float(p.grad.norm()) for n, p in model.named_parameters() if p.grad is not None}
    first = [n for n in norms if n.endswith(("wte.weight", "word_embeddings.weight"))][0]
    return {f"{name}/logits": logits.detach().numpy().astype(np.float32),
            f"{name}/numbers": np.array([float(loss.detach()), float(np.linalg.norm(list(norms.values()))), norms[first]])}


def gpt_case(name, more):
    config = hf.GPT2Config(vocab_size=VOCAB, n_positions=POSITIONS, n_embd=CHANNELS, n_head=HEADS, n_layer=LAYERS, resid_pdrop=0.0,
                           embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, **more)
    model = hf.GPT2LMHeadModel(config).train()
    config.architectures = ["GPT2LMHeadModel"]
    gpt2.fill(list(model.named_parameters()), SEED)
    tokens = torch.from_numpy(common.integers(SEED, 1000, (BATCH, SEQ), VOCAB)).long()
    targets = torch.from_numpy(common.integers(SEED, 1001, (BATCH, SEQ), VOCAB)).long()
    if config.reorder_and_upcast_attn:                      # it casts where autocast would not: in fp32 nothing
        model.set_attn_implementation("eager")
        upcast = model(tokens, use_cache=False).logits.detach()
        model.set_attn_implementation("sdpa")
        plain = model.double()(tokens, use_cache=False).logits.detach()
        assert torch.linalg.norm(upcast - plain) <= 1e-6 * torch.linalg.norm(plain)
    model = model.double()
    logits = model(tokens, use_cache=False).logits
    return config, record(name, model, logits, torch.nn.functional.cross_entropy(logits.reshape(-1, VOCAB), targets.reshape(-1)))


def encoder_case(name, family, kind, more):
    v, t, c, heads, inner, layers, classes, batch, embedding, window = hf_encoder.SIZES["odd"]
    config = hf_encoder.make_config(family, v, t, c, heads, inner, layers, classes, embedding, window)
    config_class, model_class = kind or hf_encoder.FAMILIES[family]
    settings = {**config.to_dict(), **more}
    for key in ("model_type", "transformers_version", "architectures"):
        settings.pop(key, None)
    config = config_class(**settings)
    model = model_class(config).train()
    config.architectures = [model_class.__name__]
    hf_encoder.fill(list(model.named_parameters()), SEED)
    model = model.double()
    ids = 2 + torch.from_numpy(common.integers(SEED, 1000, (batch, t), v - 2)).long()
    labels = torch.from_numpy(common.integers(SEED, 1001, (batch,), classes)).long()
    types = torch.from_numpy(common.integers(SEED, 1003, (batch, t), max(config.type_vocab_size, 1))).long()
    lengths = 1 + torch.from_numpy(common.integers(SEED, 1002, (batch,), t)).long()
    lengths[0] = t
    seen = torch.arange(t)[None, :] < lengths[:, None]
    ids[~seen] = hf_encoder.PAD
    logits = model(input_ids=ids, attention_mask=seen.long(), token_type_ids=types).logits
    return config, record(name, model, logits, torch.nn.functional.cross_entropy(logits, labels))


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    texts, records = {}, {}
    cases = [(f"gpt2/{name}", lambda n, m=more: gpt_case(n, m)) for name, more in GPT.items()]
    for family, family_name in enumerate(hf_encoder.NAMES):
        extra = {hf_encoder.LONGFORMER: LONGFORMER, hf_encoder.DEBERTA: DEBERTA}.get(family, {})
        for name, more in {**ENCODER, **extra}.items():
            cases.append((f"{family_name}/{name}", lambda n, f=family, m=more: encoder_case(n, f, None, m)))
    for name, kind in (("xlm-roberta", (hf.XLMRobertaConfig, hf.XLMRobertaForSequenceClassification)),
                       ("camembert", (hf.CamembertConfig, hf.CamembertForSequenceClassification))):
        cases.append((f"{name}/relu", lambda n, k=kind: encoder_case(n, hf_encoder.ROBERTA, k, dict(hidden_act="relu"))))
    for name, run in cases:
        config, more = run(name)
        texts[name] = config_text(config)
        records.update(more)
    distances = torch.arange(-600, 601)
    for buckets, most in BUCKETS:
        rows = make_log_bucket_position(distances, buckets, most).long() + buckets
        records[f"deberta-v2/rows/{buckets}/{most}"] = rows.clamp(0, 2 * buckets - 1).numpy().astype(np.float32)
    common.write_text("hf_configs.json", json.dumps(texts, indent=1) + "\n")
    common.write_golden("hf_configs.bin", records, lambda name: 1e-6)


if __name__ == "__main__":
    main()
