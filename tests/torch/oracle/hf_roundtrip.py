"""Checks that checkpoints go from transformers to examples/gpt_files.h and back with the same logits.

  - transformers -> C: fp32, fp16 and bf16 files, with and without the "transformer." prefix.  The same with every
    configuration of hf_configs.py, whose config.json must be written back unchanged.
  - C -> transformers: a file that C initialised, and files that C read and wrote again, whose weights must have the same
    bits.
  - Llama of examples/llama.h: the same both ways, with grouped heads.  Configurations that it cannot compute must return an
    error.
  - llm.c -> C: its model files, version 3 (fp32) and 5 (bf16), with a padded vocabulary.
The script builds tests/torch/hf_logits.c with $CC (gcc).  It writes no golden data: it passes or fails.
"""
import json
import os
import shutil
import subprocess
import sys
import tempfile

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

import common
import gpt2
import hf_configs
import llama

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", ".."))
VOCAB, POSITIONS, CHANNELS, HEADS, LAYERS = 61, 13, 20, 4, 3
BATCH, SEQ, SEED = 3, 11, 7


def new_model(seed):
    config = transformers.GPT2Config(vocab_size=VOCAB, n_positions=POSITIONS, n_embd=CHANNELS, n_head=HEADS,
                                     n_layer=LAYERS, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config).eval()
    gpt2.fill(list(model.named_parameters()), seed)
    return model


def torch_logits(model):
    tokens = torch.from_numpy(common.integers(SEED, 1000, (BATCH, SEQ), VOCAB)).long()
    with torch.no_grad():
        return model.double()(tokens).logits.numpy()


class C:
    """The compiled program in a folder of its own."""

    def __init__(self, folder):
        self.program, self.out = os.path.join(folder, "hf_logits"), os.path.join(folder, "logits.bin")
        compiler = os.environ.get("CC", "gcc")
        subprocess.run([compiler, "-std=c99", "-O2", "-Itests", "tests/torch/hf_logits.c", "-o", self.program, "-lm", "-lpthread"],
                       cwd=ROOT, check=True)

    def run(self, model, save=None):
        command = [self.program, model, str(BATCH), str(SEQ), str(SEED), self.out] + ([save] if save else [])
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            return None, done.stderr.strip()
        return np.fromfile(self.out, dtype="<f4").reshape(BATCH, SEQ, VOCAB), ""


passed = failed = 0


def check(what, ok, detail=""):
    global passed, failed
    passed, failed = passed + bool(ok), failed + (not ok)
    print(f"{'ok  ' if ok else 'FAIL'} {what} {detail}")


def same_logits(what, got, exact):
    if isinstance(got, tuple):
        got, why = got
        if got is None:
            return check(what, False, why)
    off = np.linalg.norm(got - exact) / np.linalg.norm(exact)
    check(what, off <= 1e-5, f"(relative error {off:.1e})")


def opened(folder):
    """The model that transformers opens in the folder, which must fit it completely."""
    model, info = transformers.GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    anomaly = {k: v for k, v in info.items() if v and not (k == "missing_keys" and set(v) == {"lm_head.weight"})}
    check(f"transformers opens {os.path.basename(folder)} completely", not anomaly, str(anomaly) if anomaly else "")
    return model.eval()


def from_transformers(c, folder):
    for kind in (torch.float32, torch.float16, torch.bfloat16):
        place = os.path.join(folder, str(kind)[6:])
        model = new_model(1).to(kind)
        model.save_pretrained(place)
        path = os.path.join(place, "model.safetensors")
        again = os.path.join(folder, "again_" + str(kind)[6:])
        os.mkdir(again)
        same_logits(f"transformers -> C, {kind}", c.run(path, again), torch_logits(model))
        ours, theirs = load_file(os.path.join(again, "model.safetensors")), load_file(path)
        same = all(torch.equal(ours[k], theirs[k].float()) for k in ours)
        same = same and set(theirs) - set(ours) <= {"lm_head.weight"}
        check(f"read and written again: the same weights, {kind}", same)
        same_logits(f"transformers -> C -> transformers, {kind}", torch_logits(opened(again)), torch_logits(model))


def other_configs(c, folder):
    """Every kind of model: computed alike, and after C wrote it still the one that transformers had."""
    for name, more in hf_configs.GPT.items():
        config = transformers.GPT2Config(vocab_size=VOCAB, n_positions=POSITIONS, n_embd=CHANNELS, n_head=HEADS, n_layer=LAYERS,
                                         bos_token_id=0, eos_token_id=0, **{**more, **({"n_inner": 4 * CHANNELS} if "n_inner" in more else {})})
        config.extra = {"kept": [1, "\u00e9"]}
        model = transformers.GPT2LMHeadModel(config).eval()
        gpt2.fill(list(model.named_parameters()), 1)
        place, again = os.path.join(folder, "config_" + name), os.path.join(folder, "config_again_" + name)
        model.save_pretrained(place)
        os.mkdir(again)
        same_logits(f"transformers -> C, {name}", c.run(os.path.join(place, "model.safetensors"), again), torch_logits(model))
        same_logits(f"transformers -> C -> transformers, {name}", torch_logits(opened(again)), torch_logits(model))
        before, after = (json.load(open(os.path.join(p, "config.json"))) for p in (place, again))
        changed = {k: (before.get(k), v) for k, v in after.items() if before.get(k) != v}
        check(f"config.json came back, {name}", not changed and set(before) <= set(after), str(changed) if changed else "")


def other_spellings(c, folder):
    """The files of the first GPT-2 release have no prefix; others hold the tied output weights a second time."""
    model = new_model(2)
    place = os.path.join(folder, "plain")
    model.save_pretrained(place)
    path = os.path.join(place, "model.safetensors")
    tensors = {k.removeprefix("transformer."): v for k, v in load_file(path).items() if k != "lm_head.weight"}
    save_file(tensors, path, metadata={"format": "pt"})
    same_logits("names without a prefix", c.run(path), torch_logits(model))
    tensors = {"transformer." + k: v for k, v in tensors.items()}
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    save_file(tensors, path)
    same_logits("tied output weights stored twice", c.run(path), torch_logits(model))
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    save_file(tensors, path)
    logits, why = c.run(path)
    check("output weights of their own are refused by name", logits is None and "lm_head.weight" in why, why)


def llmc_file(model, path, version, padded):
    """As llm.c's train_gpt2.py writes it: 256 int32, then the tensors of one kind of all layers together; weights are
    [out, in]."""
    tensors = {k.removeprefix("transformer."): v for k, v in model.state_dict().items()}
    wte = torch.cat([tensors["wte.weight"], torch.zeros(padded - VOCAB, CHANNELS)])
    parts = [wte, tensors["wpe.weight"]]
    for part in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"):
        for kind in ("weight", "bias"):
            for layer in range(LAYERS):
                t = tensors[f"h.{layer}.{part}.{kind}"]
                parts.append(t.T if t.dim() == 2 else t)
    parts += [tensors["ln_f.weight"], tensors["ln_f.bias"]]
    header = np.zeros(256, dtype="<i4")
    header[:8] = [20240326, version, POSITIONS, VOCAB, LAYERS, HEADS, CHANNELS, padded]
    with open(path, "wb") as f:
        f.write(header.tobytes())
        for t in parts:
            t = t.contiguous()
            f.write(t.numpy().tobytes() if version == 3 else t.bfloat16().view(torch.int16).numpy().tobytes())


def from_llmc(c, folder):
    path = os.path.join(folder, "model.bin")
    model = new_model(3).bfloat16().float()                 # weights that both versions hold exactly
    for version, padded in ((3, 64), (5, 64), (3, VOCAB)):
        llmc_file(model, path, version, padded)
        same_logits(f"llm.c version {version}, vocabulary padded to {padded} -> C", c.run(path), torch_logits(model))
        model.float()
    with open(path, "r+b") as f:
        f.truncate(os.path.getsize(path) - 4)
    logits, why = c.run(path)
    check("an llm.c file that ends early is refused", logits is None, why)


def from_c(c, folder):
    place = os.path.join(folder, "from_c")
    os.mkdir(place)
    ours = c.run(f"init:{VOCAB},{POSITIONS},{CHANNELS},{HEADS},{LAYERS}", place)
    if ours[0] is None:
        return check("C -> transformers", False, ours[1])
    same_logits("C -> transformers", ours[0], torch_logits(opened(place)))


def llama_both_ways(c, folder):
    """LlamaForCausalLM: every dtype, bases and epsilons that are not the usual ones, and what is refused by name."""
    shapes = {"grouped": (24, 20, 4, 2, 500.0, 1e-3), "plain": (24, 41, 3, 3, 10000.0, 1e-6), "single": (20, 8, 2, 1, 123456.75, 1e-5)}
    for name, (channels, hidden, heads, kv_heads, base, eps) in shapes.items():
        for kind in (torch.float32, torch.float16, torch.bfloat16):
            config = llama.config_of(VOCAB, POSITIONS, channels, hidden, heads, kv_heads, LAYERS, base)
            config.rms_norm_eps = eps
            model = transformers.LlamaForCausalLM(config).eval()
            llama.fill(list(model.named_parameters()), 1)
            model = model.to(kind)
            what = f"llama {name}, {str(kind)[6:]}"
            place, again = (os.path.join(folder, f"{p}_{name}_{str(kind)[6:]}") for p in ("llama", "llama_again"))
            model.save_pretrained(place)
            exact = transformers.LlamaForCausalLM(config).eval()       # .to() rounds the rotation's frequencies, too
            exact.load_state_dict({k: v.float() for k, v in model.state_dict().items()})
            model = exact
            os.mkdir(again)
            same_logits(f"transformers -> C, {what}", c.run("llama:" + os.path.join(place, "model.safetensors"), again), torch_logits(model))
            model2, info = transformers.LlamaForCausalLM.from_pretrained(again, output_loading_info=True, dtype=torch.float32)
            check(f"transformers opens what C wrote completely, {what}", not any(info.values()), str(info))
            same_logits(f"transformers -> C -> transformers, {what}", torch_logits(model2.eval()), torch_logits(model))
    for key, value in {"tie_word_embeddings": True, "attention_bias": True, "hidden_act": "gelu", "head_dim": 8,
                       "num_key_value_heads": 3, "model_type": "mistral",
                       "rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0}}.items():
        path = os.path.join(place, "config.json")
        text = open(path).read()
        json.dump({**json.loads(text), key: value}, open(path, "w"))
        logits, why = c.run("llama:" + os.path.join(place, "model.safetensors"))
        check(f"llama with {key} = {value} is refused by name", logits is None and (key in why or "num_attention_heads" in why), why)
        open(path, "w").write(text)


def main():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    folder = tempfile.mkdtemp()
    try:
        c = C(folder)
        from_transformers(c, folder)
        other_configs(c, folder)
        other_spellings(c, folder)
        from_llmc(c, folder)
        from_c(c, folder)
        llama_both_ways(c, folder)
    finally:
        shutil.rmtree(folder)
    print(f"{passed} passed, {failed} failed, 0 skipped")
    sys.exit(failed != 0)


if __name__ == "__main__":
    main()
