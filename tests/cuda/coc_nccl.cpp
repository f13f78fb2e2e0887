/* coc_nccl.cpp - a model of NCCL, as far as amp_cuda.cu calls it, over the model GPUs of several processes or threads.  It
 * is a library with NCCL's own name, libnccl.so.2.  It takes the rest of the model from the program that loads it.
 *
 * Ranks meet in shared memory.  A group of calls is one piece of work in its stream, and runs when all ranks have reached
 * it.  Until then, the stream stands still.  The group must be the same on all ranks.  Sums go around a ring: each rank
 * adds its own numbers and rounds to the dtype, as NCCL does.  A communicator's first group begins only after its state was
 * queried twice, as with the real NCCL when it has to connect first.  Calls that NCCL leaves undefined are faults. */
#include "coc_internal.h"
#include "coc_nccl.h"
#include "amp.h"
#include <atomic>
#include <fcntl.h>
#include <map>
#include <memory>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

coc_nccl_state coc_nccl = {23007, 0, 0, 0, 0};

namespace {

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, IN_PROGRESS = 7 };
enum { U8 = 1, F16 = 6, F32 = 7, F64 = 8, BF16 = 9 };
enum verb { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, SEND, RECEIVE };
enum { RANKS_MOST = 8, CALLS_MOST = 512 };
const size_t SLOT = (size_t)1 << 26;            /* bytes of a rank's group */

struct unique_id { char name[128]; };
struct config { size_t size; unsigned magic, version; int blocking; };

struct call {
    verb what;
    const void *in; void *out;
    size_t count;
    int dtype, peer;                            /* peer: or root */
};

/* ---- What ranks share */

struct shared_rank {
    std::atomic<int> joined;
    int pid, device;
    std::atomic<uint64_t> posted, taken;        /* groups brought; groups of which it has what it wanted */
    int calls;
    call call_of[CALLS_MOST];
};
struct shared_memory {
    std::atomic<int> joined;
    shared_rank ranks[RANKS_MOST];
};
const size_t HEADER = (sizeof(shared_memory) + 4095) / 4096 * 4096;

struct communicator {
    int rank, world, device;
    shared_memory *memory = nullptr;
    uint64_t groups = 0;                        /* that have run */
    bool ready = false, finalized = false, connected = false;
    int asked = 0;                              /* for the state, since the first group waits */
    int error = SUCCESS;
    std::atomic<int> aborted{0};
    std::vector<std::function<void()>> waiting; /* the first group */
    std::shared_ptr<int> plans = std::make_shared<int>(0);      /* held by work, and by graphs that were captured */

    char *slot(int r) const { return (char *)memory + HEADER + (size_t)r * SLOT; }
    ~communicator() { if (memory) munmap((void *)memory, HEADER + (size_t)world * SLOT); }
};
typedef std::shared_ptr<communicator> comm_ref;

std::map<void *, comm_ref> &living() {
    static std::map<void *, comm_ref> *all = new std::map<void *, comm_ref>;
    return *all;
}
comm_ref find(void *comm, const char *function) {
    auto found = living().find(comm);
    if (found != living().end()) return found->second;
    coc_fault("%s: a communicator that is none, or was destroyed", function);
    return nullptr;
}

/* ---- Groups */

struct pending { comm_ref comm; cudaStream_t stream; std::vector<call> calls; };
thread_local int depth;
thread_local std::vector<pending> group;

size_t size_of(int dtype) { return dtype == U8 ? 1 : dtype == F16 || dtype == BF16 ? 2 : dtype == F32 ? 4 : 8; }
size_t bytes_in(const call &c, int world) {
    if (c.what == RECEIVE) return 0;
    return c.count * size_of(c.dtype) * (c.what == REDUCE_SCATTER ? (size_t)world : 1);
}
size_t bytes_out(const call &c, int world) {
    if (c.what == SEND) return 0;
    return c.count * size_of(c.dtype) * (c.what == ALL_GATHER ? (size_t)world : 1);
}

double value_of(const char *p, int dtype) {
    uint16_t h; float f; double d;
    switch (dtype) {
        case F16: memcpy(&h, p, 2); return amp_f32_from_f16(h);
        case BF16: memcpy(&h, p, 2); return amp_f32_from_bf16(h);
        case F32: memcpy(&f, p, 4); return f;
        default: memcpy(&d, p, 8); return d;
    }
}
void set_value(char *p, int dtype, double x) {
    float f = (float)x;
    uint16_t h = dtype == F16 ? amp_f16_from_f32(f, 0) : amp_bf16_from_f32(f, 0);
    if (dtype == F64) memcpy(p, &x, 8);
    else if (dtype == F32) memcpy(p, &f, 4);
    else memcpy(p, &h, 2);
}

/* One group's work on one rank. */
struct work {
    comm_ref comm;
    std::shared_ptr<int> plan;
    std::vector<call> calls;
    bool posted = false;

    shared_rank &of(int r) const { return comm->memory->ranks[r]; }

    /* Where call i of rank r begins in its slot. */
    const char *data(int r, int i) const {
        const char *at = comm->slot(r);
        for (int k = 0; k < i; k++) at += bytes_in(of(r).call_of[k], comm->world);
        return at;
    }
    bool usable() const {
        for (const call &c : calls) {
            size_t in = bytes_in(c, comm->world), out = bytes_out(c, comm->world);
            if (in && !coc_usable(c.in, in, comm->device)) coc_fault("NCCL reads %s", coc_describe(c.in).c_str());
            else if (out && !coc_usable(c.out, out, comm->device)) coc_fault("NCCL writes %s", coc_describe(c.out).c_str());
            else continue;
            return false;
        }
        return true;
    }
    bool post() {
        shared_rank &mine = of(comm->rank);
        char *at = comm->slot(comm->rank);
        for (int r = 0; r < comm->world; r++)
            if (of(r).taken < comm->groups) return false;       /* what lies there is still wanted */
        mine.calls = (int)calls.size();
        for (size_t i = 0; i < calls.size(); i++) {
            mine.call_of[i] = calls[i];
            memcpy(at, calls[i].in, bytes_in(calls[i], comm->world));
            at += bytes_in(calls[i], comm->world);
        }
        mine.posted = comm->groups + 1;
        return true;
    }
    bool all_posted() const {
        for (int r = 0; r < comm->world; r++)
            if (of(r).posted <= comm->groups) return false;
        return true;
    }
    /* The call that rank r makes of the k-th one between it and this rank. */
    int match(int r, verb what, int k) const {
        for (int i = 0; i < of(r).calls; i++)
            if (of(r).call_of[i].what == what && of(r).call_of[i].peer == comm->rank && k-- == 0) return i;
        return -1;
    }
    bool agree() const {
        for (int r = 0; r < comm->world; r++) {
            if (of(r).calls != (int)calls.size()) return false;
            for (int i = 0; i < of(r).calls; i++) {
                const call &a = calls[(size_t)i], &b = of(r).call_of[i];
                if (a.what != b.what || a.count != b.count || a.dtype != b.dtype || (a.what == BROADCAST && a.peer != b.peer))
                    return false;
            }
        }
        return true;
    }
    void sum(size_t i, size_t first, size_t n) const {
        const call &c = calls[i];
        const size_t size = size_of(c.dtype), world = (size_t)comm->world;
        for (size_t k = 0; k < n; k++) {
            const size_t at = (first + k) * size, start = (first + k) % world;  /* each number's ring begins elsewhere */
            char sum[8];
            memcpy(sum, data((int)start, (int)i) + at, size);
            for (size_t hop = 1; hop < world; hop++) {
                const char *x = data((int)((start + hop) % world), (int)i) + at;
                double add = value_of(sum, c.dtype) + value_of(x, c.dtype);
                set_value(sum, c.dtype, c.dtype == F32 ? (double)((float)value_of(sum, F32) + (float)value_of(x, F32)) : add);
            }
            memcpy((char *)c.out + k * size, sum, size);
        }
    }
    void take() const {
        std::vector<int> received((size_t)comm->world, 0);
        for (size_t i = 0; i < calls.size(); i++) {
            const call &c = calls[i];
            const size_t bytes = c.count * size_of(c.dtype);
            if (c.what == ALL_REDUCE) sum(i, 0, c.count);
            if (c.what == REDUCE_SCATTER) sum(i, (size_t)comm->rank * c.count, c.count);
            for (int r = 0; r < comm->world && c.what == ALL_GATHER; r++)
                memcpy((char *)c.out + (size_t)r * bytes, data(r, (int)i), bytes);
            if (c.what == BROADCAST) memcpy(c.out, data(c.peer, (int)i), bytes);
            if (c.what != RECEIVE) continue;
            int from = match(c.peer, SEND, received[(size_t)c.peer]++);
            if (from < 0 || of(c.peer).call_of[from].count != c.count) coc_fault("NCCL: what is received was not sent");
            else memcpy(c.out, data(c.peer, from), bytes);
        }
    }
    cudaError_t end(cudaError_t error) {
        posted = false;
        return error;
    }
    cudaError_t run() {
        if (comm->aborted) return end(cudaSuccess);
        if (coc_nccl.hang || coc_nccl.async_error) return cudaErrorNotReady;  /* a broken network moves nothing */
        coc_expose(comm->device);
        if (!posted && !usable()) return end(cudaErrorIllegalAddress);
        if (!posted && !post()) return cudaErrorNotReady;
        posted = true;
        if (!all_posted()) return cudaErrorNotReady;
        if (!agree()) {
            if (comm->error == SUCCESS) coc_fault("NCCL: rank %d makes other calls than the rest", comm->rank);
            comm->error = INVALID_USAGE;
            return cudaErrorNotReady;
        }
        take();
        of(comm->rank).taken = ++comm->groups;
        coc_pass_time(20e-6);
        return end(cudaSuccess);
    }
};

int enqueue(const pending &p) {
    auto w = std::make_shared<work>();
    w->comm = p.comm;
    w->plan = p.comm->plans;
    w->calls = p.calls;
    return coc_enqueue("ncclKernel", p.stream, {nullptr, 0}, [w] { return w->run(); }) == cudaSuccess ? SUCCESS : 1;
}

/* The group is done with, on each communicator. */
int begin_group() {
    int code = SUCCESS;
    for (pending &p : group) {
        if (!p.comm->ready || p.comm->error != SUCCESS) { code = INVALID_USAGE; continue; }
        if (p.calls.size() > CALLS_MOST) coc_fault("NCCL: more calls in a group than the model takes");
        if (p.comm->connected) {
            int put = enqueue(p);
            if (put != SUCCESS) code = put;
            continue;
        }
        pending later = p;
        p.comm->waiting.push_back([later] { (void)enqueue(later); });
        code = IN_PROGRESS;
    }
    group.clear();
    return code;
}

int add(const char *function, const call &c, void *handle, cudaStream_t stream) {
    coc_library_call here(function);
    comm_ref comm = find(handle, function);
    if (!comm) return INVALID_ARGUMENT;
    if (c.count == 0 || c.peer < 0 || c.peer >= comm->world) return INVALID_ARGUMENT;
    for (pending &p : group)
        if (p.comm == comm) {
            if (p.stream != stream) coc_fault("%s: one group in two streams", function);
            p.calls.push_back(c);
            return depth > 0 ? SUCCESS : begin_group();
        }
    group.push_back({comm, stream, {c}});
    return depth > 0 ? SUCCESS : begin_group();
}

/* All have joined: what NCCL then finds out. */
void look_around(communicator &c) {
    if (c.ready || c.memory->joined < c.world) return;
    for (int a = 0; a < c.world; a++)
        for (int b = 0; b < a; b++)
            if (c.memory->ranks[a].pid == c.memory->ranks[b].pid && c.memory->ranks[a].device == c.memory->ranks[b].device)
                c.error = INVALID_USAGE;        /* Duplicate GPU detected */
    c.ready = true;
}
int state_of(communicator &c) {
    if (coc_nccl.async_error) return coc_nccl.async_error;
    if (c.error != SUCCESS) return c.error;
    look_around(c);
    if (c.error != SUCCESS) return c.error;
    if (!c.ready) return IN_PROGRESS;
    if (c.finalized) return coc_device_done(c.device) ? SUCCESS : IN_PROGRESS;
    if (c.waiting.empty()) return SUCCESS;
    if (c.asked++ < 2) return IN_PROGRESS;
    c.connected = true;
    for (auto &begin : c.waiting) begin();
    c.waiting.clear();
    return SUCCESS;
}

std::string path_of(const unique_id &id) { return std::string("/dev/shm/") + id.name; }

} // namespace

extern "C" {

int ncclGetVersion(int *version) { *version = coc_nccl.version; return SUCCESS; }

const char *ncclGetErrorString(int code) {
    switch (code) {
        case SUCCESS: return "no error";
        case SYSTEM_ERROR: return "unhandled system error";
        case INVALID_ARGUMENT: return "invalid argument";
        case INVALID_USAGE: return "invalid usage";
        case 6: return "remote process exited or there was a network error";
        case IN_PROGRESS: return "NCCL operation in progress";
        default: return "unknown result code";
    }
}
const char *ncclGetLastError(void *) { return "(the model's last error)"; }

int ncclGetUniqueId(unique_id *id) {
    static std::atomic<int> made{0};
    if (coc_nccl.fail_id) return SYSTEM_ERROR;
    memset(id, 0, sizeof *id);
    snprintf(id->name, sizeof id->name, "coc_nccl_%d_%d", (int)getpid(), (int)made++);
    int file = open(path_of(*id).c_str(), O_CREAT | O_EXCL | O_RDWR, 0600);
    if (file < 0) return SYSTEM_ERROR;
    int code = ftruncate(file, (off_t)(HEADER + RANKS_MOST * SLOT));
    close(file);
    return code == 0 ? SUCCESS : SYSTEM_ERROR;
}

int ncclCommInitRankConfig(void **out, int world, unique_id id, int rank, config *c) {
    coc_library_call here(__func__);
    *out = nullptr;
    if (c->magic != 0xcafebeefu || c->size < sizeof *c || c->version < 21400) return INVALID_ARGUMENT;
    if (c->blocking != 0) coc_fault("%s: a communicator that blocks", __func__);
    if (world < 1 || world > RANKS_MOST || rank < 0 || rank >= world) return INVALID_ARGUMENT;
    auto comm = std::make_shared<communicator>();
    comm->rank = rank;
    comm->world = world;
    comm->device = coc_device_now();
    int file = open(path_of(id).c_str(), O_RDWR);
    if (file < 0) return SYSTEM_ERROR;
    void *p = mmap(nullptr, HEADER + (size_t)world * SLOT, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (p == MAP_FAILED) return SYSTEM_ERROR;
    comm->memory = (shared_memory *)p;
    shared_rank &mine = comm->memory->ranks[rank];
    mine.pid = (int)getpid();
    mine.device = comm->device;
    if (mine.joined.exchange(1)) return INVALID_USAGE;
    if (++comm->memory->joined == world) unlink(path_of(id).c_str());
    living()[comm.get()] = comm;
    coc_nccl.communicators++;
    *out = comm.get();
    return IN_PROGRESS;
}

int ncclCommGetAsyncError(void *handle, int *state) {
    coc_library_call here(__func__);
    comm_ref comm = find(handle, __func__);
    if (!comm) return INVALID_ARGUMENT;
    *state = state_of(*comm);
    return SUCCESS;
}

int ncclCommFinalize(void *handle) {
    coc_library_call here(__func__);
    comm_ref comm = find(handle, __func__);
    if (!comm || comm->finalized) return INVALID_ARGUMENT;
    comm->finalized = true;
    return IN_PROGRESS;
}

int ncclCommDestroy(void *handle) {
    coc_library_call here(__func__);
    comm_ref comm = find(handle, __func__);
    if (!comm) return INVALID_ARGUMENT;
    if (!comm->finalized) coc_fault("ncclCommDestroy without ncclCommFinalize waits for the other ranks");
    if (comm->plans.use_count() > 1) coc_fault("ncclCommDestroy waits for ever: a graph of it is not destroyed");
    living().erase(handle);
    coc_nccl.communicators--;
    return SUCCESS;
}

int ncclCommAbort(void *handle) {
    coc_library_call here(__func__);
    comm_ref comm = find(handle, __func__);
    if (!comm) return INVALID_ARGUMENT;
    comm->aborted = 1;
    comm->waiting.clear();
    while (comm->plans.use_count() > 1) {       /* as commDestroySync does: graphs that refer to it must die */
        (void)coc_device_done(comm->device);
        coc_pause();
    }
    living().erase(handle);
    coc_nccl.communicators--;
    return SUCCESS;
}

int ncclGroupStart(void) { depth++; return SUCCESS; }
int ncclGroupEnd(void) {
    coc_library_call here(__func__);
    if (depth == 0) return INVALID_USAGE;
    return --depth > 0 ? SUCCESS : begin_group();
}

int ncclAllReduce(const void *in, void *out, size_t count, int dtype, int op, void *comm, cudaStream_t stream) {
    if (op != 0 || dtype < F16 || dtype > BF16) return INVALID_ARGUMENT;
    return add(__func__, {ALL_REDUCE, in, out, count, dtype, 0}, comm, stream);
}
int ncclReduceScatter(const void *in, void *out, size_t each, int dtype, int op, void *comm, cudaStream_t stream) {
    if (op != 0 || dtype < F16 || dtype > BF16) return INVALID_ARGUMENT;
    return add(__func__, {REDUCE_SCATTER, in, out, each, dtype, 0}, comm, stream);
}
int ncclAllGather(const void *in, void *out, size_t each, int dtype, void *comm, cudaStream_t stream) {
    return add(__func__, {ALL_GATHER, in, out, each, dtype, 0}, comm, stream);
}
int ncclBroadcast(const void *in, void *out, size_t count, int dtype, int root, void *comm, cudaStream_t stream) {
    return add(__func__, {BROADCAST, in, out, count, dtype, root}, comm, stream);
}
int ncclSend(const void *in, size_t count, int dtype, int peer, void *comm, cudaStream_t stream) {
    return add(__func__, {SEND, in, nullptr, count, dtype, peer}, comm, stream);
}
int ncclRecv(void *out, size_t count, int dtype, int peer, void *comm, cudaStream_t stream) {
    return add(__func__, {RECEIVE, nullptr, out, count, dtype, peer}, comm, stream);
}

} // extern "C"
