/* block.c - the recorded graph of a GPT's block as a program for Graphviz; block.svg is its picture.
 *
 *     gcc -O2 examples/plot/block.c -o block -lm -lpthread && ./block | dot -Tsvg > examples/plot/block.svg */
#define AMP_IMPLEMENTATION
#include "../../amp.h"
#include "../gpt.h"

int main(void) {
    static float stream[2 * 64 * 128];
    static char text[1 << 14];
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
    fputs(text, stdout);
    gpt_destroy(&model);
    amp_close(amp);
    return 0;
}
