"""Makes the golden data of the kernel tests: activations, norms, losses, embedding and rotary positions on small matrices.

The rotary positions are those of transformers, and the others are PyTorch's.  Inputs come from counter-based random numbers
that t_kernels.c makes again, so only results are stored.  These are every output of an fp64 run on fp32 inputs for seed 0,
rounded to fp32, and per output the RMS over the seeds of PyTorch's own error when everything is stored in fp32, bf16 or
fp16 (its error to an fp64 run on the same rounded inputs).
"""
import numpy as np
import torch
import torch.nn.functional as F

import common

ROWS, COLS, IGNORE, VOCABULARY, SEQUENCE = 6, 37, -100, 11, 3
EPS = 1e-5
HEADS, DIM, ROTARY, AT = 3, 12, 8, [0, 1, 2, 17, 40, 5]     # of a row's first 36 columns; each row's position


def inputs(seed):
    """The matrices by stream number; labels and ids are integers, and every third label is ignored."""
    scales = [(6.0, 0.0), (2.0, 0.0), (3.0, 0.0), (0.5, 1.0), (1.0, 0.0)]
    x, dy, up, weight, bias = (common.uniform(seed, i, (ROWS, COLS), scale, shift) for i, (scale, shift) in enumerate(scales))
    labels = common.integers(seed, 9, ROWS, COLS)
    labels[::3] = IGNORE
    table = common.uniform(seed, 5, (VOCABULARY, COLS))
    positions = common.uniform(seed, 6, (SEQUENCE, COLS))
    ids = common.integers(seed, 10, ROWS, VOCABULARY)
    return {"x": x, "dy": dy, "up": up, "weight": weight[0], "bias": bias[0], "labels": labels, "table": table,
            "positions": positions, "ids": ids}


def run(function, values, names, dy, dtype):
    """function's output y and its gradients by the named inputs; `values` are in `dtype` already."""
    leaves = [values[name].clone().requires_grad_() for name in names]
    y = function(*leaves)
    grads = torch.autograd.grad(y, leaves, dy if y.ndim else torch.ones((), dtype=dtype))
    return {"y": y.detach(), **{"d" + name: g for name, g in zip(names, grads)}}


# transformers is imported where it is used: it looks for a package named kernels, and imports this file.
def rope_llama(x):
    """Halves, all of DIM; the last column stays."""
    from transformers import LlamaConfig
    from transformers.models.llama import modeling_llama as llama
    q, at = x[:, :HEADS * DIM].view(1, ROWS, HEADS, DIM), torch.tensor([AT])
    config = LlamaConfig(hidden_size=HEADS * DIM, num_attention_heads=HEADS, head_dim=DIM)
    cos, sin = llama.LlamaRotaryEmbedding(config)(x, at)
    q, _ = llama.apply_rotary_pos_emb(q, q, cos, sin, unsqueeze_dim=2)
    return torch.cat((q.reshape(ROWS, HEADS * DIM), x[:, HEADS * DIM:]), 1)


def rope_gptj(x):
    """Neighbours, the first ROTARY of DIM."""
    from transformers.models.gptj import modeling_gptj as gptj
    q, at = x[:, :HEADS * DIM].view(1, ROWS, HEADS, DIM), torch.tensor([AT])
    sin, cos = gptj.create_sinusoidal_positions(max(AT) + 1, ROTARY)[at].to(x.dtype).split(ROTARY // 2, dim=-1)
    q = torch.cat((gptj.apply_rotary_pos_emb(q[..., :ROTARY], sin, cos), q[..., ROTARY:]), -1)
    return torch.cat((q.reshape(ROWS, HEADS * DIM), x[:, HEADS * DIM:]), 1)


def operators(v):
    """name -> (function, inputs that get a gradient)"""
    labels, ids, at = v["labels"].long(), v["ids"].long(), torch.arange(ROWS) % SEQUENCE

    def entropy(**how):
        return (lambda x: F.cross_entropy(x, labels, ignore_index=IGNORE, **how), ["x"])

    return {
        "gelu": (lambda x: F.gelu(x, approximate="tanh"), ["x"]),
        "gelu_erf": (F.gelu, ["x"]),
        "tanh": (torch.tanh, ["x"]),
        "silu": (F.silu, ["x"]),
        "relu": (F.relu, ["x"]),
        "swiglu": (lambda x, up: F.silu(x) * up, ["x", "up"]),
        "layernorm": (lambda x, w, b: F.layer_norm(x, (COLS,), w, b, EPS), ["x", "weight", "bias"]),
        "rmsnorm": (lambda x, w: F.rms_norm(x, (COLS,), w, EPS), ["x", "weight"]),
        "entropy_mean": entropy(),
        "entropy_smooth": entropy(label_smoothing=0.1),
        "entropy_smooth_sum": entropy(label_smoothing=0.1, reduction="sum"),
        "mse_mean": (lambda x: F.mse_loss(x, v["up"]), ["x"]),
        "mse_sum": (lambda x: F.mse_loss(x, v["up"], reduction="sum"), ["x"]),
        "embedding": (lambda table, positions: F.embedding(ids, table) + positions[at], ["table", "positions"]),
        "rope_llama": (rope_llama, ["x"]),
        "rope_gptj": (rope_gptj, ["x"]),
    }


def stored(raw, dtype):
    """The inputs as tensors; floating ones rounded to `dtype`."""
    return {k: torch.from_numpy(np.asarray(a)).to(dtype) if a.dtype == np.float32 else torch.from_numpy(a) for k, a in raw.items()}


def results(v, dtype):
    wide = {k: t.to(dtype) if t.is_floating_point() else t for k, t in v.items()}
    return {f"{op}/{name}": t.double().numpy() for op, (function, names) in operators(wide).items()
            for name, t in run(function, wide, names, wide["dy"], dtype).items()}


def main():
    torch.set_num_threads(1)
    records, kinds = {}, {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    for name, exact in results(stored(inputs(0), torch.float32), torch.float64).items():
        records[name] = exact.astype(np.float32)
    for kind, dtype in kinds.items():
        errors = []
        for seed in range(common.SEEDS):
            v = stored(inputs(seed), dtype)
            errors.append(common.relative_errors(results(v, dtype), results(v, torch.float64), lambda name: name))
        summary = common.rms(errors)
        records.update({f"{kind}/torch/{name}": np.array([e]) for name, e in summary.items()})
        worst = max(summary, key=summary.get)
        print(f"  {kind}: PyTorch's RMS error, largest {summary[worst]:.2e} ({worst})")
    common.write_golden("kernels.bin", records, common.model_bound)


if __name__ == "__main__":
    main()
