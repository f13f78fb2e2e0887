/* resources.cpp - prints what each kernel of an object file of nvcc needs, read from its machine code.
 *
 *     nvcc -gencode arch=compute_90a,code=sm_90a --no-compress -c amp_cuda.cu -o amp_cuda_sm90a.o
 *     resources amp_cuda_sm90a.o                           one line per kernel, sorted by name
 *     resources amp_cuda_sm90a.o resources.txt wide.txt    "topic kernel: text" for each thing that is not as it should be
 *
 * The object contains the ELF file of the GPU without compression (hence --no-compress).  In it, kernel K is section
 * .text.K, its registers and stack are attributes in .nv.info, and its static shared memory is the size of .nv.shared.K, of
 * which sm_90 keeps 1 KiB for itself.  An instruction has 16 bytes.  Its lowest 12 bits say what it does.  In loads and
 * stores, bits 73 to 75 say how wide it is.  Bits 110 to 112 name the barrier that a load completes (7: none), and bits 116
 * to 121 are a mask of the barriers that an instruction waits for.  These numbers are those of sm_90 alone. */
#include <algorithm>
#include <cxxabi.h>
#include <elf.h>
#include <fnmatch.h>
#include <map>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <string>
#include <vector>

enum { MACHINE_CUDA = 190, KERNEL_SYMBOL = 0x10, SHARED_RESERVED = 1024, INSTRUCTION = 16, WIDE = 6 };
enum { INFO_FRAME_SIZE = 0x11, INFO_REGISTERS = 0x2f, INFO_HAS_SIZE = 4 };
enum {      /* opcodes: through any address (LD, ST), global memory, local memory, which is where spills go */
    LD = 0x980, LDG = 0x981, LDL = 0x983, ST = 0x985, STG = 0x986, STL = 0x387
};

struct kernel {
    unsigned registers, stack, shared;
    unsigned loads, stores;             /* instructions of 16 bytes */
    unsigned divisions;                 /* subroutines of integers of 64 bits: a hundred instructions a call */
    unsigned local;                     /* instructions on local memory */
    unsigned flight;                    /* the most loads from global memory that nothing has waited for yet */
};
typedef std::map<std::string, kernel> kernels;

struct elf {
    const unsigned char *data;
    size_t size;
    template <class T> bool at(uint64_t offset, T *out) const {
        if (offset > size || sizeof(T) > size - offset) return false;
        memcpy(out, data + offset, sizeof(T));
        return true;
    }
    std::string text(uint64_t offset) const {
        std::string out;
        while (offset < size && data[offset]) out += (char)data[offset++];
        return out;
    }
};

static bool fail(const char *text) { fprintf(stderr, "resources: %s\n", text); return false; }

static bool read_file(const char *path, std::string *out) {
    FILE *file = fopen(path, "rb");
    char piece[65536];
    size_t got;
    if (file == NULL) return fail("a file cannot be opened");
    while ((got = fread(piece, 1, sizeof piece, file)) > 0) out->append(piece, got);
    fclose(file);
    return true;
}

/* Where in an object the GPU's ELF file starts: the only one with the machine number of CUDA. */
static bool find_gpu_code(const std::string &object, elf *out) {
    for (size_t i = 0; (i = object.find(ELFMAG, i, SELFMAG)) != std::string::npos; i++) {
        Elf64_Ehdr head;
        *out = {(const unsigned char *)object.data() + i, object.size() - i};
        if (out->at(0, &head) && head.e_machine == MACHINE_CUDA) return true;
    }
    return fail("no uncompressed machine code of a GPU");
}

/* "ampc_norm_rows<8, 16>": no parameters, no namespace, no result. */
static std::string short_name(const std::string &symbol) {
    int status = 0;
    char *text = abi::__cxa_demangle(symbol.c_str(), NULL, NULL, &status);
    std::string name = text ? text : symbol;
    const std::string space = "(anonymous namespace)::";
    free(text);
    for (size_t i; (i = name.find(space)) != std::string::npos;) name.erase(i, space.size());
    for (size_t i; (i = name.find("> >")) != std::string::npos;) name.erase(i + 1, 1);
    size_t end = 0;
    for (int depth = 0; end < name.size() && (name[end] != '(' || depth > 0); end++)    /* arguments may hold casts */
        depth += (name[end] == '<') - (name[end] == '>');
    name = name.substr(0, end);
    return name.compare(0, 5, "void ") ? name : name.substr(5);
}

static void count_instructions(const elf &e, const Elf64_Shdr &code, kernel *k) {
    enum { BARRIERS = 6 };
    unsigned pending[BARRIERS] = {};
    for (uint64_t i = 0; i + INSTRUCTION <= code.sh_size; i += INSTRUCTION) {
        uint64_t low, high;
        if (!e.at(code.sh_offset + i, &low) || !e.at(code.sh_offset + i + 8, &high)) return;
        unsigned opcode = low & 0xfff;
        bool wide = (high >> 9 & 7) == WIDE;
        if ((opcode == LD || opcode == LDG) && wide) k->loads++;
        if ((opcode == ST || opcode == STG) && wide) k->stores++;
        if (opcode == LDL || opcode == STL) k->local++;
        unsigned barrier = high >> 46 & 7, waits = high >> 52 & 63, sum = 0;
        for (unsigned b = 0; b < BARRIERS; b++)
            if (waits >> b & 1) pending[b] = 0;
        if ((opcode == LD || opcode == LDG) && barrier < BARRIERS) pending[barrier]++;
        for (unsigned n : pending) sum += n;
        k->flight = std::max(k->flight, sum);
    }
}

/* Attributes of symbols: {format, attribute, size of what follows}, mostly {symbol, value}. */
static void read_attributes(const elf &e, const Elf64_Shdr &info, const std::vector<std::string> &symbols, kernels *all) {
    for (uint64_t i = info.sh_offset, end = i + info.sh_size; i + 4 <= end;) {
        uint8_t format, attribute;
        uint16_t size;
        uint32_t pair[2];
        if (!e.at(i, &format) || !e.at(i + 1, &attribute) || !e.at(i + 2, &size)) return;
        i += 4;
        if (format != INFO_HAS_SIZE) continue;
        if (size == 8 && e.at(i, &pair) && pair[0] < symbols.size() && all->count(symbols[pair[0]])) {
            kernel &k = (*all)[symbols[pair[0]]];
            if (attribute == INFO_REGISTERS) k.registers = pair[1];
            if (attribute == INFO_FRAME_SIZE) k.stack = pair[1];
        }
        i += size;
    }
}

/* The kernel that the section PREFIX<kernel> belongs to, or NULL. */
static kernel *kernel_behind(const char *prefix, const std::string &section, kernels *all) {
    size_t n = strlen(prefix);
    kernels::iterator found = section.compare(0, n, prefix) ? all->end() : all->find(section.substr(n));
    return found == all->end() ? NULL : &found->second;
}

/* A subroutine lies behind the kernel that calls it, in its section: "$__internal_0_$__cuda_sm20_div_s64". */
static bool divides(const std::string &symbol) {
    static const char *const names[] = {"_div_s64", "_div_u64", "_rem_s64", "_rem_u64"};
    for (const char *name : names)
        if (symbol.size() > strlen(name) && symbol.compare(symbol.size() - strlen(name), std::string::npos, name) == 0) return true;
    return false;
}

static bool read_kernels(const elf &e, kernels *out) {
    Elf64_Ehdr head;
    std::vector<Elf64_Shdr> sections;
    std::vector<std::string> names, symbols;
    std::vector<size_t> dividing;       /* the sections of subroutines that divide */
    if (!e.at(0, &head)) return fail("no ELF header");
    sections.resize(head.e_shnum);
    for (size_t i = 0; i < sections.size(); i++)
        if (!e.at(head.e_shoff + i * head.e_shentsize, &sections[i])) return fail("sections beyond the file");
    for (const Elf64_Shdr &s : sections) names.push_back(e.text(sections[head.e_shstrndx].sh_offset + s.sh_name));
    kernels all;
    for (const Elf64_Shdr &table : sections) {
        Elf64_Sym symbol;
        if (table.sh_type != SHT_SYMTAB) continue;
        for (uint64_t i = 0; i < table.sh_size && e.at(table.sh_offset + i, &symbol); i += sizeof symbol) {
            symbols.push_back(e.text(sections[table.sh_link].sh_offset + symbol.st_name));
            if (symbol.st_other & KERNEL_SYMBOL) all[symbols.back()] = kernel();
            if (divides(symbols.back()) && symbol.st_shndx < names.size()) dividing.push_back(symbol.st_shndx);
        }
    }
    for (size_t i = 0; i < sections.size(); i++) {
        kernel *code = kernel_behind(".text.", names[i], &all), *shared = kernel_behind(".nv.shared.", names[i], &all);
        if (code) count_instructions(e, sections[i], code);
        if (shared && sections[i].sh_size >= SHARED_RESERVED) shared->shared = (unsigned)sections[i].sh_size - SHARED_RESERVED;
        if (names[i] == ".nv.info") read_attributes(e, sections[i], symbols, &all);
    }
    for (size_t i : dividing)
        if (kernel *code = kernel_behind(".text.", names[i], &all)) code->divisions++;
    for (const auto &k : all) (*out)[short_name(k.first)] = k.second;
    return all.size() == out->size() ? true : fail("two kernels have the same short name");
}

static void print_kernels(const kernels &all) {
    for (const auto &k : all)
        printf("%3u %5u %5u  %4u %4u  %u  %s\n", k.second.registers, k.second.stack, k.second.shared, k.second.loads,
               k.second.stores, k.second.divisions, k.first.c_str());
}

/* ---- Comparing with the tables; a line that starts with # is a comment. */

static std::vector<std::string> table_lines(const std::string &text) {
    std::vector<std::string> lines;
    for (size_t i = 0, end; i < text.size(); i = end + 1) {
        end = std::min(text.find('\n', i), text.size());
        if (end > i && text[i] != '#') lines.push_back(text.substr(i, end - i));
    }
    return lines;
}

static void compare_table(const kernels &all, const std::string &text) {
    kernels known;
    for (const std::string &line : table_lines(text)) {
        kernel k = kernel();
        int at = 0;
        int found = sscanf(line.c_str(), "%u %u %u %u %u %u %n", &k.registers, &k.stack, &k.shared, &k.loads, &k.stores,
                           &k.divisions, &at);
        if (found == 6 && at) known[line.substr((size_t)at)] = k;
    }
    for (const auto &k : known)
        if (!all.count(k.first)) printf("kernels %s: in the table, but no such kernel\n", k.first.c_str());
    for (const auto &one : all) {
        const char *name = one.first.c_str();
        const kernel &now = one.second, &then = known[one.first];
        if (then.registers == 0) { printf("kernels %s: not in the table\n", name); continue; }
        if (now.registers > then.registers) printf("registers %s: %u, were %u\n", name, now.registers, then.registers);
        if (now.shared > then.shared) printf("shared %s: %u bytes, were %u\n", name, now.shared, then.shared);
        if (now.divisions > then.divisions)
            printf("divisions %s: %u subroutines of 64-bit division, were %u\n", name, now.divisions, then.divisions);
        if (now.loads < then.loads || now.stores < then.stores)
            printf("accesses %s: %u loads and %u stores of 16 bytes, were %u and %u\n", name, now.loads, now.stores,
                   then.loads, then.stores);
    }
}

/* wide.txt: "loads stores flight pattern", least numbers of 16-byte instructions, and of loads in flight; each pattern must
   match some kernel. */
static void compare_wide(const kernels &all, const std::string &text) {
    for (const std::string &line : table_lines(text)) {
        unsigned loads, stores, flight, found = 0;
        int at = 0;
        if (sscanf(line.c_str(), "%u %u %u %n", &loads, &stores, &flight, &at) != 3 || at == 0) {
            printf("wide %s: not \"loads stores flight pattern\"\n", line.c_str());
            continue;
        }
        for (const auto &k : all) {
            if (fnmatch(line.c_str() + at, k.first.c_str(), 0) != 0) continue;
            found++;
            if (k.second.loads < loads || k.second.stores < stores)
                printf("wide %s: %u loads and %u stores of 16 bytes, must have %u and %u\n", k.first.c_str(),
                       k.second.loads, k.second.stores, loads, stores);
            if (k.second.flight < flight)
                printf("wide %s: %u loads in flight, must have %u\n", k.first.c_str(), k.second.flight, flight);
        }
        if (found == 0) printf("wide %s: no such kernel\n", line.c_str() + at);
    }
}

int main(int argc, char **argv) {
    std::string object, table, wide;
    elf code = {NULL, 0};
    kernels all;
    if (argc != 2 && argc != 4) return fail("OBJECT [TABLE WIDE]"), 2;
    if (!read_file(argv[1], &object) || !find_gpu_code(object, &code) || !read_kernels(code, &all)) return 1;
    if (all.empty()) return fail("no kernel"), 1;
    if (argc == 2) return print_kernels(all), 0;
    if (!read_file(argv[2], &table) || !read_file(argv[3], &wide)) return 1;
    for (const auto &k : all)
        if (k.second.local || k.second.stack)
            printf("spills %s: %u instructions on local memory, %u bytes of stack\n", k.first.c_str(), k.second.local,
                   k.second.stack);
    compare_table(all, table);
    compare_wide(all, wide);
    return 0;
}
