#!/bin/sh
# index.sh - writes the table of sections and the table of test files into tests/README.md.  The table of sections comes
# from map.sh.  The table of test files has the first sentence of each file's first comment, and the CPU seconds that the
# file took in the last `make test` and `make test-ci` (build/times*.txt).  Files that did not run there keep their numbers.
# `index.sh --check` prints the files that the table lacks, and those in the table that no longer exist.
export LC_ALL=C
readme=tests/README.md times="/dev/null $(ls build/times*.txt 2>/dev/null)"
files() { ls tests/*.sh tests/*/*.sh tests/*/t_*.c tests/*/t_*.cpp tests/gpu/t_*.cu tests/hostile/crash/*.c tests/hostile/fuzz/run.sh tests/torch/differential/*.py; }

# The first sentence of a file's head, without its name.
head_of() {
    sed 's:^#!.*::; s:^/\* *::; s:^ \*/*::; s:^# *::; s:^""" *::; s:^"*::; s: *\*/.*::' "$1" | awk 'NF {on = 1; printf "%s ", $0} on && /\. |\.$|^ *$/ {exit} NR > 12 {exit}' |
        sed -E 's/^[a-z_0-9.]+( [A-Z[][^-]*)? - //; s/  +/ /g; s/\. .*//; s/[. ]*$//; s/\|/or/g' | cut -c1-220
}
if [ "$1" = --check ]; then
    files | sed 's:^tests/::' | sort -u > "${TMPDIR:-/tmp}/index.$$"
    sed -n '/^<!-- index/,/^<!-- end/ s/^| `\([^`]*\)` | .*/\1/p' $readme | sort | comm -3 - "${TMPDIR:-/tmp}/index.$$" | tr -d '\t'
    rm -f "${TMPDIR:-/tmp}/index.$$"
    exit
fi
{
    sed '/^<!-- sections -->$/q' $readme
    printf '\n'
    sh tests/map.sh --table
    printf '\n'
    sed -n '/^<!-- end of the sections -->$/,$p' $readme
} > "$readme.new" && mv "$readme.new" $readme
{
    sed '/^<!-- index -->$/q' $readme
    printf '\n| file | what it holds | seconds |\n|---|---|---|\n'
    for file in $(files | sort -u); do
        name=$(basename "${file%.*}") was=$(sed -n "s:^| .${file#tests/}. | .* | \([0-9.]*\) *|\$:\1:p" $readme)
        now=$(awk -v file="$file" -v name="$name" '$3 == file || (file !~ /\.sh$/ && $3 == "build/" name) {t = $2} END {print t}' $times)
        echo "| \`${file#tests/}\` | $(head_of "$file") | ${now:-$was} |"
    done
    printf '\n'
    sed -n '/^<!-- end of the index -->$/,$p' $readme
} > "$readme.new" && mv "$readme.new" $readme
