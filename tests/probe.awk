# probe.awk - amp.h with one more operator: awk -f tests/probe.awk tests/probe.txt amp.h.  Fails where it does not find a place.
FNR == NR && /^@ / { split(substr($0, 3), part, / @ /); start[++n] = part[1]; line[n] = part[2]; next }
FNR == NR { if (n) text[n] = text[n] $0 "\n"; next }
{
    for (i = 1; i <= n; i++) {
        if (state[i] == 1 && $0 ~ line[i]) { printf "%s", text[i]; state[i] = 2 }
        if (!state[i] && $0 ~ start[i]) state[i] = 1
    }
    print
}
END { for (i = 1; i <= n; i++) if (state[i] != 2) { print "#error \"probe.txt: no line " line[i] " after " start[i] "\""; exit 1 } }
