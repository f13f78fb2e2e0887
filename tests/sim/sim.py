"""sim.py - simulates one data-parallel training step by discrete events, to predict numbers of ranks that were not
measured.

    python3 tests/sim/sim.py check FILE.json     predictions beside measured steps of two processes (measure.py wrote it)
    python3 tests/sim/sim.py table               tests/sim/table.md: weak and strong scaling, and loose coupling

Every figure that it prints is simulated.  It needs only Python's standard library.

There are three kinds of events: a rank's forward ends, the backward of one of its layers ends (last layer first), and a
bucket is reduced.  A rank's gradients are in buckets in the order in which backward finishes them.  A bucket's reduction
begins when all ranks have it and the link is free.  Therefore the slowest rank delays all ranks.  The link model says how
long a reduction takes.  Without overlap, all reductions wait for the end of backward.  The optimizer runs when the last one
has ended.
"""
import glob, heapq, json, math, os, random, sys

# ---- Links: seconds that the sum of n bytes over all ranks takes

def flat(alpha, beta, gamma, ranks):
    """One switch.  Small messages: a tree of exchanges; large ones: a ring.  alpha: seconds a message, beta: seconds a byte
    on the way, gamma: seconds a byte to add."""
    def reduce(n):
        if ranks == 1: return 0.0
        rounds = math.ceil(math.log2(ranks))
        tree = rounds * (alpha + n * (beta + gamma))
        part = n / ranks
        ring = 2 * (ranks - 1) * alpha + (ranks - 1) * part * (2 * beta + gamma)
        return min(tree, ring)
    return reduce

def nodes(inner, outer, per_node, ranks, latency):
    """Machines of per_node devices: reduce-scatter inside, sum over machines of each device's part on its own adapter,
    all-gather inside.  inner, outer: bytes per second of one device; latency: seconds (inside, outside)."""
    machines = max(1, ranks // per_node)
    local = min(ranks, per_node)
    def reduce(n):
        if ranks == 1: return 0.0
        seconds = 2 * (local - 1) * (latency[0] + n / local / inner)
        if machines > 1:
            part = n / local
            ring = 2 * (machines - 1) * (latency[1] + part / machines / outer)
            tree = 2 * math.ceil(math.log2(machines)) * latency[1] + 2 * part / outer
            seconds += min(ring, tree)
        return seconds
    return reduce

# ---- One step

def buckets_of(sizes, limit):
    """sizes: bytes of each layer's gradients in the order of backward.  Returns (bytes, index of the last layer in it)."""
    out, held = [], 0
    for i, n in enumerate(sizes):
        held += n
        if held >= limit or i + 1 == len(sizes):
            out.append((held, i))
            held = 0
    return out

def step(ranks, forward, backward, sizes, bucket, reduce, optimizer, overlap=True, spread=0.0, rng=None):
    """Seconds of one step, and of communication that backward did not hide.  backward: seconds of each layer, last layer
    first; spread: standard deviation of a rank's speed in this step, relative."""
    rng = rng or random.Random(0)
    slow = [max(0.5, 1 + spread * abs(rng.gauss(0, 1))) if spread else 1.0 for _ in range(ranks)]
    parts = buckets_of(sizes, bucket)
    missing = [ranks] * len(parts)
    last_layer = {layer: b for b, (_, layer) in enumerate(parts)}
    events, number = [], 0
    def at(when, *what):
        nonlocal number
        number += 1
        heapq.heappush(events, (when, number) + what)
    for r in range(ranks): at(forward * slow[r], 'layer', r, 0)
    ready, free, next_part, computed, ended = {}, True, 0, 0.0, 0.0
    def start(now):
        nonlocal free, next_part
        if free and next_part < len(parts) and next_part in ready and (overlap or done == ranks):
            free = False
            at(now + reduce(parts[next_part][0]), 'reduced', next_part, 0)
            next_part += 1
    done = 0
    while events:
        now, _, kind, which, layer = heapq.heappop(events)
        if kind == 'reduced':
            free, ended = True, now
            start(now)
            continue
        if layer > 0 and layer - 1 in last_layer:
            b = last_layer[layer - 1]
            missing[b] -= 1
            if missing[b] == 0: ready[b] = now
        if layer < len(backward): at(now + backward[layer] * slow[which], 'layer', which, layer + 1)
        else:
            done += 1
            computed = now
        start(now)
    end = max(computed, ended) + optimizer
    return end, end - optimizer - computed

# ---- Tables.  What is assumed of machines that were not measured

H200 = dict(device='H200', per_node=8, nvlink=450e9 * 0.8, infiniband=50e9 * 0.9, latency=(3e-6, 8e-6), spread=0.01)
# GPT-2 124M, B = 64, T = 1024, bf16: 118 ms (estimated from bytes and FLOPs, no H200 has run it), AdamW 1.05 of them;
# a forward is a third of what is left; 12 blocks and the tied embedding, whose gradient backward finishes last.
# GPT-2 1.56B: 6 * 1.56e9 FLOP a token at 400 TFLOP/s (40% of 989), 16,384 tokens a device.
MODELS = {'GPT-2 124M': dict(parameters=124.4e6, blocks=12, block=7.09e6, step=0.118, optimizer=0.00105, tokens=65536, sequences=64),
          'GPT-2 1.56B': dict(parameters=1557e6, blocks=48, block=30.7e6, step=6 * 1.557e9 * 16384 / 400e12,
                              optimizer=0.0131, tokens=16384, sequences=16)}

def layers(m, bytes_each):
    head = m['parameters'] - m['blocks'] * m['block']
    return [m['block'] * bytes_each] * m['blocks'] + [head * bytes_each]

def simulated(m, ranks, share, overlap, wire=4, steps=5, bucket=25e6):
    """share: of the micro-batch that a device has, 1 for weak scaling."""
    compute = (m['step'] - m['optimizer']) * max(share, 1e-9)
    sizes = layers(m, wire)
    back = compute * 2 / 3 / m['blocks']
    reduce = nodes(H200['nvlink'], H200['infiniband'], H200['per_node'], ranks, H200['latency'])
    rng = random.Random(ranks)
    total = hidden = 0.0
    for _ in range(steps):
        t, shown = step(ranks, compute / 3, [back] * m['blocks'] + [0.0], sizes, bucket, reduce, m['optimizer'], overlap,
                        H200['spread'], rng)
        total += t / steps
        hidden += shown / steps
    return total, hidden

def diloco(parameters, step_seconds, every, ranks, bits_per_second, wire):
    """Seconds of a step on average, and the same with a sum of gradients in every step."""
    reduce = flat(1e-3, 8 / bits_per_second, 1 / 4e9, ranks)
    return step_seconds + reduce(parameters * wire) / every, step_seconds + reduce(parameters * 4)

def table(out):
    say = lambda s='': out.write(s + '\n')
    say('# Simulated scaling\n')
    say('Every figure below is **simulated** by `python3 tests/sim/sim.py table`; no such machine was measured.  The model'
        f' predicts steps of two processes on one machine, which it was not fitted on, within {largest_error(newest()) * 100:.1f}%'
        f' (`sim.py check {os.path.relpath(newest(), ROOT)}`; bar {BAR * 100:.0f}%).  Assumed:')
    say(f'- H200 nodes of 8; NVLink {H200["nvlink"] / 1e9:.0f} GB/s and InfiniBand {H200["infiniband"] / 1e9:.0f} GB/s for each'
        f' device and direction (80% and 90% of 450 and 50); {H200["latency"][0] * 1e6:.0f} and {H200["latency"][1] * 1e6:.0f}'
        ' microseconds a message; ranks that are slower in a step by the magnitude of a normal number times 1%.')
    for name, m in MODELS.items():
        say(f'- {name}: {m["step"] * 1e3:.0f} ms a step of {m["tokens"]:,} tokens on one device, an estimate;'
            f' {m["blocks"]} blocks; gradients in fp32, buckets of 25 MB.')
    say('- One third of the compute is forward, and compute is proportional to tokens, also where few of them would leave a'
        ' device idle: strong scaling beyond 64 ranks is a bound.  Efficiency: of the tokens per second and device of one device.\n')
    worlds = [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
    for name, m in MODELS.items():
        say(f'## {name}, weak scaling: {m["tokens"]:,} tokens a device\n')
        say('| ranks | step, ms | efficiency | not hidden, ms | without overlap: step, ms | efficiency |')
        say('|---|---|---|---|---|---|')
        for n in worlds:
            (a, shown), (b, _) = simulated(m, n, 1, True), simulated(m, n, 1, False)
            say(f'| {n:,} | {a * 1e3:.1f} | {m["step"] / a * 100:.0f}% | {shown * 1e3:.1f} | {b * 1e3:.1f} | {m["step"] / b * 100:.0f}% |')
        say()
        say(f'## {name}, strong scaling: {m["tokens"] * 64:,} tokens a step in all\n')
        say('| ranks | micro-batches of a rank | step, ms | speedup over 8 ranks | efficiency |')
        say('|---|---|---|---|---|')
        first = None
        for n in worlds:
            micro = 64 / n
            if micro * m['sequences'] < 1: break        # a rank needs a sequence
            whole = max(1, int(micro))
            if micro >= 1:              # the last micro-batch's backward hides the reduction
                t, _ = simulated(m, n, 1, True)
                t += (whole - 1) * (m['step'] - m['optimizer'])
            else:
                t, _ = simulated(m, n, micro, True)
            first = first or t
            say(f'| {n:,} | {micro if micro < 1 else whole:g} | {t * 1e3:.1f} | {first / t:.1f} | {first / t * 8 / n * 100:.0f}% |')
        say()
    say('## Loose coupling: 100 machines of one H200 each on 1 Gbit/s, 1 ms a message\n')
    say('| model | H | wire | step on average, ms | efficiency | with gradients in every step, ms | efficiency |')
    say('|---|---|---|---|---|---|---|')
    for name, m in MODELS.items():
        for every in (50, 500):
            for wire, word in ((4, 'fp32'), (2, 'bf16')):
                a, b = diloco(m['parameters'], m['step'], every, 100, 1e9, wire)
                say(f'| {name} | {every} | {word} | {a * 1e3:,.0f} | {m["step"] / a * 100:.0f}% | {b * 1e3:,.0f} | {m["step"] / b * 100:.1f}% |')

# ---- The model beside measured steps

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BAR = 0.15

def newest():
    return max(glob.glob(os.path.join(ROOT, 'tests/bench/results/sim-*.json')), key=lambda f: json.load(open(f))['date'])

def compared(path):
    """(name, measured, simulated seconds) of each configuration in what measure.py wrote."""
    data = json.load(open(path))
    reduce = flat(data['fit']['alpha'], data['fit']['beta'], data['fit']['gamma'], 2)
    for c in data['configurations']:
        sizes = [4 * n for n in reversed(c['tensors'])]
        # as amp_step sums where messages come from the caller's thread alone: buckets, after backward
        t, _ = step(2, c['single_rank_seconds'], [0.0] * len(sizes), sizes, c['bucket'], reduce, 0.0, c['overlap'])
        yield c['name'], c['two_ranks_seconds'], t

def largest_error(path):
    return max(abs(t / measured - 1) for _, measured, t in compared(path))

def check(path):
    print('| step of two processes | measured, ms | simulated, ms | error |\n|---|---|---|---|')
    for name, measured, t in compared(path):
        print(f'| {name} | {measured * 1e3:.2f} | {t * 1e3:.2f} | {(t / measured - 1) * 100:+.1f}% |')
    print(f'largest error {largest_error(path) * 100:.1f}%, bar {BAR * 100:.0f}%')
    return 0 if largest_error(path) <= BAR else 1

if __name__ == '__main__':
    if sys.argv[1:2] == ['table']:
        with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), 'table.md'), 'w') as f: table(f)
    elif len(sys.argv) == 3 and sys.argv[1] == 'check': sys.exit(check(sys.argv[2]))
    else: sys.exit(__doc__)
