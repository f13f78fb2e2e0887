#!/bin/sh
# sweep.sh - checks that the hyperparameter search records and ranks its trials, resumes where it stopped, and survives
# failing trials.
. tests/lib.sh
sweep="$PWD/build/sweep"
small="--layers 1 --heads 2 --channels 32 --seq 32 --steps 24 --eval-batches 4"

# search NAME FLAGS...: into a file of its own.
search() { name=$1; shift; "$sweep" $small --out "$work/$name.jsonl" "$@" > "$work/$name.log" 2>&1; }
records() { grep -c '"event": "trial"' "$work/$1.jsonl"; }
# column N of the table's rows that have a loss.
losses() { sed -n '/valid. loss/,/^$/p' "$work/$1.log" | awk 'NF == 8 && $4 + 0 > 0 {print $4}'; }

if search grid --precisions fp32,bf16 --lrs 1e-3,3e-3 --batches 4; then pass; else fail "a grid" "$(tail -n 3 "$work/grid.log")"; fi
if [ "$(records grid)" -eq 4 ] && [ "$(losses grid | wc -l)" -eq 4 ]; then pass; else fail "a grid" "$(records grid) records, $(losses grid | wc -l) rows"; fi
if [ "$(losses grid)" = "$(losses grid | sort -n)" ]; then pass; else fail "the table's order" "$(losses grid | tr '\n' ' ')"; fi
best=$(sed -n 's/.*"validation_loss": \([0-9.]*\).*/\1/p' "$work/grid.jsonl" | sort -n | head -n 1)
row=$(grep "\"validation_loss\": $best," "$work/grid.jsonl" | sed 's/.*"precision": "\([^"]*\)", "lr": \([^,]*\), "batch": \([^,]*\),.*/best: --precision \1 --lr \2 --batch \3/')
if grep -qx -- "$row" "$work/grid.log"; then pass; else fail "the best" "$row is not what stands in the output: $(grep best: "$work/grid.log")"; fi

# Run again nothing is computed; what is new is; a torn last line is no record, and does not spoil the next one.
cp "$work/grid.jsonl" "$work/before"
search grid --precisions fp32,bf16 --lrs 1e-3,3e-3 --batches 4
if cmp -s "$work/grid.jsonl" "$work/before" && grep -q "0 trials ran, and 4 were known" "$work/grid.log"; then pass; else fail "again" "$(tail -n 1 "$work/grid.log")"; fi
sed '$d' "$work/before" > "$work/grid.jsonl"
tail -n 1 "$work/before" | cut -c1-60 | tr -d '\n' >> "$work/grid.jsonl"
search grid --precisions fp32,bf16 --lrs 1e-3,3e-3 --batches 4
search grid --precisions fp32,bf16 --lrs 1e-3,3e-3 --batches 4
if grep -q "0 trials ran, and 4 were known" "$work/grid.log"; then pass; else fail "a torn record" "$(tail -n 1 "$work/grid.log")"; fi
search grid --precisions fp32,bf16 --lrs 1e-3,3e-3 --batches 4 --seed 2
if grep -q "4 trials ran, and 0 were known" "$work/grid.log"; then pass; else fail "another seed" "$(tail -n 1 "$work/grid.log")"; fi
search grid --precisions fp32 --lrs 1e-3 --batches 4 --again
if [ "$(records grid)" -eq 1 ]; then pass; else fail "--again" "$(records grid) records"; fi

# A path that is not UTF-8, with a percent sign: its records are found again.  A number of many digits is that number.
odd=$(printf "$work/te%%%%xt\\377")
if head -c 20000 README.md > "$odd" 2> /dev/null; then
    search odd --precisions fp32 --lrs 1.0000000000000000000000000000000000000000e-3 --batches 4 --data "$odd"
    search odd --precisions fp32 --lrs 1e-3 --batches 4 --data "$odd"
    if grep -q "0 trials ran, and 1 were known" "$work/odd.log"; then pass; else fail "a path that is not UTF-8" "$(tail -n 2 "$work/odd.log")"; fi
else skip "a path that is not UTF-8" "the file system takes none"; fi

# What goes wrong in a trial is its record; the search goes on.
search wrong --precisions fp16,bf16 --lrs 1e-3,1e5 --batches 4,1000000
status=$?
if [ $status -eq 0 ] && [ "$(records wrong)" -eq 8 ] && [ "$(losses wrong | wc -l)" -eq 2 ]; then pass; else fail "trials that go wrong" "status $status, $(records wrong) records"; fi
if [ "$(grep -c '"result": "diverged", "reason": "the loss' "$work/wrong.jsonl")" -eq 2 ]; then pass; else fail "diverging trials" "$(cut -c1-150 "$work/wrong.jsonl")"; fi
if [ "$(grep -c '"result": "refused", "reason": "[^"]*samples are less' "$work/wrong.jsonl")" -eq 4 ]; then pass; else fail "refused trials" "$(cut -c1-150 "$work/wrong.jsonl")"; fi
search huge --precisions bf16 --lrs 1e-3 --batches 4 --channels 65536 --layers 1000
status=$?
if [ $status -eq 1 ] && grep -q '"result": "failed", "reason": "[^"]*training this model takes' "$work/huge.jsonl"; then pass; else fail "out of memory" "status $status, $(tail -n 2 "$work/huge.log")"; fi

# At random: within the limits, and more trials begin with the same.
search random --search random --trials 3 --lrs 1e-4,1e-2 --batches 4,8
search random --search random --trials 5 --lrs 1e-4,1e-2 --batches 4,8
rates=$(sed -n 's/.*"lr": \([^,]*\),.*/\1/p' "$work/random.jsonl" | sort -u | awk '$1 >= 1e-4 && $1 <= 1e-2' | wc -l)
if [ "$rates" -eq 5 ] && grep -q "2 trials ran, and 3 were known" "$work/random.log"; then pass; else fail "a random search" "$rates rates, $(tail -n 1 "$work/random.log")"; fi

# As many tokens for every batch size.
search tokens --precisions bf16 --lrs 1e-3 --batches 4,8,16 --tokens 4096 --steps 24
if grep -q -- "--tokens 4096: replaces --steps" "$work/tokens.log"; then pass; else fail "tokens and steps" "$(cat "$work/tokens.log")"; fi
"$sweep" --layers 1 --heads 2 --channels 32 --seq 32 --precisions bf16 --lrs 1e-3 --batches 4,8,16 --tokens 4096 --out "$work/tokens.jsonl" > "$work/tokens.log" 2>&1
if [ "$(sed -n 's/.*"steps": \([0-9]*\),.*/\1/p' "$work/tokens.jsonl" | tr '\n' ' ')" = "32 16 8 " ]; then pass; else fail "--tokens" "$(tail -n 3 "$work/tokens.log")"; fi

# refused TEXT FLAGS...: exit code 2, and the text is said.
refused() {
    text=$1; shift
    search refused "$@"
    status=$?
    if [ $status -eq 2 ] && grep -q -- "$text" "$work/refused.log"; then pass; else fail "refused $*" "status $status: $(tail -n 2 "$work/refused.log")"; fi
}
refused "--precisions fp7: fp7 is not valid" --precisions fp7
refused "--precisions fp32,fp8_e4m3: fp8_e4m3 is not valid" --precisions fp32,fp8_e4m3
refused "--lrs 1e-3,0: 0 is not valid" --lrs 1e-3,0
refused "--lrs ,: is empty" --lrs ,
refused "--batches 2.5" --batches 2.5
refused "an entry has 500 characters" --lrs "$(printf '%0500d' 1)"
refused "5 heads do not divide 32" --heads 5
refused "/nonexistent" --data /nonexistent
refused "did you mean --lrs" --lr 1e-3
refused "--device" --device cpu:x
refused "--out /proc/none/x" --out /proc/none/x
refused "--validation" --validation 1e-5

# A disk that is full: said, and the search ends with its table.
if [ -w /dev/full ]; then
    if "$sweep" $small --precisions bf16 --lrs 1e-3 --batches 4 --out /dev/full > "$work/full.log" 2>&1 && grep -q "No space left" "$work/full.log" && grep -q "best:" "$work/full.log"; then pass
    else fail "a full disk" "$(tail -n 3 "$work/full.log")"; fi
else skip "a full disk" "no /dev/full"; fi

# Ctrl-C keeps the records that are there.
"$sweep" $small --steps 1000000 --precisions bf16 --lrs 1e-3,2e-3 --batches 4 --out "$work/int.jsonl" > "$work/int.log" 2>&1 &
pid=$!
sleep 1; kill -INT $pid; wait $pid
status=$?
if [ $status -eq 130 ] && grep -q "run again to continue" "$work/int.log" && [ ! -s "$work/int.jsonl" ]; then pass; else fail "Ctrl-C" "status $status, $(tail -n 2 "$work/int.log")"; fi
closing
