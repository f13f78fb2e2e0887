#!/bin/sh
# plot.sh - tests the pictures of training runs that watch.c and gnuplot draw from their records.
. tests/lib.sh

# ---- watch.c.  A run with a resumed step, a loss that is null, layers that move, and a last line that is still written.
watch="$PWD/build/watch"
mkdir -p "$work/live/out/old" "$work/live/out/new"
cat > "$work/live/out/new/metrics.jsonl" <<'LINES'
{"event": "run", "version": "0.2.0", "precision": "fp16", "level": "O1", "step": 0, "steps": 6}
{"event": "step", "step": 1, "loss": 6, "scale": 65536, "skipped": 1, "skips": 1, "dtype": "fp16", "tokens_per_s": 1000, "peak": 1048576}
{"event": "step", "step": 2, "loss": null, "scale": 32768, "skips": 1, "dtype": "fp16", "tokens_per_s": 2000}
{"event": "precision", "step": 2, "layer": "h.0.attn.weight", "from": "fp32", "to": "bf16", "output_error": 0.002}
{"event": "step", "step": 3, "loss": 99, "scale": 32768, "skips": 1, "dtype": "fp16", "tokens_per_s": 9999}
{"event": "step", "step": 3, "loss": 4, "scale": 32768, "skips": 1, "dtype": "fp16", "tokens_per_s": 3000}
{"event": "precision", "step": 4, "layer": "h.0.attn.weight", "from": "bf16", "to": "fp8", "output_error": 0.002}
{"event": "precision", "step": 4, "layer": "a.long.name.of.h.1.\u001b[2Jgröße", "from": "fp32", "to": "fp32", "output_error": 0.002}
{"event": "step", "step": 5, "loss": 2, "scale": 16384, "skips": 2, "dtype": "fp16", "tokens_per_s": 4000, "peak": 3145728}
{"event": "validation", "step": 5, "loss": 2.5}
{"event": "sample", "text": "</script><b>NaN"}
LINES
printf '{"event": "step", "step": 6, "lo' >> "$work/live/out/new/metrics.jsonl"
echo '{"event": "step", "step": 1, "loss": 1}' > "$work/live/out/old/metrics.jsonl"
touch -d '2020-01-01' "$work/live/out/old/metrics.jsonl"
cat > "$work/expected" <<'PICTURE'
out/new/metrics.jsonl  fp16 O1
step 5 of 6  running
loss      2, validation 2.5
       6  ***************
                         *
                         *
                         *
                         **************
                                       *
                                       *
       2                               *
scale     16,384     ####==============_
skips     2          |.................|
tokens/s  4,000      ____-----+++++++++#
memory    3 MiB      __________________#
layers    1 in fp32, 1 in fp8
  h.0.attn.weight      fp8   4422222111
  ..e.of.h.1.?[2Jgr??e fp32  4444444444
the same as a page: out/new/watch.html
PICTURE
# look NAME FLAGS...: one picture from the folder of the run, in plain ASCII.
look() { name=$1; shift; (cd "$work/live" && LC_ALL=C "$watch" "$@" > "$work/$name.look" 2>&1); }
if look newest --columns 40 && sed 's/ *$//' "$work/newest.look" | diff "$work/expected" - > "$work/log"; then pass; else fail "watch's picture" "$(head -n 6 "$work/log")"; fi
if [ "$(awk '{print length($0)}' "$work/newest.look" | sort -n | tail -n 1)" -le 40 ]; then pass; else fail "watch" "wider than its 40 columns"; fi
if (cd "$work/live" && LC_ALL=C.UTF-8 "$watch" --columns 60 > "$work/wide.look") && grep -q '⡇' "$work/wide.look" && grep -q 'fp8   █' "$work/wide.look" &&
    grep -q 'h.1.?\[2Jgröße' "$work/wide.look"; then pass; else fail "watch in UTF-8" "$(tail -n 4 "$work/wide.look")"; fi

# The file grows: the step whose line was cut off is there, and the run has ended.
echo 'ss": 1, "scale": 16384, "skips": 2, "dtype": "fp16", "tokens_per_s": 5000}' >> "$work/live/out/new/metrics.jsonl"
if look grown --run out/new && grep -q '^step 6 of 6  finished' "$work/grown.look" && grep -q '^loss      1,' "$work/grown.look"; then pass; else fail "watch a growing file" "$(head -n 3 "$work/grown.look")"; fi
# On a terminal of 40 columns it looks again until the run has ended, at most ten seconds, and leaves a whole picture.
mkdir "$work/live/out/grows"
head -n 1 "$work/live/out/new/metrics.jsonl" > "$work/live/out/grows/metrics.jsonl"
if have script && have timeout; then
    (cd "$work/live" && timeout 10 script -qec "stty cols 40 rows 12; LC_ALL=C '$watch' --run out/grows --interval 0.1" /dev/null < /dev/null > "$work/terminal.look" 2>&1) &
    sleep 0.5; sed 1d "$work/live/out/new/metrics.jsonl" >> "$work/live/out/grows/metrics.jsonl"
    wait $!; status=$?
    if [ $status -eq 0 ] && grep -q 'step 0 of 6  running' "$work/terminal.look" && grep -q 'step 6 of 6  finished' "$work/terminal.look"; then pass
    else fail "watch on a terminal" "status $status: $(tr -d '\033' < "$work/terminal.look" | tail -n 3)"; fi
else skip "watch on a terminal" "no script"; fi

# The page holds the lines, of which nothing ends its script, and draws them; what a browser makes of them, where there is one.
page="$work/live/out/new/watch.html"
if grep -qF 'u003c/script>\u003cb>NaN' "$page" || grep -qF '\u003c/script>\u003cb>NaN' "$page"; then pass; else fail "watch's page" "a text can end its script"; fi
if grep -qE 'https?://[^w]|src=|@import' "$page"; then fail "watch's page" "needs something else"; else pass; fi
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome)
if [ -n "$browser" ]; then
    timeout 60 "$browser" --headless --no-sandbox --disable-gpu --user-data-dir="$work/browser" --dump-dom "file://$page" > "$work/dom" 2> /dev/null
    if grep -q '>step 6 of 6, finished<' "$work/dom" && grep -q '<b>1, validation 2.500, of 1 to 6</b>' "$work/dom" &&
        [ "$(sed 's/.*id="all"//' "$work/dom" | grep -o '<path' | wc -l)" -eq 8 ]; then pass; else fail "watch's page in a browser" "$(grep -o '<h1.*' "$work/dom" | head -c 300)"; fi
else skip "watch's page in a browser" "no chromium"; fi

# Numbers at the ends of what a double holds, and lines that are JSON but no records, in a file whose name is hostile: a
# curve, and a page that draws it.
odd="$work/odd <b>%.jsonl"
cat > "$odd" <<'LINES'
{"event": "step", "step": 1, "loss": 1e308, "scale": 0}
{"event": "step", "step": 5e199, "loss": -1e308, "tokens_per_s": -1e300}
null
[]
{"event": "precision", "step": null, "layer": "a"}
{"event": "step", "step": 1e200, "loss": 0.000000000000000000000000000000000000000000000000000000000000000000005e68}
LINES
if look odd --run "$odd" --columns 40 && grep -q '^step 1e+200  running' "$work/odd.look" && grep -q '^loss      0.5,' "$work/odd.look" &&
    grep -q '^  1e+308 .*\*' "$work/odd.look" && grep -q '^line 4 is left out' "$work/odd.look"; then pass; else fail "watch, odd numbers" "$(head -n 12 "$work/odd.look")"; fi
if grep -qF 'address="odd%20%3cb%3e%25.jsonl",file="odd \u003cb>%.jsonl"' "$work/watch.html"; then pass; else fail "watch's page" "the file's name: $(grep -o 'address=.*' "$work/watch.html" | head -c 100)"; fi
cat > "$work/page.js" <<'SCRIPT'
const html = require('fs').readFileSync(process.argv[2], 'utf8'), made = {}, paths = []
class Node { constructor() { this.style = {} } append() {} setAttribute(k, v) { if (k === 'd') paths.push(v) }
    insertRow() { return new Node() } insertCell() { return new Node() } }
const by = id => made[id] ??= new Node()
by('lines').textContent = html.split('id="lines">')[1].split('</script>')[0]
const parts = html.match(/<script>(const address=.*?)<\/script>/s)[1] + ';' + html.split('</script><script>')[1].split('</script>')[0]
new Function('document', 'location', 'setTimeout', parts)({getElementById: by, createElement: () => new Node(), createElementNS: () => new Node()},
    {protocol: 'file:'}, () => 0)
console.log(made.state.textContent, '|', made.bad.textContent, '|', paths.join(' '))
SCRIPT
if have node; then
    if node "$work/page.js" "$work/watch.html" > "$work/log" 2>&1 && grep -q '^step 1e+200, .*| line 4 is not a whole record | M0.0 3.0L500.0 197.0L1000.0 100.0' "$work/log" && ! grep -q NaN "$work/log"; then pass
    else fail "watch's page, odd numbers" "$(head -n 5 "$work/log")"; fi
else skip "watch's page, odd numbers" "no node"; fi
# What a killed watch left of a page is removed; what another program writes there is not.
sleep 0 & ended=$!; wait $ended
: > "$work/watch.html.tmp$ended"; : > "$work/watch.html.tmp$$"
look left --run "$odd"
if [ ! -e "$work/watch.html.tmp$ended" ] && [ -e "$work/watch.html.tmp$$" ]; then pass; else fail "watch after a kill" "$(ls "$work" | grep tmp)"; fi

# Refusals, by name.  watch_refused TEXT LINES FLAGS...: of a file that holds LINES.
watch_refused() {
    text=$1; printf "$2" > "$work/bad.jsonl"; shift 2
    look bad "$@"; status=$?
    if [ $status -eq 2 ] && grep -q -- "$text" "$work/bad.look"; then pass; else fail "watch $*" "status $status, must say $text: $(head -n 2 "$work/bad.look")"; fi
}
start='{"event": "step", "step": 1, "loss": 1}\n'
watch_refused 'bad.jsonl: line 2: NaN is not JSON' "$start"'{"event": "step", "step": 2, "loss": NaN}\n' --run "$work/bad.jsonl"
watch_refused 'line 2: Infinity is not JSON' "$start"'{"event": "step", "step": 2, "scale": -Infinity}\n' --run "$work/bad.jsonl"
watch_refused 'line 1 is not a record' 'step,loss\n1,2\n' --run "$work/bad.jsonl"
watch_refused 'line 1 is not a record' '{"loss": 1}\n' --run "$work/bad.jsonl"
watch_refused 'line 1 is not a record' '\177ELF\002\001' --run "$work/bad.jsonl"
watch_refused 'has no records yet' '' --run "$work/bad.jsonl"
watch_refused 'has no records yet' '{"event": "st' --run "$work/bad.jsonl"
watch_refused 'there is no run: .*/none' '' --run "$work/none"
watch_refused 'is not a file' '' --run /dev/null
watch_refused 'columns 20: must be 30 to 400 or auto' '' --columns 20
watch_refused 'did you mean --once' '' --onec
if (cd "$work" && mkdir bare && cd bare && "$watch") > "$work/bad.look" 2>&1; then fail "watch without runs" "status 0"
elif grep -q 'no run was found: there is no metrics.jsonl below out/' "$work/bad.look"; then pass; else fail "watch without runs" "$(cat "$work/bad.look")"; fi
printf "$start"'{"event": "step", "ste\n{"event": "step", "step": 2, "loss": 7}\n' > "$work/bad.jsonl"
if look torn --run "$work/bad.jsonl" --page none && grep -q '^line 2 is left out' "$work/torn.look" && grep -q '^loss      7' "$work/torn.look"; then pass; else fail "watch, a torn line" "$(cat "$work/torn.look")"; fi
if look where --run "$work/bad.jsonl" --page "$work/none/page.html" && grep -q '^no page: .*none' "$work/where.look"; then pass; else fail "watch, no page" "$(tail -n 2 "$work/where.look")"; fi

# ---- gnuplot
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

# -c: the curves alone, narrower, with every skipped step marked, and one more mark in the key.
if $plot -c -o "$work/out/curves" "$work/a/fp32/metrics.jsonl" "$work/a/fp16/metrics.jsonl" > "$work/log" 2>&1 && [ "$(grep -vc '^plot: ' "$work/log")" -eq 0 ]; then pass; else fail "curves alone" "$(tail -n 3 "$work/log")"; fi
marks=$(grep -c "<use xlink:href='#gpPt1' transform" "$work/out/curves.svg")
if grep -q 'viewBox="0 0 900 760"' "$work/out/curves.svg" && ! grep -q "Peak memory\|tokens/s" "$work/out/curves.svg" && [ "$marks" -eq 3 ]; then pass
else fail "curves alone" "$marks marks, must be 3; or it has bars"; fi

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
