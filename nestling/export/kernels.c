/* == base == */
#include <stdint.h>

static int8_t cut(int32_t x, int32_t low, int32_t high)
{
    return (int8_t)(x < low ? low : x > high ? high : x);
}

/* == rescaled == */
/* x * multiplier * 2^(shift - 31), rounded as TensorFlow Lite rounds: once to 32 bits, halves up, and once more by what is shifted
   out, halves away from zero. */
static int32_t rescaled(int32_t x, int32_t multiplier, int32_t shift)
{
    int32_t left = shift > 0 ? shift : 0, right = shift > 0 ? 0 : -shift;
    int64_t product = (int64_t)(int32_t)((uint32_t)x << left) * multiplier;
    int64_t nudged = product + (product >= 0 ? (INT64_C(1) << 30) : 1 - (INT64_C(1) << 30));
    int32_t high = (int32_t)(nudged / (INT64_C(1) << 31));
    int32_t mask = (int32_t)((UINT32_C(1) << right) - 1u);
    int32_t remainder = high & mask;
    int32_t threshold = (mask >> 1) + (high < 0 ? 1 : 0);
    return (high >> right) + (remainder > threshold ? 1 : 0);
}

/* == dot == */
/* The sum over n of (x - zero) * w. */
static int32_t dot(const int8_t *x, const int8_t *w, int32_t n, int32_t zero)
{
    int32_t sum = 0;
    while (n-- > 0)
        sum += (*x++ - zero) * *w++;
    return sum;
}

/* == window == */
/* A window that slides over a map: rows, columns, channels. */
typedef struct {
    int16_t in_rows, in_columns, in_channels, out_rows, out_columns, out_channels;
    int16_t kernel_rows, kernel_columns, stride_rows, stride_columns, pad_top, pad_left, groups;
    int16_t in_zero, out_zero, low, high;
} window;

/* Which part of a kernel of `size` lies inside the map when its first element lies at `at`. */
static int32_t first_inside(int32_t at)
{
    return at < 0 ? -at : 0;
}

static int32_t end_inside(int32_t at, int32_t size, int32_t map)
{
    return at + size > map ? map - at : size;
}

/* == conv == */
static void conv(const int8_t *in, int8_t *out, const window *s, const int8_t *weight, const int32_t *bias,
                 const int32_t *multiplier, const int8_t *shift)
{
    int32_t depth = s->in_channels / s->groups, each = s->out_channels / s->groups;
    for (int32_t row = 0; row < s->out_rows; row++)
        for (int32_t column = 0; column < s->out_columns; column++) {
            int32_t top = row * s->stride_rows - s->pad_top, left = column * s->stride_columns - s->pad_left;
            int32_t ky0 = first_inside(top), ky1 = end_inside(top, s->kernel_rows, s->in_rows);
            int32_t kx0 = first_inside(left), kx1 = end_inside(left, s->kernel_columns, s->in_columns);
            for (int32_t channel = 0; channel < s->out_channels; channel++) {
                const int8_t *w = weight + channel * s->kernel_rows * s->kernel_columns * depth;
                int32_t from = channel / each * depth, sum = bias[channel];
                for (int32_t ky = ky0; ky < ky1; ky++) {
                    const int8_t *x = in + ((top + ky) * s->in_columns + left + kx0) * s->in_channels + from;
                    const int8_t *k = w + (ky * s->kernel_columns + kx0) * depth;
                    if (s->groups == 1)  /* the channels of neighbouring columns follow one another */
                        sum += dot(x, k, (kx1 - kx0) * depth, s->in_zero);
                    else
                        for (int32_t kx = kx0; kx < kx1; kx++, x += s->in_channels, k += depth)
                            sum += dot(x, k, depth, s->in_zero);
                }
                *out++ = cut(rescaled(sum, multiplier[channel], shift[channel]) + s->out_zero, s->low, s->high);
            }
        }
}

/* == depthwise == */
static void depthwise(const int8_t *in, int8_t *out, const window *s, const int8_t *weight, const int32_t *bias,
                      const int32_t *multiplier, const int8_t *shift)
{
    int32_t each = s->out_channels / s->in_channels;
    for (int32_t row = 0; row < s->out_rows; row++)
        for (int32_t column = 0; column < s->out_columns; column++) {
            int32_t top = row * s->stride_rows - s->pad_top, left = column * s->stride_columns - s->pad_left;
            int32_t ky0 = first_inside(top), ky1 = end_inside(top, s->kernel_rows, s->in_rows);
            int32_t kx0 = first_inside(left), kx1 = end_inside(left, s->kernel_columns, s->in_columns);
            for (int32_t channel = 0; channel < s->out_channels; channel++) {
                int32_t sum = bias[channel], from = channel / each;
                for (int32_t ky = ky0; ky < ky1; ky++) {
                    const int8_t *x = in + ((top + ky) * s->in_columns + left + kx0) * s->in_channels + from;
                    const int8_t *k = weight + (ky * s->kernel_columns + kx0) * s->out_channels + channel;
                    for (int32_t kx = kx0; kx < kx1; kx++, x += s->in_channels, k += s->out_channels)
                        sum += (*x - s->in_zero) * *k;
                }
                *out++ = cut(rescaled(sum, multiplier[channel], shift[channel]) + s->out_zero, s->low, s->high);
            }
        }
}

/* == dense == */
typedef struct {
    int32_t inputs, outputs, in_zero, out_zero, low, high;
} layer;

static void dense(const int8_t *in, int8_t *out, const layer *s, const int8_t *weight, const int32_t *bias,
                  const int32_t *multiplier, const int8_t *shift)
{
    for (int32_t k = 0; k < s->outputs; k++, weight += s->inputs) {
        int32_t sum = bias[k] + dot(in, weight, s->inputs, s->in_zero);
        out[k] = cut(rescaled(sum, multiplier[k], shift[k]) + s->out_zero, s->low, s->high);
    }
}

/* == max_pool == */
static void max_pool(const int8_t *in, int8_t *out, const window *s)
{
    for (int32_t row = 0; row < s->out_rows; row++)
        for (int32_t column = 0; column < s->out_columns; column++) {
            int32_t top = row * s->stride_rows - s->pad_top, left = column * s->stride_columns - s->pad_left;
            int32_t ky1 = end_inside(top, s->kernel_rows, s->in_rows);
            int32_t kx1 = end_inside(left, s->kernel_columns, s->in_columns);
            for (int32_t channel = 0; channel < s->in_channels; channel++) {
                int32_t most = -128;
                for (int32_t ky = first_inside(top); ky < ky1; ky++)
                    for (int32_t kx = first_inside(left); kx < kx1; kx++) {
                        int32_t x = in[((top + ky) * s->in_columns + left + kx) * s->in_channels + channel];
                        most = x > most ? x : most;
                    }
                *out++ = cut(most, s->low, s->high);
            }
        }
}

/* == avg_pool == */
/* The mean over the whole window: padding counts as zero. */
static void avg_pool(const int8_t *in, int8_t *out, const window *s)
{
    int32_t count = s->kernel_rows * s->kernel_columns;
    for (int32_t row = 0; row < s->out_rows; row++)
        for (int32_t column = 0; column < s->out_columns; column++) {
            int32_t top = row * s->stride_rows - s->pad_top, left = column * s->stride_columns - s->pad_left;
            int32_t ky0 = first_inside(top), ky1 = end_inside(top, s->kernel_rows, s->in_rows);
            int32_t kx0 = first_inside(left), kx1 = end_inside(left, s->kernel_columns, s->in_columns);
            int32_t outside = (count - (ky1 - ky0) * (kx1 - kx0)) * s->in_zero;
            for (int32_t channel = 0; channel < s->in_channels; channel++) {
                int32_t sum = outside;
                for (int32_t ky = ky0; ky < ky1; ky++)
                    for (int32_t kx = kx0; kx < kx1; kx++)
                        sum += in[((top + ky) * s->in_columns + left + kx) * s->in_channels + channel];
                *out++ = cut((sum > 0 ? sum + count / 2 : sum - count / 2) / count, s->low, s->high);
            }
        }
}

/* == add == */
typedef struct {
    int32_t size, first_zero, second_zero, out_zero, low, high;
    int32_t multiplier[3], shift[3]; /* of the first, of the second, of their sum */
} sum_of_two;

static void add(const int8_t *first, const int8_t *second, int8_t *out, const sum_of_two *s)
{
    for (int32_t k = 0; k < s->size; k++) {
        int32_t a = rescaled((first[k] - s->first_zero) * (1 << 20), s->multiplier[0], s->shift[0]);
        int32_t b = rescaled((second[k] - s->second_zero) * (1 << 20), s->multiplier[1], s->shift[1]);
        out[k] = cut(rescaled(a + b, s->multiplier[2], s->shift[2]) + s->out_zero, s->low, s->high);
    }
}

/* == group_norm == */
/* In float: the spread of a group is not known before it is seen. Compile with -ffp-contract=off: a fused multiply-add rounds once
   where the bits of other machines come from rounding twice. */
typedef struct {
    int32_t pixels, channels, groups, in_zero, out_zero, low, high;
    float in_scale, out_scale, eps;
} normalisation;

/* The square root, correctly rounded, of a normal positive number. */
static float root(float x)
{
    union {
        float number;
        uint32_t bits;
    } a = {x};
    int32_t exponent = (int32_t)(a.bits >> 23) - 127;
    uint64_t fraction = (a.bits & 0x7fffffu) | 0x800000u;
    if (exponent & 1) {
        fraction <<= 1;
        exponent -= 1;
    }
    uint64_t square = fraction << 25; /* the root of it has 25 bits: one more than is kept */
    uint32_t result = 0;
    for (uint32_t bit = UINT32_C(1) << 24; bit; bit >>= 1) {
        uint64_t next = result | bit;
        if (next * next <= square)
            result |= bit;
    }
    /* Never half way: a root with just one bit more would have a square with two bits more than there are. */
    result = (result + 1) >> 1;
    a.bits = ((uint32_t)(exponent / 2 + 127) << 23) + (result - 0x800000u);
    return a.number;
}

static int8_t to_int8(float x, const normalisation *s)
{
    x /= s->out_scale;
    x = x > 1000.0f ? 1000.0f : x < -1000.0f ? -1000.0f : x;
    int32_t whole = (int32_t)x;
    float rest = x - (float)whole;
    whole += rest >= 0.5f ? 1 : rest <= -0.5f ? -1 : 0;
    return cut(whole + s->out_zero, s->low, s->high);
}

/* The result may lie where the input does. Sums run pixel by pixel and channel by channel: the order shows in the bits. */
static void group_norm(const int8_t *in, int8_t *out, const normalisation *s, const float *scale, const float *offset)
{
    int32_t each = s->channels / s->groups, size = s->pixels * s->channels;
    float count = (float)(s->pixels * each);
    for (int32_t first = 0; first < s->channels; first += each) {
        float sum = 0.0f, squares = 0.0f;
        for (int32_t at = first; at < size; at += s->channels)
            for (int32_t k = at; k < at + each; k++)
                sum += s->in_scale * (float)(in[k] - s->in_zero);
        float mean = sum / count;
        for (int32_t at = first; at < size; at += s->channels)
            for (int32_t k = at; k < at + each; k++) {
                float x = s->in_scale * (float)(in[k] - s->in_zero) - mean;
                squares += x * x;
            }
        float one_over = 1.0f / root(squares / count + s->eps);
        for (int32_t at = 0; at < size; at += s->channels)
            for (int32_t k = first; k < first + each; k++) {
                float x = s->in_scale * (float)(in[at + k] - s->in_zero) - mean;
                out[at + k] = to_int8(x * one_over * scale[k] + offset[k], s);
            }
    }
}
