# rules.mk - programs that kill the example trainer and starve it: crash.c, ranks.c, soak.c.
#
# They are linked with --wrap, so that the trainer's calls of the C library pass through them.

KILLS    ?= 200
MINUTES  ?= 20
SEED     ?= 1
TODAY    := $(shell date -u +%Y-%m-%d)
comma    := ,
WRAP      = $(patsubst %,-Wl$(comma)--wrap=%,$(1))
HAVE_WRAP := $(shell echo 'int main(void){return 0;}' | $(CC) -Wl,--wrap=open -x c - -o /dev/null 2>/dev/null && echo 1)

CRASH_WRAPS := open pwrite fsync rename amp_loader_next
SOAK_WRAPS  := malloc calloc realloc free posix_memalign open pread pwrite fsync rename pthread_create amp_step amp_loader_create
CRASH_CI    := $(if $(HAVE_WRAP),$(BUILD)/crash $(BUILD)/crash_ranks)

$(BUILD)/crash $(BUILD)/crash_ranks: WRAPS := $(CRASH_WRAPS)
$(BUILD)/soak: WRAPS := $(SOAK_WRAPS)
CRASH_BUILD = $(CC) $(WARN) -Itests $(CFLAGS) $(LINKED) $< $(BUILD)/amp.o $(call WRAP,$(WRAPS)) -o $@ $(LIBS)
CRASH_NEEDS := tests/hostile/crash/trainer.h examples/train_gpt.c $(TEST_HEADERS) $(BUILD)/amp.o
$(BUILD)/crash $(BUILD)/soak: $(BUILD)/%: tests/hostile/crash/%.c $(CRASH_NEEDS)
	$(CRASH_BUILD)
$(BUILD)/crash_ranks: tests/hostile/crash/ranks.c $(CRASH_NEEDS)
	$(CRASH_BUILD)

.PHONY: crash crash-ranks soak
crash: $(BUILD)/crash
	mkdir -p tests/records
	$(BUILD)/crash --kills $(KILLS) --seed $(SEED) --record tests/records/crash-$(TODAY).json
crash-ranks: $(BUILD)/crash_ranks
	mkdir -p tests/records
	$(BUILD)/crash_ranks --kills $(KILLS) --seed $(SEED) --record tests/records/crash_ranks-$(TODAY).json
soak: $(BUILD)/soak
	mkdir -p tests/records
	$(BUILD)/soak --minutes $(MINUTES) --seed $(SEED) --record tests/records/soak-$(TODAY).json
