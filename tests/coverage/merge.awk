# merge.awk - gcov's JSON of several programs as one table: for each line of a file (-v file=amp.h) that has code
#   L LINE FUNCTION COUNT                 and for each of its branches   B LINE FUNCTION INDEX COUNT
# added up over the programs.  A line of the vector kernels is there once for each instruction set.
#
# An object begins at "{".  Branches, calls and conditions are objects inside a line's; what follows the "}" of one is the
# line's again.  A file's name may come behind its lines, so these wait for it.
BEGIN { RS = "{" }
function number(key) { return match(text, "\"" key "\": *[0-9]+") ? substr(text, RSTART + length(key) + 3, RLENGTH - length(key) - 3) + 0 : -1 }
function string(key, from) {
    if (!match(text, "\"" key "\": *\"[^\"]*\"")) return ""
    from = substr(text, RSTART, RLENGTH); sub(/^"[a-z_]*": *"/, "", from); sub(/"$/, "", from)
    return from
}
function finish(line, name, i, from) {
    line = number("line_number")
    if (line >= 0) {
        name = string("function_name")
        waiting_line[++waiting] = line " " (name == "" ? "-" : name)      # none where it is always inlined
        waiting_count[waiting] = number("count")
        waiting_branches[waiting] = branches
        for (i = 1; i <= branches; i++) waiting_branch[waiting, i] = branch[i]
    }
    from = string("file")
    if (from != "") {
        sub(/.*\//, "", from)
        if (from == file) take()
        waiting = 0
    }
    text = ""; branches = 0
}
function take(i, j) {
    for (i = 1; i <= waiting; i++) {
        lines[waiting_line[i]] += waiting_count[i]
        for (j = 1; j <= waiting_branches[i]; j++) all[waiting_line[i] " " j] += waiting_branch[i, j]
    }
}
/"throw"/ {
    match($0, /"count": *[0-9]+/)
    branch[++branches] = substr($0, RSTART + 8, RLENGTH - 8) + 0
    sub(/^[^}]*}/, ""); text = text $0
    next
}
/"returned"|"covered"/ { sub(/^[^}]*}/, ""); text = text $0; next }
{ finish(); text = $0 }
END {
    finish()
    for (key in lines) print "L", key, lines[key]
    for (key in all) print "B", key, all[key]
}
