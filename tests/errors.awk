# errors.awk - what amp.h's API half promises: for each comment with "Errors:" a line "NUMBER FUNCTION..." per number, with the
# functions declared below it, of which one at least returns it; and what every operator returns.
/^\/\* Stop here/ { exit }
{ text = $0 }
comment == 0 && text ~ /^\/\*/ { said = ""; comment = 1; functions = "" }
comment && !(text ~ /^ +[a-z0-9_]+.*;.*\/\*/) { said = said " " text }
comment && text ~ /\*\// { comment = 0; next }
comment { next }
/^(AMP_API|AMPI_INLINE) / || /^} amp_|^$/ {
    if (/^(AMP_API|AMPI_INLINE) amp_result / && match($0, / amp_[a-z0-9_]+\(/)) {
        name = substr($0, RSTART + 1, RLENGTH - 2)
        if (/_op \*op\)/) {
            split("101 103 104 110", always, " ")
            for (i in always) print always[i], name
            if (name ~ /_backward$/) print 106, name
        }
        below[said] = below[said] " " name
    }
}
END {
    for (said in below) {
        if (!match(said, /Errors?( of [a-z]+)?:/)) continue
        rest = substr(said, RSTART)
        while (match(rest, /[^0-9][1-5][0-9][0-9][^0-9]/)) {
            number = substr(rest, RSTART + 1, 3)
            if (number != 256) print number below[said]
            rest = substr(rest, RSTART + 4)
        }
    }
}
