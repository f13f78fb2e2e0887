#!/bin/sh
# newcomer.sh - runs the commands of README.md and examples/README.md, in their order, as a new user would.  It uses a copy
# of the project, an empty HOME, and a PATH that has only gcc, make and coreutils.
#
# The program in README.md is built and run.  Then follows "A first hour" of examples/README.md, on data and weights made
# here: replacing sgemm, learning from a CSV file, fine-tuning on a TSV file (also from weights), and a new operator.  The
# operator's code is copied from that text into a copy of an example, is trained there, and its gradient is checked.  -O2 is
# replaced by OPT (-O1), which compiles in two thirds of the time.
. tests/lib.sh
opt=${OPT:--O1}
home=$work/home tools=$work/tools clone=$work/clone
mkdir "$home" "$tools" "$clone"
for tool in ${CC:-gcc} make sh as ld ar nm cat cp cut date dirname echo env head ls mkdir mv nproc paste printf pwd rm seq sleep sort tail tee touch tr true uname uniq wc; do
    path=$(command -v "$tool") && [ "${path#/}" != "$path" ] && ln -s "$path" "$tools/${tool##*/}"
done
[ -e "$tools/gcc" ] || ln -s "$(command -v "${CC:-gcc}")" "$tools/gcc"
cp -R amp.h Makefile README.md examples "$clone"

# In the clone, as the newcomer: said LINE.
said() { (cd "$clone" && env -i HOME="$home" PATH="$tools" sh -c "$1") > "$work/said" 2>&1; }

# What is learned from: y = class of two comparisons; reviews in two moods, by three words each.
awk 'BEGIN {srand(3); print "length,width,weight,age,class"
    for (i = 0; i < 1500; i++) {a = rand(); b = rand(); c = 90 * rand(); d = rand(); printf "%f,%f,%f,%f,%d\n", a, b, c, d, (a > b) + 2 * (c > 45)}}' > "$clone/data.csv"
awk 'BEGIN {srand(4); split("moving clever superb", good, " "); split("dull clumsy awful", bad, " "); split("film plot cast music", what, " ")
    for (i = 0; i < 480; i++) {k = rand() < 0.5; printf "%d\tthe %s was %s\n", k, what[int(4 * rand()) + 1], k ? good[int(3 * rand()) + 1] : bad[int(3 * rand()) + 1]}}' > "$clone/reviews.tsv"

# README's program, and the lines behind it that build and run it.
awk '/^```c$/ {on = 1; next} /^```/ {exit} on' README.md > "$clone/program.c"
awk '/^## A short program/ {on = 1} /^## Try it/ {exit} /^```/ {code = !code} on && !code && sub(/^    /, "") {sub(/  *# .*/, ""); print}' README.md > "$work/commands"
[ "$(wc -l < "$work/commands")" -eq 4 ] || fail "README.md" "has $(wc -l < "$work/commands") lines that build and run its program, must have 4"
# Commands of the first hour are indented by four; its operator, and what it changes in the copy, stand between fences.
sed -n '/^## A first hour/,/^## /p' examples/README.md > "$work/hour"
awk '/^```/ {code = !code} !code && sub(/^    /, "")' "$work/hour" >> "$work/commands"
awk '/^```c$/ {on = 1; next} /^```/ {on = 0} on' "$work/hour" > "$clone/examples/silu.h"
awk '/^```diff$/ {on = 1; next} /^```/ {on = 0} on' "$work/hour" > "$work/change"

# What an editor would do with the lines of FILE that the change names, in their order: edited CHANGE FILE.
edited() {
    awk -v file="$2" '/^[+]/ {print substr($0, 2); next}
        {while ((more = getline line < file) > 0 && line != substr($0, 2)) print line
         if (more <= 0) {bad = 1; exit}
         if (/^ /) print line}
        END {while (!bad && (getline line < file) > 0) print line; exit bad}' "$1"
}
if [ "$(wc -l < "$work/commands")" -ge 12 ]; then pass; else fail "examples/README.md" "its first hour has $(wc -l < "$work/commands") commands"; fi

while IFS= read -r line; do
    [ "$line" = "./finetune reviews.tsv bert" ] && mv "$clone/out/finetune" "$clone/bert"     # the weights, as a folder
    if said "$(echo "$line" | sed "s/-O2/$opt/")" && ! grep -qiE 'warning|error:' "$work/said"; then pass; else fail "$line" "$(head -n 3 "$work/said")"; continue; fi
    if [ "$line" = "cp examples/mlp.c examples/mine.c" ]; then
        if edited "$work/change" "$clone/examples/mlp.c" > "$clone/examples/mine.c"; then pass; else fail "$line" "mlp.c lacks a line that is to be changed"; fi
    fi
    case $line in
        *./program) want='$0 ~ /^step 300: loss/ {ok = $4 < 0.5}' ;;
        ./sgemm*) want='/largest difference/ {ok = $(NF - 3) + 0 < 0.05}' ;;
        ./csv*|./convnet*) want='/has not seen/ {ok = $2 + 0 > 90}' ;;
        ./mine) want='/^gradient check in fp32: passed/ {right = 1} /^step/ {loss[n++] = $NF} END {ok = right && n == 3 && loss[2] < loss[0] && loss[2] < 0.2}' ;;
        ./finetune*) want='/^epoch 3/ {ok = $NF + 0 > 90}' ;;
        *) continue ;;
    esac
    if awk "$want END {exit !ok}" "$work/said"; then pass; else fail "$line" "$(tail -n 3 "$work/said")"; fi
done < "$work/commands"
[ -z "$(ls -A "$home")" ] && pass || fail "HOME" "was written to: $(ls -A "$home")"
closing
