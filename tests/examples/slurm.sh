#!/bin/sh
# slurm.sh - runs examples/slurm/train.sbatch under a real slurmctld and slurmd on this machine.  The job is submitted,
# preempted by a signal and by the cluster, requeued, and run to its end.  It must end with the loss and the weights of an
# undisturbed run.  The script needs root, because it runs a cluster in its own folder.  With INSTALL=1 it installs Debian's
# packages slurm-wlm and munge.
. tests/lib.sh
give_up() { skip "train.sbatch" "$1"; closing; exit; }
[ "$(id -u)" -eq 0 ] || give_up "only root can start a slurmd"
if ! have slurmctld || ! have slurmd || ! have munged; then
    [ "${INSTALL:-0}" = 1 ] && have apt-get && apt-get install -y --no-install-recommends slurm-wlm munge > "$work/apt.log" 2>&1
    have slurmctld && have slurmd && have munged || give_up "no slurmctld, slurmd and munged; apt-get install slurm-wlm munge"
fi

# A cluster in $work: its own key, ports and state.
host=$(hostname -s)
base=$((31000 + $$ % 2000 * 2))
mkdir -p "$work/state" "$work/spool" "$work/munge"
chmod 755 "$work"; chmod 700 "$work/munge"
head -c 1024 /dev/urandom > "$work/munge/key"; chmod 400 "$work/munge/key"
export SLURM_CONF="$work/slurm.conf"
cat > "$SLURM_CONF" << end
ClusterName=amp
SlurmctldHost=$host
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$work/munge/socket,cred_expire=5
SlurmctldPort=$base
SlurmdPort=$((base + 1))
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SchedulerType=sched/backfill
SchedulerParameters=requeue_delay=1,batch_sched_delay=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
KillWait=20
MpiDefault=none
SlurmdParameters=config_overrides
NodeName=$host NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=low Nodes=$host Default=YES PriorityTier=1 State=UP
PartitionName=high Nodes=$host PriorityTier=10 State=UP
end
# shellcheck disable=SC2317
stop() {
    for daemon in slurmd slurmctld munge/munged; do
        [ -s "$work/$daemon.pid" ] && kill "$(cat "$work/$daemon.pid")" 2>/dev/null
    done
    sleep 1
    rm -rf "$work"
}
trap stop EXIT
munged --force --key-file="$work/munge/key" --socket="$work/munge/socket" --pid-file="$work/munge/munged.pid" \
    --log-file="$work/munge/log" --seed-file="$work/munge/seed" > "$work/munge.out" 2>&1 ||
    give_up "munged: $(tail -n 1 "$work/munge.out")"
slurmctld > "$work/ctld.out" 2>&1 || give_up "slurmctld: $(tail -n 1 "$work/ctld.out")"
slurmd > "$work/d.out" 2>&1 || give_up "slurmd: $(tail -n 1 "$work/d.out")"
for second in $(seq 30); do
    sinfo -h -o %t -p low 2>/dev/null | grep -q idle && break
    sleep 1
done
sinfo -h -o %t -p low | grep -q idle || give_up "the node does not become idle: $(tail -n 2 "$work/slurmd.log" "$work/slurmctld.log")"

# wait_for SECONDS COMMAND...: until it succeeds.
wait_for() {
    left=$(($1 * 5)); shift
    until "$@" > /dev/null 2>&1; do
        left=$((left - 1))
        [ $left -gt 0 ] || return 1
        sleep 0.2
    done
}
steps() { [ "$(grep -c '"event": "step"' "$work/$1/metrics.jsonl" 2>/dev/null)" -ge "$2" ]; }
ended() { ! squeue -h -j "$1" 2>/dev/null | grep -q .; }
show() { tail -n 5 "$work/$1.out" "$work/slurmctld.log"; }

cat README.md amp.h | head -c 60000 > "$work/text"
gpt=${GPT:-$PWD/build/train_gpt}
flags="--data $work/text --layers 2 --heads 2 --channels 32 --seq 32 --threads 1 --sample 0 --eval-interval 100000
    --eval-batches 4 --log-interval 1 --steps ${STEPS:-1500} --save-interval 50"

# submit NAME [OPTIONS OF SBATCH...]: the job's number.
submit() {
    name=$1; shift
    OUT="$work/$name" PROGRAM="$gpt" PRECISION=fp32 BATCH=2 sbatch --parsable --ntasks 4 --output "$work/$name.out" \
        --chdir "$work" "$@" "$PWD/examples/slurm/train.sbatch" $flags
}
loss() { sed -n 's/^  validation  \([0-9.]*\) nats.*/\1/p' "$work/$1.out"; }

job=$(submit whole) || give_up "sbatch: $job"
if wait_for 200 ended "$job" && [ -n "$(loss whole)" ]; then pass; else fail "a job trains to its end" "$(show whole)"; closing; exit; fi

# undisturbed NAME STARTS: the job's loss and checkpoint are those of the one that nobody disturbed.
undisturbed() {
    if [ "$(loss "$1")" = "$(loss whole)" ] && cmp -s "$work/$1/model.state" "$work/whole/model.state" &&
            [ "$(grep -c '^job .*: code 75$' "$work/$1.out")" -eq "$2" ] && grep -q "start $2: code 0" "$work/$1.out"; then pass
    else fail "$1: the same end" "$(loss "$1"), not $(loss whole); $(grep 'code' "$work/$1.out"; show "$1")"; fi
}

# As before its time is up: a signal to the ranks; they save, and the script queues the job again.
job=$(submit signalled)
if wait_for 100 steps signalled 20 && scancel --signal=USR1 "$job"; then pass; else fail "a signal to the ranks" "$(show signalled)"; fi
if wait_for 200 ended "$job"; then pass; else fail "the requeued job ends" "$(show signalled)"; fi
undisturbed signalled 1

# Preempted: another job takes the machine, and the cluster itself queues this one again.
job=$(submit preempted --partition low)
wait_for 100 steps preempted 20 || fail "the job starts" "$(show preempted)"
other=$(sbatch --parsable --partition high --ntasks 4 --output "$work/other.out" --wrap "sleep 2")
if wait_for 100 ended "$other" && wait_for 200 ended "$job"; then pass; else fail "the preempted job ends" "$(squeue; show preempted)"; fi
undisturbed preempted 1

# A rank that is killed ends the job with an error, not with a hang, and it is not queued again.
job=$(submit killed)
wait_for 100 steps killed 20
victim=$(pgrep -f "^$gpt --out $work/killed" | tail -n 1)
kill -9 "$victim"
if wait_for 90 ended "$job" && grep -q "AMP0503.*rank [0-9] is gone" "$work/killed.out" &&
        ! grep -q "^job .*: code \(0\|75\)$" "$work/killed.out"; then pass
else fail "a killed rank ends the job" "$(show killed)"; fi
closing
