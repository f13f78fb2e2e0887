#!/bin/sh
# tools.sh - tests amp_check and amp_bench at small sizes.  Their output must be complete and its sums correct.  Their exit
# codes must say what they found, and their JSON must be valid.  They must reject bad flags with a message that names the
# flag.
. tests/lib.sh
check_bin="$PWD/build/amp_check" bench_bin="$PWD/build/amp_bench"
small="--device cpu --quick --size 128 --copies 1 --seconds 0.3 --batch 2 --seq 64 --channels 128"
tiny="--device cpu --threads 1 --layers 2 --channels 32 --heads 2 --vocab 64 --batch 2 --seq 32 --iterations 3 --warmup 1"

# valid NAME FILE: JSON, as far as this machine can tell: by Python, or at least balanced outside of strings.
valid() {
    if have python3 && python3 -c 'import json' 2>/dev/null; then
        if python3 -m json.tool "$2" > /dev/null 2> "$work/json.log"; then pass; else fail "$1" "$(tail -n 1 "$work/json.log")"; fi
    elif sed 's/\\.//g; s/"[^"]*"//g' "$2" | awk '{for (i = 1; i <= length($0); i++) {c = substr($0, i, 1); d += (c == "{" || c == "["); d -= (c == "}" || c == "]"); if (d < 0) exit 1}} END {exit d != 0}'; then pass
    else fail "$1" "brackets do not match"; fi
}

# ---- amp_check: the exit code says whether a line says FAIL.
agrees() {
    if grep -q '^  FAIL ' "$work/$1.log"; then wanted=1; else wanted=0; fi
    if [ "$2" -eq $wanted ]; then pass; else fail "$1" "exit code $2, but $(grep -c '^  FAIL ' "$work/$1.log") lines say FAIL"; fi
}
"$check_bin" $small > "$work/check.log" 2>&1; agrees check $?
for name in fp32 tf32 fp16 bf16; do
    if grep -qE "^  $name +(native|emulated) +[0-9.]+ +[0-9.]+ +([0-9.]+%|-) +[0-9.]+  " "$work/check.log"; then pass
    else fail "amp_check: row of $name" "$(grep "^  $name" "$work/check.log")"; fi
done
for name in "autocast fp16" "autocast bf16" "loss scaler" "numerics tf32" "numerics fp16" "numerics bf16" "training"; do
    if grep -q "^  PASS      $name " "$work/check.log"; then pass; else fail "amp_check: $name" "$(grep "$name" "$work/check.log")"; fi
done
for name in "fast precision" "pinned copies" "loader" "utilisation"; do
    if grep -qE "^  (PASS|FAIL|n/a) +$name " "$work/check.log"; then pass; else fail "amp_check: $name" "no such line"; fi
done
# The rates that it prints; a line that amp_open refuses would be a FAIL.
if grep -qE '^  rates = .* fp16 [0-9.]+, .* bf16 [0-9.]+' "$work/check.log" && ! grep -q "^  FAIL  *rates" "$work/check.log"; then pass
else fail "amp_check: rates" "$(grep rates "$work/check.log")"; fi
if grep -q "^  dtype: " "$work/check.log"; then pass; else fail "amp_check recommends" "$(tail -n 5 "$work/check.log")"; fi

# A line that fails, because nothing uses a device twice over.
"$check_bin" $small --min-utilisation 2 > "$work/busy.log" 2>&1; status=$?
agrees busy $status
if grep -q "^  n/a  *utilisation" "$work/busy.log"; then skip "amp_check: utilisation" "the CPU's is not known"
elif grep -q "^  FAIL  *utilisation .* below 200%" "$work/busy.log" && [ $status -eq 1 ]; then pass
else fail "amp_check --min-utilisation 2" "exit code $status: $(grep utilisation "$work/busy.log")"; fi

# Without a folder for its tokens: a line fails, and the rest is there.
TMPDIR="$work/nowhere" "$check_bin" $small > "$work/folder.log" 2>&1; status=$?
if [ $status -eq 1 ] && grep -q "^  FAIL  *loader .*nowhere" "$work/folder.log" && grep -q "^  PASS  *loss scaler" "$work/folder.log"; then pass
else fail "amp_check without a temporary folder" "exit code $status: $(grep loader "$work/folder.log")"; fi

"$check_bin" $small --json > "$work/check.json" 2> "$work/check.err"; status=$?
valid "amp_check --json" "$work/check.json"
said=$(sed 's/.*"failed": \([0-9]*\).*/\1/' "$work/check.json")
if { [ "$said" -gt 0 ] && [ $status -eq 1 ]; } || { [ "$said" = 0 ] && [ $status -eq 0 ]; }; then pass; else fail "amp_check --json" "exit code $status, failed: $said"; fi
missing=
for key in version compiler product_size loader_tokens_per_s training_tokens_per_s wait_share utilisation status precisions \
    gemm_gflops cast_gb_per_s rates disturbed checks verdict recommendations cpu device backend memory; do grep -q "\"$key\":" "$work/check.json" || missing="$missing $key"; done
if [ -z "$missing" ]; then pass; else fail "amp_check --json" "no$missing"; fi
lines=$(grep -cE '^  (PASS|FAIL|n/a) ' "$work/check.log")
if [ "$(grep -o '"verdict"' "$work/check.json" | wc -l)" -eq "$lines" ]; then pass; else fail "amp_check --json" "not the $lines lines of the text"; fi

# ---- amp_bench --precision: every precision in every table, and memory that adds up.
"$bench_bin" --precision $tiny --json "$work/precision.json" > "$work/precision.log" 2>&1; status=$?
if [ $status -eq 0 ]; then pass; else fail "amp_bench --precision" "exit code $status: $(tail -n 2 "$work/precision.log")"; fi
valid "amp_bench --precision" "$work/precision.json"
for model in encoder decoder; do for pass_name in forward step; do for precision in fp32 tf32 fp16 bf16; do
    if [ "$(grep "\"model\": \"$model\"" "$work/precision.json" | grep "\"pass\": \"$pass_name\"" | grep -c "\"precision\": \"$precision\"")" -eq 1 ]; then pass
    else fail "amp_bench --precision" "no row of $model, $pass_name, $precision"; fi
done; done; done

# At level O1 gradients are as large as weights, AdamW keeps two moments (and a little for itself), forward has neither;
# activations and the workspace are there, and the parts are all of it.
wrong=$(grep '"event": "precision"' "$work/precision.json" | awk '
    function value(key) {if (!match($0, "\"" key "\": [-0-9.e]+")) return "none"; return substr($0, RSTART + length(key) + 4, RLENGTH - length(key) - 4) + 0}
    {w = value("weights"); g = value("gradients"); o = value("optimizer"); a = value("activations"); c = value("cast cache"); s = value("workspace")
     forward = /"pass": "forward"/
     if (w + g + o + a + c + s != value("bytes")) print "line " NR ": the parts add up to " w + g + o + a + c + s " of " value("bytes")
     if (w <= 0 || a <= 0 || c < 0 || s <= 0) print "line " NR ": weights " w ", activations " a ", cast cache " c ", workspace " s
     if (forward ? g + o != 0 : g != w || o < 2 * w || o > 2 * w + 65536) print "line " NR ": weights " w ", gradients " g ", optimizer " o
     if (/"precision": "fp32"/) {full = a; if (value("speedup") != 1 || value("reduction") != 0) print "line " NR ": fp32 beside itself"}
     if (/"precision": "(fp16|bf16)"/ && a >= full) print "line " NR ": activations of " a " bytes, in fp32 " full
     if (value("ms") <= 0) print "line " NR ": no time"}')
if [ -z "$wrong" ]; then pass; else fail "amp_bench: memory" "$wrong"; fi

# The text says the same: six parts, each rounded to 0.05 MiB, beside their sum.
wrong=$(awk '/^  (fp32|tf32|fp16|bf16) / {for (i = NF - 5; i <= NF; i++) sum += $i; for (i = 1; i <= NF; i++) if ($i ~ /%$/) total = $(i - 1)
    if (sum - total > 0.36 || total - sum > 0.36) print $1 ": " sum " MiB of " total; rows++; sum = 0} END {if (rows != 16) print rows " rows"}' "$work/precision.log")
if [ -z "$wrong" ]; then pass; else fail "amp_bench: the table's memory" "$wrong"; fi

# ---- amp_bench --training: three precisions learn a text, to nearly the same loss.
head -c 100000 amp.h > "$work/to_learn"
"$bench_bin" --training "$work/to_learn" --device cpu --layers 2 --channels 32 --heads 2 --batch 4 --seq 32 --iterations 12 --json "$work/training.json" > "$work/training.log" 2>&1
status=$?
valid "amp_bench --training" "$work/training.json"
if [ $status -eq 0 ] && awk '$1 ~ /^(fp32|fp16|bf16)/ {n++; v = $(NF - 1); if ($1 == "fp32") full = v; if (v > full + 0.02 || v < full - 0.02 || v > 5.5) bad = 1}
    END {exit !(n == 3 && !bad)}' "$work/training.log"; then pass; else fail "amp_bench --training" "exit code $status: $(tail -n 4 "$work/training.log")"; fi

# ---- amp_bench --features
"$bench_bin" --features $tiny --json "$work/features.json" > "$work/features.log" 2>&1; status=$?
if [ $status -eq 0 ]; then pass; else fail "amp_bench --features" "exit code $status: $(tail -n 2 "$work/features.log")"; fi
valid "amp_bench --features" "$work/features.json"
for name in mask-cache cast-cache workers prefetch memory-interval fused-step recompute; do
    if grep "\"name\": \"$name\"" "$work/features.json" | grep -q '"time": "\(gain\|loss\|even\)"' &&
        grep -qE "^  $name .* (gain|loss|even) .* (gain|loss|even)\$" "$work/features.log"; then pass
    else fail "amp_bench: $name" "$(grep "$name" "$work/features.json" "$work/features.log")"; fi
done
if grep -q '"name": "pinning", "time": "n/a"' "$work/features.json"; then pass; else fail "amp_bench: pinning" "$(grep pinning "$work/features.json")"; fi
# A cost is called one: recomputing saves memory, kept casts take it.
if grep '"name": "recompute"' "$work/features.json" | grep -q '"memory": "gain"'; then pass; else fail "amp_bench: recompute" "$(grep '"recompute"' "$work/features.json")"; fi
if grep '"name": "cast-cache"' "$work/features.json" | grep -q '"memory": "loss"'; then pass; else fail "amp_bench: cast-cache" "$(grep '"cast-cache"' "$work/features.json")"; fi
if [ -z "$(ls "$work"/*.part 2>/dev/null)" ]; then pass; else fail "amp_bench" "left a partial file behind"; fi

# A run that fails leaves the results of the one before.
cp "$work/features.json" "$work/kept"
"$bench_bin" --features $tiny --layers 1000 --channels 65536 --json "$work/features.json" > "$work/large.log" 2>&1; status=$?
if [ $status -eq 1 ] && cmp -s "$work/kept" "$work/features.json" && grep -q "training this model takes" "$work/large.log"; then pass
else fail "amp_bench: too large" "exit code $status: $(tail -n 1 "$work/large.log")"; fi

# Ctrl-C leaves no file of tokens behind.
mkdir "$work/tmp"
TMPDIR="$work/tmp" "$bench_bin" --features --feature workers $tiny --iterations 1000 --layers 8 --channels 256 --json none > "$work/int.log" 2>&1 &
pid=$!
for wait in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do [ -n "$(ls "$work/tmp")" ] && break; sleep 0.2; done
made=$(ls "$work/tmp"); kill -TERM $pid; wait $pid
status=$?
if [ $status -eq 143 ] && [ -n "$made" ] && [ -z "$(ls "$work/tmp")" ]; then pass; else fail "amp_bench interrupted" "exit code $status, made: $made, left: $(ls "$work/tmp")"; fi

# ---- Refusals.  refused PROGRAM TEXT FLAGS...: exit code 2, and the text is said.
refused() {
    program=$1 text=$2; shift 2
    "build/$program" "$@" > "$work/refused.log" 2>&1
    status=$?
    if [ $status -eq 2 ] && grep -q -- "$text" "$work/refused.log"; then pass; else fail "$program $*" "exit code $status: $(tail -n 2 "$work/refused.log")"; fi
}
refused amp_check "did you mean --quick" --qick
refused amp_check "--size 1: must be 64 to 16384" --size 1
refused amp_check "--device moon: must be auto, cpu" --device moon
refused amp_check "--threads 0" --threads 0
refused amp_check "--min-utilisation 80: must be 0 to 2" --min-utilisation 80
refused amp_check "--channels 65: must be a multiple" --channels 65 --device cpu
refused amp_check "--seconds" --seconds soon
refused amp_bench "did you mean --features" --feetures
refused amp_bench "contradicts --precision" --precision --features
refused amp_bench "contradicts --features" --training amp.h --features
refused amp_bench "/nonexistent" --training /nonexistent
refused amp_bench "--heads 5: 5 heads do not divide 32 channels" --device cpu --heads 5 --channels 32
refused amp_bench "--batch 65536: 65536 x 65536 tokens" --device cpu --batch 65536 --seq 65536
refused amp_bench "--feature pins: is not one of" --features --feature pins
refused amp_bench "needs --features" --dtype bf16
refused amp_bench "needs --precision" --features --model decoder
refused amp_bench "--iterations 0: must be 1" --iterations 0
refused amp_bench "--json /dev/null/x" --device cpu --json /dev/null/x
refused amp_bench "--vocab 1" --vocab 1
for program in amp_check amp_bench; do
    if "build/$program" --help > "$work/help.log" && grep -q -- "--device" "$work/help.log"; then pass; else fail "$program --help" "$(head -n 1 "$work/help.log")"; fi
done
closing
