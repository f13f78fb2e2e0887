#!/bin/sh
# examples.sh - tests the example programs as a whole.  They must train in every precision, resume bit for bit, and survive
# Ctrl-C.  They must reject bad input with a message that names it.  build/ must have been made before.
. tests/lib.sh
made build/amp.o
gpt="$PWD/build/train_gpt"
small="--layers 2 --heads 2 --channels 32 --batch 4 --seq 32 --sample 0 --eval-batches 2 --log-interval 1 --data $work/text"
for i in 1 2 3 4 5 6; do cat README.md; done > "$work/text"

# train NAME FLAGS...: a run into its own folder.
train() { name=$1; shift; "$gpt" $small --out "$work/$name" "$@" > "$work/$name.log" 2>&1; }

# last FIELD RUN: a field of the last step record of a run's metrics.
last() { grep '"event": "step"' "$work/$2/metrics.jsonl" | grep "\"$1\"" | tail -n 1 | sed "s/.*\"$1\": *\([^,}]*\).*/\1/"; }

for precision in fp32 tf32 fp16 bf16 fp8; do
    if train "$precision" --steps 40 --precision "$precision" --fp8-blocks all; then
        first=$(grep '"loss"' "$work/$precision/metrics.jsonl" | head -n 1 | sed 's/.*"loss": *\([^,}]*\).*/\1/')
        end=$(last loss "$precision")
        if awk "BEGIN {exit !($end < $first - 1)}"; then pass; else fail "$precision learns" "loss $first, then $end"; fi
    else fail "$precision" "$(tail -n 3 "$work/$precision.log")"; fi
done
for level in O0 O2 O3; do
    precision=bf16
    [ $level = O0 ] && precision=fp32
    if train "$level" --steps 20 --level $level --precision $precision; then pass; else fail "$level" "$(tail -n 3 "$work/$level.log")"; fi
done

# Adaptive: layers go down, which is recorded and kept as settings; with a budget of 0 the run is that of fp32.
adaptive="--precision adaptive --lowest bf16"
if train adaptive --steps 64 $adaptive --save "$work/adaptive_model" && grep -q '"event": "precision".*"to": "bf16"' "$work/adaptive/metrics.jsonl" &&
    grep -q '^layers = .*bf16' "$work/adaptive_model.layers.conf" &&
    train adaptive_as_it_ended --steps 1 --precision fp32 --config "$work/adaptive_model.layers.conf"; then pass
else fail "adaptive" "$(tail -n 3 "$work/adaptive.log")"; fi
train budget_0 --steps 8 --precision adaptive --error-budget 0 --save "$work/budget_0"
train budget_none --steps 8 --precision fp32 --save "$work/budget_none"
weights_of() { tail -c 50000 "$work/$1.safetensors" | cksum; }
if [ -s "$work/budget_0.safetensors" ] && [ "$(weights_of budget_0)" = "$(weights_of budget_none)" ]; then pass
else fail "--error-budget 0" "differs from fp32: $(tail -n 2 "$work/budget_0.log")"; fi

# 12 steps in one go, and in two with other threads in between: the same weights, byte for byte.
for precision in fp16 bf16 fp8; do
    train whole --steps 12 --precision $precision --fp8-blocks all --dropout 0.1 --save "$work/whole_$precision"
    train part --steps 12 --precision $precision --fp8-blocks all --dropout 0.1 --save "$work/part_$precision" --save-interval 5
    if cmp -s "$work/whole_$precision.safetensors" "$work/part_$precision.safetensors"; then pass; else fail "$precision repeats" "two equal runs differ"; fi
    train first --steps 12 --precision $precision --fp8-blocks all --dropout 0.1 --save "$work/two_$precision" --stop-after 5 ||
        train first --steps 5 --schedule constant --precision $precision --dropout 0.1 --save "$work/two_$precision"
    train second --steps 12 --precision $precision --fp8-blocks all --dropout 0.1 --save "$work/two_$precision" --resume "$work/two_$precision" --threads 1
    if cmp -s "$work/whole_$precision.safetensors" "$work/two_$precision.safetensors"; then pass
    else fail "$precision resumes" "the resumed run differs: $(tail -n 2 "$work/second.log")"; fi
done

# The same with less storage: remainders, stochastic rounding, bf16 and 8-bit moments resume bit for bit; masters change
# over.
for masters in remainder stochastic; do
    moments=bf16
    if [ $masters = remainder ]; then moments=8bit; fi
    storage="--precision bf16 --level O2 --masters $masters --moments $moments"
    train whole --steps 8 $storage --save "$work/whole_$masters"
    train first --steps 8 $storage --save "$work/two_$masters" --stop-after 3
    train second --steps 8 --save "$work/two_$masters" --resume "$work/two_$masters" --threads 1
    if [ -s "$work/whole_$masters.safetensors" ] && cmp -s "$work/whole_$masters.safetensors" "$work/two_$masters.safetensors"; then pass
    else fail "$masters resumes" "the resumed run differs: $(tail -n 2 "$work/second.log")"; fi
done
if grep -q "bytes each: weight 2.*master 0.*moments 4" "$work/whole.log"; then pass; else fail "bytes per parameter" "$(grep "bytes each" "$work/whole.log")"; fi
train change --steps 6 --precision bf16 --level O2 --masters fp32 --save "$work/change" --stop-after 3
if train changed --steps 6 --save "$work/change" --resume "$work/change" --masters remainder; then pass; else fail "masters change over" "$(tail -n 2 "$work/changed.log")"; fi

# The head and the loss in one: the losses of the two within rounding, and the run resumes bit for bit.
for precision in fp32 bf16; do
    train two_calls --steps 8 --precision $precision
    train one_call --steps 8 --precision $precision --fused-loss --save "$work/one_call"
    train one_first --steps 8 --precision $precision --fused-loss --save "$work/one_two" --stop-after 3
    train one_second --steps 8 --precision $precision --fused-loss --save "$work/one_two" --resume "$work/one_two"
    two=$(last loss two_calls) one=$(last loss one_call)
    if awk "BEGIN {d = ${one:-9} - ${two:-0}; exit !(d < 0.005 && d > -0.005)}"; then pass; else fail "--fused-loss in $precision" "loss ${one:-none}, by two operators ${two:-none}"; fi
    if cmp -s "$work/one_call.safetensors" "$work/one_two.safetensors"; then pass; else fail "--fused-loss in $precision resumes" "$(tail -n 2 "$work/one_second.log")"; fi
done

# A 16-bit residual stream: its loss beside that of an fp32 one, of the same weights.
if train stream --steps 6 --precision bf16 --activations auto,stream=bf16 --data "$work/text" &&
    grep -q "stream      in fp32 the same weights have .* in bf16 .*: a difference of" "$work/stream.log"; then pass
else fail "16-bit residual stream" "$(tail -n 3 "$work/stream.log")"; fi

# How the data is read changes nothing: workers, none, more read ahead, other memory.
train read_2 --steps 6 --save "$work/read_2"
train read_0 --steps 6 --save "$work/read_0" --workers 0
train read_5 --steps 6 --save "$work/read_5" --workers 5 --prefetch 7 --pin off --timeout 30
train ordered --steps 6 --save "$work/ordered" --shuffle off
for other in read_0 read_5; do
    if cmp -s "$work/read_2.safetensors" "$work/$other.safetensors"; then pass; else fail "$other" "differs from two workers: $(tail -n 2 "$work/$other.log")"; fi
done
if [ -s "$work/ordered.safetensors" ] && ! cmp -s "$work/read_2.safetensors" "$work/ordered.safetensors"; then pass; else fail "--shuffle off" "the same order as with it"; fi

# Several files by a pattern are one text.
head -c 9000 "$work/text" > "$work/piece_1"; tail -c +9001 "$work/text" | head -c 9000 > "$work/piece_2"
train pieces --steps 2 --data "$work/piece_*"
if grep -q "18,000 tokens" "$work/pieces.log"; then pass; else fail "pattern" "$(tail -n 3 "$work/pieces.log")"; fi

# A tokenizer: text becomes tokens, resumes, and the sample is text again.
bpe="--tokenizer tests/torch/golden/tokenizer_vocab.json tests/torch/golden/tokenizer_merges.txt"
train bpe_whole $bpe --steps 8 --save "$work/bpe_whole" --sample 40 --prompt "The loader"
train bpe_first $bpe --steps 8 --save "$work/bpe_two" --stop-after 3
train bpe_second --steps 8 --save "$work/bpe_two" --resume "$work/bpe_two"
if cmp -s "$work/bpe_whole.safetensors" "$work/bpe_two.safetensors"; then pass; else fail "tokenizer resumes" "the resumed run differs: $(tail -n 2 "$work/bpe_second.log")"; fi
if grep -q "^The loader" "$work/bpe_whole.log" && grep -q "900 tokens: " "$work/bpe_whole.log"; then pass; else fail "tokenizer sample" "$(tail -n 3 "$work/bpe_whole.log")"; fi
if "$gpt" $small --out "$work/ready" --data "$work/bpe_whole/tokens.bin" $bpe --steps 1 > "$work/ready.log" 2>&1 && [ ! -e "$work/ready/tokens.bin" ]; then pass; else fail "token file with a tokenizer" "$(tail -n 3 "$work/ready.log")"; fi

# A model of another kind than GPT-2: what its config.json says is what is trained, resumed and saved, under any name.
train usual --steps 1 --save "$work/usual/model"
mkdir "$work/relu"
sed 's/"gelu_new"/"relu"/; s/"n_layer"/"own_key": [1, {}], "n_layer"/' "$work/usual/config.json" > "$work/relu/config.json"
LC_ALL=C sed 's/"crc32c"/"others"/; s/\\"gelu_new\\"/\\"relu\\"    /' "$work/usual/model.safetensors" > "$work/relu/model.safetensors"
train relu_whole --init "$work/relu/model.safetensors" --steps 8 --save "$work/relu_whole/model"
train relu_first --init "$work/relu/model.safetensors" --steps 8 --save "$work/relu_two/model" --stop-after 3
train relu_second --steps 8 --save "$work/relu_two/model" --resume "$work/relu_two/model"
train relu_named --init "$work/relu_two/model.safetensors" --steps 1 --save "$work/relu_book"
train relu_again --init "$work/relu_book.safetensors" --steps 1 --save "$work/relu_again/model"
train usual_whole --init "$work/usual/model.safetensors" --steps 8 --save "$work/usual_whole/model"
if cmp -s "$work/relu_whole/model.safetensors" "$work/relu_two/model.safetensors" && ! cmp -s "$work/relu_whole/model.safetensors" "$work/usual_whole/model.safetensors"; then pass
else fail "a model with another activation resumes" "$(tail -n 2 "$work/relu_second.log")"; fi
for run in relu_whole relu_two relu_again; do
    if grep -q '"activation_function": "relu"' "$work/$run/config.json" && grep -q '"own_key": \[1, {}\]' "$work/$run/config.json"; then pass
    else fail "config.json of $run" "$(cat "$work/$run/config.json" "$work/$run.log")"; fi
done
if grep -q "config.json unknown keys, kept: own_key" "$work/relu_whole.log"; then pass; else fail "a key that is not known" "$(grep config.json "$work/relu_whole.log")"; fi

# The profile names every operator and adds up to the step.
train profile --steps 8 --profile --dropout 0.1 --recompute
missing=
for row in loader embedding layernorm linear attention dropout lm_head cross-entropy recompute optimizer other; do grep -q "^  $row " "$work/profile.log" || missing="$missing $row"; done
sum=$(grep '"profile"' "$work/profile/metrics.jsonl" | sed 's/.*"share": \([^,}]*\).*/\1/' | awk '{s += $1} END {print s}')
if [ -z "$missing" ] && awk "BEGIN {exit !($sum > 0.999 && $sum < 1.001)}" && grep -q "furthest from its floor: " "$work/profile.log"; then pass
else fail "--profile" "no row:$missing; the shares add up to $sum"; fi

# Recomputing: the same weights and losses, byte for byte, in less memory, and resumed without it.
for precision in fp16 bf16; do
    deep="--layers 4 --steps 6 --precision $precision --dropout 0.1 --accumulation 2"
    train kept $deep --save "$work/kept_$precision"
    train again $deep --save "$work/again_$precision" --recompute
    train again_first $deep --save "$work/again_second_$precision" --recompute --stop-after 3
    train again_second $deep --save "$work/again_second_$precision" --resume "$work/again_second_$precision"
    for run in kept again; do grep '"event": "step"' "$work/$run/metrics.jsonl" | sed 's/.*"loss": *\([^,}]*\).*/\1/' > "$work/$run.losses"; done
    for other in again again_second; do
        if cmp -s "$work/kept_$precision.safetensors" "$work/${other}_$precision.safetensors"; then pass; else fail "--recompute in $precision" "$other has other weights: $(tail -n 2 "$work/$other.log")"; fi
    done
    if [ -s "$work/kept.losses" ] && cmp -s "$work/kept.losses" "$work/again.losses"; then pass; else fail "--recompute in $precision" "other losses"; fi
    bytes() { sed -n 's/.*"activation_bytes": *\([0-9]*\).*/\1/p' "$work/$1/metrics.jsonl"; }
    most() { sed -n 's/^  memory *\([0-9.]*\) MiB at most.*/\1/p' "$work/$1.log"; }
    if [ "$(bytes again)" -lt "$(bytes kept)" ] && awk "BEGIN {exit !($(most again) < $(most kept))}"; then pass
    else fail "--recompute in $precision" "memory: $(most again) MiB, $(most kept) without"; fi
done

# Settings from a file and, when asked, from the environment: flags win over the environment, that over the file.
count() { grep -c "$1" "$2"; }
run_of() { sed -n 's/.*"event": "run".*"precision": "\([a-z0-9]*\)".*/\1/p' "$work/$1/metrics.jsonl"; }
printf 'dtype = fp16\ninit_scale = 1024\nlog_interval = 2\nclip_norm = none\n' > "$work/a.conf"
expect_run() { # NAME PRECISION
    if [ "$(run_of "$1")" = "$2" ]; then pass; else fail "$1" "precision $(run_of "$1"), expected $2: $(tail -n 2 "$work/$1.log")"; fi
}
"$gpt" --layers 2 --heads 2 --channels 32 --batch 4 --seq 32 --sample 0 --eval-batches 2 --data "$work/text" \
    --out "$work/config" --config "$work/a.conf" --steps 6 --save "$work/config_model" --stop-after 4 > "$work/config.log" 2>&1
expect_run config fp16
if [ "$(grep '"event": "step"' "$work/config/metrics.jsonl" | sed 's/.*"step": \([0-9]*\),.*/\1/' | tr '\n' ' ')" = "2 4 " ] &&
    grep -q "first scale 1024" "$work/config.log"; then pass; else fail "--config" "$(cat "$work/config/metrics.jsonl")"; fi
train config_on --resume "$work/config_model" --save "$work/config_model" --steps 6
expect_run config_on fp16
train flag --config "$work/a.conf" --precision bf16 --steps 1
expect_run flag bf16
AMP_DTYPE=fp32 train unasked --config "$work/a.conf" --steps 1
expect_run unasked fp16
AMP_DTYPE=fp32 train asked --config "$work/a.conf" --env --steps 1
expect_run asked fp32
AMP_DTYPE=fp32 train over --env --precision bf16 --steps 1
expect_run over bf16
for conf in max stable debug; do
    if train "$conf" --config examples/$conf.conf --steps 3; then pass; else fail "examples/$conf.conf" "$(tail -n 3 "$work/$conf.log")"; fi
done

# Memory is asked for at its interval alone; --debug tells decisions; times are split; TensorBoard reads its file.
train watched --steps 6 --precision bf16 --log-memory --memory-log-interval 3 --debug --tensorboard "$work/board"
if [ "$(count '"allocated"' "$work/watched/metrics.jsonl")" -eq 2 ] && [ "$(count "^step [36]: memory " "$work/watched.log")" -eq 2 ]; then pass
else fail "--log-memory" "$(grep memory "$work/watched.log")"; fi
if [ "$(count "linear transformer.h.0.attn.c_attn.weight (.*): computes in bf16, returns bf16, by region; cast cache: miss" "$work/watched.log")" -eq 1 ] &&
    ! grep -q "computes in" "$work/bf16.log"; then pass; else fail "--debug" "$(grep -m 3 linear "$work/watched.log")"; fi
if grep '"event": "step"' "$work/watched/metrics.jsonl" | sed 's/[",:{}]/ /g' | awk '{
        for (i = 1; i < NF; i++) {if ($i == "seconds") all = $(i + 1); if ($i ~ /^(data|forward|backward|optimizer)_s$/) {sum += $(i + 1); n += $(i + 1) > 0}}
        if (!(sum > 0 && sum <= all * 1.001 && n == 4)) bad = 1; sum = n = 0} END {exit bad || NR != 6}'; then pass
else fail "time split" "$(grep -m 1 '"event": "step"' "$work/watched/metrics.jsonl")"; fi
python=${PYTHON:-python3}
why=$("$python" tests/torch/oracle/tensorboard_read.py "$work/board" 2>/dev/null > "$work/board.txt" || cat "$work/board.txt")
if [ -n "$why" ] || [ ! -s "$work/board.txt" ]; then skip "TensorBoard reads the event file" "${why:-no $python}"
elif [ "$(count "^train/loss " "$work/board.txt")" -eq 6 ] && [ "$(awk '$1 == "train/loss" && $2 == 6 {printf "%.4f", $3}' "$work/board.txt")" = "$(last loss watched | awk '{printf "%.4f", $1}')" ] &&
    grep -q "^validation/loss 6 " "$work/board.txt" && [ "$(count "^memory/allocated_mib " "$work/board.txt")" -eq 2 ]; then pass
else fail "TensorBoard reads the event file" "$(cat "$work/board.txt")"; fi

# Trouble: a static scale that always overflows.  Skipping goes on; stopping says so, and keeps what was there.
hopeless="--precision fp16 --init-scale 1e30 --static-scale --steps 4"
train skip $hopeless
if [ $? -eq 1 ] && grep -q "no step was applied: all 4 were skipped" "$work/skip.log" && grep -q "skipped *4 of 4" "$work/skip.log" && [ "$(count '"anomaly": "gradients"' "$work/skip/metrics.jsonl")" -eq 4 ]; then pass
else fail "--nan-action skip" "$(tail -n 3 "$work/skip.log")"; fi
train stop $hopeless --nan-action stop
if [ $? -eq 1 ] && grep -q "anomaly at step 1" "$work/stop.log" && [ -s "$work/stop/model.state" ]; then pass
else fail "--nan-action stop" "$(tail -n 3 "$work/stop.log")"; fi

# Recovering: fp16 whose scale cannot shrink begins anew in bf16, and becomes the run that bf16 would have been.
train recover --precision fp16 --init-scale 1e30 --min-scale 1e30 --nan-action recover --steps 8 --save "$work/recover"
train direct --precision bf16 --steps 8 --save "$work/direct"
if grep -q "bf16 from now on" "$work/recover.log" && cmp -s "$work/recover.safetensors" "$work/direct.safetensors" &&
    grep -q '"event": "recovery"' "$work/recover/metrics.jsonl" && [ "$(last dtype recover)" = '"bf16"' ]; then pass
else fail "--nan-action recover" "$(tail -n 3 "$work/recover.log") $(cat "$work/recover/metrics.jsonl")"; fi

# The last records come behind the last step: what they undo is trained again.
train late --precision fp16 --init-scale 1e30 --min-scale 1e30 --nan-action recover --steps 2 --save "$work/late"
train early --precision bf16 --steps 2 --save "$work/early"
if grep -q "bf16 from now on" "$work/late.log" && grep -q "^step 2: saved" "$work/late.log" && cmp -s "$work/late.safetensors" "$work/early.safetensors"; then pass
else fail "recovery behind the last step" "$(tail -n 3 "$work/late.log")"; fi

# A layer in fp32, then bf16 without the scaler: a checkpoint keeps both.  A flag wins over its precision; the layer is in fp32
# then too, so that the next mitigation is bf16.
cured="--precision fp16 --scaler on --init-scale 1e7 --static-scale --nan-action recover"
train cured $cured --steps 8 --save "$work/cured"
train cured_first $cured --steps 8 --save "$work/cured_two" --stop-after 4
train cured_flag --resume "$work/cured_two" --steps 6 --save none --precision fp16 --scaler on
train cured_second --resume "$work/cured_two" --steps 8 --save "$work/cured_two"
cures() { sed -n 's/^step [0-9]*: gradients.*, \(.*\) from now on$/\1;/p' "$work/$1.log" | tr -d '\n'; }
if [ "$(cures cured_first)" = "transformer.wte.* in fp32;bf16;" ] && [ -z "$(cures cured_second)" ] &&
    cmp -s "$work/cured.safetensors" "$work/cured_two.safetensors" && grep -q "^  scaler *no" "$work/cured_second.log"; then pass
else fail "a recovered run resumes" "$(cures cured_first), then $(cures cured_second): $(tail -n 2 "$work/cured_second.log")"; fi
expect_run cured_second bf16
expect_run cured_flag fp16
if [ "$(cures cured_flag)" = "bf16;" ]; then pass; else fail "a recovered run resumes in fp16" "$(cures cured_flag)"; fi

# A full disk: training goes on, and says it.
if [ -e /dev/full ]; then
    if train full --steps 4 --metrics /dev/full --save "$work/full_model" && grep -q "metrics are kept in memory" "$work/full.log" && [ -s "$work/full_model.state" ]; then pass
    else fail "metrics on a full disk" "$(tail -n 3 "$work/full.log")"; fi
fi

mkdir "$work/mixed" "$work/alone" "$work/silent"
cp "$work/relu/model.safetensors" "$work/silent"; grep -v activation_function "$work/relu/config.json" > "$work/silent/config.json"
cp "$work/usual/model.safetensors" "$work/mixed"; cp "$work/relu/config.json" "$work/mixed"
LC_ALL=C sed 's/"crc32c"/"others"/; s/"config"/"konfig"/' "$work/usual/model.safetensors" > "$work/alone/model.safetensors"

# refused TEXT FLAGS...: exit code 2, and the text is said.
refused() {
    text=$1; shift
    "$gpt" $small --out "$work/refused" "$@" > "$work/refused.log" 2>&1
    status=$?
    if [ $status -eq 2 ] && grep -q -- "$text" "$work/refused.log"; then pass; else fail "refused $*" "status $status: $(tail -n 2 "$work/refused.log")"; fi
}
refused "--nonsense" --nonsense 1
refused "--precision" --precision fp7
refused "fp8" --precision fp8_e4m3
refused "fp8_scaling = tensor" --precision fp8 --fp8-scaling tensor
refused "--heads" --heads 5 --channels 32
refused "the model in the file has heads = 2" --init "$work/usual/model.safetensors" --heads 4
refused "the model in the file has channels = 32" --init "$work/usual/model.safetensors" --channels 64
refused "model.safetensors was saved with activation_function = gelu_new" --init "$work/mixed/model.safetensors"
refused "no activation_function: .*model.safetensors was saved with \"relu\"" --init "$work/silent/model.safetensors"
refused "no config.json beside it" --init "$work/alone/model.safetensors"
refused "--batch" --batch 0
refused '"foo" is not a tensor' --activations bf16,foo=bf16
refused '"bf17" is not one of' --activations auto,stream=bf17
refused "stream is named twice" --activations stream=bf16,stream=fp16
refused "two dtypes for all" --activations auto,bf16
refused "one of: auto fp32 fp16 bf16" --activations ""
refused "--lr" --lr fast
refused "--steps" --steps
refused "/nonexistent" --data /nonexistent
refused "--workers" --workers 65
refused "--prefetch" --prefetch 0
refused "--pin" --pin maybe
refused "--timeout" --timeout 0
refused "takes two files" --tokenizer one.json
refused "the model's tokens are not text" --prompt "Once" --vocab 300 --sample 4
refused "contradicts --schedule constant" --schedule constant --min-lr 1e-4
refused "contradicts --save none" --save none --save-interval 5
refused "contradicts --workers 0" --workers 0 --prefetch 4
refused "is for --nan-action recover" --batch-growth-interval 4
refused "contradicts --sample 0" --sample 0 --temperature 0.5
refused "contradicts --sample 0" --sample 0 --top-k 5
if train scaleless --steps 1 --precision bf16 --init-scale 8 --growth-interval 2 &&
   grep -q "scaler *no, so these flags have no effect: --init-scale, --growth-interval$" "$work/scaleless.log"; then pass
else fail "flags of a scaler where there is none are told" "$(grep scaler "$work/scaleless.log")"; fi
refused "/nonexistent" --tokenizer /nonexistent tests/torch/golden/tokenizer_merges.txt
refused "README.md: byte 0" --tokenizer README.md tests/torch/golden/tokenizer_merges.txt
refused "README.md: line 1" --tokenizer tests/torch/golden/tokenizer_vocab.json README.md
refused "--tokenizer" --vocab 99 $bpe
refused "set level O2 or O3" --masters remainder --level O1
refused "has none" --masters fp32 --level O3 --precision bf16
refused "is for bf16 weights" --masters remainder --level O2 --precision fp16
refused "--moments" --moments fp16
printf 'dtype = bf16\nlog_interval = often\n' > "$work/bad.conf"
refused "bad.conf: line 2: .log_interval = often" --config "$work/bad.conf"
printf 'dtype bf16\n' > "$work/bad.conf"
refused "bad.conf: line 1 is neither" --config "$work/bad.conf"
printf 'dtyp = bf16\n' > "$work/bad.conf"
refused "the nearest is .dtype" --config "$work/bad.conf"
printf 'mode = inference\n' > "$work/bad.conf"
refused "this program trains" --config "$work/bad.conf"
refused "/nonexistent" --config /nonexistent
refused "level = O0 and dtype = bf16" --level O0 --precision bf16
refused "contradicts --debug" --graph --debug --device cpu
refused "/dev/null" --tensorboard /dev/null/board
AMP_DTYPE=fp7 refused "AMP_DTYPE" --env
export AMP_"DTIPE"=fp16; refused "AMP_DTYPE" --env; unset AMP_"DTIPE"
refused "--nan-action" --nan-action panic
refused "--memory-log-interval" --memory-log-interval 0
refused "growth" --scaler on --precision fp16 --growth-factor 0.5

# No steps: the model of --init under another name.
train as_it_is --init "$work/usual/model.safetensors" --steps 0 --save "$work/as_it_is/model"
weights() { tail -c 20000 "$1/model.safetensors" | cksum; }
if [ "$(weights "$work/usual")" = "$(weights "$work/as_it_is")" ] && cmp -s "$work/usual/config.json" "$work/as_it_is/config.json"; then pass
else fail "--steps 0" "$(tail -n 2 "$work/as_it_is.log")"; fi

# Other data is refused on resume.
train small_run --steps 2 --save "$work/mine"
sed 's/a/b/g' "$work/text" > "$work/other"
if "$gpt" $small --out "$work/r" --resume "$work/mine" --data "$work/other" --steps 4 > "$work/r.log" 2>&1; then fail "other data" "accepted on resume"; else pass; fi

sweep="build/sweep --data $work/text --layers 1 --heads 2 --channels 32 --seq 32 --steps 2 --eval-batches 1 --lrs 1e-3 --batches 4"

# Settings come through a pipe; data does not, and is refused at once.
printf 'dtype = fp16\n' | train piped --config /dev/stdin --steps 1
expect_run piped fp16
mkfifo "$work/fifo"
refused "must be a regular file" --data "$work/fifo"
refused "must be a regular file" --data "$work/fif*"
refused "Not a directory" --save "$work/text/model"

# Nothing waits for ever where a signal is not heard: the first one ends a run that has not begun.
"$gpt" $small --out "$work/waits" --config "$work/fifo" > "$work/waits.log" 2>&1 &
pid=$!
sleep 1; kill -TERM $pid; wait $pid
status=$?
if [ $status -eq 143 ]; then pass; else fail "SIGTERM before the run" "status $status"; fi

# Without standard descriptors: what is printed lands in no file.
"$gpt" $small --out "$work/closed" --steps 2 --save "$work/closed_model" --tensorboard "$work/closed_board" <&- >&- 2>&-
status=$?
train open --steps 2 --save "$work/open_model" --tensorboard "$work/open_board"
if [ $status -eq 0 ] && [ -s "$work/closed/metrics.jsonl" ] && ! grep -qv '^{.*}$' "$work/closed/metrics.jsonl" &&
    cmp -s "$work/closed_model.safetensors" "$work/open_model.safetensors" &&
    [ "$(grep -c . "$work/closed/metrics.jsonl")" = "$(grep -c . "$work/open/metrics.jsonl")" ] &&
    ! grep -q "parameters" "$work"/closed_board/*; then pass
else fail "closed descriptors" "status $status, $(grep -v '^{.*}$' "$work/closed/metrics.jsonl" | head -n 2)"; fi
$sweep --precisions fp32 --out "$work/closed.jsonl" <&- >&- 2>&-
status=$?
if [ $status -eq 0 ] && [ "$(grep -c '^{.*}$' "$work/closed.jsonl")" = "$(grep -c . "$work/closed.jsonl")" ]; then pass
else fail "closed descriptors of sweep" "status $status, $(head -n 3 "$work/closed.jsonl")"; fi

# What cannot be printed is an error of every program.
for program in before after momentum; do
    ${CC:-gcc} -O1 -DAMP_IMPLEMENTATION_INCLUDED examples/adopt/$program.c build/amp.o -o "$work/$program" -lm -lpthread || fail "examples/adopt/$program.c" "does not build"
done
if [ -w /dev/full ]; then
    for run in "$gpt $small --out $work/lost --steps 1" "$gpt --help" "build/train_classifier --help" "build/amp_check --help" \
        "build/amp_bench --device cpu --threads 1 --layers 1 --channels 32 --heads 2 --vocab 64 --batch 2 --seq 32 --iterations 1 --warmup 1 --json $work/lost.json" \
        "$sweep --precisions fp32 --out $work/lost.jsonl" "build/scaler_only 20" "build/data_parallel 2" "$work/before 1 1" "$work/after 1 1" "$work/momentum 20"; do
        $run > /dev/full 2> "$work/lost.log"
        status=$?
        if [ $status -eq 1 ] && $run > "$work/lost.log" 2>&1; then pass; else fail "output to a full disk" "$run: status $status, $(tail -n 2 "$work/lost.log")"; fi
    done
else skip "output to a full disk" "no /dev/full"; fi
silent=$(grep -L 'ex_begin();\|ferror(stdout)' $(grep -l '^int main' examples/*.c examples/*/*.c))
if [ -z "$silent" ]; then pass; else fail "output to a full disk" "nothing is looked at in $silent"; fi

# A limit on the size of files is a full disk, no signal; nothing is left of the file that was too long.
(ulimit -f 40 && train limited --steps 2 --save "$work/limited_model" --channels 64)
status=$?
if [ $status -eq 1 ] && grep -q "limit on file sizes" "$work/limited.log" && ! ls "$work"/limited_model.*tmp* > /dev/null 2>&1; then pass
else fail "a limit on file sizes" "status $status, $(tail -n 2 "$work/limited.log")"; fi

# begun RUN: waits until its first step is recorded.
begun() { for _ in $(seq 200); do if grep -qs '"event": "step"' "$work/$1/metrics.jsonl"; then return; fi; sleep 0.1; done; }

# A terminal that is closed: saves and stops, but for runs that nohup shields.
"$gpt" $small --out "$work/hup" --steps 100000 --save "$work/hup_model" > "$work/hup.log" 2>&1 &
pid=$!
begun hup; kill -HUP $pid; wait $pid
status=$?
ignored=$(sed -n 's/^SigIgn:.*\(.\)$/\1/p' /proc/self/status 2> /dev/null)      # its lowest bit is SIGHUP
case $ignored in [13579bdf]) shielded=1 ;; *) shielded= ;; esac
if [ -n "$shielded" ]; then skip "SIGHUP" "the tests themselves run under nohup"
elif [ $status -eq 130 ] && [ -s "$work/hup_model.safetensors" ] && [ -s "$work/hup_model.state" ]; then pass
else fail "SIGHUP" "status $status, $(tail -n 2 "$work/hup.log")"; fi
nohup "$gpt" $small --out "$work/nohup" --steps 100000 --save "$work/nohup_model" > "$work/nohup.log" 2>&1 &
pid=$!
begun nohup; kill -HUP $pid; sleep 1
if kill -0 $pid 2> /dev/null; then pass; else fail "nohup" "$(tail -n 2 "$work/nohup.log")"; fi
kill -TERM $pid; wait $pid
status=$?
if [ $status -eq 75 ] && [ -s "$work/nohup_model.state" ]; then pass; else fail "SIGTERM" "status $status, $(tail -n 2 "$work/nohup.log")"; fi

# Ctrl-C saves and stops.
"$gpt" $small --out "$work/int" --steps 100000 --save "$work/int_model" > "$work/int.log" 2>&1 &
pid=$!
begun int; kill -INT $pid; wait $pid
status=$?
if [ $status -eq 130 ] && [ -s "$work/int_model.safetensors" ] && [ -s "$work/int_model.state" ]; then pass
else fail "Ctrl-C" "status $status, $(tail -n 2 "$work/int.log")"; fi

# What killed saves of this machine left is removed; what another machine, or a process that lives, may still write is not.
sh -c 'exit 0' & ended=$!; wait $ended
random=0123456789abcdef host=$(uname -n | cut -c 1-31)
for left in $ended "$ended@$host-$random" "$ended@another-$random" "$ended@another-$host-$random" "$$@$host-$random" "$ended@$host-mine"; do : > "$work/left.state.tmp$left"; done
train left --steps 1 --save "$work/left"
set -- "$work"/left.state.tmp*
if [ $# -eq 4 ] && [ ! -e "$work/left.state.tmp$ended" ] && [ ! -e "$work/left.state.tmp$ended@$host-$random" ]; then pass
else fail "what killed saves left" "$(cd "$work" && echo left.*)"; fi

# The progress line in a log file has no carriage returns.
if tr -d '\n' < "$work/fp32.log" | grep -q "$(printf '\r')"; then fail "log file" "carriage returns"; else pass; fi

# What came to nothing is said at the end: no step of the classifier's applied, a record of the sweep's not written.
if build/train_classifier --out "$work/nothing" --threads 1 --epochs 1 --precision fp16 --init-scale 1e30 > "$work/nothing.log" 2>&1; then
    fail "no step applied" "ended with success"
elif grep -q "no step was applied" "$work/nothing.log"; then pass
else fail "no step applied" "$(tail -n 2 "$work/nothing.log")"; fi
if $sweep --precisions fp16,bf16,fp16 --out "$work/twice.jsonl" > "$work/twice.log" 2>&1; then fail "fp16 twice" "accepted"
elif grep -q "fp16 is named twice" "$work/twice.log"; then pass; else fail "fp16 twice" "$(tail -n 2 "$work/twice.log")"; fi
if [ -c /dev/full ]; then
    $sweep --precisions fp32,bf16 --out /dev/full > "$work/lost.log" 2>&1
    if grep -q "2 of them have no record" "$work/lost.log"; then pass; else fail "lost records" "$(tail -n 2 "$work/lost.log")"; fi
fi

if "$work/momentum" > "$work/momentum.log" 2>&1 &&
    grep -q 'scale 2^24 -> 2^23' "$work/momentum.log" && tail -n 1 "$work/momentum.log" | grep -q 'bit for bit those without a scale'; then pass
else fail momentum "$(tail -n 3 "$work/momentum.log")"; fi
if build/scaler_only > "$work/scaler.log" 2>&1 && grep -q skipped "$work/scaler.log"; then pass; else fail scaler_only "$(tail -n 3 "$work/scaler.log")"; fi
if [ "$(build/data_parallel 3 | tail -n 1)" = "all ranks hold the same weights" ]; then pass; else fail data_parallel "$(build/data_parallel 3 2>&1)"; fi
if build/regression bf16 > "$work/regression.log" 2>&1 && awk '/^step 2501/ {exit !($7 < 0.005)}' FS='[ ,]+' "$work/regression.log"; then pass; else fail regression "$(tail -n 3 "$work/regression.log")"; fi
if (build=$PWD/build; cd "$work" && "$build/llama" "$build/../README.md" fp32 3 > llama.log 2>&1 &&
    "$build/llama" out/llama/model.safetensors fp32 > again.log 2>&1) &&
    sed '/^step/d' "$work/llama.log" | cmp -s - "$work/again.log" && grep -q '^step 3: validation loss [45]' "$work/llama.log"; then pass
else fail llama "$(head -n 4 "$work/llama.log" "$work/again.log")"; fi
# What it saves says what its tokens are, and a tokenizer of another order is refused.
if grep -q '"a": 97, "b": 98' "$work/out/llama/tokenizer.json" && sed -i 's/"a": 97, "b": 98/"b": 97, "a": 98/' "$work/out/llama/tokenizer.json" &&
    ! build/llama "$work/out/llama" fp32 > "$work/order.log" 2>&1 && grep -q "whose tokens are bytes" "$work/order.log"; then pass
else fail "llama's tokenizer" "$(tail -n 2 "$work/order.log")"; fi
# A Llama: learns in every precision, resumes and recomputes bit for bit, begins from its own file, and refuses what it lacks.
for precision in fp32 tf32 fp16 bf16 fp8; do
    if train "llama_$precision" --model llama-s --steps 40 --precision $precision --fp8-blocks all --save "$work/llama_$precision/model"; then
        first=$(grep '"loss"' "$work/llama_$precision/metrics.jsonl" | head -n 1 | sed 's/.*"loss": *\([^,}]*\).*/\1/')
        end=$(last loss "llama_$precision")
        if awk "BEGIN {exit !($end < $first - 0.5)}"; then pass; else fail "llama-s in $precision learns" "loss $first, then $end"; fi
    else fail "llama-s in $precision" "$(tail -n 3 "$work/llama_$precision.log")"; fi
done
if train llama_half --model llama-s --steps 10 --precision fp16 --save "$work/llama_half/model" &&
    "$gpt" --resume "$work/llama_half/model" --steps 20 --out "$work/llama_on" --save "$work/llama_on/model" > "$work/llama_on.log" 2>&1 &&
    train llama_whole --model llama-s --steps 20 --precision fp16 --recompute --save "$work/llama_whole/model" &&
    cmp -s "$work/llama_on/model.safetensors" "$work/llama_whole/model.safetensors"; then pass; else fail "llama-s resumes" "$(tail -n 3 "$work/llama_on.log")"; fi
if train llama_init --init "$work/llama_fp32/model.safetensors" --steps 2 && grep -q 'model *Llama, 2 layers' "$work/llama_init.log" &&
    build/llama "$work/llama_fp32/model.safetensors" fp32 > /dev/null 2>&1; then pass; else fail "llama-s as --init" "$(tail -n 3 "$work/llama_init.log")"; fi
refused "a Llama has no dropout" --model llama-s --dropout 0.1
refused "operations and bytes, and this is a Llama" --model llama-s --profile
refused "only the stream of a Llama can have" --model llama-s --activations norm=fp32
refused "evenly by two" --model llama-s --heads 3
refused "the model in the file is a Llama" --model d6 --init "$work/llama_fp32/model.safetensors"

# quickstart, whole; then killed after a checkpoint, and gone on from that: the same last lines.
(build=$PWD/build; cd "$work" && "$build/quickstart" /nonexistent > quick.log 2>&1; rm -f quickstart.state
    "$build/quickstart" /nonexistent > cut.log 2>&1 & killed=$!
    while [ ! -e quickstart.state ] && kill -0 $killed 2>/dev/null; do sleep 0.05; done
    kill -9 $killed; wait $killed 2>/dev/null
    "$build/quickstart" /nonexistent quickstart.state > on.log 2>&1)
if grep -q SYNTHETIC "$work/quick.log" && [ "$(grep -c '^step' "$work/quick.log")" = 8 ] && [ "$(grep -c '^step' "$work/on.log")" -gt 0 ] &&
    grep '^step' "$work/quick.log" | tail -n "$(grep -c '^step' "$work/on.log")" > "$work/last" && grep '^step' "$work/on.log" | cmp -s - "$work/last"; then pass
else fail quickstart "$(tail -n 3 "$work/quick.log" "$work/on.log")"; fi
if (build=$PWD/build; cd "$work" && "$build/mlp" > mlp.log 2>&1) && [ "$(wc -l < "$work/mlp.log")" -eq 3 ] &&
    awk '/^step 1500/ {exit !($NF < 0.3)}' "$work/mlp.log"; then pass; else fail mlp "$(tail -n 3 "$work/mlp.log")"; fi

# safetensors.h and the tokenizers stand alone: copied into an empty folder, they compile as C and as C++ with nothing of
# amp.h's, and the program in safetensors.h's head writes a file and reads it back.
mkdir -p "$work/alone_headers"
cp examples/safetensors.h examples/bpe.h examples/wordpiece.h "$work/alone_headers"
cat > "$work/alone_headers/use.c" << 'end'
#include "bpe.h"
#include "wordpiece.h"
int main(void) {
    const float values[6] = {1, -2.5f, 3e-40f, 4, 5, 6};
    const int64_t shape[2] = {2, 3};
    float back[6];
    st_writer w;
    st_file file;
    memset(&w, 0, sizeof w);
    st_write_text(&w, "format", "pt");
    st_write_checksum(&w);
    st_write_tensor(&w, "w", 2, shape);
    if (st_write_begin(&w) != ST_OK) return 1;
    st_write_floats(&w, values, 6);
    if (st_write_end(&w) != ST_OK || st_open(&file, w.file, w.bytes) != ST_OK || file.n != 1) return 2;
    if (st_find(&file, "w") == NULL || st_floats(st_find(&file, "w"), back) != ST_OK || memcmp(values, back, sizeof back) != 0) return 3;
    st_close(&file);
    w.file[w.bytes - 1] ^= 1;
    if (st_open(&file, w.file, w.bytes) != ST_ERR_CHECKSUM || strstr(st_error(), "damaged") == NULL) return 4;
    st_write_close(&w);
    return 0;
}
end
for lang in "${CC:-gcc} -std=c99" "g++ -std=c++11 -x c++" "g++ -std=c++17 -x c++"; do
    have "${lang%% *}" || { skip "headers that stand alone" "no ${lang%% *}"; continue; }
    check "headers that stand alone: $lang" $lang -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror "$work/alone_headers/use.c" -o "$work/alone_headers/use"
    if "$work/alone_headers/use"; then pass; else fail "headers that stand alone: $lang" "status $?"; fi
done

# examples/README.md: every example with its lines, and with the line that builds it as its own head has it.
sed -n 's/^| \[\([a-z_]*\.\(c\|cpp\|cu\)\)\]([a-z_.]*) | \([0-9]*\) | .* | `\(.*\)` |$/\1 \3 \4/p' examples/README.md > "$work/listed"
if [ "$(wc -l < "$work/listed")" -ge 15 ]; then pass; else fail "examples/README.md" "lists $(wc -l < "$work/listed") examples"; fi
while read -r file lines build; do
    if [ "$(wc -l < "examples/$file")" -eq "$lines" ]; then pass; else fail "examples/README.md" "$file has $(wc -l < "examples/$file") lines, not $lines"; fi
    if sed -n 1,12p "examples/$file" | grep -qF "$build"; then pass; else fail "examples/README.md" "the head of $file has no: $build"; fi
done < "$work/listed"
for file in examples/*.c examples/*.cpp examples/*.cu; do
    if grep -q "(${file#examples/})" examples/README.md; then pass; else fail "examples/README.md" "does not name $file"; fi
done
if [ "$(wc -l < examples/gpt.c)" -le 250 ]; then pass; else fail "gpt.c" "$(wc -l < examples/gpt.c) lines, at most 250"; fi
if [ "$(wc -l < examples/train_gpt.c)" -lt 900 ]; then pass; else fail "train_gpt.c" "$(wc -l < examples/train_gpt.c) lines, must be below 900"; fi

# What they do: learn in every precision, to what the precision allows.
for precision in fp32 fp16 bf16; do
    if build/sgemm $precision > "$work/sgemm.log" 2>&1 && awk '{exit !($0 ~ /largest difference/ && $(NF - 3) + 0 < 0.05)}' "$work/sgemm.log"; then pass; else fail "sgemm $precision" "$(cat "$work/sgemm.log")"; fi
    if build/convnet $precision > "$work/convnet.log" 2>&1 && awk '/has not seen/ {exit !($2 + 0 > 90)}' "$work/convnet.log"; then pass; else fail "convnet $precision" "$(tail -n 2 "$work/convnet.log")"; fi
    if build/lora $precision > "$work/lora.log" 2>&1 && grep -q "the base has not moved" "$work/lora.log" &&
        awk '/adapters/ {sub(/.*loss /, ""); exit !($0 + 0 < 0.3)}' "$work/lora.log"; then pass; else fail "lora $precision" "$(tail -n 2 "$work/lora.log")"; fi
done
# whole_program in each precision, and once more from its checkpoint, with a lower loss on what it has not seen.
whole() {
    (build=$PWD/build; cd "$work" && "$build/whole_program" "$@" > whole.log 2>&1) || return 1
    seen=$(awk '/^step/ {printf "%s ", $6}' "$work/whole.log")
    echo "$seen" | awk '{exit !(NF == 3 && $1 < 0.3 && $2 < $1 && $3 < $2)}'
}
for precision in fp32 tf32 bf16 fp16; do
    if whole $precision; then pass; else fail "whole_program in $precision" "$(cat "$work/whole.log")"; fi
done
fresh=${seen%% *}
if { whole fp16 program.state || true; } && echo "$fresh $seen" | awk '{exit !(NF == 4 && $2 < 0.8 * $1)}'; then pass; else fail "whole_program resumes" "$fresh at first, then $(cat "$work/whole.log")"; fi
# A text that never changes, as what 60 steps learn depends on it.
tar -xzOf tests/frozen/examples-0.2.0.tar.gz | head -c 120000 > "$work/frozen_text"
if build/gpt "$work/frozen_text" fp16 60 > "$work/gpt_c.log" 2>&1 && awk '/^step 60/ {exit !($4 + 0 < 3.5)}' "$work/gpt_c.log" && [ "$(wc -c < "$work/gpt_c.log")" -gt 300 ]; then pass; else fail gpt.c "$(head -n 3 "$work/gpt_c.log")"; fi
awk 'BEGIN {srand(2); print "a,b,c,class"; for (i = 0; i < 1000; i++) {a = rand(); b = rand(); c = 100 * rand(); printf "%f,%f,%f,%d\n", a, b, c, (a > b) + 2 * (c > 50)}}' > "$work/data.csv"
if build/csv "$work/data.csv" bf16 > "$work/csv.log" 2>&1 && awk '/has not seen/ {exit !($2 + 0 > 90)}' "$work/csv.log"; then pass; else fail csv "$(tail -n 2 "$work/csv.log")"; fi
printf '1,2,0\n1,x,1\n' > "$work/bad.csv"
build/csv "$work/bad.csv" > "$work/csv.log" 2>&1; status=$?
if [ $status -eq 2 ] && grep -q "bad.csv: line 2: must be numbers" "$work/csv.log"; then pass; else fail "csv, a bad line" "status $status: $(cat "$work/csv.log")"; fi
awk 'BEGIN {srand(1); split("good moving clever superb funny", g, " "); split("dull boring clumsy awful flat", b, " ")
    for (i = 0; i < 500; i++) {k = rand() < 0.5; w = int(5 * rand()) + 1; printf "%d\tthe plot was %s\n", k, k ? g[w] : b[w]}}' > "$work/texts.tsv"
if (build=$PWD/build; cd "$work" && "$build/finetune" texts.tsv > tune.log 2>&1 && mv out/finetune bert && "$build/finetune" texts.tsv bert > again.log 2>&1) &&
    awk '/^epoch 3/ {exit !($NF + 0 > 90)}' "$work/tune.log" && awk '/^epoch 1/ {exit !($NF + 0 > 90)}' "$work/again.log"; then pass
else fail finetune "$(tail -n 2 "$work/tune.log" "$work/again.log")"; fi
# Lines are numbered as an editor numbers them, and a text is never cut in silence.
printf '1\tgood\r\n\nx\tbad\n' > "$work/odd.tsv"
printf '1\tgood\n\0001\tbad\n' > "$work/zero.tsv"
said=$(build/finetune "$work/odd.tsv" 2>&1; build/finetune "$work/zero.tsv" 2>&1)
case $said in *"odd.tsv: line 3 is not"*"zero.tsv: has a byte 0"*) pass;; *) fail "finetune, bad lines" "$said";; esac
# Two ranks that combine every 4 steps go on from step 6 as if they had not stopped, each from its own state; one alone
# does from step 4, where both are alike, and from step 6 is refused.
head -c 100000 amp.h > "$work/rank_text"
rank_flags="--layers 2 --heads 2 --channels 32 --seq 32 --eval-batches 2 --data $work/rank_text --precision fp32 --batch 4 --steps 12 --sync-every 4"
ranks_of_two() {
    name=$1; shift
    rm -f "$work/meet"
    RANK=1 WORLD_SIZE=2 "$gpt" --rank-file "$work/meet" --rank-timeout 20 --threads 1 --sample 0 --out "$work/$name" "$@" > "$work/$name.1.log" 2>&1 &
    second=$!
    RANK=0 WORLD_SIZE=2 "$gpt" --rank-file "$work/meet" --rank-timeout 20 --threads 1 --sample 0 --out "$work/$name" "$@" > "$work/$name.log" 2>&1
    first=$?
    wait $second && [ $first -eq 0 ]
}
if [ -x "$gpt" ]; then
    if ranks_of_two whole_period $rank_flags && ranks_of_two in_period $rank_flags --stop-after 6 && grep -q "stopped at step 6" "$work/in_period.log"; then pass
    else fail "ranks stop between two combinations" "$(tail -n 2 "$work/in_period.log" "$work/in_period.1.log")"; fi
    if "$gpt" --threads 1 --sample 0 --out "$work/alone" --resume "$work/in_period/model" > "$work/alone.log" 2>&1; then
        fail "one rank from between two combinations" "it trains"
    elif grep -q "2 ranks saved it at step 6, between two combinations, and this run has 1: start 2 ranks" "$work/alone.log"; then pass
    else fail "one rank from between two combinations" "$(tail -n 2 "$work/alone.log")"; fi
    if ranks_of_two in_period --resume "$work/in_period/model" && cmp -s "$work/in_period/model.safetensors" "$work/whole_period/model.safetensors"; then pass
    else fail "ranks go on from between two combinations" "$(tail -n 2 "$work/in_period.log" "$work/in_period.1.log")"; fi
    if ranks_of_two at_period $rank_flags --stop-after 4 && "$gpt" --threads 1 --sample 0 --out "$work/alone" --resume "$work/at_period/model" > "$work/alone.log" 2>&1; then pass
    else fail "one rank from a combination" "$(tail -n 2 "$work/alone.log" "$work/at_period.log")"; fi
else skip "ranks of train_gpt" "build/train_gpt is not built"; fi

# What generate.c writes with its keys and values kept is what train_gpt writes without.
train writes --steps 30 --precision fp32 --save "$work/writes/model"
"$gpt" $small --sample 28 --out "$work/wrote" --save none --init "$work/writes/model.safetensors" --steps 0 --precision fp32 --temperature 0 --prompt "the " > "$work/wrote.log" 2>&1
sed '1,/^Sample/d' "$work/wrote.log" > "$work/sampled.log"
AMP_DTYPE=fp32 build/generate "$work/writes/model.safetensors" "the " 28 0 > "$work/generated.log" 2>&1
if [ -s "$work/sampled.log" ] && cmp -s "$work/sampled.log" "$work/generated.log"; then pass; else fail generate "$(head -c 100 "$work/generated.log"), without kept keys: $(head -c 100 "$work/sampled.log")"; fi
# What its arguments may not be is said with the argument's name, before a file is read.
odd_argument() {
    text=$1; shift
    build/generate none "$@" > "$work/odd.log" 2>&1
    status=$?
    if [ $status -eq 2 ] && grep -qF -- "$text" "$work/odd.log"; then pass; else fail "generate $*" "status $status, must say $text: $(head -n 2 "$work/odd.log")"; fi
}
for temperature in NaN -1 inf 1e9 0.8x ''; do odd_argument "temperature: \"$temperature\" must be" "the " 5 "$temperature"; done
for tokens in 9223372036854775808 0 -3 1e3 five; do odd_argument "tokens: \"$tokens\" must be" "the " "$tokens"; done

# C++: with RAII; CUDA: on the model GPU, where it has been built.  The C of whole_program.c is C++20, too.
if have g++; then
    check "whole_program.c as C++20" g++ -x c++ -std=c++20 -DAMP_IMPLEMENTATION_INCLUDED -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror -Wno-missing-field-initializers -fsyntax-only examples/whole_program.c
    check "mlp.cpp" g++ -std=c++17 -O1 -Wall -Wextra -Werror examples/mlp.cpp build/amp.o -o "$work/mlp_cpp" -lpthread
    if "$work/mlp_cpp" > "$work/mlp_cpp.log" 2>&1 && awk '/^step 1500/ {exit !($NF < 0.3)}' "$work/mlp_cpp.log"; then pass; else fail mlp.cpp "$(tail -n 2 "$work/mlp_cpp.log")"; fi
else skip mlp.cpp "no g++"; fi
closing
