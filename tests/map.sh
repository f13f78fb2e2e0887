#!/bin/sh
# map.sh [FOLDER] - cuts amp.h and amp_cuda.cu into one file per section, and writes a table of the sections.  Some tools
# and editors do not open files of more than a megabyte.  The sections begin at the title lines in the files.  The table is
# FOLDER/map.md, and FOLDER is build/map by default.  `map.sh --table` prints the table in tests/README.md.  It has the
# lines of each section, its public functions, and the sections whose names it uses.
export LC_ALL=C

# One file for each ruler, in the order of the lines.
cut_up() {                                                      # FILE FOLDER
    awk -v folder="$2" -v base="$(basename "${1%.*}")" -v kind="${1##*.}" '
        function file_of(part, tag) {
            name = sprintf("%s/%s_%s%s.%s", folder, base, part, tag, kind)
            while (name in used) name = sprintf("%s/%s_%s%s_%d.%s", folder, base, part, tag, ++again, kind)
            used[name]
            return name
        }
        BEGIN { out = file_of("0_", "manual") }
        /^\/\* Stop here/ { implementation = 1; out = file_of("2_", "stop") }
        /^\/\* ==== / {
            n++
            tag = $4
            gsub(/[^a-z]/, "", tag)
            if ($3 !~ /^[0-9]+$/) tag = "header"
            out = file_of(sprintf("%d_%02d_", implementation + 1, n), tag)
        }
        { print > out }' "$1"
}

# Sections in the order of the implementation.
table() {
    awk '
        function bare(s) {                                      # without comments and strings
            if (comment) { if (!sub(/^.*\*\//, "", s)) return ""; comment = 0 }
            gsub(/"([^"\\]|\\.)*"|\/\*([^*]|\*+[^*\/])*\*+\//, " ", s)
            if (sub(/\/\*.*/, "", s)) comment = 1
            return s
        }
        FNR == 1 { reading++; implementation = comment = 0; tag = "" }
        /^\/\* Stop here/ { implementation = 1; tag = "" }
        /^\/\* ==== / { tag = $3 ~ /^[0-9]+$/ ? $4 : ""; gsub(/[>:]/, "", tag) }
        /^\/\* ==== / && reading == 1 && implementation && tag != "" && !(tag in number) { number[tag] = $3; order[++n] = tag }
        reading == 1 && tag != "" { lines[tag, implementation]++ }
        reading == 1 && !implementation && /^AMP_API / { calls[tag]++ }
        { line = bare($0); gsub(/AMPI_(V|PICK)\([a-z0-9_]+/, "", line) }                 # vector kernels have names of their own
        reading == 1 && implementation && tag != "" && line ~ /^(static|AMP_API) / && match(line, /ampi?_[a-z0-9_]+ *(\(|\[)/) {
            name = substr(line, RSTART, RLENGTH)
            gsub(/[^a-z0-9_]/, "", name)
            if (!(name in home)) home[name] = tag
        }
        reading == 2 && implementation && tag != "" {
            while (match(line, /ampi?_[a-z0-9_]+/)) {
                name = substr(line, RSTART, RLENGTH)
                line = substr(line, RSTART + RLENGTH)
                if (name in home && home[name] != tag) uses[tag, home[name]] = 1
            }
        }
        END {
            print "| section | lines, API | lines, implementation | public functions | calls functions of |"
            print "|---|---|---|---|---|"
            for (i = 1; i <= n; i++) {
                tag = order[i]
                list = ""
                for (k = 1; k <= n; k++) if ((tag, order[k]) in uses) list = list (list == "" ? "" : ", ") order[k]
                printf "| %d `>>%s` | %d | %d | %d | %s |\n", number[tag], tag, lines[tag, 0], lines[tag, 1], calls[tag], list
            }
        }' amp.h amp.h
}

if [ "${1:-}" = --table ]; then table; exit; fi
folder=${1:-build/map}
rm -rf "$folder"
mkdir -p "$folder" || exit 1
cut_up amp.h "$folder"
cut_up amp_cuda.cu "$folder"
table > "$folder/map.md"
echo "$folder: $(find "$folder" -type f | wc -l) files"
