# rules.mk - changes of one token to amp.h, each of which a test must catch.  MUTANT=name: that one alone.
.PHONY: mutants
mutants: | $(BUILD)
	CC="$(CC)" INSIDE="$(INSIDE) $(INSIDE_QUICK)" sh tests/mutants/run.sh $(MUTANT)
