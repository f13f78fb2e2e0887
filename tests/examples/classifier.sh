#!/bin/sh
# classifier.sh - the example classifier does what it says: learns in every precision and level, goes on from its own
# files, compares precisions on every architecture, and refuses bad input by name.
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
    if train "$level" --level $level --precision bf16 --epochs 2 && awk "BEGIN {exit !($(field accuracy $level) > 0.75)}"; then pass
    else fail "$level" "$(tail -n 2 "$work/$level.log")"; fi
done
if train overflow --precision fp16 --init-scale 1e30 --epochs 1 && [ "$(field skipped overflow)" -gt 10 ]; then pass
else fail "a scale that is too large" "$(tail -n 1 "$work/overflow.log")"; fi
if train accumulate --accumulation 3 --clip 0 --scaler on --policy torch --shuffle-off --epochs 1; then pass; else fail accumulation "$(tail -n 2 "$work/accumulate.log")"; fi

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
refused "is for a vocabulary" --data "$work/odd.tsv" --cased
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
refused "no_tab.tsv: line 2: no tab" --data "$work/no_tab.tsv"
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
refused "the model of --init only" --init "$saved/model.safetensors" --vocab tests/torch/golden/wordpiece_vocab.txt
refused "positions" --init "$saved/model.safetensors" --seq 600
mkdir "$work/nothing"
printf '\002\0\0\0\0\0\0\0{}' > "$work/nothing/model.safetensors"
refused "no config.json beside it" --init "$work/nothing/model.safetensors"
echo '{}' > "$work/nothing/config.json"
refused "not an encoder like BERT" --init "$work/nothing/model.safetensors"
echo '{"hidden_act": "gelu",}' > "$work/nothing/config.json"
refused "nothing/config.json: line 1: not a JSON object" --init "$work/nothing/model.safetensors"
refused "the model of --init has layers 2" --init "$saved/model.safetensors" --layers 3
refused "the model of --init has layers 2" --init "$saved/model.safetensors" --model base
refused "the model of --init has heads 2" --init "$saved/model.safetensors" --heads 4
cp -r "$saved" "$work/changed"
sed 's/"hidden_act": "gelu"/"hidden_act": "gelu_new"/' "$saved/config.json" > "$work/changed/config.json"
refused "model.safetensors was saved with hidden_act = gelu" --init "$work/changed/model.safetensors"
refused "--device" --device tpu
refused "--metrics" --metrics /dev/null/x/m.jsonl

# A disk that is full: training goes on, and says so.
if [ -w /dev/full ]; then
    if train full --epochs 1 --metrics /dev/full && grep -q "kept in memory" "$work/full.log" && grep -q "^epoch 1" "$work/full.log"; then pass
    else fail "a full disk" "$(tail -n 2 "$work/full.log")"; fi
else skip "a full disk" "no /dev/full"; fi

# Ctrl-C evaluates, saves and stops.
"$program" --out "$work/int" --threads 1 --epochs 100000 > "$work/int.log" 2>&1 &
pid=$!
for second in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do sleep 1; if grep -q "before training" "$work/int.log"; then break; fi; done
kill -INT $pid; wait $pid
status=$?
if [ $status -eq 130 ] && [ -s "$work/int/classifier/model.safetensors" ]; then pass; else fail "Ctrl-C" "status $status, $(tail -n 2 "$work/int.log")"; fi
closing
