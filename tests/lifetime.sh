#!/bin/sh
# lifetime.sh - tests programs that leave a scope by an exception or an early return while a context and its objects exist.
# The programs are in C and in C++, and run under AddressSanitizer where it is available.  Another test links two files that
# each contain an implementation (AMP_STATIC) and share a parameter.
. tests/lib.sh
cc=${CC:-gcc} flags=
cat > "$work/probe.c" <<'END'
int main(void) { return 0; }
END
if $cc -fsanitize=address "$work/probe.c" -o "$work/probe" 2>/dev/null && "$work/probe" 2>/dev/null; then flags=-fsanitize=address; fi

# ran NAME PROGRAM ARGUMENT: ends well, with a warning that the context closed before its objects.
ran() {
    if "$2" "$3" > "$work/log" 2>&1 && { [ "$3" = -1 ] || grep -q 'was not destroyed before its context' "$work/log"; }; then pass
    else fail "$1 $3" "$(grep -m 3 'ERROR\|wrong\|#[0-3] ' "$work/log" || tail -n 2 "$work/log")"; fi
}

printf '#define AMP_IMPLEMENTATION\n#include "amp.h"\n' > "$work/impl.c"
$cc -std=c99 -O0 $flags -I. -c "$work/impl.c" -o "$work/impl.o"

# Owners as C++ programs write them.  The context goes first, by mistake or because it is a member that is declared last.
cat > "$work/throws.cpp" <<'END'
#include "amp.h"
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>
template <typename T, void (*Destroy)(T *)> struct owned {
    T *p = nullptr;
    owned() = default;
    owned(owned &&other) : p(other.p) { other.p = nullptr; }
    ~owned() { Destroy(p); }
};
static void must(amp_result r) { if (r != AMP_OK) throw std::runtime_error(amp_last_error()); }
static int read_sample(void *, const amp_sample *s, void *const *fields) { *(int32_t *)fields[0] = (int32_t)s->sample; return 0; }
struct region {
    amp_context *amp;
    explicit region(amp_context *a) : amp(a) { must(amp_autocast_begin(amp, nullptr)); }
    ~region() { (void)amp_autocast_end(amp); }
};
struct training {
    owned<amp_optimizer, amp_optimizer_destroy> optimizer;
    owned<amp_scaler, amp_scaler_destroy> scaler;
    owned<amp_loader, amp_loader_destroy> loader;
    owned<amp_monitor, amp_monitor_destroy> monitor;
    owned<amp_tensor_stats, amp_tensor_stats_destroy> numerics;
    owned<amp_recovery, amp_recovery_destroy> recovery;
    owned<amp_grad_set, amp_grad_set_destroy> set;
    owned<amp_context, amp_close> context;      /* declared last: closed first */
    std::vector<amp_param> params;              /* and these are gone even before */
    std::vector<std::string> names;
    std::vector<float> w, g, x, y;
    int at = 0, throws = 0;
    void point() { if (at++ == throws) throw std::logic_error("here"); }
    void run(int when) {
        throws = when;
        w.assign(64, 0.5f); g.assign(64, 0); x.assign(64, 1); y.assign(64, 0);
        must(amp_open(&context.p, nullptr));
        names.push_back("a.layer.whose.name.is.long.enough.to.lie.on.the.heap");
        params.resize(1);
        memset((void *)params.data(), 0, sizeof params[0]);
        params[0].name = names[0].c_str();
        params[0].weight = amp_tensor2(w.data(), AMP_F32, 8, 8);
        params[0].grad = amp_tensor2(g.data(), AMP_F32, 8, 8);
        must(amp_param_register(context.p, params.data(), 1));
        amp_optimizer_desc od = {};
        od.params = params.data(); od.n_params = 1;
        must(amp_optimizer_create(context.p, &optimizer.p, &od));
        point();
        must(amp_scaler_create(context.p, &scaler.p, nullptr));
        point();
        amp_source source = {};
        source.read = read_sample; source.samples = 100; source.n_fields = 1;
        source.fields[0].dtype = AMP_I32; source.fields[0].count = 1;
        amp_loader_desc ld = {};
        ld.source = &source; ld.batch = 4;
        must(amp_loader_create(context.p, &loader.p, &ld));
        point();
        amp_monitor_desc md = {};
        md.optimizer = optimizer.p; md.scaler = scaler.p;
        must(amp_monitor_create(context.p, &monitor.p, &md));
        point();
        amp_tensor_stats_desc nd = {};
        nd.params = params.data(); nd.n_params = 1; nd.scaler = scaler.p;
        must(amp_tensor_stats_create(context.p, &numerics.p, &nd));
        amp_recovery_desc rd = {};
        rd.params = params.data(); rd.n_params = 1; rd.optimizer = optimizer.p; rd.scaler = scaler.p; rd.loader = loader.p;
        must(amp_recovery_create(context.p, &recovery.p, &rd));
        amp_grad_set_desc sd = {};
        sd.params = params.data(); sd.n_params = 1;
        must(amp_grad_set_create(context.p, &set.p, &sd));
        for (int step = 0; step < 4; step++) {
            amp_batch batch;
            amp_step_info info = {};
            must(amp_loader_next(loader.p, &batch));
            region forward(context.p);
            amp_linear_op op = {};
            op.x = amp_tensor2(x.data(), AMP_F32, 8, 8); op.weight = &params[0]; op.y = amp_tensor2(y.data(), AMP_F32, 8, 8);
            must(amp_linear(context.p, &op));
            op.dy = op.y;
            must(amp_linear_backward(context.p, &op));
            if (step == 2) point();
            if (step == 3 && throws == 5) { amp_close(context.p); context.p = nullptr; throw std::logic_error("in a region"); }
            must(amp_step(optimizer.p, scaler.p));
            must(amp_monitor_step(monitor.p, &info));
        }
        point();
        point();
    }
};
int main(int, char **argv) {
    int when = std::atoi(argv[1]), thrown = 0;
    try { training t; t.run(when); } catch (const std::logic_error &) { thrown = 1; }
    if (thrown == (when < 0)) std::printf("wrong: %s\n", thrown ? "it threw" : "it did not throw");
    amp_context *again = nullptr;       /* the thread is as good as new */
    if (amp_open(&again, nullptr) != AMP_OK || amp_autocast_active(again, nullptr) || amp_autocast_begin(again, nullptr) != AMP_OK ||
        amp_autocast_end(again) != AMP_OK) return 3;
    amp_close(again);
    return thrown == (when < 0);
}
END
if have "${CXX:-g++}"; then
    if ${CXX:-g++} -std=c++17 -O0 $flags -I. "$work/throws.cpp" "$work/impl.o" -o "$work/throws" -lm -lpthread 2> "$work/log"; then
        for when in 0 1 2 3 4 5 6; do ran "C++ that throws" "$work/throws" $when; done
    else fail "C++ that throws" "$(grep -m 1 error "$work/log")"; fi
else skip "C++ that throws" "no ${CXX:-g++}"; fi

# An exception that leaves a loader's callback: the loader goes on, or is destroyed by its owner, as deep as it was made.
cat > "$work/leaves_loader.cpp" <<'END'
#include "amp.h"
#include <stdexcept>
static int left;
static int read_sample(void *, const amp_sample *s, void *const *fields) {
    if (s->sample == 5 && left++ == 0) throw std::runtime_error("left");
    *(int32_t *)fields[0] = (int32_t)s->sample;
    return 0;
}
struct data {
    amp_loader *l = nullptr;
    explicit data(amp_context *amp) {
        amp_source source = {};
        source.read = read_sample; source.samples = 64; source.n_fields = 1;
        source.fields[0].dtype = AMP_I32; source.fields[0].count = 1;
        amp_loader_desc d = {};
        d.source = &source; d.batch = 4; d.workers = AMP_NO_WORKERS;
        if (amp_loader_create(amp, &l, &d) != AMP_OK) throw std::logic_error(amp_last_error());
    }
    ~data() { amp_loader_destroy(l); }
    int next() {
        amp_batch b;
        if (amp_loader_next(l, &b) != AMP_OK) throw std::logic_error(amp_last_error());
        return *(const int32_t *)b.fields[0];
    }
};
static int run(amp_context *amp, int after) {       /* batches after the exception */
    data d(amp);
    int first = d.next();
    left = 0;
    try { d.next(); return 1; } catch (const std::runtime_error &) {}
    for (int i = 0; i < after; i++) if (d.next() != 4 * (i + 1)) return 2;
    return first;
}
int main() {
    amp_context *amp = nullptr;
    if (amp_open(&amp, nullptr) != AMP_OK) return 3;
    int wrong = run(amp, 0) + run(amp, 3);
    amp_close(amp);
    return wrong;
}
END
if have "${CXX:-g++}"; then
    if ${CXX:-g++} -std=c++17 -O0 $flags -I. "$work/leaves_loader.cpp" "$work/impl.o" -o "$work/leaves_loader" -lm -lpthread 2> "$work/log"; then
        check "an exception leaves a callback" timeout 20 "$work/leaves_loader"
    else fail "an exception leaves a callback" "$(grep -m 1 error "$work/log")"; fi
else skip "an exception leaves a callback" "no ${CXX:-g++}"; fi
# An exception that leaves a callback: the program that catches it goes on, and ends well.
cat > "$work/leaves.cpp" <<'END'
#include "amp.h"
#include <cstdio>
#include <stdexcept>
static bool throwing;
static amp_result forward(void *, const amp_custom_call *c) {
    (void)amp_autocast_begin(c->amp, nullptr);
    if (throwing) throw std::runtime_error("out of forward");
    (void)amp_autocast_end(c->amp);
    return amp_add(c->amp, &c->x[0], &c->x[0], &c->y);
}
static amp_result backward(void *, const amp_custom_call *c) { return amp_add(c->amp, &c->dy, &c->dy, &c->dx[0]); }
static float numbers[64];
static const int32_t labels[8] = {0, 1, 2, 3, 4, 5, 6, 7};
static amp_result step(amp_tape *tape, amp_param *w) {
    amp_tensor x = amp_tensor2(numbers, AMP_F32, 8, 8);
    amp_custom_op op = {};
    op.forward = forward; op.backward = backward;
    (void)amp_tape_begin(tape, nullptr);
    amp_value h = amp_tape_linear(tape, amp_tape_input(tape, &x), w, nullptr, AMP_ACT_NONE);
    h = amp_tape_custom(tape, &h, 1, &op);
    return amp_tape_backward(tape, amp_tape_cross_entropy(tape, h, labels, nullptr), nullptr);
}
int main(int, char **argv) {
    int caught = 0, wrong = 0;
    amp_context *amp = nullptr; amp_model *model = nullptr; amp_tape *tape = nullptr; amp_optimizer *optimizer = nullptr;
    amp_optimizer_desc d = {};
    wrong += amp_open(&amp, nullptr) || amp_model_create(amp, &model, 1, 0) || amp_tape_create(amp, &tape, nullptr);
    amp_param *w = amp_model_param(model, "w", 8, 8, AMP_INIT_NORMAL, 0.1);
    wrong += amp_model_params(model, &d.params, &d.n_params) || amp_optimizer_create(amp, &optimizer, &d);
    throwing = true;
    try { (void)step(tape, w); } catch (const std::runtime_error &) { caught = 1; }
    throwing = false;
    if (argv[1][0] == '1')              /* goes on training, with no region left */
        wrong += step(tape, w) || amp_step(optimizer, nullptr) || amp_autocast_active(amp, nullptr) ||
                 amp_autocast_end(amp) != AMP_ERR_STATE;
    amp_tape_destroy(tape); amp_optimizer_destroy(optimizer); amp_model_destroy(model); amp_close(amp);
    if (wrong || !caught) std::printf("wrong: %s\n", amp_last_error());
    return wrong || !caught;
}
END
if have "${CXX:-g++}"; then
    ${CXX:-g++} -std=c++17 -O0 $flags -I. "$work/leaves.cpp" "$work/impl.o" -o "$work/leaves" -lm -lpthread 2> "$work/log"
    for on in 0 1; do
        if "$work/leaves" $on > "$work/log" 2>&1 && ! [ -s "$work/log" ]; then pass
        else fail "an exception that leaves a callback $on" "$(grep -m 3 'ERROR\|wrong\|#[0-3] ' "$work/log" || tail -n 2 "$work/log")"; fi
    done
fi

cat > "$work/returns.c" <<'END'
#include "amp.h"
#include <stdio.h>
#include <stdlib.h>
static amp_optimizer *o;
static amp_scaler *s;
static amp_grad_set *set;
/* Returns early, with the arrays of its frame gone, after closing what it opened first. */
static int train(int when) {
    float w[16] = {1}, g[16] = {1};
    amp_context *amp;
    amp_param p;
    amp_optimizer_desc od;
    amp_grad_set_desc sd;
    memset(&p, 0, sizeof p); memset(&od, 0, sizeof od); memset(&sd, 0, sizeof sd);
    p.name = "w"; p.weight = amp_tensor2(w, AMP_F32, 4, 4); p.grad = amp_tensor2(g, AMP_F32, 4, 4);
    od.params = sd.params = &p; od.n_params = sd.n_params = 1;
    if (amp_open(&amp, NULL) != AMP_OK || amp_param_register(amp, &p, 1) != AMP_OK || amp_optimizer_create(amp, &o, &od) != AMP_OK) return 1;
    if (when > 0 && amp_scaler_create(amp, &s, NULL) != AMP_OK) return 1;
    if (when > 1 && amp_grad_set_create(amp, &set, &sd) != AMP_OK) return 1;
    if (when > 2 && (amp_param_accumulate(&p), amp_scaler_check(s, set, AMP_CHECK_READ)) != AMP_OK) return 1;
    if (when > 3 && amp_autocast_begin(amp, NULL) != AMP_OK) return 1;
    amp_close(amp);
    return 0;
}
int main(int argc, char **argv) {
    int when = argc > 1 ? atoi(argv[1]) : 0;
    char dirt[4096];
    if (train(when)) return puts("wrong: it could not even train"), 1;
    memset(dirt, when + 1, sizeof dirt);
    if (amp_step(o, s) != AMP_ERR_STATE || strstr(amp_last_error(), "was closed") == NULL) return puts("wrong: it steps"), (int)dirt[when];
    if (when > 0 && amp_scaler_update(s) != AMP_ERR_STATE) return puts("wrong: it updates"), 1;
    amp_optimizer_destroy(o);
    amp_grad_set_destroy(set);
    amp_scaler_destroy(s);
    return 0;
}
END
if $cc -std=c99 -O0 $flags -I. "$work/returns.c" "$work/impl.o" -o "$work/returns" -lm -lpthread 2> "$work/log"; then
    for when in 0 1 2 3 4; do ran "C that returns" "$work/returns" $when; done
else fail "C that returns" "$(grep -m 1 error "$work/log")"; fi

# Two implementations in one program: ids of both, and a parameter that both know.
cat > "$work/part.c" <<'END'
#define AMP_STATIC
#define AMP_IMPLEMENTATION
#include "amp.h"
static amp_context *amp;
amp_result OPEN(void);
amp_result OPEN(void) { return amp_open(&amp, NULL); }
amp_result KNOW(amp_param *p);
amp_result KNOW(amp_param *p) { return amp_param_register(amp, p, 1); }
amp_result USE(amp_param *p, const float *x, float *y);
amp_result USE(amp_param *p, const float *x, float *y) {
    amp_linear_op op;
    amp_autocast_desc d;
    amp_result r = AMP_OK;
    int i;
    memset(&op, 0, sizeof op); memset(&d, 0, sizeof d);
    d.dtype = AMP_BF16;
    op.x = amp_tensor2(x, AMP_F32, 4, 4); op.weight = p; op.y = amp_tensor2(y, AMP_F32, 4, 4);
    for (i = 0; i < 3 && r == AMP_OK; i++) {
        if (amp_autocast_begin(amp, &d) != AMP_OK) return AMP_ERR_NAME;
        r = amp_linear(amp, &op);
        if (amp_autocast_end(amp) != AMP_OK) return AMP_ERR_NAME;
    }
    return r;
}
void SHUT(void);
void SHUT(void) { amp_close(amp); }
END
cat > "$work/both.c" <<'END'
#include "amp.h"
#include <stdio.h>
amp_result open_a(void), open_b(void), know_a(amp_param *), know_b(amp_param *), use_a(amp_param *, const float *, float *), use_b(amp_param *, const float *, float *);
void shut_a(void), shut_b(void);
int main(void) {
    static float w[2][16], x[16], y[16];
    amp_param p[2];
    int i;
    memset(p, 0, sizeof p);
    for (i = 0; i < 16; i++) { w[0][i] = 1; w[1][i] = -1; x[i] = 1; }
    for (i = 0; i < 2; i++) { p[i].name = i ? "q" : "p"; p[i].weight = amp_tensor2(w[i], AMP_F32, 4, 4); }
    if (open_a() || open_b() || know_a(&p[0]) || know_b(&p[1])) return puts("wrong: not even opened"), 1;
    if (p[0].id == p[1].id || p[0].context == p[1].context) return puts("wrong: one id for two"), 1;
    if (use_a(&p[0], x, y) || y[0] != 4 || use_b(&p[1], x, y) || y[0] != -4) return puts("wrong: values"), 1;
    if (use_a(&p[1], x, y) != AMP_ERR_STATE || use_b(&p[0], x, y) != AMP_ERR_STATE) return puts("wrong: not refused"), 1;
    if (know_a(&p[1]) || use_a(&p[1], x, y) || y[0] != -4 || use_b(&p[1], x, y) != AMP_ERR_STATE) return puts("wrong: the one that knows it last has it"), 1;
    shut_a();
    shut_b();
    return 0;
}
END
for part in a b; do $cc -std=c99 -O0 -I. -DOPEN=open_$part -DKNOW=know_$part -DUSE=use_$part -DSHUT=shut_$part -c "$work/part.c" -o "$work/part_$part.o"; done
if $cc -std=c99 -O0 -I. "$work/both.c" "$work/part_a.o" "$work/part_b.o" -o "$work/both" -lm -lpthread 2> "$work/log"; then ran "two implementations" "$work/both" -1
else fail "two implementations" "$(grep -m 1 'error\|undefined' "$work/log")"; fi
closing
