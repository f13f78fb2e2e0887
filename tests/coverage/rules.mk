# rules.mk - which lines and branches of amp.h the tests reach.  TEST=program: what that one reaches.
.PHONY: coverage
COVERED := $(if $(HAVE_CXX),$(COC_PARTS:%=$(BUILD)/%) $(BUILD)/model_amp_cuda.o)
coverage: $(COVERED) | $(BUILD)
	CC="$(CC)" CXX="$(CXX)" OMP="$(OMP)" INSIDE="$(INSIDE) $(INSIDE_QUICK)" MODEL="$(COVERED)" sh tests/coverage/run.sh $(TEST)
