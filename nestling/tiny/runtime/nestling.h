/* Nestling's training engine for microcontrollers: forward, backward and SGD in one arena, told by a descriptor what to compute.
 *
 * C99, freestanding: no heap, no recursion, no libc, nothing static that changes. All arithmetic is binary32 in one fixed order
 * with own exp, log and sqrt, and must be compiled with -ffp-contract=off: every board and the host give the same bits.
 *
 * planning/descriptor.py is the other half of this file and says what the fields mean. Nothing that arrives is trusted:
 * nst_attach, nst_begin, nst_blob_open and nst_sample check what they are given before its first use.
 */
#ifndef NESTLING_H
#define NESTLING_H

#include <float.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define NST_MAGIC 0x4C54534Eu /* "NSTL" */
#define NST_BLOB_MAGIC 0x4454534Eu /* "NSTD" */
#define NST_VERSION 1u
#define NST_NONE 0xFFFFFFFFu
#define NST_MOST_OPS 256u
#define NST_SELF 0xFFFFFFu /* as many values as a target can have: it is the sample itself */
#define NST_REACH 2 /* how many pixels an image is moved at most, each way */

enum { NST_CONV = 1, NST_DENSE, NST_MAX_POOL, NST_AVG_POOL, NST_ADD, NST_GROUP_NORM, NST_AFFINE, NST_ACTIVATION };
enum { NST_LINEAR, NST_RELU, NST_RELU6 };
enum { NST_TRAINED = 1, NST_INPUT_GRADIENT = 2, NST_ADD_TO_FIRST = 4, NST_ADD_TO_SECOND = 8 };

/* What the functions below answer. native.py has the words for them. */
enum {
    NST_OK,
    NST_BAD_ARGUMENT,   /* a null or unaligned pointer */
    NST_BAD_MAGIC,      /* not a descriptor (or a blob), or of another version */
    NST_BAD_LENGTH,     /* its length does not agree with what it says */
    NST_BAD_CRC,
    NST_TOO_LARGE,      /* the plan needs a larger arena */
    NST_BAD_HEADER,     /* a number of the header that cannot be */
    NST_BAD_PLACE,      /* a buffer that is missing, unaligned or not inside the arena */
    NST_BAD_OVERLAP,    /* two buffers that must be apart */
    NST_BAD_KIND,       /* an unknown kind of operation, flag or activation */
    NST_BAD_SHAPE,      /* sizes that do not agree with each other */
    NST_BAD_PARAMETER,  /* weights or biases outside of their block */
    NST_BAD_NUMBER,     /* not finite, or out of its range */
    NST_BAD_SETTINGS,   /* settings that this plan has no buffer for */
    NST_BAD_STATE,      /* not now: nothing attached, not begun, the batch not complete */
    NST_BAD_ROW,        /* no such row in the data */
    NST_BAD_LABEL,      /* a label that the network has no class for */
    NST_BAD_SHIFT,      /* further than NST_REACH */
    NST_BAD_INNER,      /* more inner inputs than there are, or the last operation is not a trained dense one */
    NST_BAD_DATA        /* data of another shape than the network's input, or whose targets are not what is asked for */
};

typedef struct {
    uint32_t magic, version, words, crc;
    uint32_t ops, params, trained, arena;
    uint32_t weights, grads, momentum, anchor, mask;
    uint32_t input, in_channels, in_height, in_width;
    uint32_t output, output_grad, classes, target, present;
} nst_header;

typedef struct {
    uint8_t kind, flags, activation, unused;
    uint32_t first, second, out, first_grad, second_grad, out_grad, aux, weight, bias;
    uint16_t in_channels, in_height, in_width, out_channels, out_height, out_width;
    uint8_t kernel_height, kernel_width, stride_height, stride_width, pad_top, pad_left;
    uint16_t groups;
    float scale, eps;
} nst_op;

typedef struct {
    float lr, momentum, decay, clip, mu, ce, mse, kd, temperature, inner;
} nst_settings;

/* A client's data as it lies in flash, checked. `kind` is of two parts, see data.c; targets are labels (uint16_t) or floats. */
typedef struct {
    uint32_t rows, channels, height, width, kind, crc;
    float scale, offset;
    const void *targets;
    const void *samples;
} nst_blob;

typedef struct {
    const nst_header *header; /* null: nothing attached */
    const nst_op *ops;
    uint8_t *arena;
    uint32_t arena_bytes;
    uint32_t begun;   /* settings are in force */
    uint32_t steps;   /* done since nst_begin */
    uint32_t batch;   /* samples of the batch at work, and how many of them are in the gradients */
    uint32_t pending;
    uint32_t inner;   /* of the sample at work */
    uint32_t bad_op;  /* which operation nst_attach refused; NST_NONE: none of them */
    float loss;       /* summed over the samples of the batch at work; complete (proximal term included) after nst_step */
    nst_settings settings;
} nst_engine;

/* Which block nst_block gives. */
enum {
    NST_BLOCK_WEIGHTS,
    NST_BLOCK_MOMENTUM,
    NST_BLOCK_ANCHOR,
    NST_BLOCK_MASK,
    NST_BLOCK_PRESENT,
    NST_BLOCK_TARGET,
    NST_BLOCK_LOGITS
};

/* Takes a descriptor and an arena, which must both stay where they are (and be aligned to 4). Everything in it is checked. */
int nst_attach(nst_engine *e, const void *descriptor, uint32_t bytes, void *arena, uint32_t arena_bytes);

/* Starts a phase: checks the settings, clears gradients, momentum and counters. Weights and other blocks are left alone. */
int nst_begin(nst_engine *e, const nst_settings *s);

/* One sample of a batch of `batch`: forward, loss, backward; its share of the mean gradient is added to the gradients.
 * down, right: how far the image is moved (-NST_REACH..NST_REACH). inner: how many inputs of the last layer the inner loss sees.
 * target: `classes` floats; null: none, or the values that are the row's target in the data. loss: the sample's, unless null. */
int nst_sample(nst_engine *e, const nst_blob *data, uint32_t row, int down, int right, uint32_t batch, uint32_t inner,
               const float *target, float *loss);

/* The update after all samples of a batch. e->loss is then the batch's summed loss. */
int nst_step(nst_engine *e);

/* All samples of a batch, then the step: shifts are (down, right) pairs or null, targets (rows of the data, classes) or null. */
int nst_batch(nst_engine *e, const nst_blob *data, const uint32_t *rows, const int8_t *shifts, const float *targets, uint32_t batch,
              uint32_t inner);

/* The logits of a row; at nst_block(LOGITS). */
int nst_forward(nst_engine *e, const nst_blob *data, uint32_t row);

/* A block of the arena and its size in bytes; null where the plan has none. */
void *nst_block(nst_engine *e, uint32_t which, uint32_t *bytes);

/* Reads a client's data, checked (its CRC too). `data` must stay where it is and be aligned to 4. */
int nst_blob_open(nst_blob *blob, const void *data, uint32_t bytes);

/* For callers in other languages, to compare with their own idea: size of nst_engine * 65536 + size of nst_blob. */
uint32_t nst_sizes(void);

/* Between the files of the engine. */
float nst_exp(float x);
float nst_log(float x);
float nst_sqrt(float x);
bool nst_finite(float x);
uint32_t nst_crc32(uint32_t crc, const void *data, uint32_t bytes); /* zlib's: start with 0 */
void nst_copy(void *to, const void *from, uint32_t bytes);
void nst_zero(void *to, uint32_t bytes);
int nst_check(nst_engine *e);
int nst_load(float *input, const nst_blob *data, uint32_t row, int down, int right);
void nst_load_target(float *target, const nst_blob *data, uint32_t row);
static inline bool nst_of_bytes(const nst_blob *data) { return (data->kind & 0xFFu) != 0; }
static inline uint32_t nst_values(const nst_blob *data) { return data->kind >> 8; } /* that a target has; 0: it is a label */
static inline uint32_t nst_label(const nst_blob *data, uint32_t row) { return ((const uint16_t *)data->targets)[row]; }
static inline uint32_t nst_target_size(const nst_blob *data) {
    return nst_values(data) == NST_SELF ? data->channels * data->height * data->width : nst_values(data);
}
void nst_op_forward(nst_engine *e, const nst_op *op);
void nst_op_backward(nst_engine *e, const nst_op *op);
void nst_conv_forward(const nst_op *op, float *out, const float *in, const float *w);
void nst_conv_backward(const nst_op *op, const float *grad, float *in, const float *w);
void nst_conv_weights(const nst_op *op, const float *grad, const float *in, float *dw);
/* Rows of n entries, `count` of them: to += f[k step] from[k]; to[k] += x . from[k]; to[k] += f[k] x. */
void nst_add_rows(float *to, const float *from, const float *f, uint32_t step, uint32_t count, uint32_t n);
void nst_dot_rows(float *to, const float *x, const float *from, uint32_t count, uint32_t n);
void nst_outer(float *to, const float *x, const float *f, uint32_t count, uint32_t n);

static inline float *nst_at(const nst_engine *e, uint32_t offset) { return (float *)(void *)(e->arena + offset); }
static inline uint32_t nst_in_size(const nst_op *op) { return (uint32_t)op->in_channels * op->in_height * op->in_width; }
static inline uint32_t nst_out_size(const nst_op *op) { return (uint32_t)op->out_channels * op->out_height * op->out_width; }

/* Functions that a compiler must not merge into their callers, whose stack would be kept for all that they call after them. */
#define NST_APART __attribute__((noinline))

#define NST_ASSERT(name, condition) typedef char nst_assert_##name[(condition) ? 1 : -1]
NST_ASSERT(header, sizeof(nst_header) == 88);
NST_ASSERT(op, sizeof(nst_op) == 68);
NST_ASSERT(settings, sizeof(nst_settings) == 40);
NST_ASSERT(floats, sizeof(float) == 4 && FLT_EVAL_METHOD == 0);
#ifdef __BYTE_ORDER__
NST_ASSERT(little_endian, __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);
#endif

#endif
