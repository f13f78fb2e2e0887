#!/bin/sh
# examples.sh - the examples do what they say: train in every precision, resume bit for bit, survive Ctrl-C, and
# refuse bad input by name.
. tests/lib.sh
gpt="$PWD/build/train_gpt"
small="--layers 2 --heads 2 --channels 32 --batch 4 --seq 32 --compare 0 --sample 0 --eval-batches 2 --log-interval 1 --data $work/text"
for i in 1 2 3 4 5 6; do cat README.md; done > "$work/text"

# train NAME FLAGS...: a run into its own folder.
train() { name=$1; shift; "$gpt" $small --out "$work/$name" "$@" > "$work/$name.log" 2>&1; }

# last FIELD RUN: a field of the last step record of a run's metrics.
last() { grep '"step"' "$work/$2/metrics.jsonl" | grep "\"$1\"" | tail -n 1 | sed "s/.*\"$1\": *\([^,}]*\).*/\1/"; }

for precision in fp32 tf32 fp16 bf16; do
    if train "$precision" --steps 40 --precision "$precision"; then
        first=$(grep '"loss"' "$work/$precision/metrics.jsonl" | head -n 1 | sed 's/.*"loss": *\([^,}]*\).*/\1/')
        end=$(last loss "$precision")
        if awk "BEGIN {exit !($end < $first - 1)}"; then pass; else fail "$precision learns" "loss $first, then $end"; fi
    else fail "$precision" "$(tail -n 3 "$work/$precision.log")"; fi
done
for level in O0 O2 O3; do
    if train "$level" --steps 20 --level $level --precision bf16; then pass; else fail "$level" "$(tail -n 3 "$work/$level.log")"; fi
done

# 12 steps in one go, and in two with other threads in between: the same weights, byte for byte.
for precision in fp16 bf16; do
    train whole --steps 12 --precision $precision --dropout 0.1 --save "$work/whole_$precision"
    train part --steps 12 --precision $precision --dropout 0.1 --save "$work/part_$precision" --save-interval 5
    if cmp -s "$work/whole_$precision.safetensors" "$work/part_$precision.safetensors"; then pass; else fail "$precision repeats" "two equal runs differ"; fi
    train first --steps 12 --precision $precision --dropout 0.1 --save "$work/two_$precision" --stop-after 5 ||
        train first --steps 5 --schedule constant --precision $precision --dropout 0.1 --save "$work/two_$precision"
    train second --steps 12 --precision $precision --dropout 0.1 --save "$work/two_$precision" --resume "$work/two_$precision" --threads 1
    if cmp -s "$work/whole_$precision.safetensors" "$work/two_$precision.safetensors"; then pass
    else fail "$precision resumes" "the resumed run differs: $(tail -n 2 "$work/second.log")"; fi
done

# refused TEXT FLAGS...: exit code 2, and the text is said.
refused() {
    text=$1; shift
    "$gpt" $small --out "$work/refused" "$@" > "$work/refused.log" 2>&1
    status=$?
    if [ $status -eq 2 ] && grep -q -- "$text" "$work/refused.log"; then pass; else fail "refused $*" "status $status: $(tail -n 2 "$work/refused.log")"; fi
}
refused "--nonsense" --nonsense 1
refused "--precision" --precision fp7
refused "fp8" --precision fp8
refused "--heads" --heads 5 --channels 32
refused "--batch" --batch 0
refused "--lr" --lr fast
refused "--steps" --steps
refused "/nonexistent" --data /nonexistent
refused "growth" --scaler on --precision fp16 --growth-factor 0.5

# Other data is refused on resume.
train small_run --steps 2 --save "$work/mine"
sed 's/a/b/g' "$work/text" > "$work/other"
if "$gpt" $small --out "$work/r" --resume "$work/mine" --data "$work/other" --steps 4 > "$work/r.log" 2>&1; then fail "other data" "accepted on resume"; else pass; fi

# Ctrl-C saves and stops.
"$gpt" $small --out "$work/int" --steps 100000 --save "$work/int_model" > "$work/int.log" 2>&1 &
pid=$!
sleep 2; kill -INT $pid; wait $pid
status=$?
if [ $status -eq 130 ] && [ -s "$work/int_model.safetensors" ] && [ -s "$work/int_model.state" ]; then pass
else fail "Ctrl-C" "status $status, $(tail -n 2 "$work/int.log")"; fi

# The progress line in a log file has no carriage returns.
if tr -d '\n' < "$work/fp32.log" | grep -q "$(printf '\r')"; then fail "log file" "carriage returns"; else pass; fi

if build/scaler_only > "$work/scaler.log" 2>&1 && grep -q skipped "$work/scaler.log"; then pass; else fail scaler_only "$(tail -n 3 "$work/scaler.log")"; fi
if build/quickstart /nonexistent > "$work/quick.log" 2>&1 && grep -q SYNTHETIC "$work/quick.log"; then pass; else fail quickstart "$(tail -n 3 "$work/quick.log")"; fi
closing
