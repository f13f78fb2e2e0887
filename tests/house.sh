#!/bin/sh
# house.sh - checks the project's own rules: exported symbols, sizes, the order of sections, version texts, and unfinished
# words.
. tests/lib.sh
cc=${CC:-gcc}
printf '#define AMP_IMPLEMENTATION\n#include "amp.h"\n' > "$work/impl.c"
# Without PIC, tables are constants to nm too.
$cc -std=c99 -O0 -fno-pic -fno-pie -I. -Wdeclaration-after-statement -c "$work/impl.c" -o "$work/impl.o" 2> "$work/impl.log" || cat "$work/impl.log"
if have nm; then
    stray=$(nm -g --defined-only "$work/impl.o" | awk '{print $3}' | grep -v '^amp_' | tr '\n' ' ')
    if [ -z "$stray" ]; then pass; else fail "exported symbols" "$stray"; fi
    data=$(nm -g --defined-only "$work/impl.o" | awk '$2 ~ /[BDCR]/ {print $3}' | tr '\n' ' ')
    if [ -z "$data" ]; then pass; else fail "exported data" "$data"; fi
    # Two thread-locals: the stack of regions, and what else a thread has (the last error's text, the callbacks it is in).
    # Four globals that change: the cache of the CPU's features (cached), the serial (count), how many threads run, forks.
    nm -f sysv "$work/impl.o" | awk -F'|' '$3 ~ /[bBdDcC]/ {sub(/ +$/, "", $1); sub(/\.[0-9]+$/, "", $1); sub(/.*\./, "", $1); print ($4 ~ /TLS/ ? "thread-local " : "") $1}' | sort > "$work/state"
    printf '%s\n' ampi_forks ampi_threads_running cached count 'thread-local ampi_regions' 'thread-local ampi_thread' > "$work/expected"
    if cmp -s "$work/state" "$work/expected"; then pass; else fail "state outside the context" "$(tr '\n' ' ' < "$work/state")"; fi
else
    skip "symbols" "no nm"
fi

# Macros: only AMP_ and AMPI_ names, and those the header asks POSIX with.
echo '#include "amp.h"' > "$work/use.c"
printf '#include <stddef.h>\n#include <stdint.h>\n#include <string.h>\n' > "$work/base.c"
$cc -std=gnu99 -I. -dM -E "$work/use.c" | awk '{print $2}' | sed 's/(.*//' | sort > "$work/macros"
$cc -std=gnu99 -dM -E "$work/base.c" | awk '{print $2}' | sed 's/(.*//' | sort > "$work/base"
stray=$(comm -23 "$work/macros" "$work/base" | grep -v '^AMPI\{0,1\}_' | tr '\n' ' ')
if [ -z "$stray" ]; then pass; else fail "macros" "$stray"; fi

# Declarations begin their block, those of loops' counters too.
mixed=$({ grep 'declaration-after-statement' "$work/impl.log"
          awk '/^\/\* Stop here/ {p = 1} p && /for \([a-z0-9_]+ [a-z]/ {print FILENAME ":" FNR}' amp.h; } | head -n 3)
if [ -z "$mixed" ]; then pass; else fail "declarations" "$mixed"; fi

# Sizes: the first prototype before line 400; lines of at most 120 columns.
line=$(grep -n '^AMP_API' amp.h | head -n 1 | cut -d: -f1)
if [ "$line" -lt 400 ]; then pass; else fail "first prototype" "line $line, must come before 400"; fi
long=$(awk 'length($0) > 120 {print FILENAME ":" FNR}' amp.h amp_cuda.cu examples/*.[ch] examples/adopt/*.[ch] | head -n 3 | tr '\n' ' ')
if [ -z "$long" ]; then pass; else fail "lines over 120 columns" "$long"; fi
broken=$(awk 'star && /^   [^ ]/ {print FILENAME ":" FNR} {star = /^ \*/}' amp.h amp_cuda.cu examples/*.[ch] examples/adopt/*.[ch] | head -n 3 | tr '\n' ' ')
if [ -z "$broken" ]; then pass; else fail "comments with and without stars" "$broken"; fi

# What a reader follows: the length of sections and functions, parameters, levels; each check finds what breaks it.
odd=$(awk -f tests/sizes.awk amp.h)
if [ -z "$odd" ]; then pass; else fail "sizes" "$(echo "$odd" | head -n 8)"; fi
while read -r rule body; do
    { printf 'static void ampi_x(int a) {\n'; printf "$body"; printf '}\n'; cat amp.h; } > "$work/long.h"
    if awk -f tests/sizes.awk "$work/long.h" | grep -q "ampi_x has .* $rule"; then pass; else fail "the check of sizes" "does not see $rule"; fi
done << 'end'
lines \n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n
levels \n    if (a) {\n        for (;;) {\n            while (a) {\n                if (a) {\n                    if (a) {}\n}\n}\n}\n}\n
parameters }\nstatic void ampi_x(int a, int b, int c, int d, int e, int f, int g, int h) {\n
end

# How many names a program sees.  Each new one is a decision: the number changes together with a line of the change log.
awk '/^\/\* Stop here/ {exit} {print}' amp.h > "$work/api"
functions=$(grep -cE '^AMP_API [^(]*\bamp_[a-z0-9_]+\(' "$work/api")
structs=$(grep -oE '^(typedef )?struct amp_[a-z0-9_]+' "$work/api" | awk '{print $NF}' | sort -u | wc -l)
said="$functions public functions and $structs structs"
if tr -s '\n ' ' ' < amp.h | grep -qF "$said"; then pass; else fail "public names" "the change log does not say: $said"; fi

# Each section has one place in the API: those that a training program calls first, and what kernels need last.  In the
# implementation they stand in the order of their numbers.
tags() { grep -o '^/\* ==== [0-9]* >>[a-z]*' | awk '{print $3, $4}' | uniq; }
tags < "$work/api" > "$work/api_tags"
awk '/^#endif \/\* AMP_IMPLEMENTATION/ {exit} p {print} /^\/\* Stop here/ {p = 1}' amp.h | tags > "$work/impl_tags"
twice=$(sort "$work/api_tags" "$work/impl_tags" | uniq -c | awk '$1 > 2' | tr '\n' ' ')
if [ -z "$(sort "$work/api_tags" | uniq -d)$(sort "$work/impl_tags" | uniq -d)$twice" ]; then pass; else fail "sections" "a tag stands twice: $twice"; fi
odd=$(sort "$work/api_tags" "$work/impl_tags" | uniq -u | grep -v -e '^6 >>workers$' -e '^6 >>products$' -e '^6 >>cpu$' -e '^16 >>kernels$' | tr '\n' ' ')
if [ -s "$work/impl_tags" ] && [ -z "$odd" ]; then pass; else fail "sections" "in the API or the implementation alone: $odd"; fi
if sort -csn -k 1,1 "$work/impl_tags" && grep -v -e '>>machine' -e '>>state' "$work/api_tags" | sort -csn -k 1,1 && [ "$(tail -n 1 "$work/api_tags")" = '16 >>kernels' ]; then pass
else fail "order of sections" "$(tr '\n' ' ' < "$work/api_tags") and $(tr '\n' ' ' < "$work/impl_tags")"; fi
listed=$(grep -oE '^       >>[a-z]+' amp.h | tr -d ' ' | sort -u) tagged=$(sed 's/.* //' "$work/api_tags" | sort -u)
if [ "$listed" = "$tagged" ]; then pass; else fail "CONTENTS" "lists other sections than there are"; fi

# What a user calls comes first: lines of the API half before amp_open and before the operators, and no kernel, rule or
# conversion before >>kernels.
for bound in "amp_open 500" "amp_linear 850"; do
    line=$(awk -v name=" ${bound% *}(" '/^#ifndef AMP_H_INCLUDED/ {from = NR} from && /^AMP(I_INLINE|_API) / && index($0, name) {print NR - from; exit}' amp.h)
    if [ "${line:-9999}" -lt "${bound#* }" ]; then pass; else fail "the user first" "$line lines before ${bound% *}, at most ${bound#* }"; fi
done
early=$(sed '/^\/\* ==== 16 >>kernels/q' "$work/api" | grep -E '^AMPI_HD |^(typedef )?struct amp_k_[a-z0-9_]+ \{|^struct amp_backend \{' | head -n 3)
if [ -z "$early" ]; then pass; else fail "the user first" "before >>kernels: $early"; fi

# A section of the implementation names only what stands in it or above it; the check finds each kind of breach, set into >>tensors.
upward() { awk -f tests/layers.awk "$1" "$1"; }
breaches=$(upward amp.h)
if [ -z "$breaches" ]; then pass; else fail "layers" "$(echo "$breaches" | head -n 8)"; fi
while read -r breach; do
    awk -v line="$breach" '/^\/\* ==== 5 >>state: implementation/ {print line} {print}' amp.h > "$work/breach.h"
    if [ "$(upward "$work/breach.h" | wc -l)" -eq 1 ]; then pass; else fail "the check of layers" "$breach: $(upward "$work/breach.h" | head -n 2)"; fi
done << 'end'
static void ampi_x(void) { amp_cast_cache_clear(NULL); }
static void ampi_x(void) { ampi_cache_clear_idle(NULL); }
static void *ampi_x(void) { return (void *)ampi_autocast_hear; }
static int ampi_x(void) { return AMPI_REGION_DEPTH; }
static void ampi_x(const amp_optimizer *o) { (void)o; }
static void ampi_x(void) { AMPI_PICK(ampi_gemm_kernels, AMP_CPU_SCALAR)->end(); }
static int ampi_is_storage(amp_dtype dtype);
AMP_API size_t amp_tune_text(void) { return 0; }
end

# Each struct has one owner: owners.txt lists the section that defines it, and after "also" the others that write its fields,
# as they may in agreement with the owner.  (After a change: awk -f tests/owners.awk amp.h amp.h | LC_ALL=C sort.)
awk -f tests/owners.awk amp.h amp.h | LC_ALL=C sort > "$work/owners"
if cmp -s "$work/owners" tests/owners.txt; then pass; else fail "owners" "$(diff "$work/owners" tests/owners.txt | head -n 6)"; fi

# One more operator takes the places that README.md lists and no other: probe.txt names them, with what each needs.
mkdir -p "$work/probe"
awk -f tests/probe.awk tests/probe.txt amp.h > "$work/probe/amp.h"
check "an operator more builds" $cc -std=c99 -O0 -Wall -Wextra -Werror -I"$work/probe" -Itests tests/probe.c -o "$work/probe/probe" -lm -lpthread
if "$work/probe/probe" > "$work/said" 2>&1; then pass; else fail "an operator more" "$(tail -n 5 "$work/said")"; fi
breaches=$(upward "$work/probe/amp.h")
if [ -z "$breaches" ]; then pass; else fail "an operator more" "$(echo "$breaches" | head -n 3)"; fi
tr -s '\n ' ' ' < tests/README.md > "$work/readme"
sed -n 's/^@ .* @ .* @ //p' tests/probe.txt > "$work/places"
if [ "$(wc -l < "$work/places")" -ge 10 ]; then pass; else fail "probe.txt" "no places"; fi
while read -r place; do
    if grep -qF -e "$place" "$work/readme"; then pass; else fail "places of an operator" "README.md does not say: $place"; fi
done < "$work/places"

# What amp_open compares: every struct of the API half stands in the list of sizes, but the one it compares by.
awk '/^\/\* Stop here/ {exit} {print}' amp.h | sed -nE 's/^(typedef )?struct (amp_[a-z0-9_]+) \{.*/\2/p' | grep -v '^amp_header$' | sort > "$work/structs"
awk '/^#define AMPI_STRUCTS\(X\)/ {p = 1} p {print} p && !/\\$/ {exit}' amp.h | grep -oE 'X\([a-z0-9_]+\)' | sed 's/X(\(.*\))/amp_\1/' | sort > "$work/listed"
odd=$(sort "$work/structs" "$work/listed" | uniq -u | tr '\n' ' ')
if [ "$(wc -l < "$work/listed")" -ge 90 ] && [ -z "$odd" ]; then pass; else fail "AMPI_STRUCTS" "lacks, or has and the header has not: $odd"; fi

# One version, everywhere the same.
text=$(sed -n 's/^#define AMP_VERSION_TEXT "\(.*\)"/\1/p' amp.h)
if head -n 1 amp.h | grep -q "v$text "; then pass; else fail "version" "line 1 does not say v$text"; fi
if grep -q "^   $text " amp.h; then pass; else fail "change log" "no entry for $text"; fi

# Every result a call may return is provoked by some test.
for name in $(grep -oE '^    X\(AMP_ERR_[A-Z0-9_]+' amp.h | sed 's/.*(//'); do
    if grep -q "$name" tests/*/t_*.c tests/cuda/t_*.cpp; then pass; else fail "provoked results" "no test provokes $name"; fi
done

# The page of errors has texts of every result; no text speaks of itself.
awk -f tests/error_texts.awk amp.h > "$work/texts"
for name in $(grep -oE '^    X\(AMP_ERR_[A-Z0-9_]+' amp.h | sed 's/.*(//'); do
    if grep -A1 "^$name " "$work/texts" | grep -q '^  .*\[amp.*\]$'; then pass; else fail "make error-texts" "no text of $name"; fi
done
odd=$(grep -nE 'the text|of yours' "$work/texts" | grep -v '<the text of an error>' | head -n 3)
if [ "$(wc -l < "$work/texts")" -gt 600 ] && [ -z "$odd" ]; then pass; else fail "make error-texts" "$odd"; fi

# Every test that the table of traps names exists and runs, and every test of t_traps.c is in it.
sed '/\*\//q' tests/hostile/t_traps.c > "$work/traps"
for held in $(grep -oE '\bt_[a-z_]+\.[a-z0-9_]{2,}' "$work/traps") $(sed -n 's/^TEST(\(.*\)) {$/t_traps.\1/p' tests/hostile/t_traps.c); do
    file=$(source_of "${held%%.*}") name=${held#*.}
    if grep -q "^TEST($name)" "$file" && grep -Eq "RUN(_LONG|_CI)?\($name\)" "$file" && grep -qw "$held" "$work/traps"; then pass
    else fail "table of traps" "$held is not there, does not run, or is not in the table"; fi
done
for script in $(grep -oE '\b[a-z]+\.sh\b' "$work/traps" | sort -u); do
    if [ -f "tests/examples/$script" ] || grep -q "tests/$script" Makefile; then pass; else fail "table of traps" "nobody runs $script"; fi
done

# Every public function is called where the host fails.
for name in $(awk '/^\/\* Stop here/ {exit} {print}' amp.h | grep -oE '^AMP_API [^(]*\bamp_[a-z0-9_]+\(' | grep -oE 'amp_[a-z0-9_]+\($' | sed 's/($//; s/^amp_open_abi$/amp_open/' | sort -u); do
    if grep -q "\b$name(" tests/hostile/t_anomalies.c; then pass; else fail "anomalies" "tests/hostile/t_anomalies.c does not call $name"; fi
done

# Records and results are whole: their last line ends an object.
for f in tests/records/*.json tests/bench/results/*.json; do
    case $(tail -n 1 "$f") in *'}') pass ;; *) fail "$f" "is cut off" ;; esac
done

# The table of tests/README.md has every test.
odd=$(sh tests/index.sh --check | tr '\n' ' ')
if [ -z "$odd" ]; then pass; else fail "files in tests/README.md" "sh tests/index.sh: $odd"; fi

# The table of sections there is that of today, but for the numbers of lines, which change all the time.
parts_of() { grep -E '^\| [0-9]+ `>>' | awk -F'|' '{print $2 $5 $6}'; }
sh tests/map.sh --table | parts_of > "$work/map"
if [ -s "$work/map" ] && parts_of < tests/README.md | cmp -s - "$work/map"; then pass; else fail "sections in tests/README.md" "sh tests/index.sh writes them"; fi
if sh tests/map.sh "$work/cut" > /dev/null && [ "$(cat "$work"/cut/amp_[0-9]* | wc -c)" -eq "$(wc -c < amp.h)" ] &&
    [ -z "$(find "$work/cut" -size +600k)" ]; then pass; else fail "make map" "the parts are not amp.h"; fi

# What the mutants change is still there: `make mutants` then finds each of them.
awk 'FNR == NR { if (/^- /) anchor[substr($0, 3)] = 1; next }
    { for (a in anchor) if (index($0, a)) delete anchor[a] }
    END { for (a in anchor) print a }' tests/mutants/mutants.txt amp.h > "$work/gone"
if [ ! -s "$work/gone" ]; then pass; else fail "anchors of the mutants" "amp.h has no: $(head -n 3 "$work/gone")"; fi

# A number of the log stands for one message: ids that calls share have the same beginning, and the backend's are its own.
{
    grep -ohE 'AMP_LOG_[A-Z]+, [0-9]{4}, .*' amp.h | sed -E 's/^AMP_LOG_[A-Z]+, ([0-9]{4}), ("%s".*|"[^"]{0,20}|).*/\1 \2/'
    grep -ohE 'AMPC_LOG_[A-Z]+ = [0-9]{4}' amp_cuda.cu | sed -E 's/(.*) = (.*)/\2 \1/'
} | sort -u > "$work/ids"
twice=$(awk '{print $1}' "$work/ids" | uniq -d | tr '\n' ' ')
if [ "$(wc -l < "$work/ids")" -ge 18 ] && [ -z "$twice" ]; then pass; else fail "ids of the log" "of several messages: $twice"; fi

# The only mention of CUDA's compiler is AMPI_HD; no CUDA header.
if [ "$(grep -c __CUDACC__ amp.h)" -eq 1 ] && ! grep -q 'include <cuda' amp.h; then pass; else fail "CUDA" "amp.h mentions it more than once"; fi
words=$(grep -nwiE 'todo|fixme|xxx|hack|placeholder' amp.h examples/*.[ch] | head -n 3)
if [ -z "$words" ]; then pass; else fail "unfinished words" "$words"; fi

# A function that a member points to is called as (s->f)(x): a program's macro f(x) then leaves the call alone.
bare=$($cc -fpreprocessed -E -P amp.h 2>/dev/null | sed 's/"[^"]*"//g' | grep -oE '(->|[A-Za-z0-9_]\.|[])]\.)[A-Za-z_][A-Za-z0-9_]*\(' | head -n 5 | tr '\n' ' ')
if [ -z "$bare" ]; then pass; else fail "calls through members without parentheses" "$bare"; fi

# Every AMP_ name that tests and examples use exists: in amp.h, in the shim, or as the variable of a setting or an example.  Text in
# quotes is the program's own business.
grep -ohE '\bAMPI?_[A-Z0-9_]+\b' amp.h examples/adopt/cblas.h tests/probe.txt > "$work/names"
sed -n 's/^    {"\([a-z0-9_]*\)", AMPI_[A-Z0-9]*, AMPI_AT(.*/AMP_\1/p' amp.h | tr '[:lower:]' '[:upper:]' >> "$work/names"
grep -ohE 'getenv\("AMP_[A-Z0-9_]+"' examples/*.h | sed 's/.*"\(.*\)"/\1/' >> "$work/names"         # variables of examples
sort -u "$work/names" > "$work/known"
unknown=$(sed 's/"[^"]*"//g' tests/*.[ch] tests/*/*.[ch] tests/*.sh tests/examples/*.sh examples/*.[ch] README.md Makefile | grep -ohE '\bAMP_[A-Z0-9_]+\b' | grep -v '_$' | sort -u | comm -23 - "$work/known" | tr '\n' ' ')
if [ -z "$unknown" ]; then pass; else fail "names amp.h does not know" "$unknown"; fi
closing
