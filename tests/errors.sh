#!/bin/sh
# errors.sh - checks that every error that amp.h documents is provoked by some test.  amp.h documents them above its
# functions ("Errors: AMP_ERR_SHAPE"), and errors.awk reads these comments.  An error counts as provoked if a test that ran
# before this one under run.sh saw it with CHECK_ERR.
. tests/lib.sh
if [ ! -s "${AMPT_ERRORS:-}" ]; then skip "promised errors" "no tests ran before: make errors"; closing; exit; fi
awk -f tests/errors.awk amp.h | sort -u > "$work/promised"
if [ "$(wc -l < "$work/promised")" -gt 100 ]; then pass; else fail "errors.awk" "finds too few promises in amp.h"; fi
awk 'FILENAME == ARGV[1] { have[$2 " " $1]; next }
    { for (i = 2; i <= NF; i++) if (($1 " " $i) in have) next; print }' "$AMPT_ERRORS" "$work/promised" > "$work/missing"
if [ ! -s "$work/missing" ]; then pass; fi
while read -r line; do fail "promised, and provoked by no test" "$line"; done < "$work/missing"
closing
