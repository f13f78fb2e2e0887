# plot.gp - the picture of plot.sh, which sets work (folder of the columns), runs (how many), kind (png, svg), name, and
# bars (1: speed and memory, too; 0: the curves alone, wider).
wide = bars ? 1200 : 900
curves = bars ? 0.62 : 1
if (kind eq "png") {
    set terminal pngcairo size wide,760 font "sans,11" background "white"
} else {
    set terminal svg size wide,760 font "sans,14" background "white" dynamic
}
set output name . "." . kind
set encoding utf8
set datafile missing "?"

# Colours that stay apart in every kind of colour blindness (Okabe & Ito 2008).
array colours[6] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"]
colour(i) = colours[(i - 1) % 6 + 1]
thickness(i) = 1.4 + 1.8 * (runs - i) / (runs > 1 ? runs - 1 : 1)       # so that curves show below those drawn over them
columns(i) = sprintf("%s/columns.%d", work, i)
table = work . "/runs"
field(i, column) = system(sprintf("sed -n %dp %s | cut -f %d", i, table, column))
label(i) = field(i, 1)

# The numbers of the runs that have each
with_loss = ""; with_scaler = ""; with_rate = ""; with_memory = ""
do for [i = 1:runs] {
    if (field(i, 2) ne "?") { with_rate = with_rate . " " . i }
    if (field(i, 3) ne "?") { with_memory = with_memory . " " . i }
    if (field(i, 4) eq "1") { with_scaler = with_scaler . " " . i }
    if (field(i, 5) eq "1") { with_loss = with_loss . " " . i }
}

set border 3 lw 0.8 lc rgb "#555555"
set tics nomirror textcolor rgb "#333333"
set grid ytics back lt 1 lc rgb "#cccccc" lw 0.6
set key noenhanced samplen 2
set title font ",13"
set lmargin 10
set rmargin 3
set multiplot

# A panel without anything to draw says so.
nothing = "set label 1 nodata at graph 0.5, graph 0.5 center textcolor rgb '#777777'; unset key; unset tics; set xrange [0:1]; set yrange [0:1]; plot NaN notitle; unset label 1; set tics nomirror; set xrange [*:*]; set yrange [*:*]"

# Loss curves
set origin 0, 0.46; set size curves, 0.54
set title "Training loss"
set xlabel "step" offset 0, 0.4
set ylabel "nats per token" offset 1
set key top right
if (with_loss ne "") {
    plot for [i in with_loss] columns(int(i)) using 1:2 with lines lw thickness(int(i)) lc rgb colour(int(i)) title label(int(i))
} else {
    nodata = "the records have no loss"; eval nothing
}

# The loss scale, with what was skipped
set origin 0, 0; set size curves, 0.46
set title "Loss scale"
set ylabel "scale" offset 1
set key top right
if (with_scaler ne "") {
    set logscale y 2
    set format y "2^{%L}"
    low = 1e300; high = 0                                       # a scale that never moved needs a range, too
    do for [i in with_scaler] {
        stats columns(int(i)) using 3 nooutput
        low = STATS_min < low ? STATS_min : low; high = STATS_max > high ? STATS_max : high
    }
    set yrange [low / 2:high * 2]
    plot for [i in with_scaler] columns(int(i)) using 1:3 with steps lw thickness(int(i)) lc rgb colour(int(i)) title label(int(i)), \
         for [i in with_scaler] columns(int(i)) using ($4 == 1 ? $1 : NaN):3 with points pt 2 ps 0.9 lw 1.6 lc rgb "#222222" notitle, \
         NaN with points pt 2 ps 0.9 lw 1.6 lc rgb "#222222" title "skipped step"
    unset logscale y
    set yrange [*:*]
} else {
    nodata = "no run has a loss scaler"; eval nothing
}

# Bars: speed and memory
if (bars) {
set key off
set style fill solid 0.85 noborder
set boxwidth 0.6
set datafile separator "\t"
set xtics noenhanced rotate by (runs > 4 ? -30 : 0)
set xlabel ""
unset ylabel
set offsets 0, 0, graph 0.12, 0
boxes = "set xrange [0.4:runs + 0.6]; set yrange [0:*]; plot for [i in measured] table using (int(i)):bar every ::int(i) - 1::int(i) - 1 with boxes lc rgb colour(int(i)), table using ($0 + 1):bar:(sprintf(shown, column(bar))) with labels offset 0, 0.7 font ',10', table using ($0 + 1):(0):xtic(1) with points pt -1"
set origin 0.63, 0.5; set size 0.37, 0.5
set title "tokens/s, median over the steps"
set format y "%.0f"
bar = 2; measured = with_rate; shown = "%.0f"
if (with_rate ne "") { eval boxes } else { nodata = "the records have no rate"; eval nothing }
set origin 0.63, 0; set size 0.37, 0.5
set title "Peak memory, MiB"
set format y "%.0f"
bar = 3; measured = with_memory; shown = "%.1f"
if (with_memory ne "") { eval boxes } else { nodata = "the records have no memory"; eval nothing }
}
unset multiplot

# Each layer's precision by step
layers = work . "/layers"
if (system("test -s " . layers . " && echo 1") eq "1") {
    reset
    set output name . ".layers." . kind
    set datafile separator whitespace
    rows = int(system("awk '$3 > n { n = $3 } END { print n }' " . layers))
    set title "Precision by layer"
    set xlabel "step"
    set yrange [rows + 0.5:0.5]
    set xrange [0:*]
    set ytics noenhanced
    set tics nomirror out
    set border 3
    set key outside top right
    array shades[5] = ["#009e73", "#56b4e9", "#0072b2", "#e69f00", "#d55e00"]
    part(d) = sprintf("< awk '$4 == \"%s\"' %s", d, layers)
    present = system("for d in fp8 fp16 bf16 tf32 fp32; do grep -q \" $d \" " . layers . " && printf '%s ' $d; done")
    shade(d) = shades[(strstrt("fp8  fp16 bf16 tf32 fp32", d) + 4) / 5]
    plot for [d in present] part(d) using 1:3:($2 - $1):(0) with vectors nohead lw 8 lc rgb shade(d) title d, \
         layers using (0):3:ytic(5) with points pt -1 notitle
}
