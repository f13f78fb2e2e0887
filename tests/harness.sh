#!/bin/sh
# harness.sh - checks that the test harness reports a failure whenever it must.  It runs programs whose exit status and
# closing line disagree, programs that ran no tests or did not start, and scripts without a temporary folder.
. tests/lib.sh
gone=$work/gone

# program NAME STATUS LINE: a test program that prints the line and ends with the status.
program() { printf 'echo "%s"\nexit %s\n' "$3" "$2" > "$work/$1.sh"; }
# red NAME LINE COMMAND...: ends with a failure, and LINE closes what it says; green: the same without a failure.
red() {
    name=$1 line=$2; shift 2
    if "$@" > "$work/said" 2>&1; then fail "$name" "ends with status 0"
    elif [ "$(tail -n 1 "$work/said")" = "$line" ]; then pass
    else fail "$name" "$(tail -n 3 "$work/said")"; fi
}
green() {
    name=$1 line=$2; shift 2
    if "$@" > "$work/said" 2>&1 && [ "$(tail -n 1 "$work/said")" = "$line" ]; then pass; else fail "$name" "$(tail -n 3 "$work/said")"; fi
}

program good 0 "3 passed, 0 failed, 1 skipped"
program bad 1 "2 passed, 7 failed, 0 skipped"
program crashed 139 "3 passed, 0 failed, 0 skipped"
program shrugs 0 "1 passed, 2 failed, 0 skipped"
program silent 0 "done"
program empty 0 "0 passed, 0 failed, 0 skipped"
program left 0 "4 tests left out that are long, or count
0 passed, 0 failed, 0 skipped"
for runner in tests/run.sh tests/exhaustive.sh; do
    sh=; [ $runner = tests/run.sh ] || sh="sh "
    green "$runner: good" "3 passed, 0 failed, 1 skipped" sh $runner "$sh$work/good.sh"
    red "$runner: bad" "5 passed, 7 failed, 1 skipped" sh $runner "$sh$work/bad.sh" "$sh$work/good.sh"
    red "$runner: fails after a good line" "3 passed, 1 failed, 0 skipped" sh $runner "$sh$work/crashed.sh"
    red "$runner: status 0 after a bad line" "1 passed, 3 failed, 0 skipped" sh $runner "$sh$work/shrugs.sh"
    red "$runner: no closing line" "0 passed, 1 failed, 0 skipped" sh $runner "$sh$work/silent.sh"
    red "$runner: a program without a test" "0 passed, 1 failed, 0 skipped" sh $runner "$sh$work/empty.sh"
    red "$runner: no program" "0 passed, 1 failed, 0 skipped" sh $runner
    red "$runner: a program that is not there" "0 passed, 1 failed, 0 skipped" sh $runner "$gone/program"
    red "$runner: no temporary folder" "0 passed, 1 failed, 0 skipped" env TMPDIR="$gone" sh $runner "$sh$work/good.sh"
done
green "all left out" "0 passed, 0 failed, 0 skipped" sh tests/run.sh "$work/left.sh"
green "beside and alone" "9 passed, 0 failed, 3 skipped" sh tests/run.sh "$work/good.sh" --waiting "$work/good.sh" --alone "$work/good.sh"
printf 'rm -rf "%s"/tmp.*/alone*\nexit 0\n' "$work" > "$work/vandal.sh"
red "a log that is gone" "0 passed, 1 failed, 0 skipped" env TMPDIR="$work" JOBS=1 sh tests/run.sh "$work/vandal.sh"

# Scripts that use lib.sh.
printf '. tests/lib.sh\nclosing\n' > "$work/nothing.sh"
red "lib.sh: nothing checked" "0 passed, 1 failed, 0 skipped" sh "$work/nothing.sh"
printf '. tests/lib.sh\npass\nclosing\n' > "$work/one.sh"
green "lib.sh: one check" "1 passed, 0 failed, 0 skipped" sh "$work/one.sh"
red "lib.sh: no temporary folder" "0 passed, 1 failed, 0 skipped" env TMPDIR="$gone" sh "$work/one.sh"
unchecked=$(grep -nE '\$\(mktemp' .ci/run tests/*.sh tests/*/*.sh tests/*/*/*.sh examples/*/*.sh | grep -vE '\|\|' | grep -v '^tests/harness.sh')
if [ -z "$unchecked" ]; then pass; else fail "mktemp unchecked" "$unchecked"; fi

# A program of test.h whose filter names no test.
printf '#include "test.h"\nTEST(one) { CHECK(1); }\nint main(int argc, char **argv) { TEST_BEGIN(argc, argv); RUN(one); return TEST_END(); }\n' > "$work/one.c"
check "a program of test.h" "${CC:-gcc}" -std=c99 -Itests "$work/one.c" -o "$work/one"
green "--filter one" "1 passed, 0 failed, 0 skipped" "$work/one" --filter one
red "--filter two" "0 passed, 1 failed, 0 skipped" "$work/one" --filter two

# .ci/run, with a `make` that says and returns what it is told, and nothing to install.
if have bash; then
    mkdir -p "$work/ci/.ci" "$work/bin"
    cp .ci/run "$work/ci/.ci/run"
    for tool in clang clang-16 g++ gnuplot apt-get; do printf '#!/bin/sh\n' > "$work/bin/$tool"; done
    # shellcheck disable=SC2016
    printf '#!/bin/sh\ncat "%s/ci/$1"\nexit "$(cat "%s/ci/$1.status")"\n' "$work" "$work" > "$work/bin/make"
    chmod +x "$work"/bin/*
    # said TARGET STATUS LINE
    said() { echo "$3" > "$work/ci/$1"; echo "$2" > "$work/ci/$1.status"; }
    ci() { PATH="$work/bin:$PATH" bash "$work/ci/.ci/run"; }
    said test 0 "5 passed, 0 failed, 1 skipped"
    said test-ci 0 "6 passed, 0 failed, 0 skipped"
    green ".ci/run: good" "11 passed, 0 failed, 1 skipped" ci
    said test-ci 2 "6 passed, 0 failed, 0 skipped"
    red ".ci/run: a target that fails" "11 passed, 1 failed, 1 skipped" ci
    said test-ci 0 "6 passed, 1 failed, 0 skipped"
    red ".ci/run: a failure" "11 passed, 1 failed, 1 skipped" ci
    said test-ci 0 "nothing to be done"
    red ".ci/run: no closing line" "5 passed, 1 failed, 1 skipped" ci
    red ".ci/run: no temporary folder" "0 passed, 1 failed, 0 skipped" env TMPDIR="$gone" "PATH=$work/bin:$PATH" bash "$work/ci/.ci/run"
else skip ".ci/run" "no bash"; fi
closing
