#!/bin/sh
# plot.sh - the pictures of runs: what is drawn from which records.
. tests/lib.sh
plot="sh examples/plot/plot.sh"
mkdir -p "$work/empty" "$work/a/fp32" "$work/a/fp16" "$work/b"
for tool in sh awk sed sort wc cat mktemp rm mkdir basename dirname cut grep head; do ln -s "$(command -v $tool)" "$work/empty/$tool"; done
if PATH="$work/empty" sh examples/plot/plot.sh "$work/none" > "$work/log" 2>&1 && grep -q "skipped: there is no gnuplot" "$work/log"; then pass
else fail "without gnuplot" "$(cat "$work/log")"; fi
if ! have gnuplot; then skip "pictures" "no gnuplot"; closing; exit; fi

# Records as train_gpt writes them, and as amp_monitor does; one file ends in a line that was cut off.
cat > "$work/a/fp32/metrics.jsonl" <<'LINES'
{"event": "run", "version": "0.1.0", "precision": "fp32", "steps": 4}
{"event": "step", "step": 1, "loss": 5.5, "lr": 0.001, "norm": 2.5, "scale": 1, "applied": 1, "skips": 0, "tokens_per_s": 1000}
{"event": "step", "step": 2, "loss": 4.5, "lr": 0.001, "norm": 2.25, "scale": 1, "applied": 1, "skips": 0, "tokens_per_s": 1234}
{"event": "validation", "step": 2, "loss": 4.75, "bigram": 2.6}
{"event": "step", "step": 3, "loss": 3.5, "lr": 0.001, "norm": 2, "scale": 1, "applied": 1, "skips": 0, "tokens_per_s": 9999}
LINES
cat > "$work/a/fp16/metrics.jsonl" <<'LINES'
{"event": "step", "step": 1, "epoch": 0, "loss": null, "norm": null, "scale": 65536, "tracker": 0, "skipped": 1, "skips": 1, "dtype": "fp16", "lr": 0.001, "tokens_per_s": 2000}
{"event": "step", "step": 2, "epoch": 0, "loss": 5.25, "norm": 1.5e-02, "scale": 32768, "tracker": 0, "skipped": 0, "skips": 1, "dtype": "fp16", "lr": 0.001, "tokens_per_s": 4321, "allocated": 1, "peak": 7864320}
{"event": "step", "step": 3, "epoch": 0, "loss": 4.25, "norm": 1.5, "scale": 3.2768e4, "tracker": 1, "skipped": 1, "skips": 2, "dtype": "fp16", "lr": 0.001, "tokens_per_s": 8765}
{"event": "epoch", "epoch": 0, "steps": 3, "skipped": 2, "loss": 4.75, "dtype": "fp16", "tokens_per_s": 4000, "peak": 11010048}
{"event": "step", "step": 4, "epoch": 1, "loss": 1.25, "norm": 1.5, "scale": 1024, "tra
LINES
if $plot -o "$work/out/picture" "$work/a/fp32/metrics.jsonl" "$work/a/fp16/metrics.jsonl" > "$work/log" 2>&1; then pass; else fail "a picture" "$(tail -n 3 "$work/log")"; fi
if [ "$(grep -vc '^plot: ' "$work/log")" -eq 0 ]; then pass; else fail "a picture" "gnuplot says: $(grep -v '^plot: ' "$work/log" | head -n 3)"; fi
if grep -q "fp32, 3 records, 0 skipped" "$work/log" && grep -q "fp16, 3 records, 2 skipped" "$work/log"; then pass; else fail "records" "$(cat "$work/log")"; fi
if [ "$(head -c 4 "$work/out/picture.png" | tail -c 3)" = PNG ] && grep -q "</svg>" "$work/out/picture.svg"; then pass; else fail "files" "$(ls "$work/out")"; fi
# The median rates, and the epoch's peak of 10.5 MiB, stand beside their bars.
for text in fp32 fp16 "skipped step" 1234 4321 10.5 "Training loss" "nats per token"; do
    if grep -q ">$text<" "$work/out/picture.svg"; then pass; else fail "the picture" "does not say $text"; fi
done
if grep -q "records have no\|no run has" "$work/out/picture.svg"; then fail "the picture" "has an empty panel"; else pass; fi

# Decisions on layers are drawn in a picture of their own: each layer, also one that never moved, in each of its precisions.
mkdir -p "$work/a/adaptive"
{
    cat "$work/a/fp32/metrics.jsonl"
    echo '{"event": "precision", "step": 1, "layer": "h.0.weight", "from": "fp32", "to": "bf16", "output_error": 0.002}'
    echo '{"event": "precision", "step": 2, "layer": "h.0.weight", "from": "bf16", "to": "fp8", "output_error": 0.04}'
    echo '{"event": "precision", "step": 3, "layer": "h.1.weight", "from": "fp32", "to": "fp32", "output_error": null}'
} > "$work/a/adaptive/metrics.jsonl"
$plot -o "$work/out/adaptive" "$work/a/adaptive/metrics.jsonl" > "$work/log" 2>&1
if [ "$(grep -vc '^plot: ' "$work/log")" -eq 0 ]; then pass; else fail "layers" "gnuplot says: $(grep -v '^plot: ' "$work/log" | head -n 3)"; fi
for text in "Precision by layer" h.0.weight h.1.weight fp32 bf16 fp8; do
    if grep -q ">$text<" "$work/out/adaptive.layers.svg"; then pass; else fail "layers" "the picture does not say $text"; fi
done
if [ -e "$work/out/picture.layers.svg" ]; then fail "layers" "a picture of layers without any"; else pass; fi

# What no record has is said in its place; runs of one precision are told apart by their folders.
mkdir -p "$work/a/other"
cp "$work/a/fp32/metrics.jsonl" "$work/a/other/metrics.jsonl"
$plot -o "$work/out/fp32" "$work/a/fp32/metrics.jsonl" "$work/a/other/metrics.jsonl" > "$work/log" 2>&1
for text in "no run has a loss scaler" "the records have no memory" fp32 "other, fp32"; do
    if grep -q ">$text<" "$work/out/fp32.svg"; then pass; else fail "without scaler and memory" "the picture does not say $text"; fi
done

# The same picture in an empty environment and in a locale of Latin-1 with a decimal comma; names may be any UTF-8.
mkdir -p "$work/größe" "$work/locales"
cp "$work/a/fp16/metrics.jsonl" "$work/größe/metrics.jsonl"
drawn="$work/größe/metrics.jsonl"
env -i PATH="$PATH" HOME="$work" $plot -o "$work/out/bare" "$drawn" > "$work/bare.log" 2>&1
if localedef -i de_DE -f ISO-8859-1 "$work/locales/de_DE.ISO-8859-1" 2> /dev/null; then
    LOCPATH="$work/locales" LC_ALL=de_DE.ISO-8859-1 $plot -o "$work/out/latin" "$drawn" > "$work/latin.log" 2>&1
else skip "Latin-1" "localedef makes no locale (Debian: locales)"; fi
for kind in bare latin; do
    [ -e "$work/$kind.log" ] || continue
    if [ "$(grep -vc '^plot: ' "$work/$kind.log")" -eq 0 ]; then pass; else fail "locale ($kind)" "$(grep -v '^plot: ' "$work/$kind.log" | head -n 3)"; fi
    for text in "größe, fp16" 4321 10.5; do
        if grep -q ">$text<" "$work/out/$kind.svg"; then pass; else fail "locale ($kind)" "the picture does not say $text"; fi
    done
done

# A scale that never moved: no warning from gnuplot.
sed 's/"scale": [0-9.e]*/"scale": 65536/' "$work/a/fp16/metrics.jsonl" > "$work/b/metrics.jsonl"
$plot -o "$work/out/flat" "$work/b/metrics.jsonl" > "$work/log" 2>&1
if grep -v '^plot: ' "$work/log" > "$work/words" || ! [ -s "$work/out/flat.svg" ]; then fail "a flat scale" "$(head -n 3 "$work/words")"; else pass; fi

# Files without records are left out, or refused.
echo nonsense > "$work/b/metrics.jsonl"
$plot -o "$work/out/b" "$work/b/metrics.jsonl" "$work/a/fp16/metrics.jsonl" > "$work/log" 2>&1
if [ $? -eq 0 ] && grep -q "no step records, left out" "$work/log" && [ -s "$work/out/b.png" ]; then pass; else fail "a file of nonsense" "$(cat "$work/log")"; fi
$plot -o "$work/out/c" "$work/b/metrics.jsonl" > "$work/log" 2>&1
if [ $? -eq 2 ] && grep -q "nothing to draw" "$work/log"; then pass; else fail "nothing to draw" "$(cat "$work/log")"; fi
$plot -o "$work/out/c" "$work/none.jsonl" > "$work/log" 2>&1
if [ $? -eq 2 ] && grep -q "none.jsonl cannot be read" "$work/log"; then pass; else fail "no such file" "$(cat "$work/log")"; fi
closing
