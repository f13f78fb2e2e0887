# functions.awk - merge.awk's table with the functions' names as the source has them, for C++: awk -f functions.awk FILE table
# What is compiled several times, as templates are, is added up: reached if some copy runs it, taken if some copy takes it.
FNR == NR {
    if (/^[A-Za-z_]/ && !/^(namespace|enum|typedef|static_assert|extern|#)/) {
        code = $0
        sub(/^template <[^(]*>+ /, "", code)
        gsub(/__launch_bounds__\(([^()]|\([^()]*(\([^()]*\))?[^()]*\))*\)|AMPC_ROW_BOUNDS\([a-z]*\)/, "", code)
        if (match(code, /[A-Za-z_][A-Za-z_0-9]*\(/)) name = substr(code, RSTART, RLENGTH - 1)
        else if (match(code, /struct [A-Za-z_0-9]*/)) name = substr(code, RSTART + 7, RLENGTH - 7)
    }
    of[FNR] = name
    next
}
{ $3 = of[$2] == "" ? "-" : of[$2]; print }
