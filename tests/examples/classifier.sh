#!/bin/sh
# classifier.sh - tests the example classifier as a whole program.  It must learn in every precision and at every level,
# resume from its own files, and compare precisions on every architecture.  It must reject bad input with a message that
# names it.
. tests/lib.sh
program="$PWD/build/train_classifier"

# train NAME FLAGS...: a run into its own folder.
train() { name=$1; shift; "$program" --out "$work/$name" --threads 1 "$@" > "$work/$name.log" 2>&1; }
# field KEY RUN: of a run's last evaluation.
field() { grep '"event": "evaluation"' "$work/$2/classifier/metrics.jsonl" | tail -n 1 | sed "s/.*\"$1\": *\([^,}]*\).*/\1/"; }

for precision in fp32 tf32 fp16 bf16; do
    if train "$precision" --precision "$precision" && awk "BEGIN {exit !($(field accuracy $precision) > 0.9)}"; then pass
    else fail "$precision learns" "$(tail -n 2 "$work/$precision.log")"; fi
done
if grep -q "MADE-UP" "$work/fp32.log" && grep -q "RANDOM" "$work/fp32.log"; then pass; else fail "says what it learns" "$(head -n 2 "$work/fp32.log")"; fi
if [ "$(field scale fp16)" = 65536 ] && [ "$(field skipped fp16)" = 0 ] && [ "$(grep -c '"event": *"epoch"' "$work/fp16/classifier/metrics.jsonl")" = 3 ] &&
    [ "$(grep -c '"event": *"step"' "$work/fp16/classifier/metrics.jsonl")" -ge 20 ]; then pass
else fail "epoch records" "$(tail -n 1 "$work/fp16/classifier/metrics.jsonl")"; fi
for level in O0 O2 O3; do
    precision=bf16
    [ $level != O0 ] || precision=fp32
    if train "$level" --level $level --precision $precision --epochs 2 && awk "BEGIN {exit !($(field accuracy $level) > 0.75)}"; then pass
    else fail "$level" "$(tail -n 2 "$work/$level.log")"; fi
done
if train overflow --precision fp16 --init-scale 1e30 --epochs 1; then fail "only skipped steps" "ended with success"
elif grep -q "no step was applied: all [0-9]* were skipped" "$work/overflow.log"; then pass
else fail "only skipped steps" "$(tail -n 1 "$work/overflow.log")"; fi
if train accumulate --accumulation 3 --clip none --scaler on --policy torch --shuffle-off --epochs 1; then pass; else fail accumulation "$(tail -n 2 "$work/accumulate.log")"; fi

# 23 micro-batches in an epoch: steps of three of them span the ends of epochs, and have the losses of both sides.
# Nothing is learned, so every way of cutting gives the same mean.
i=0
while [ $i -lt 102 ]; do echo "$((i % 2))	word$((i % 7)) and $((i % 11))"; i=$((i + 1)); done > "$work/texts"
mean_loss() { awk '/"event": *"epoch"/ {match($0, /"loss": *[0-9.e+-]*/); loss = substr($0, RSTART + 7, RLENGTH - 7)
    match($0, /"steps": *[0-9]*/); n = substr($0, RSTART + 8, RLENGTH - 8); s += n * loss; steps += n} END {printf "%.4f", s / steps}' "$work/$1/classifier/metrics.jsonl"; }
for n in 1 3; do
    train "span$n" --data "$work/texts" --batch 4 --accumulation $n --epochs 3 --lr 0 --dropout 0 --precision fp32 --layers 1 --hidden 16 --heads 2
done
if [ "$(mean_loss span1)" = "$(mean_loss span3)" ]; then pass; else fail "steps that span epochs" "$(mean_loss span1), with accumulation $(mean_loss span3)"; fi

# Two equal runs write the same model, whatever the threads.
train again --precision bf16 --threads 2
if cmp -s "$work/bf16/classifier/model.safetensors" "$work/again/classifier/model.safetensors"; then pass; else fail repeats "two equal runs differ"; fi

# A saved model evaluates as it did when it was saved, from a file of its own texts, and goes on.
saved="$work/fp32/classifier"
tail -n 100 "$saved/sentences.tsv" > "$work/valid.tsv"
train trained --precision fp32 --valid "$work/valid.tsv" --epochs 1
train same --precision fp32 --init "$work/trained/classifier/model.safetensors" --valid "$work/valid.tsv" --epochs 0
if [ "$(field validation_loss trained)" = "$(sed -n 's/.*"event": "start".*"validation_loss": *\([^,}]*\).*/\1/p' "$work/same/classifier/metrics.jsonl")" ] &&
    ! grep -q initialised "$work/same.log"; then pass
else fail "--init" "evaluates otherwise than it did: $(tail -n 2 "$work/same.log")"; fi
for file in config.json vocab.txt; do if [ -s "$work/trained/classifier/$file" ]; then pass; else fail "$file" "is not beside the model"; fi; done
sed 's/^good/1/; s/^bad/0/' "$saved/sentences.tsv" | awk -F '\t' '{print (NR % 7 == 0 ? 2 : $1) "\t" $2}' > "$work/three.tsv"
if train three --init "$saved/model.safetensors" --data "$work/three.tsv" --epochs 1 --save none && grep -q "the last layer initialised" "$work/three.log" &&
    grep -q "3 classes" "$work/three.log" && [ ! -e "$work/three/classifier/model.safetensors" ]; then pass; else fail "other labels" "$(tail -n 3 "$work/three.log")"; fi
if train bytes --data "$saved/sentences.tsv" --epochs 1 --seq 40 --metrics "$work/m.jsonl" --save "$work/named" && grep -q "tokens *bytes" "$work/bytes.log" &&
    [ -s "$work/named.safetensors" ] && [ -s "$work/m.jsonl" ]; then pass; else fail "bytes as tokens" "$(tail -n 3 "$work/bytes.log")"; fi

# Labels are the model's by their names, in whatever order the data has them; others need a layer of their own.
awk -F '\t' '$1 == "good"' "$saved/sentences.tsv" > "$work/good.tsv"
awk -F '\t' '$1 == "bad"' "$saved/sentences.tsv" > "$work/bad.tsv"
cat "$work/good.tsv" "$work/bad.tsv" > "$work/good_first.tsv"
cat "$work/bad.tsv" "$work/good.tsv" > "$work/bad_first.tsv"
sed 's/^good/fine/' "$work/bad_first.tsv" > "$work/fine.tsv"
evaluate() { train "labels_$1" --precision fp32 --init "$saved/model.safetensors" --data "$work/$1.tsv" --valid "$work/$1.tsv" --epochs 0; }
loss_of() { sed -n 's/.*"event": "start".*"accuracy": *\([^,}]*\).*/\1/p' "$work/labels_$1/classifier/metrics.jsonl"; }
evaluate good_first; evaluate bad_first; evaluate fine
if [ -n "$(loss_of bad_first)" ] && [ "$(loss_of good_first)" = "$(loss_of bad_first)" ] && awk "BEGIN {exit !($(loss_of bad_first) > 0.9)}" &&
    cmp -s "$work/labels_good_first/classifier/config.json" "$work/labels_bad_first/classifier/config.json"; then pass
else fail "labels by their names" "accuracy $(loss_of good_first) and $(loss_of bad_first)"; fi
if grep -q "the last layer initialised: the data's labels" "$work/labels_fine.log" && grep -q '"1": "fine"' "$work/labels_fine/classifier/config.json"; then pass
else fail "other labels than the model's" "$(grep head "$work/labels_fine.log") $(cat "$work/labels_fine/classifier/config.json")"; fi

# The file's order is that of training: the seed draws nothing more.  With it, it does.
for seed in 1 2; do
    ordered="--precision fp32 --init $saved/model.safetensors --valid $work/valid.tsv --dropout 0 --epochs 1 --seed $seed"
    train "ordered_$seed" $ordered --shuffle-off
    train "shuffled_$seed" $ordered
done
if cmp -s "$work/ordered_1/classifier/model.safetensors" "$work/ordered_2/classifier/model.safetensors" &&
    ! cmp -s "$work/shuffled_1/classifier/model.safetensors" "$work/shuffled_2/classifier/model.safetensors"; then pass
else fail "--shuffle-off" "$(tail -n 2 "$work/ordered_2.log")"; fi

# Every architecture in every precision: all rows are good, and those beside fp32 in the metrics too.
if train compat --compat --compat-scale 12 && [ "$(grep -c ' finite  *ok$' "$work/compat.log")" = 24 ] &&
    [ "$(grep -c '"verdict": "ok"' "$work/compat/classifier/metrics.jsonl")" = 18 ]; then pass; else fail "--compat" "$(tail -n 5 "$work/compat.log")"; fi

# refused TEXT FLAGS...: exit code 2, and the text is said.
refused() {
    text=$1; shift
    "$program" --out "$work/refused" --threads 1 "$@" > "$work/refused.log" 2>&1
    status=$?
    if [ $status -eq 2 ] && grep -q -- "$text" "$work/refused.log"; then pass; else fail "refused $*" "status $status: $(tail -n 2 "$work/refused.log")"; fi
}
printf 'good\tfine\nbad dull\n' > "$work/no_tab.tsv"
printf 'good\tfine\ngood\twell\n' > "$work/one_label.tsv"
printf 'good\tfine\nbad\tdull\nodd\tthe film\n' > "$work/odd.tsv"
printf '0\tfine\n5\tdull\n' > "$work/numbers.tsv"
printf '[PAD]\n[CLS]\n[SEP]\nfilm\n' > "$work/no_unk.txt"
printf 'no model at all' > "$work/not.safetensors"
head -c 3000 "$saved/model.safetensors" > "$work/short.safetensors"
: > "$work/empty.tsv"
refused "1000 micro-batches, but the training has 204" --accumulation 1000
refused "contradicts --scaler off" --scaler off --init-scale 1024
refused "contradicts --scaler off" --scaler off --growth-interval 10
refused "needs a vocabulary" --data "$work/odd.tsv" --cased
refused "contradicts --valid" --valid "$work/valid.tsv" --validation 0.2
refused "contradicts --compat" --compat --init "$saved/model.safetensors"
refused "contradicts --compat" --compat --precision bf16
refused "needs --compat" --compat-scale 12
refused "did you mean --precision" --presicion bf16
refused "--precision" --precision fp7
refused "--batch" --batch 0
refused "--seq" --seq 1
refused "--heads" --heads 5
refused "--warmup" --warmup 2
refused "--compat-scale" --compat-scale 0
refused "needs a value" --data
refused "--data /nonexistent" --data /nonexistent
refused "no_tab.tsv: line 2: there is no tab" --data "$work/no_tab.tsv"
refused "only one label" --data "$work/one_label.tsv"
refused "holds no text" --data "$work/empty.tsv"
refused "line 3: the label odd" --valid "$work/odd.tsv"
refused "--valid /nonexistent" --valid /nonexistent
refused "line 2 of --data has the label 5" --data "$work/numbers.tsv" --classes 3
refused "no line is \[UNK\]" --vocab "$work/no_unk.txt"
refused "--vocab /nonexistent" --vocab /nonexistent
refused "--init /nonexistent" --init /nonexistent
refused "not a safetensors file" --init "$work/not.safetensors"
refused "short.safetensors" --init "$work/short.safetensors"
refused "the model only" --init "$saved/model.safetensors" --vocab tests/torch/golden/wordpiece_vocab.txt --cased
refused "it has upper case, but nothing says so" --init "$saved/model.safetensors" --vocab tests/torch/golden/wordpiece_vocab.txt
mkdir "$work/bare"; cp "$saved/model.safetensors" "$saved/config.json" "$work/bare"
refused "bare/ has no tokenizer: no tokenizer.json" --init "$work/bare"
refused "positions" --init "$saved/model.safetensors" --seq 600
mkdir "$work/nothing"
printf '\002\0\0\0\0\0\0\0{}' > "$work/nothing/model.safetensors"
refused "no config.json beside it" --init "$work/nothing/model.safetensors"
echo '{}' > "$work/nothing/config.json"
refused "not an encoder like BERT" --init "$work/nothing/model.safetensors"
echo '{"hidden_act": "gelu",}' > "$work/nothing/config.json"
refused "nothing/config.json: line 1: not a JSON object" --init "$work/nothing/model.safetensors"
refused "the model in the file has layers = 2" --init "$saved/model.safetensors" --layers 3
refused "the model in the file has layers = 2" --init "$saved/model.safetensors" --model base
refused "the model in the file has heads = 2" --init "$saved/model.safetensors" --heads 4
cp -r "$saved" "$work/changed"
sed 's/"hidden_act": "gelu"/"hidden_act": "gelu_new"/' "$saved/config.json" > "$work/changed/config.json"
refused "model.safetensors was saved with hidden_act = gelu" --init "$work/changed/model.safetensors"
refused "--device" --device tpu
refused "--metrics" --metrics /dev/null/x/m.jsonl

# The settings are those of amp.h's table, from a file and the environment too; what this program has not is refused.
printf 'dtype = bf16\nmoments = 8bit\n' > "$work/own.conf"
if train config --epochs 0 --config "$work/own.conf" && grep -q "precision *bf16" "$work/config.log" &&
    AMP_DTYPE=fp16 train env --epochs 0 --config "$work/own.conf" --env && grep -q "precision *fp16" "$work/env.log"; then pass
else fail "--config and --env" "$(tail -n 2 "$work/config.log" "$work/env.log")"; fi
refused "recover" --config examples/stable.conf
refused "tensor_stats_interval is a setting of train_gpt" --config examples/debug.conf
refused "--nan-action" --nan-action recover
if train debug --epochs 1 --precision fp16 --init-scale 1e30 --static-scale --nan-action stop; then fail "--nan-action stop" "trains on"
elif grep -q "stopped by --nan-action stop after an anomaly" "$work/debug.log"; then pass
else fail "--nan-action stop" "$(tail -n 2 "$work/debug.log")"; fi

# A run that was stopped goes on bit for bit, also in the middle of an epoch and with another number of threads.
short="--precision fp16 --epochs 2 --accumulation 2"
resume() { name=$1; from=$2; shift 2; "$program" --threads 1 --out "$work/$name" --resume "$work/$from/classifier/model" --save "$work/$name/classifier/model" "$@" > "$work/$name.log" 2>&1; }
train whole $short; train part $short --stop-after 20
if grep -q "stopped at step 20; continue with --resume" "$work/part.log" && resume rest part --threads 2 &&
    cmp -s "$work/whole/classifier/model.safetensors" "$work/rest/classifier/model.safetensors"; then pass
else fail "--resume" "$(tail -n 3 "$work/part.log" "$work/rest.log")"; fi
train saves $short --save-interval 30
if cmp -s "$work/whole/classifier/model.safetensors" "$work/saves/classifier/model.safetensors"; then pass; else fail "--save-interval" "changes the training"; fi

# Two processes train what one with the double batch trains.
losses() { grep '"event": "step"' "$work/$1/classifier/metrics.jsonl" | sed 's/.*"loss": *\([^,}]*\).*/\1/'; }
# together NAME FLAGS...: two ranks that meet through a file; status0 and status1 are their exit codes.
together() {
    name=$1; shift
    rm -f "$work/meet"
    RANK=1 WORLD_SIZE=2 "$program" --rank-file "$work/meet" --rank-timeout 20 --threads 1 --out "$work/$name" "$@" > "$work/$name.1.log" 2>&1 &
    second=$!
    RANK=0 WORLD_SIZE=2 "$program" --rank-file "$work/meet" --rank-timeout 20 --threads 1 --out "$work/$name" "$@" > "$work/$name.log" 2>&1
    status0=$?
    wait $second; status1=$?
    [ $status0 -eq 0 ] && [ $status1 -eq 0 ]
}
# near NAME OTHER: fp32 sums in another order: 2^-24 relative for each of some thousand additions is far below 1e-4.
near() {
    losses "$1" > "$work/a.losses"; losses "$2" > "$work/b.losses"
    [ "$(wc -l < "$work/a.losses")" -gt 60 ] && [ "$(wc -l < "$work/a.losses")" -eq "$(wc -l < "$work/b.losses")" ] &&
        paste "$work/a.losses" "$work/b.losses" | awk '{d = $1 - $2; if (d < 0) d = -d; if (!(d <= 1e-4 * $2)) bad = 1} END {exit bad}' &&
        awk "BEGIN {d = $(field validation_loss "$1") - $(field validation_loss "$2"); exit !(d * d < 1e-8)}" &&
        [ "$(field accuracy "$1")" = "$(field accuracy "$2")" ]
}
like="--precision fp32 --dropout 0 --log-interval 1 --epochs 1"
# 1,080 texts and 8 left in the last batch; 1,073 and one left, for two ranks
for validation in 0.1 0.1058; do
    train one_$validation $like --batch 16 --validation $validation
    if together two_$validation $like --batch 8 --validation $validation && near one_$validation two_$validation; then pass
    else fail "two processes as one, --validation $validation" "$(paste "$work/a.losses" "$work/b.losses" | tail -n 3; tail -n 2 "$work/two_$validation.log" "$work/two_$validation.1.log")"; fi
done
same_weights() { cmp -s "$work/$1/classifier/model.safetensors" "$work/$2/classifier/model.safetensors"; }
together ordered $like --batch 8 --deterministic --bucket-mb 1
if together shards $like --batch 8 --deterministic --bucket-mb 1 --shard states && same_weights ordered shards; then pass
else fail "sharded states" "$(tail -n 2 "$work/shards.log" "$work/shards.1.log")"; fi
together stopped $like --batch 8 --deterministic --bucket-mb 1 --shard states --stop-after 30
if together goes_on --resume "$work/stopped/classifier/model" --save "$work/goes_on/classifier/model" && same_weights ordered goes_on; then pass
else fail "two go on from shards" "$(tail -n 2 "$work/goes_on.log" "$work/goes_on.1.log")"; fi
# One process goes on from the checkpoint of two, with the same texts in each step.
if "$program" --threads 1 --out "$work/stopped" --resume "$work/stopped/classifier/model" > "$work/alone.log" 2>&1 && near stopped one_0.1; then pass
else fail "one goes on from two" "$(tail -n 2 "$work/alone.log")"; fi
if together loose --precision fp32 --epochs 1 --batch 8 --sync-every 34 --wire bf16; then pass; else fail "--sync-every" "$(tail -n 2 "$work/loose.log")"; fi
# They stop after the step that --stop-after names, save before and after it, and go on from there, each from its own state.
loose="--precision fp32 --epochs 2 --batch 8 --sync-every 34"
together loose_whole $loose
if together loose_part $loose --stop-after 50 --save-interval 20 && grep -q "stopped at step 50;" "$work/loose_part.log" &&
    together loose_rest --resume "$work/loose_part/classifier/model" --save "$work/loose_rest/classifier/model" && same_weights loose_whole loose_rest; then pass
else fail "ranks go on from between two combinations" "$(tail -n 2 "$work/loose_part.log" "$work/loose_rest.log")"; fi
if together uneven --precision fp32 --epochs 1 --batch 8 --sync-every 50 || ! grep -q "68 micro-batches would end between two combinations" "$work/uneven.log"; then
    fail "--sync-every across an epoch's end" "$(tail -n 2 "$work/uneven.log")"
else pass; fi
if together skips --precision fp16 --init-scale 1e12 --epochs 1 && grep -q "skipped" "$work/skips.log" && [ "$(field skipped skips)" -gt 10 ]; then pass
else fail "an overflow skips on both" "$(tail -n 2 "$work/skips.log")"; fi
# SIGTERM to one rank: all save and end with 75.
rm -f "$work/meet"
for rank in 0 1; do
    RANK=$rank WORLD_SIZE=2 "$program" --rank-file "$work/meet" --rank-timeout 20 --threads 1 --out "$work/term" --epochs 100000 > "$work/term.$rank.log" 2>&1 &
    eval "pid$rank=\$!"
done
for second in 1 2 3 4 5 6 7 8 9 10; do sleep 1; if grep -q "^epoch 1" "$work/term.0.log"; then break; fi; done
kill -TERM $pid1
wait $pid0; status0=$?; wait $pid1; status1=$?
if [ "$status0 $status1" = "75 75" ] && [ -s "$work/term/classifier/model.state" ] && grep -q "continue with --resume" "$work/term.0.log"; then pass
else fail "SIGTERM to one rank" "$status0 and $status1: $(tail -n 2 "$work/term.0.log" "$work/term.1.log")"; fi

refused "contradicts --save none" --save none --save-interval 10
refused "is for --resume" --change-batch
refused "is for --sync-every" --outer-lr 1
refused "is for --shard states" --overlap-param-gather
refused "nothing.state" --resume "$work/nothing"
refused "drop --init or --resume" --resume "$work/part/classifier/model" --init "$saved/model.safetensors"
refused "the checkpoint was trained with 32" --resume "$work/part/classifier/model" --batch 8
refused "was trained on other data" --resume "$work/part/classifier/model" --data "$work/good_first.tsv"
if [ -x build/train_gpt ]; then
    build/train_gpt --layers 1 --heads 1 --channels 8 --seq 8 --steps 1 --sample 0 --threads 1 --eval-batches 1 --data README.md --out "$work/foreign" > "$work/foreign.log" 2>&1
    refused "is not a checkpoint of train_classifier" --resume "$work/foreign/model"
fi
( unset MASTER_ADDR; RANK=0 WORLD_SIZE=2 "$program" --out "$work/refused" > "$work/refused.log" 2>&1 )
if grep -q "MASTER_ADDR is not set" "$work/refused.log"; then pass; else fail "no address" "$(tail -n 1 "$work/refused.log")"; fi
( unset WORLD_SIZE; RANK=0 "$program" --out "$work/refused" > "$work/refused.log" 2>&1 )
if grep -q "RANK is set, and WORLD_SIZE is not" "$work/refused.log"; then pass; else fail "RANK alone" "$(tail -n 1 "$work/refused.log")"; fi

# A disk that is full: training goes on, and says so.
if [ -w /dev/full ]; then
    if train full --epochs 1 --metrics /dev/full && grep -q "kept in memory" "$work/full.log" && grep -q "^epoch 1" "$work/full.log"; then pass
    else fail "a full disk" "$(tail -n 2 "$work/full.log")"; fi
else skip "a full disk" "no /dev/full"; fi

# Ctrl-C saves and stops.
"$program" --out "$work/int" --threads 1 --epochs 100000 > "$work/int.log" 2>&1 &
pid=$!
for second in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do sleep 1; if grep -q "before training" "$work/int.log"; then break; fi; done
kill -INT $pid; wait $pid
status=$?
if [ $status -eq 130 ] && [ -s "$work/int/classifier/model.safetensors" ]; then pass; else fail "Ctrl-C" "status $status, $(tail -n 2 "$work/int.log")"; fi
closing
