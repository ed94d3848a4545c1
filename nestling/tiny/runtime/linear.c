/* Convolutions and dense layers, where nearly all time goes.
 *
 * The inner loops keep weights or sums in registers and walk along rows with one pointer each. Their order of additions is part of
 * what they promise, since it is what makes all boards agree; none of them may depend on the target.
 *
 * A convolution goes one of three ways by its shape: 3x3 of stride 1, 1x1 of stride 1, and everything else. Forward adds to the
 * output, backward to the gradient of the input, and the third to the gradient of the weights.
 */
#include "nestling.h"

/* --- Rows and planes of one length ----------------------------------------------------------------------------------------- */

/* to += f * a */
static void add_one(float *to, const float *a, float f, uint32_t n) {
    for (const float *end = a + n; a != end;) *to++ += f * *a++;
}

/* to += f[0] * a + f[step] * (a + n) + f[2 step] * (a + 2 n) + f[3 step] * (a + 3 n) */
static void add_four(float *to, const float *a, const float *f, uint32_t step, uint32_t n) {
    const float *b = a + n, *c = b + n, *d = c + n, *end = b;
    float f0 = f[0], f1 = f[step], f2 = f[2 * step], f3 = f[3 * step];
    while (a != end) *to++ += (f0 * *a++ + f1 * *b++) + (f2 * *c++ + f3 * *d++);
}

static float dot(const float *a, const float *b, uint32_t n) {
    float sum = 0.0f;
    for (const float *end = a + n; a != end;) sum += *a++ * *b++;
    return sum;
}

/* sums[k] += x times (a + k * n) */
static void dot_four(float *sums, const float *x, const float *a, uint32_t n) {
    const float *b = a + n, *c = b + n, *d = c + n, *end = b;
    float s0 = 0.0f, s1 = 0.0f, s2 = 0.0f, s3 = 0.0f;
    while (a != end) {
        float each = *x++;
        s0 += each * *a++;
        s1 += each * *b++;
        s2 += each * *c++;
        s3 += each * *d++;
    }
    sums[0] += s0;
    sums[1] += s1;
    sums[2] += s2;
    sums[3] += s3;
}

void nst_add_rows(float *to, const float *from, const float *f, uint32_t step, uint32_t count, uint32_t n) {
    for (; count >= 4; count -= 4, from += 4 * n, f += 4 * step) add_four(to, from, f, step, n);
    for (; count != 0; count--, from += n, f += step) add_one(to, from, *f, n);
}

void nst_dot_rows(float *to, const float *x, const float *from, uint32_t count, uint32_t n) {
    for (; count >= 4; count -= 4, from += 4 * n, to += 4) dot_four(to, x, from, n);
    for (; count != 0; count--, from += n) *to++ += dot(x, from, n);
}

void nst_outer(float *to, const float *x, const float *f, uint32_t count, uint32_t n) {
    for (; count != 0; count--, to += n) add_one(to, x, *f++, n);
}

/* Sizes of a convolution: channels of a group, entries of a plane, taps of a kernel. */
static uint32_t ins(const nst_op *op) { return op->in_channels / op->groups; }
static uint32_t outs(const nst_op *op) { return op->out_channels / op->groups; }
static uint32_t in_plane(const nst_op *op) { return (uint32_t)op->in_height * op->in_width; }
static uint32_t out_plane(const nst_op *op) { return (uint32_t)op->out_height * op->out_width; }

/* --- 1x1 of stride 1: a matrix product ------------------------------------------------------------------------------------- */

static void point_forward(const nst_op *op, float *out, const float *in, const float *w) {
    uint32_t i = ins(op), o = outs(op), n = in_plane(op);
    for (uint32_t k = 0; k < op->out_channels; k++) nst_add_rows(out + k * n, in + k / o * i * n, w + k * i, 1, i, n);
}

static void point_backward(const nst_op *op, const float *grad, float *in, const float *w) {
    uint32_t i = ins(op), o = outs(op), n = in_plane(op);
    for (uint32_t k = 0; k < op->in_channels; k++) {
        uint32_t first = k / i * o;
        nst_add_rows(in + k * n, grad + first * n, w + first * i + k % i, i, o, n);
    }
}

static void point_weights(const nst_op *op, const float *grad, const float *in, float *dw) {
    uint32_t i = ins(op), o = outs(op), n = in_plane(op);
    for (uint32_t k = 0; k < op->out_channels; k++) nst_dot_rows(dw + k * i, grad + k * n, in + k / o * i * n, i, n);
}

/* --- 3x3 of stride 1 ------------------------------------------------------------------------------------------------------- */

/* A plane of 3x3 taps of stride 1: to[y][x] += sum of w[ky][kx] * from[y - pad_y + ky][x - pad_x + kx]. The gradient of the input
 * is the same with w turned round and the padding 2 - pad. */
typedef struct {
    uint32_t to_height, to_width, from_height, from_width, pad_y, pad_x;
} plane;

/* Some rows of `to` that read the same of their three rows: those from `low` to below `high`. Where all exist, that is all the rows
 * between the borders; else one row. A row that does not exist is replaced by another: its weights are zero, or its sums not used. */
typedef struct {
    uint32_t low, high, rows;
    const float *start[3];
} stretch;

static stretch stretch_at(const plane *p, const float *from, uint32_t y) {
    stretch s;
    uint32_t end = p->from_height + p->pad_y - y;
    s.low = y < p->pad_y ? p->pad_y - y : 0;
    s.high = end < 3 ? end : 3;
    s.rows = s.low == 0 && s.high == 3 ? end - 2 : 1;
    for (uint32_t k = 0; k < 3; k++) {
        uint32_t there = k < s.low ? s.low : k >= s.high ? s.high - 1 : k;
        s.start[k] = from + (y + there - p->pad_y) * p->from_width;
    }
    return s;
}

/* A column of `from` belongs to three columns of `to`: the first of them is then complete, the others have begun. `skip`
 * (2 - pad_x) columns at either end lie outside of `to`. */
static void spread(const stretch *s, float *to, uint32_t skip, uint32_t n, const float *w) {
    const float *a = s->start[0], *b = s->start[1], *c = s->start[2];
    float a0 = w[0], a1 = w[1], a2 = w[2], b0 = w[3], b1 = w[4], b2 = w[5], c0 = w[6], c1 = w[7], c2 = w[8];
    for (uint32_t rows = s->rows; rows != 0; rows--) {
        const float *end = a + n;
        float first = 0.0f, second = 0.0f;
        for (uint32_t k = skip; k != 0; k--) {
            float p = *a++, q = *b++, r = *c++;
            first = second + (a1 * p + b1 * q + c1 * r);
            second = a0 * p + b0 * q + c0 * r;
        }
        while (a != end) {
            float p = *a++, q = *b++, r = *c++;
            *to++ += first + (a2 * p + b2 * q + c2 * r);
            first = second + (a1 * p + b1 * q + c1 * r);
            second = a0 * p + b0 * q + c0 * r;
        }
        if (skip < 2) *to++ += first;
        if (skip < 1) *to++ += second;
    }
}

/* `turned`: with the nine weights in reverse. */
static void plane_add(const plane *p, float *to, const float *from, const float *w, bool turned) {
    for (uint32_t y = 0; y < p->to_height;) {
        stretch s = stretch_at(p, from, y);
        float used[9];
        for (uint32_t k = 0; k < 9; k++) used[k] = k >= 3 * s.low && k < 3 * s.high ? w[turned ? 8 - k : k] : 0.0f;
        spread(&s, to + y * p->to_width, 2 - p->pad_x, p->from_width, used);
        y += s.rows;
    }
}

static void add_three(float *to, float a, float b, float c) {
    to[0] += a;
    to[1] += b;
    to[2] += c;
}

/* Adds the nine sums of grad[y][x] * from[y - pad_y + ky][x - pad_x + kx] over a stretch. Of three neighbouring gradients the
 * newest belongs to the first tap; before and after the row they are zero. */
static void gather(const stretch *s, float *dw, const float *grad, uint32_t pad, uint32_t m) {
    const float *a = s->start[0], *b = s->start[1], *c = s->start[2];
    float a0 = 0.0f, a1 = 0.0f, a2 = 0.0f, b0 = 0.0f, b1 = 0.0f, b2 = 0.0f, c0 = 0.0f, c1 = 0.0f, c2 = 0.0f;
    for (uint32_t rows = s->rows; rows != 0; rows--) {
        const float *end = grad + m;
        float g2 = pad == 2 ? *grad++ : 0.0f, g1 = pad != 0 ? *grad++ : 0.0f;
        while (grad != end) {
            float p = *a++, q = *b++, r = *c++, g0 = *grad++;
            a0 += g0 * p;
            b0 += g0 * q;
            c0 += g0 * r;
            a1 += g1 * p;
            b1 += g1 * q;
            c1 += g1 * r;
            a2 += g2 * p;
            b2 += g2 * q;
            c2 += g2 * r;
            g2 = g1;
            g1 = g0;
        }
        for (uint32_t k = pad; k < 2; k++) {
            float p = *a++, q = *b++, r = *c++;
            a1 += g1 * p;
            b1 += g1 * q;
            c1 += g1 * r;
            a2 += g2 * p;
            b2 += g2 * q;
            c2 += g2 * r;
            g2 = g1;
            g1 = 0.0f;
        }
    }
    if (s->low == 0) add_three(dw, a0, a1, a2);
    if (s->low <= 1 && s->high >= 2) add_three(dw + 3, b0, b1, b2);
    if (s->high == 3) add_three(dw + 6, c0, c1, c2);
}

static void plane_weights(const plane *p, float *dw, const float *grad, const float *from) {
    for (uint32_t y = 0; y < p->to_height;) {
        stretch s = stretch_at(p, from, y);
        gather(&s, dw, grad + y * p->to_width, p->pad_x, p->to_width);
        y += s.rows;
    }
}

static void three_forward(const nst_op *op, float *out, const float *in, const float *w) {
    plane p = {op->out_height, op->out_width, op->in_height, op->in_width, op->pad_top, op->pad_left};
    uint32_t count = ins(op), group = outs(op);
    for (uint32_t o = 0; o < op->out_channels; o++, out += out_plane(op))
        for (uint32_t i = 0; i < count; i++, w += 9) plane_add(&p, out, in + (o / group * count + i) * in_plane(op), w, false);
}

static void three_backward(const nst_op *op, const float *grad, float *in, const float *w) {
    plane p = {op->in_height, op->in_width, op->out_height, op->out_width, 2u - op->pad_top, 2u - op->pad_left};
    uint32_t count = ins(op), group = outs(op);
    for (uint32_t o = 0; o < op->out_channels; o++, grad += out_plane(op))
        for (uint32_t i = 0; i < count; i++, w += 9) plane_add(&p, in + (o / group * count + i) * in_plane(op), grad, w, true);
}

static void three_weights(const nst_op *op, const float *grad, const float *in, float *dw) {
    plane p = {op->out_height, op->out_width, op->in_height, op->in_width, op->pad_top, op->pad_left};
    uint32_t count = ins(op), group = outs(op);
    for (uint32_t o = 0; o < op->out_channels; o++, grad += out_plane(op))
        for (uint32_t i = 0; i < count; i++, dw += 9) plane_weights(&p, dw, grad, in + (o / group * count + i) * in_plane(op));
}

/* --- Everything else: three neighbouring taps at a time where all fall on the input, else one ---------------------- */

/* Outputs [from, to) of one direction. */
typedef struct {
    uint32_t from, to;
} range;

/* Those whose tap `k` falls on the input. Both ends move down as k grows. */
static range covered(uint32_t in, uint32_t out, uint32_t stride, uint32_t pad, uint32_t k) {
    range r;
    r.from = k >= pad ? 0 : (pad - k + stride - 1) / stride;
    r.to = in + pad > k ? (in + pad - k - 1) / stride + 1 : 0;
    if (r.to > out) r.to = out;
    if (r.from > r.to) r.from = r.to;
    return r;
}

/* How many rows and columns of the output there are, how far it is to the next row of either side, and to the next input. */
typedef struct {
    uint32_t rows, columns, out_step, in_step, stride;
} patch;

/* What is done to a patch of one pair of channels, whose first output and input are given. It writes to one of the three. */
typedef void work(const patch *p, float *out, float *in, float *w);

static void one_forward(const patch *p, float *out, float *in, float *w) {
    float f = *w;
    for (uint32_t y = 0; y < p->rows; y++, out += p->out_step, in += p->in_step) {
        const float *from = in;
        for (uint32_t x = 0; x < p->columns; x++, from += p->stride) out[x] += f * *from;
    }
}

static void one_backward(const patch *p, float *out, float *in, float *w) {
    float f = *w;
    for (uint32_t y = 0; y < p->rows; y++, out += p->out_step, in += p->in_step) {
        float *to = in;
        for (uint32_t x = 0; x < p->columns; x++, to += p->stride) *to += f * out[x];
    }
}

static void one_weight(const patch *p, float *out, float *in, float *w) {
    float sum = 0.0f;
    for (uint32_t y = 0; y < p->rows; y++, out += p->out_step, in += p->in_step) {
        const float *from = in;
        for (uint32_t x = 0; x < p->columns; x++, from += p->stride) sum += out[x] * *from;
    }
    *w += sum;
}

static void some_forward(const patch *p, float *out, float *in, float *w) {
    float f0 = w[0], f1 = w[1], f2 = w[2];
    for (uint32_t y = 0; y < p->rows; y++, out += p->out_step, in += p->in_step) {
        const float *from = in;
        for (uint32_t x = 0; x < p->columns; x++, from += p->stride) out[x] += f0 * from[0] + f1 * from[1] + f2 * from[2];
    }
}

static void some_backward(const patch *p, float *out, float *in, float *w) {
    float f0 = w[0], f1 = w[1], f2 = w[2];
    for (uint32_t y = 0; y < p->rows; y++, out += p->out_step, in += p->in_step) {
        float *to = in;
        for (uint32_t x = 0; x < p->columns; x++, to += p->stride) {
            float g = out[x];
            to[0] += f0 * g;
            to[1] += f1 * g;
            to[2] += f2 * g;
        }
    }
}

static void some_weights(const patch *p, float *out, float *in, float *w) {
    float s0 = 0.0f, s1 = 0.0f, s2 = 0.0f;
    for (uint32_t y = 0; y < p->rows; y++, out += p->out_step, in += p->in_step) {
        const float *from = in;
        for (uint32_t x = 0; x < p->columns; x++, from += p->stride) {
            float g = out[x];
            s0 += g * from[0];
            s1 += g * from[1];
            s2 += g * from[2];
        }
    }
    w[0] += s0;
    w[1] += s1;
    w[2] += s2;
}

typedef struct {
    const nst_op *op;
    float *out, *in, *w;
    work *one, *some;
} pass;

/* All pairs of channels at the columns `xs` of the output, for the tap (ky, kx) or the three that begin there. */
static NST_APART void visit(const pass *s, work *what, uint32_t ky, uint32_t kx, range xs) {
    const nst_op *op = s->op;
    range ys = covered(op->in_height, op->out_height, op->stride_height, op->pad_top, ky);
    uint32_t count = ins(op), group = outs(op), taps = (uint32_t)op->kernel_height * op->kernel_width;
    if (xs.from >= xs.to || ys.from >= ys.to) return;
    patch p;
    p.rows = ys.to - ys.from;
    p.columns = xs.to - xs.from;
    p.out_step = op->out_width;
    p.in_step = (uint32_t)op->stride_height * op->in_width;
    p.stride = op->stride_width;
    uint32_t row = ys.from * op->stride_height + ky - op->pad_top, column = xs.from * op->stride_width + kx - op->pad_left;
    float *w = s->w + ky * op->kernel_width + kx, *out = s->out + ys.from * op->out_width + xs.from;
    float *in = s->in + row * op->in_width + column;
    for (uint32_t o = 0; o < op->out_channels; o++, out += out_plane(op))
        for (uint32_t i = 0; i < count; i++, w += taps) what(&p, out, in + (o / group * count + i) * in_plane(op), w);
}

static range columns_of(const nst_op *op, uint32_t kx) {
    return covered(op->in_width, op->out_width, op->stride_width, op->pad_left, kx);
}

/* Three taps where all of them fall on the input, and each alone where not. */
static NST_APART void visit_three(const pass *s, uint32_t ky, uint32_t kx) {
    range all = {columns_of(s->op, kx).from, columns_of(s->op, kx + 2).to};
    if (all.from > all.to) all.from = all.to;
    visit(s, s->some, ky, kx, all);
    for (uint32_t k = kx; k < kx + 3; k++) {
        range own = columns_of(s->op, k), left = own, right = own;
        if (left.to > all.from) left.to = all.from;
        if (right.from < all.to) right.from = all.to;
        visit(s, s->one, ky, k, left);
        visit(s, s->one, ky, k, right);
    }
}

static NST_APART void any_pass(const pass *s) {
    for (uint32_t ky = 0; ky < s->op->kernel_height; ky++) {
        uint32_t kx = 0;
        for (; kx + 3 <= s->op->kernel_width; kx += 3) visit_three(s, ky, kx);
        for (; kx < s->op->kernel_width; kx++) visit(s, s->one, ky, kx, columns_of(s->op, kx));
    }
}

static void any_forward(const nst_op *op, float *out, const float *in, const float *w) {
    pass s = {op, out, (float *)in, (float *)w, one_forward, some_forward};
    any_pass(&s);
}

static void any_backward(const nst_op *op, const float *grad, float *in, const float *w) {
    pass s = {op, (float *)grad, in, (float *)w, one_backward, some_backward};
    any_pass(&s);
}

static void any_weights(const nst_op *op, const float *grad, const float *in, float *dw) {
    pass s = {op, (float *)grad, (float *)in, dw, one_weight, some_weights};
    any_pass(&s);
}

/* --- Which way ------------------------------------------------------------------------------------------------------------- */

typedef struct {
    void (*forward)(const nst_op *op, float *out, const float *in, const float *w);
    void (*backward)(const nst_op *op, const float *grad, float *in, const float *w);
    void (*weights)(const nst_op *op, const float *grad, const float *in, float *dw);
} way;

static const way three = {three_forward, three_backward, three_weights};
static const way point = {point_forward, point_backward, point_weights};
static const way any = {any_forward, any_backward, any_weights};

static bool is_three(const nst_op *op) {
    return op->kernel_height == 3 && op->kernel_width == 3 && op->stride_height == 1 && op->stride_width == 1 && op->pad_top <= 2 &&
           op->pad_left <= 2 && op->in_height + 2 * op->pad_top == op->out_height + 2 &&
           op->in_width + 2 * op->pad_left == op->out_width + 2;
}

static bool is_point(const nst_op *op) {
    return op->kernel_height == 1 && op->kernel_width == 1 && op->stride_height == 1 && op->stride_width == 1 && op->pad_top == 0 &&
           op->pad_left == 0 && op->in_height == op->out_height && op->in_width == op->out_width;
}

static const way *way_of(const nst_op *op) { return is_three(op) ? &three : is_point(op) ? &point : &any; }

void nst_conv_forward(const nst_op *op, float *out, const float *in, const float *w) { way_of(op)->forward(op, out, in, w); }
void nst_conv_backward(const nst_op *op, const float *grad, float *in, const float *w) { way_of(op)->backward(op, grad, in, w); }
void nst_conv_weights(const nst_op *op, const float *grad, const float *in, float *dw) { way_of(op)->weights(op, grad, in, dw); }
