# amp.h - `make help` names every target.
#
#   CC=clang            another compiler
#   CUDA=0              examples for the CPU alone, where there is a GPU
#   PYTHON=path         for `make oracle` and the peers of `make bench`

ifeq ($(origin CC),default)
CC      := gcc
endif
CFLAGS  ?= -O2
PYTHON  ?= python3
BUILD   := build
WARN    := -std=c99 -Wall -Wextra -Wpedantic -Wshadow -Wconversion

LIBS    := -lm -lpthread

# As many jobs as cores, unless -j says how many.
ifeq ($(MAKELEVEL),0)
MAKEFLAGS += -j$(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
endif

HEADERS  := $(wildcard examples/*.h)
EXAMPLES := $(patsubst examples/%.c,%,$(wildcard examples/*.c))
TESTS    := $(basename $(notdir $(wildcard tests/*/t_*.c)))
BENCHES  := $(patsubst tests/bench/%.c,%,$(wildcard tests/bench/bench_*.c))

.PHONY: slurm newcomer compilers test-platforms docs map help run quick t examples check-machine bench-precision bench-features adopt libampblas plot watch test test-ci test-exhaustive errors error-texts anomalies oracle bench \
        bench-curves bench-threads bench-shapes bench-convert bench-moments bench-tape bench-compile bench-fp8 bench-choice bench-ddp accuracy readme install clean

PREFIX  ?= /usr/local
VERSION := $(shell sed -n 's/^\#define AMP_VERSION_TEXT "\(.*\)"/\1/p' amp.h)

help: backend
	@echo "make run              train a small GPT in mixed precision on this project's own text (about two minutes)"
	@echo "make examples         build every example into $(BUILD)/"
	@echo "make check-machine    report what mixed precision can do on this machine, and check that it works (15 seconds)"
	@echo "make bench-precision  measure time and memory of every precision; bench-features: of each feature (a minute)"
	@echo "make quick            build and run the quick tests, which touch all of amp.h (a minute on two cores)"
	@echo "make t T=scaler F=hysteresis     build and run one test: of the file t_scaler.c, those whose name holds hysteresis"
	@echo "make test             build and run the tests (no network, no Python)"
	@echo "make test-ci          run the tests only CI needs: sanitizers, compilers, standards, ten kills, each fuzzer"
	@echo "make test-exhaustive  run all 2^32 fp32 patterns through every conversion and the optimizers' remainders,"
	@echo "                      and 50,000 random graphs through every way of running a tape"
	@echo "make test-orders      run the CUDA backend's tests in five orders of the model GPU's threads; into tests/records/"
	@echo "make fuzz SECONDS=30  run each fuzzer for that long (clang's libFuzzer); inputs that break something go to"
	@echo "                      $(BUILD)/fuzz/found/; fuzz-seeds: generate the seeds again"
	@echo "make anomalies        let every host call fail in turn: memory, files, threads, clock; into tests/records/"
	@echo "make crash            kill training 200 times (KILLS, SEED), also while it saves, and resume it bit for bit"
	@echo "make slurm            run examples/slurm/train.sbatch on a Slurm of its own (root; installs it): preempted, requeued"
	@echo "make crash-ranks      kill one of four ranks 200 times (KILLS, SEED): no hang, no lost checkpoint, the same bits after"
	@echo "make newcomer         walk the first hour of README.md and examples/README.md, command by command, in an empty HOME"
	@echo "make compilers        compile amp.h by every gcc, clang and zig at hand, at every level (COMPILERS: by these; an hour)"
	@echo "make test-platforms   compile amp.h for macOS, Windows, Arm and others, and run tests under wine and qemu (an hour)"
	@echo "make docs             make one page of amp.h's manual, comments and declarations: $(BUILD)/docs/index.html"
	@echo "make map              cut amp.h and amp_cuda.cu into one file per section, with a table of sections, into $(BUILD)/map/"
	@echo "make error-texts      print every error and warning of amp.h, by result, as a page to read"
	@echo "make soak             train for MINUTES (20) with failing memory, files, disks and kills, and compare with a clean run"
	@echo "make coverage         measure which lines and branches the tests reach; fails below 95% and 85%"
	@echo "make mutants          change one token of amp.h at a time: a test must catch each (ten minutes); mutants-cuda: one"
	@echo "                      expression of amp_cuda.cu, on the model GPU"
	@echo "make oracle           regenerate the golden data with PyTorch (PYTHON=... with tests/torch/oracle/requirements.txt)"
	@echo "make differential     compare random programs and tensors with PyTorch (PYTHON=..., SEED=1); into tests/records/"
	@echo "make bench            time kernels, steps, recomputing, loader and masks against peers (PEER_TORCH, PEER_LLMC,"
	@echo "                      PEER_BLAS), with a verdict per bar; into tests/bench/results/"
	@echo "make bench-threads    time the thread pool, alone and with busy programs; PEER=COMMIT: against an amp.h with OpenMP"
	@echo "make bench-shapes     time products against a BLAS library, in fp32 and bf16, on one and two threads (SET=large, BLAS=file)"
	@echo "make bench-convert    time amp_convert from and to fp64 against memcpy, in caches and in memory"
	@echo "make bench-moments    8-bit optimizer states: time, memory and loss beside fp32 and bitsandbytes"
	@echo "make bench-tape       host time of a tape's nodes beside the same calls by hand, for 100 to 10,000 nodes"
	@echo "make bench-compile    CPU seconds of compiling amp.h, by pass and by section; PEER=header MACRO=its implementation's"
	@echo "make bench-fp8        train in fp8 beside bf16: loss curves of every recipe; goes on where it was stopped"
	@echo "make bench-choice     train 2,000 steps in every precision: is auto's choice the fastest of those that learn as well?"
	@echo "make bench-ddp        time a step on two processes (TCP, MPI) beside PyTorch's DDP and one process (PYTHON= with PyTorch)"
	@echo "make bench-curves     measure memory, resume time, host cost and step time as curves"
	@echo "make adopt            compare a plain fp32 program before and after adopting amp.h: time and loss per precision"
	@echo "make libampblas       build $(BUILD)/libampblas.so: with AMP_DTYPE=bf16 LD_PRELOAD=$(BUILD)/libampblas.so, a program's"
	@echo "                      cblas_sgemm and sgemm_ compute in bf16 (Linux)"
	@echo "make plot             plot runs of train_gpt (RUNS=files; else those in out/): loss, scale, tokens/s, memory"
	@echo "make watch            show the newest training below out/ (RUN=folder) as it runs: loss, scale, skips, tokens/s, memory,"
	@echo "                      precision per layer; ONCE=1: one picture; the same as a page, watch.html beside its records"
	@echo "make accuracy         compare the tests' errors with PyTorch's; into tests/bench/results/"
	@echo "make readme           put the newest results into the README's tables"
	@echo "make cuda             build the CUDA backend for every GPU that nvcc knows: $(BUILD)/amp_cuda.o"
	@echo "make gpu              run tests and timings on this machine's GPU, against PyTorch; REHEARSE=1: on the model GPU;"
	@echo "                      ROWS=\"step:bf16 kernels:norms\": only those (python3 tests/gpu/run.py --list names all, in order);"
	@echo "                      SECONDS=600: of everything; RESULTS=folder: where the record goes"
	@echo "make test-toolkits    compile amp_cuda.cu with the CUDA toolkits in the folder TOOLKITS, by their nvcc or by clang;"
	@echo "                      sh tests/gpu/toolkits.sh --fetch makes toolkits of CUDA 11.8 to 12.9 from PyPI's packages"
	@echo "make gpu-table        write the CUDA kernels' registers and memory to tests/gpu/resources.txt"
	@echo "make install PREFIX=  copy amp.h, amp_cuda.cu, amp/cblas.h and their .pc files below PREFIX (default /usr/local)"
	@echo "make clean            remove $(BUILD)/ and out/"
	@echo; echo "examples/, each compiled with one line (examples/README.md):"
	@awk -F' *[|] *' '/^[|] \[[a-z_]+[.](c|cpp|cu)\]/ {gsub(/\[|\].*/, "", $$2); gsub(/`/, "", $$4); printf "  %-17s %3d lines  %s\n", $$2, $$3, $$4}' examples/README.md

run: backend $(BUILD)/train_gpt $(BUILD)/amp_bench
	$(BUILD)/train_gpt
	$(BUILD)/amp_bench --training out/corpus.txt --layers 4 --heads 4 --channels 128 --batch 16 --seq 128

examples: $(EXAMPLES:%=$(BUILD)/%)

# FLAGS: of the program, for example FLAGS="--device cpu".  Results: out/bench_precision.json, out/bench_features.json.
check-machine: backend $(BUILD)/amp_check
	$(BUILD)/amp_check $(FLAGS)
bench-precision bench-features: bench-%: backend $(BUILD)/amp_bench
	$(BUILD)/amp_bench --$* $(FLAGS)

# amp.h compiled once for all programs here; each of them alone compiles without this, as its own head says.
LINKED := -DAMP_IMPLEMENTATION_INCLUDED
$(BUILD)/amp.o: amp.h | $(BUILD)
	echo '#include "amp.h"' | $(CC) -std=c99 $(CFLAGS) -DAMP_IMPLEMENTATION -I. -x c -c - -o $@

# With the CUDA backend where there are nvcc and a GPU.
CUDA ?= $(shell sh tests/gpu/find.sh usable)
ifeq ($(CUDA),1)
$(BUILD)/%: examples/%.c $(HEADERS) $(BUILD)/amp.o $(BUILD)/gpu/amp_cuda.o
	$(CC) $(WARN) $(CFLAGS) $(LINKED) -DUSE_CUDA -c $< -o $@.o
	$$(sh tests/gpu/find.sh nvcc) $@.o $(BUILD)/amp.o $(BUILD)/gpu/amp_cuda.o -o $@ -lcublasLt $(LIBS)
else
$(BUILD)/%: examples/%.c $(HEADERS) $(BUILD)/amp.o
	$(CC) $(WARN) $(CFLAGS) $(LINKED) $< $(BUILD)/amp.o -o $@ $(LIBS)
endif

# Tests that look inside amp.h are one translation unit, inside.c: build/t_gemm and the others are names of that program.
# Three bring an amp.h of their own, without optimisation, which compiles in a fifth of the time.
INSIDE       := $(shell sed -n 's/^.include "\(t_.*\).c"/\1/p' tests/unit/inside.c)
INSIDE_ALONE := t_concurrency t_lean t_lifetime
vpath t_%.c tests/unit tests/torch tests/hostile tests/examples
TEST_HEADERS := $(wildcard tests/*.h tests/hostile/fuzz/*.[ch]) $(HEADERS)
INSIDE_FILES := tests/unit/inside.c $(INSIDE:%=tests/unit/%.c) $(TEST_HEADERS) amp.h
# One file's local names are another's at file scope; and gcc sees that a call which fails leaves its result unset.
INSIDE_WARN  := $(WARN) -Wno-shadow -Wno-maybe-uninitialized

$(BUILD)/inside.o: $(INSIDE_FILES) | $(BUILD)
	$(CC) $(INSIDE_WARN) -Itests $(CFLAGS) -c $< -o $@
$(BUILD)/t_inside: $(BUILD)/inside.o tests/unit/inside_main.c
	$(CC) $(WARN) $(CFLAGS) tests/unit/inside_main.c $< -o $@ $(LIBS)
$(INSIDE:%=$(BUILD)/%): $(BUILD)/t_inside
	ln -sf t_inside $@
$(INSIDE_ALONE:%=$(BUILD)/%): $(BUILD)/t_%: t_%.c $(TEST_HEADERS) amp.h | $(BUILD)
	$(CC) $(WARN) -Itests -O0 $< -o $@ $(LIBS)
# The others are compiled once, with little optimisation: what computes long is amp.h.
$(BUILD)/t_%.o: t_%.c $(TEST_HEADERS) examples/train_gpt.c examples/train_classifier.c | $(BUILD)
	$(CC) $(WARN) -Itests -O1 $(LINKED) -c $< -o $@
$(BUILD)/t_%: $(BUILD)/t_%.o $(BUILD)/amp.o
	$(CC) $(CFLAGS) $^ -o $@ $(LIBS)
.SECONDARY: $(TESTS:%=$(BUILD)/%.o)

# All that computes once more with an amp.h of -Ofast, which folds isnan and takes sums in another order, and linked with
# -Ofast, which makes programs start with subnormal numbers flushed to 0: one amp.h, that of inside.c, for all of them.
FAST        := t_attention t_autocast t_fp8 t_gemm t_inputs t_kernels t_masks t_model t_numbers t_tensor_stats t_operators \
               t_optimizer t_ranks t_refusals t_recompute t_scaler t_tape t_train t_traps t_verify t_watch
FAST_INSIDE := $(filter $(INSIDE),$(FAST))
$(BUILD)/fast_inside.o: $(INSIDE_FILES) | $(BUILD)
	$(CC) $(INSIDE_WARN) -Itests -Ofast -c $< -o $@
$(BUILD)/fast_inside: $(BUILD)/fast_inside.o tests/unit/inside_main.c
	$(CC) $(WARN) -Ofast tests/unit/inside_main.c $< -o $@ $(LIBS)
$(FAST_INSIDE:%=$(BUILD)/fast_%): $(BUILD)/fast_inside
	ln -sf fast_inside $@
$(BUILD)/fast_%: $(BUILD)/%.o $(BUILD)/fast_inside.o
	$(CC) -Ofast $^ -o $@ $(LIBS)

# make quick: a minute on two cores, with every section of amp.h: one amp.h with -O1, the rest without optimisation, and
# without what is long.
QUICK         := $(BUILD)/quick
QUICK_OUTSIDE := t_abi t_adapt t_adopt t_autocast t_debug_log t_determinism t_errors t_inputs t_linear_cross_entropy t_masks \
                 t_operators t_recompute t_refusals t_schedule t_tape t_tensor_stats t_traps t_watch
QUICK_TESTS   := $(INSIDE:%=$(QUICK)/%) $(QUICK_OUTSIDE:%=$(QUICK)/%)
$(QUICK)/inside.o: $(INSIDE_FILES)
	mkdir -p $(QUICK)
	$(CC) $(INSIDE_WARN) -Itests -O1 -c $< -o $@
$(QUICK)/t_inside: $(QUICK)/inside.o tests/unit/inside_main.c
	$(CC) $(WARN) tests/unit/inside_main.c $< -o $@ $(LIBS)
$(INSIDE:%=$(QUICK)/%): $(QUICK)/t_inside
	ln -sf t_inside $@
$(QUICK)/t_%.o: t_%.c $(TEST_HEADERS) amp.h
	mkdir -p $(QUICK)
	$(CC) $(WARN) -Itests $(LINKED) -c $< -o $@
$(QUICK_OUTSIDE:%=$(QUICK)/%): %: %.o $(QUICK)/inside.o
	$(CC) $^ -o $@ $(LIBS)
.SECONDARY: $(QUICK_OUTSIDE:%=$(QUICK)/%.o)
quick: $(QUICK_TESTS)
	AMPT_LEAVE_OUT=long TIMES=$(QUICK)/times.txt sh tests/run.sh $(QUICK_TESTS)

# make t T=scaler F=hysteresis: the tests of one file whose name holds F; what it takes is compiled without optimisation.
T_FILE := $(wildcard tests/*/t_$(T).c)
t: | $(BUILD)
	@[ -n "$(T_FILE)" ] || { echo "make t: T=$(T) is none of: $(patsubst t_%,%,$(sort $(TESTS)))"; exit 1; }
	@$(MAKE) --no-print-directory $(BUILD)/one/t_$(T)
	$(BUILD)/one/t_$(T) $(if $(F),--filter $(F))
$(BUILD)/one/amp.o: amp.h
	mkdir -p $(BUILD)/one
	echo '#include "amp.h"' | $(CC) -std=c99 -O0 -DAMP_IMPLEMENTATION -I. -x c -c - -o $@
$(patsubst %,$(BUILD)/one/%,$(INSIDE) $(INSIDE_ALONE)): $(BUILD)/one/t_%: t_%.c $(TEST_HEADERS) amp.h
	mkdir -p $(BUILD)/one
	$(CC) $(WARN) -Itests -O0 $< -o $@ $(LIBS)
$(BUILD)/one/t_%: t_%.c $(TEST_HEADERS) examples/train_gpt.c examples/train_classifier.c $(BUILD)/one/amp.o
	$(CC) $(WARN) -Itests -O0 $(LINKED) $< $(BUILD)/one/amp.o -o $@ $(LIBS) -ldl

$(BUILD)/bench_%: tests/bench/bench_%.c tests/bench/bench.h amp.h $(HEADERS) | $(BUILD)
	$(CC) $(WARN) $(CFLAGS) $< -o $@ $(LIBS)

$(BUILD):
	mkdir -p $@

$(BUILD)/t_anomalies: LIBS += -ldl          # dlsym
$(BUILD)/bench_shapes: LIBS += -ldl         # dlopen

# The CUDA backend's tests on the CPU: CUDA_TESTS, CUDA_TESTS_CI; and on GPUs.
include tests/cuda/rules.mk
include tests/gpu/rules.mk
include tests/torch/differential/rules.mk
include tests/hostile/crash/rules.mk
include tests/hostile/fuzz/rules.mk
include tests/coverage/rules.mk
include tests/mutants/rules.mk

# Side by side, one program a core, and beside them, one at a time, what mostly waits; then, one at a time, what needs quiet:
# tests with bars on time, and errors.sh, which asks what the others provoked.
EXAMPLE_TESTS := $(wildcard tests/examples/*.sh)
WAITING       := tests/examples/slurm.sh $(BUILD)/t_cuda_nccl $(BUILD)/t_tcp tests/examples/mpi.sh
QUIET         := tests/examples/hosts.sh tests/examples/tools.sh tests/errors.sh
RUN           := CC="$(CC)" CFLAGS="$(CFLAGS)" sh tests/run.sh
TEST_RUNS     := $(EXAMPLE_TESTS) tests/docs.sh tests/house.sh tests/harness.sh tests/abi.sh tests/frozen/frozen.sh $(CUDA_TESTS) $(TESTS:%=$(BUILD)/%) $(FAST:%=$(BUILD)/fast_%)
test: $(TESTS:%=$(BUILD)/%) $(FAST:%=$(BUILD)/fast_%) $(filter $(BUILD)/%,$(CUDA_TESTS)) $(CUDA_NEEDS) examples
	AMPT_LEAVE_OUT=ci TIMES=$(BUILD)/times.txt $(RUN) $(filter-out $(WAITING) $(QUIET),$(TEST_RUNS)) --waiting $(WAITING) --alone $(QUIET)

# The longest first, so that no core waits long for the last; one job each, as run.sh keeps every core busy.
WAITING_CI    := $(filter %/asan_t_cuda_nccl %/tsan_t_cuda_threads,$(CUDA_TESTS_CI))
TEST_RUNS_CI  := tests/sanitize.sh tests/platforms.sh tests/compile.sh tests/hostile/fuzz/run.sh tests/newcomer.sh $(CUDA_TESTS_CI) tests/lifetime.sh
test-ci: $(filter $(BUILD)/%,$(CUDA_TESTS_CI)) $(CRASH_CI)
	CORES=1 ONLY=ci INSIDE="$(INSIDE)" INSIDE_ALONE="$(INSIDE_ALONE)" FUZZ_SECONDS=10 TIMES=$(BUILD)/times_ci.txt $(RUN) \
	    $(filter-out $(WAITING_CI),$(TEST_RUNS_CI)) --waiting $(WAITING_CI) --alone $(CRASH_CI)

newcomer:
	CC="$(CC)" sh tests/run.sh tests/newcomer.sh

compilers:
	sh tests/run.sh tests/compilers.sh

# ONLY="macos-arm64 mingw": these platforms.  ZIG: a zig that is not on the path.
test-platforms:
	CC="$(CC)" PYTHON="$(PYTHON)" sh tests/platforms.sh

# One page, which needs nothing but itself.
map:
	sh tests/map.sh $(BUILD)/map

docs: $(BUILD)/docs/index.html
$(BUILD)/docs/index.html: amp.h examples/docs.awk
	mkdir -p $(@D)
	LC_ALL=C awk -f examples/docs.awk amp.h > $@.part && mv $@.part $@
	@echo "$@"

# RECORD=FILE: with what, on what and how long, as JSON.
test-exhaustive: $(BUILD)/t_numbers $(BUILD)/t_optimizer $(BUILD)/t_tape
	CC="$(CC)" CFLAGS="$(CFLAGS)" sh tests/exhaustive.sh "$(BUILD)/t_numbers --full" \
	    "$(BUILD)/t_optimizer --full --filter every_pattern" "$(BUILD)/t_tape --full --filter same_bits"

# What amp.h promises to return, and no test provokes.
errors: $(TESTS:%=$(BUILD)/%)
	sh tests/run.sh $(TESTS:%=$(BUILD)/%) tests/errors.sh

# Each error and warning as a user reads it.
error-texts:
	@LC_ALL=C awk -f tests/error_texts.awk amp.h

anomalies: $(BUILD)/t_anomalies
	mkdir -p tests/records
	$(BUILD)/t_anomalies --all --record tests/records/anomalies-$$(date +%F).json

oracle: examples
	for program in number_formats state_v1 kernels fp8 linear_cross_entropy sums scaler optimizer schedules defaults moments tokenizer wordpiece gpt2 llama encoder hf_encoder autocast \
	    hf_configs hf_roundtrip hf_classifier fuzz_logic fuzz_tensors tokenizers_of_folders; do \
	    $(PYTHON) tests/torch/oracle/$$program.py || exit 1; done

bench: $(BENCHES:%=$(BUILD)/%)
	$(PYTHON) tests/bench/run.py

bench-threads:
	$(PYTHON) tests/bench/threads.py --peer "$(PEER)"

bench-shapes: $(BUILD)/bench_shapes
	$(PYTHON) tests/bench/shapes.py $(if $(SET),--set $(SET)) $(if $(BLAS),--blas $(BLAS))

bench-convert: $(BUILD)/bench_convert
	$(PYTHON) tests/bench/convert.py

bench-moments: $(BUILD)/bench_moments $(BUILD)/train_gpt
	$(PYTHON) tests/bench/moments.py

bench-tape: $(BUILD)/bench_tape
	$(BUILD)/bench_tape

bench-compile:
	$(PYTHON) tests/bench/compile_time.py $(if $(PEER),--peer "$(PEER)" --macro "$(MACRO)")

bench-fp8: $(BUILD)/train_gpt
	$(PYTHON) tests/bench/fp8_curves.py

bench-choice: $(BUILD)/train_gpt $(BUILD)/bench_step
	$(PYTHON) tests/bench/precision_curves.py

# With MPI where there is mpicc.
bench-ddp: $(BUILD)/train_gpt $(if $(shell command -v mpicc),$(BUILD)/train_gpt_mpi)
	$(PYTHON) tests/bench/ddp.py
$(BUILD)/train_gpt_mpi: examples/train_gpt.c $(HEADERS) $(BUILD)/amp.o
	mpicc $(WARN) $(CFLAGS) $(LINKED) -DUSE_MPI $< $(BUILD)/amp.o -o $@ $(LIBS)

bench-curves: $(BENCHES:%=$(BUILD)/%)
	$(PYTHON) tests/bench/run.py --only curves

# What adopting amp.h gains a plain fp32 program: examples/adopt/before.c beside after.c.
adopt:
	CC="$(CC)" sh examples/adopt/measure.sh

# RUNS="out/a/metrics.jsonl ...": these runs; else all below out/.
plot:
	MAKE="$(MAKE)" sh examples/plot/plot.sh $(RUNS)

# RUN=out/fp16: this run; else the newest below out/.  ONCE=1: one picture.
watch: $(BUILD)/watch
	@$(BUILD)/watch $(if $(RUN),--run "$(RUN)") $(if $(ONCE),--once)

# A slurmctld and a slurmd on this machine; as root, who can install them.
slurm: $(BUILD)/train_gpt
	INSTALL=1 sh tests/run.sh tests/examples/slurm.sh

accuracy: $(BUILD)/t_model $(BUILD)/t_kernels $(BUILD)/t_optimizer
	$(PYTHON) tests/bench/run.py --only accuracy

readme:
	$(PYTHON) tests/bench/table.py

# Never unloaded, for its threads would run on.
libampblas: $(BUILD)/libampblas.so
$(BUILD)/libampblas.so: examples/adopt/ampblas.c examples/adopt/cblas.h amp.h | $(BUILD)
	$(CC) -std=c99 $(CFLAGS) -fPIC -shared -fvisibility=hidden $< -o $@ -Wl,-z,nodelete $(LIBS) -ldl

# For pkg-config: gcc program.c $$(pkg-config --cflags --libs amp); amp-cblas: examples/adopt/cblas.h
PC := 'prefix=%s\nName: %s\nDescription: %s\nVersion: $(VERSION)\nCflags: %s\nLibs: -lm -lpthread\n'
PC_DIR := $(DESTDIR)$(PREFIX)/lib/pkgconfig
install:
	mkdir -p $(DESTDIR)$(PREFIX)/include/amp $(PC_DIR)
	cp amp.h amp_cuda.cu $(DESTDIR)$(PREFIX)/include/
	cp examples/adopt/cblas.h examples/adopt/cblas.c examples/adopt/ampblas.c $(DESTDIR)$(PREFIX)/include/amp/
	printf $(PC) "$(PREFIX)" amp "mixed-precision training in one header" '-I$${prefix}/include' > $(PC_DIR)/amp.pc
	printf $(PC) "$(PREFIX)" amp-cblas "cblas_sgemm through amp.h" '-I$${prefix}/include/amp -I$${prefix}/include' > $(PC_DIR)/amp-cblas.pc
	echo 'source=$${prefix}/include/amp/cblas.c' >> $(PC_DIR)/amp-cblas.pc

clean:
	rm -rf $(BUILD) out
