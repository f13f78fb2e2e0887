"""Checks that the example classifier and transformers compute the same loss of the same model on the same texts, both ways.

transformers -> C: random BERTs and ELECTRAs that save_pretrained wrote, with their vocab.txt, are evaluated by `--epochs
0`.  Some have other activations, epsilons and names of the labels.  C -> transformers: a model that the classifier trained
and saved is opened by from_pretrained, with BertTokenizer over its vocab.txt.  The script runs build/train_classifier.  It
writes no golden data: it passes or fails.
"""
import json
import os
import shutil
import subprocess
import sys
import tempfile

import torch
import transformers as hf

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", ".."))
SEQ = 16                                # shorter than some texts, so that they are cut

passed = failed = 0


def check(what, ok, detail=""):
    global passed, failed
    passed, failed = passed + bool(ok), failed + (not ok)
    print(f"{'ok  ' if ok else 'FAIL'} {what} {detail}")


def classify(folder, *flags):
    """Runs the program; returns its records."""
    command = [os.path.join(ROOT, "build", "train_classifier"), "--precision", "fp32", "--out", folder, "--seq", str(SEQ), *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(flags)}: {done.stderr}")
    with open(os.path.join(folder, "classifier", "metrics.jsonl")) as f:
        return [json.loads(line) for line in f]


def torch_loss(model, vocab, path, names):
    """In fp64, over the lines of a labelled file."""
    lines = [line.rstrip("\n").split("\t", 1) for line in open(path, encoding="utf-8")]
    tokenizer = hf.BertTokenizer(vocab={t.rstrip("\n"): i for i, t in enumerate(open(vocab, encoding="utf-8"))})
    batch = tokenizer([text for _, text in lines], padding=True, truncation=True, max_length=SEQ, return_tensors="pt")
    labels = torch.tensor([names.index(label) for label, _ in lines])
    with torch.no_grad():
        logits = model.double().eval()(**batch).logits
    return (float(torch.nn.functional.cross_entropy(logits, labels)), float((logits.argmax(1) == labels).double().mean()))


def same(what, record, loss, accuracy):
    off = abs(record["validation_loss"] - loss) / loss
    check(what, off <= 1e-5 and abs(record["accuracy"] - accuracy) < 1e-9, f"(loss {loss:.6f}, relative error {off:.1e})")


def main():
    hf.logging.set_verbosity_error()
    hf.logging.disable_progress_bar()
    torch.set_num_threads(1)
    folder = tempfile.mkdtemp()
    try:
        records = classify(folder, "--epochs", "2")
        ours = os.path.join(folder, "classifier")
        data, valid = os.path.join(ours, "sentences.tsv"), os.path.join(folder, "valid.tsv")
        lines = open(data, encoding="utf-8").readlines()
        open(valid, "w", encoding="utf-8").writelines(lines[:50] + ["good\tThe film was SUPERB, d\u00e9j\u00e0 vu\u2026 and so on and on and on and on!\n"])
        names = ["good", "bad"] if lines[0].startswith("good") else ["bad", "good"]
        model, info = hf.BertForSequenceClassification.from_pretrained(ours, output_loading_info=True, dtype=torch.float32)
        anomaly = {k: v for k, v in info.items() if v}
        check("transformers opens the saved model completely", not anomaly, str(anomaly) if anomaly else "")
        check("the labels' names are in config.json", [model.config.id2label[i] for i in range(2)] == names)
        records = classify(os.path.join(folder, "again"), "--init", os.path.join(ours, "model.safetensors"), "--data", data,
                           "--valid", valid, "--epochs", "0")
        same("C -> transformers", records[-1], *torch_loss(model, os.path.join(ours, "vocab.txt"), valid, names))
        bert, electra = (hf.BertConfig, hf.BertForSequenceClassification), (hf.ElectraConfig, hf.ElectraForSequenceClassification)
        turned = {"id2label": {0: names[1], 1: names[0]}, "label2id": {names[1]: 0, names[0]: 1}}
        for config_class, model_class, more in ((*bert, {}), (*electra, {"embedding_size": 12}), (*bert, {"hidden_act": "relu", **turned}),
                                                (*bert, {"hidden_act": "silu", "layer_norm_eps": 1e-3}),
                                                (*electra, {"embedding_size": 12, "hidden_act": "tanh", "layer_norm_eps": 1e-5})):
            torch.manual_seed(5)
            config = config_class(vocab_size=200, hidden_size=20, num_attention_heads=5, intermediate_size=44, num_hidden_layers=3,
                                  max_position_embeddings=32, initializer_range=0.5, **more)
            theirs = os.path.join(folder, model_class.__name__)
            model = model_class(config)
            model.save_pretrained(theirs)
            shutil.copy(os.path.join(ours, "vocab.txt"), theirs)
            records = classify(os.path.join(folder, "from"), "--init", os.path.join(theirs, "model.safetensors"), "--data", data,
                               "--valid", valid, "--epochs", "0", "--save", "none")
            same(f"transformers -> C, {model_class.__name__} {more}", records[-1],
                 *torch_loss(model, os.path.join(theirs, "vocab.txt"), valid, names[::-1] if "id2label" in more else names))
    finally:
        shutil.rmtree(folder)
    print(f"{passed} passed, {failed} failed, 0 skipped")
    sys.exit(failed != 0)


if __name__ == "__main__":
    main()
