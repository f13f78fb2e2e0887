/* coc_hopper.cpp - the instructions of compute capability 9.0 on the model GPU: mbarriers, bulk copies, boxes of tensor
 * maps, products of warpgroups, named barriers, and setmaxnreg.
 *
 * Hardware gives undefined results, or hangs, after a misuse.  Here each misuse that can be recognised is a fault, and
 * whatever is not there yet is NaN. */
#include "coc_internal.h"
#include <algorithm>
#include <deque>
#include <list>
#include <map>
#include <memory>

namespace {

enum {
    NAMED_BARRIERS = 16,
    WARPGROUP = 128,
    ATOM = 1024,                /* bytes of 8 rows of 128 bytes, within which pieces of 16 bytes are swizzled */
    MOST_COLUMNS = 256,
    MOST_PENDING = (1 << 20) - 1,
    NEVER = -2,
    POISON = 0x7fa0de90         /* a signalling NaN: arithmetic makes another one of it */
};
const uint64_t GATE_WORD = 0x6d62617272696572u;

/* ---- State of a block */

enum gate_stage { GATE_INITIALISED, GATE_FENCED, GATE_USABLE };
struct gate {                   /* an mbarrier */
    unsigned count, pending, maker;
    gate_stage stage;
    int64_t bytes;              /* that are expected and have not landed */
    volatile unsigned phase;    /* phases that have completed */
    uint64_t waiting[COC_READY_WORDS];
    std::vector<int> waited;    /* the phase that each thread waited for last */
};

struct bulk_copy {
    unsigned char *to;
    const unsigned char *from;
    size_t bytes;
    void *bar;
    coc_tensor_map map;         /* of rank 0: contiguous bytes */
    int at[4];
};

struct range { const unsigned char *from; size_t bytes; };

/* Accumulators of a thread.  What they will be is in value, until product `last` has been waited for. */
struct held_sums {
    float *c;
    int n;
    unsigned last;
    std::vector<float> value;
};
struct held_words { const uint32_t *at; uint32_t words[4]; unsigned product; };

struct member {                 /* one thread of a warpgroup */
    unsigned issued = 0, commits = 0;
    bool fenced = false;
    std::list<held_sums> sums;
    std::vector<held_words> words;
};

struct operands {               /* Four warps must give the same. */
    uint64_t a, b;
    uint32_t n;
    uint8_t words, transposed, bf16, add;
};
struct product {
    operands of;
    std::vector<range> reads;   /* in shared memory */
    float *sums[WARPGROUP];
    uint32_t words[WARPGROUP][4];
};
struct product_group { unsigned end, threads; };        /* The products before `end`; threads: how many have committed them. */

struct warpgroup {
    member members[WARPGROUP];
    std::deque<product> products;               /* issued and not waited for */
    std::vector<product_group> groups;
    unsigned first = 0, computed = 0;           /* number of the first in products; of the first that is not computed */
    volatile unsigned ready = 0;                /* groups that all threads have committed */
    bool early = false;
    uint64_t waiting[COC_READY_WORDS] = {};
    std::vector<std::pair<int, bool>> limits;   /* its setmaxnreg */
};

struct named_barrier {
    unsigned threads, arrived;
    volatile unsigned generation;
    uint64_t waiting[COC_READY_WORDS];
};

} // namespace

struct coc_hopper {
    bool used = false;
    uint64_t random = 1;
    std::map<void *, gate> gates;
    std::deque<bulk_copy> copies;
    std::vector<std::unique_ptr<warpgroup>> warpgroups;
    named_barrier named[NAMED_BARRIERS] = {};
    std::vector<int> registers;                 /* of a thread, by warp */
    std::vector<unsigned> limits_set;           /* setmaxnreg that a warp has executed */
    volatile unsigned registers_freed = 0;
    uint64_t wants_registers[COC_READY_WORDS] = {};
    float left[64][16], right[16][MOST_COLUMNS], sums[64][MOST_COLUMNS];        /* of the product that is computed */
};

coc_hopper *coc_hopper_new() { return new coc_hopper; }

void coc_hopper_begin(coc_hopper *h, unsigned threads, unsigned block) {
    unsigned most = 65536 / threads / 8 * 8;
    if (h->used) {
        h->gates.clear();
        h->copies.clear();
        h->warpgroups.clear();
        memset(h->named, 0, sizeof h->named);
        h->registers.clear();
        h->used = false;
    }
    h->random = (coc_order_seed + 1) * 0x9E3779B97F4A7C15u ^ (block + 1) * 0xD1B54A32D192ED03u;
    if (!coc_image_has_letter()) return;
    h->registers.assign((threads + 31) / 32, (int)std::min(most, 256u));
    h->limits_set.assign((threads + 31) / 32, 0);
    h->warpgroups.resize(threads / WARPGROUP);
}

/* The current block's, for an instruction of sm_90. */
static coc_hopper *hopper_for(const char *name) {
    coc_hopper *h = coc_hopper_here();
    if (coc_image() < 90)
        coc_trap(cudaErrorIllegalInstruction, "%s in code that was compiled for sm_%d, which has none", name, coc_image());
    h->used = true;
    return h;
}

static unsigned random_below(coc_hopper *h, size_t n) {
    h->random = h->random * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)((h->random >> 33) % n);
}

static bool overlap(const void *p, size_t bytes, const void *q, size_t more) {
    return (uintptr_t)p < (uintptr_t)q + more && (uintptr_t)q < (uintptr_t)p + bytes;
}

/* All lanes of the warp execute an instruction of this name with the same operands. */
static void whole_warp(const void *value, size_t bytes, const char *name) {
    const coc_slots *s = coc_exchange(~0u, value, bytes, name);
    if (s->lanes != ~0u) coc_trap(cudaErrorLaunchFailure, "%s without all lanes of the warp", name);
    if (bytes != 0 && memcmp(s->slot[0], value, bytes) != 0)
        coc_trap(cudaErrorLaunchFailure, "%s: the lanes of a warp give different operands", name);
}

/* ---- mbarriers */

static gate *gate_at(coc_hopper *h, void *bar, const char *name) {
    auto found = h->gates.find(bar);
    const uint64_t word = GATE_WORD ^ (uintptr_t)bar;
    if (found == h->gates.end()) coc_trap(cudaErrorIllegalAddress, "%s: %p is no mbarrier that was initialised", name, bar);
    if (memcmp(bar, &word, sizeof word) != 0) coc_trap(cudaErrorLaunchFailure, "%s: the mbarrier was overwritten", name);
    if (found->second.stage != GATE_USABLE)
        coc_trap(cudaErrorLaunchFailure, "%s: the mbarrier was initialised, but %s did not follow", name,
                 found->second.stage == GATE_FENCED ? "a barrier of the block" : "fence.mbarrier_init");
    return &found->second;
}

void coc_mbarrier_init(void *bar, unsigned count) {
    coc_hopper *h = hopper_for("mbarrier.init");
    const uint64_t word = GATE_WORD ^ (uintptr_t)bar;
    if (((uintptr_t)bar & 7) != 0) coc_trap(cudaErrorMisalignedAddress, "mbarrier.init at %p", bar);
    if (!coc_is_shared(bar, 8)) coc_trap(cudaErrorIllegalAddress, "mbarrier.init outside shared memory, at %p", bar);
    if (count == 0 || count > MOST_PENDING) coc_trap(cudaErrorLaunchFailure, "mbarrier.init with a count of %u", count);
    if (h->gates.count(bar)) coc_trap(cudaErrorLaunchFailure, "mbarrier.init of an mbarrier that exists");
    gate &g = h->gates[bar];
    g.count = g.pending = count;
    g.maker = coc_thread_number();
    g.stage = GATE_INITIALISED;
    g.bytes = 0;
    g.phase = 0;
    memset(g.waiting, 0, sizeof g.waiting);
    g.waited.assign(coc_block_threads(), NEVER);
    memcpy(bar, &word, sizeof word);
}

void coc_mbarriers_ready(void) {
    coc_hopper *h = hopper_for("fence.mbarrier_init");
    for (auto &entry : h->gates)
        if (entry.second.stage == GATE_INITIALISED && entry.second.maker == coc_thread_number()) entry.second.stage = GATE_FENCED;
}

void coc_hopper_barrier() {
    coc_hopper *h = coc_hopper_here();
    if (!h->used) return;
    for (auto &entry : h->gates)
        if (entry.second.stage == GATE_FENCED) entry.second.stage = GATE_USABLE;
}

static void complete_phase(gate *g) {
    if (g->pending != 0 || g->bytes != 0) return;
    g->pending = g->count;
    g->phase = g->phase + 1;
    coc_wake(g->waiting);
}

void coc_mbarrier_arrive(void *bar, unsigned expect_bytes) {
    gate *g = gate_at(hopper_for("mbarrier.arrive"), bar, "mbarrier.arrive");
    if (g->pending == 0)
        coc_trap(cudaErrorLaunchFailure, "mbarrier.arrive: more arrivals in a phase than the count of %u", g->count);
    if (expect_bytes > MOST_PENDING) coc_trap(cudaErrorLaunchFailure, "mbarrier.arrive expects %u bytes", expect_bytes);
    g->bytes += expect_bytes;
    g->pending--;
    complete_phase(g);
}

/* Which phase a thread means that waits for a parity: the one after the phase that it waited for last.  Otherwise it is the
   current phase, or the one before it. */
static int phase_meant(const gate *g, int last, unsigned parity) {
    const int phase = (int)g->phase;
    if (last != NEVER && ((unsigned)last & 1) != parity) return last + 1;
    return (g->phase & 1) == parity ? phase : phase - 1;
}

void coc_mbarrier_wait(void *bar, unsigned parity) {
    gate *g = gate_at(hopper_for("mbarrier.try_wait"), bar, "mbarrier.try_wait");
    if (parity > 1) coc_trap(cudaErrorLaunchFailure, "mbarrier.try_wait for parity %u", parity);
    int &last = g->waited[coc_thread_number()], meant = phase_meant(g, last, parity);
    last = meant;
    if ((int)g->phase == meant) coc_wait_in(g->waiting, &g->phase, g->phase, "mbarrier.try_wait");
    if ((int)g->phase - meant > 1)
        coc_trap(cudaErrorLaunchFailure, "mbarrier.try_wait: a thread waits for phase %d, and phase %d has completed, which has "
                 "the other parity", meant, meant + 1);
}

/* ---- Bulk copies */

static void fill_row(const bulk_copy &copy, unsigned row, unsigned char *to) {
    const coc_tensor_map &map = copy.map;
    const unsigned char *from = map.data;
    memset(to, 0, (size_t)map.box[0] * map.bytes);
    for (unsigned d = 1; d < 4; d++) {
        int64_t at = (int64_t)copy.at[d] + row % map.box[d];
        row /= map.box[d];
        if (at < 0 || at >= (int64_t)map.size[d]) return;
        from += at * (int64_t)map.stride[d - 1];
    }
    int64_t first = std::max<int64_t>(0, -(int64_t)copy.at[0]);
    int64_t end = std::min<int64_t>(map.box[0], (int64_t)map.size[0] - copy.at[0]);
    if (first < end) memcpy(to + first * map.bytes, from + (copy.at[0] + first) * map.bytes, (size_t)(end - first) * map.bytes);
}

static void write_box(const bulk_copy &copy) {
    const coc_tensor_map &map = copy.map;
    const size_t row_bytes = (size_t)map.box[0] * map.bytes;
    std::vector<unsigned char> row(row_bytes);
    for (unsigned r = 0; r < (unsigned)map.box[1] * map.box[2] * map.box[3]; r++) {
        fill_row(copy, r, row.data());
        for (size_t i = 0; i < row_bytes; i += 16) {
            size_t at = r * row_bytes + i;
            if (map.swizzled) at ^= (at / 128 % 8) * 16;
            memcpy(copy.to + at, row.data() + i, 16);
        }
    }
}

static void land(coc_hopper *h, size_t which) {
    bulk_copy copy = h->copies[which];
    h->copies.erase(h->copies.begin() + (ptrdiff_t)which);
    if (copy.map.rank == 0) memcpy(copy.to, copy.from, copy.bytes);
    else write_box(copy);
    gate *g = gate_at(h, copy.bar, "a bulk copy that lands");
    g->bytes -= (int64_t)copy.bytes;
    if (g->bytes < 0)
        coc_trap(cudaErrorLaunchFailure, "a bulk copy of %zu bytes completes more bytes than its mbarrier expects", copy.bytes);
    complete_phase(g);
}

bool coc_hopper_land() {
    coc_hopper *h = coc_hopper_here();
    if (!h->used || h->copies.empty()) return false;
    size_t n = h->copies.size();
    land(h, coc_current_order == COC_REVERSE ? n - 1 : coc_current_order == COC_RANDOM ? random_below(h, n) : 0);
    return true;
}

static void check_destination(coc_hopper *h, const void *to, size_t bytes, const char *name) {
    if (!coc_is_shared(to, bytes)) coc_trap(cudaErrorIllegalAddress, "%s of %zu bytes to %p, outside shared memory", name, bytes, to);
    for (const bulk_copy &c : h->copies)
        if (overlap(to, bytes, c.to, c.bytes)) coc_trap(cudaErrorLaunchFailure, "%s into bytes of a copy that is under way", name);
    for (const auto &entry : h->gates)
        if (overlap(to, bytes, entry.first, 8)) coc_trap(cudaErrorLaunchFailure, "%s over an mbarrier", name);
    for (const auto &group : h->warpgroups) {
        if (!group) continue;
        for (const product &p : group->products)
            for (const range &r : p.reads)
                if (overlap(to, bytes, r.from, r.bytes))
                    coc_trap(cudaErrorLaunchFailure, "%s into bytes that a wgmma reads, which is under way", name);
    }
}

static void start_copy(coc_hopper *h, const bulk_copy &copy) {
    memset(copy.to, 0xFF, copy.bytes);
    coc_work_here()->bulk_bytes += (long)copy.bytes;
    h->copies.push_back(copy);
    while (coc_current_order == COC_AHEAD && !h->copies.empty()) land(h, 0);
}

void coc_bulk_fetch(void *to, const void *from, unsigned bytes, void *bar) {
    coc_hopper *h = hopper_for("cp.async.bulk");
    bulk_copy copy = {(unsigned char *)to, (const unsigned char *)from, bytes, bar, {}, {}};
    (void)gate_at(h, bar, "cp.async.bulk");
    if (bytes == 0 || (((uintptr_t)to | (uintptr_t)from | bytes) & 15) != 0)
        coc_trap(cudaErrorMisalignedAddress, "cp.async.bulk of %u bytes from %p to %p", bytes, from, to);
    check_destination(h, to, bytes, "cp.async.bulk");
    start_copy(h, copy);
}

void coc_tensor_fetch(void *to, const void *map, void *bar, int c0, int c1, int c2, int c3) {
    const char *name = "cp.async.bulk.tensor";
    coc_hopper *h = hopper_for(name);
    bulk_copy copy = {(unsigned char *)to, nullptr, 0, bar, {}, {c0, c1, c2, c3}};
    if (((uintptr_t)map & 63) != 0) coc_trap(cudaErrorMisalignedAddress, "%s: a tensor map at %p", name, map);
    memcpy(&copy.map, map, sizeof copy.map);
    if (copy.map.magic != COC_TENSOR_MAP) coc_trap(cudaErrorIllegalInstruction, "%s: no tensor map was encoded there", name);
    if (copy.map.rank != 4) coc_trap(cudaErrorIllegalInstruction, "%s of 4 dimensions: the map has %d", name, copy.map.rank);
    if (copy.map.device != coc_grid_now()->device)
        coc_trap(cudaErrorIllegalAddress, "%s: the tensor map is of device %d, not of device %d", name, copy.map.device,
                 coc_grid_now()->device);
    copy.bytes = copy.map.bytes;
    for (int d = 0; d < 4; d++) copy.bytes *= copy.map.box[d];
    (void)gate_at(h, bar, name);
    unsigned aligned = copy.map.swizzled ? ATOM : 128, at = coc_shared_number(to);
    if (at % aligned != 0)
        coc_trap(cudaErrorMisalignedAddress, "%s to byte %u of shared memory, which is not a multiple of %u", name, at, aligned);
    check_destination(h, to, copy.bytes, name);
    start_copy(h, copy);
}

/* ---- Products of a warpgroup */

static warpgroup *warpgroup_here(const char *name) {
    coc_hopper *h = hopper_for(name);
    unsigned at = coc_thread_number() / WARPGROUP;
    if (!coc_image_has_letter())
        coc_trap(cudaErrorIllegalInstruction, "%s in code that was compiled for sm_%d, which has none; sm_90a has", name, coc_image());
    if (at >= h->warpgroups.size())
        coc_trap(cudaErrorLaunchFailure, "%s: a block of %u threads lacks some of this warpgroup", name, coc_block_threads());
    if (!h->warpgroups[at]) {
        h->warpgroups[at].reset(new warpgroup);
        h->warpgroups[at]->early = coc_current_order == COC_REVERSE || (coc_current_order == COC_RANDOM && random_below(h, 2));
    }
    return h->warpgroups[at].get();
}
static member *member_here(warpgroup *group) { return &group->members[coc_thread_number() % WARPGROUP]; }

/* A descriptor's parts, in bytes. */
struct matrix_place { uint32_t start, leading, stride; };

static matrix_place place_of(uint64_t descriptor) {
    const uint64_t known = 0x3fffull | 0x3fffull << 16 | 0x3fffull << 32 | 7ull << 49 | 3ull << 62;
    if (descriptor >> 62 != 1)
        coc_trap(cudaErrorLaunchFailure, "wgmma: a descriptor %016llx without a swizzle of 128 bytes", (unsigned long long)descriptor);
    if ((descriptor & ~known) != 0 || (descriptor >> 49 & 7) != 0)
        coc_trap(cudaErrorLaunchFailure, "wgmma: a descriptor %016llx with a base offset or reserved bits",
                 (unsigned long long)descriptor);
    return {(uint32_t)(descriptor & 0x3fff) << 4, (uint32_t)(descriptor >> 16 & 0x3fff) << 4,
            (uint32_t)(descriptor >> 32 & 0x3fff) << 4};
}

static void add_atom(std::vector<range> *reads, uint32_t number) {
    const unsigned char *at = coc_shared_at(number, ATOM);
    if (at == nullptr) coc_trap(cudaErrorIllegalAddress, "wgmma: a descriptor names byte %u, outside shared memory", number);
    reads->push_back({at, ATOM});
}

/* What a descriptor reads: rows of 16 numbers along the depth (K-major), or 16 rows of `wide` numbers. */
static void add_reads(std::vector<range> *reads, uint64_t descriptor, unsigned wide, bool transposed) {
    matrix_place p = place_of(descriptor);
    uint32_t within = transposed ? 0 : p.start % 128, atom = p.start - within;
    if (atom % ATOM != 0 || within > 96)
        coc_trap(cudaErrorMisalignedAddress, "wgmma: a descriptor names byte %u, and a swizzled tile starts at a multiple of 1024",
                 p.start);
    if (p.stride % ATOM != 0 || p.stride == 0 || (transposed && wide > 64 && (p.leading % ATOM != 0 || p.leading == 0)))
        coc_trap(cudaErrorLaunchFailure, "wgmma: a descriptor with offsets of %u and %u bytes", p.leading, p.stride);
    for (unsigned i = 0; !transposed && i < wide / 8; i++) add_atom(reads, atom + i * p.stride);
    for (unsigned i = 0; transposed && i < (wide + 63) / 64 * 2; i++) add_atom(reads, atom + i / 2 * p.leading + i % 2 * p.stride);
}

static float number_at(uint32_t at, bool bf16) {
    uint16_t bits;
    memcpy(&bits, coc_shared_at(at ^ (at / 128 % 8) * 16, 2), 2);
    return coc_half_value(bits, bf16);
}

static void read_left(coc_hopper *h, const product &p) {
    matrix_place m = p.of.words ? matrix_place{} : place_of(p.of.a);
    for (unsigned r = 0; r < 64; r++)
        for (unsigned k = 0; k < 16; k++) {
            unsigned lane = r / 16 * 32 + r % 8 * 4 + k % 8 / 2, word = k / 8 * 2 + r / 8 % 2;
            h->left[r][k] = p.of.words ? coc_half_value(p.words[lane][word] >> 16 * (k % 2), p.of.bf16)
                                       : number_at(m.start + r / 8 * m.stride + r % 8 * 128 + 2 * k, p.of.bf16);
        }
}
static void read_right(coc_hopper *h, const product &p) {
    matrix_place m = place_of(p.of.b);
    for (unsigned k = 0; k < 16; k++)
        for (unsigned n = 0; n < p.of.n; n++)
            h->right[k][n] = number_at(p.of.transposed ? m.start + n / 64 * m.leading + k / 8 * m.stride + k % 8 * 128 + n % 64 * 2
                                                       : m.start + n / 8 * m.stride + n % 8 * 128 + 2 * k, p.of.bf16);
}

/* Exact products are added in the order of k, four columns at a time. */
static void multiply(coc_hopper *h, unsigned n) {
    typedef float four __attribute__((vector_size(16)));
    for (unsigned r = 0; r < 64; r++)
        for (unsigned c = 0; c < n; c += 4) {
            four sum, b;
            memcpy(&sum, &h->sums[r][c], sizeof sum);
            for (unsigned k = 0; k < 16; k++) {
                memcpy(&b, &h->right[k][c], sizeof b);
                sum += h->left[r][k] * b;
            }
            memcpy(&h->sums[r][c], &sum, sizeof sum);
        }
}

/* run(one of the product's sums of a thread, row, column) for all of them. */
template <class F> static void for_sums(const product &p, F run) {
    for (unsigned thread = 0; thread < WARPGROUP; thread++)
        for (unsigned i = 0; i < p.of.n / 2; i++)
            run(&p.sums[thread][i], thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8, i / 4 * 8 + thread % 4 * 2 + i % 2);
}

/* Computes the products before number `end`. */
static void compute(warpgroup *group, unsigned end) {
    coc_hopper *h = coc_hopper_here();
    for (; group->computed < end; group->computed++) {
        const product &p = group->products[group->computed - group->first];
        for_sums(p, [&](const float *x, unsigned r, unsigned c) { h->sums[r][c] = p.of.add ? *x : 0.0f; });
        read_left(h, p);
        read_right(h, p);
        multiply(h, p.of.n);
        for_sums(p, [&](float *x, unsigned r, unsigned c) { *x = h->sums[r][c]; });
    }
}

/* The member's next product: the one that others of the warpgroup have issued with the same operands, or a new one. */
static product *next_product(coc_hopper *h, warpgroup *group, const member *me, const operands &of) {
    if (me->issued - group->first < group->products.size()) {
        product *p = &group->products[me->issued - group->first];
        if (memcmp(&p->of, &of, sizeof of) != 0)
            coc_trap(cudaErrorLaunchFailure, "wgmma: the warps of a warpgroup give different operands, or in another order");
        return p;
    }
    group->products.emplace_back();
    product *p = &group->products.back();
    p->of = of;
    if (!of.words) add_reads(&p->reads, of.a, 64, false);
    add_reads(&p->reads, of.b, of.n, of.transposed);
    for (const range &r : p->reads)
        for (const bulk_copy &c : h->copies)
            if (overlap(r.from, r.bytes, c.to, c.bytes))
                coc_trap(cudaErrorLaunchFailure, "wgmma reads bytes of a copy that is under way");
    return p;
}

static bool still_poison(const held_sums &sums) {
    const uint32_t poison = POISON;
    for (int i = 0; i < sums.n; i++)
        if (memcmp(&sums.c[i], &poison, 4) != 0) return false;
    return true;
}
static void check_untouched(const member *me) {
    for (const held_sums &s : me->sums)
        if (!still_poison(s)) coc_trap(cudaErrorLaunchFailure, "wgmma: accumulators were changed while it was under way");
    for (const held_words &w : me->words)
        if (memcmp(w.at, w.words, sizeof w.words) != 0)
            coc_trap(cudaErrorLaunchFailure, "wgmma: registers of a were changed while it was under way");
}

/* Takes accumulators away from the thread, or adds to those that it has given already. */
static float *hold_sums(member *me, float *c, int n) {
    const uint32_t poison = POISON;
    for (held_sums &s : me->sums) {
        if (!overlap(c, (size_t)n * 4, s.c, (size_t)s.n * 4)) continue;
        if (s.c != c || s.n != n)
            coc_trap(cudaErrorLaunchFailure, "wgmma: accumulators of another shape are those of a product that is under way");
        s.last = me->issued;
        return s.value.data();
    }
    me->sums.push_back({c, n, me->issued, std::vector<float>(c, c + n)});
    for (int i = 0; i < n; i++) memcpy(&c[i], &poison, 4);
    return me->sums.back().value.data();
}

void coc_wgmma_fence(void) {
    warpgroup *group = warpgroup_here("wgmma.fence");
    whole_warp(nullptr, 0, "wgmma.fence");
    member_here(group)->fenced = true;
}

void coc_wgmma(float *c, int n, const uint32_t *a_words, uint64_t a, uint64_t b, bool b_transposed, bool bf16, bool add) {
    warpgroup *group = warpgroup_here("wgmma.mma_async");
    member *me = member_here(group);
    operands of = {a_words ? 0 : a, b, (uint32_t)n, a_words != nullptr, b_transposed, bf16, add};
    whole_warp(&of, sizeof of, "wgmma.mma_async");
    if (n < 8 || n > MOST_COLUMNS || n % 8 != 0) coc_trap(cudaErrorIllegalInstruction, "wgmma.mma_async of %d columns", n);
    if (!me->fenced)
        coc_trap(cudaErrorLaunchFailure, "wgmma.mma_async without a wgmma.fence since the last commit or wait");
    check_untouched(me);
    product *p = next_product(coc_hopper_here(), group, me, of);
    unsigned thread = coc_thread_number() % WARPGROUP;
    p->sums[thread] = hold_sums(me, c, n / 2);
    if (a_words != nullptr) {
        held_words held = {a_words, {a_words[0], a_words[1], a_words[2], a_words[3]}, me->issued};
        memcpy(p->words[thread], held.words, sizeof held.words);
        me->words.push_back(held);
    }
    if (thread == 0) coc_work_here()->wgmmas++;
    me->issued++;
}

void coc_wgmma_commit(void) {
    warpgroup *group = warpgroup_here("wgmma.commit_group");
    member *me = member_here(group);
    whole_warp(nullptr, 0, "wgmma.commit_group");
    if (me->commits == group->groups.size()) group->groups.push_back({me->issued, 0});
    product_group &g = group->groups[me->commits];
    if (g.end != me->issued)
        coc_trap(cudaErrorLaunchFailure, "wgmma.commit_group: the warps of a warpgroup commit different numbers of products");
    me->commits++;
    me->fenced = false;
    if (++g.threads < WARPGROUP) return;
    group->ready = group->ready + 1;
    if (group->early) compute(group, g.end);
    coc_wake(group->waiting);
}

void coc_wgmma_wait(int groups_left) {
    warpgroup *group = warpgroup_here("wgmma.wait_group");
    member *me = member_here(group);
    whole_warp(&groups_left, sizeof groups_left, "wgmma.wait_group");
    me->fenced = false;
    check_untouched(me);
    if (groups_left < 0) coc_trap(cudaErrorIllegalInstruction, "wgmma.wait_group %d", groups_left);
    if (me->commits <= (unsigned)groups_left) return;
    unsigned wanted = me->commits - (unsigned)groups_left;
    while (group->ready < wanted) coc_wait_in(group->waiting, &group->ready, group->ready, "wgmma.wait_group");
    unsigned end = group->groups[wanted - 1].end;
    compute(group, end);
    for (; group->first < end; group->first++) group->products.pop_front();
    for (auto s = me->sums.begin(); s != me->sums.end();) {
        if (s->last >= end) { ++s; continue; }
        memcpy(s->c, s->value.data(), s->value.size() * sizeof(float));
        s = me->sums.erase(s);
    }
    auto done = [end](const held_words &w) { return w.product < end; };
    me->words.erase(std::remove_if(me->words.begin(), me->words.end(), done), me->words.end());
}

/* ---- Registers and named barriers */

static int registers_left(const coc_hopper *h) {
    int left = (int)(std::min(65536 / coc_block_threads() / 8 * 8, 256u) * h->registers.size());
    for (int registers : h->registers) left -= registers;
    return left;
}

/* A lane does it for its warp. */
static void change_registers(coc_hopper *h, warpgroup *group, int registers, bool more) {
    unsigned warp = coc_thread_number() / 32, call = h->limits_set[warp]++;
    if (call == group->limits.size()) group->limits.push_back({registers, more});
    if (group->limits[call] != std::make_pair(registers, more))
        coc_trap(cudaErrorLaunchFailure, "setmaxnreg: the warps of a warpgroup ask for different numbers");
    if (more ? registers < h->registers[warp] : registers > h->registers[warp])
        coc_trap(cudaErrorLaunchFailure, "setmaxnreg.%s to %d registers: the warp has %d", more ? "inc" : "dec", registers,
                 h->registers[warp]);
    while (registers - h->registers[warp] > registers_left(h))
        coc_wait_in(h->wants_registers, &h->registers_freed, h->registers_freed, "setmaxnreg.inc");
    h->registers[warp] = registers;
    h->registers_freed = h->registers_freed + 1;
    coc_wake(h->wants_registers);
}

void coc_setmaxnreg(int registers, bool more) {
    warpgroup *group = warpgroup_here("setmaxnreg");
    int value[2] = {registers, more};
    whole_warp(value, sizeof value, "setmaxnreg");
    if (registers < 24 || registers > 256 || registers % 8 != 0)
        coc_trap(cudaErrorIllegalInstruction, "setmaxnreg to %d, which is no multiple of 8 from 24 to 256", registers);
    if (coc_current->lane == 0) change_registers(coc_hopper_here(), group, registers, more);
    whole_warp(nullptr, 0, "setmaxnreg");
}

void coc_named_barrier(int id, int threads, bool waits) {
    const char *name = waits ? "bar.sync" : "bar.arrive";
    int value[2] = {id, threads};
    coc_hopper *h = hopper_for(name);
    if (id < 1 || id >= NAMED_BARRIERS) coc_trap(cudaErrorIllegalInstruction, "%s %d: barriers 1 to 15 have numbers", name, id);
    if (threads <= 0 || threads % 32 != 0 || threads > (int)coc_block_threads())
        coc_trap(cudaErrorLaunchFailure, "%s %d of %d threads in a block of %u", name, id, threads, coc_block_threads());
    whole_warp(value, sizeof value, name);
    named_barrier *b = &h->named[id];
    if (b->arrived == 0) b->threads = (unsigned)threads;
    if (b->threads != (unsigned)threads)
        coc_trap(cudaErrorLaunchFailure, "%s %d of %d threads meets one of %u", name, id, threads, b->threads);
    unsigned generation = b->generation;
    if (++b->arrived == b->threads) {
        b->arrived = 0;
        b->generation = generation + 1;
        coc_wake(b->waiting);
    } else if (waits) coc_wait_in(b->waiting, &b->generation, generation, name);
}

/* ---- Ends */

void coc_hopper_return() {
    coc_hopper *h = coc_hopper_here();
    unsigned at = coc_thread_number() / WARPGROUP;
    if (!h->used || at >= h->warpgroups.size() || !h->warpgroups[at]) return;
    if (!member_here(h->warpgroups[at].get())->sums.empty())
        coc_trap(cudaErrorLaunchFailure, "returned before its wgmma were waited for");
}

void coc_hopper_end() {
    coc_hopper *h = coc_hopper_here();
    if (!h->used) return;
    if (!h->copies.empty()) coc_trap(cudaErrorLaunchFailure, "the block ends, and a bulk copy is under way");
    for (const auto &entry : h->gates)
        if (entry.second.bytes != 0)
            coc_trap(cudaErrorLaunchFailure, "the block ends, and an mbarrier expects %lld more bytes", (long long)entry.second.bytes);
}
