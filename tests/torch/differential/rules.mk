# Random programs and tensors against PyTorch: each oracle writes a corpus of SEED into $(BUILD)/, its test replays it, and
# tests/torch/differential/run.py writes the record into tests/records/.
# tape.py takes the graphs from its program instead.
DIFFERENTIAL := t_differential t_differential_tensors t_differential_tape

.PHONY: differential
differential: $(DIFFERENTIAL:%=$(BUILD)/%)
	CC="$(CC)" $(PYTHON) tests/torch/differential/run.py $(or $(SEED),1) logic $(BUILD)/t_differential
	CC="$(CC)" $(PYTHON) tests/torch/differential/run.py $(or $(SEED),1) tensors $(BUILD)/t_differential_tensors
	CC="$(CC)" $(PYTHON) tests/torch/differential/tape.py $(or $(SEED),1) $(BUILD)/t_differential_tape
