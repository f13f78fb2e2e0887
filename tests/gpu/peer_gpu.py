"""The cases of bench_gpu.cu in PyTorch, eager and by torch.compile, under the same names.

    python tests/gpu/peer_gpu.py [--device cuda] [--rounds 9] [--ms 20] [--seconds 180] [--compile all] [--tiny]

Prints JSON lines: first the versions, then per case and mode the median time.  Launches go round several sets of operands,
as in bench_gpu.cu.  --compile: "all", "none" or a text that cases' names hold; what --seconds leave no time for is printed
as skipped.  run.py calls it.
"""
import argparse
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


class Skip(Exception):
    """Why something was not measured."""


class Bench:
    def __init__(self, args):
        self.args, self.device, self.end = args, args.device, time.time() + args.seconds
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

    def measure(self, calls):
        sets = len(calls)
        self.milliseconds(calls, 2 * sets)                  # compiles, allocates
        first = self.milliseconds(calls, sets)
        count = 1 if self.args.tiny else max(sets, min(2000, int(self.args.ms / max(first, 1e-3)) + 1))
        rounds = sorted(self.milliseconds(calls, count) for _ in range(self.args.rounds))
        return {"ms": statistics.median(rounds), "best_ms": rounds[0], "worst_ms": rounds[-1], "sets": sets}

    def case(self, name, megabytes, text, make, compiled=True):
        """make(compile): a function that makes one set of operands and returns what a launch calls.  compile turns a
        Python function into the one to call: by torch.compile, or as it is."""
        if self.args.only not in name:
            return
        wish = self.args.compile
        for mode in ("eager", "compile"):
            try:
                if mode == "compile" and compiled is False:
                    raise Skip("one kernel as it is")
                if mode == "compile" and wish != "all" and wish not in name:
                    raise Skip("not asked for")
                if mode == "compile" and time.time() > self.end:
                    raise Skip("no time left")
                if mode == "compile":
                    torch._dynamo.reset()
                one = make(torch.compile if mode == "compile" else lambda function: function)
                calls = [one() for _ in range(self.sets(megabytes))]
                line("peer", case=name, mode=mode, call=text, **self.measure(calls))
                del calls, one
            except Exception as error:                      # whatever a version of PyTorch lacks is left out
                why = str(error).strip().splitlines() or [type(error).__name__]
                line("peer", case=name, mode=mode, call=text, skipped=why[0][:200])
            if self.cuda:
                torch.cuda.empty_cache()


def gradient(outputs, inputs, seeds):
    """A call that computes the gradients again and again from what one forward pass kept."""
    return lambda: torch.autograd.grad(outputs, inputs, seeds, retain_graph=True)


def casts(b):
    n = b.s.rows * b.s.channels

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
    case("unscale fp32", "_amp_foreach_non_finite_check_and_unscale_", FP32, 8, unscale)
    case("unscale bf16", "_amp_foreach_non_finite_check_and_unscale_", BF16, 4, unscale)
    case("norm fp32", "stack(_foreach_norm(g)).norm()", FP32, 4, norm)
    case("norm bf16", "stack(_foreach_norm(g)).norm()", BF16, 2, norm)
    case("clip fp32", "_foreach_mul_", FP32, 8, clip)


def optimizers(b):
    sizes = parameter_sizes(b.s)

    def case(name, text, bytes_each, optimizer, copy):
        def one():
            params = [torch.nn.Parameter(b.random(n, dtype=FP32)) for n in sizes]
            for p in params:
                p.grad = b.random(p.numel(), dtype=FP32)
            low, opt = [p.detach().to(BF16) for p in params], optimizer(params)

            def call():
                opt.step()
                if copy:
                    torch._foreach_copy_(low, [p.detach() for p in params])
            return call
        b.case(name, bytes_each * sum(sizes) / 1e6, text, lambda _: one, compiled=False)

    def adamw(params):
        return torch.optim.AdamW(params, lr=1e-4, fused=True)

    def sgd(params):
        return torch.optim.SGD(params, lr=1e-4, momentum=0.9, fused=True)
    case("AdamW fp32", "AdamW(fused=True)", 28, adamw, False)
    case("AdamW bf16, fp32 masters", "AdamW(fused=True), _foreach_copy_ to bf16", 28, adamw, True)
    case("SGD fp32, momentum", "SGD(fused=True)", 20, sgd, False)


def norms(b):
    rows, cols = b.s.rows, b.s.channels
    size = rows * cols / 1e6

    def layer(x, w, c):
        return F.layer_norm(x, (cols,), w, c)

    def rms(x, w, _):
        return F.rms_norm(x, (cols,), w, 1e-5)

    def forward(function):
        def make(compiler):
            function_ = compiler(function)

            def one():
                x, w, c = b.random(rows, cols), b.random(cols), b.random(cols)
                return lambda: function_(x, w, c)
            return one
        return make

    def backward(function):
        def make(compiler):
            function_ = compiler(function)

            def one():
                x, w, c = (b.random(*shape, grad=True) for shape in ((rows, cols), (cols,), (cols,)))
                wanted = (x, w) if function is rms else (x, w, c)
                return gradient(function_(x, w, c), wanted, b.random(rows, cols))
            return one
        return make
    b.case("layernorm", 4 * size, "F.layer_norm", forward(layer))
    b.case("rmsnorm", 4 * size, "F.rms_norm", forward(rms))
    b.case("layernorm backward", 6 * size, "autograd.grad of F.layer_norm", backward(layer))
    b.case("rmsnorm backward", 6 * size, "autograd.grad of F.rms_norm", backward(rms))


def residual_norms(b):
    rows, cols = b.s.rows, b.s.channels
    size = rows * cols / 1e6

    def both(x, r, w, c):
        total = x + r
        return total, F.layer_norm(total, (cols,), w, c)

    def operands(grad):
        shapes = ((rows, cols), (rows, cols), (cols,), (cols,))
        return [b.random(*shape, grad=grad) for shape in shapes]

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
            return gradient(function(x, r, w, c), (x, w, c), (b.random(rows, cols), b.random(rows, cols)))
        return one
    b.case("residual + layernorm", 8 * size, "x + r, F.layer_norm", forward)
    b.case("residual + layernorm backward", 8 * size, "autograd.grad of F.layer_norm(x + r)", backward)


def softmaxes(b):
    heads, tokens = b.s.heads, b.s.tokens
    size = heads * tokens * tokens / 1e6
    hidden = torch.ones(tokens, tokens, dtype=torch.bool, device=b.device).triu(1)

    def plain(x):
        return torch.softmax(x * 0.125, -1)

    def causal(x):
        return torch.softmax((x * 0.125).masked_fill(hidden, -math.inf), -1)

    def forward(function, as_is):
        def make(compiler):
            function_ = compiler(function) if compiler is torch.compile else as_is

            def one():
                x = b.random(heads, tokens, tokens)
                return lambda: function_(x)
            return one
        return make

    def backward(compiler):
        function = compiler(lambda dy, y: aten._softmax_backward_data(dy, y, -1, BF16))

        def one():
            dy, y = b.random(heads, tokens, tokens), b.random(heads, tokens, tokens)
            return lambda: function(dy, y)
        return one
    b.case("softmax", 4 * size, "torch.softmax", forward(plain, lambda x: torch.softmax(x, -1)))
    b.case("softmax, causal", 3 * size, "softmax(masked_fill)",
           forward(causal, lambda x: torch.softmax(x.masked_fill(hidden, -math.inf), -1)))
    b.case("softmax backward", 6 * size, "_softmax_backward_data", backward)
    b.case("softmax backward, causal", 4 * size, "_softmax_backward_data", backward)


def pointwise(b):
    def operator(name, text, function, operands, bytes_each, shape):
        def make(compiler):
            function_ = compiler(function)

            def one():
                values = [b.random(*shape) for _ in range(operands)]
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
    operator("GELU", "F.gelu(tanh)", lambda x: F.gelu(x, approximate="tanh"), 1, 4, wide)
    def biased_gelu(compiler):
        function = compiler(lambda x, bias: F.gelu(x + bias, approximate="tanh"))

        def one():
            x, bias = b.random(*wide), b.random(b.s.hidden)
            return lambda: function(x, bias)
        return one
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
    b.case("embedding", 4 * narrow, "F.embedding + positions", embedding)
    text = "aten.embedding_dense_backward"
    b.case("embedding backward", 2 * narrow, text, embedding_backward(b.s.classes), compiled=False)
    b.case("embedding backward, one id", 2 * narrow, text, embedding_backward(1), compiled=False)


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
            case(name, "F.linear", dtype, m, n, k, F.linear, ((m, k), (n, k), (n,)))
        else:
            case(name, "F.linear", dtype, m, n, k, F.linear, ((m, k), (n, k)))

    def gelu(x, w, bias):
        pre = F.linear(x, w, bias)
        return pre, F.gelu(pre, approximate="tanh")

    for name, dtype in (("bf16", BF16), ("fp16", FP16), ("tf32", FP32), ("fp32", FP32)):
        few, p = rows // 4 if name == "fp32" else rows, f"product {name}, "
        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        linear(p + "linear", dtype, few, h, c)
        case(p + "NN", "x @ w", dtype, few, c, h, torch.matmul, ((few, h), (h, c)))
        case(p + "TN", "x.t() @ y", dtype, h, c, few, lambda x, y: x.t() @ y, ((few, h), (few, c)))
        case(p + "linear GELU", "F.gelu(F.linear)", dtype, few, h, c, gelu, ((few, c), (h, c), (h,)))
    torch.backends.cuda.matmul.allow_tf32 = False
    p = "product bf16, "
    linear(p + "qkv", BF16, rows, 3 * c, c)
    case(p + "projection", "torch.addmm", BF16, rows, c, c, lambda x, w, bias: torch.addmm(bias, x, w.t()),
         ((rows, c), (c, c), (c,)))
    linear(p + "MLP projection", BF16, rows, c, h)
    linear(p + "classifier", BF16, s.logit_rows, s.vocabulary, c, False)
    case(p + "GELU backward", "gelu_backward(dy @ w, x)", BF16, rows, h, c,
         lambda dy, w, x: aten.gelu_backward(dy @ w, x, approximate="tanh"), ((rows, c), (c, h), (rows, h)))
    case(p + "weight gradient", "dy.t() @ x, dy.sum(0)", BF16, h, c, rows, lambda dy, x: (dy.t() @ x, dy.sum(0)),
         ((rows, h), (rows, c)))
    case(p + "square", "x @ w", BF16, square, square, square, torch.matmul, ((square, square), (square, square)))
    linear(p + "few rows", BF16, s.tokens, h, c)
    linear(p + "odd sizes", BF16, 2 * s.tokens + 1, h + 3, c + 1, False)


def attentions(b):
    """Shapes and names as in bench_gpu.cu.  The modes are the backends of scaled_dot_product_attention, one at a time."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def operands(batch, tokens, heads, dim, grad):
        qkv = b.random(batch, tokens, 3, heads, dim)
        return [qkv[:, :, i].transpose(1, 2).requires_grad_(grad) for i in range(3)]

    def case(name, batch, tokens, heads, dim, backward):
        if b.args.only not in name:
            return
        text = "F.scaled_dot_product_attention(is_causal=True)"
        for mode, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
            def one():
                values = operands(batch, tokens, heads, dim, backward)
                if not backward:
                    return lambda: F.scaled_dot_product_attention(*values, is_causal=True)
                out = F.scaled_dot_product_attention(*values, is_causal=True)
                return gradient(out, values, torch.randn_like(out))
            try:
                with sdpa_kernel(backend):
                    calls = [one() for _ in range(b.sets((16 if backward else 8) * batch * tokens * heads * dim / 1e6))]
                    line("peer", case=name, mode=mode, call=text, **b.measure(calls))
                    del calls
            except Exception as error:                      # a backend that this PyTorch or this device lacks
                line("peer", case=name, mode=mode, call=text, skipped=str(error).strip().splitlines()[0][:200])
            if b.cuda:
                torch.cuda.empty_cache()

    total, channels = (128, 128) if b.args.tiny else (16384, 2048)
    for backward in (False, True):
        name = "attention backward " if backward else "attention "
        for dim in (64, 128):
            for tokens in (1024, 4096):
                length = tokens // 32 if b.args.tiny else tokens
                case(f"{name}D={dim} T={tokens}", total // length, length, channels // dim, dim, backward)
        case(name + "GPT-2", b.s.rows // b.s.tokens, b.s.tokens, b.s.channels // 64, 64, backward)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ms", type=float, default=20)
    parser.add_argument("--seconds", type=float, default=180, help="after which nothing more is compiled")
    parser.add_argument("--compile", default="all")
    parser.add_argument("--only", default="")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(1)
    torch._functorch.config.donated_buffer = False      # one forward pass serves many backward passes
    bench = Bench(args)
    line("versions", torch=torch.__version__, cuda=torch.version.cuda, python=platform.python_version(),
         device=torch.cuda.get_device_name(0) if bench.cuda else "model")
    for part in (casts, gradients, optimizers, norms, residual_norms, softmaxes, pointwise, losses, embeddings,
                 products, attentions):
        part(bench)


if __name__ == "__main__":
    sys.exit(main())
