# rules.mk - the CUDA backend on the CPU: amp_cuda.cu compiled by g++ against tests/cuda, without a toolkit.
#
# CUDA_TESTS names the programs of `make test`: t_harness (the harness itself), t_cublas (its cuBLASLt), t_cuda_*
# (amp_cuda.cu on it), examples.sh, for which CUDA_NEEDS are built, and nccl.sh, which compares what amp_cuda.cu declares
# of NCCL with NCCL's own.
# CUDA_TESTS_CI, of `make test-ci`: nvcc.sh, which compiles amp_cuda.cu for a GPU and reads its machine code (a minute or
# more); the tests under AddressSanitizer and UndefinedBehaviorSanitizer (asan_*); the model's own tests over the toolkit's
# declarations, where they are found (toolkit_*); threads under ThreadSanitizer (tsan_*); the harness with the fibers of
# other CPUs than x86-64 (ucontext_*); the backend on a GPU of compute capability 7.0 under CUDA 11.8 (volta_*).  Without
# g++ cuda_skipped.sh says why there are none.

CXX        ?= g++
COC        := tests/cuda
# psabi: a note on each kernel that takes a tensor map, which is aligned to 64 bytes.
CXXWARN    := -std=c++17 -Wall -Wextra -Wshadow -Wconversion -Wno-unknown-pragmas -Wno-psabi
# The model runs blocks on OpenMP's threads, where the compiler has them.
OMP        := $(shell echo 'int main(void){return 0;}' | $(CXX) -fopenmp -x c++ - -o /dev/null 2>/dev/null && echo -fopenmp)
COC_FLAGS  := -O1 -g1 $(OMP) -DAMP_NVTX -I. -I$(COC) -I$(COC)/include
# Two checks are left out that AddressSanitizer makes as well, of null pointers and of objects' ends: they take a fifth of
# the time to compile.
COC_ASAN   := -fsanitize=address,undefined -fno-sanitize=null,object-size -fno-sanitize-recover=undefined
# The checks of its kernels are calls, for they take a third less time to compile; what runs long is the model.
$(BUILD)/asan_model_amp_cuda.o: COC_LOCKS += --param asan-instrumentation-with-call-threshold=0
# OpenMP's threads are not known to it.
COC_TSAN   := -fsanitize=thread -fno-openmp -Wno-tsan
# Programs lend the model to the libraries that they open.
COC_LIBS   := -rdynamic -ldl -lm -lpthread
# The model sees which locks amp_cuda.cu holds when it calls CUDA.
COC_LOCKS  := -Dpthread_mutex_lock=coc_mutex_lock -Dpthread_mutex_unlock=coc_mutex_unlock
CUDA_HOME  ?= /usr/local/cuda
COC_VOLTA  := -DCUDART_VERSION=11080 -DCUBLAS_VERSION=111103 -DCOC_CAPABILITY=70
COC_REAL   := -UAMP_NVTX -DCOC_TOOLKIT -isystem $(CUDA_HOME)/include

COC_PARTS   := coc_engine.o coc_hopper.o coc_runtime.o coc_cublas.o
COC_HEADERS := $(wildcard $(COC)/*.h $(COC)/include/*.h) tests/test.h
HAVE_CXX    := $(shell $(CXX) --version >/dev/null 2>&1 && echo 1)
HAVE_ASAN   := $(shell echo 'int main(){}' | $(CXX) $(COC_ASAN) -x c++ - -o /dev/null 2>/dev/null && echo 1)
HAVE_TSAN   := $(shell echo 'int main(){}' | $(CXX) $(COC_TSAN) -x c++ - -o /dev/null 2>/dev/null && echo 1)
HAVE_CUDA_H := $(and $(wildcard $(CUDA_HOME)/include/cuda_runtime_api.h),$(wildcard $(CUDA_HOME)/include/cublasLt.h))
CUDA_NAMES  := t_harness t_cublas $(if $(wildcard amp_cuda.cu),$(patsubst $(COC)/%.cpp,%,$(wildcard $(COC)/t_cuda*.cpp)))

CUDA_REAL   := $(filter %_harness %_cublas,$(CUDA_NAMES))

CUDA_VOLTA  := $(BUILD)/volta_t_cuda_oldest $(BUILD)/volta_t_cuda_gpt

ifeq ($(HAVE_CXX),1)
CUDA_TESTS    := $(CUDA_NAMES:%=$(BUILD)/%) $(COC)/examples.sh
CUDA_NEEDS    := $(EXAMPLES:%=$(BUILD)/model_%) $(BUILD)/model_own_kernels $(BUILD)/coc_nccl.so
CUDA_TESTS_CI := $(if $(HAVE_ASAN),$(CUDA_NAMES:%=$(BUILD)/asan_%)) $(if $(HAVE_CUDA_H),$(CUDA_REAL:%=$(BUILD)/toolkit_%)) \
                 $(if $(HAVE_TSAN),$(BUILD)/tsan_t_cuda_threads) $(BUILD)/ucontext_t_harness $(CUDA_VOLTA)
else
CUDA_TESTS    := $(COC)/cuda_skipped.sh
endif
CUDA_TESTS += $(COC)/nccl.sh
CUDA_TESTS_CI += $(COC)/nvcc.sh

# Six builds of the same sources, by prefix; the third: of amp.o.  The fourth names the parts of the model that the flags
# change: the others are the plain ones.
define coc_build
$(1)model_parts := $(foreach p,$(COC_PARTS),$(BUILD)/$(if $(filter $(p),$(4)),$(1))$(p))
$(4:%=$(BUILD)/$(1)%): $(BUILD)/$(1)coc_%.o: $(COC)/coc_%.cpp $(COC_HEADERS) | $(BUILD)
	$(CXX) $(CXXWARN) $(COC_FLAGS) -O2 $(2) -c $$< -o $$@
$(BUILD)/$(1)model_amp_cuda.o: amp_cuda.cu amp.h $(COC_HEADERS) | $(BUILD)
	$(CXX) $(CXXWARN) $(COC_FLAGS) $$(COC_LOCKS) $(2) -x c++ -c $$< -o $$@
$(BUILD)/$(1)t_harness $(BUILD)/$(1)t_cublas: $(BUILD)/$(1)%: $(COC)/%.cpp $$($(1)model_parts) $(COC_HEADERS)
	$(CXX) $(CXXWARN) $(COC_FLAGS) $(2) $$(filter %.cpp %.o,$$^) -o $$@ $(COC_LIBS)
$(filter $(BUILD)/$(1)coc_cublas.o,$(4:%=$(BUILD)/$(1)%)) $(BUILD)/$(1)t_harness $(BUILD)/$(1)t_cublas: amp.h
$(BUILD)/$(1)t_cuda_telemetry: | $(BUILD)/coc_nvml.so
$(BUILD)/$(1)t_cuda_nccl: | $(BUILD)/coc_nccl.so
$(BUILD)/$(1)t_cuda%: $(COC)/t_cuda%.cpp $(BUILD)/$(1)model_amp_cuda.o $(BUILD)/$(3)amp.o \
                      $$($(1)model_parts) $(COC_HEADERS) amp.h $(HEADERS) tests/handwritten_gpt.h
	$(CXX) $(CXXWARN) $(COC_FLAGS) $(2) $$(filter %.cpp %.o,$$^) -o $$@ $(COC_LIBS)
endef
$(eval $(call coc_build,,,,$(COC_PARTS)))
$(eval $(call coc_build,asan_,$(COC_ASAN),,$(COC_PARTS)))
$(eval $(call coc_build,toolkit_,$(COC_REAL),,$(COC_PARTS)))
$(eval $(call coc_build,ucontext_,-DCOC_UCONTEXT,,coc_engine.o))
$(eval $(call coc_build,volta_,$(COC_VOLTA),,coc_runtime.o coc_cublas.o))
$(eval $(call coc_build,tsan_,$(COC_TSAN),tsan_,$(COC_PARTS)))
$(BUILD)/tsan_amp.o: amp.h | $(BUILD)
	echo '#include "amp.h"' | $(CC) -std=c99 -O1 -g1 -fsanitize=thread -Wno-tsan -DAMP_IMPLEMENTATION -I. -x c -c - -o $@
.SECONDARY: $(foreach p,$(COC_PARTS) model_amp_cuda.o,$(BUILD)/$(p) $(BUILD)/asan_$(p) $(BUILD)/toolkit_$(p) $(BUILD)/tsan_$(p) \
              $(BUILD)/ucontext_$(p) $(BUILD)/volta_$(p))

# The driver's library of sensors, under its own name inside.
$(BUILD)/coc_nvml.so: $(COC)/coc_nvml.c | $(BUILD)
	$(CC) $(WARN) -O1 -g -fPIC -shared -Wl,-soname,libnvidia-ml.so.1 $< -o $@

# NCCL between model GPUs, the same way.
$(BUILD)/coc_nccl.so: $(COC)/coc_nccl.cpp $(COC_HEADERS) amp.h | $(BUILD)
	$(CXX) $(CXXWARN) $(COC_FLAGS) -fPIC -shared -Wl,-soname,libnccl.so.2 $< -o $@

# The examples on the model GPU, for examples.sh.
$(EXAMPLES:%=$(BUILD)/model_%): $(BUILD)/model_%: examples/%.c $(HEADERS) $(BUILD)/amp.o $(BUILD)/model_amp_cuda.o $(COC_PARTS:%=$(BUILD)/%)
	$(CC) $(WARN) -O1 -g $(LINKED) -DUSE_CUDA -c $< -o $@.o
	$(CXX) $(OMP) $@.o $(filter %.o,$^) -o $@ $(COC_LIBS)

# A host with kernels of its own.
$(BUILD)/model_own_kernels: examples/own_kernels.cu $(BUILD)/model_amp_cuda.o $(COC_PARTS:%=$(BUILD)/%) $(BUILD)/amp.o amp.h
	$(CXX) $(CXXWARN) $(COC_FLAGS) -x c++ $< -x none $(filter %.o,$^) -o $@ $(COC_LIBS)

# In all five orders: the programs with tests that `make test` leaves out, and that `make test-ci` runs in one order each,
# with AddressSanitizer.
.PHONY: test-orders
ORDERS_TESTS := $(patsubst $(COC)/%.cpp,$(BUILD)/%,$(shell grep -lE 'RUN_CI|attention_tests' $(COC)/t_cuda*.cpp))
test-orders: $(ORDERS_TESTS)
	AMPT_ORDERS=5 CC="$(CXX)" CFLAGS="-O1" RECORD=tests/records/orders-$$(date +%F).json sh tests/exhaustive.sh $(ORDERS_TESTS)
