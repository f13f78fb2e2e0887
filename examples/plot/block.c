/* block.c - the recorded graph of a GPT's block as a program for Graphviz; block.svg is its picture.
 *
 *     gcc -O2 examples/plot/block.c -o block -lm -lpthread && ./block | dot -Tsvg > examples/plot/block.svg
 *
 * amp_tape_dot writes everything on one line of a box.  The picture has two lines in each, without what is the same in
 * all names and without the bytes, and a colour for the precision. */
#define AMP_IMPLEMENTATION
#include "../../amp.h"
#include "../gpt.h"

static char text[1 << 14], edited[1 << 14];

/* Replaces every `from` in text. */
static void replace(const char *from, const char *to) {
    size_t n = 0;
    const char *s = text;
    while (*s != 0 && n + strlen(to) + 1 < sizeof edited) {
        if (strncmp(s, from, strlen(from)) == 0) {
            memcpy(edited + n, to, strlen(to));
            n += strlen(to);
            s += strlen(from);
        } else edited[n++] = *s++;
    }
    edited[n] = 0;
    memcpy(text, edited, n + 1);
}

/* Removes ", 32768 bytes" and the like. */
static void remove_bytes(void) {
    char *end;
    while ((end = strstr(text, " bytes\"")) != NULL) {
        char *begin = end;
        while (*begin != ',') begin--;
        memmove(begin, end + strlen(" bytes"), strlen(end + strlen(" bytes")) + 1);
    }
}

static void edit(void) {
    remove_bytes();
    replace("transformer.h.0.", "");
    replace(".weight", "");
    replace("shape=box, fontname=\"Helvetica\"",
            "shape=box, style=filled, fillcolor=white, fontname=\"Helvetica,Arial,sans-serif\", fontsize=18, "
            "margin=\"0.22,0.1\"");
    replace(" [2,", "\\n[2,");
    replace("fp32 in fp32, done by %9\", style=dashed", "fp32, computed by the norm below\", style=\"filled,dashed\"");
    replace("bf16 in bf16\"", "bf16, computed in bf16\", fillcolor=\"#cfe8d8\"");
    replace("bf16 in fp32\"", "bf16, computed in fp32\", fillcolor=\"#d3e3f3\"");
    replace("fp32 in fp32\"", "fp32, computed in fp32\", fillcolor=\"#d3e3f3\"");
}

int main(void) {
    static float stream[2 * 64 * 128];
    amp_context *amp;
    amp_desc desc;
    amp_tensor x = amp_tensor3(stream, AMP_F32, 2, 64, 128);
    amp_attention_op causal;
    gpt_config config;
    gpt model;
    ex_begin();
    memset(&desc, 0, sizeof desc);
    memset(&config, 0, sizeof config);
    memset(&causal, 0, sizeof causal);
    desc.dtype = config.activations = AMP_BF16;
    config.vocab = config.positions = config.seq = 64;
    config.channels = 128; config.heads = 4; config.layers = 1; config.batch = 2;
    causal.mask.kind = AMP_MASK_CAUSAL;
    if (amp_open(&amp, &desc) != AMP_OK || gpt_create(&model, amp, &config) != AMP_OK ||
        gpt_init(&model, 1) != AMP_OK || model_tape_begin(model.tape, 0) != AMP_OK ||
        gpt_block(&model, amp_tape_input(model.tape, &x), model.params + 2, &causal) == 0 ||
        amp_tape_finish(model.tape) != AMP_OK || amp_tape_dot(model.tape, text, sizeof text) >= sizeof text) {
        fprintf(stderr, "%s\n", ex_error());
        return 1;
    }
    edit();
    fputs(text, stdout);
    gpt_destroy(&model);
    amp_close(amp);
    return 0;
}
