/* Reads descriptors (a length in 4 bytes, then as many bytes) and answers each with a line: the code of nst_attach, and where
 * that is 0, the codes of begin, a sample, a step and a forward pass. With an argument, the same for data. Every buffer has
 * exactly its size and lies on the heap, so that AddressSanitizer sees each byte read or written beside it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nestling.h"

enum { ROWS = 2, LARGEST = 1 << 22 };

static nst_blob data_for(const nst_header *h, void **labels, void **samples) {
    uint32_t size = h->in_channels * h->in_height * h->in_width;
    uint16_t *y = malloc(ROWS * sizeof *y);
    float *x = malloc(ROWS * size * sizeof *x);
    for (uint32_t k = 0; k < ROWS; k++) y[k] = (uint16_t)(k % h->classes);
    for (uint32_t k = 0; k < ROWS * size; k++) x[k] = (float)((k * 37u) % 101u) / 50.0f - 1.0f;
    nst_blob blob = {ROWS, h->in_channels, h->in_height, h->in_width, 0, 0, 1.0f, 0.0f, y, x};
    *labels = y;
    *samples = x;
    return blob;
}

static void fill(nst_engine *e, uint32_t which, float step) {
    uint32_t bytes = 0;
    float *at = nst_block(e, which, &bytes);
    for (uint32_t k = 0; at != NULL && k < bytes / 4; k++) at[k] = (float)((k * 13u) % 29u) * step - 14.0f * step;
}

static void train(nst_engine *e) {
    const nst_header *h = e->header;
    nst_settings s = {0.01f, 0.0f, 0.01f, 1.0f, 0.0f, 1.0f, 0.0f, 0.0f, 2.0f, 0.5f};
    void *labels, *samples;
    nst_blob blob = data_for(h, &labels, &samples);
    s.momentum = h->momentum != NST_NONE ? 0.9f : 0.0f;
    s.mu = h->anchor != NST_NONE ? 0.1f : 0.0f;
    s.kd = s.mse = h->target != NST_NONE ? 0.3f : 0.0f;
    for (uint32_t k = NST_BLOCK_WEIGHTS; k <= NST_BLOCK_TARGET; k++) fill(e, k, 0.02f);
    float *target = h->target != NST_NONE ? calloc(h->classes, sizeof *target) : NULL;
    printf(" %d", nst_begin(e, &s));
    printf(" %d", nst_sample(e, &blob, 0, 1, -2, 2, 0, target, NULL));
    if (nst_sample(e, &blob, 1, 0, 0, 2, 1, target, NULL) != NST_OK) nst_sample(e, &blob, 1, 0, 0, 2, 0, target, NULL);
    free(target);
    printf(" %d", nst_step(e));
    printf(" %d", nst_forward(e, &blob, 1));
    free(labels);
    free(samples);
}

/* The same on data whose targets are values, an inner loss among it. */
static void train_on_values(nst_engine *e) {
    const nst_header *h = e->header;
    nst_settings s = {0.01f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 1.0f, 0.0f, 1.0f, 0.5f};
    void *labels, *samples;
    nst_blob blob = data_for(h, &labels, &samples);
    float *targets = calloc((size_t)ROWS * h->classes, sizeof *targets);
    blob.kind = h->classes << 8;
    blob.targets = targets;
    if (nst_begin(e, &s) == NST_OK && nst_sample(e, &blob, 0, 0, 0, 2, 0, NULL, NULL) == NST_OK) {
        if (nst_sample(e, &blob, 1, 0, 0, 2, 1, NULL, NULL) != NST_OK) nst_sample(e, &blob, 1, 0, 0, 2, 0, NULL, NULL);
        nst_step(e);
        blob.kind = NST_SELF << 8;
        nst_sample(e, &blob, 1, 1, -2, 2, 0, NULL, NULL);
    }
    free(targets);
    free(labels);
    free(samples);
}

static void try_descriptor(const void *descriptor, uint32_t bytes) {
    uint32_t arena_bytes = bytes >= sizeof(nst_header) ? ((const nst_header *)descriptor)->arena : 64;
    if (arena_bytes > LARGEST) arena_bytes = LARGEST;
    void *arena = malloc(arena_bytes);
    memset(arena, 0x11, arena_bytes);
    nst_engine *e = malloc(sizeof *e);
    int code = nst_attach(e, descriptor, bytes, arena, arena_bytes);
    printf("%d", code);
    if (code == NST_OK) {
        train(e);
        train_on_values(e);
    }
    free(e);
    free(arena);
}

static void try_data(const void *data, uint32_t bytes) {
    nst_blob blob;
    int code = nst_blob_open(&blob, data, bytes);
    printf("%d", code);
    if (code != NST_OK) return;
    float *input = malloc((size_t)blob.channels * blob.height * blob.width * sizeof *input);
    int last = nst_load(input, &blob, blob.rows - 1, 2, -2), far = nst_load(input, &blob, 0, 3, 0);
    float *target = malloc((size_t)nst_target_size(&blob) * sizeof *target); /* read it: it is the last of them */
    if (nst_values(&blob) != 0) nst_load_target(target, &blob, blob.rows - 1);
    volatile uint32_t label = nst_values(&blob) == 0 ? nst_label(&blob, blob.rows - 1) : 0;
    (void)label;
    free(target);
    printf(" %d %d", last, far);
    free(input);
}

int main(int count, char **words) {
    (void)words;
    uint32_t bytes;
    while (fread(&bytes, 4, 1, stdin) == 1) {
        if (bytes > LARGEST) return 2;
        void *given = malloc(bytes);
        if (bytes != 0 && fread(given, bytes, 1, stdin) != 1) return 2;
        (count > 1 ? try_data : try_descriptor)(given, bytes);
        printf("\n");
        free(given);
    }
    return 0;
}
