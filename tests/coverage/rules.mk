# rules.mk - which lines and branches of amp.h and amp_cuda.cu the tests reach.  TEST=program: what that one reaches.
.PHONY: coverage
COVERED := $(if $(HAVE_CXX),$(COC_PARTS:%=$(BUILD)/%))
coverage: $(COVERED) $(if $(COVERED),$(BUILD)/coc_nvml.so $(BUILD)/coc_nccl.so) | $(BUILD)
	CC="$(CC)" CXX="$(CXX)" OMP="$(OMP)" INSIDE="$(INSIDE) $(INSIDE_ALONE)" MODEL="$(COVERED)" sh tests/coverage/run.sh $(TEST)
