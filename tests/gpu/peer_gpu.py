"""Times the cases of bench_gpu.cu in PyTorch, eager and by torch.compile, under the same names.

    python tests/gpu/peer_gpu.py [--device cuda] [--ms 20] [--tiny]

Prints JSON lines: first the versions, then the answers to the lines on its input, as bench_gpu --turns does, so that the
rounds of both take turns.  "list" names the cases and the modes of each.  "case MODE NAME" prepares the operands, or says
why the case is skipped.  "round" times one round of them, and "end" frees them.  Modes are eager, compile, and other ways
of a case by their names.  Launches use several sets of operands in turn, as in bench_gpu.cu.  run.py calls it.
"""
import argparse
import ctypes
import json
import math
import platform
import statistics
import sys
import time

import torch
import torch._functorch.config
from torch.nn import functional as F

GPT2 = dict(rows=65536, channels=768, hidden=3072, vocabulary=50304, classes=50257, logit_rows=16384, heads=96,
            tokens=1024, layers=12)
TINY = dict(rows=64, channels=64, hidden=256, vocabulary=512, classes=500, logit_rows=12, heads=2, tokens=32, layers=2)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
aten = torch.ops.aten


def line(event, **values):
    print(json.dumps({"event": event, **values}), flush=True)


class Bench:
    def __init__(self, args):
        self.args, self.device, self.asked, self.mode = args, args.device, None, None   # None: to be listed
        self.s = argparse.Namespace(**(TINY if args.tiny else GPT2))
        self.cuda = self.device == "cuda"
        self.l2 = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 1 << 26) if self.cuda else 0

    def random(self, *shape, dtype=BF16, grad=False):
        return (2 * torch.rand(*shape, device=self.device) - 1).to(dtype).requires_grad_(grad)

    def ids(self, n, limit):
        return torch.randint(0, limit, (n,), device=self.device)

    def sets(self, megabytes):
        """Operands of one launch after another: four times the L2 cache lies between a set and its next use."""
        return 2 if not self.cuda else max(2, min(16, int(4 * self.l2 / (megabytes * 1e6)) + 1))

    def milliseconds(self, calls, count):
        if not self.cuda:
            start = time.perf_counter()
            for i in range(count):
                calls[i % len(calls)]()
            return 1e3 * (time.perf_counter() - start) / count
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for i in range(count):
            calls[i % len(calls)]()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / count

    def launches(self, calls):
        """How many of them fill a round; compiles and allocates."""
        sets = len(calls)
        self.milliseconds(calls, 2 * sets)
        first = self.milliseconds(calls, sets)
        return 1 if self.args.tiny else max(sets, min(2000, int(self.args.ms / max(first, 1e-3)) + 1))

    def turns(self, calls):
        """Rounds one by one, as the input asks for them."""
        count = self.launches(calls)
        line("ready", sets=len(calls), launches=count)
        while sys.stdin.readline() == "round\n":
            line("round", ms=self.milliseconds(calls, count))

    def case(self, name, megabytes, text, make, compiled=True, variant=None):
        """make(compiler): a function that makes one set of operands and returns what a launch calls.  compiler turns a
        Python function into the one to call: by torch.compile, or as it is.  variant: another eager way, by its name."""
        modes = [variant] if variant else ["eager", "compile"] if compiled else ["eager"]
        if self.asked is None:
            for mode in modes:
                line("listed", case=name, mode=mode, call=text)
        if name != self.asked or self.mode not in modes:
            return
        try:
            compiling = self.mode == "compile"
            if compiling:
                torch._dynamo.reset()
            one = make(torch.compile if compiling else lambda function: function)
            self.turns([one() for _ in range(self.sets(megabytes))])
        except Exception as error:                          # whatever a version of PyTorch lacks is left out
            why = str(error).strip().splitlines() or [type(error).__name__]
            line("skipped", why=why[0][:200])
        if self.cuda:
            torch.cuda.empty_cache()


def gradient(outputs, inputs, seeds):
    """A call that computes the gradients again and again from what one forward pass kept."""
    return lambda: torch.autograd.grad(outputs, inputs, seeds, retain_graph=True)


def casts(b):
    n = b.s.rows * b.s.channels

    def stochastic(compiler):
        def rounded(x):
            return ((x.view(torch.int32) + torch.randint_like(x, 1 << 16, dtype=torch.int32)) & -65536).view(FP32).to(BF16)
        function = compiler(rounded)

        def one():
            x = b.random(n, dtype=FP32)
            return lambda: function(x)
        return one

    def cast(name, to, source, size):
        def make(_):
            def one():
                x = b.random(n, dtype=source)
                return lambda: x.to(to)
            return one
        b.case(name, n * size / 1e6, "x.to(dtype)", make, compiled=False)
    cast("cast fp32 to bf16", BF16, FP32, 6)
    cast("cast fp32 to fp16", FP16, FP32, 6)
    cast("cast bf16 to fp32", FP32, BF16, 6)
    cast("cast fp32 to e4m3", torch.float8_e4m3fn, FP32, 5)
    b.case("cast fp32 to bf16, stochastic", n * 6 / 1e6, "(x.view(int32) + randint(2^16)) & -2^16", stochastic)

    def widen(_):
        def one():
            x = torch.randint(0, 50000, (n,), device=b.device).to(torch.uint16)
            return lambda: x.to(torch.int32)
        return one
    b.case("widen ids", n * 6 / 1e6, "x.to(int32)", widen, compiled=False)


def parameter_sizes(s):
    c = s.channels
    return ([s.vocabulary * c, s.tokens * c] +
            [c, c, 3 * c * c, 3 * c, c * c, c, c, c, 4 * c * c, 4 * c, 4 * c * c, c] * s.layers + [c, c])


def gradients(b):
    """Unscaling, norm and clipping of the gradients of all parameters; factors 2 and 0.5 in turn, as in bench_gpu.cu."""
    sizes = parameter_sizes(b.s)
    millions = sum(sizes) / 1e6

    def case(name, text, dtype, bytes_each, work):
        def one():
            grads, found = [b.random(n, dtype=dtype) for n in sizes], torch.zeros(1, device=b.device)
            factors = [torch.full((), f, device=b.device) for f in (2.0, 0.5)]

            def call():
                factors.reverse()
                work(grads, found, factors[0])
            return call
        b.case(name, bytes_each * millions, text, lambda _: one, compiled=False)

    def unscale(grads, found, factor):
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, factor)

    def norm(grads, *_):
        torch.stack(torch._foreach_norm(grads)).norm()

    def clip(grads, _, factor):
        torch._foreach_mul_(grads, factor)
    for name, dtype, size in (("fp32", FP32, 4), ("bf16", BF16, 2), ("fp16", FP16, 2)):
        case("unscale " + name, "_amp_foreach_non_finite_check_and_unscale_", dtype, 2 * size, unscale)
        case("norm " + name, "stack(_foreach_norm(g)).norm()", dtype, size, norm)
    case("clip fp32", "_foreach_mul_", FP32, 8, clip)
    clip_grad_norm(b)
    scaler_update(b)


def parameters_of(b, dtype):
    params = [torch.nn.Parameter(b.random(n, dtype=dtype)) for n in parameter_sizes(b.s)]
    for p in params:
        p.grad = b.random(p.numel(), dtype=dtype)
    return params


def clip_grad_norm(b):
    def one():
        params = parameters_of(b, FP32)
        return lambda: torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
    b.case("clip_grad_norm fp32", 12 * sum(parameter_sizes(b.s)) / 1e6, "clip_grad_norm_(foreach=True)", lambda _: one,
           compiled=False)


def scaler_update(b):
    def one():
        scale, found = torch.full((), 65536.0, device=b.device), torch.zeros((), device=b.device)
        tracker = torch.zeros((), dtype=torch.int32, device=b.device)
        return lambda: torch._amp_update_scale_(scale, tracker, found, 2.0, 0.5, 2000)
    b.case("scaler update", 1e-4, "_amp_update_scale_", lambda _: one, compiled=False)


def optimizers(b):
    """fp32 weights by PyTorch's AdamW in all its ways.  What it lacks, 16-bit weights that lose nothing or little, costs its
    users fp32 weights and a copy."""
    millions = sum(parameter_sizes(b.s)) / 1e6

    def case(name, text, bytes_each, optimizer, dtype=FP32, copy=None, variant=None):
        def one():
            params = parameters_of(b, dtype)
            low, opt = [p.detach().to(copy) for p in params] if copy else [], optimizer(params)

            def call():
                opt.step()
                if copy:
                    torch._foreach_copy_(low, [p.detach() for p in params])
            return call
        b.case(name, bytes_each * millions, text, lambda _: one, compiled=False, variant=variant)

    def adamw(**how):
        return lambda params: torch.optim.AdamW(params, lr=1e-4, **how)

    def scaled(params):
        """As GradScaler.step calls the fused optimizer."""
        opt = torch.optim.AdamW(params, lr=1e-4, fused=True)
        opt.grad_scale, opt.found_inf = torch.ones((), device=b.device), torch.zeros((), device=b.device)
        return opt
    case("AdamW fp32", "AdamW(fused=True)", 28, adamw(fused=True))
    case("AdamW fp32", "AdamW(fused=True) with grad_scale and found_inf", 28, scaled, variant="scaled")
    case("AdamW fp32", "AdamW(foreach=True)", 28, adamw(foreach=True), variant="foreach")
    if b.cuda:
        case("AdamW fp32", "AdamW(fused=True, capturable=True)", 28, adamw(fused=True, capturable=True), variant="capturable")
    for name, low in (("bf16, fp32 masters", BF16), ("fp16, fp32 masters", FP16), ("bf16, remainders", BF16),
                      ("bf16, stochastic", BF16), ("bf16, masters, bf16 moments", BF16)):
        case("AdamW " + name, "AdamW(fused=True), _foreach_copy_ to 16 bits", 28, adamw(fused=True), copy=low)
    case("AdamW bf16, bf16 moments", "AdamW(fused=True)", 14, adamw(fused=True), dtype=BF16)
    case("SGD fp32, momentum", "SGD(fused=True)", 20, lambda params: torch.optim.SGD(params, lr=1e-4, momentum=0.9, fused=True))


def norms(b):
    rows, cols, wide = b.s.rows, b.s.channels, 256 if b.args.tiny else 4096
    norms_of(b, rows, cols, BF16, "")
    norms_of(b, rows * cols // wide, wide, BF16, ", wide")
    norms_of(b, rows, cols, FP32, ", fp32", only=("layernorm", "layernorm backward"))
    stream_norms(b, rows, cols)


def norms_of(b, rows, cols, dtype, suffix, only=()):
    size = rows * cols * dtype.itemsize / 1e6

    def layer(x, w, c):
        return F.layer_norm(x, (cols,), w, c)

    def rms(x, w, _):
        return F.rms_norm(x, (cols,), w, 1e-5)

    def forward(function):
        def make(compiler):
            function_ = compiler(function)

            def one():
                x, w, c = (b.random(*shape, dtype=dtype) for shape in ((rows, cols), (cols,), (cols,)))
                return lambda: function_(x, w, c)
            return one
        return make

    def backward(function):
        def make(compiler):
            function_ = compiler(function)

            def one():
                x, w, c = (b.random(*shape, dtype=dtype, grad=True) for shape in ((rows, cols), (cols,), (cols,)))
                wanted = (x, w) if function is rms else (x, w, c)
                return gradient(function_(x, w, c), wanted, b.random(rows, cols, dtype=dtype))
            return one
        return make

    def case(name, operands, text, make):
        if not only or name in only:
            b.case(name + suffix, operands * size, text, make)
    case("layernorm", 2, "F.layer_norm", forward(layer))
    case("rmsnorm", 2, "F.rms_norm", forward(rms))
    case("layernorm backward", 3, "autograd.grad of F.layer_norm", backward(layer))
    case("rmsnorm backward", 3, "autograd.grad of F.rms_norm", backward(rms))
    residual_norms(b, rows, cols, dtype, case)


def residual_norms(b, rows, cols, dtype, case):
    def both(x, r, w, c):
        total = x + r
        return total, F.layer_norm(total, (cols,), w, c)

    def operands(grad):
        shapes = ((rows, cols), (rows, cols), (cols,), (cols,))
        return [b.random(*shape, dtype=dtype, grad=grad) for shape in shapes]

    def forward(compiler):
        function = compiler(both)

        def one():
            values = operands(False)
            return lambda: function(*values)
        return one

    def backward(compiler):
        function = compiler(both)

        def one():
            x, r, w, c = operands(True)
            seeds = [b.random(rows, cols, dtype=dtype) for _ in range(2)]
            return gradient(function(x, r, w, c), (x, w, c), seeds)
        return one
    case("residual + layernorm", 4, "x + r, F.layer_norm", forward)
    case("residual + layernorm backward", 4, "autograd.grad of F.layer_norm(x + r)", backward)


def stream_norms(b, rows, cols):
    """Those of a GPT-2 step under autocast: the residual stream is fp32, and LayerNorm's weight, its branch and its result are
    bf16 on the other side of casts."""
    def both(x, r, w, c):
        total = x + r
        return total, F.layer_norm(total, (cols,), w, c).to(BF16)

    def operands(grad):
        pair = [b.random(rows, cols, dtype=dtype, grad=grad) for dtype in (BF16, FP32)]
        return pair + [b.random(cols, dtype=FP32, grad=grad) for _ in range(2)]

    def forward(compiler):
        function = compiler(both)

        def one():
            values = operands(False)
            return lambda: function(*values)
        return one

    def backward(compiler):
        function = compiler(both)

        def one():
            x, r, w, c = operands(True)
            seeds = [b.random(rows, cols, dtype=dtype) for dtype in (FP32, BF16)]
            return gradient(function(x, r, w, c), (x, r, w, c), seeds)
        return one
    name = "residual + layernorm{}, fp32 stream"
    b.case(name.format(""), 12 * rows * cols / 1e6, "x + r, F.layer_norm, to(bf16)", forward)
    b.case(name.format(" backward"), 16 * rows * cols / 1e6, "autograd.grad of the same", backward)


def softmaxes(b):
    heads, tokens, many = b.s.heads, b.s.tokens, 64 if b.args.tiny else 4096
    softmaxes_of(b, heads, tokens, BF16, "")
    softmaxes_of(b, max(1, heads * tokens * tokens // many ** 2), many, BF16, ", many keys")
    softmaxes_of(b, heads, tokens, FP32, ", fp32", only=("softmax",))


def softmaxes_of(b, heads, tokens, dtype, suffix, only=()):
    size = heads * tokens * tokens * dtype.itemsize / 1e6
    hidden = torch.ones(tokens, tokens, dtype=torch.bool, device=b.device).triu(1)

    def plain(x):
        return torch.softmax(x * 0.125, -1)

    def causal(x):
        return torch.softmax((x * 0.125).masked_fill(hidden, -math.inf), -1)

    def forward(function, as_is):
        def make(compiler):
            function_ = compiler(function) if compiler is torch.compile else as_is

            def one():
                x = b.random(heads, tokens, tokens, dtype=dtype)
                return lambda: function_(x)
            return one
        return make

    def backward(compiler):
        function = compiler(lambda dy, y: aten._softmax_backward_data(dy, y, -1, dtype))

        def one():
            dy, y = (b.random(heads, tokens, tokens, dtype=dtype) for _ in range(2))
            return lambda: function(dy, y)
        return one

    def case(name, operands, text, make):
        if not only or name in only:
            b.case(name + suffix, operands * size, text, make)
    case("softmax", 2, "torch.softmax", forward(plain, lambda x: torch.softmax(x, -1)))
    case("softmax, causal", 1.5, "softmax(masked_fill)",
         forward(causal, lambda x: torch.softmax(x.masked_fill(hidden, -math.inf), -1)))
    case("softmax backward", 3, "_softmax_backward_data", backward)
    case("softmax backward, causal", 2, "_softmax_backward_data", backward)


def pointwise(b):
    def operator(name, text, function, operands, bytes_each, shape, dtype=BF16):
        def make(compiler):
            function_ = compiler(function)

            def one():
                values = [b.random(*shape, dtype=dtype) for _ in range(operands)]
                return lambda: function_(*values)
            return one
        b.case(name, bytes_each * math.prod(shape) / 1e6, text, make)

    wide, narrow, gated = (b.s.rows, b.s.hidden), (b.s.rows, b.s.channels), (b.s.rows, b.s.hidden * 2 // 3)

    def swiglu(gate, up):
        return F.silu(gate) * up

    def swiglu_backward(compiler):
        function = compiler(swiglu)

        def one():
            gate, up = b.random(*gated, grad=True), b.random(*gated, grad=True)
            return gradient(function(gate, up), (gate, up), b.random(*gated))
        return one

    def biased_gelu(compiler):
        function = compiler(lambda x, bias: F.gelu(x + bias, approximate="tanh"))

        def one():
            x, bias = b.random(*wide), b.random(b.s.hidden)
            return lambda: function(x, bias)
        return one
    operator("GELU", "F.gelu(tanh)", lambda x: F.gelu(x, approximate="tanh"), 1, 4, wide)
    operator("GELU, fp32", "F.gelu(tanh)", lambda x: F.gelu(x, approximate="tanh"), 1, 8, wide, FP32)
    b.case("GELU + bias", 4 * math.prod(wide) / 1e6, "F.gelu(x + bias, tanh)", biased_gelu)
    operator("GELU backward", "aten.gelu_backward(tanh)",
             lambda dy, x: aten.gelu_backward(dy, x, approximate="tanh"), 2, 6, wide)
    operator("SiLU", "F.silu", F.silu, 1, 4, wide)
    operator("ReLU", "F.relu", F.relu, 1, 4, wide)
    operator("SwiGLU", "F.silu(gate) * up", swiglu, 2, 6, gated)
    b.case("SwiGLU backward", 10 * math.prod(gated) / 1e6, "autograd.grad of F.silu(gate) * up", swiglu_backward)
    operator("dropout", "F.dropout", lambda x: F.dropout(x, 0.1, True), 1, 4, narrow)
    operator("residual add", "x + y", lambda x, y: x + y, 2, 6, narrow)
    operator("bias gradient", "x.sum(0)", lambda x: x.sum(0, dtype=FP32), 1, 2, narrow)


def losses(b):
    rows, cols = b.s.logit_rows, b.s.vocabulary

    def cross_entropy(dtype):
        def make(compiler):
            function = compiler(F.cross_entropy)

            def one():
                x, labels = b.random(rows, cols, dtype=dtype, grad=True), b.ids(rows, b.s.classes)
                return lambda: torch.autograd.grad(function(x, labels), x)
            return one
        return make

    def mse(compiler):
        function = compiler(F.mse_loss)

        def one():
            x, target = b.random(b.s.rows, b.s.channels, grad=True), b.random(b.s.rows, b.s.channels)
            return lambda: torch.autograd.grad(function(x, target), x)
        return one

    narrow = b.s.rows * b.s.channels / 1e6
    b.case("cross-entropy bf16", 4 * rows * cols / 1e6, "F.cross_entropy and autograd.grad", cross_entropy(BF16))
    b.case("cross-entropy fp32", 8 * rows * cols / 1e6, "F.cross_entropy and autograd.grad", cross_entropy(FP32))
    b.case("mean squared error", 6 * narrow, "F.mse_loss and autograd.grad", mse)


def embeddings(b):
    narrow = b.s.rows * b.s.channels / 1e6

    def embedding(compiler):
        function = compiler(lambda ids, table, positions: F.embedding(ids, table) + positions)

        def one():
            ids = b.ids(b.s.rows, b.s.classes)
            table, positions = b.random(b.s.vocabulary, b.s.channels), b.random(b.s.tokens, b.s.channels)
            return lambda: function(ids.view(-1, b.s.tokens), table, positions)
        return one

    def embedding_backward(limit):
        def one():
            ids, dy = b.ids(b.s.rows, limit), b.random(b.s.rows, b.s.channels)
            return lambda: aten.embedding_dense_backward(dy, ids, b.s.vocabulary, -1, False)
        return lambda _: one

    def added(compiler):
        function = compiler(lambda table, dy, ids: table.add_(aten.embedding_dense_backward(dy, ids, b.s.vocabulary, -1, False)))

        def one():
            ids, dy = b.ids(b.s.rows, b.s.classes), b.random(b.s.rows, b.s.channels)
            table = b.random(b.s.vocabulary, b.s.channels, dtype=FP32)
            return lambda: function(table, dy, ids)
        return one
    b.case("embedding", 4 * narrow, "F.embedding + positions", embedding)
    text = "aten.embedding_dense_backward"
    b.case("embedding backward", 2 * narrow, text, embedding_backward(b.s.classes), compiled=False)
    b.case("embedding backward, one id", 2 * narrow, text, embedding_backward(1), compiled=False)
    b.case("embedding backward, added", 2 * narrow, "table.add_(embedding_dense_backward)", added)


def products(b):
    """Shapes and names as in bench_gpu.cu.  A weight's gradient is added to an fp32 one there, and stays in bf16 here."""
    s, rows = b.s, b.s.rows
    c, h, square = s.channels, s.hidden, 64 if b.args.tiny else 8192

    def case(name, text, dtype, m, n, k, function, operands, compiled=True):
        def make(compiler):
            function_ = compiler(function)

            def one():
                values = [b.random(*shape, dtype=dtype) for shape in operands]
                return lambda: function_(*values)
            return one
        b.case(name, dtype.itemsize * (m * k + k * n + m * n) / 1e6, text, make, compiled)

    def linear(name, dtype, m, n, k, bias=True):
        if bias:
            case(name, "F.linear", dtype, m, n, k, F.linear, ((m, k), (n, k), (n,)), compiled=False)
        else:
            case(name, "F.linear", dtype, m, n, k, F.linear, ((m, k), (n, k)), compiled=False)

    def gelu(x, w, bias):
        pre = F.linear(x, w, bias)
        return pre, F.gelu(pre, approximate="tanh")

    for name, dtype in (("bf16", BF16), ("fp16", FP16), ("tf32", FP32), ("fp32", FP32)):
        few, p = rows // 4 if name == "fp32" else rows, f"product {name}, "
        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        linear(p + "linear", dtype, few, h, c)
        case(p + "NN", "x @ w", dtype, few, c, h, torch.matmul, ((few, h), (h, c)), compiled=False)
        case(p + "TN", "x.t() @ y", dtype, h, c, few, lambda x, y: x.t() @ y, ((few, h), (few, c)), compiled=False)
        case(p + "linear GELU", "F.gelu(F.linear)", dtype, few, h, c, gelu, ((few, c), (h, c), (h,)))
    torch.backends.cuda.matmul.allow_tf32 = False
    p = "product bf16, "
    linear(p + "qkv", BF16, rows, 3 * c, c)
    case(p + "projection", "torch.addmm", BF16, rows, c, c, lambda x, w, bias: torch.addmm(bias, x, w.t()),
         ((rows, c), (c, c), (c,)), compiled=False)
    linear(p + "MLP projection", BF16, rows, c, h)
    linear(p + "classifier", BF16, s.logit_rows, s.vocabulary, c, False)
    logits, v = s.logit_rows, s.vocabulary
    case(p + "classifier dX", "dy @ w", BF16, logits, c, v, torch.matmul, ((logits, v), (v, c)), compiled=False)
    case(p + "classifier dW", "dy.t() @ x", BF16, v, c, logits, lambda dy, x: dy.t() @ x, ((logits, v), (logits, c)),
         compiled=False)
    for name, m, n in (("qkv", 3 * c, c), ("projection", c, c), ("MLP projection", c, h)):
        if m != c or n != h:                                # dX of the MLP's projection is "GELU backward"
            case(p + name + " dX", "dy @ w", BF16, rows, n, m, torch.matmul, ((rows, m), (m, n)), compiled=False)
        case(p + name + " dW", "dy.t() @ x, dy.sum(0)", BF16, m, n, rows, lambda dy, x: (dy.t() @ x, dy.sum(0)),
             ((rows, m), (rows, n)), compiled=False)
    case(p + "GELU backward", "gelu_backward(dy @ w, x)", BF16, rows, h, c,
         lambda dy, w, x: aten.gelu_backward(dy @ w, x, approximate="tanh"), ((rows, c), (c, h), (rows, h)))
    case(p + "weight gradient", "dy.t() @ x, dy.sum(0)", BF16, h, c, rows, lambda dy, x: (dy.t() @ x, dy.sum(0)),
         ((rows, h), (rows, c)))
    case(p + "square", "x @ w", BF16, square, square, square, torch.matmul, ((square, square), (square, square)),
         compiled=False)
    linear(p + "few rows", BF16, s.tokens, h, c)
    linear(p + "odd sizes", BF16, 2 * s.tokens + 1, h + 3, c + 1, False)


def attentions(b):
    """Shapes and names as in bench_gpu.cu.  The modes are the backends of scaled_dot_product_attention, one at a time."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def operands(batch, tokens, heads, dim, grad):
        qkv = b.random(batch, tokens, 3, heads, dim)
        return [qkv[:, :, i].transpose(1, 2).requires_grad_(grad) for i in range(3)]

    def case(name, batch, tokens, heads, dim, backward, mode, backend):
        def one():
            values = operands(batch, tokens, heads, dim, backward)

            def attend():
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(*values, is_causal=True)
            if not backward:
                return attend
            out = attend()
            return gradient(out, values, torch.randn_like(out))
        megabytes = (16 if backward else 8) * batch * tokens * heads * dim / 1e6
        b.case(name, megabytes, "F.scaled_dot_product_attention(is_causal=True)", lambda _: one, variant=mode)

    total, channels = (128, 128) if b.args.tiny else (16384, 2048)
    shapes = [(f"D={dim} T={tokens}", tokens // 32 if b.args.tiny else tokens, dim)
              for dim in (64, 128) for tokens in (1024, 4096)]
    for mode, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
        for name, backward in (("attention ", False), ("attention backward ", True)):
            for shape, length, dim in shapes:
                case(name + shape, total // length, length, channels // dim, dim, backward, mode, backend)
            case(name + "GPT-2", b.s.rows // b.s.tokens, b.s.tokens, b.s.channels // 64, 64, backward, mode, backend)


def cublas_version():
    """Of the library that PyTorch has loaded."""
    try:
        return str(ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}").cublasLtGetVersion())
    except (OSError, AttributeError):
        return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ms", type=float, default=20)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(1)
    if hasattr(torch._functorch.config, "donated_buffer"):
        torch._functorch.config.donated_buffer = False      # one forward pass serves many backward passes
    bench = Bench(args)
    line("versions", torch=torch.__version__, cuda=torch.version.cuda, cublas=cublas_version(), python=platform.python_version(),
         device=torch.cuda.get_device_name(0) if bench.cuda else "model")
    for text in iter(sys.stdin.readline, ""):
        bench.asked = bench.mode = None
        if text.startswith("case "):
            _, bench.mode, bench.asked = text.strip().split(" ", 2)
        for part in (losses, norms, softmaxes, pointwise, products, attentions, embeddings, casts, gradients, optimizers):
            part(bench)
        line("end")


if __name__ == "__main__":
    sys.exit(main())
