# rules.mk - small changes, each of which a test must catch: of one token to amp.h, and of one expression to amp_cuda.cu, on
# the model GPU.  MUTANT=name: that one alone.
.PHONY: mutants mutants-cuda
mutants: | $(BUILD)
	CC="$(CC)" INSIDE="$(INSIDE) $(INSIDE_ALONE)" sh tests/mutants/run.sh $(MUTANT)
MUTANTS_MODEL := $(if $(HAVE_CXX),$(COC_PARTS:%=$(BUILD)/%) $(BUILD)/amp.o)
mutants-cuda: $(MUTANTS_MODEL) | $(BUILD)
	CXX="$(CXX)" OMP="$(OMP)" MODEL="$(MUTANTS_MODEL)" sh tests/mutants/cuda.sh $(MUTANT)
