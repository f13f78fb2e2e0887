# docs.awk - amp.h's manual, and the comments and declarations of its API, as one HTML page: contents, search, an anchor
# for each section and function, code with colours.  `make docs`; the page needs nothing but itself.
#
# The manual is text up to AMP_H_INCLUDED: lines "   NAME" begin a chapter, deeper indentation is kept as it stands.  In
# the API a line "==== 6 >>tape" begins a section; a comment belongs to the declarations behind it, up to a blank line.
# Behind the declarations come more chapters (HOW DO I, SETTINGS and so on).
function escape(s) { gsub(/&/, "\\&amp;", s); gsub(/</, "\\&lt;", s); gsub(/>/, "\\&gt;", s); return s }
# Names of calls and chapters become links.
function linked(s, out, name) {
    out = ""
    while (match(s, /amp_[a-z0-9_]+|&gt;&gt;[a-z]+/)) {
        name = substr(s, RSTART, RLENGTH)
        out = out substr(s, 1, RSTART - 1)
        if (name ~ /^&/) out = out "<a href=\"#" substr(name, 9) "\">" name "</a>"
        else if (name in known) out = out "<a href=\"#" name "\">" name "</a>"
        else out = out name
        s = substr(s, RSTART + RLENGTH)
    }
    return out s
}
# A line of code: comments, strings, keywords and numbers in colours.
function coloured(s, out, word, n, kind) {
    out = ""
    while (s != "") {
        kind = ""
        if (match(s, /^\/\*.*\*\//) || match(s, /^\/\/.*/) || match(s, /^\/\*.*/)) kind = "i"
        else if (match(s, /^"([^"\\]|\\.)*"/)) kind = "s"
        else if (match(s, /^[A-Za-z_][A-Za-z0-9_]*/)) {
            if (substr(s, 1, RLENGTH) ~ keywords) kind = "b"
        } else match(s, /^[0-9]+|^./)
        n = RLENGTH
        word = escape(substr(s, 1, n))
        if (kind != "b" && kind != "s") word = linked(word)
        out = out (kind == "" ? word : "<" kind ">" word "</" kind ">")
        s = substr(s, n + 1)
    }
    return out
}
# A chapter's title: up to two spaces, behind which its text may begin.
function title_of(s) { sub(/^ +/, "", s); sub(/  .*/, "", s); return s }
function id_of(title) { gsub(/ /, "-", title); gsub(/'/, "", title); return "manual-" tolower(title) }
function close_chapter() { if (open_chapter) print "</pre></section>"; open_chapter = 0 }
function chapter(id, title) {
    close_chapter()
    printf "<section id=\"%s\"><h2><a href=\"#%s\">%s</a></h2>\n<pre>", id, id, escape(title)
    open_chapter = 1
}
function close_item() { if (item != "") printf "<div class=\"item\"%s><pre>%s</pre></div>\n", ids, item; item = ids = "" }

BEGIN {
    heading = "^   [A-Z][A-Z' ]*[A-Z](  |$)"
    keywords = "^(typedef|struct|enum|const|void|char|int|float|double|size_t|int32_t|int64_t|uint(8|16|32|64)_t|static|" \
               "return|for|while|if|else|inline)$"
}

# First reading: which functions and types there are, and the sections.
FNR == NR && /^\/\* Stop here/ { stopped = 1 }
FNR == NR && stopped { next }
FNR == NR {
    lines = FNR
    if ($0 ~ /^(AMP_API|AMPI_INLINE|AMPI_HD) / && match($0, /amp_[a-z0-9_]+\(/)) known[substr($0, RSTART, RLENGTH - 1)] = 1
    if (match($0, /^(typedef )?(struct|enum) amp_[a-z0-9_]+ \{/)) { split(substr($0, RSTART, RLENGTH), w, " "); for (k in w) if (w[k] ~ /^amp_/) known[w[k]] = 1 }
    if ($0 ~ /^\/\* ==== [0-9]+ >>/ && !(($4) in seen)) { seen[$4] = 1; tag = $4; sub(/^>>/, "", tag); sub(/:$/, "", tag); tags[++n_tags] = tag }
    if ($0 ~ heading && (!api || after)) chapters[++n_chapters] = title_of($0)
    if ($0 ~ /^#ifndef AMP_H_INCLUDED/) api = 1
    if ($0 ~ /^#endif .* AMP_H_INCLUDED/) after = 1
    text[FNR] = $0
    next
}
FNR != NR { exit }

END {
    print "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\"><title>amp.h</title><style>"
    print "body{margin:0;font:15px/1.5 system-ui,sans-serif;color:#222;background:#fff}nav{position:fixed;top:0;bottom:0;left:0;width:15em;overflow:auto;padding:1em;background:#f5f6f8;box-sizing:border-box}"
    print "nav a{display:block;color:#0b5cad;text-decoration:none;padding:1px 0}nav input{width:100%;box-sizing:border-box;padding:.4em;font:inherit;margin-bottom:.6em}main{margin-left:15em;padding:1em 2em;max-width:65em}"
    print "pre{font:13px/1.45 ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere;margin:.4em 0}h2{margin:1.6em 0 .4em;font-size:1.2em}h2 a{color:inherit;text-decoration:none}.item{border-left:3px solid #dde;padding:.1em .8em;margin:.7em 0}.item:target{border-color:#d55e00;background:#fff8ee}"
    print "pre i{color:#5a6a5a;font-style:normal}pre s{color:#a03030;text-decoration:none}pre b{color:#0b5cad;font-weight:normal}pre a{color:inherit;text-decoration-color:#9bc}p.none{color:#777}"
    print "@media(max-width:50em){nav{position:static;width:auto;max-height:14em}main{margin:0;padding:.5em 1em}}</style></head><body>"
    print "<nav><input id=\"q\" type=\"search\" placeholder=\"Search\" aria-label=\"Search\"><b>Manual</b>"
    for (i = 1; i <= n_chapters; i++) printf "<a href=\"#%s\">%s</a>\n", id_of(chapters[i]), chapters[i]
    print "<b>API</b>"
    for (i = 1; i <= n_tags; i++) printf "<a href=\"#%s\">%s</a>\n", tags[i], tags[i]
    print "</nav><main><h1>amp.h</h1><p class=\"none\" id=\"none\" hidden>Nothing has these words.</p>"
    api = open_chapter = after = 0
    for (i = 2; i <= lines; i++) {
        s = text[i]
        if (s ~ /^#endif .* AMP_H_INCLUDED/) { close_item(); after = 1; continue }
        if (!api || after) {
            if (s ~ /^#ifndef AMP_H_INCLUDED/) { close_chapter(); api = 1; continue }
            if (after && s ~ /^(\/\*|\*\/)$/) continue
            if (s ~ heading) {
                title = title_of(s); rest = substr(s, 4 + length(title)); sub(/^ +/, "", rest)
                chapter(id_of(title), title); if (rest != "") print linked(escape(rest)); continue
            }
            code = after ? "^           [^ ]" : "^        ? ?[^ ].*[;{}]( *//.*)?$|^    #"
            if (open_chapter) print s ~ code ? coloured(s) : linked(escape(s))
            continue
        }
        if (s ~ /^\/\* ==== [0-9]+ >>/) {
            close_item(); split(s, w, " "); id = w[4]; sub(/^>>/, "", id); sub(/:$/, "", id)
            if (!(id in placed)) { placed[id] = 1; printf "<h2 id=\"%s\"><a href=\"#%s\">%s</a></h2>\n", id, id, id }
        }
        if (s == "" && !in_comment) { close_item(); continue }
        if (s ~ /^#|^extern "C"|^AMPI_ABI/ && item == "") continue
        if (match(s, /amp_[a-z0-9_]+\(/) && s ~ /^(AMP_API|AMPI_INLINE|AMPI_HD) /) { id = substr(s, RSTART, RLENGTH - 1); if (!(id in placed)) { placed[id] = 1; if (ids == "") ids = " id=\"" id "\""; else item = item "<span id=\"" id "\"></span>" } }
        else if (match(s, /^(typedef )?(struct|enum) amp_[a-z0-9_]+ \{/)) { id = s; sub(/ \{.*/, "", id); sub(/.* /, "", id); if (!(id in placed)) { placed[id] = 1; if (ids == "") ids = " id=\"" id "\""; else item = item "<span id=\"" id "\"></span>" } }
        if (in_comment) { item = item "<i>" linked(escape(s)) "</i>\n"; if (s ~ /\*\//) in_comment = 0; continue }
        if (s ~ /^ *\/\*/ && s !~ /\*\//) { in_comment = 1; item = item "<i>" linked(escape(s)) "</i>\n"; continue }
        if (s ~ /\/\*/ && s !~ /\*\//) in_comment = 1
        item = item coloured(s) "\n"
    }
    close_item(); close_chapter()
    print "</main><script>"
    print "const q=document.getElementById('q'),parts=[...document.querySelectorAll('main section,main .item')].map(e=>[e,e.textContent.toLowerCase()]);"
    print "q.addEventListener('input',()=>{const w=q.value.toLowerCase().split(/\\s+/).filter(x=>x);let n=0;for(const[e,t]of parts){const on=w.every(x=>t.includes(x));e.hidden=!on;n+=on}document.getElementById('none').hidden=n>0});"
    print "</script></body></html>"
}
