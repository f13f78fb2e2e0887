#!/bin/sh
# budget.sh [PEER MACRO] - measures what amp.h costs its users and compares it with the baseline in
# tests/records/budget.json.  The costs are lines, bytes of the object file, public functions and structs, and the
# instructions of a training step.  PEER is another single header whose implementation is enabled by MACRO.  If it is given,
# the CPU seconds of compiling amp.h are measured too, as a ratio to those of PEER.  Prints one JSON object per figure.
# `make test` and `.ci/run` print their own seconds.
set -u
cc=${CC:-gcc}
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
api() { awk '/^\/\* Stop here/ {exit} {print}' amp.h; }

# compile HEADER MACRO: CPU seconds of one compilation.
compile() {
    printf '#define %s\n#include "%s"\n' "$2" "$1" > "$work/one.c"
    { time -p $cc -O2 -w -I. -c "$work/one.c" -o "$work/one.o"; } 2>&1 | awk '/^(user|sys)/ {s += $2} END {print s}'
}
median() { sort -n | awk '{v[NR] = $1} END {print v[int((NR + 1) / 2)]}'; }

# say NAME VALUE: beside the baseline's value of that name.
say() {
    sed -n "s/^ *\"$1\": \([0-9.]*\).*/\1/p" tests/records/budget.json | head -n 1 | awk -v name="$1" -v now="$2" '
        {was = $1} END {printf "{\"%s\": %s", name, now; if (was > 0) printf ", \"baseline\": %s, \"ratio\": %.4f", was, now / was; print "}"}'
}
printf '#define AMP_IMPLEMENTATION\n#include "amp.h"\n' > "$work/amp.c"
$cc -std=c99 -O2 -I. -c "$work/amp.c" -o "$work/amp.o" || exit 1
say lines "$(wc -l < amp.h)"
say object_bytes "$(size "$work/amp.o" | awk 'NR == 2 {print $1 + $2}')"
say public_functions "$(api | grep -cE '^AMP_API [^(]*\bamp_[a-z0-9_]+\(')"
say public_structs "$(api | grep -oE '^(typedef )?struct amp_[a-z0-9_]+' | awk '{print $NF}' | sort -u | wc -l)"
if [ $# -eq 2 ]; then
    for _ in 1 2 3; do
        compile amp.h AMP_IMPLEMENTATION >> "$work/ours"
        compile "$1" "$2" >> "$work/peers"
    done
    say compile_over_peer "$(echo "$(median < "$work/ours") $(median < "$work/peers")" | awk '{printf "%.3f", $1 / $2}')"
fi
sh tests/bench/instructions.sh | sed 's/[{}:,"]/ /g' | while read -r _ precision _ count; do say "instructions_$precision" "$count"; done
