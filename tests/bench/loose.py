"""loose.py - compares loose coupling with synchronous training on two ranks: losses, and bytes on the wire.

    python3 tests/bench/loose.py FOLDER OUT.json [steps]

Both have the same batches and steps.  It trains examples/train_gpt.c (842k parameters) with MPI, one thread per rank, on
one text, once synchronously and then with --sync-every 50 and several outer steps.  A run whose log is already in FOLDER is
read and not repeated.
"""
import json, os, re, subprocess, sys, time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
RUNS = [('synchronous', []), ('h50-0.7-0.9', ['0.7', '0.9']), ('h50-0.9-0.5', ['0.9', '0.5']), ('h50-0.7-0.5', ['0.7', '0.5'])]

def train(folder, name, outer, steps):
    log, out = os.path.join(folder, name + '.log'), os.path.join(folder, name)
    if not os.path.exists(log):
        binary = os.path.join(folder, 'train_gpt_mpi')
        if not os.path.exists(binary):
            subprocess.run(['mpicc', '-DUSE_MPI', '-O2', 'examples/train_gpt.c', 'tests/bench/mpi_bytes.c', '-o', binary, '-lm',
                            '-lpthread'], cwd=ROOT, check=True)
        flags = ['--sync-every', '50', '--outer-lr', outer[0], '--outer-momentum', outer[1]] if outer else []
        with open(log, 'w') as f:
            subprocess.run(['mpirun', '--oversubscribe', '--bind-to', 'none', '-np', '2', binary, '--threads', '1', '--sample', '0',
                            '--out', out, '--data', 'text.txt', '--precision', 'fp32', '--steps', str(steps), '--seed', '1',
                            '--save', 'none'] + flags, cwd=folder, stdout=f, stderr=subprocess.STDOUT, check=True,
                           env=dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT='1', OMPI_ALLOW_RUN_AS_ROOT_CONFIRM='1'))
    lines = [json.loads(l) for l in open(os.path.join(out, 'metrics.jsonl'))]
    losses = [l['loss'] for l in lines if l.get('event') == 'step'][-20:]
    sent = re.findall(r'rank 0: (\d+) collectives, (\d+) bytes', open(log).read())
    return dict(name=name, outer_lr=float(outer[0]) if outer else None, outer_momentum=float(outer[1]) if outer else None,
                validation={str(l['step']): l['loss'] for l in lines if l.get('event') == 'validation'},
                training_loss_last_200=sum(losses) / len(losses), collectives=sum(int(a) for a, _ in sent),
                bytes_of_a_rank=sum(int(b) for _, b in sent))

def main():
    folder, steps = os.path.abspath(sys.argv[1]), int(sys.argv[3]) if len(sys.argv) > 3 else 3600
    os.makedirs(folder, exist_ok=True)
    text = os.path.join(folder, 'text.txt')
    if not os.path.exists(text):
        with open(text, 'wb') as f: f.write(open(os.path.join(ROOT, 'amp.h'), 'rb').read()[:1700000])
    rows = [train(folder, name, outer, steps) for name, outer in RUNS]
    first = rows[0]
    for r in rows:
        r['validation_over_synchronous'] = r['validation'][str(steps)] / first['validation'][str(steps)]
        r['bytes_over_synchronous'] = r['bytes_of_a_rank'] / first['bytes_of_a_rank']
    cpu = next(l.split(':')[1].split()[:2] for l in open('/proc/cpuinfo') if l.startswith('model name'))
    json.dump(dict(date=time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime()), machine=dict(cpu=' '.join(cpu), cores=os.cpu_count()),
                   command=f'python3 tests/bench/loose.py FOLDER OUT.json {steps}', text_bytes=os.path.getsize(text), steps=steps,
                   runs=rows), open(sys.argv[2], 'w'), indent=1)

main()
