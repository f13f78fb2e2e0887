/* count_plugin.c - a plugin of qemu-user that counts instructions.  At each close(-1000), which no program makes by chance,
 * it prints how many a program has run since the last one.
 *
 * It declares what it uses of qemu-plugin.h, version 1 of the interface, which Debian's package does not contain. */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

struct qemu_plugin_tb;
typedef uint64_t qemu_plugin_id_t;
typedef void (*translated)(qemu_plugin_id_t id, struct qemu_plugin_tb *block);
typedef void (*called)(qemu_plugin_id_t id, unsigned cpu, int64_t number, uint64_t a1, uint64_t a2, uint64_t a3, uint64_t a4,
                       uint64_t a5, uint64_t a6, uint64_t a7, uint64_t a8);
void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t id, translated callback);
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *block, int operation, void *counter, uint64_t add);
void qemu_plugin_register_vcpu_syscall_cb(qemu_plugin_id_t id, called callback);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *block);

#define PUBLIC __attribute__((visibility("default")))
PUBLIC int qemu_plugin_version = 1;
PUBLIC int qemu_plugin_install(qemu_plugin_id_t id, const void *info, int argc, char **argv);

enum { CLOSE = 57, MARK = -1000 };
static uint64_t counter, last;

static void count(qemu_plugin_id_t id, struct qemu_plugin_tb *block) {
    (void)id;
    qemu_plugin_register_vcpu_tb_exec_inline(block, 0, &counter, qemu_plugin_tb_n_insns(block));
}
static void mark(qemu_plugin_id_t id, unsigned cpu, int64_t number, uint64_t a1, uint64_t a2, uint64_t a3, uint64_t a4,
                 uint64_t a5, uint64_t a6, uint64_t a7, uint64_t a8) {
    (void)id; (void)cpu; (void)a2; (void)a3; (void)a4; (void)a5; (void)a6; (void)a7; (void)a8;
    if (number != CLOSE || (int32_t)a1 != MARK) return;
    fprintf(stderr, "%llu\n", (unsigned long long)(counter - last));
    last = counter;
}
int qemu_plugin_install(qemu_plugin_id_t id, const void *info, int argc, char **argv) {
    (void)info; (void)argc; (void)argv;
    qemu_plugin_register_vcpu_tb_trans_cb(id, count);
    qemu_plugin_register_vcpu_syscall_cb(id, mark);
    return 0;
}
