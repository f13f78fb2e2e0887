# loops.awk - finds the inner loop of a function in a disassembly, and counts its vector instructions.
#     aarch64-linux-gnu-objdump -d --no-show-raw-insn amp.o | awk -v name=ampi_tile_2_8_neon -f loops.awk
# It prints: multiply-adds, loads, and other vector instructions of the loop that has the most multiply-adds of those without a
# loop inside, and of equal ones the shortest.  A loop is what lies between a backward branch and its target.  A load of two registers counts as two.
$2 == "<" name ">:" { on = 1; next }
on && NF == 0 { on = 0 }
on && $1 ~ /:$/ {
    n++
    at[substr($1, 1, length($1) - 1)] = n
    line[n] = $0
    if ($2 ~ /^(b|b\..*|cbz|cbnz|tbz|tbnz)$/)
        for (i = 3; i <= NF; i++) if ($i in at) { first[++loops] = at[$i]; last[loops] = n; break }
}
function inner(i,   k) {
    for (k = 1; k <= loops; k++) if (k != i && first[i] <= first[k] && last[k] <= last[i]) return 0
    return 1
}
END {
    for (i = 1; i <= loops; i++) {
        if (!inner(i)) continue
        multiplies = loads = others = 0
        for (k = first[i]; k <= last[i]; k++) {
            if (line[k] ~ /\t(fmla|bfdot|bfmmla)\t/) multiplies++
            else if (line[k] ~ /\tldp\t[qd]/) loads += 2
            else if (line[k] ~ /\tldu?r\t[qds]/ || line[k] ~ /\tld1r?\t/) loads++
            else if (line[k] ~ /[ \t,{]v[0-9]+\./ || line[k] ~ /\tst(u?r|p)\t[qds]/) others++
        }
        if (multiplies > best || (multiplies == best && loads + others < best_loads + best_others)) { best = multiplies; best_loads = loads; best_others = others }
    }
    print best + 0, best_loads + 0, best_others + 0
}
