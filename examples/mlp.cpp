// mlp.cpp - a classifier in C++17: objects that destroy themselves, errors as exceptions, designated fields left out.
//
//     printf '#define AMP_IMPLEMENTATION\n#include "amp.h"\n' > amp.c && gcc -O2 -c amp.c
//     g++ -O2 -std=c++17 examples/mlp.cpp amp.o -o mlp_cpp -lpthread && ./mlp_cpp
#include "../amp.h"
#include <array>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <vector>

static void check(amp_result result) {
    if (result != AMP_OK) throw std::runtime_error(amp_last_error());
}

// An amp.h object: made by a call that takes a place for it, destroyed at the end of the scope, in reverse order.
template <typename T, void (*destroy)(T *)>
struct owner {
    struct deleter { void operator()(T *p) const { destroy(p); } };
    std::unique_ptr<T, deleter> held;
    template <typename... Args, typename... Given>
    explicit owner(amp_result (*create)(amp_context *, T **, Args...), amp_context *amp, Given... given) {
        T *made = nullptr;
        check(create(amp, &made, given...));
        held.reset(made);
    }
    operator T *() const { return held.get(); }
};
using model = owner<amp_model, amp_model_destroy>;
using tape = owner<amp_tape, amp_tape_destroy>;
using optimizer = owner<amp_optimizer, amp_optimizer_destroy>;
using loader = owner<amp_loader, amp_loader_destroy>;

struct context {
    amp_context *amp = nullptr;
    context() { check(amp_open(&amp, nullptr)); }
    ~context() { amp_close(amp); }
    context(const context &) = delete;
    context &operator=(const context &) = delete;
    operator amp_context *() const { return amp; }
};

constexpr int rows = 6000, training = 5000, in = 8, hidden = 64, classes = 4, steps = 1500;

struct network {
    amp_param *w1, *b1, *w2, *b2;
    explicit network(amp_model *m)
        : w1(amp_model_param(m, "first.weight", hidden, in, AMP_INIT_KAIMING_NORMAL, 0)),
          b1(amp_model_param(m, "first.bias", hidden, 0, AMP_INIT_ZEROS, 0)),
          w2(amp_model_param(m, "second.weight", classes, hidden, AMP_INIT_KAIMING_NORMAL, 0)),
          b2(amp_model_param(m, "second.bias", classes, 0, AMP_INIT_ZEROS, 0)) {}
    // Records itself and its loss on the next batch.
    amp_value record(amp_tape *t, amp_loader *data, amp_mode mode) const {
        amp_autocast_desc region = {};
        amp_batch batch;
        region.mode = mode;
        check(amp_loader_next(data, &batch));
        check(amp_tape_begin(t, &region));
        amp_tensor x = amp_tensor2(const_cast<void *>(batch.fields[0]), AMP_F32, batch.batch, in);
        amp_value h = amp_tape_linear(t, amp_tape_input(t, &x), w1, b1, AMP_ACT_RELU);
        h = amp_tape_linear(t, h, w2, b2, AMP_ACT_NONE);
        return amp_tape_cross_entropy(t, h, static_cast<const int32_t *>(batch.fields[1]), nullptr);
    }
};

static void run() {
    std::vector<std::array<float, in>> x(rows);
    std::vector<int32_t> y(rows);
    for (int i = 0; i < rows * in; i++) x[size_t(i / in)][size_t(i % in)] = amp_random_uniform(1, uint64_t(i)) - 0.5f;
    for (size_t i = 0; i < size_t(rows); i++) y[i] = (x[i][0] * x[i][1] > 0) + 2 * (x[i][2] > x[i][3]);

    context amp;
    model weights(amp_model_create, amp, uint64_t(1), int64_t(0));
    tape t(amp_tape_create, amp, static_cast<const amp_tape_desc *>(nullptr));
    network net(weights);
    amp_tensor arrays[2] = {amp_tensor2(x.data(), AMP_F32, rows, in), amp_tensor1(y.data(), AMP_I32, rows)};
    amp_loader_desc first = {}, rest = {};
    first.tensors = rest.tensors = arrays;
    first.n_tensors = rest.n_tensors = 2;
    first.batch = 100; first.last = training; first.shuffle = 1;
    rest.batch = rows - training; rest.first = training;
    loader train(amp_loader_create, amp, static_cast<const amp_loader_desc *>(&first));
    loader test(amp_loader_create, amp, static_cast<const amp_loader_desc *>(&rest));
    amp_optimizer_desc desc = {};
    desc.lr = 3e-3; desc.clip_norm = 1;
    check(amp_model_params(weights, &desc.params, &desc.n_params));
    optimizer adamw(amp_optimizer_create, amp, static_cast<const amp_optimizer_desc *>(&desc));

    for (int step = 1; step <= steps; step++) {
        check(amp_tape_backward(t, net.record(t, train, AMP_MODE_TRAINING), nullptr));
        check(amp_step(adamw, nullptr));
        if (step % 500 != 0) continue;
        float loss;
        amp_value value = net.record(t, test, AMP_MODE_INFERENCE);
        check(amp_tape_finish(t));
        check(amp_tape_read(t, value, &loss, 1));
        std::printf("step %d: validation loss %.4f\n", step, double(loss));
    }
}

int main() try {
    run();
    return std::fflush(stdout) != 0 || std::ferror(stdout);
} catch (const std::exception &e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
}
