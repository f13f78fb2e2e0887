# report.awk - what merge.awk's table says of amp.h: awk -f report.awk unreached.txt amp.h table
#
# A line is reached if some program ran it, in whatever instruction set; a branch has to be taken in each of them.  What
# was not reached must have a rule in unreached.txt; its lines are printed by function to build/coverage.txt.
function trim(s) { gsub(/^ +| +$/, "", s); return s }
# The rule for a place, or 0.
function rule_of(f, line, r) {
    for (r = 1; r <= rules; r++)
        if ((of[r] == "*" || of[r] == f || (of[r] ~ /\*$/ && index(f, substr(of[r], 1, length(of[r]) - 1)) == 1)) &&
            (what[r] == "*" || index(text[line], what[r]) > 0)) return r
    return 0
}
function base(f) { sub(/\._omp_fn.*/, "", f); sub(/_(scalar|avx2|avx512|bf16|amx)$/, "", f); return f }

FILENAME == ARGV[1] {
    if ($0 ~ /^#/ || NF == 0) next
    n = split($0, part, / \| /)
    if (n < 3) { print "unreached.txt: not FUNCTION | TEXT | REASON: " $0; bad = 1; next }
    of[++rules] = trim(part[1]); what[rules] = trim(part[2]); why[rules] = trim(part[3])
    next
}
FILENAME == ARGV[2] { text[FNR] = $0; next }
$1 == "L" {
    if (!($2 in runs)) { order[++lines] = $2; runs[$2] = 0; owner[$2] = base($3) }
    runs[$2] += $4
}
$1 == "B" { branches++; if ($5 > 0) taken++; else { left[++untaken] = $2; left_in[untaken] = base($3); left_at[untaken] = $4 } }
END {
    for (i = 1; i <= lines; i++) if (runs[order[i]] > 0) reached++
    for (i = 1; i <= lines; i++) {
        line = order[i]
        if (runs[line] > 0) continue
        r = rule_of(owner[line], line)
        if (r) used_lines[r]++
        else unlisted_lines++
        print (r ? "  " : "! ") "line   " line " " owner[line] ": " trim(text[line])
    }
    for (i = 1; i <= untaken; i++) {
        r = runs[left[i]] > 0 ? rule_of(left_in[i], left[i]) : -1     # of a line that was not run: listed with it
        if (r > 0) used_branches[r]++
        else if (r == 0) unlisted_branches++
        if (r >= 0) print (r ? "  " : "! ") "branch " left[i] " " left_in[i] " " left_at[i] ": " trim(text[left[i]])
    }
    print ""
    for (r = 1; r <= rules; r++) {
        printf "%5d lines %5d branches  %s | %s | %s\n", used_lines[r], used_branches[r], of[r], what[r], why[r]
        if (!used_lines[r] && !used_branches[r]) stale++
    }
    line_share = 100 * reached / lines; branch_share = 100 * taken / branches
    printf "{\"lines\": %d, \"reached\": %d, \"lines_percent\": %.2f, \"branches\": %d, \"taken\": %d, \"branches_percent\": %.2f, " \
           "\"unlisted_lines\": %d, \"unlisted_branches\": %d, \"stale_rules\": %d}\n",
           lines, reached, line_share, branches, taken, branch_share, unlisted_lines, unlisted_branches, stale
}
