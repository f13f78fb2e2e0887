#!/bin/sh
# instructions.sh [COMMIT] - counts the instructions of one training step of train_gpt with callgrind.  Callgrind runs the
# AVX2 path.  The count is the difference between a run of 6 steps and a run of 2 steps, divided by 4.  With COMMIT, the
# same is counted at that commit, and the ratio is printed.  The counts repeat to within a few in a million, even on a busy
# machine.
set -u
cc=${CC:-gcc} here=$(pwd)
command -v valgrind >/dev/null 2>&1 || { echo "instructions.sh needs valgrind" >&2; exit 1; }
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
head -c 200000 README.md amp.h | grep -v '^==>' > "$work/text"

# build FOLDER NAME
build() { (cd "$1" && $cc -std=c99 -O2 -w -DAMP_IMPLEMENTATION -I. examples/train_gpt.c -o "$work/$2" -lm -lpthread); }

# count PROGRAM PRECISION STEPS: instructions of the whole run
count() {
    compare=$("$work/$1" --help | sed -n 's/^ *\(--compare\) .*/\1 0/p')       # which older ones have
    valgrind --tool=callgrind --callgrind-out-file=/dev/null "$work/$1" --layers 2 --heads 2 --channels 64 --batch 4 --seq 64 --threads 1 \
        --workers 0 $compare --sample 0 --eval-batches 1 --log-interval 1 --data "$work/text" --out "$work/$1.out" \
        --precision "$2" --steps "$3" 2>&1 >/dev/null | sed -n 's/.*Collected : *//p'
}
per_step() { echo "$(count "$1" "$2" 2) $(count "$1" "$2" 6)" | awk 'NF == 2 {printf "%d\n", ($2 - $1) / 4}'; }

build "$here" now || exit 1
if [ $# -gt 0 ]; then
    mkdir "$work/tree"
    git archive "$1" | tar -x -C "$work/tree" && build "$work/tree" base || exit 1
fi
for precision in fp32 bf16 fp16; do
    now=$(per_step now $precision) base=
    [ -n "$now" ] || { echo "train_gpt does not run under callgrind" >&2; exit 1; }
    [ $# -eq 0 ] || base=$(per_step base $precision)
    echo "$precision $now ${base:-0}" | awk -v commit="${1:-}" '{printf "{\"precision\": \"%s\", \"instructions_per_step\": %d", $1, $2
        if ($3) printf ", \"at_%s\": %d, \"ratio\": %.4f", commit, $3, $2 / $3; print "}"}'
done

