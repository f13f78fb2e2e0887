#!/bin/sh
# plot.sh - draws runs of train_gpt, or of any program that writes amp.h's records: loss, loss scale with the skipped
# steps, tokens/s and memory; and of runs with adaptive precision each layer's precision by step.
#
#     sh examples/plot/plot.sh [-c] [-o NAME] [metrics.jsonl ...]     from the project's folder; `make plot` runs it
#
# Writes NAME.png and NAME.svg (default out/plot), and NAME.layers.png and .svg of the last run that has such layers.
# -c: only the curves of loss and loss scale.  Without files, it draws those below out/; without any there, it trains
# first: 300 steps each in fp32, fp16 and bf16, about a minute.  fp16 starts from a scale of 2^30, which is too high, and
# doubles it after 25 clean steps, so that the picture shows steps being skipped.  Needs gnuplot.
#
# run.svg is the picture of two of these runs:
#     sh examples/plot/plot.sh -c -o run out/fp32/metrics.jsonl out/fp16/metrics.jsonl
LC_ALL=C.UTF-8          # numbers have points, and gnuplot reads names as UTF-8, whatever the locale here
export LC_ALL
name=out/plot bars=1
while :; do
    case $1 in
        -c) bars=0; shift ;;
        -o) name=$2; shift 2 ;;
        *) break ;;
    esac
done
if ! command -v gnuplot > /dev/null 2>&1; then echo "plot: skipped: there is no gnuplot here (Debian: apt-get install gnuplot-nox)"; exit 0; fi

if [ $# -eq 0 ]; then for file in out/metrics.jsonl out/*/metrics.jsonl out/*/*/metrics.jsonl; do [ -s "$file" ] && set -- "$@" "$file"; done; fi
if [ $# -eq 0 ]; then
    echo "plot: no runs in out/: training three short ones"
    ${MAKE:-make} build/train_gpt || exit 1
    for precision in fp32 fp16 bf16; do
        scale=
        [ $precision = fp16 ] && scale="--init-scale 1073741824 --growth-interval 25"
        build/train_gpt --precision $precision $scale --out out/$precision --steps 300 --log-interval 2 --eval-interval 300 --sample 0 --save none || exit 1
        set -- "$@" out/$precision/metrics.jsonl
    done
fi

work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
n=0
# The text of a key in the record at hand.
text='function text(key, pair) {
    if (!match($0, "\"" key "\": *\"[^\"]*\"")) return ""
    pair = substr($0, RSTART, RLENGTH - 1)
    sub(/^"[^"]*": *"/, "", pair)
    return pair
}'

for file; do
    if ! [ -r "$file" ]; then echo "plot: $file cannot be read" >&2; exit 2; fi
    # One row per step: step loss scale skipped tokens/s peak in MiB; what a record lacks is a question mark.  A line that
    # was cut off is left out.  A run that was resumed overwrites steps it made twice.
    awk "$text"'
        function number(key, pair) {
            if (!match($0, "\"" key "\": *[-+0-9.eE]+")) return "?"
            pair = substr($0, RSTART, RLENGTH)
            sub(/^"[^"]*": */, "", pair)
            return pair
        }
        !/}[ \r]*$/ { next }
        text("precision") != "" && /"event": *"run"/ { kind = text("precision") }
        !/"event": *"(step|epoch)"/ { next }
        text("dtype") != "" { kind = text("dtype") }
        { peak = number("peak"); if (peak != "?") peak /= 1048576; if (peak != "?" && peak > most) most = peak }
        /"event": *"epoch"/ { next }
        {
            skipped = number("skipped")
            if (skipped == "?") skipped = number("applied") == "0"
            print number("step"), number("loss"), number("scale"), skipped, number("tokens_per_s"), peak
        }
        END { print kind == "" ? "?" : kind, most == "" ? "?" : most > head }' head="$work/head" "$file" > "$work/columns.$((n + 1))"
    if ! [ -s "$work/columns.$((n + 1))" ]; then echo "plot: $file has no step records, left out"; continue; fi
    n=$((n + 1))
    read -r kind peak < "$work/head"
    folder=$(basename "$(dirname "$file")")
    case $folder in "$kind"|out) label=$kind ;; *) label="$folder, $kind" ;; esac
    rate=$(awk '$5 != "?" {print $5}' "$work/columns.$n" | sort -n | awk '{x[NR] = $1} END {print NR ? x[int((NR + 1) / 2)] : "?"}')
    skips=$(awk '$4 == 1' "$work/columns.$n" | wc -l)
    scaler=$(awk '$3 != "?" && $3 != 1 {n = 1} END {print n + 0}' "$work/columns.$n")      # without one the scale is 1
    losses=$(awk '$2 != "?" {n = 1} END {print n + 0}' "$work/columns.$n")
    printf '%s\t%s\t%s\t%s\t%s\n' "$label" "$rate" "$peak" "$scaler" "$losses" >> "$work/runs"
    echo "plot: $file: $label, $(wc -l < "$work/columns.$n") records, $skips skipped"
done
if [ $n -eq 0 ]; then echo "plot: nothing to draw" >&2; exit 2; fi

# One row per stretch of a layer in one precision: first step, last step, row, precision, layer.
for file; do
    awk "$text"'
        function stretch(layer, end) { print since[layer], end, row[layer], now[layer], layer }
        !/}[ \r]*$/ || !match($0, /"step": *[0-9]+/) { next }
        { step = substr($0, RSTART, RLENGTH); sub(/.* /, "", step); if (step + 0 > last) last = step + 0 }
        !/"event": *"precision"/ { next }
        {
            layer = text("layer")
            if (!(layer in now)) { now[layer] = text("from"); since[layer] = 0; row[layer] = ++layers; name[layers] = layer }
            if (text("to") == now[layer]) next
            stretch(layer, step)
            now[layer] = text("to"); since[layer] = step
        }
        END { for (i = 1; i <= layers; i++) stretch(name[i], last) }' "$file" > "$work/layers.new"
    [ -s "$work/layers.new" ] && mv "$work/layers.new" "$work/layers"
done

mkdir -p "$(dirname "$name")" || exit 1
for kind in png svg; do
    gnuplot -e "work='$work'; runs=$n; kind='$kind'; name='$name'; bars=$bars" "$(dirname "$0")/plot.gp" || exit 1
done
echo "plot: $name.png, $name.svg"
if [ -s "$work/layers" ]; then echo "plot: $name.layers.png, $name.layers.svg"; fi
