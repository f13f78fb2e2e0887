# owners.awk - for each struct of amp.h's implementation: the section that defines it, and after "also" the others that write
# its fields.
#     awk -f tests/owners.awk amp.h amp.h
# Fields are known by name: a field that several structs have, or the API's, is not looked at.
function bare(s) {                                      # s without comments and strings
    if (comment) { if (!sub(/^.*\*\//, "", s)) return ""; comment = 0 }
    gsub(/"([^"\\]|\\.)*"|\/\*([^*]|\*+[^*\/])*\*+\//, " ", s)
    if (sub(/\/\*.*/, "", s)) comment = 1
    return s
}
function take(list, name,    n, i, m, part, word, name_of) {      # "int a, *b[2]; float c" are fields of struct `name`
    gsub(/\(\*[a-z_0-9]+\) *\([^;]*\)/, "", list)        # members that are functions
    n = split(list, part, /[;,]/)
    for (i = 1; i <= n; i++) {
        gsub(/\[[^]]*\]/, "", part[i])
        m = split(part[i], word, /[^A-Za-z0-9_]+/)
        while (m > 0 && word[m] == "") m--
        if (m == 0) continue
        if (word[m] in of && of[word[m]] != name) name_of = "several"
        else name_of = name
        of[word[m]] = name_of
    }
}
FNR == 1 { reading++; section = ""; implementation = comment = 0 }
/^\/\* Stop here/ { implementation = 1 }
/^\/\* ==== / { section = $4; gsub(/[>:]/, "", section) }
{ line = bare($0) }
reading == 1 && !open && line ~ /^(typedef )?struct *[a-z_0-9]* *\{/ { open = 1; body = ""; depth = 0 }
reading == 1 && open {
    body = body " " line
    depth += gsub(/\{/, "{", line) - gsub(/\}/, "}", line)
    if (depth > 0) next
    open = 0
    name = last = body
    sub(/^ *(typedef )?struct */, "", name); sub(/ *\{.*/, "", name)
    sub(/.*\}/, "", last); gsub(/[ ;]/, "", last)
    if (name == "") name = last
    sub(/^[^{]*\{/, "", body); sub(/\}[^}]*$/, "", body)
    if (implementation) home[name] = section
    take(body, name)
}
reading == 2 && implementation {
    while (match(line, /(->|\.)[a-z_0-9]+(\[[^]]*\])* *([-+|&]?=[^=]|\+\+|--)/)) {
        field = substr(line, RSTART, RLENGTH)
        line = substr(line, RSTART + RLENGTH - 1)
        sub(/^(->|\.)/, "", field)
        sub(/[^a-z_0-9].*/, "", field)
        name = of[field]
        if (name in home && home[name] != section && section != "" && !((name, section) in seen)) {
            seen[name, section] = 1
            others[name] = others[name] " " section
        }
    }
}
END { for (name in home) print name, home[name] (name in others ? ", also" others[name] : "") }
