"""measure.py - measures what sim.py is fitted on and checked against: messages, steps of one process, and steps of two.

    python3 tests/sim/measure.py OUT.json [rounds] [steps]

It builds with mpicc into a temporary folder, and uses one thread per process.  Single and double runs alternate.  The
figures are medians of all steps but the first.  The fit uses only messages, sums and single steps.  Single runs are made in
pairs that do not communicate, because two ranks of one machine share its memory and caches in the same way.
"""
import json, os, platform, statistics, subprocess, sys, tempfile, time
from concurrent.futures import ThreadPoolExecutor

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
ENV = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT='1', OMPI_ALLOW_RUN_AS_ROOT_CONFIRM='1')
MPIRUN = ['mpirun', '--oversubscribe', '--bind-to', 'none', '-np', '2']
CONFIGURATIONS = [
    dict(name='4 layers of 128, 8 x 128 tokens', layers=4, heads=4, channels=128, batch=8, seq=128),
    dict(name='4 layers of 256, 2 x 64 tokens', layers=4, heads=4, channels=256, batch=2, seq=64),
    dict(name='6 layers of 384, 1 x 128 tokens', layers=6, heads=6, channels=384, batch=1, seq=128)]

def tensors(c, vocab=256):
    n = c['channels']
    block = [n, n, 3 * n * n, 3 * n, n * n, n, n, n, 4 * n * n, 4 * n, 4 * n * n, n]
    return [vocab * n, c['seq'] * n] + block * c['layers'] + [n, n]

def run(binary, c, text, folder, steps, two, name='out'):
    out = os.path.join(folder, name)
    flags = []
    for k in ('layers', 'heads', 'channels', 'batch', 'seq'): flags += ['--' + k, str(c[k])]
    subprocess.run((MPIRUN if two else []) + [binary, '--data', text, '--threads', '1', '--workers', '0', '--sample', '0', '--precision',
                   'fp32', '--steps', str(steps), '--eval-interval', 'end', '--eval-batches', '1', '--log-interval', '1',
                   '--save', 'none', '--out', out] + flags, env=ENV, check=True, capture_output=True, cwd=folder)
    lines = [json.loads(l) for l in open(os.path.join(out, 'metrics.jsonl'))]
    return [l['seconds'] for l in lines if l.get('event') == 'step'][1:]

def main():
    rounds, steps = int(sys.argv[2]) if len(sys.argv) > 2 else 3, int(sys.argv[3]) if len(sys.argv) > 3 else 30
    with tempfile.TemporaryDirectory() as folder:
        train, ping = os.path.join(folder, 'train'), os.path.join(folder, 'ping')
        subprocess.run(['mpicc', '-O2', os.path.join(ROOT, 'tests/sim/pingpong.c'), '-o', ping], check=True)
        subprocess.run(['mpicc', '-DUSE_MPI', '-O2', os.path.join(ROOT, 'examples/train_gpt.c'), '-o', train, '-lm', '-lpthread'], check=True)
        text = os.path.join(folder, 'text')
        with open(text, 'wb') as f: f.write(open(os.path.join(ROOT, 'amp.h'), 'rb').read()[:400000])
        lines = subprocess.run(MPIRUN + [ping], env=ENV, check=True, capture_output=True, text=True).stdout.split('\n')
        times = {int(l.split()[0]): float(l.split()[1]) for l in lines if l and l[0].isdigit()}
        add = [float(l.split()[1]) for l in lines if l.startswith('add')][0]
        large = sorted(n for n in times if n >= 1 << 16)
        alpha = times[4]
        beta = statistics.median((times[n] - alpha) / n for n in large)
        out = dict(date=time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime()), machine=dict(cpu=cpu(), cores=os.cpu_count(),
                   load=os.getloadavg()[0]), command=f'python3 tests/sim/measure.py OUT.json {rounds} {steps}', messages=times,
                   fit=dict(alpha=alpha, beta=beta, gamma=add), configurations=[])
        for c in CONFIGURATIONS:
            one, two = [], []
            for _ in range(rounds):
                with ThreadPoolExecutor() as pair:
                    for seconds in pair.map(lambda name: run(train, c, text, folder, steps, False, name), ('left', 'right')): one += seconds
                two += run(train, c, text, folder, steps, True)
            out['configurations'].append(dict(name=c['name'], tensors=tensors(c) + [1, 1, 1], bucket=25 << 20, overlap=False,
                single_rank_seconds=statistics.median(one), two_ranks_seconds=statistics.median(two), steps=len(one)))
        out['machine']['load_after'] = os.getloadavg()[0]
        json.dump(out, open(sys.argv[1], 'w'), indent=1)

def cpu():
    for l in open('/proc/cpuinfo'):
        if l.startswith('model name'): return ' '.join(l.split(':')[1].split()[:2])
    return platform.processor()

main()
