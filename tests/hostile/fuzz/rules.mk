# The fuzzers under libFuzzer.  SECONDS: of each; ONLY: names of some, of those in tests/hostile/fuzz/fuzz_*.c.
SECONDS ?= 30
.PHONY: fuzz fuzz-seeds
fuzz:
	sh tests/hostile/fuzz/run.sh $(SECONDS) $(ONLY)

# The seeds that a program makes, once more.
fuzz-seeds: $(BUILD)/amp.o
	$(CC) $(WARN) $(CFLAGS) $(LINKED) tests/hostile/fuzz/make_seeds.c $(BUILD)/amp.o -o $(BUILD)/make_seeds $(LIBS)
	$(BUILD)/make_seeds
