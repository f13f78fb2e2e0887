#!/bin/sh
# counts.sh - counts the instructions of each arm64 kernel and of a training step under qemu, and those of the inner loops of
# products in the compiler's output.  It prints a record as JSON, and fails where a bound is missed.
#     sh tests/arm64/counts.sh > tests/records/arm64_instructions-$(date +%F).json
# A kernel is counted three times: as C without vector instructions (-march=armv8-a+nosimd), by the path scalar, for which gcc
# uses vectors of 128 bits where the C code has vectors, and by NEON.  qemu-user counts with the plugin count_plugin.c.
# The bounds: a step without vectors has at least 6 times NEON's instructions, and each kernel at least 2.4 times.  In inner
# loops the multiply-adds are at least 0.8 of what remains if only the loads that the tile needs are added to them.
. tests/lib.sh
gcc=aarch64-linux-gnu-gcc objdump=aarch64-linux-gnu-objdump
for tool in $gcc $objdump qemu-aarch64 gcc; do have $tool || { skip counts.sh "no $tool" >&2; closing >&2; exit; }; done
{
    gcc -O1 -shared -fPIC -Wl,--unresolved-symbols=ignore-all tests/arm64/count_plugin.c -o "$work/plugin.so" &&
        $gcc -std=c99 -w -O2 -Itests tests/arm64/count_kernels.c -o "$work/vectors" -static -lm -lpthread &&
        $gcc -std=c99 -w -O2 -Itests -march=armv8-a+nosimd tests/arm64/count_kernels.c -o "$work/nosimd" -static -lm -lpthread
} > "$work/log" 2>&1 || { fail counts.sh "$(head -n 4 "$work/log")" >&2; closing >&2; exit 1; }

# counted PROGRAM PATH: name and instructions, a line each.
counted() {
    qemu-aarch64 -cpu max -plugin "$work/plugin.so" "$work/$1" "$2" > "$work/names" 2> "$work/numbers"
    grep -E '^[0-9]+$' "$work/numbers" | awk 'NR % 3 == 2' | paste -d ' ' "$work/names" -
}
counted nosimd scalar > "$work/count.nosimd"
counted vectors scalar > "$work/count.scalar"
counted vectors neon > "$work/count.neon"
paste -d ' ' "$work/count.nosimd" "$work/count.scalar" "$work/count.neon" > "$work/counts"
$objdump -d --no-show-raw-insn "$work/vectors" > "$work/code"
# loop FUNCTION NEEDED: its inner loop, and the loads that its multiply-adds need.
loop() { echo "$1 $(awk -v name="$1" -f tests/arm64/loops.awk "$work/code") $2"; }
{
    loop ampi_tile_2_8_neon 16              # four words of eight rows by eight columns
    loop ampi_tile_bf16_2_8_neon 16
    loop ampi_dots_6_neon 10                # a vector of six rows and of four
    loop ampi_product_all_neon 10           # a word of eight rows and two vectors
} > "$work/loops"

awk -v date="$(date +%F)" -v compiler="$($gcc --version | head -n 1)" -v qemu="$(qemu-aarch64 --version | head -n 1)" '
    BEGIN {
        printf "{\n \"what\": \"instructions of each arm64 kernel and of a training step, counted by a plugin of qemu-user, and inner loops of products in the disassembly\",\n"
        printf " \"command\": \"sh tests/arm64/counts.sh\",\n \"date\": \"%s\",\n \"compiler\": \"%s, -O2\",\n \"emulator\": \"%s, -cpu max\",\n \"instructions\": {\n", date, compiler, qemu
    }
    FNR == NR {
        printf "%s  \"%s\": {\"without_vectors\": %d, \"scalar\": %d, \"neon\": %d, \"ratio\": %.2f}", (NR > 1 ? ",\n" : ""), $1, $2, $4, $6, $2 / $6
        next
    }
    FNR == 1 { printf "\n },\n \"inner_loops\": {\n" }
    { printf "%s  \"%s\": {\"multiply_adds\": %d, \"loads\": %d, \"other_vector_instructions\": %d, \"loads_needed\": %d, \"share\": %.3f, \"possible\": %.3f}", (FNR > 1 ? ",\n" : ""), $1, $2, $3, $4, $5, $2 / ($2 + $3 + $4), $2 / ($2 + $5) }
    END { printf "\n }\n}\n" }' "$work/counts" "$work/loops"

while read -r name none _ _ _ neon; do
    case $name in step.*) bound=60 ;; *) bound=24 ;; esac
    if [ $((none * 10)) -ge $((neon * bound)) ]; then pass; else fail "$name" "$none instructions without vectors, $neon by NEON" >&2; fi
done < "$work/counts"
while read -r name multiplies loads others needed; do
    if [ $((10 * (multiplies + needed))) -ge $((8 * (multiplies + loads + others))) ] && [ "$multiplies" -gt 0 ]; then pass
    else fail "$name" "$multiplies multiply-adds, $loads loads and $others others, where $needed loads are needed" >&2; fi
done < "$work/loops"
closing >&2
