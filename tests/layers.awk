# layers.awk - prints where amp.h breaks the order of its sections; silent when all is well.
#     awk -f tests/layers.awk amp.h amp.h
# A section of the implementation names only what is defined in it or in a section above: functions, be they called or passed
# on, tables, types, constants and macros.  Comments, strings, and macros that are undefined again do not count.  A public
# function is defined in the section that declares it, or in another part of it, with the same number.  Types of the API
# half belong to the number of their section, and to all if it has no implementation (>>kernels).  Nothing is declared ahead
# of its definition but hooks: functions ampi_hook_NAME, which a section declares and a later one defines.  What stands
# under a title without a number belongs to all.
# The first reading notes what each section defines, the second looks at every name.
function bare(s,    kept) {                             # s without comments, strings and characters
    for (kept = ""; ; s = substr(s, RSTART + (comment ? 2 : RLENGTH))) {
        if (comment) {
            if (!match(s, /\*\//)) return kept
            comment = 0
            s = substr(s, RSTART + 2)
        }
        if (!match(s, /\/\*|"([^"\\]|\\.)*"|'([^'\\]|\\.)*'/)) return kept s
        kept = kept substr(s, 1, RSTART - 1) " "
        comment = substr(s, RSTART, 2) == "/*"
    }
}
function say(text) { gsub(/AMPI_V_/, "", text); print FILENAME ":" FNR ": " text }
function first_name(s) { sub(/^[^A-Za-z_]+/, "", s); sub(/[^A-Za-z0-9_].*/, "", s); return s }
function last_name(s) { gsub(/[^A-Za-z0-9_]+/, " ", s); sub(/ $/, "", s); sub(/.* /, "", s); return s }
function define(name) {
    if (name ~ /^ampi_hook_/) {
        if (!(name in declared) || rank[declared[name]] >= rank[section]) say(name " is a hook, which no section above declares")
        hooked[name]
        return
    }
    if (name !~ /^(amp|ampi|AMP|AMPI)_/ || name in home) return
    home[name] = section != "" ? section : declared[name]
    place[name] = implementation ? rank[home[name]] : number[home[name]]
    if (!implementation) shown[name]
    if (declared[name] != "" && declared[name] != "kernels" && number[declared[name]] != number[home[name]])
        say(name " is declared in >>" declared[name] ", and defined in >>" section)
}
function declare_hook(name) { declared[name] = home[name] = section; place[name] = rank[section] }
# A declaration at column 0, up to its body, value or end.
function declare(head,    is_prototype) {
    gsub(/AMPI_PRINTF\([^)]*\)|__attribute__\(\([^)]*(\([^)]*\))?[^)]*\)\)/, "", head)
    is_prototype = head ~ /\).*;/ && head !~ /[={]/ && head !~ /^typedef/
    if (head ~ /^typedef struct [a-z0-9_]+ [a-z0-9_]+;/) return     # a name ahead of its struct
    if (head ~ /^typedef [^{]*\(\*/) { sub(/.*\(\*/, "", head); define(first_name(head)); return }
    if (match(head, /^(typedef )?(struct|enum) ?[A-Za-z_0-9]* *\{/)) {
        in_enum = head ~ /^(typedef )?enum/
        sub(/^(typedef )?(struct|enum)/, "", head)
        define(first_name(head))
        return
    }
    if (head !~ /^typedef/) sub(/[(=[;{].*/, "", head)
    if (!is_prototype) define(last_name(head))
    else if (last_name(head) ~ /^ampi_hook_/) declare_hook(last_name(head))
    else if (implementation && last_name(head) ~ /^ampi?_/) say(last_name(head) " is declared before it is defined")
    else declared[last_name(head)] = section
}
FNR == 1 { reading++; section = ""; comment = 0; implementation = 0 }
/^\/\* ==== [0-9]+ >>/ {                                # rank: its place in the implementation
    section = $4
    gsub(/[>:]/, "", section)
    number[section] = $3 + 0
    if (implementation && !(section in rank)) rank[section] = ++sections
}
/^\/\* ==== [^0-9]/ { section = "" }
/^\/\* Stop here/ { implementation = 1; section = "" }
{
    line = bare($0)
    gsub(/AMPI_(V|PICK)\(/, "AMPI_V_", line)           # the vector kernel of that name is another one
}
reading == 1 && line ~ /^# *define / { sub(/^# *define +/, "", line); define(first_name(line)); next }
reading == 1 && line ~ /^# *undef / { temporary[last_name(line)] = 1; next }
reading == 1 {
    if (open != "") open = open " " line
    else if (line ~ /^([a-z_]|AMP_API |AMPI_[A-Z]+ )/) { open = line; sub(/^__extension__ /, "", open) }
    if (open ~ /[{;]/) { declare(open); open = "" }
    if (in_enum) {
        n = split(line, part, /[,{]/)
        for (i = 1; i <= n; i++) { sub(/=.*/, "", part[i]); define(first_name(part[i])) }
        in_enum = line !~ /\}/
    }
    if (line ~ /^\} *[A-Za-z_]/) define(first_name(line))
}
reading == 2 && implementation {
    while (match(line, /[A-Za-z_][A-Za-z0-9_]*/)) {
        name = substr(line, RSTART, RLENGTH)
        line = substr(line, RSTART + RLENGTH)
        if (!(name in home) && name ~ /^ampi?_/ && line ~ /^\(/) say("where " name " is defined, this check does not see")
        if (name in home && home[name] != "kernels" && place[name] > (name in shown ? number[section] : rank[section]) && !(name in temporary)) say(">>" section " names " name " of >>" home[name])
    }
}
END { for (name in home) if (name ~ /^ampi_hook_/ && !(name in hooked)) print FILENAME ": nobody defines " name }
