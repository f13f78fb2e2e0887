# mutate.awk - amp.h with one mutant of mutants.txt: awk -v name=NAME -f mutate.awk mutants.txt amp.h
# Fails unless the anchor is there exactly once, in the function that the mutant names.
FNR == NR {
    if (/\|/ && !/^[-+=#]/) { n = split($0, head, / *\| */); mine = head[1] == name; if (mine) scope = head[2] }
    else if (mine && /^- /) old = substr($0, 3)
    else if (mine && /^\+ /) new = substr($0, 3)
    next
}
FNR == 1 { inside = scope == "-" }
# A definition begins in the first column with a type, has its name before "(", there or on the next line, and ends with "}"
# in the first column.
scope != "-" && (/^[A-Za-z]/ || (goes_on && /^    [a-z]/)) && $0 ~ "(^|[^A-Za-z0-9_])" scope "\\)?\\(" { inside = 1; open = 0 }
{
    line = $0
    if (inside) {
        at = index(line, old)
        if (at > 0) {
            found++
            rest = substr(line, at + length(old))
            if (index(rest, old) > 0) found++
            line = substr(line, 1, at - 1) new rest
        }
    }
    print line
    goes_on = /^[A-Za-z]/ && /\)$/
    if (scope == "-" || !inside) next
    code = $0
    sub(/ *\/\*.*\*\/ *$/, "", code)
    if (code ~ /[{}]$/ || /\{/) open = 1
    if (/^}/ || (/^[A-Za-z]/ && code ~ /}$/) || (!open && code ~ /;$/)) inside = 0
}
END { if (found != 1) { print name ": \"" old "\" is there " found + 0 " times, must be once" > "/dev/stderr"; exit 1 } }
