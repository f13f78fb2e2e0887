/* coc_engine.cpp - runs the threads of a CUDA block as fibers on one OS thread, and the blocks over OpenMP's threads.
 *
 * A fiber has its own stack and is switched by hand (x86-64: six registers and the stack pointer; elsewhere ucontext).  A
 * thread that returns without ever having waited leaves its stack to the next one.  Therefore a kernel without barriers
 * runs as a plain loop.  A fiber never moves to another OS thread. */
#include "coc_internal.h"
#include <cmath>
#include <deque>
#include <mutex>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/mman.h>
#if defined(_OPENMP)
#  include <omp.h>
#endif
#if !defined(__x86_64__)
#  define COC_UCONTEXT
#endif
#if defined(COC_UCONTEXT)
#  include <ucontext.h>
#endif

enum {
    STACK_BYTES = 128 << 10,
    GUARD_BYTES = 4096,
    LEFT_BYTES = 8 << 10,       /* at a stack's top: frames that were left without returning */
    RED_ZONE = 128,             /* between pieces of shared memory */
    STATIC_SITES = 64,
    STATIC_ROOM = COC_SHARED_DEFAULT + STATIC_SITES * 2 * RED_ZONE,
    DYNAMIC_ROOM = COC_SHARED_MOST + RED_ZONE,
    DYNAMIC_ALIGNED = 1024,     /* what a swizzled tile is aligned to */
    SIGNAL_BYTES = 64 << 10,
    CANARY = 0xCB,
    PARALLEL_FROM = 2048        /* threads of a grid; below it waking an OpenMP thread costs more than it saves */
};

__thread coc_thread *coc_current;
__thread coc_block *coc_current_block;
coc_order coc_current_order;
uint64_t coc_order_seed = 1;
unsigned coc_last_blocks;
coc_work coc_worked;
unsigned coc_shared_base = 0x400;       /* as on sm_90, where the first kilobyte is the system's */

struct coc_meeting {
    coc_slots slots;
    unsigned mask, arrived, holders;
    volatile unsigned complete;
    const char *name;
    size_t bytes;
    coc_meeting *next;          /* among the warp's open ones, or the free ones */
};

/* A block as it runs. */
struct block_state : coc_block {
    coc_thread *threads;
    unsigned n, live, arrived;
    volatile unsigned generation;
    const char *barrier;
    int barrier_line;
    unsigned votes[2];          /* of this and the last generation */
    const unsigned *order, *position;
    uint64_t ready[COC_READY_WORDS], at_barrier[COC_READY_WORDS];       /* by position: who can run, who waits for the block */
    const coc_grid *what;
};

struct shared_site { const void *key; size_t offset, bytes; };

/* What an OS thread keeps between blocks. */
struct worker {
    std::vector<coc_thread> block_threads;
    std::vector<coc_warp> warps;
    std::vector<unsigned> order, position;      /* of the threads; position is the inverse */
    coc_order order_kind = COC_RANDOM;
    std::vector<unsigned char *> stacks;
    std::vector<int> free_stacks;
    std::deque<coc_meeting> meetings;
    coc_meeting *free_meetings = nullptr;
    unsigned char *static_shared, *dynamic_room, *dynamic_shared;
    std::vector<shared_site> sites;
    size_t static_bytes = 0, static_end = 0, dynamic_bytes = 0;
    coc_hopper *hopper;
    unsigned char *signal_stack = nullptr;
    void *main_pointer = nullptr, *main_fake = nullptr;
    const void *main_bottom = nullptr;
    size_t main_size = 0;
    jmp_buf escape;             /* out of a kernel, from the signal handler */
    volatile int in_kernel = 0;
    cudaError_t failed = cudaSuccess;
    coc_work work = {};
#if defined(COC_UCONTEXT)
    std::deque<ucontext_t> contexts;
    ucontext_t main_context;
#endif
    worker();
};
static __thread worker *here;

static unsigned char *map_room(size_t bytes) {
    void *p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) { fprintf(stderr, "coc: no memory for %zu bytes\n", bytes); abort(); }
    return (unsigned char *)p;
}

/* ThreadSanitizer follows calls and returns; here a fiber ends or goes on, which is neither. */
#if defined(__SANITIZE_THREAD__)
#  define COC_UNMARKED __attribute__((no_sanitize("thread")))
#else
#  define COC_UNMARKED
#endif

worker::worker() {
    static_shared = map_room(STATIC_ROOM);
    dynamic_room = map_room(DYNAMIC_ROOM + 2 * DYNAMIC_ALIGNED) + DYNAMIC_ALIGNED;
    dynamic_shared = dynamic_room;
    hopper = coc_hopper_new();
    coc_poison(static_shared, STATIC_ROOM);
    coc_poison(dynamic_room - RED_ZONE, DYNAMIC_ROOM + DYNAMIC_ALIGNED);
#if !COC_ASAN
    signal_stack = map_room(SIGNAL_BYTES);
#endif
}

/* Workers belong to no OS thread, for OpenMP's may end without running the destructors of what is theirs.  A thread has
   one from begin_work to end_work; as many are made as ever worked at once, and all stay until the program ends. */
static std::mutex idle_lock;
static std::vector<worker *> &idle = *new std::vector<worker *>;

static void begin_work() {
    {
        std::lock_guard<std::mutex> hold(idle_lock);
        if (idle.empty()) idle.push_back(new worker);
        here = idle.back();
        idle.pop_back();
    }
    here->main_bottom = nullptr;
    here->failed = cudaSuccess;
    here->work = coc_work{};
    if (here->signal_stack) {
        stack_t stack = {};
        stack.ss_sp = here->signal_stack;
        stack.ss_size = SIGNAL_BYTES;
        sigaltstack(&stack, nullptr);
    }
}

static void end_work() {
    if (here->signal_stack) {
        stack_t stack = {};
        stack.ss_flags = SS_DISABLE;
        sigaltstack(&stack, nullptr);
    }
    std::lock_guard<std::mutex> hold(idle_lock);
    idle.push_back(here);
    here = nullptr;
}

/* ---- Switching */

static void fiber_main();

#if defined(COC_UCONTEXT)
COC_UNMARKED static void switch_context(void **from, void *to) { swapcontext((ucontext_t *)*from, (ucontext_t *)to); }
static void *new_context(worker *w, int stack) {
    ucontext_t *context = &w->contexts[(size_t)stack];
    getcontext(context);
    context->uc_stack.ss_sp = w->stacks[(size_t)stack];
    context->uc_stack.ss_size = STACK_BYTES;
    context->uc_link = nullptr;
    makecontext(context, fiber_main, 0);
    return context;
}
#else
extern "C" void coc_switch_context(void **from, void *to);
__asm__(".text\n"
        ".globl coc_switch_context\n"
        ".type coc_switch_context,@function\n"
        "coc_switch_context:\n"
        " pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
        " movq %rsp,(%rdi)\n movq %rsi,%rsp\n"
        " popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret\n"
        ".size coc_switch_context,.-coc_switch_context\n");
COC_UNMARKED static void switch_context(void **from, void *to) { coc_switch_context(from, to); }
/* Tops of stacks are staggered, so that 256 of them do not fall into the same lines of the L1 cache. */
static void *new_context(worker *w, int stack) {
    void **top = (void **)(w->stacks[(size_t)stack] + STACK_BYTES - (size_t)(stack % 61) * 64);
    *--top = nullptr;
    *--top = (void *)fiber_main;
    for (int i = 0; i < 6; i++) *--top = nullptr;
    return top;
}
#endif

static int take_stack(worker *w) {
    if (w->free_stacks.empty()) {
        unsigned char *p = map_room(STACK_BYTES + GUARD_BYTES);
        mprotect(p, GUARD_BYTES, PROT_NONE);
        w->stacks.push_back(p + GUARD_BYTES);
#if defined(COC_UCONTEXT)
        w->contexts.emplace_back();
#endif
        return (int)w->stacks.size() - 1;
    }
    int stack = w->free_stacks.back();
    w->free_stacks.pop_back();
    coc_unpoison(w->stacks[(size_t)stack] + STACK_BYTES - LEFT_BYTES, LEFT_BYTES);
    return stack;
}

/* Leaves the running context for thread t; fake NULL: it will not come back. */
COC_UNMARKED static void enter(worker *w, void **from, void **fake, coc_thread *t) {
    if (t->state == 0) {
        t->state = 1;
        t->stack = take_stack(w);
        t->stack_pointer = new_context(w, t->stack);
    }
    coc_current = t;
    w->work.switches++;
#if COC_ASAN
    __sanitizer_start_switch_fiber(fake, w->stacks[(size_t)t->stack], STACK_BYTES);
#endif
    switch_context(from, t->stack_pointer);
#if COC_ASAN
    __sanitizer_finish_switch_fiber(fake ? *fake : nullptr, nullptr, nullptr);
#endif
    (void)fake;
}

COC_UNMARKED static void leave_to_main(worker *w, coc_thread *me) {
#if COC_ASAN
    __sanitizer_start_switch_fiber(nullptr, w->main_bottom, w->main_size);
#endif
    switch_context(&me->stack_pointer, w->main_pointer);
}

/* ---- Faults of a kernel */

static block_state *current_block() { return static_cast<block_state *>(coc_current_block); }

static std::string place(const coc_thread *t) {
    const block_state *b = current_block();
    char text[512];
    snprintf(text, sizeof text, "kernel %s, block (%u,%u,%u), thread (%u,%u,%u)", b->what->name, b->index.x, b->index.y,
             b->index.z, t->index.x, t->index.y, t->index.z);
    return text;
}

void coc_trap(cudaError_t error, const char *format, ...) {
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    coc_fault("%s: %s", place(coc_current).c_str(), text);
    here->failed = error;
    leave_to_main(here, coc_current);
    abort();
}

/* Who waits where, each place once. */
static std::string waiting() {
    const block_state *b = current_block();
    std::string text;
    std::vector<std::string> seen;
    for (unsigned i = 0; i < b->n; i++) {
        const coc_thread *t = &b->threads[i];
        char entry[160];
        if (t->state == 2 || t->wait == nullptr) continue;
        if (t->line > 0) snprintf(entry, sizeof entry, "%s (line %d)", t->where, t->line);
        else if (t->line < 0) snprintf(entry, sizeof entry, "%s", t->where);
        else snprintf(entry, sizeof entry, "%s (mask %08x)", t->where, t->held ? t->held->mask : 0u);
        bool known = false;
        for (const std::string &s : seen) known = known || s == entry;
        if (known || seen.size() >= 4) continue;
        seen.push_back(entry);
        text += (text.empty() ? "thread " : "; thread ") + std::to_string(i) + " in " + entry;
    }
    return text;
}

[[noreturn]] static void deadlock() {
    const block_state *b = current_block();
    char who[512];              /* no string: nothing on this stack is destroyed */
    snprintf(who, sizeof who, "%s", waiting().c_str());
    coc_trap(cudaErrorLaunchTimeout, "deadlock: %u of %u threads have returned, no other can go on: %s", b->n - b->live,
             b->n, who);
}

/* ---- Scheduling */

static int can_run(const coc_thread *t) { return t->state != 2 && (t->wait == nullptr || *t->wait != t->wait_value); }

static coc_thread *next_of_warp(const coc_thread *me) {
    const block_state *b = current_block();
    unsigned thread = (unsigned)(me - b->threads), first = thread - me->lane;
    for (unsigned k = 1; k <= 32; k++) {
        unsigned i = first + (me->lane + k) % 32;
        if (i < b->n && can_run(&b->threads[i])) return &b->threads[i];
    }
    return nullptr;
}

static void set_bit(uint64_t *bits, unsigned i) { bits[i / 64] |= (uint64_t)1 << i % 64; }
static void clear_bit(uint64_t *bits, unsigned i) { bits[i / 64] &= ~((uint64_t)1 << i % 64); }

/* The next in the order that can run, after me and around the end. */
static coc_thread *next_runnable(const coc_thread *me) {
    const block_state *b = current_block();
    coc_thread *of_warp = coc_current_order == COC_AHEAD ? next_of_warp(me) : nullptr;
    if (of_warp != nullptr) return of_warp;
    unsigned words = (b->n + 63) / 64, from = (b->position[me - b->threads] + 1) % b->n, word = from / 64;
    uint64_t bits = b->ready[word] & ~(uint64_t)0 << from % 64;
    for (unsigned k = 0; k < words && bits == 0; k++) {
        if (++word == words) word = 0;
        bits = b->ready[word];
    }
    return bits == 0 ? nullptr : &b->threads[b->order[word * 64 + (unsigned)__builtin_ctzll(bits)]];
}

/* The same.  If there is none, bulk copies land, one after the other, until there is one. */
static coc_thread *next_or_landed(const coc_thread *me) {
    coc_thread *next = next_runnable(me);
    while (next == nullptr && coc_hopper_land()) next = next_runnable(me);
    if (next == nullptr) deadlock();
    return next;
}

/* waiting: who waits for the same, so that it can be woken, or NULL. */
static void wait_for(uint64_t *waiting, const volatile unsigned *flag, unsigned value, const char *where, int line) {
    coc_thread *me = coc_current;
    block_state *b = current_block();
    unsigned position = b->position[me - b->threads];
    clear_bit(b->ready, position);
    if (waiting != nullptr) set_bit(waiting, position);
    me->wait = flag;
    me->wait_value = value;
    me->where = where;
    me->line = line;
    coc_thread *next = next_or_landed(me);
    if (next != me) enter(here, &me->stack_pointer, &me->fake_stack, next);
    me->wait = nullptr;
}

void coc_wait_in(uint64_t *waiting, const volatile unsigned *flag, unsigned value, const char *where) {
    wait_for(waiting, flag, value, where, -1);
}
void coc_wake(uint64_t *waiting) {
    block_state *b = current_block();
    for (unsigned i = 0; i < COC_READY_WORDS; i++) b->ready[i] |= waiting[i], waiting[i] = 0;
}
unsigned coc_thread_number() { return (unsigned)(coc_current - current_block()->threads); }
unsigned coc_block_threads() { return current_block()->n; }
const coc_grid *coc_grid_now() { return current_block()->what; }
coc_hopper *coc_hopper_here() { return here->hopper; }
coc_work *coc_work_here() { return &here->work; }

static void release_barrier(block_state *b) {
    b->arrived = 0;
    b->generation = b->generation + 1;
    b->votes[b->generation & 1] = 0;
    coc_wake(b->at_barrier);
    coc_hopper_barrier();
}

unsigned coc_barrier(int value, const char *name, int line) {
    block_state *b = current_block();
    unsigned generation = b->generation;
    if (b->arrived && (b->barrier_line != line || (b->barrier != name && strcmp(b->barrier, name) != 0)))
        coc_trap(cudaErrorLaunchFailure, "divergent barrier: %s in line %d meets %s in line %d", name, line, b->barrier,
                 b->barrier_line);
    b->barrier = name;
    b->barrier_line = line;
    b->votes[generation & 1] += value != 0;
    here->work.barriers++;
    here->work.busy_barriers += !coc_current->copies.empty();
    if (++b->arrived == b->live) release_barrier(b);
    else wait_for(b->at_barrier, &b->generation, generation, name, line);
    return b->votes[generation & 1];
}

/* ---- Warps */

static void drop_meeting(coc_thread *t) {
    coc_meeting *m = t->held;
    t->held = nullptr;
    if (m == nullptr || --m->holders) return;
    m->next = here->free_meetings;
    here->free_meetings = m;
}

static void close_meeting(coc_warp *warp, coc_meeting *m) {
    coc_meeting **link = &warp->open;
    while (*link != m) link = &(*link)->next;
    *link = m->next;
    m->slots.lanes = m->arrived;
    m->complete = 1;
    block_state *b = current_block();
    const unsigned *position = b->position + 32 * (warp - here->warps.data());
    for (unsigned left = m->arrived; left != 0; left &= left - 1) set_bit(b->ready, position[__builtin_ctz(left)]);
}

static coc_meeting *open_meeting(coc_warp *warp, unsigned mask, size_t bytes, const char *name) {
    coc_meeting *m = warp->open;
    while (m != nullptr && m->mask != mask) m = m->next;
    if (m != nullptr) {
        if ((m->name != name && strcmp(m->name, name) != 0) || m->bytes != bytes)
            coc_trap(cudaErrorLaunchFailure, "lanes of a warp meet in different operations: %s and %s", name, m->name);
        return m;
    }
    m = here->free_meetings;
    if (m == nullptr) {
        here->meetings.emplace_back();
        m = &here->meetings.back();
    } else {
        here->free_meetings = m->next;
    }
    m->mask = mask;
    m->arrived = m->holders = 0;
    m->complete = 0;
    m->name = name;
    m->bytes = bytes;
    m->next = warp->open;
    warp->open = m;
    return m;
}

const coc_slots *coc_exchange(unsigned mask, const void *value, size_t bytes, const char *name) {
    coc_thread *me = coc_current;
    coc_warp *warp = me->warp;
    if (!(mask >> me->lane & 1))
        coc_trap(cudaErrorLaunchFailure, "%s: lane %u is not in its mask %08x", name, me->lane, mask);
    if (bytes > COC_SLOT)
        coc_trap(cudaErrorLaunchFailure, "%s: a lane can give %d bytes, not %zu", name, COC_SLOT, bytes);
    drop_meeting(me);
    coc_meeting *m = open_meeting(warp, mask, bytes, name);
    if (bytes) memcpy(m->slots.slot[me->lane], value, bytes);
    m->arrived |= 1u << me->lane;
    m->holders++;
    me->held = m;
    if (m->arrived == (mask & warp->alive)) close_meeting(warp, m);
    else wait_for(nullptr, &m->complete, 0, name, 0);
    return &m->slots;
}

/* ---- Shared memory */

unsigned char *coc_dynamic_shared() { return here->dynamic_shared; }

void *coc_static_shared(const void *site, size_t bytes) {
    worker *w = here;
    for (const shared_site &s : w->sites)
        if (s.key == site) return w->static_shared + s.offset;
    size_t offset = (w->static_end + RED_ZONE + RED_ZONE - 1) / RED_ZONE * RED_ZONE;
    const coc_grid *what = current_block()->what;
    w->static_bytes += (bytes + 15) / 16 * 16;
    if (w->static_bytes > COC_SHARED_DEFAULT || w->sites.size() == STATIC_SITES - 1)
        coc_trap(cudaErrorLaunchOutOfResources, "%zu bytes of static shared memory, at most 49152", w->static_bytes);
    if (w->static_bytes + what->shared > what->shared_most)
        coc_trap(cudaErrorLaunchOutOfResources, "%zu bytes of static and %zu of dynamic shared memory, at most %zu",
                 w->static_bytes, what->shared, what->shared_most);
    w->sites.push_back({site, offset, bytes});
    coc_unpoison(w->static_shared + offset, bytes);
    memset(w->static_shared + offset, 0xFF, bytes);
#if !COC_ASAN
    memset(w->static_shared + w->static_end, CANARY, offset - w->static_end);
    memset(w->static_shared + offset + bytes, CANARY, RED_ZONE);
#endif
    w->static_end = offset + bytes;
    return w->static_shared + offset;
}

bool coc_is_shared(const void *p, size_t bytes) {
    const unsigned char *at = (const unsigned char *)p;
    if (at >= here->dynamic_shared && bytes <= here->dynamic_bytes)
        return (size_t)(at - here->dynamic_shared) <= here->dynamic_bytes - bytes;
    for (const shared_site &s : here->sites)
        if (at >= here->static_shared + s.offset && bytes <= s.bytes &&
            (size_t)(at - here->static_shared) - s.offset <= s.bytes - bytes) return true;
    return false;
}

uint32_t coc_shared_number(const void *p) {
    const unsigned char *at = (const unsigned char *)p;
    if (at < here->dynamic_shared || at > here->dynamic_shared + here->dynamic_bytes)
        coc_trap(cudaErrorIllegalAddress, "the address of dynamic shared memory is asked for, and %p is none", p);
    return coc_shared_base + (uint32_t)(at - here->dynamic_shared);
}
unsigned char *coc_shared_at(uint32_t number, size_t bytes) {
    size_t most = here->dynamic_bytes, from = number - coc_shared_base;
    return number < coc_shared_base || bytes > most || from > most - bytes ? nullptr : here->dynamic_shared + from;
}

static void prepare_shared(worker *w, size_t dynamic) {
    unsigned char *start = w->dynamic_room + coc_shared_base % DYNAMIC_ALIGNED;
    if (w->dynamic_shared != start) {           /* pointers and numbers agree in what they are multiples of */
        coc_poison(w->dynamic_shared, w->dynamic_bytes);
        w->dynamic_shared = start;
        w->dynamic_bytes = 0;
    }
    w->sites.clear();
    coc_poison(w->static_shared, w->static_end);
    w->static_bytes = w->static_end = 0;
    if (w->dynamic_bytes != dynamic) {
        coc_poison(w->dynamic_shared, w->dynamic_bytes);
        coc_unpoison(w->dynamic_shared, dynamic);
        w->dynamic_bytes = dynamic;
    }
    memset(w->dynamic_shared, 0xFF, dynamic);
#if !COC_ASAN
    memset(w->dynamic_shared + dynamic, CANARY, RED_ZONE);
#endif
}

static int zone_is_whole(const unsigned char *p, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        if (p[i] != CANARY) return 0;
    return 1;
}

/* Without AddressSanitizer, which sees an overrun when it happens, at least writes are seen here. */
static void check_shared(worker *w, const block_state *b) {
    if (COC_ASAN) return;
    int whole = zone_is_whole(w->dynamic_shared + b->what->shared, RED_ZONE);
    for (const shared_site &s : w->sites)
        whole = whole && zone_is_whole(w->static_shared + s.offset + s.bytes, RED_ZONE) &&
                zone_is_whole(w->static_shared + s.offset - RED_ZONE / 2, RED_ZONE / 2);
    if (whole) return;
    coc_fault("kernel %s, block (%u,%u,%u): wrote beyond its shared memory (%zu dynamic bytes)", b->what->name,
              b->index.x, b->index.y, b->index.z, b->what->shared);
    w->failed = cudaErrorIllegalAddress;
}

/* ---- cp.async */

void coc_copy_async(void *shared, const void *global, size_t bytes, size_t from) {
    if ((bytes != 4 && bytes != 8 && bytes != 16) || (((uintptr_t)shared | (uintptr_t)global) & (bytes - 1)) || from > bytes)
        coc_trap(cudaErrorMisalignedAddress, "cp.async of %zu of %zu bytes from %p to %p", from, bytes, global, shared);
    here->work.async_bytes += (long)from;
    memset(shared, coc_image() < 80 ? 0 : 0xFF, bytes);
    if (coc_image() >= 80) coc_current->copies.push_back({shared, global, bytes, from, coc_current->copy_group});
    else if (from) memcpy(shared, global, from);
}

void coc_prefetch(const void *) { here->work.prefetches++; }

void coc_copy_commit() { coc_current->copy_group++; }

void coc_copy_wait(int groups_left) {
    std::vector<coc_pending_copy> &copies = coc_current->copies;
    size_t kept = 0;
    for (const coc_pending_copy &c : copies) {
        if (c.group >= coc_current->copy_group - groups_left) {
            copies[kept++] = c;
            continue;
        }
        if (c.from) memcpy(c.dst, c.src, c.from);
        memset((char *)c.dst + c.from, 0, c.bytes - c.from);
    }
    copies.resize(kept);
}

/* ---- Conversions to 8 bits: m bits of mantissa, normal numbers from 2^least on. */

static uint8_t fp8_of(float x, int m, int least, float largest) {
    uint8_t sign = std::signbit(x) ? 0x80 : 0;
    float size = fabsf(x), step;
    int exponent;
    if (x != x) return 0x7f;
    if (size > largest) size = largest;
    frexpf(size, &exponent);                    /* size = fraction * 2^exponent, 0.5 <= fraction < 1 */
    if (size == 0 || exponent <= least) exponent = least + 1;   /* subnormal ones have the step of the smallest normal ones */
    step = ldexpf(1, exponent - 1 - m);
    int steps = (int)nearbyintf(size / step);   /* 2^m to 2^(m + 1) of a normal number's; 0 to 2^m */
    return (uint8_t)(sign | ((exponent - least - 1) * (1 << m) + steps));
}

uint16_t coc_cvt_fp8x2(float a, float b, bool e5m2) {
    if (coc_image() < 89)
        coc_trap(cudaErrorIllegalInstruction, "cvt to fp8 in code that was compiled for sm_%d, which has none", coc_image());
    here->work.fp8_pairs++;
    if (e5m2) return (uint16_t)(fp8_of(a, 2, -14, 57344) << 8 | fp8_of(b, 2, -14, 57344));
    return (uint16_t)(fp8_of(a, 3, -6, 448) << 8 | fp8_of(b, 3, -6, 448));
}

/* ---- Tensor cores */

float coc_half_value(uint32_t bits, bool bf16) {
    float x;
    bits &= 0xffff;
    uint32_t wide = bf16 ? bits << 16 : (bits & 0x8000) << 16 | (bits & 0x7fff) << 13;
    if (!bf16 && (bits & 0x7c00) == 0x7c00) wide |= 0x7f800000;
    memcpy(&x, &wide, 4);
    return bf16 || (bits & 0x7c00) == 0x7c00 ? x : x * 0x1p112f;
}

/* Products of two 16-bit numbers are exact in fp32; they are added in the order of k. */
void coc_mma_m16n8k16(float *c, const uint32_t *a, const uint32_t *b, bool bf16) {
    struct { float a[4][2], b[2][2]; } mine;
    if (coc_image() < 80)
        coc_trap(cudaErrorIllegalInstruction, "mma.m16n8k16 in code that was compiled for sm_%d, which has none", coc_image());
    for (int e = 0; e < 2; e++) {
        for (int i = 0; i < 4; i++) mine.a[i][e] = coc_half_value(a[i] >> 16 * e, bf16);
        for (int i = 0; i < 2; i++) mine.b[i][e] = coc_half_value(b[i] >> 16 * e, bf16);
    }
    const coc_slots *s = coc_exchange(~0u, &mine, sizeof mine, "mma.m16n8k16");
    if (s->lanes != ~0u) coc_trap(cudaErrorLaunchFailure, "mma.m16n8k16 without all lanes of the warp");
    unsigned g = coc_current->lane / 4, t = coc_current->lane % 4;
    here->work.mmas += coc_current->lane == 0;
    decltype(mine) left[4], right[2][4];
    for (unsigned of = 0; of < 4; of++) {                       /* of which lane among four */
        memcpy(&left[of], s->slot[4 * g + of], sizeof mine);
        for (unsigned n = 0; n < 2; n++) memcpy(&right[n][of], s->slot[4 * (2 * t + n) + of], sizeof mine);
    }
    for (unsigned k = 0; k < 16; k++) {
        unsigned of = k % 8 / 2, e = k % 2, upper = k / 8;      /* of which lane, which half, which register */
        for (unsigned i = 0; i < 4; i++) c[i] += left[of].a[2 * upper + i / 2][e] * right[i % 2][of].b[upper][e];
    }
}

/* The lower 13 bits of an operand do not count.  Products of two TF32 numbers are exact in fp32. */
void coc_mma_m16n8k8_tf32(float *c, const uint32_t *a, const uint32_t *b) {
    struct { float a[4], b[2]; } mine;
    if (coc_image() < 80)
        coc_trap(cudaErrorIllegalInstruction, "mma.m16n8k8 in code that was compiled for sm_%d, which has none", coc_image());
    for (int i = 0; i < 6; i++) {
        uint32_t bits = (i < 4 ? a[i] : b[i - 4]) & 0xffffe000u;
        memcpy(i < 4 ? &mine.a[i] : &mine.b[i - 4], &bits, 4);
    }
    const coc_slots *s = coc_exchange(~0u, &mine, sizeof mine, "mma.m16n8k8");
    if (s->lanes != ~0u) coc_trap(cudaErrorLaunchFailure, "mma.m16n8k8 without all lanes of the warp");
    unsigned g = coc_current->lane / 4, t = coc_current->lane % 4;
    here->work.mmas += coc_current->lane == 0;
    decltype(mine) left[4], right[2][4];
    for (unsigned of = 0; of < 4; of++) {                       /* of which lane among four */
        memcpy(&left[of], s->slot[4 * g + of], sizeof mine);
        for (unsigned n = 0; n < 2; n++) memcpy(&right[n][of], s->slot[4 * (2 * t + n) + of], sizeof mine);
    }
    for (unsigned k = 0; k < 8; k++) {
        unsigned of = k % 4, upper = k / 4;                     /* of which lane, which register */
        for (unsigned i = 0; i < 4; i++) c[i] += left[of].a[2 * upper + i / 2] * right[i % 2][of].b[upper];
    }
}

void coc_ldmatrix_x4(uint32_t *r, const void *row, bool transposed) {
    if ((uintptr_t)row & 15) coc_trap(cudaErrorMisalignedAddress, "ldmatrix of a row at %p", row);
    const coc_slots *s = coc_exchange(~0u, &row, sizeof row, transposed ? "ldmatrix.x4.trans" : "ldmatrix.x4");
    unsigned g = coc_current->lane / 4, t = coc_current->lane % 4;
    here->work.ldmatrices += coc_current->lane == 0;
    for (unsigned i = 0; i < 4; i++) {
        uint16_t pair[2];
        for (unsigned e = 0; e < 2; e++) {
            const uint16_t *from = coc_lane_value<const uint16_t *>(s, 8 * i + (transposed ? 2 * t + e : g));
            memcpy(&pair[e], from + (transposed ? g : 2 * t + e), 2);
        }
        r[i] = pair[0] | (uint32_t)pair[1] << 16;
    }
}

/* ---- Threads and blocks */

/* A thread returned: those who wait for it need not any more. */
static void finish_thread(coc_thread *me) {
    block_state *b = current_block();
    if (!me->copies.empty()) coc_trap(cudaErrorLaunchFailure, "returned before its cp.async were waited for");
    coc_hopper_return();
    if (b->live == 1) coc_hopper_end();
    drop_meeting(me);
    me->state = 2;
    clear_bit(b->ready, b->position[me - b->threads]);
    me->warp->alive &= ~(1u << me->lane);
    for (coc_meeting *m = me->warp->open, *next; m != nullptr; m = next) {
        next = m->next;
        if (m->arrived == (m->mask & me->warp->alive)) close_meeting(me->warp, m);
    }
    if (--b->live && b->arrived == b->live) release_barrier(b);
}

COC_UNMARKED static void fiber_main() {
    worker *w = here;
#if COC_ASAN
    const void *bottom;
    size_t size;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &size);
    if (w->main_bottom == nullptr) w->main_bottom = bottom, w->main_size = size;
#endif
    for (;;) {
        coc_thread *me = coc_current;
        current_block()->what->call->run();
        finish_thread(me);
        if (current_block()->live == 0) {
            w->free_stacks.push_back(me->stack);
            leave_to_main(w, me);
        }
        coc_thread *next = next_or_landed(me);
        if (next->state == 0) {                 /* it goes on upon this stack */
            next->state = 1;
            next->stack = me->stack;
            next->stack_pointer = me->stack_pointer;
            coc_current = next;
            continue;
        }
        w->free_stacks.push_back(me->stack);
        enter(w, &me->stack_pointer, nullptr, next);
    }
}

static uint64_t next_random(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* 0 to n - 1 as the order in force says; salt makes blocks differ. */
static void make_order(std::vector<unsigned> *order, unsigned n, uint64_t salt) {
    order->resize(n);
    for (unsigned i = 0; i < n; i++) (*order)[i] = coc_current_order == COC_REVERSE ? n - 1 - i : i;
    if (coc_current_order != COC_RANDOM) return;
    uint64_t state = (coc_order_seed + 1) * 0x9E3779B97F4A7C15u ^ (salt + 1) * 0xD1B54A32D192ED03u;
    if (state == 0) state = 1;
    for (unsigned i = n - 1; i > 0; i--) std::swap((*order)[i], (*order)[next_random(&state) % (i + 1)]);
}

static void prepare_order(worker *w, unsigned n, unsigned block) {
    if (w->order.size() == n && w->order_kind == coc_current_order && coc_current_order != COC_RANDOM) return;
    w->order_kind = coc_current_order;
    make_order(&w->order, n, block);
    w->position.resize(n);
    for (unsigned i = 0; i < n; i++) w->position[w->order[i]] = i;
}

static void prepare_thread(coc_thread *t, uint3 index, unsigned lane, coc_warp *warp) {
    t->index = index;
    t->lane = lane;
    t->warp = warp;
    t->held = nullptr;
    t->wait = nullptr;
    t->state = t->copy_group = t->line = 0;
    t->stack = -1;
    t->fake_stack = nullptr;
    t->copies.clear();
}

static void prepare_block(worker *w, block_state *b, const coc_grid *what, unsigned index) {
    const dim3 &grid = what->grid, &block = what->block;
    unsigned n = block.x * block.y * block.z, i = 0;
    b->index = {index % grid.x, index / grid.x % grid.y, index / grid.x / grid.y};
    b->dim = block;
    b->grid = grid;
    b->what = what;
    b->n = b->live = n;
    b->arrived = b->generation = b->votes[0] = b->votes[1] = 0;
    if (w->block_threads.size() < n) w->block_threads.resize(n);
    w->warps.assign((n + 31) / 32, coc_warp{~0u, nullptr});
    if (n % 32) w->warps.back().alive = (1u << n % 32) - 1;
    prepare_order(w, n, index);
    b->threads = w->block_threads.data();
    b->order = w->order.data();
    b->position = w->position.data();
    memset(b->ready, 0, sizeof b->ready);
    memset(b->at_barrier, 0, sizeof b->at_barrier);
    for (unsigned k = 0; k < n; k++) set_bit(b->ready, k);
    for (unsigned z = 0; z < block.z; z++)
        for (unsigned y = 0; y < block.y; y++)
            for (unsigned x = 0; x < block.x; x++, i++) prepare_thread(&b->threads[i], {x, y, z}, i % 32, &w->warps[i / 32]);
    prepare_shared(w, what->shared);
    coc_hopper_begin(w->hopper, n, index);
}

/* After a fault the fibers are left as they are: their stacks and meetings are free again. */
static void abandon_block(worker *w) {
    w->free_stacks.clear();
    for (size_t i = 0; i < w->stacks.size(); i++) {
        coc_unpoison(w->stacks[i], STACK_BYTES);
        w->free_stacks.push_back((int)i);
    }
    w->free_meetings = nullptr;
    for (coc_meeting &m : w->meetings) {
        m.next = w->free_meetings;
        w->free_meetings = &m;
    }
}

static void run_block(worker *w, const coc_grid *what, unsigned index) {
    block_state b;
    prepare_block(w, &b, what, index);
    coc_current_block = &b;
    w->in_kernel = 1;
#if defined(COC_UCONTEXT)
    w->main_pointer = &w->main_context;
#endif
#if COC_ASAN
    enter(w, &w->main_pointer, &w->main_fake, &b.threads[b.order[0]]);
#else
    if (setjmp(w->escape) == 0) enter(w, &w->main_pointer, &w->main_fake, &b.threads[b.order[0]]);
#endif
    w->in_kernel = 0;
    if (w->failed == cudaSuccess) check_shared(w, &b);
    else abandon_block(w);
    coc_current = nullptr;
    coc_current_block = nullptr;
}

cudaError_t coc_run_grid(const coc_grid *what) {
    unsigned all = what->grid.x * what->grid.y * what->grid.z;
    unsigned blocks = coc_last_blocks != 0 && coc_last_blocks < all ? coc_last_blocks : all;
    [[maybe_unused]] uint64_t threads = (uint64_t)blocks * what->block.x * what->block.y * what->block.z;
    std::vector<unsigned> order;
    cudaError_t result = cudaSuccess;
    make_order(&order, blocks, ~(uint64_t)0);
#if defined(_OPENMP)
#  pragma omp parallel if (blocks > 1 && threads >= PARALLEL_FROM)
#endif
    {
        begin_work();
#if defined(_OPENMP)
#  pragma omp for schedule(dynamic, 1)
#endif
        for (unsigned i = 0; i < blocks; i++) {
            if (__atomic_load_n(&result, __ATOMIC_RELAXED) != cudaSuccess) continue;
            run_block(here, what, all - blocks + order[i]);
            if (here->failed != cudaSuccess) __atomic_store_n(&result, here->failed, __ATOMIC_RELAXED);
        }
        for (long coc_work::*count : {&coc_work::switches, &coc_work::mmas, &coc_work::ldmatrices, &coc_work::fp8_pairs,
                                      &coc_work::async_bytes, &coc_work::prefetches, &coc_work::barriers, &coc_work::busy_barriers,
                                      &coc_work::wgmmas, &coc_work::bulk_bytes})
            __atomic_fetch_add(&(coc_worked.*count), here->work.*count, __ATOMIC_RELAXED);
        end_work();
    }
    return result;
}

/* ---- Illegal addresses.  In a kernel: the kernel ends with a sticky error (AddressSanitizer reports for itself).
   On the host: device memory was touched; that is a fault, and the access then goes on. */

static struct sigaction earlier_segv, earlier_bus;

static void on_signal(int number, siginfo_t *info, void *) {
    worker *w = here;
    if (w != nullptr && w->in_kernel && !COC_ASAN) {
        coc_fault("%s: illegal address: %s", place(coc_current).c_str(), coc_describe(info->si_addr).c_str());
        w->failed = cudaErrorIllegalAddress;
        longjmp(w->escape, 1);
    }
    if ((w == nullptr || !w->in_kernel) && coc_host_touched(info->si_addr)) return;
    sigaction(number, number == SIGSEGV ? &earlier_segv : &earlier_bus, nullptr);
}

void coc_install_handler() {
    static std::once_flag once;
    std::call_once(once, [] {
        struct sigaction action = {};
        action.sa_sigaction = on_signal;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        sigaction(SIGSEGV, &action, &earlier_segv);
        sigaction(SIGBUS, &action, &earlier_bus);
    });
}
