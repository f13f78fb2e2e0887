# switch.awk - amp_cuda.cu with all mutants of cuda.txt, of which $AMP_MUTANT chooses one by its number, from 1 on, or none:
#   awk -f switch.awk cuda.txt amp_cuda.cu
# Fails unless each anchor is there as often as the mutant says.
FNR == NR {
    if (/\|/ && !/^[-+=#]/) {
        split($0, head, / *\| */)
        name[++mutants] = head[1]
        split(head[2], part, "/")
        scope[mutants] = part[1]; place[mutants] = part[2] + 0
    }
    else if (/^- /) old[mutants] = substr($0, 3)
    else if (/^\+ /) new[mutants] = substr($0, 3)
    next
}
# A definition begins in the first column, has its name before "(", there or on the next line, or "struct" before its name,
# and ends with "}" in the first column.
/^[A-Za-z_]/ || (goes_on && /^    [a-z]/) {
    for (m = 1; m <= mutants; m++)
        if ($0 ~ "(^|[^A-Za-z0-9_])" scope[m] "\\(" || $0 ~ "struct " scope[m] " ") { inside[m] = 1; open[m] = 0 }
}
{
    line = $0; code = $0
    sub(/ *\/\*.*\*\/ *$/, "", code)
    for (m = 1; m <= mutants; m++) {
        if (!inside[m]) continue
        at = index(line, old[m])
        if (at > 0) {
            found[m]++
            rest = substr(line, at + length(old[m]))
            if (index(rest, old[m]) > 0) found[m] += 100
            tail = ""
            changed = old[m]
            if (place[m] == 0 || found[m] == place[m]) {
                done[m]++
                if (changed ~ /,$/) { tail = ","; changed = substr(changed, 1, length(changed) - 1) }
                instead = new[m]
                sub(/,$/, "", instead)
                line = substr(line, 1, at - 1) "(coc_mutant == " m " ? (" instead ") : (" changed "))" tail rest
            }
        }
        if (code ~ /\{/) open[m] = 1
        if (/^}/ || (/^[A-Za-z_]/ && code ~ /}$/) || (!open[m] && code ~ /;$/)) inside[m] = 0
    }
    print line
    goes_on = /^[A-Za-z_]/ && code ~ /\)$/
    if ($0 == "#include \"amp.h\"") print "static const int coc_mutant = getenv(\"AMP_MUTANT\") ? atoi(getenv(\"AMP_MUTANT\")) : 0;"
}
END {
    for (m = 1; m <= mutants; m++)
        if (done[m] != 1 || (place[m] == 0 && found[m] != 1)) {
            print name[m] ": \"" old[m] "\" is there " found[m] + 0 " times" > "/dev/stderr"
            bad = 1
        }
    exit bad
}
