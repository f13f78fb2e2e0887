# rules.mk - amp_cuda.cu for GPUs; included by the Makefile after tests/cuda/rules.mk.
#
#   make cuda               build/amp_cuda.o, one object for every architecture that nvcc knows (CUDA_ARCHS: fewer)
#   make gpu                on the GPU at hand: tests and timings, row by row, what helps most first (run.py --list); each row
#                           saves what it found.  PEER_TORCH=python: with PyTorch, which is timed beside it
#   make gpu ROWS="attention kernels:norms step:*"      some of the rows
#   make gpu SECONDS=300    for everything, building included (default 575); RESULTS=folder: of the file
#   make gpu REHEARSE=1     the same programs on the model GPU, in the smallest sizes
#   make gpu-table          what the kernels need of sm_90a into tests/gpu/resources.txt
#   make test-toolkits      amp_cuda.cu with other toolkits, which are in the folder TOOLKITS (toolkits.sh)
#   make backend            which backend a program can use here
.PHONY: backend cuda gpu gpu-programs gpu-table test-toolkits

NVCC_FLAGS := -O2 -std=c++17 -I. -Werror all-warnings
GPU_JOBS   ?= $(shell getconf _NPROCESSORS_ONLN)

backend:
	@sh tests/gpu/find.sh backend

# Programs link it with -lcublasLt -lcudart.
cuda: $(BUILD)/amp_cuda.o

# The machine code of each architecture, and PTX of the last for those to come.  A warning is an error, and so is a kernel
# that spills registers.
$(BUILD)/amp_cuda.o: amp_cuda.cu amp.h | $(BUILD)
	@sh tests/gpu/find.sh backend
	nvcc=$$(sh tests/gpu/find.sh nvcc) && codes= && \
	for arch in $${CUDA_ARCHS:-$$(sh tests/gpu/find.sh archs)}; do \
	    codes="$$codes -gencode arch=compute_$$arch,code=sm_$$arch"; done && \
	began=$$(date +%s) && "$$nvcc" $(NVCC_FLAGS) -Xptxas -warn-spills -Xfatbin=-compress-all --threads $(GPU_JOBS) $$codes \
	    -gencode arch=compute_$$arch,code=compute_$$arch -c $< -o $@ && \
	echo "$@ was built in $$(($$(date +%s) - began)) seconds"

gpu-table:
	sh tests/cuda/nvcc.sh --table

test-toolkits:
	CC="$(CC)" CXX="$(CXX)" sh tests/gpu/toolkits.sh

# ---- The tests and timings, for the GPU at hand or for the model.  GPU_CXX compiles host code, GPU_CU device code.
GPU_TESTS    := $(patsubst $(COC)/%.cpp,%,$(wildcard $(COC)/t_cuda*.cpp)) t_models
GPU_PROGRAMS := $(GPU_TESTS) bench_gpu bench_data probe_gemm
GPU_RUN       = $(PYTHON) tests/gpu/run.py --rows "$(ROWS)" $(if $(filter 1,$(REHEARSE)),--rehearse)
# `make fuzz` has a default for SECONDS, which is not meant here.
GPU_SECONDS   = $(if $(filter command environment,$(origin SECONDS)),--seconds $(SECONDS))
# In the order in which they are needed: those of early rows are built first.
GPU_NEEDED    = $(shell $(GPU_RUN) --needs)
GPU_INCLUDE  := -I. -Itests/gpu/on_gpu -I$(COC)
GPU_HEADERS  := amp.h tests/gpu/on_gpu/coc.h $(COC)/test_cuda.h $(COC)/attention_tests.h $(COC)/fragments.h \
                $(COC)/cublas_rules.h tests/test.h $(HEADERS) tests/handwritten_gpt.h

ifeq ($(REHEARSE),1)
GPU_BIN  := $(BUILD)/rehearsal
GPU_CXX  := $(CXX) $(CXXWARN) -Itests/gpu/on_gpu $(COC_FLAGS)
GPU_CU   := $(GPU_CXX) -x c++
GPU_CUDA := $(BUILD)/model_amp_cuda.o
GPU_REST := $(COC_PARTS:%=$(BUILD)/%)
GPU_LIBS := $(COC_LIBS)
else
GPU_BIN  := $(BUILD)/gpu
GPU_ARCH  = $(shell sh tests/gpu/find.sh arch)
GPU_NVCC  = $(shell sh tests/gpu/find.sh nvcc) -std=c++17 -O2 $(GPU_INCLUDE)
GPU_CXX   = $(GPU_NVCC)
GPU_CU    = $(GPU_NVCC) -gencode arch=compute_$(GPU_ARCH),code=sm_$(GPU_ARCH)
GPU_CUDA := $(BUILD)/gpu/amp_cuda.o
GPU_REST :=
GPU_LIBS := -lcublasLt -lm -lpthread
endif

$(GPU_BIN):
	mkdir -p $@

ifneq ($(REHEARSE),1)
$(GPU_BIN)/probe_gemm: GPU_LIBS += -lcublas
endif

$(BUILD)/gpu/amp_cuda.o: amp_cuda.cu amp.h | $(GPU_BIN)
	$(GPU_CU) -Werror all-warnings -lineinfo -c $< -o $@

$(GPU_BIN)/t_cuda%.o: $(COC)/t_cuda%.cpp $(GPU_HEADERS) | $(GPU_BIN)
	$(GPU_CXX) -c $< -o $@

$(GPU_BIN)/t_models.o: amp_cuda.cu
$(GPU_BIN)/%.o: tests/gpu/%.cu $(GPU_HEADERS) | $(GPU_BIN)
	$(GPU_CU) -c $< -o $@

$(GPU_BIN)/t_models: %: %.o $(GPU_REST) $(BUILD)/amp.o
	$(GPU_CXX) $^ -o $@ $(GPU_LIBS)
$(patsubst %,$(GPU_BIN)/%,$(filter-out t_models,$(GPU_PROGRAMS))): %: %.o $(GPU_CUDA) $(GPU_REST) $(BUILD)/amp.o
	$(GPU_CXX) $^ -o $@ $(GPU_LIBS)

# The example as its head builds it, with the backend compiled above.
$(GPU_BIN)/train_gpt: examples/train_gpt.c $(HEADERS) amp.h $(GPU_CUDA) $(GPU_REST)
	$(CC) $(WARN) $(CFLAGS) -DUSE_CUDA -c $< -o $@.o
	$(GPU_CXX) $@.o $(GPU_CUDA) $(GPU_REST) -o $@ $(GPU_LIBS)

gpu-programs: $(GPU_PROGRAMS:%=$(GPU_BIN)/%)

# The deadline of run.py counts from here, so that building belongs to it.  A program that does not build costs its own rows.
gpu:
	@[ "$(REHEARSE)" = 1 ] || sh tests/gpu/find.sh gpu >/dev/null || \
	    { echo "make gpu: no GPU here (nvidia-smi shows none); make gpu REHEARSE=1 runs it on the model GPU"; exit 1; }
	@[ "$(REHEARSE)" = 1 ] || sh tests/gpu/find.sh nvcc >/dev/null || \
	    { echo "make gpu: no nvcc to build for this GPU with; set NVCC or CUDA_HOME"; exit 1; }
	@$(GPU_RUN) --needs >/dev/null
	began=$$(date +%s); $(MAKE) -k -j$(GPU_JOBS) $(GPU_NEEDED:%=$(GPU_BIN)/%) || echo "make gpu: not everything was built"; \
	    $(GPU_RUN) --bin $(GPU_BIN) --began $$began $(GPU_SECONDS) $(if $(RESULTS),--results $(RESULTS))
