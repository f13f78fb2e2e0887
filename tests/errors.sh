#!/bin/sh
# errors.sh PROGRAM... - runs test programs and shows what amp.h promises to return ("Errors: 101, 103" above a function)
# and none of them provoked.  What tests/errors_unprovoked.txt lists is known; anything else is a failure.
. tests/lib.sh
# AMPT_ERRORS=FILE: with what earlier runs provoked.
AMPT_ERRORS=${AMPT_ERRORS:-$work/provoked}; export AMPT_ERRORS
: >> "$AMPT_ERRORS"
for program; do
    "$program" > "$work/log" 2>&1 || fail "$program" "$(tail -n 3 "$work/log")"
done
awk -f tests/errors.awk amp.h | sort -u > "$work/promised"
awk 'FILENAME != last { file++; last = FILENAME }
    file == 1 { have[$1 " " $2]; next }
    file == 2 { if (!/^#/) known[$1 " " $2]; next }
    { found = 0; for (i = 2; i <= NF; i++) if (($i " " $1) in have) found = 1; if (!found && !(($1 " " $2) in known)) print }' \
    "$AMPT_ERRORS" tests/errors_unprovoked.txt "$work/promised" > "$work/missing"
while read -r line; do fail "promised, and provoked by no test" "$line"; done < "$work/missing"
[ -s "$work/promised" ] && pass
closing
