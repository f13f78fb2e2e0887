"""Makes the golden data of the classifier's tests: Hugging Face's encoders for sequence classification at small sizes,
without dropout.

They are BERT, RoBERTa, ELECTRA with narrow embeddings, Longformer and DeBERTa v3, in fp64, with PyTorch's own errors as in
gpt2.py.  Each parameter comes from the counter-based random stream whose number is the FNV-1a hash of its name.
t_classifier.c makes parameters, tokens, labels and lengths again.  Token 1 is padding in all families, and does not occur
in the text.
"""
import numpy as np
import torch
import transformers as hf

import common

PAD = 1
BERT, ROBERTA, ELECTRA, LONGFORMER, DEBERTA = range(5)
FAMILIES = [(hf.BertConfig, hf.BertForSequenceClassification), (hf.RobertaConfig, hf.RobertaForSequenceClassification),
            (hf.ElectraConfig, hf.ElectraForSequenceClassification),
            (hf.LongformerConfig, hf.LongformerForSequenceClassification),
            (hf.DebertaV2Config, hf.DebertaV2ForSequenceClassification)]
NAMES = ["bert", "roberta", "electra", "longformer", "deberta-v2"]

# vocabulary, tokens per sequence, channels, heads, intermediate, layers, classes, batch, embedding, window on each side
SIZES = {
    "odd": (53, 11, 20, 4, 44, 2, 5, 3, 12, 2),
    "seeds": (29, 7, 12, 3, 26, 2, 5, 6, 8, 2),
}
WHOLE = 2


def stream_of(name):
    value = 0x811C9DC5
    for byte in name.encode():
        value = ((value ^ byte) * 0x01000193) & 0xFFFFFFFF
    return value


def fill(parameters, seed):
    """Norm weights around 1, biases and embeddings of amplitude 1/4, matrices of amplitude sqrt(3 / inputs)."""
    with torch.no_grad():
        for name, p in parameters:
            if name.endswith("LayerNorm.weight"):
                scale, shift = 0.25, 1.0
            elif name.endswith("bias") or "embeddings." in name:
                scale, shift = 0.25, 0.0
            else:
                scale, shift = np.sqrt(np.float32(3.0) / np.float32(p.shape[1])), 0.0
            p.copy_(torch.from_numpy(common.uniform(seed, stream_of(name), tuple(p.shape), scale, shift)))


def layer_of(name):
    if ".layer." in name:
        return "layer." + name.split(".layer.")[1].split(".")[0]
    return "embeddings" if "embeddings." in name else name if name == "logits" else "head"


def make_config(family, v, t, c, heads, inner, layers, classes, embedding, window):
    settings = dict(vocab_size=v, hidden_size=c, num_attention_heads=heads, intermediate_size=inner,
                    num_hidden_layers=layers, num_labels=classes, max_position_embeddings=t, type_vocab_size=2,
                    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=PAD, layer_norm_eps=1e-12)
    if family in (ROBERTA, LONGFORMER):                     # positions start at padding_idx + 1
        settings.update(max_position_embeddings=t + 4, type_vocab_size=1, layer_norm_eps=1e-5)
    if family == ELECTRA:
        settings.update(embedding_size=embedding)
    if family == LONGFORMER:
        settings.update(attention_window=2 * window)
    if family == DEBERTA:                                   # as v3; some distances share a bucket, some are beyond the last
        settings.update(type_vocab_size=0, layer_norm_eps=1e-7, relative_attention=True, position_biased_input=False,
                        position_buckets=4, max_relative_positions=t - 2, share_att_key=True, norm_rel_ebd="layer_norm",
                        pos_att_type=["p2c", "c2p"])
    return FAMILIES[family][0](**settings)


def case_runs(family, v, t, c, heads, inner, layers, classes, batch, embedding, window, seeds):
    config = make_config(family, v, t, c, heads, inner, layers, classes, embedding, window)

    def run(seed):
        def build():
            model = FAMILIES[family][1](config).train()
            fill(list(model.named_parameters()), seed)
            return model

        ids = 2 + torch.from_numpy(common.integers(seed, 1000, (batch, t), v - 2)).long()
        labels = torch.from_numpy(common.integers(seed, 1001, (batch,), classes)).long()
        types = torch.from_numpy(common.integers(seed, 1003, (batch, t), max(config.type_vocab_size, 1))).long()
        lengths = 1 + torch.from_numpy(common.integers(seed, 1002, (batch,), t)).long()
        lengths[0] = t                                      # one sequence without padding
        seen = torch.arange(t)[None, :] < lengths[:, None]
        ids[~seen] = PAD

        def forward(model):
            logits = model(input_ids=ids, attention_mask=seen.long(), token_type_ids=types).logits
            return logits, torch.nn.functional.cross_entropy(logits, labels)
        return build, forward
    return [run(seed) for seed in range(seeds)]


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    records = {}
    for family, name in enumerate(NAMES):
        for case, sizes in SIZES.items():
            seeds, whole = (1, 1) if case == "odd" else (common.SEEDS, WHOLE)
            runs = case_runs(family, *sizes, seeds)
            records.update(common.model_records(f"{name}/{case}", runs, layer_of, whole))
    common.write_golden("hf_encoder.bin", records, common.model_bound)


if __name__ == "__main__":
    main()
