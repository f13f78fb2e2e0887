/* coc_runtime.cpp - a model of the CUDA runtime: device memory, streams, events and graphs on the CPU.  Device memory is
 * kept apart from host memory, and streams really defer their work.  For tests it has counts, failures on demand, and
 * faults (coc.h).
 *
 * A call that puts work into a stream makes an operation.  The operation depends on the one before it in its stream, on
 * events that were waited for, and on what the legacy stream's rule adds.  With the schedule LATE, no operation runs before
 * it must.  Then it runs after the operations that it depends on, and no other operation runs. */
#include "coc_internal.h"
#include <nvtx3/nvToolsExt.h>
#include <algorithm>
#include <chrono>
#include <cxxabi.h>
#include <deque>
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>

namespace {

enum { PAGE = 4096, RED_ZONE = 256, CANARY = 0xCB };
const size_t ARENA = (size_t)1 << 38;           /* address space of a device; addresses are never used twice */

/* ---- State */

struct allocation {
    unsigned char *region, *data;               /* region: whole pages, red zones included */
    size_t region_bytes, size;
    bool sparse, freeing;                       /* freeing: cudaFreeAsync is under way */
};

struct capture;
typedef std::vector<int> node_list;
typedef std::shared_ptr<CUstream_st> stream_ref;

/* A point in a stream's work: everything up to its sequence number. */
struct point { stream_ref stream; uint64_t sequence; };

struct operation {
    std::function<cudaError_t()> run;
    std::vector<point> after;
    int device;
    double submitted;                           /* by the host's modelled clock */
};

struct device_state {
    unsigned char *arena = nullptr;
    size_t top = 0, used = 0;
    bool exposed = false, context = false;      /* context: a call made the primary context */
    std::map<uintptr_t, allocation> live;       /* by data */
    std::map<uintptr_t, allocation> freed;      /* by region */
    stream_ref legacy;
    cudaError_t sticky = cudaSuccess;
    std::map<const void *, int> shared_limit;   /* kernel -> cudaFuncAttributeMaxDynamicSharedMemorySize */
};

struct event_record {                           /* one cudaEventRecord */
    point at;
    double time = 0;
    int queries = 0;
    std::shared_ptr<capture> captured;          /* recorded in a capture, after these nodes */
    node_list nodes;
};

struct pinned_memory { size_t size; unsigned char *region; };
struct scratch_use { coc_scratch memory; point at; };

} // namespace

struct CUstream_st {
    int device = 0;
    unsigned flags = 0;
    bool legacy = false;
    std::deque<operation> queue;
    uint64_t queued = 0, done = 0;
    int queries = 0;
    std::shared_ptr<capture> capturing;
    node_list capture_last;                     /* what its next captured node depends on */
};
struct CUevent_st {
    int device = 0;
    unsigned flags = 0;
    std::shared_ptr<event_record> last;
};
struct CUgraphNode_st {
    std::function<cudaError_t()> run;
    node_list after;
    int device;
    std::string kernel;                         /* its name, if it is one */
};
struct CUuserObject_st {
    void *ptr;
    cudaHostFn_t destroy;
    ~CUuserObject_st() { destroy(ptr); }
};
struct CUgraph_st {
    std::vector<CUgraphNode_st> nodes;
    std::vector<std::shared_ptr<CUuserObject_st>> objects;
};
struct CUgraphExec_st { std::shared_ptr<CUgraph_st> graph; };

namespace {

struct capture {
    unsigned long long id;
    std::shared_ptr<CUgraph_st> graph;
    CUstream_st *origin;
    cudaStreamCaptureMode mode;
    std::thread::id thread;
    bool invalid = false;
};

/* Held by one thread at a time while it is in CUDA.  ThreadSanitizer sees neither the lock nor what is done under it, kernels
   included: CUDA promises the backend no order of what it does itself. */
#if defined(__SANITIZE_THREAD__)
extern "C" {
void AnnotateIgnoreReadsBegin(const char *file, int line);
void AnnotateIgnoreReadsEnd(const char *file, int line);
void AnnotateIgnoreWritesBegin(const char *file, int line);
void AnnotateIgnoreWritesEnd(const char *file, int line);
void AnnotateIgnoreSyncBegin(const char *file, int line);
void AnnotateIgnoreSyncEnd(const char *file, int line);
}
struct coc_model_lock {
    std::recursive_mutex mutex;
    void lock() {
        AnnotateIgnoreReadsBegin(__FILE__, __LINE__), AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
        AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
        mutex.lock();
    }
    void unlock() {
        mutex.unlock();
        AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
        AnnotateIgnoreWritesEnd(__FILE__, __LINE__), AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
    }
};
#else
typedef std::recursive_mutex coc_model_lock;
#endif

struct model_state {
    coc_model_lock lock;
    std::vector<device_state> devices;
    int device_count = 2, multiprocessors = 4, capability = COC_CAPABILITY, image = capability;
    bool letter = false;        /* the image's */
    int driver = 13000;
    size_t memory = (size_t)1 << 30;
    int hidden = 1, pointer_check = 1, patience = 1, yielding = 0, pools = 1;
    coc_schedule schedule = COC_LATE;
    std::map<void *, pinned_memory> pinned;
    std::map<CUstream_st *, stream_ref> streams;            /* by handle */
    std::deque<char> handle_places;             /* whose addresses are handles of streams */
    std::vector<cudaStream_t> free_handles;     /* of destroyed streams */
    std::vector<stream_ref> retired;          /* destroyed with work left */
    std::vector<scratch_use> scratch;           /* of work that has not run */
    std::map<CUevent_st *, std::shared_ptr<CUevent_st>> events;
    std::map<CUgraph_st *, std::shared_ptr<CUgraph_st>> graphs;
    std::map<CUuserObject_st *, std::shared_ptr<CUuserObject_st>> objects;      /* that no graph holds yet */
    std::map<CUgraphExec_st *, std::shared_ptr<CUgraphExec_st>> execs;
    std::vector<std::shared_ptr<capture>> captures;
    unsigned long long next_capture = 1;
    coc_counts counts = {};
    coc_work worked_before = {};
    std::map<std::string, long> calls, synchronising, kernels;
    std::string fail_function;
    int fail_in = 0, fail_sticky = 0;
    cudaError_t fail_error = cudaSuccess;
    std::mutex fault_lock;
    std::vector<std::string> faults;
    int modelled_clock = 1;
    double clock = 0, host_clock = 0, launch_time = 0;      /* the GPU's and the host's, and what the host takes for a call */
    std::string ranges;
    int depth = 0;              /* of ranges */
};

model_state &model() {
    static model_state *state = new model_state;
    return *state;
}

thread_local int current_device;
thread_local cudaError_t last_error;
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

device_state &device(int index) {
    model_state &m = model();
    if (m.devices.empty()) m.devices.resize((size_t)m.device_count);
    device_state &d = m.devices[(size_t)index];
    if (!d.legacy) {
        d.legacy = std::make_shared<CUstream_st>();
        d.legacy->device = index;
        d.legacy->legacy = true;
    }
    return d;
}

double seconds() {
    if (model().modelled_clock) return model().clock;
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

} // namespace

/* ---- Faults */

void coc_fault(const char *format, ...) {
    char text[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    std::lock_guard<std::mutex> guard(model().fault_lock);
    if (model().faults.size() < 1000) model().faults.push_back(text);
    if (getenv("COC_VERBOSE")) fprintf(stderr, "coc: %s\n", text);
}

int coc_faults() {
    std::lock_guard<std::mutex> guard(model().fault_lock);
    return (int)model().faults.size();
}

std::string coc_fault_text() {
    std::lock_guard<std::mutex> guard(model().fault_lock);
    std::string text;
    for (const std::string &fault : model().faults) text += (text.empty() ? "" : "\n") + fault;
    return text;
}

std::string coc_take_faults() {
    std::string text = coc_fault_text();
    std::lock_guard<std::mutex> guard(model().fault_lock);
    model().faults.clear();
    return text;
}

/* ---- Locks of amp_cuda.cu, which is compiled to take them here */

namespace { thread_local int locks_held; }

extern "C" int coc_mutex_lock(pthread_mutex_t *mutex) {
    int error = pthread_mutex_lock(mutex);
    if (error == 0) locks_held++;
    return error;
}
extern "C" int coc_mutex_unlock(pthread_mutex_t *mutex) {
    locks_held--;
    return pthread_mutex_unlock(mutex);
}
int coc_locks_held() { return locks_held; }
void coc_check_locks(const char *function) {
    if (locks_held == 0) return;
    std::string fault = std::string(function) + " is called with a lock held";
    if (coc_fault_text().find(fault) == std::string::npos) coc_fault("%s", fault.c_str());
}

/* ---- Names of kernels: from the program's own symbol table, where static functions have one too. */

namespace {

std::string plain_name(const char *mangled) {
    int status = 0;
    char *full = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
    std::string name = status == 0 && full ? full : mangled;
    free(full);
    for (const char *part : {"(anonymous namespace)::", "void "})
        for (size_t at; (at = name.find(part)) != std::string::npos;) name.erase(at, strlen(part));
    int depth = 0;
    for (size_t i = 0; i < name.size(); i++) {          /* up to the parameters, but with template arguments */
        if (name[i] == '<') depth++;
        if (name[i] == '>') depth--;
        if (name[i] == '(' && depth == 0) return name.substr(0, i);
    }
    return name;
}

std::vector<char> read_program() {
    std::vector<char> bytes;
    FILE *file = fopen("/proc/self/exe", "rb");
    if (file == nullptr) return bytes;
    fseek(file, 0, SEEK_END);
    bytes.resize((size_t)ftell(file));
    rewind(file);
    if (fread(bytes.data(), 1, bytes.size(), file) != bytes.size()) bytes.clear();
    fclose(file);
    return bytes;
}

void add_symbols(const std::vector<char> &bytes, uintptr_t base, std::map<uintptr_t, std::string> *names) {
    if (bytes.size() < sizeof(ElfW(Ehdr))) return;
    const ElfW(Ehdr) *header = (const ElfW(Ehdr) *)bytes.data();
    const ElfW(Shdr) *sections = (const ElfW(Shdr) *)(bytes.data() + header->e_shoff);
    for (int i = 0; i < header->e_shnum; i++) {
        if (sections[i].sh_type != SHT_SYMTAB) continue;
        const ElfW(Sym) *symbols = (const ElfW(Sym) *)(bytes.data() + sections[i].sh_offset);
        const char *texts = bytes.data() + sections[sections[i].sh_link].sh_offset;
        for (size_t k = 0; k < sections[i].sh_size / sizeof *symbols; k++)
            if ((symbols[k].st_info & 15) == STT_FUNC && symbols[k].st_value)
                (*names)[base + symbols[k].st_value] = texts + symbols[k].st_name;
    }
}

} // namespace

std::string coc_function_name(const void *function) {
    static std::map<uintptr_t, std::string> mangled;
    static std::map<const void *, std::string> known;
    if (mangled.empty()) {
        std::vector<char> bytes = read_program();
        Dl_info info;
        uintptr_t base = dladdr((const void *)&model, &info) ? (uintptr_t)info.dli_fbase : 0;
        bool fixed = bytes.size() >= sizeof(ElfW(Ehdr)) && ((const ElfW(Ehdr) *)bytes.data())->e_type == ET_EXEC;
        add_symbols(bytes, fixed ? 0 : base, &mangled);
        mangled[0] = "?";
    }
    auto found = known.find(function);
    if (found != known.end()) return found->second;
    auto symbol = mangled.find((uintptr_t)function);
    return known[function] = symbol == mangled.end() ? "?" : plain_name(symbol->second.c_str());
}

/* ---- Device memory.  Each allocation has pages of its own: red zone, bytes, red zone.  Released pages cannot be
   touched any more. */

namespace {

void hide(device_state &d) {
    if (!d.exposed || !model().hidden) return;
    if (d.top) mprotect(d.arena, d.top, PROT_NONE);
    d.exposed = false;
}

void expose(device_state &d) {
    if (d.exposed || !model().hidden) return;
    for (auto &entry : d.live) mprotect(entry.second.region, entry.second.region_bytes, PROT_READ | PROT_WRITE);
    d.exposed = true;
}

void hide_all() {
    for (device_state &d : model().devices) hide(d);
}

void expose_only(int index) {
    for (size_t i = 0; i < model().devices.size(); i++)
        if ((int)i != index) hide(model().devices[i]);
    expose(device(index));
}

void expose_all() {
    for (device_state &d : model().devices) expose(d);
}

/* The device whose address this is, -1: none. */
int device_of(const void *p) {
    for (size_t i = 0; i < model().devices.size(); i++) {
        const device_state &d = model().devices[i];
        if (d.arena && (const unsigned char *)p >= d.arena && (const unsigned char *)p < d.arena + ARENA) return (int)i;
    }
    return -1;
}

/* The living allocation with [p, p + bytes) inside it, or NULL. */
allocation *allocation_of(const void *p, size_t bytes) {
    int index = device_of(p);
    if (index < 0) return nullptr;
    std::map<uintptr_t, allocation> &live = device(index).live;
    auto after = live.upper_bound((uintptr_t)p);
    if (after == live.begin()) return nullptr;
    allocation &a = std::prev(after)->second;
    size_t offset = (size_t)((const unsigned char *)p - a.data);
    return offset <= a.size && bytes <= a.size - offset ? &a : nullptr;
}

bool is_canary(const unsigned char *p, size_t bytes) {
    static const std::vector<unsigned char> pattern(PAGE + RED_ZONE, CANARY);
    return memcmp(p, pattern.data(), bytes) == 0;
}

/* Both red zones; their bytes are restored, so that one overrun is one fault. */
void check_allocation(allocation &a, const char *when) {
    unsigned char *end = a.data + a.size, *region_end = a.region + a.region_bytes;
    if (COC_ASAN || (is_canary(a.data - RED_ZONE, RED_ZONE) && is_canary(end, (size_t)(region_end - end)))) return;
    const unsigned char *bad = a.data - RED_ZONE;
    while (*bad == CANARY && bad < a.data) bad++;
    if (bad == a.data)
        for (bad = end; *bad == CANARY;) bad++;
    coc_fault("%s: device memory overrun at byte %td of an allocation of %zu bytes", when, bad - a.data, a.size);
    memset(a.data - RED_ZONE, CANARY, RED_ZONE);
    memset(end, CANARY, (size_t)(region_end - end));
}

void check_device(device_state &d, const char *when) {
    if (COC_ASAN) return;
    expose(d);
    for (auto &entry : d.live) check_allocation(entry.second, when);
}

bool open_arena(device_state &d) {
    if (d.arena) return true;
    void *p = mmap(nullptr, ARENA, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return false;
    d.arena = (unsigned char *)p;
    coc_install_handler();
    return true;
}

void *take_memory(int index, size_t size, bool sparse) {
    device_state &d = device(index);
    size_t region_bytes = (RED_ZONE + size + RED_ZONE + PAGE - 1) / PAGE * PAGE;
    if (!sparse && (size > model().memory || d.used > model().memory - size)) return nullptr;
    if (!open_arena(d) || region_bytes > ARENA - d.top) return nullptr;
    expose(d);
    allocation a = {d.arena + d.top, d.arena + d.top + RED_ZONE, region_bytes, size, sparse, false};
    if (mprotect(a.region, region_bytes, PROT_READ | PROT_WRITE) != 0) return nullptr;
    d.top += region_bytes;
    if (!sparse) d.used += size;
    memset(a.region, CANARY, RED_ZONE);
    if (!sparse) memset(a.data, 0xFF, size);
    memset(a.data + size, CANARY, region_bytes - RED_ZONE - size);
    coc_poison(a.region, RED_ZONE);
    coc_poison(a.data + size, region_bytes - RED_ZONE - size);
    d.live[(uintptr_t)a.data] = a;
    return a.data;
}

void give_back_memory(int index, void *data) {
    device_state &d = device(index);
    auto found = d.live.find((uintptr_t)data);
    if (found == d.live.end()) return;
    allocation a = found->second;
    expose(d);
    check_allocation(a, "at its release");
    d.live.erase(found);
    d.freed[(uintptr_t)a.region] = a;
    if (!a.sparse) d.used -= a.size;
    if (!a.sparse) coc_poison(a.region, a.region_bytes);
    madvise(a.region, a.region_bytes, MADV_DONTNEED);
    mprotect(a.region, a.region_bytes, PROT_NONE);
}

bool was_freed(const device_state &d, const void *p) {
    auto after = d.freed.upper_bound((uintptr_t)p);
    if (after == d.freed.begin()) return false;
    --after;
    return (uintptr_t)p < after->first + after->second.region_bytes;
}

/* Of sparse memory only the red zones: the rest was never poisoned, and what AddressSanitizer keeps of it is large. */
void unpoison_allocation(const allocation &a) {
    unsigned char *end = a.data + a.size, *region_end = a.region + a.region_bytes;
    coc_unpoison(a.region, a.sparse ? (size_t)RED_ZONE : a.region_bytes);
    coc_unpoison(end, (size_t)(region_end - end));
}

void drop_device_memory(device_state &d) {
    if (!d.arena) return;
    for (auto &entry : d.live) unpoison_allocation(entry.second);
    for (auto &entry : d.freed) unpoison_allocation(entry.second);
    munmap(d.arena, ARENA);
    d.arena = nullptr;
    d.top = d.used = 0;
    d.exposed = false;
    d.live.clear();
    d.freed.clear();
}

} // namespace

std::string coc_describe(const void *address) {
    char text[256];
    int index = device_of(address);
    const allocation *a = index < 0 ? nullptr : allocation_of(address, 0);
    if (a != nullptr)
        snprintf(text, sizeof text, "%p, byte %td of %zu bytes of device %d", address,
                 (const unsigned char *)address - a->data, a->size, index);
    else if (index >= 0)
        snprintf(text, sizeof text, "%p, %s memory of device %d", address,
                 was_freed(device(index), address) ? "released" : "never allocated", index);
    else snprintf(text, sizeof text, "%p, not device memory", address);
    return text;
}

int coc_host_touched(const void *address) {
    std::lock_guard<coc_model_lock> guard(model().lock);
    int index = device_of(address);
    if (index < 0) return 0;
    coc_fault("the host touches device memory: %s", coc_describe(address).c_str());
    device(index).exposed = true;               /* for as long as no call hides it again */
    return mprotect((void *)((uintptr_t)address / PAGE * PAGE), PAGE, PROT_READ | PROT_WRITE) == 0;
}

void coc_check_red_zones() {
    std::lock_guard<coc_model_lock> guard(model().lock);
    for (device_state &d : model().devices) check_device(d, "on demand");
    for (auto &entry : model().pinned)
        if (!COC_ASAN && !is_canary((unsigned char *)entry.first + entry.second.size, RED_ZONE))
            coc_fault("on demand: pinned memory of %zu bytes overrun", entry.second.size);
    hide_all();
}

void *coc_sparse_alloc(size_t bytes) {
    std::lock_guard<coc_model_lock> guard(model().lock);
    void *p = take_memory(current_device, bytes, true);
    hide_all();
    return p;
}

/* ---- Running what streams hold.  Work that waits for another GPU returns cudaErrorNotReady, and is tried again. */

namespace {

bool run_up_to(const stream_ref &stream, uint64_t sequence);

/* Whether it has run. */
bool run_front(const stream_ref &stream) {
    for (const point &p : stream->queue.front().after)
        if (!run_up_to(p.stream, p.sequence)) return false;
    operation op = std::move(stream->queue.front());
    device_state &d = device(op.device);
    model().clock = std::max(model().clock, op.submitted);  /* the GPU had nothing to do until then */
    if (d.sticky == cudaSuccess && op.run) {
        cudaError_t error = op.run();
        if (error == cudaErrorNotReady) {
            stream->queue.front() = std::move(op);
            return false;
        }
        if (error != cudaSuccess && d.sticky == cudaSuccess) d.sticky = error;
    }
    stream->queue.pop_front();
    stream->done++;
    return true;
}

/* Whether all of it has run. */
bool run_up_to(const stream_ref &stream, uint64_t sequence) {
    while (stream->done < sequence && !stream->queue.empty())
        if (!run_front(stream)) return false;
    return true;
}

/* Lets other threads, and other processes, go on. */
void pause_briefly() {
    model().lock.unlock();
    usleep(100);
    model().lock.lock();
}

std::vector<stream_ref> all_streams(int index) {
    std::vector<stream_ref> streams = {device(index).legacy};
    for (auto &entry : model().streams)
        if (entry.second->device == index) streams.push_back(entry.second);
    for (auto &stream : model().retired)
        if (stream->device == index) streams.push_back(stream);
    return streams;
}

bool may_run(const operation &op) {
    for (const point &p : op.after)
        if (p.stream->done < p.sequence) return false;
    return true;
}

/* Everything that may run without this stream. */
void run_others(const CUstream_st *stream) {
    for (bool again = true; again;) {
        again = false;
        for (auto &other : all_streams(stream->device)) {
            if (other.get() == stream || other->queue.empty() || !may_run(other->queue.front())) continue;
            again |= run_front(other);
        }
    }
}

/* Whether a stream's work up to a point is done: it may be now, since the host asks. */
bool is_done(const stream_ref &stream, uint64_t sequence) {
    if (stream->done >= sequence) return true;
    if (model().schedule == COC_OTHERS_FIRST) run_others(stream.get());
    if (!run_up_to(stream, sequence)) return false;
    model().host_clock = std::max(model().host_clock, model().clock);
    return true;
}
/* The host waits for it. */
void wait_until(const stream_ref &stream, uint64_t sequence) {
    while (!is_done(stream, sequence)) pause_briefly();
}

void wait_for_device(int index) {
    std::vector<stream_ref> streams = all_streams(index);
    std::reverse(streams.begin(), streams.end());
    for (auto &stream : streams)
        while (!run_up_to(stream, stream->queued)) pause_briefly();
    std::vector<stream_ref> left;
    for (auto &stream : model().retired)
        if (!stream->queue.empty()) left.push_back(stream);
    model().retired = left;
}

/* ---- Calls */

enum {
    SYNCHRONISES = 1,           /* waits for the GPU */
    ALLOCATES = 2, FREES = 4,
    NOT_IN_CAPTURE = 8,         /* "unsafe" while a stream is captured */
    AFTER_LOSS = 16,            /* works, or says so, on a lost device */
    NEVER_FAILS = 32,
    NO_CONTEXT = 64             /* needs none; other calls make the current device's */
};

void invalidate_captures() {
    for (auto &c : model().captures) c->invalid = true;
}

bool capture_forbids() {
    if (thread_mode == cudaStreamCaptureModeRelaxed) return false;
    for (auto &c : model().captures) {
        bool own = c->thread == std::this_thread::get_id();
        if (own && c->mode != cudaStreamCaptureModeRelaxed) return true;
        if (!own && thread_mode == cudaStreamCaptureModeGlobal && c->mode == cudaStreamCaptureModeGlobal) return true;
    }
    return false;
}

/* One call of the runtime: counts it, lets it fail if it shall, and hides device memory at its end. */
struct api_call {
    std::lock_guard<coc_model_lock> guard;
    const char *name;
    cudaError_t error = cudaSuccess;

    api_call(const char *function, unsigned traits) : guard(model().lock), name(function) {
        model_state &m = model();
        if (m.yielding) pause_briefly();
        coc_check_locks(function);
        m.counts.calls++;
        m.calls[function]++;
        if (traits & SYNCHRONISES) synchronises();
        if (traits & ALLOCATES) m.counts.allocations++;
        if (traits & FREES) m.counts.frees++;
        if (!(traits & NO_CONTEXT) && current_device < m.device_count) device(current_device).context = true;
        if (traits & NEVER_FAILS) return;
        if (m.fail_in > 0 && (m.fail_function.empty() || m.fail_function == function) && --m.fail_in == 0) {
            if (m.fail_sticky) device(current_device).sticky = m.fail_error;
            error = m.fail_error;
        } else if (!(traits & AFTER_LOSS) && device(current_device).sticky != cudaSuccess) {
            error = device(current_device).sticky;
        } else if (traits & NOT_IN_CAPTURE && capture_forbids()) {
            invalidate_captures();
            error = cudaErrorStreamCaptureUnsupported;
        }
        if (error != cudaSuccess) last_error = error;
    }
    ~api_call() { hide_all(); }
    void synchronises() {
        model().counts.synchronising++;
        model().synchronising[name]++;
    }
    cudaError_t done(cudaError_t result) {
        if (result != cudaSuccess && result != cudaErrorNotReady) last_error = result;
        return result;
    }
    /* The end of a call that waited: what the work before it did shows here. */
    cudaError_t waited() { return done(device(current_device).sticky); }
};
#define COC_CALL(traits) \
    api_call call(__func__, traits); \
    if (call.error != cudaSuccess) return call.error

/* ---- Putting work into streams */

stream_ref stream_of(cudaStream_t handle) {
    if (handle == nullptr || handle == cudaStreamLegacy) return device(current_device).legacy;
    auto found = model().streams.find(handle);
    return found == model().streams.end() ? nullptr : found->second;
}

/* A legacy stream's work comes after that of all blocking streams, and theirs after its. */
void add_legacy_order(const stream_ref &stream, std::vector<point> *after) {
    if (stream->flags & cudaStreamNonBlocking) return;
    if (!stream->legacy) {
        const stream_ref &legacy = device(stream->device).legacy;
        after->push_back({legacy, legacy->queued});
        return;
    }
    for (auto &other : all_streams(stream->device))
        if (!other->legacy && !(other->flags & cudaStreamNonBlocking)) after->push_back({other, other->queued});
}

cudaError_t add_node(const stream_ref &stream, std::function<cudaError_t()> run, const std::string &kernel) {
    capture &c = *stream->capturing;
    if (c.invalid) return cudaErrorStreamCaptureInvalidated;
    c.graph->nodes.push_back({run, stream->capture_last, stream->device, kernel});
    stream->capture_last = {(int)c.graph->nodes.size() - 1};
    return cudaSuccess;
}

/* Puts an operation into a stream, or into the graph that is captured from it. */
cudaError_t put(const stream_ref &stream, std::function<cudaError_t()> run,
                std::vector<point> after = {}, const std::string &kernel = "") {
    if (stream->capturing) return add_node(stream, run, kernel);
    if (stream->legacy)
        for (auto &other : all_streams(stream->device))
            if (other->capturing && !(other->flags & cudaStreamNonBlocking)) {
                other->capturing->invalid = true;
                return cudaErrorStreamCaptureImplicit;
            }
    add_legacy_order(stream, &after);
    if (!kernel.empty()) model().kernels[kernel]++;
    model().host_clock += model().launch_time;
    stream->queue.push_back({run, after, stream->device, model().host_clock});
    stream->queued++;
    stream->queries = 0;
    if (model().schedule == COC_EAGER) (void)run_up_to(stream, stream->queued);
    return cudaSuccess;
}

} // namespace

/* ---- Kernels */

namespace {

/* Shared memory that a block may ask for (CUDA C++ Programming Guide, technical specifications per compute capability),
   less the system's kilobyte from 80 on. */
size_t shared_optin() {
    int c = model().capability;
    int kilobytes = c < 75 ? 96 : c == 75 ? 64 : c == 86 || c == 89 || c >= 120 ? 99 : c < 90 ? 163 : 227;
    return (size_t)kilobytes * 1024;
}

bool image_runs() {
    return model().letter ? model().image == model().capability : model().image <= model().capability;
}

bool pointer_is_usable(const void *p, int index) {
    if (p == nullptr || !model().pointer_check) return true;
    if (device_of(p) == index) return true;
    auto after = model().pinned.upper_bound((void *)p);
    if (after == model().pinned.begin()) return false;
    --after;
    return (const char *)p <= (const char *)after->first + after->second.size;
}

cudaError_t check_launch(coc_call *work, dim3 grid, dim3 block, size_t shared, const stream_ref &stream,
                         size_t *shared_most, const char *name) {
    if (!stream || stream->device != current_device) return cudaErrorInvalidResourceHandle;
    if (!image_runs()) return cudaErrorNoKernelImageForDevice;
    uint64_t threads = (uint64_t)block.x * block.y * block.z, blocks = (uint64_t)grid.x * grid.y * grid.z;
    if (threads == 0 || blocks == 0 || block.x > 1024 || block.y > 1024 || block.z > 64 || threads > 1024)
        return cudaErrorInvalidConfiguration;
    if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) return cudaErrorInvalidConfiguration;
    device_state &d = device(current_device);
    auto limit = d.shared_limit.find(work->kernel());
    size_t dynamic_most = limit == d.shared_limit.end() ? (size_t)COC_SHARED_DEFAULT : (size_t)limit->second;
    if (shared > dynamic_most) return cudaErrorInvalidValue;
    *shared_most = dynamic_most > COC_SHARED_DEFAULT ? shared_optin() : (size_t)COC_SHARED_DEFAULT;
    if (blocks > (uint64_t)1 << 26) {
        coc_fault("kernel %s: %llu blocks are more than a CPU can run", name, (unsigned long long)blocks);
        return cudaErrorInvalidConfiguration;
    }
    std::vector<const void *> pointers;
    work->pointers(&pointers);
    for (const void *p : pointers)
        if (!pointer_is_usable(p, current_device)) {
            coc_fault("kernel %s: a pointer argument is not memory of device %d: %s", name, current_device,
                      coc_describe(p).c_str());
            return d.sticky = cudaErrorIllegalAddress;
        }
    return cudaSuccess;
}

cudaError_t run_kernel(const coc_grid &grid, int index) {
    expose_only(index);
    cudaError_t error = coc_run_grid(&grid);
    char when[512];
    snprintf(when, sizeof when, "kernel %s", grid.name);
    check_device(device(index), when);
    coc_pass_time(5e-6);
    return error;
}

} // namespace

cudaError_t coc_launch(coc_call *work, dim3 grid, dim3 block, size_t shared, cudaStream_t handle) {
    std::shared_ptr<coc_call> owned(work);
    api_call call("cudaLaunchKernel", 0);
    if (call.error != cudaSuccess) return call.error;
    model().counts.launches++;
    stream_ref stream = stream_of(handle);
    std::string name = coc_function_name(work->kernel());
    size_t shared_most = 0;
    cudaError_t error = check_launch(work, grid, block, shared, stream, &shared_most, name.c_str());
    if (error != cudaSuccess) return call.done(error);
    int index = stream->device;
    return call.done(put(stream, [=] {
        coc_grid what = {grid, block, shared, shared_most, owned.get(), name.c_str(), index};
        return run_kernel(what, index);
    }, {}, name));
}

/* ---- Errors */

cudaError_t cudaGetLastError(void) {
    api_call call(__func__, NEVER_FAILS | NO_CONTEXT);
    cudaError_t error = device(current_device).sticky;
    if (error == cudaSuccess) error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void) {
    api_call call(__func__, NEVER_FAILS | NO_CONTEXT);
    cudaError_t error = device(current_device).sticky;
    return error == cudaSuccess ? last_error : error;
}

#define COC_ERROR_NAME(name, value, text) case name: return #name;
#define COC_ERROR_TEXT(name, value, text) case name: return text;
#define COC_ERROR_SAME(name, value, text) static_assert((int)name == value, "CUDA's number of " #name);
COC_ERRORS(COC_ERROR_SAME)
const char *cudaGetErrorName(cudaError_t error) {
    switch (error) { COC_ERRORS(COC_ERROR_NAME) default: return "unrecognized error code"; }
}
const char *cudaGetErrorString(cudaError_t error) {
    switch (error) { COC_ERRORS(COC_ERROR_TEXT) default: return "unrecognized error code"; }
}

/* ---- Devices */

cudaError_t cudaGetDeviceCount(int *count) {
    COC_CALL(AFTER_LOSS | NO_CONTEXT);
    *count = model().device_count;
    return call.done(*count ? cudaSuccess : cudaErrorNoDevice);
}

cudaError_t cudaSetDevice(int index) {
    COC_CALL(AFTER_LOSS | NO_CONTEXT);
    if (index < 0 || index >= model().device_count) return call.done(cudaErrorInvalidDevice);
    current_device = index;
    if (CUDART_VERSION >= 12000) device(index).context = true;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *index) {
    COC_CALL(AFTER_LOSS | NO_CONTEXT);
    *index = current_device;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *prop, int index) {
    COC_CALL(NO_CONTEXT);
    const model_state &m = model();
    if (index < 0 || index >= m.device_count) return call.done(cudaErrorInvalidDevice);
    memset(prop, 0, sizeof *prop);
    snprintf(prop->name, sizeof prop->name, "model");
    prop->totalGlobalMem = m.memory;
    prop->sharedMemPerBlock = COC_SHARED_DEFAULT;
    prop->regsPerBlock = prop->regsPerMultiprocessor = 65536;
    prop->warpSize = 32;
    prop->maxThreadsPerBlock = prop->maxThreadsDim[0] = prop->maxThreadsDim[1] = 1024;
    prop->maxThreadsDim[2] = 64;
    prop->maxGridSize[0] = 0x7fffffff;
    prop->maxGridSize[1] = prop->maxGridSize[2] = 65535;
    prop->totalConstMem = 65536;
    prop->major = m.capability / 10;
    prop->minor = m.capability % 10;
    prop->multiProcessorCount = m.multiprocessors;
    prop->canMapHostMemory = prop->concurrentKernels = prop->unifiedAddressing = 1;
#if CUDART_VERSION >= 12000
    prop->memoryPoolsSupported = m.pools;
#endif
    prop->asyncEngineCount = 2;
    prop->memoryBusWidth = 5120;
    prop->l2CacheSize = 50 << 20;
    prop->maxThreadsPerMultiProcessor = 2048;
    prop->maxBlocksPerMultiProcessor = 32;
    prop->sharedMemPerMultiprocessor = 228 * 1024;
    prop->sharedMemPerBlockOptin = shared_optin();
    prop->reservedSharedMemPerBlock = 1024;
    prop->pciBusID = index + 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int index) {
    COC_CALL(NO_CONTEXT);
    const model_state &m = model();
    if (index < 0 || index >= m.device_count) return call.done(cudaErrorInvalidDevice);
    switch ((int)attribute) {
        case cudaDevAttrMaxThreadsPerBlock:
        case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *value = 1024; break;
        case cudaDevAttrMaxBlockDimZ: *value = 64; break;
        case cudaDevAttrMaxGridDimX: *value = 0x7fffffff; break;
        case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = 65535; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = COC_SHARED_DEFAULT; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)shared_optin(); break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 228 * 1024; break;
        case cudaDevAttrTotalConstantMemory: case cudaDevAttrMaxRegistersPerBlock:
        case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
        case cudaDevAttrWarpSize: *value = 32; break;
        case cudaDevAttrClockRate: *value = 1980000; break;
        case cudaDevAttrMemoryClockRate: *value = 3201000; break;
        case cudaDevAttrGlobalMemoryBusWidth: *value = 6144; break;
        case cudaDevAttrMultiProcessorCount: *value = m.multiprocessors; break;
        case cudaDevAttrIntegrated: case cudaDevAttrEccEnabled: *value = 0; break;
        case cudaDevAttrCanMapHostMemory: case cudaDevAttrConcurrentKernels: case cudaDevAttrUnifiedAddressing:
            *value = 1;
            break;
        case cudaDevAttrMemoryPoolsSupported: *value = m.pools; break;
        case cudaDevAttrL2CacheSize: *value = 50 << 20; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
        case cudaDevAttrAsyncEngineCount: *value = 2; break;
        case cudaDevAttrComputeCapabilityMajor: *value = m.capability / 10; break;
        case cudaDevAttrComputeCapabilityMinor: *value = m.capability % 10; break;
        default: return call.done(cudaErrorInvalidValue);
    }
    return cudaSuccess;
}

/* ---- The driver's functions that are asked for by name */

static int context_state(int index, unsigned *flags, int *active) {
    std::lock_guard<coc_model_lock> guard(model().lock);
    if (index < 0 || index >= model().device_count) return 101;         /* CUDA_ERROR_INVALID_DEVICE */
    *flags = 0;
    *active = device(index).context;
    return 0;
}

/* A tensor map as its arguments describe it, in cuda.h's order. */
struct tiled_tensor {
    int type;
    unsigned rank;
    const void *address;
    const uint64_t *size, *stride;
    const unsigned *box, *step;
    int interleave, swizzle, promotion, fill;
};

/* Bytes of a number of a CUtensorMapDataType, 0: none; numbers of less than a byte are not modelled. */
static unsigned tensor_bytes(int type) {
    static const unsigned char bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
    return type >= 0 && type < (int)sizeof bytes ? bytes[type] : 0;
}

/* What cuda.h asks of cuTensorMapEncodeTiled. */
static bool driver_takes(const void *map, const tiled_tensor &t) {
    const unsigned bytes = tensor_bytes(t.type), inside[] = {256 * 8, 32, 64, 128, 128, 128, 128};
    if (map == nullptr || ((uintptr_t)map & 63) != 0 || bytes == 0 || t.rank < 1 || t.rank > 5) return false;
    if (t.address == nullptr || ((uintptr_t)t.address & 15) != 0) return false;
    for (unsigned d = 0; d < t.rank; d++) {
        if (t.size[d] == 0 || t.size[d] > (uint64_t)1 << 32 || t.box[d] == 0 || t.box[d] > 256) return false;
        if (t.step[d] == 0 || t.step[d] > 8) return false;
        if (d + 1 < t.rank && (t.stride[d] % 16 != 0 || t.stride[d] >= (uint64_t)1 << 40)) return false;
    }
    if (t.interleave < 0 || t.interleave > 2 || t.swizzle < 0 || t.swizzle > 6 || t.promotion < 0 || t.promotion > 3) return false;
    if (t.fill < 0 || t.fill > 1 || (t.interleave != 0 && t.rank < 3) || (t.interleave == 2 && t.swizzle != 1)) return false;
    return t.interleave != 0 || (t.box[0] * bytes % 16 == 0 && t.box[0] * bytes <= inside[t.swizzle]);
}

/* The model has boxes of neighbouring numbers, swizzled in spans of 128 bytes or not at all, and zeros outside. */
static int encode_tiled(void *map, int type, unsigned rank, void *address, const uint64_t *size, const uint64_t *stride,
                        const unsigned *box, const unsigned *step, int interleave, int swizzle, int promotion, int fill) {
    const cudaError_t before = last_error;      /* which is the runtime's */
    const tiled_tensor t = {type, rank, address, size, stride, box, step, interleave, swizzle, promotion, fill};
    coc_tensor_map made = {};
    api_call call("cuTensorMapEncodeTiled", NO_CONTEXT);
    last_error = before;
    if (call.error != cudaSuccess || !driver_takes(map, t)) return 1;   /* CUDA_ERROR_INVALID_VALUE */
    bool plain = interleave == 0 && (swizzle == 0 || swizzle == 3) && fill == 0;
    made.magic = COC_TENSOR_MAP;
    made.data = (unsigned char *)address;
    made.rank = (uint8_t)rank;
    made.bytes = (uint8_t)tensor_bytes(type);
    made.swizzled = swizzle == 3;
    made.device = (int8_t)(device_of(address) < 0 ? current_device : device_of(address));
    for (unsigned d = 0; d < rank; d++) {
        plain = plain && step[d] == 1;
        made.size[d] = size[d];
        made.box[d] = (uint16_t)box[d];
        if (d + 1 < rank) made.stride[d] = stride[d];
    }
    if (!plain) coc_fault("cuTensorMapEncodeTiled: the model has no such map");
    memset(map, 0, 128);
    if (plain) memcpy(map, &made, sizeof made);
    return 0;
}

#if CUDART_VERSION >= 12050
cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version, unsigned long long,
                                             enum cudaDriverEntryPointQueryResult *result) {
#elif CUDART_VERSION >= 12000
cudaError_t cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long,
                                    enum cudaDriverEntryPointQueryResult *result) {
    const unsigned version = CUDART_VERSION;
#else
cudaError_t cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long) {
    const unsigned version = CUDART_VERSION;
    const int cudaDriverEntryPointSuccess = 0, cudaDriverEntryPointSymbolNotFound = 1, cudaDriverEntryPointVersionNotSufficent = 2;
    int found, *result = &found;
#endif
    static const struct { const char *name; void *function; unsigned since; } known[] = {
        {"cuDevicePrimaryCtxGetState", (void *)context_state, 7000}, {"cuTensorMapEncodeTiled", (void *)encode_tiled, 12000},
    };
    COC_CALL(NO_CONTEXT);
    *function = nullptr;
    *result = cudaDriverEntryPointSymbolNotFound;
    for (const auto &k : known) {
        if (strcmp(symbol, k.name) != 0 || k.since > (unsigned)model().driver) continue;
        *result = version < k.since ? cudaDriverEntryPointVersionNotSufficent : cudaDriverEntryPointSuccess;
        if (version >= k.since) *function = k.function;
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int index) {
    COC_CALL(NO_CONTEXT);
    if (index < 0 || index >= model().device_count) return call.done(cudaErrorInvalidDevice);
    if (size < 13) return call.done(cudaErrorInvalidValue);
    snprintf(text, (size_t)size, "0000:%02X:00.0", index + 1);
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) {
    COC_CALL(SYNCHRONISES | NOT_IN_CAPTURE);
    wait_for_device(current_device);
    return call.waited();
}

cudaError_t cudaDeviceReset(void) {
    api_call call(__func__, SYNCHRONISES | NEVER_FAILS);
    model_state &m = model();
    int index = current_device;
    for (auto &stream : all_streams(index)) stream->queue.clear();
    for (auto it = m.streams.begin(); it != m.streams.end();)
        it = it->second->device == index ? m.streams.erase(it) : std::next(it);
    for (auto it = m.events.begin(); it != m.events.end();)
        it = it->second->device == index ? m.events.erase(it) : std::next(it);
    drop_device_memory(device(index));
    device(index) = device_state();
    m.scratch.clear();
    m.retired.clear();
    m.captures.clear();
    last_error = cudaSuccess;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
    COC_CALL(AFTER_LOSS | NO_CONTEXT);
    *version = model().driver;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    COC_CALL(AFTER_LOSS | NO_CONTEXT);
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    COC_CALL(0);
    *total = model().memory;
    *free = model().memory - device(current_device).used;
    return cudaSuccess;
}

/* ---- Memory */

cudaError_t cudaMalloc(void **pointer, size_t size) {
    COC_CALL(ALLOCATES | NOT_IN_CAPTURE);
    if (pointer == nullptr) return call.done(cudaErrorInvalidValue);
    *pointer = nullptr;
    if (size == 0) return cudaSuccess;
    *pointer = take_memory(current_device, size, false);
    return call.done(*pointer ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaMallocAsync(void **pointer, size_t size, cudaStream_t handle) {
    COC_CALL(ALLOCATES | NOT_IN_CAPTURE);
    if (pointer == nullptr) return call.done(cudaErrorInvalidValue);
    if (!stream_of(handle)) return call.done(cudaErrorInvalidResourceHandle);
    if (!model().pools) return call.done(cudaErrorNotSupported);
    *pointer = size ? take_memory(current_device, size, false) : nullptr;
    return call.done(*pointer || size == 0 ? cudaSuccess : cudaErrorMemoryAllocation);
}

namespace {
/* The allocation that starts here, or NULL with a fault if it was one and is not any more. */
allocation *allocation_at(void *pointer, const char *function) {
    allocation *a = allocation_of(pointer, 0);
    if (a != nullptr && a->data == pointer && !a->freeing) return a;
    int index = device_of(pointer);
    if ((a != nullptr && a->freeing) || (a == nullptr && index >= 0 && was_freed(device(index), pointer)))
        coc_fault("%s: released twice: %p", function, pointer);
    return nullptr;
}
} // namespace

cudaError_t cudaFree(void *pointer) {
    COC_CALL(FREES | (pointer ? SYNCHRONISES : 0) | NOT_IN_CAPTURE);
    if (pointer == nullptr) return cudaSuccess;
    if (allocation_at(pointer, __func__) == nullptr) return call.done(cudaErrorInvalidValue);
    int index = device_of(pointer);
    wait_for_device(index);
    give_back_memory(index, pointer);
    return call.waited();
}

cudaError_t cudaFreeAsync(void *pointer, cudaStream_t handle) {
    COC_CALL(FREES);
    if (pointer == nullptr) return cudaSuccess;
    stream_ref stream = stream_of(handle);
    if (!stream) return call.done(cudaErrorInvalidResourceHandle);
    allocation *a = allocation_at(pointer, __func__);
    if (a == nullptr || stream->capturing) return call.done(cudaErrorInvalidValue);
    a->freeing = true;
    int index = device_of(pointer);
    return call.done(put(stream, [=] {
        give_back_memory(index, pointer);
        return cudaSuccess;
    }));
}

namespace {
cudaError_t take_pinned(void **pointer, size_t size) {
    *pointer = nullptr;
    if (size == 0) return cudaSuccess;
    void *p = nullptr;
    if (posix_memalign(&p, PAGE, size + (COC_ASAN ? 0 : RED_ZONE)) != 0) return cudaErrorMemoryAllocation;
    memset(p, 0xFF, size);
    if (!COC_ASAN) memset((unsigned char *)p + size, CANARY, RED_ZONE);
    model().pinned[p] = {size, (unsigned char *)p};
    *pointer = p;
    return cudaSuccess;
}
} // namespace

cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned int) {
    COC_CALL(ALLOCATES | NOT_IN_CAPTURE);
    return call.done(take_pinned(pointer, size));
}

cudaError_t cudaMallocHost(void **pointer, size_t size) {
    COC_CALL(ALLOCATES | NOT_IN_CAPTURE);
    return call.done(take_pinned(pointer, size));
}

cudaError_t cudaFreeHost(void *pointer) {
    COC_CALL(FREES | (pointer ? SYNCHRONISES : 0) | NOT_IN_CAPTURE);
    if (pointer == nullptr) return cudaSuccess;
    auto found = model().pinned.find(pointer);
    if (found == model().pinned.end()) return call.done(cudaErrorInvalidValue);
    for (int i = 0; i < model().device_count; i++) wait_for_device(i);
    if (!COC_ASAN && !is_canary((unsigned char *)pointer + found->second.size, RED_ZONE))
        coc_fault("at its release: pinned memory of %zu bytes overrun", found->second.size);
    model().pinned.erase(found);
    free(pointer);
    return call.waited();
}

namespace {

enum place { PLACE_PAGEABLE, PLACE_PINNED, PLACE_DEVICE, PLACE_OUTSIDE };

/* Where [p, p + bytes) lies; OUTSIDE: it begins in memory of the GPU's or pinned memory, but is not inside it. */
place place_of(const void *p, size_t bytes) {
    if (device_of(p) >= 0) return allocation_of(p, bytes) ? PLACE_DEVICE : PLACE_OUTSIDE;
    auto after = model().pinned.upper_bound((void *)p);
    if (after == model().pinned.begin()) return PLACE_PAGEABLE;
    --after;
    size_t offset = (size_t)((const char *)p - (const char *)after->first);
    if (offset >= after->second.size) return PLACE_PAGEABLE;
    return bytes <= after->second.size - offset ? PLACE_PINNED : PLACE_OUTSIDE;
}

cudaError_t check_copy(const void *dst, const void *src, size_t count, cudaMemcpyKind kind, place *to, place *from) {
    if (count && (dst == nullptr || src == nullptr)) return cudaErrorInvalidValue;
    *to = place_of(dst, count);
    *from = place_of(src, count);
    if (*to == PLACE_OUTSIDE || *from == PLACE_OUTSIDE) return cudaErrorInvalidValue;
    bool to_device = *to == PLACE_DEVICE, from_device = *from == PLACE_DEVICE;
    switch (kind) {
        case cudaMemcpyHostToHost: return to_device || from_device ? cudaErrorInvalidValue : cudaSuccess;
        case cudaMemcpyHostToDevice: return !to_device || from_device ? cudaErrorInvalidValue : cudaSuccess;
        case cudaMemcpyDeviceToHost: return to_device || !from_device ? cudaErrorInvalidValue : cudaSuccess;
        case cudaMemcpyDeviceToDevice: return !to_device || !from_device ? cudaErrorInvalidValue : cudaSuccess;
        case cudaMemcpyDefault: return cudaSuccess;
        default: return cudaErrorInvalidMemcpyDirection;
    }
}

std::function<cudaError_t()> copier(void *dst, const void *src, size_t count) {
    return [=] {
        expose_all();
        if (place_of(dst, count) == PLACE_OUTSIDE || place_of(src, count) == PLACE_OUTSIDE) {
            coc_fault("a copy runs after its memory was released: %s to %s", coc_describe(src).c_str(),
                      coc_describe(dst).c_str());
            return cudaErrorIllegalAddress;
        }
        memmove(dst, src, count);
        return cudaSuccess;
    };
}

} // namespace

cudaError_t cudaMemcpy(void *dst, const void *src, size_t count, enum cudaMemcpyKind kind) {
    COC_CALL(SYNCHRONISES);
    place to, from;
    cudaError_t error = check_copy(dst, src, count, kind, &to, &from);
    if (error != cudaSuccess || count == 0) return call.done(error);
    model().counts.copies++;
    const stream_ref &legacy = device(current_device).legacy;
    error = put(legacy, copier(dst, src, count));
    if (error != cudaSuccess) return call.done(error);
    if (to == PLACE_DEVICE && from == PLACE_DEVICE) return cudaSuccess;     /* the host does not wait for these */
    wait_until(legacy, legacy->queued);
    return call.waited();
}

/* Pinned memory is read and written when the copy runs.  A pageable copy may wait for the stream, and here does. */
cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t count, enum cudaMemcpyKind kind, cudaStream_t handle) {
    COC_CALL(0);
    place to, from;
    stream_ref stream = stream_of(handle);
    if (!stream) return call.done(cudaErrorInvalidResourceHandle);
    cudaError_t error = check_copy(dst, src, count, kind, &to, &from);
    if (error != cudaSuccess || count == 0) return call.done(error);
    model().counts.copies++;
    error = put(stream, copier(dst, src, count));
    bool pageable = to == PLACE_PAGEABLE || from == PLACE_PAGEABLE;
    if (error != cudaSuccess || stream->capturing || !pageable) return call.done(error);
    call.synchronises();
    wait_until(stream, stream->queued);
    return call.waited();
}

namespace {
cudaError_t put_fill(const stream_ref &stream, void *pointer, int value, size_t count) {
    if (!stream) return cudaErrorInvalidResourceHandle;
    place where = place_of(pointer, count);
    if (where != PLACE_DEVICE && where != PLACE_PINNED) return count || pointer ? cudaErrorInvalidValue : cudaSuccess;
    model().counts.fills++;
    return put(stream, [=] {
        expose_all();
        if (place_of(pointer, count) == PLACE_OUTSIDE) {
            coc_fault("a fill runs after its memory was released: %s", coc_describe(pointer).c_str());
            return cudaErrorIllegalAddress;
        }
        memset(pointer, value, count);
        return cudaSuccess;
    });
}
} // namespace

cudaError_t cudaMemset(void *pointer, int value, size_t count) {
    COC_CALL(0);
    return call.done(put_fill(stream_of(nullptr), pointer, value, count));
}

cudaError_t cudaMemsetAsync(void *pointer, int value, size_t count, cudaStream_t handle) {
    COC_CALL(0);
    return call.done(put_fill(stream_of(handle), pointer, value, count));
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    COC_CALL(0);
    memset(attributes, 0, sizeof *attributes);
    place where = place_of(pointer, 0);
    attributes->type = where == PLACE_DEVICE ? cudaMemoryTypeDevice
                       : where == PLACE_PINNED ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    attributes->device = where == PLACE_DEVICE ? device_of(pointer) : where == PLACE_PINNED ? current_device : -2;
    if (where == PLACE_DEVICE || where == PLACE_PINNED) attributes->devicePointer = (void *)pointer;
    if (where != PLACE_DEVICE) attributes->hostPointer = (void *)pointer;
    return cudaSuccess;
}

/* ---- Streams */

namespace {
/* The handle of the stream that was destroyed last, or a new one. */
cudaStream_t take_handle() {
    model_state &m = model();
    if (m.free_handles.empty()) {
        m.handle_places.push_back(0);
        return (cudaStream_t)(void *)&m.handle_places.back();
    }
    cudaStream_t handle = m.free_handles.back();
    m.free_handles.pop_back();
    return handle;
}
cudaError_t make_stream(cudaStream_t *handle, unsigned flags) {
    if (handle == nullptr || (flags & ~(unsigned)cudaStreamNonBlocking)) return cudaErrorInvalidValue;
    stream_ref stream = std::make_shared<CUstream_st>();
    stream->device = current_device;
    stream->flags = flags;
    (void)device(current_device);
    *handle = take_handle();
    model().streams[*handle] = stream;
    return cudaSuccess;
}
} // namespace

cudaError_t cudaStreamCreate(cudaStream_t *handle) {
    COC_CALL(0);
    return call.done(make_stream(handle, 0));
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *handle, unsigned int flags) {
    COC_CALL(0);
    return call.done(make_stream(handle, flags));
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *handle, unsigned int flags, int) {
    COC_CALL(0);
    return call.done(make_stream(handle, flags));
}

cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned int *flags) {
    COC_CALL(0);
    stream_ref stream = stream_of(handle);
    if (!stream) return call.done(cudaErrorInvalidResourceHandle);
    *flags = stream->flags;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    COC_CALL(0);
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

/* The call returns at once; work that is left runs when something waits for it. */
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    COC_CALL(0);
    stream_ref stream = stream_of(handle);
    if (!stream || stream->legacy) return call.done(cudaErrorInvalidResourceHandle);
    if (!stream->queue.empty()) model().retired.push_back(stream);
    if (stream->capturing) stream->capturing->invalid = true;
    model().streams.erase(handle);
    model().free_handles.push_back(handle);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    COC_CALL(SYNCHRONISES);
    stream_ref stream = stream_of(handle);
    if (!stream) return call.done(cudaErrorInvalidResourceHandle);
    if (stream->capturing) {
        stream->capturing->invalid = true;
        return call.done(cudaErrorStreamCaptureUnsupported);
    }
    wait_until(stream, stream->queued);
    return call.done(device(stream->device).sticky);
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
    COC_CALL(0);
    stream_ref stream = stream_of(handle);
    if (!stream) return call.done(cudaErrorInvalidResourceHandle);
    if (stream->capturing) {
        stream->capturing->invalid = true;
        return call.done(cudaErrorStreamCaptureUnsupported);
    }
    if (stream->done < stream->queued && stream->queries++ < model().patience) return cudaErrorNotReady;
    return is_done(stream, stream->queued) ? call.waited() : cudaErrorNotReady;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned int) {
    COC_CALL(0);
    stream_ref stream = stream_of(handle);
    auto found = model().events.find(event);
    if (!stream || found == model().events.end()) return call.done(cudaErrorInvalidResourceHandle);
    std::shared_ptr<event_record> record = found->second->last;
    if (!record) return cudaSuccess;            /* never recorded: nothing to wait for */
    if (!record->captured) {
        if (stream->capturing) {
            stream->capturing->invalid = true;
            return call.done(cudaErrorStreamCaptureIsolation);
        }
        return call.done(put(stream, nullptr, {record->at}));
    }
    if (stream->legacy) return call.done(cudaErrorStreamCaptureImplicit);
    if (stream->capturing && stream->capturing != record->captured) return call.done(cudaErrorStreamCaptureIsolation);
    stream->capturing = record->captured;
    stream->capture_last.insert(stream->capture_last.end(), record->nodes.begin(), record->nodes.end());
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void *user) {
    COC_CALL(0);
    stream_ref stream = stream_of(handle);
    if (!stream) return call.done(cudaErrorInvalidResourceHandle);
    return call.done(put(stream, [=] {
        hide_all();
        function(user);
        return cudaSuccess;
    }));
}

/* ---- Events */

namespace {
cudaError_t make_event(cudaEvent_t *handle, unsigned flags) {
    if (handle == nullptr) return cudaErrorInvalidValue;
    std::shared_ptr<CUevent_st> event = std::make_shared<CUevent_st>();
    event->device = current_device;
    event->flags = flags;
    model().events[event.get()] = event;
    model().counts.timed_events += !(flags & cudaEventDisableTiming);
    *handle = event.get();
    return cudaSuccess;
}
} // namespace

cudaError_t cudaEventCreate(cudaEvent_t *handle) {
    COC_CALL(0);
    return call.done(make_event(handle, 0));
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *handle, unsigned int flags) {
    COC_CALL(0);
    return call.done(make_event(handle, flags));
}

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
    COC_CALL(0);
    return call.done(model().events.erase(handle) ? cudaSuccess : cudaErrorInvalidResourceHandle);
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle) {
    COC_CALL(0);
    stream_ref stream = stream_of(stream_handle);
    auto found = model().events.find(handle);
    if (!stream || found == model().events.end()) return call.done(cudaErrorInvalidResourceHandle);
    if (found->second->device != stream->device) return call.done(cudaErrorInvalidResourceHandle);
    std::shared_ptr<event_record> record = std::make_shared<event_record>();
    if (stream->capturing) {
        record->captured = stream->capturing;
        record->nodes = stream->capture_last;
        found->second->last = record;
        return call.done(stream->capturing->invalid ? cudaErrorStreamCaptureInvalidated : cudaSuccess);
    }
    record->at = {stream, stream->queued + 1};
    found->second->last = record;
    std::weak_ptr<event_record> weak = record;  /* it holds the stream, so the stream must not hold it */
    return call.done(put(stream, [weak] {
        if (std::shared_ptr<event_record> r = weak.lock()) r->time = seconds();
        return cudaSuccess;
    }));
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
    COC_CALL(NOT_IN_CAPTURE);
    auto found = model().events.find(handle);
    if (found == model().events.end()) return call.done(cudaErrorInvalidResourceHandle);
    event_record *record = found->second->last.get();
    if (record == nullptr) return cudaSuccess;
    if (record->captured) return call.done(cudaErrorCapturedEvent);
    if (record->at.stream->done < record->at.sequence && record->queries++ < model().patience) return cudaErrorNotReady;
    if (!is_done(record->at.stream, record->at.sequence)) return cudaErrorNotReady;
    return call.done(device(found->second->device).sticky);
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    COC_CALL(SYNCHRONISES);
    auto found = model().events.find(handle);
    if (found == model().events.end()) return call.done(cudaErrorInvalidResourceHandle);
    std::shared_ptr<event_record> record = found->second->last;        /* another thread may record it meanwhile */
    int index = found->second->device;
    if (record == nullptr) return cudaSuccess;
    if (record->captured) return call.done(cudaErrorCapturedEvent);
    wait_until(record->at.stream, record->at.sequence);
    return call.done(device(index).sticky);
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    COC_CALL(0);
    auto from = model().events.find(start), to = model().events.find(end);
    if (from == model().events.end() || to == model().events.end()) return call.done(cudaErrorInvalidResourceHandle);
    const event_record *a = from->second->last.get(), *b = to->second->last.get();
    if (a == nullptr || b == nullptr || a->captured || b->captured ||
        (from->second->flags | to->second->flags) & cudaEventDisableTiming)
        return call.done(cudaErrorInvalidResourceHandle);
    if (a->at.stream->done < a->at.sequence || b->at.stream->done < b->at.sequence) return cudaErrorNotReady;
    *milliseconds = (float)((b->time - a->time) * 1e3);
    return cudaSuccess;
}

/* ---- Graphs */

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, enum cudaStreamCaptureMode mode) {
    COC_CALL(0);
    stream_ref stream = stream_of(handle);
    if (!stream) return call.done(cudaErrorInvalidResourceHandle);
    if (stream->legacy) return call.done(cudaErrorStreamCaptureUnsupported);
    if (stream->capturing) return call.done(cudaErrorIllegalState);
    std::shared_ptr<capture> c = std::make_shared<capture>();
    c->id = model().next_capture++;
    c->graph = std::make_shared<CUgraph_st>();
    c->origin = stream.get();
    c->mode = mode;
    c->thread = std::this_thread::get_id();
    stream->capturing = c;
    stream->capture_last.clear();
    model().captures.push_back(c);
    return cudaSuccess;
}

namespace {
void mark_before(const CUgraph_st &graph, int node, std::vector<char> *marked) {
    if ((*marked)[(size_t)node]) return;
    (*marked)[(size_t)node] = 1;
    for (int before : graph.nodes[(size_t)node].after) mark_before(graph, before, marked);
}
} // namespace

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph) {
    COC_CALL(0);
    *graph = nullptr;
    stream_ref stream = stream_of(handle);
    if (!stream) return call.done(cudaErrorInvalidResourceHandle);
    std::shared_ptr<capture> c = stream->capturing;
    if (!c) return call.done(cudaErrorIllegalState);
    if (c->origin != stream.get()) {
        c->invalid = true;
        return call.done(cudaErrorStreamCaptureUnmatched);
    }
    if (c->mode != cudaStreamCaptureModeRelaxed && c->thread != std::this_thread::get_id())
        return call.done(cudaErrorStreamCaptureWrongThread);
    std::vector<char> joined(c->graph->nodes.size(), 0);
    for (int node : stream->capture_last) mark_before(*c->graph, node, &joined);
    bool unjoined = false;
    for (auto &entry : model().streams) {
        if (entry.second->capturing != c) continue;
        for (int node : entry.second->capture_last) unjoined = unjoined || !joined[(size_t)node];
        entry.second->capturing.reset();
        entry.second->capture_last.clear();
    }
    std::vector<std::shared_ptr<capture>> &captures = model().captures;
    captures.erase(std::find(captures.begin(), captures.end(), c));
    if (c->invalid) return call.done(cudaErrorStreamCaptureInvalidated);
    if (unjoined) return call.done(cudaErrorStreamCaptureUnjoined);
    model().graphs[c->graph.get()] = c->graph;
    *graph = c->graph.get();
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, enum cudaStreamCaptureStatus *status) {
    COC_CALL(0);
    stream_ref stream = stream_of(handle);
    if (!stream) return call.done(cudaErrorInvalidResourceHandle);
    *status = !stream->capturing ? cudaStreamCaptureStatusNone
              : stream->capturing->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}

#if !defined(COC_TOOLKIT) && CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph) {
#elif CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **, const cudaGraphEdgeData **, size_t *) {
#else
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t handle, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                        cudaGraph_t *graph, const cudaGraphNode_t **, size_t *) {
#endif
    COC_CALL(0);
    stream_ref stream = stream_of(handle);
    if (!stream) return call.done(cudaErrorInvalidResourceHandle);
    *status = !stream->capturing ? cudaStreamCaptureStatusNone
              : stream->capturing->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
    if (id != nullptr && stream->capturing) *id = stream->capturing->id;
    if (graph != nullptr && stream->capturing) *graph = stream->capturing->graph.get();
    return cudaSuccess;
}
#if !defined(COC_TOOLKIT) && CUDART_VERSION < 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, enum cudaStreamCaptureStatus *status, unsigned long long *id) {
    return cudaStreamGetCaptureInfo_v2(handle, status, id, nullptr, nullptr, nullptr);
}
#endif

/* One reference each; a graph's copies, instantiated or running, share it. */
cudaError_t cudaUserObjectCreate(cudaUserObject_t *handle, void *ptr, cudaHostFn_t destroy, unsigned int references,
                                 unsigned int flags) {
    COC_CALL(0);
    if (references != 1 || flags != cudaUserObjectNoDestructorSync) return call.done(cudaErrorInvalidValue);
    std::shared_ptr<CUuserObject_st> object(new CUuserObject_st{ptr, destroy});
    model().objects[object.get()] = object;
    *handle = object.get();
    return cudaSuccess;
}
cudaError_t cudaUserObjectRelease(cudaUserObject_t handle, unsigned int) {
    COC_CALL(0);
    return call.done(model().objects.erase(handle) ? cudaSuccess : cudaErrorInvalidValue);
}
cudaError_t cudaGraphRetainUserObject(cudaGraph_t handle, cudaUserObject_t object, unsigned int, unsigned int flags) {
    COC_CALL(0);
    auto found = model().objects.find(object);
    std::shared_ptr<CUgraph_st> graph;
    for (auto &c : model().captures)
        if (c->graph.get() == handle) graph = c->graph;
    if (model().graphs.count(handle)) graph = model().graphs[handle];
    if (found == model().objects.end() || !graph || flags != cudaGraphUserObjectMove) return call.done(cudaErrorInvalidValue);
    graph->objects.push_back(found->second);
    model().objects.erase(found);
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    COC_CALL(NO_CONTEXT);
    std::swap(*mode, thread_mode);
    return cudaSuccess;
}

#if CUDART_VERSION >= 12000
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *handle, cudaGraph_t graph, unsigned long long) {
#else
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *handle, cudaGraph_t graph, cudaGraphNode_t *, char *, size_t) {
#endif
    COC_CALL(0);
    auto found = model().graphs.find(graph);
    if (found == model().graphs.end()) return call.done(cudaErrorInvalidValue);
    std::shared_ptr<CUgraphExec_st> exec = std::make_shared<CUgraphExec_st>();
    exec->graph = std::make_shared<CUgraph_st>(*found->second);
    model().execs[exec.get()] = exec;
    *handle = exec.get();
    return cudaSuccess;
}

namespace {

/* How many nodes come one after the other up to each. */
std::vector<int> graph_depths(const CUgraph_st &graph) {
    std::vector<int> depth(graph.nodes.size(), 0);
    for (size_t i = 0; i < depth.size(); i++)
        for (int before : graph.nodes[i].after) depth[i] = std::max(depth[i], depth[(size_t)before] + 1);
    return depth;
}

/* Among the nodes that may run the one recorded last, or first: branches that are not ordered run in either order.  Under
   OTHERS_FIRST the one with the fewest before it: branches go forward step by step beside one another, so that memory that
   two of them use for themselves shows in what they compute. */
cudaError_t run_graph(const CUgraph_st &graph, std::vector<char> &ran) {
    size_t n = graph.nodes.size();
    std::vector<int> depth = graph_depths(graph);
    for (;;) {
        size_t pick = n;
        for (size_t k = 0; k < n; k++) {
            size_t i = model().schedule == COC_EAGER ? k : n - 1 - k;
            bool ready = !ran[i];
            for (int before : graph.nodes[i].after) ready = ready && ran[(size_t)before];
            if (ready && (pick == n || depth[i] < depth[pick])) pick = i;
            if (pick != n && model().schedule != COC_OTHERS_FIRST) break;
        }
        if (pick == n) return cudaSuccess;
        cudaError_t error = graph.nodes[pick].run ? graph.nodes[pick].run() : cudaSuccess;
        if (error != cudaSuccess) return error;
        ran[pick] = 1;
    }
}

} // namespace

cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream_handle) {
    COC_CALL(0);
    auto found = model().execs.find(handle);
    stream_ref stream = stream_of(stream_handle);
    if (found == model().execs.end()) return call.done(cudaErrorInvalidValue);
    if (!stream) return call.done(cudaErrorInvalidResourceHandle);
    model().counts.graph_launches++;
    std::shared_ptr<CUgraph_st> graph = found->second->graph;
    for (const CUgraphNode_st &node : graph->nodes)
        if (!node.kernel.empty()) model().kernels[node.kernel]++;
    auto ran = std::make_shared<std::vector<char>>(graph->nodes.size(), (char)0);
    return call.done(put(stream, [graph, ran] { return run_graph(*graph, *ran); }));
}

cudaError_t cudaGraphDestroy(cudaGraph_t handle) {
    COC_CALL(0);
    return call.done(model().graphs.erase(handle) ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t handle) {
    COC_CALL(0);
    return call.done(model().execs.erase(handle) ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaGraphGetNodes(cudaGraph_t handle, cudaGraphNode_t *nodes, size_t *count) {
    COC_CALL(0);
    auto found = model().graphs.find(handle);
    if (found == model().graphs.end()) return call.done(cudaErrorInvalidValue);
    std::vector<CUgraphNode_st> &all = found->second->nodes;
    if (nodes != nullptr)
        for (size_t i = 0; i < *count && i < all.size(); i++) nodes[i] = &all[i];
    *count = nodes ? std::min(*count, all.size()) : all.size();
    return cudaSuccess;
}

/* ---- Functions */

cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value) {
    COC_CALL(0);
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
    if (value < 0 || (size_t)value > shared_optin()) return call.done(cudaErrorInvalidValue);
    int &limit = device(current_device).shared_limit[function];
    if (value < limit)
        coc_fault("cudaFuncSetAttribute: %s may now have %d bytes of shared memory and had %d, which another thread may be "
                  "about to ask for", coc_function_name(function).c_str(), value, limit);
    limit = value;
    return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    COC_CALL(0);
    if (!image_runs()) return call.done(cudaErrorNoKernelImageForDevice);
    memset(attributes, 0, sizeof *attributes);
    std::map<const void *, int> &limits = device(current_device).shared_limit;
    auto limit = limits.find(function);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->ptxVersion = model().image;
    attributes->binaryVersion = model().capability;
    if (coc_function_name(function) == "ampc_marker_kernel") attributes->sharedSizeBytes = model().letter ? 1024 : 128;
    attributes->maxDynamicSharedSizeBytes = limit == limits.end() ? (int)COC_SHARED_DEFAULT : limit->second;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *, int block_size, size_t shared) {
    COC_CALL(0);
    if (block_size <= 0 || block_size > 1024) return call.done(cudaErrorInvalidValue);
    size_t by_threads = 2048 / ((size_t)(block_size + 31) / 32 * 32), by_shared = (size_t)228 * 1024 / (shared + 1024);
    *blocks = shared > shared_optin() ? 0 : (int)std::min<size_t>(32, std::min(by_threads, by_shared));
    return cudaSuccess;
}

/* ---- For a library above the runtime */

coc_library_call::coc_library_call(const char *function, bool synchronises) {
    coc_check_locks(function);
    model().lock.lock();
    model().calls[function]++;
    if (!synchronises) return;
    model().counts.synchronising++;
    model().synchronising[function]++;
}
coc_library_call::~coc_library_call() {
    hide_all();
    model().lock.unlock();
}
coc_counts *coc_counts_now() { return &model().counts; }
int coc_device_now() { return current_device; }
cudaError_t coc_device_error(int index) { return device(index).sticky; }
cudaError_t coc_lose_device(int index, cudaError_t error) { return device(index).sticky = error; }
int coc_usable(const void *p, size_t bytes, int index) {
    return (device_of(p) == index && allocation_of(p, bytes)) || place_of(p, bytes) == PLACE_PINNED;
}
void coc_expose(int index) { expose_only(index); }
void coc_wait_for_device(int index) { wait_for_device(index); }
void coc_pause() { pause_briefly(); }
int coc_device_done(int index) {
    bool done = true;
    for (auto &stream : all_streams(index)) done &= run_up_to(stream, stream->queued);
    return done;
}

namespace {

/* Whether what stands in a stream up to a sequence number waits for a point. */
bool comes_after(const point &late, const point &early) {
    if (early.stream->done >= early.sequence) return true;
    if (late.stream == early.stream) return late.sequence >= early.sequence;
    uint64_t sequence = late.stream->done;
    for (const operation &op : late.stream->queue) {
        if (sequence++ >= late.sequence) break;
        for (const point &p : op.after)
            if (comes_after(p, early)) return true;
    }
    return false;
}

void take_scratch(const char *name, const stream_ref &stream, coc_scratch memory) {
    std::vector<scratch_use> left;
    point now = {stream, stream->queued};
    const char *from = (const char *)memory.data, *to = from + memory.bytes;
    for (const scratch_use &use : model().scratch) {
        const char *data = (const char *)use.memory.data;
        if (use.at.stream->done >= use.at.sequence) continue;
        left.push_back(use);
        if (data < to && from < data + use.memory.bytes && !comes_after(now, use.at))
            coc_fault("%s: its scratch memory is in use in another stream: %s", name, coc_describe(memory.data).c_str());
    }
    left.push_back({memory, now});
    model().scratch = left;
}

} // namespace

cudaError_t coc_enqueue(const char *name, cudaStream_t handle, coc_scratch scratch, std::function<cudaError_t()> run) {
    stream_ref stream = stream_of(handle);
    if (!stream || stream->device != current_device) return cudaErrorInvalidResourceHandle;
    bool captured = stream->capturing != nullptr;
    cudaError_t error = put(stream, run, {}, name);
    if (error == cudaSuccess && scratch.bytes != 0 && !captured) take_scratch(name, stream, scratch);
    return error;
}
void coc_pass_time(double passed) { model().clock += passed; }

/* A clock of 2 GHz that goes on by a quarter of a microsecond when it is read. */
long long coc_clock() {
    coc_pass_time(0.25e-6);
    return (long long)(seconds() * 2e9);
}

/* ---- What tests set and ask */

void coc_set_order(coc_order order, uint64_t seed) {
    coc_current_order = order;
    coc_order_seed = seed;
}
void coc_set_last_blocks(unsigned blocks) { coc_last_blocks = blocks; }

void coc_set_schedule(coc_schedule schedule) {
    std::lock_guard<coc_model_lock> guard(model().lock);
    model().schedule = schedule;
}

void coc_set_modelled_clock(int modelled) { model().modelled_clock = modelled; }
void coc_set_launch_time(double microseconds) { model().launch_time = microseconds * 1e-6; }
void coc_set_patience(int queries) { model().patience = queries; }
void coc_set_yielding(int yielding) { model().yielding = yielding; }
void coc_set_pools(int pools) { model().pools = pools; }
void coc_set_pointer_check(int check) { model().pointer_check = check; }

void coc_set_hidden(int hidden) {
    std::lock_guard<coc_model_lock> guard(model().lock);
    if (hidden == model().hidden) return;
    expose_all();
    model().hidden = hidden;
    hide_all();
}

int coc_image() { return model().image; }
bool coc_image_has_letter() { return model().letter; }
void coc_set_driver(int version) { model().driver = version; }
void coc_set_shared_base(unsigned number) { coc_shared_base = number; }
int coc_capability() { return model().capability; }

void coc_set_devices(int count, size_t memory, int multiprocessors, int capability, int image) {
    coc_reset();
    model().device_count = count;
    model().memory = memory;
    model().multiprocessors = multiprocessors;
    model().capability = capability;
    model().letter = (image & COC_LETTER_A) != 0;
    model().image = image ? image & ~COC_LETTER_A : capability;
}

coc_counts coc_count() {
    std::lock_guard<coc_model_lock> guard(model().lock);
    coc_counts counts = model().counts;
    const coc_work &before = model().worked_before;
    counts.switches = coc_worked.switches - before.switches;
    counts.mmas = coc_worked.mmas - before.mmas;
    counts.ldmatrices = coc_worked.ldmatrices - before.ldmatrices;
    counts.fp8_pairs = coc_worked.fp8_pairs - before.fp8_pairs;
    counts.async_bytes = coc_worked.async_bytes - before.async_bytes;
    counts.prefetches = coc_worked.prefetches - before.prefetches;
    counts.barriers = coc_worked.barriers - before.barriers;
    counts.busy_barriers = coc_worked.busy_barriers - before.busy_barriers;
    counts.wgmmas = coc_worked.wgmmas - before.wgmmas;
    counts.bulk_bytes = coc_worked.bulk_bytes - before.bulk_bytes;
    return counts;
}

long coc_calls(const char *function) {
    std::lock_guard<coc_model_lock> guard(model().lock);
    auto found = model().calls.find(function);
    return found == model().calls.end() ? 0 : found->second;
}

long coc_kernel_launches(const char *part) {
    std::lock_guard<coc_model_lock> guard(model().lock);
    long sum = 0;
    for (auto &entry : model().kernels)
        if (entry.first.find(part) != std::string::npos) sum += entry.second;
    return sum;
}

std::string coc_synchronising_calls() {
    std::lock_guard<coc_model_lock> guard(model().lock);
    std::string text;
    for (auto &entry : model().synchronising) text += entry.first + " " + std::to_string(entry.second) + " ";
    return text;
}

void coc_reset_counts() {
    std::lock_guard<coc_model_lock> guard(model().lock);
    model().counts = coc_counts{};
    model().worked_before = coc_worked;
    model().calls.clear();
    model().synchronising.clear();
    model().kernels.clear();
}

void coc_fail(const char *function, int n, cudaError_t error, int sticky) {
    std::lock_guard<coc_model_lock> guard(model().lock);
    model().fail_function = function ? function : "";
    model().fail_in = n;
    model().fail_error = error;
    model().fail_sticky = sticky;
}

int coc_fail_pending() { return model().fail_in > 0; }
void coc_fail_clear() { model().fail_in = 0; }

coc_alive coc_living() {
    std::lock_guard<coc_model_lock> guard(model().lock);
    const model_state &m = model();
    coc_alive alive = {};
    for (const device_state &d : m.devices) alive.allocations += (long)d.live.size(), alive.bytes += d.used;
    alive.pinned = (long)m.pinned.size();
    alive.streams = (long)m.streams.size();
    alive.events = (long)m.events.size();
    alive.graphs = (long)m.graphs.size();
    alive.graph_execs = (long)m.execs.size();
    alive.blas_objects = coc_blas_living();
    return alive;
}

void coc_reset() {
    std::lock_guard<coc_model_lock> guard(model().lock);
    model_state &m = model();
    for (size_t i = 0; i < m.devices.size(); i++)
        for (auto &stream : all_streams((int)i)) stream->queue.clear();
    m.scratch.clear();
    m.streams.clear();
    m.free_handles.clear();
    m.handle_places.clear();
    m.retired.clear();
    m.events.clear();
    m.graphs.clear();
    m.execs.clear();
    m.captures.clear();
    for (device_state &d : m.devices) drop_device_memory(d);
    m.devices.clear();
    for (auto &entry : m.pinned) free(entry.first);
    m.pinned.clear();
    m.fail_in = 0;
    m.driver = 13000;
    m.modelled_clock = 1;
    m.clock = m.host_clock = m.launch_time = 0;
    m.ranges.clear();
    m.depth = 0;
    coc_blas_reset();
    current_device = 0;
    last_error = cudaSuccess;
    thread_mode = cudaStreamCaptureModeGlobal;
    coc_reset_counts();
    coc_take_faults();
}

int nvtxRangePushA(const char *message) {
    std::lock_guard<coc_model_lock> guard(model().lock);
    model().ranges += std::string(message) + "{";
    return model().depth++;
}

int nvtxRangePop(void) {
    std::lock_guard<coc_model_lock> guard(model().lock);
    if (model().depth == 0) return -2;
    model().ranges += "}";
    return --model().depth;
}

std::string coc_ranges() {
    std::lock_guard<coc_model_lock> guard(model().lock);
    return model().ranges;
}

/* Memory is what AddressSanitizer watches, and all orders use the same: each call takes the next. */
#if defined(__SANITIZE_ADDRESS__)
enum { USUAL_ORDERS = 1 };
#else
enum { USUAL_ORDERS = 4 };
#endif
int coc_orders = getenv("AMPT_ORDERS") ? atoi(getenv("AMPT_ORDERS")) : USUAL_ORDERS;
std::string coc_every_order(const std::function<void(std::string *results)> &run) {
    static const struct { coc_order order; uint64_t seed; coc_schedule schedule; const char *name; } ways[] = {
        {COC_FORWARD, 1, COC_LATE, "forward"},
        {COC_REVERSE, 1, COC_EAGER, "reverse, eager"},
        {COC_RANDOM, 1, COC_OTHERS_FIRST, "random, other streams first"},
        {COC_AHEAD, 1, COC_LATE, "one warp ahead"},
        {COC_RANDOM, 2, COC_LATE, "random again"},
    };
    static unsigned calls;
    const unsigned first = coc_orders == 1 ? calls++ % 4 : 0, count = (unsigned)coc_orders;
    coc_schedule before = model().schedule;
    coc_order order_before = coc_current_order;
    std::string expected, difference;
    for (unsigned i = first; i < first + count && i < sizeof ways / sizeof *ways; i++) {
        std::string results;
        coc_set_order(ways[i].order, ways[i].seed);
        coc_set_schedule(ways[i].schedule);
        run(&results);
        if (i == first) expected = results;
        if (results == expected || !difference.empty()) continue;
        size_t at = 0, most = std::min(results.size(), expected.size());
        while (at < most && results[at] == expected[at]) at++;
        difference = std::string("order ") + ways[i].name + ": byte " + std::to_string(at) + " of " +
                     std::to_string(expected.size()) + " differs from forward";
    }
    coc_set_order(order_before);
    coc_set_schedule(before);
    return difference;
}
