# sizes.awk - prints what is longer or deeper in amp.h than a reader follows; silent when all is well.
#     awk -f tests/sizes.awk amp.h
# A section has at most 3,000 lines; a function at most 60 lines, 7 parameters (products apart) and 4 levels of statements that
# hold others.
function say(text) { print FILENAME ":" NR ": " text }
function parameters(head,    inner, n) {
    inner = head
    sub(/^[^(]*\(/, "", inner)
    while (sub(/\([^()]*\)/, "", inner)) n = n                  # parameters that are functions have commas of their own
    sub(/\).*/, "", inner)
    return gsub(/,/, ",", inner) + 1
}
# Products have sizes, strides and three operands: they are as BLAS has them.
function is_blas(name, head) { return head ~ /trans_a/ || name ~ /(gemm|gemv|direct|mma)_/ }
function close_section() { if (lines > 3000) print FILENAME ": >>" tag " has " lines " lines" }
/^\/\* ==== / { close_section(); lines = 0; tag = $4; gsub(/[>:]/, "", tag) }
{ lines++ }
/^[A-Za-z_]/ && !/^(typedef|struct|enum|union|template|namespace|extern|AMPI?_[A-Z_]+\()/ { head = ""; open = 1 }
open { head = head " " $0 }
open && /[{;]/ {
    open = 0
    name = head
    sub(/ *\(.*/, "", name)
    sub(/.*[ *]/, "", name)
    if (head ~ /\).*\{ *(return.*\})? *$/ && head !~ /\) *=/) { inside = NR; deepest = level = 0 }
    if (head ~ /^[^=]*\(/ && !is_blas(name, head) && parameters(head) > 7) say(name " has " parameters(head) " parameters")
}
# A statement that opens a block within a function stands at a multiple of four columns.
inside && /^ *(if|for|while|switch|do)[ ({]/ {
    match($0, /^ */)
    if (RLENGTH / 4 > deepest) deepest = RLENGTH / 4
}
inside {
    text = $0
    gsub(/"([^"\\]|\\.)*"|'([^'\\]|\\.)*'|\/\*.*\*\//, "", text)
    level += gsub(/\{/, "{", text)
    level -= gsub(/\}/, "}", text)
    if (level == 0 && NR >= inside) {
        functions++
        if (NR - inside + 1 > 60) say(name " has " NR - inside + 1 " lines")
        if (deepest > 4) say(name " has " deepest " levels of blocks")
        inside = 0
    }
}
END { close_section(); if (functions < 400) print FILENAME ": only " functions + 0 " functions were seen" }
