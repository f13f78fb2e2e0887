#!/bin/sh
# docs.sh - checks that the README files and the manual are correct.  All their code must compile as C99 and as C++20, and
# their first programs must learn.  The commands under BUILD in the manual must work.  The manual's table of operators must
# agree with the structs.  Verdicts, gains and the numbers in the picture must be those of the result files.  Links must
# exist, and compilers must print the symptoms that the manual lists.
. tests/lib.sh
made build/amp.o
cc=${CC:-gcc}
warn="-Wall -Wextra -Werror -Wno-unused -I. -Itests"

# Programs that bring amp.h's implementation take that of build/amp.o, which is `make`'s: compile.sh compiles it in every way.
linked=-DAMP_IMPLEMENTATION_INCLUDED

# compile FILE NAME: by every compiler at hand.  What a designator leaves out is 0, whatever g++ 12 warns about.
compile() {
    for c in "$cc" clang; do
        if have "$c"; then check "$2, $c" "$c" -std=c99 $linked $warn -fsyntax-only -x c "$1"; else skip "$2" "no $c"; fi
    done
    for c in g++ clang++; do
        if have "$c"; then check "$2, $c" "$c" -std=c++20 $linked $warn -Wno-missing-field-initializers -fsyntax-only -x c++ "$1"; else skip "$2" "no $c"; fi
    done
}

awk -v dir="$work" '
    /^```(c|cpp|cuda|cmake)$/ {lang = substr($0, 4); n++; file = sprintf("%s/readme_%02d.%s", dir, n, lang); printf "" > file; on = 1; next}
    /^```/ {on = 0; if (file) close(file)}
    on {print > file}' README.md examples/README.md
sed '/^#ifndef AMP_H_INCLUDED/q' amp.h > "$work/manual"
sed '/^\/\* Stop here/q' amp.h | sed '1,/^#ifndef AMP_H_INCLUDED/d' > "$work/api"

# Code between lines stands inside a function after the declarations of docs_names.h: in README every `...` with a call or an
# assignment of amp.h's, but for the first column of tables, which is Python's.
fragments() {
    awk '/^```/ {code = !code} code {next}
         {line = $0; if (line ~ /^\|/) sub(/^\|[^|]*\|/, "", line)
          n = split(line, part, "`")
          for (i = 2; i <= n; i += 2) if (part[i] ~ /^[a-z_.]+( = |\().*(amp_|AMP_)/ || part[i] ~ /^amp_[a-z_]*\(.+\)/ || part[i] ~ /^[a-z]+\.[a-z_]+ = /)
              print "#line " FNR " \"" FILENAME "\"\n    {" part[i] ";}"}' README.md examples/README.md
}
{ echo '#include "docs_names.h"'; echo 'void block(void); void block(void) {'; fragments; echo '}'; } > "$work/fragments.c"
if [ "$(grep -c '{.*;}$' "$work/fragments.c")" -ge 12 ]; then compile "$work/fragments.c" "code within README's lines"; else fail "code within lines" "$(wc -l < "$work/fragments.c") lines found"; fi

for file in "$work"/readme_*.c "$work"/readme_*.cpp; do
    [ -s "$file" ] || continue
    if grep -q '^static .*{$' "$file"; then             # functions
        { echo '#include "docs_names.h"'; cat "$file"; } > "$file.new"
        mv "$file.new" "$file"
    elif ! grep -q 'main(' "$file"; then
        { echo '#include "docs_names.h"'; grep '^#' "$file"; echo 'amp_result block(void); amp_result block(void) {'; grep -v '^#' "$file"; echo '; return AMP_OK; }'; } > "$file.new"
        mv "$file.new" "$file"
    fi
    compile "$file" "$(basename "$file")"
done

# README's program learns, and prints the losses that README says, which the machine's precision moves in the last digit.
if $cc -O0 $linked -I. "$work/readme_01.c" build/amp.o -o "$work/readme_01" -lm -lpthread > "$work/log" 2>&1 && "$work/readme_01" > "$work/readme_01.log" 2>&1 &&
   awk '$3 == "loss" {loss[n++] = $4} END {exit !(n == 2 && loss[0] > 1 && loss[1] < 0.3)}' "$work/readme_01.log"; then pass
else fail "README's program learns" "$(head -n 5 "$work/log") $(head -n 5 "$work/readme_01.log")"; fi
said=$(sed -n 's/^    \.\/program *# \(step 1: .*\)/\1/p' README.md)
printed=$(paste -s -d, "$work/readme_01.log" | sed 's/,/, /')
if [ -n "$said" ] && printf '%s\n%s\n' "$said" "$printed" | awk '{for (i = 1; i <= NF; i++) {
    if (NR == 1) was[i] = $i; else if ($i != was[i] && !($i + 0 > 0 && ($i - was[i]) ^ 2 <= 0.003 ^ 2)) bad = 1} n[NR] = NF} END {exit bad || n[1] != n[2]}'; then pass; else fail "README's losses" "\"$said\", it prints $(cat "$work/readme_01.log")"; fi

# Functions and fields that README names exist.
for name in $(awk '/^```/ {code = !code} code {next} {line = $0; if (line ~ /^\|/) sub(/^\|[^|]*\|/, "", line); n = split(line, part, "`")
                  for (i = 2; i <= n; i += 2) if (part[i] ~ /^(amp_|\.)[a-z0-9_]+$/) print part[i]}' README.md examples/README.md | sort -u); do
    if grep -qw -- "${name#.}" "$work/api" amp_cuda.cu; then pass; else fail "names" "amp.h has no $name"; fi
done

# ---- The manual.  A user's part ends by line 250, and the tables of numbers, threads and bits stand at its end.
order=$(sed -n 's/^   \(A PROGRAM\|BUILD\|STEP BY STEP\|OPERATORS\|CONTENTS AT A GLANCE\|THREADS\|SAME BITS\)  .*/\1/p; s/^   \(USE\|BUILD\|NUMBERS\)$/\1/p' "$work/manual" | tr '\n' ',')
if [ "$order" = "USE,A PROGRAM,BUILD,STEP BY STEP,OPERATORS,CONTENTS AT A GLANCE,NUMBERS,THREADS,SAME BITS," ]; then pass; else fail "the manual's order" "$order"; fi
if [ "$(grep -n '^   CONTENTS' "$work/manual" | cut -d: -f1)" -le 250 ]; then pass; else fail "the manual's first 250 lines" "do not hold all up to CONTENTS"; fi

# Use in three lines: the file with the implementation, the include, and the commands, which are BUILD's.  The program has
# at most forty lines, each with one statement, and is built by each line of BUILD, but without optimisation, in a folder of
# its own; nvcc's lines are tried where there is one and `make cuda` has built the backend.
sed -n '/^   USE$/,/^   A PROGRAM/p' "$work/manual" | grep '^     [0-9] ' > "$work/use"
if [ "$(wc -l < "$work/use")" -eq 3 ] && grep -q '^     1 .*#define AMP_IMPLEMENTATION .*#include "amp.h"$' "$work/use"; then pass; else fail "USE" "$(cat "$work/use")"; fi
sed -n 's/^     3 .*:  \(gcc .*\)/\1/p' "$work/use" | sed 's/; /\n/' > "$work/commands"
[ "$(wc -l < "$work/commands")" -eq 2 ] || fail "USE" "has no commands"
while IFS= read -r line; do
    if grep -qxF "       $line" "$work/manual"; then pass; else fail "USE" "BUILD has no line: $line"; fi
done < "$work/commands"
mkdir "$work/manual_1"
cp amp.h "$work/manual_1"
program=$work/manual_1/program.c
awk '/^   A PROGRAM/ {title = 1} title && /^    #include "amp.h"/ {on = 1} on {print substr($0, 5)} on && /^    }$/ && main {exit} /int main\(/ {main = 1}' "$work/manual" > "$program"
crowded=$(sed 's/for ([^)]*;[^)]*)//; s/"[^"]*"//g' "$program" | grep -v '^#' | grep -c ';.*;')
if [ "$(wc -l < "$program")" -ge 20 ] && [ "$(wc -l < "$program")" -le 40 ] && [ "$crowded" -eq 0 ]; then pass
else fail "the manual's program" "has $(wc -l < "$program") lines, at most 40, and $crowded with several statements"; fi
for c in "$cc -std=c99" "clang -std=c99" "g++ -x c++ -std=c++20 -Wno-missing-field-initializers" "clang++ -x c++ -std=c++20"; do
    if have ${c%% *}; then check "the manual's program, $c" $c -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror -I. -fsyntax-only "$program"; else skip "the manual's program" "no ${c%% *}"; fi
done
sed -n '/^   BUILD/,/^   LEAVING/s/^       \(gcc\|g++\|printf\|nvcc\) /\1 /p' "$work/manual" > "$work/lines"
[ "$(wc -l < "$work/lines")" -eq 8 ] || fail "BUILD" "has $(wc -l < "$work/lines") lines to run, must have 8"
[ -s build/amp_cuda.o ] && cp build/amp_cuda.o "$work/manual_1"
cp "$program" "$work/manual_1/program.cpp"
while IFS= read -r line; do
    case $line in
        nvcc*" -c "*) continue ;;                       # make cuda does that
        nvcc*) if ! have nvcc || [ ! -s "$work/manual_1/amp_cuda.o" ]; then skip "BUILD: $line" "no nvcc, or make cuda was not run"; continue; fi ;;
        g++*) have g++ || { skip "BUILD: $line" "no g++"; continue; } ;;
        "gcc -O2 program.c -o "*) cp "$program" "$work/included.c"; sed -i '1i #define AMP_IMPLEMENTATION' "$program" ;;     # of one file
    esac
    case $line in *" -c amp.c"*)                           # that its file brings the implementation, whole, is enough
        check "BUILD: $line" sh -c "cd '$work/manual_1' && $cc -fsyntax-only amp.c && $cc -E amp.c | grep -q 'amp_version(void) {'"
        cp build/amp.o "$work/manual_1"; continue ;;
    esac
    line=$(echo "$line" | sed "s/-O2/-O0/; s/^gcc/$(echo "$cc" | sed 's/[\/&]/\\&/g')/")
    check "BUILD: $line" sh -c "cd '$work/manual_1' && $line"
    case $line in
        *" -o program "*)                               # it learns, however it was built
            if (cd "$work/manual_1" && ./program > log 2>&1) && awk '$3 == "loss" {loss[n++] = $4} END {exit !(n == 3 && loss[0] < 0.3 && loss[1] < loss[0] && loss[2] < loss[1])}' "$work/manual_1/log"; then pass
            else fail "the manual's program" "$line: $(cat "$work/manual_1/log")"; fi
            rm -f "$work/manual_1/program" ;;
    esac
    [ -s "$work/included.c" ] && mv "$work/included.c" "$program"
done < "$work/lines"

# Calls and assignments in its text compile; functions, types and constants that it names exist.
awk 'program && /^   ([A-Z]|  [A-Za-z])/ {program = 0} /^   A PROGRAM/ {program = 1} !program' "$work/manual" > "$work/text"
{ echo '#include "docs_names.h"'; echo 'void block(void); void block(void) {'
  grep -oE '(while \()?\bamp_[a-z_]+\([^()]*\)\)?|\b(desc|ce)\.[a-z_]+ = amp_[a-z_]+\(\)' "$work/text" | grep -v 'rows' | sed 's/^/{ /; s/$/; }/'; echo '}'; } > "$work/calls.c"
if [ "$(grep -c '^{ ' "$work/calls.c")" -ge 8 ]; then compile "$work/calls.c" "calls in the manual's text"; else fail "calls in the manual's text" "$(cat "$work/calls.c")"; fi
for name in $(sed 's/amp_NAME[a-z_]*//g' "$work/text" | grep -oE '\b(amp|AMP)_[A-Za-z0-9_]+\b' | grep -v -e '_$' -e '^amp_cuda$' | sort -u); do
    if grep -qw -- "$name" "$work/api" || grep -qF "defined($name)" amp.h; then pass; else fail "names in the manual" "amp.h has no $name"; fi
done

# So do those of the table of defaults at the end of the API; t_zeros.c holds its numbers.
sed -n "/^   WHAT DIFFERS FROM PYTORCH'S DEFAULTS$/,/^   THREADS AND CALLBACKS/p" "$work/api" > "$work/differs"
sed '/^   HOW DO I  /,$d' "$work/api" > "$work/declared"
[ "$(wc -l < "$work/differs")" -ge 50 ] || fail "WHAT DIFFERS" "has $(wc -l < "$work/differs") lines"
for name in $(grep -oE '\B\.[a-z_]+( =|$)|\bamp_[a-z0-9_]+|\bAMP_[A-Z0-9_]+' "$work/differs" | sed 's/^\.//; s/ =$//' | sort -u); do
    if grep -qw -- "$name" "$work/declared"; then pass; else fail "names in WHAT DIFFERS" "amp.h has no $name"; fi
done

# HOW DO I: thirty questions or more, each with code.  Each answer's code compiles in a block of its own after these
# declarations, as C99 and as C++20; what is in its text exists.
cat > "$work/how.c" << 'end'
#include "amp.h"
#include "examples/safetensors.h"
void how(void);
amp_value record(void *user, amp_tape *tape);
int prepare(void *user, amp_context *amp, int64_t batch);
amp_result copy_forward(void *user, const amp_custom_call *call);
amp_result silu_forward(void *user, const amp_custom_call *call);
amp_result silu_backward(void *user, const amp_custom_call *call);
void my_adam(float *weights, const float *gradients, int64_t t);
void *my_alloc(void *user, size_t bytes, int32_t device, void *stream);
void my_free(void *user, void *ptr, size_t bytes, int32_t device, void *stream);
static amp_context *amp; static amp_model *model; static amp_tape *tape; static amp_optimizer *optimizer, *second;
static amp_scaler *scaler; static amp_loader *loader; static amp_state *state; static amp_monitor *monitor; static amp_graph *graph;
static amp_desc desc; static amp_settings settings; static amp_autocast_desc region; static amp_scaler_desc scaling;
static amp_optimizer_desc adamw; static amp_loader_desc train, valid; static amp_tape_desc tape_desc; static amp_attention_op attention; static amp_softmax_op softmax;
static amp_tune_report report; static amp_step_result result; static amp_memory_info memory; static amp_reducer reducer;
static amp_param params[8], *table; static amp_range ranges[8]; static amp_tensor x, dx, ids; static amp_value h, scores, logits, loss;
static st_file file; static st_writer writer; static const amp_custom_call *call;
static int64_t i, n = 8, rows = 8, n_ranges = 8, step, t, bytes = 8, keys = 8, heads = 2, dim = 4, wide[8];
static int32_t apply, labels[8], lengths[8], documents[8];
static float value, values[8], average[8], weights[8], gradients[8], k_cache[64], v_cache[64]; static double lr; static char text[800];
static int net; static void *stream, *handle, *event, *other_event, *on_gpu;
end
awk '/^   HOW DO I  / {on = 1; print "void how(void) {"} /^   SETTINGS  / && on {print "}\n}"; exit}
     on && /^     [a-z].*[?]$/ {if (n++) print "}"; print "{   /*? " n " */"}
     on && /^           [^ ]/ {print "#line " FNR " \"amp.h\""} on && /^           / {print}' amp.h >> "$work/how.c"
asked=$(grep -c '^{   /\*?' "$work/how.c") bare=$(awk '/^{/ {open = 1; next} /^}/ {if (open) n++} {open = 0} END {print n + 0}' "$work/how.c")
if [ "$asked" -ge 30 ] && [ "$bare" -eq 0 ]; then pass; else fail "HOW DO I" "$asked questions, at least 30, and $bare without code"; fi
for c in "$cc -std=c99" "clang -std=c99" "g++ -x c++ -std=c++20 -Wno-missing-field-initializers" "clang++ -x c++ -std=c++20"; do
    if have ${c%% *}; then check "HOW DO I, $c" $c -Wall -Wextra -Wconversion -Werror -I. -fsyntax-only "$work/how.c"; else skip "HOW DO I" "no ${c%% *}"; fi
done
sed -n '/^   HOW DO I  /,/^   SETTINGS  /p' "$work/api" | sed 's/[.][a-z_]*(//g' > "$work/answers"     # (.detach()) is PyTorch's
for name in $(grep -oE '(^|[ (])[.][a-z_]{2,}|\bamp_[a-z0-9_]+|\bAMP_[A-Z0-9_]+|\bexamples/[a-z_]+\.[ch]' "$work/answers" | sed 's/^[ (]*[.]*//' | sort -u); do
    case $name in examples/*) if [ -f "$name" ]; then pass; else fail "HOW DO I" "there is no $name"; fi; continue ;; esac
    if grep -qw -- "$name" "$work/declared"; then pass; else fail "names in HOW DO I" "amp.h has no $name"; fi
done

# Its table of operators: every operator, with fields of its struct in the order of declaration.
awk '/^   OPERATORS/ {on = 1} /^       Besides/ {exit} on && /^       [a-z]/ {name = $1; names[++n] = name} on && name != "" {text[name] = text[name] " " substr($0, 23)}
     END {for (i = 1; i <= n; i++) {
              type = names[i]; if (type ~ /norm$/) type = "norm"
              line = text[names[i]]; gsub(/\.mask = \{[^}]*\}|with \.pre[^;]*/, "", line); fields = ""
              while (match(line, /(^|[ [(])\.[a-z_]+/)) {fields = fields (fields == "" ? "" : ", ") substr(line, RSTART, RLENGTH) " = {}"; line = substr(line, RSTART + RLENGTH)}
              gsub(/[[( ]+\./, ".", fields)
              print "static amp_result (*const " names[i] "_call)(amp_context *, amp_" type "_op *) = amp_" names[i] ";"
              print "static amp_" type "_op " names[i] "_op = {" fields "};"}}' "$work/manual" > "$work/operators"
{ echo '#include "amp.h"'; cat "$work/operators"
  sed -n 's/.* \(\.mask = {[^}]*}\).*/static amp_attention_op masked = {\1};/p' "$work/text"; } > "$work/operators.cpp"
grep -q masked "$work/operators.cpp" || fail "OPERATORS" "has no mask"
if [ "$(grep -c _call "$work/operators")" -eq 14 ]; then pass; else fail "OPERATORS" "$(grep -c _call "$work/operators") of 14"; fi
for c in g++ clang++; do
    if have $c; then check "OPERATORS, $c" $c -std=c++20 -Wall -Wextra -Wpedantic -Werror -Wno-unused -Wno-missing-field-initializers -I. -fsyntax-only "$work/operators.cpp"; else skip "OPERATORS" "no $c"; fi
done

# Verdicts and gains are those of the result files that the documents link; table.py has written them.
result() { grep -o "tests/bench/results/$1-[^)]*\.json" README.md | head -n 1; }
verdicts=$(awk '/"bar":/ {step = /"step /} /"verdict":/ {all++; steps += step; if (/"PASS"/) {met++; met_steps += step}}
    END {print met " of " all " bars are met, " met_steps " of " steps " of the training steps"}' "$(result cpu)")
for file in README.md tests/bench/README.md; do
    if grep -q "^$verdicts" $file; then pass; else fail "$file's verdict" "must be: $verdicts"; fi
done
ranks=$(awk '/"bar":/ {all++} /"verdict": "PASS"/ {met++} END {print met " of " all " bars are met"}' "$(result ddp)")
if grep "^Data-parallel" README.md | grep -q "$ranks"; then pass; else fail "README.md's verdict on ranks" "must be: $ranks"; fi
gain() { sed -n "s/.*\"$1\", \"seconds\": \([0-9.]*\).*/\1/p" "$(result adopt)"; }
ratio_of() { echo "$(gain "$1") $(gain "$2")" | awk '{printf "%.1fx", $1 / $2}'; }
gemm=$(ratio_of before "after, fp32")
for file in README.md examples/adopt/README.md; do
    for claim in "$gemm in fp32, all of it the GEMM's" \
        "$(ratio_of before "after, bf16") in bf16: $gemm from the GEMM, $(ratio_of "after, fp32" "after, bf16") from precision" \
        "$(ratio_of before "after, fp16") in fp16: $gemm from the GEMM, $(ratio_of "after, fp32" "after, fp16") from precision"; do
        if grep -qF "$claim" $file; then pass; else fail "the gain of adopting in $file" "must be: $claim"; fi
    done
done
# The picture's numbers, and the table's: tokens/s of the first step row, of each program.
while IFS='|' read -r key label; do
    rate=$(awk -v key="\"$key\":" 'index($0, key) {on = 1} on && /"tokens_per_s"/ {gsub(/[^0-9.]/, ""); printf "%.0f", $0; exit}' "$(result cpu)")
    if [ -n "$rate" ] && tr -d '\n' < examples/plot/bars.svg | grep -q ">$label<" && grep -q ">$rate<" examples/plot/bars.svg && grep '^| GPT-2 124M, T=64' README.md | grep -q " $rate "; then pass
    else fail "the bar chart" "$label must be $rate"; fi
done << 'end'
amp.h bf16|amp.h, bf16
torch compile bf16|PyTorch compiled, bf16
torch eager bf16|PyTorch, bf16
amp.h fp32|amp.h, fp32
torch compile fp32|PyTorch compiled, fp32
torch eager fp32|PyTorch, fp32
llm.c with BLAS|llm.c with OpenBLAS, fp32
llm.c|llm.c, fp32
end
if [ "$(grep -o '<text' examples/plot/bars.svg | wc -l)" -eq 17 ]; then pass; else fail "the bar chart" "has other texts than a title, 8 labels and 8 numbers"; fi
# Every picture is shown by one of the two READMEs; that of a run has steps that were skipped, beside the mark in its key.
for picture in examples/plot/*.svg; do
    if grep -qF "($picture)" README.md || grep -qF "(${picture#examples/})" examples/README.md; then pass; else fail "pictures" "nobody links $picture"; fi
done
if [ "$(grep -c "<use xlink:href='#gpPt1' transform" examples/plot/run.svg)" -ge 6 ] && grep -q '>skipped step<' examples/plot/run.svg; then pass; else fail "run.svg" "shows no skipped steps"; fi
if have python3; then
    for name in steps bench adopt gpu state example; do
        file=$(python3 - "$name" << 'end'
import sys
sys.path.insert(0, "tests/bench")
import table
print(table.PLACES[sys.argv[1]])
end
)
        sed -n "/<!-- $name:begin -->/,/<!-- $name:end -->/p" "$file" | sed '1d;$d' > "$work/block"
        python3 tests/bench/table.py --print --only $name > "$work/written" 2> "$work/log"
        if [ -s "$work/block" ] && cmp -s "$work/block" "$work/written"; then pass; else fail "$file" "is not what table.py writes: $(diff "$work/block" "$work/written" | head -n 4) $(tail -n 1 "$work/log")"; fi
    done
else skip "documents as table.py writes them" "no python3"; fi

# README: two minutes to read, the GPU's state first; what its links name is there.
if [ "$(wc -l < README.md)" -le 160 ]; then pass; else fail "README.md" "$(wc -l < README.md) lines, at most 160"; fi
if sed -n '/^## Is it for me/,/^## /p' README.md | sed -n 4p | grep -q '^- [*][*]GPU[*][*]: the CUDA backend'; then pass
else fail "README.md" "'Is it for me' does not begin with the GPU's state"; fi
# Its program is short, with one statement in each line; it is built by lines of the manual's BUILD.
crowded=$(sed 's/for ([^)]*;[^)]*)//; s/"[^"]*"//g' "$work/readme_01.c" | grep -c ';.*;')
if [ "$(wc -l < "$work/readme_01.c")" -le 32 ] && [ "$crowded" -eq 0 ]; then pass; else fail "README's short program" "has $(wc -l < "$work/readme_01.c") lines, at most 32, and $crowded with several statements"; fi
sed -n '/^## A short program/,/^## Try it/p' README.md | sed -n 's/  *# .*//; s/^    \(printf\|gcc\) /\1 /p' > "$work/commands"
[ "$(wc -l < "$work/commands")" -eq 3 ] || fail "README's short program" "has $(wc -l < "$work/commands") commands that build it, must have 3"
while IFS= read -r line; do
    if grep -qxF "       $line" "$work/manual"; then pass; else fail "README's short program" "BUILD has no line: $line"; fi
done < "$work/commands"
for file in README.md examples/README.md examples/adopt/README.md tests/bench/README.md; do
    for link in $(grep -oE '\]\([^)]+\)' $file | sed 's/^](//; s/)$//' | grep -v '^http' | sort -u); do
        if [ -e "$(dirname $file)/${link%%#*}" ]; then pass; else fail "links of $file" "there is no $link"; fi
    done
done

# The build by CMake optimises amp.c.
if have cmake && have g++; then
    mkdir "$work/cmake"
    cp amp.h "$work/cmake"; cp "$work"/readme_*.cmake "$work/cmake/CMakeLists.txt"
    printf '#define AMP_IMPLEMENTATION\n#include "amp.h"\n' > "$work/cmake/amp.c"
    sed '/^#define AMP_IMPLEMENTATION/d' "$work/readme_01.c" | tee "$work/cmake/program.c" > "$work/cmake/program.cpp"
    if (cd "$work/cmake" && cmake -B build -DCMAKE_EXPORT_COMPILE_COMMANDS=ON > log 2>&1) && grep 'amp\.c' "$work/cmake/build/compile_commands.json" | grep -q -e '-O[23]'; then pass; else fail "CMake" "$(tail -n 5 "$work/cmake/log") $(grep command "$work/cmake/build/compile_commands.json")"; fi
else skip "CMake" "no cmake or no g++"; fi

# What a compiler says when the system headers come first under -std=c99.
printf '#include <stdio.h>\n#define AMP_IMPLEMENTATION\n#include "amp.h"\n' > "$work/late.c"
words=$($cc -std=c99 -fsyntax-only -I. "$work/late.c" 2>&1 | grep 'error' | head -n 1)
symptom='include amp.h before system headers'
sed -n '/^   WHEN SOMETHING IS WRONG/,/^\*\//p' amp.h > "$work/symptoms"
for name in $(grep -oE '\b(amp_[a-z_]+|\.[a-z_]+[a-z])\b' "$work/symptoms" | grep -v '^amp_\.*$' | sort -u); do
    if sed '/^   WHEN SOMETHING IS WRONG/,/^\*\//d' "$work/api" | grep -qw -- "${name#.}"; then pass; else fail "WHEN SOMETHING IS WRONG" "amp.h has no $name"; fi
done
if echo "$words" | grep -q "$symptom" && grep -q "$symptom" "$work/symptoms"; then pass; else fail "-std=c99" "the first error is: $words"; fi

# Whoever finds steps slow is led to what the manual says of threads.
if grep -q 'wait_seconds;.*: THREADS' amp.h && grep -q '^   THREADS ' amp.h; then pass; else fail "wait_seconds" "does not point to THREADS"; fi

# Without CC make takes gcc.
if [ "$(env -u CC -u MAKEFLAGS -u MFLAGS -u MAKELEVEL make -pn help CUDA=0 2>/dev/null | grep -E '^CC ?:?=')" = "CC := gcc" ]; then pass; else fail "CC" "the Makefile's default is not gcc"; fi

# The functions that an example's head points to are mixed precision: its region, its scale and its step.
for program in train_gpt train_classifier; do
    for call in amp_tape_begin amp_scaler_create amp_scaler_scale_ptr amp_step; do
        held=
        for name in $(sed -n '/Read it from the bottom/,/\*\//p' examples/$program.c | grep -oE '[a-z]+_[a-z_]+'); do
            if sed -n "/^static .*[ *]$name(.*{\$/,/^}/p" examples/$program.c examples/*.h | grep -q "$call("; then held=$name; fi
        done
        if [ -n "$held" ]; then pass; else fail "the head of $program.c" "points to no function with $call"; fi
    done
done

# Lines of code, without blanks and comments: of a file, or of one function in it.
code_lines() {
    awk -v name="$2" '{text = $0; gsub(/\/\*[^*]*\*\//, "", text)}
        inside {if (text ~ /\*\//) inside = 0; next}
        text ~ /^ *\/\*/ {inside = 1; next}
        name != "" && !on {if (index(text, " " name "(") && text ~ /\{$/) on = 1; else next}
        text !~ /^ *$/ {n++}
        on && text == "}" {exit}
        END {print n + 0}' "$1"
}
# Of Python: without blanks, comments and docstrings.
python_lines() {
    awk '/^ *"""/ {if (!inside && $0 !~ /""".*"""$/) inside = 1; else inside = 0; next}
        inside {if ($0 ~ /"""/) inside = 0; next}
        !/^ *(#.*)?$/ {n++}
        END {print n + 0}' "$1"
}
# The table of lines in tests/bench/README.md: of the GPT's block its function and, apart, those it calls; of the loops, that of
# quickstart.c with its evaluation beside PyTorch's from the first epoch on.
shared=0 ggml_shared=0
for function in gpt_join gpt_linear gpt_norm gpt_dropout; do shared=$((shared + $(code_lines examples/gpt.h $function))); done
for function in linear norm part; do ggml_shared=$((ggml_shared + $(code_lines tests/bench/lines/gpt_block_ggml.c "*$function"))); done
sed -n '/^    for (int64_t step/,/^    }/p' examples/quickstart.c > "$work/loop.c"
sed -n '/^    for epoch/,$p' tests/bench/lines/loop.py > "$work/loop.py"
sed -n '/def forward/,$p' tests/bench/lines/gpt_block.py > "$work/forward.py"
loop=$(($(code_lines "$work/loop.c" "") + $(code_lines examples/quickstart.c accuracy)))
if [ "$loop" -gt 10 ] && [ "$loop" -le 25 ]; then pass; else fail "lines of the training loop" "$loop, at most 25"; fi
while IFS= read -r row; do
    if grep -qF "$row" tests/bench/README.md; then pass; else fail "the table of lines" "counted: $row"; fi
done <<COUNTS
[mlp.c](../../examples/mlp.c) | $(code_lines examples/mlp.c "") | $(python_lines tests/bench/lines/mlp.py) | $(code_lines tests/bench/lines/mlp_ggml.c ""),
[gpt.h](../../examples/gpt.h) | $(code_lines examples/gpt.h gpt_block) + $shared | $(python_lines "$work/forward.py") | $(code_lines tests/bench/lines/gpt_block_ggml.c "*block") + $ggml_shared,
[quickstart.c](../../examples/quickstart.c) | $loop | $(python_lines "$work/loop.py") | no
COUNTS
while read -r file function most; do
    [ "$function" = - ] && function=
    n=$(code_lines "examples/$file" "$function")
    if [ "$n" -gt 3 ] && [ "$n" -le "$most" ]; then pass; else fail "lines of $file $function" "$n, at most $most"; fi
done <<'BOUNDS'
gpt.h - 150
gpt.h gpt_block 12
encoder.h - 220
deberta.h - 120
llama.h - 120
mlp.c - 40
quickstart.c - 60
BOUNDS

# examples/adopt/README.md shows every line that adopting amp.h changed, but for the two comments at the top.
awk '/^```diff$/ {on = 1; next} /^```/ {on = 0} on' examples/adopt/README.md > "$work/shown"
diff -U0 examples/adopt/before.c examples/adopt/after.c | grep '^[-+]' | grep -v -e '^---' -e '^+++' -e '^[-+]/\* ' -e '^[-+] \*' -e '^[-+]$' > "$work/changed"
if [ -s "$work/shown" ] && cmp -s "$work/shown" "$work/changed"; then pass; else fail "the diff of adopting" "is not that of examples/adopt: $(diff "$work/shown" "$work/changed" | head -n 5)"; fi

# The page of `make docs`: an anchor for every function, no link to nowhere, no id twice, and every element closed.
page=$work/index.html
if awk -f examples/docs.awk amp.h > "$page" 2> "$work/log" && [ ! -s "$work/log" ]; then pass; else fail "make docs" "$(head -n 2 "$work/log")"; fi
grep -oE ' id="[^"]+"' "$page" | sed 's/ id="//; s/"$//' | sort > "$work/ids"
missing=$(grep -oE '^AMP_API [^(]*\bamp_[a-z0-9_]+\(' "$work/api" | grep -oE 'amp_[a-z0-9_]+\($' | tr -d '(' | sort -u | comm -23 - "$work/ids" | head -n 3 | tr '\n' ' ')
if [ -z "$missing" ] && [ "$(grep -c '^amp_' "$work/ids")" -ge 200 ]; then pass; else fail "make docs" "no anchor for $missing"; fi
if [ -z "$(uniq -d "$work/ids")" ]; then pass; else fail "make docs" "ids that are there twice: $(uniq -d "$work/ids" | head -n 3 | tr '\n' ' ')"; fi
nowhere=$(grep -oE 'href="#[^"]+"' "$page" | sed 's/href="#//; s/"$//' | sort -u | comm -23 - "$work/ids" | head -n 3 | tr '\n' ' ')
if [ -z "$nowhere" ]; then pass; else fail "make docs" "links to nowhere: $nowhere"; fi
# A chapter's title is its capitals alone, also where its text begins on the same line, and none of that text is lost.
titles=$(sed -n 's/^<section id="[^"]*"><h2><a[^>]*>\(.*\)<\/a><\/h2>$/\1/p' "$page")
if [ "$(echo "$titles" | wc -l)" -ge 20 ] && ! echo "$titles" | grep -q "[^A-Z' ]" && grep -q '^<pre>for readers who know PyTorch' "$page"; then pass
else fail "make docs" "titles of chapters: $(echo "$titles" | grep "[^A-Z' ]" | head -n 2)"; fi
# So are the chapters behind the declarations, whose code has links too.
if echo "$titles" | grep -q '^HOW DO I$' && grep -q '^           <a href="#amp_model_freeze">' "$page"; then pass; else fail "make docs" "has no chapter HOW DO I"; fi
for tag in section pre i s b a h2 div nav main; do
    if [ "$(grep -oE "<$tag[ >]" "$page" | wc -l)" -eq "$(grep -o "</$tag>" "$page" | wc -l)" ]; then pass; else fail "make docs" "<$tag> is not always closed"; fi
done
closing
