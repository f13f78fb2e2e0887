#!/bin/sh
# errors.sh - what amp.h promises to return ("Errors: AMP_ERR_SHAPE" above a function) and no test that ran before this one under
# run.sh provoked by a call that CHECK_ERR sees.  errors.awk reads the promises.
. tests/lib.sh
if [ ! -s "${AMPT_ERRORS:-}" ]; then skip "promised errors" "no tests ran before: make errors"; closing; exit; fi
awk -f tests/errors.awk amp.h | sort -u > "$work/promised"
if [ "$(wc -l < "$work/promised")" -gt 100 ]; then pass; else fail "errors.awk" "finds too few promises in amp.h"; fi
awk 'FILENAME == ARGV[1] { have[$2 " " $1]; next }
    { for (i = 2; i <= NF; i++) if (($1 " " $i) in have) next; print }' "$AMPT_ERRORS" "$work/promised" > "$work/missing"
if [ ! -s "$work/missing" ]; then pass; fi
while read -r line; do fail "promised, and provoked by no test" "$line"; done < "$work/missing"
closing
