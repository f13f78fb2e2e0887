# error_texts.awk - every error and every line of the log of amp.h, as a page to read: each result with its texts as a user
# reads them, <what is printed> in place of %s, with the hint where it follows, and in brackets the functions that say it.
#     awk -f tests/error_texts.awk amp.h
function trim(t) { gsub(/[ \t]+/, " ", t); sub(/^ /, "", t); sub(/ $/, "", t); return t }
# The arguments of the call whose "(" is at `at` of `code`, in arg[1..n]; 0: the call goes on in the next line.
function arguments(at,    i, c, depth, from, quoted, n) {
    from = at + 1
    for (i = at; i <= length(code); i++) {
        c = substr(code, i, 1)
        if (quoted != "") { if (c == "\\") i++; else if (c == quoted) quoted = "" }
        else if (c == "\"" || c == "'") quoted = c
        else if (c == "(") depth++
        else if (c == ")" && --depth == 0) { arg[++n] = trim(substr(code, from, i - from)); return n }
        else if (c == "," && depth == 1) { arg[++n] = trim(substr(code, from, i - from)); from = i + 1 }
    }
    return 0
}
# The strings in an expression: side by side they are one; others are choices, " | " between them.
function strings(e,    out, between) {
    if (e in macro) e = macro[e]
    gsub(/AMP_VERSION_TEXT/, "\"" version "\"", e)
    while (match(e, /"([^"\\]|\\.)*"/)) {
        between = trim(substr(e, 1, RSTART - 1))
        if (out != "" && between != "") out = out " | "
        out = out substr(e, RSTART + 1, RLENGTH - 2)
        e = substr(e, RSTART + RLENGTH)
    }
    gsub(/\\"/, "\"", out)
    return out
}
function value(e) {
    if (e ~ /"/) return strings(e)
    if (e ~ /^amp_last_error/) return "the text of an error"
    if (e ~ /^strerror/) return "the system's error"
    if (e ~ /^amp_dtype_name/) return "dtype"
    if (e ~ /^ampi_shape_text/) return "shape"
    if (e ~ /^ampi_cpu_path_name/) return "CPU path"
    if (e ~ /^ampi_dtypes_of/) return "dtypes"
    if (e ~ /(->|\.)name$|names\[/) return "name"
    if (e ~ /(->|\.)path$/) return "path"
    gsub(/\((unsigned )?(long long|int|double|size_t|unsigned)\) ?/, "", e)
    return e
}
# A format with its arguments, which begin with number i, in place of %s, %d and the others.
function said(format, i,    out, spec) {
    format = strings(format)
    while (match(format, /%[-+ 0#]*[0-9*]*(\.[0-9*]+)?(ll|l|z|h)?[a-zA-Z%]/)) {
        spec = substr(format, RSTART, RLENGTH)
        out = out substr(format, 1, RSTART - 1)
        format = substr(format, RSTART + RLENGTH)
        if (spec ~ /\*/) i++
        out = out (spec == "%%" ? "%" : "<" value(arg[i++]) ">")
    }
    return out format
}
function says_what_to_do(format,    i) {
    for (i = 1; i <= n_verbs; i++) if (index(" " format, " " verbs[i])) return 1
    return 0
}
function row(key, text, who) {
    key = key "\t" text
    if (!(key in by)) keys[++n_keys] = key
    if (index(", " by[key] ",", ", " who ",")) return
    if (by[key] != "" && ++also[key] > 2) return
    by[key] = by[key] (by[key] == "" ? "" : ", ") who
}
# The public function that an expression names, if it is known; else the function that it stands in.
function speaker(e) { return e ~ /^"/ ? strings(e) : e ~ /_name$/ ? "amp_loader_create" : f != "" ? f : own }
function desc_of(who) { sub(/_create$/, "", who); return who "_desc" }
function missing(who, name,    what) {
    if (name !~ /^"/) return
    name = strings(name)
    what = name == "desc" ? "the address of an " desc_of(who) : (name in wanted) ? wanted[name] : "a pointer that is not NULL"
    row(number["AMP_ERR_NULL"], name " is NULL: " (name ~ /^\./ ? "set it to " : "pass ") what, who)
}
function call(name, at,    n, i, text, rest, result, found) {
    n = arguments(at)
    if (name ~ /^ampi_need/) {
        for (i = 3; i <= n; i += 2) missing(speaker(arg[1]), arg[i])
        return
    }
    if (name == "ampi_log") {
        text = said(arg[4], 5)
        row(9000 + arg[3], tolower(substr(arg[2], match(arg[2], /[A-Z]*$/))) " " arg[3] ": " text, own)
        return
    }
    text = said(arg[3], 4)
    rest = arg[1]
    while (match(rest, /AMP_ERR_[A-Z0-9_]+/)) {
        result = substr(rest, RSTART, RLENGTH)
        rest = substr(rest, RSTART + RLENGTH)
        row(number[result], text (says_what_to_do(strings(arg[3])) ? "" : "; " hint[result]), speaker(arg[2]))
        found = 1
    }
    if (!found) row(8000, text, speaker(arg[2]))
}
/^#define AMP_VERSION_TEXT/ { version = strings($0) }
/^    X\(AMP_ERR_/ {
    code = substr($0, 5)
    arguments(2)
    number[arg[1]] = arg[2]
    title[arg[2]] = arg[1] " " arg[2] ": " strings(arg[3])
    hint[arg[1]] = strings(arg[4])
}
/^\/\* Stop here/ { below = 1 }
!below { next }
/static const char \*const imperatives\[\]/ { n_verbs = split(strings($0), verbs, " [|] "); next }
/^#define AMPI_[A-Z_]+ \\$/ { define = $2; next }
define != "" { macro[define] = $0; define = "" }
/^static const char \*const ampi_wanted/ { table = 1 }
table {
    line = $0
    while (match(line, /\{"[^"]*", "([^"\\]|\\.)*"\}/)) {
        split(substr(line, RSTART + 2, RLENGTH - 4), pair, "\", \"")
        wanted[pair[1]] = pair[2]
        line = substr(line, RSTART + RLENGTH)
    }
    if (/^};/) table = 0
    next
}
{ line = $0; sub(/\/\*.*\*\//, "", line) }
/^[A-Za-z]/ && match(line, /[a-z0-9_]+\(/) { own = substr(line, RSTART, RLENGTH - 1); f = own ~ /^amp_/ ? own : "" }
/^    ampi?_[a-z0-9_]+\(.*\{$/ { match(line, /[a-z0-9_]+\(/); own = substr(line, RSTART, RLENGTH - 1); f = own ~ /^amp_/ ? own : "" }
match(line, /(\*f|\*function|f\[\]|function\[\]) = "amp_[a-z0-9_]+"/) { f = strings(substr(line, RSTART, RLENGTH)) }
/^}/ { own = f = "" }
{
    code = pending == "" ? line : pending " " line
    pending = ""
    while (match(code, /ampi_(fail|log|need2|need3|need_object|need)\(/)) {
        name = substr(code, RSTART, RLENGTH - 1)
        at = RSTART + RLENGTH - 1
        code = substr(code, at - length(name))
        at = length(name) + 1
        if (own ~ /^ampi_(fail|log|need.*|null)$/) break
        if (!arguments(at)) { pending = code; break }
        call(name, at)
        code = substr(code, at)
    }
}
END {
    title[8000] = "Any result, as a callback, a backend or a rank tells it"
    title[9000] = "The log"
    for (i = 2; i <= n_keys; i++) {
        key = keys[i]
        for (j = i - 1; j >= 1 && (keys[j] + 0 > key + 0 || (keys[j] + 0 == key + 0 && keys[j] > key)); j--) keys[j + 1] = keys[j]
        keys[j + 1] = key
    }
    for (i = 1; i <= n_keys; i++) {
        group = keys[i] + 0 > 9000 ? 9000 : keys[i] + 0
        if (group != last) print (last == "" ? "" : "\n") title[group]
        last = group
        more = also[keys[i]] > 2 ? " and " also[keys[i]] - 2 " more" : ""
        print "  " substr(keys[i], index(keys[i], "\t") + 1) "  [" by[keys[i]] more "]"
    }
}
