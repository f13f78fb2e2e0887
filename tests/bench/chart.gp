# chart.gp - README's bar chart, examples/plot/bars.svg: lines "label<TAB>tokens/s<TAB>1 for amp.h" in `data`.
# table.py runs it with `title`, from the project's folder.
set terminal svg size 900,330 font "sans,14" background "white"
set output "examples/plot/bars.svg"
set datafile separator "\t"
set title title noenhanced font ",13"
set yrange [*:*] reverse
set offsets 0, 0, 0.3, 0.3
set xrange [0:*]
unset key
unset xtics
unset border
set ytics nomirror scale 0 noenhanced textcolor rgb "#333333"
set lmargin 30
set rmargin 8
set style fill solid
# Colours that stay apart in every kind of colour blindness (Okabe & Ito 2008).
colour(ours) = ours == 1 ? 0x0072b2 : 0xbbbbbb
plot data using ($2/2):0:($2/2):(0.36):(colour($3)):ytic(1) with boxxyerror linecolor rgb variable, \
     data using 2:0:2 with labels left offset 1,0 textcolor rgb "#333333"
