/* The operations, forward and backward, of one sample. linear.c does the work of convolutions and dense layers. */
#include "nestling.h"

static float *parameters(const nst_engine *e, uint32_t offset) {
    return offset == NST_NONE ? NULL : nst_at(e, e->header->weights) + offset;
}

/* Where a parameter's gradient adds up; null where it is not trained. */
static float *gradients(const nst_engine *e, const nst_op *op, uint32_t offset) {
    bool trained = (op->flags & NST_TRAINED) != 0 && offset != NST_NONE && offset < e->header->trained;
    return trained ? nst_at(e, e->header->grads) + offset : NULL;
}

/* The place of the gradient to hand on, cleared unless it is added to what is there; null where none is wanted. */
static float *handed_on(const nst_engine *e, const nst_op *op) {
    if ((op->flags & NST_INPUT_GRADIENT) == 0) return NULL;
    float *to = nst_at(e, op->first_grad);
    if ((op->flags & NST_ADD_TO_FIRST) == 0) nst_zero(to, nst_in_size(op) * 4);
    return to;
}

static void activate(const nst_op *op, float *out) {
    uint32_t n = nst_out_size(op);
    if (op->activation == NST_LINEAR) return;
    for (uint32_t i = 0; i < n; i++) out[i] = out[i] > 0.0f ? out[i] : 0.0f;
    if (op->activation == NST_RELU6)
        for (uint32_t i = 0; i < n; i++) out[i] = out[i] < 6.0f ? out[i] : 6.0f;
}

/* Turns the gradient of the result into that of what the activation and the scale were applied to, where it lies. */
static void undo(const nst_op *op, const float *out, float *grad) {
    uint32_t n = nst_out_size(op);
    if (op->activation == NST_RELU)
        for (uint32_t i = 0; i < n; i++) grad[i] = out[i] > 0.0f ? grad[i] : 0.0f;
    if (op->activation == NST_RELU6)
        for (uint32_t i = 0; i < n; i++) grad[i] = out[i] > 0.0f && out[i] < 6.0f ? grad[i] : 0.0f;
    if ((op->kind == NST_CONV || op->kind == NST_DENSE) && op->scale != 1.0f)
        for (uint32_t i = 0; i < n; i++) grad[i] *= op->scale;
}

static void fill_bias(const nst_op *op, float *out, const float *bias) {
    uint32_t plane = (uint32_t)op->out_height * op->out_width;
    for (uint32_t o = 0; o < op->out_channels; o++)
        for (uint32_t i = 0; i < plane; i++) *out++ = bias != NULL ? bias[o] : 0.0f;
}

static void scale(const nst_op *op, float *out) {
    uint32_t n = nst_out_size(op);
    if (op->scale != 1.0f)
        for (uint32_t i = 0; i < n; i++) out[i] *= op->scale;
}

static void bias_backward(const nst_op *op, const float *out_grad, float *bias_grad) {
    uint32_t plane = (uint32_t)op->out_height * op->out_width;
    for (uint32_t o = 0; bias_grad != NULL && o < op->out_channels; o++) {
        float sum = 0.0f;
        for (uint32_t i = 0; i < plane; i++) sum += *out_grad++;
        bias_grad[o] += sum;
    }
}

static void conv_forward(nst_engine *e, const nst_op *op) {
    float *out = nst_at(e, op->out);
    fill_bias(op, out, parameters(e, op->bias));
    nst_conv_forward(op, out, nst_at(e, op->first), parameters(e, op->weight));
    scale(op, out);
}

static void conv_backward(nst_engine *e, const nst_op *op) {
    const float *grad = nst_at(e, op->out_grad);
    float *back = handed_on(e, op), *dw = gradients(e, op, op->weight);
    bias_backward(op, grad, gradients(e, op, op->bias));
    if (dw != NULL) nst_conv_weights(op, grad, nst_at(e, op->first), dw);
    if (back != NULL) nst_conv_backward(op, grad, back, parameters(e, op->weight));
}

static void dense_forward(nst_engine *e, const nst_op *op) {
    float *out = nst_at(e, op->out);
    fill_bias(op, out, parameters(e, op->bias));
    nst_dot_rows(out, nst_at(e, op->first), parameters(e, op->weight), op->out_channels, nst_in_size(op));
    scale(op, out);
}

static void dense_backward(nst_engine *e, const nst_op *op) {
    const float *grad = nst_at(e, op->out_grad);
    float *back = handed_on(e, op), *dw = gradients(e, op, op->weight);
    bias_backward(op, grad, gradients(e, op, op->bias));
    if (dw != NULL) nst_outer(dw, nst_at(e, op->first), grad, op->out_channels, nst_in_size(op));
    if (back != NULL) nst_add_rows(back, parameters(e, op->weight), grad, 1, op->out_channels, nst_in_size(op));
}

/* The part of an output's window that lies on the input, and where on it the window starts (which may be outside). */
typedef struct {
    int32_t top, left, y0, y1, x0, x1;
} view;

static view window(const nst_op *op, uint32_t y, uint32_t x) {
    view v;
    v.top = (int32_t)(y * op->stride_height) - op->pad_top;
    v.left = (int32_t)(x * op->stride_width) - op->pad_left;
    v.y0 = v.top < 0 ? 0 : v.top;
    v.x0 = v.left < 0 ? 0 : v.left;
    v.y1 = v.top + op->kernel_height > op->in_height ? op->in_height : v.top + op->kernel_height;
    v.x1 = v.left + op->kernel_width > op->in_width ? op->in_width : v.left + op->kernel_width;
    return v;
}

static float best_of(const nst_op *op, const float *in, view v, uint8_t *winner) {
    int32_t by = v.y0, bx = v.x0;
    float best = in[by * op->in_width + bx];
    for (int32_t r = v.y0; r < v.y1; r++)
        for (int32_t k = v.x0; k < v.x1; k++)
            if (in[r * op->in_width + k] > best) {
                best = in[r * op->in_width + k];
                by = r;
                bx = k;
            }
    *winner = (uint8_t)((by - v.top) * op->kernel_width + (bx - v.left));
    return best;
}

/* The commonest window: 2x2, all of it on the input. */
static float best_of_four(const float *above, const float *below, uint8_t *winner) {
    float best = above[0];
    uint32_t at = 0;
    if (above[1] > best) best = above[1], at = 1;
    if (below[0] > best) best = below[0], at = 2;
    if (below[1] > best) best = below[1], at = 3;
    *winner = (uint8_t)at;
    return best;
}

static void max_pool_forward(nst_engine *e, const nst_op *op) {
    const float *in = nst_at(e, op->first);
    float *out = nst_at(e, op->out);
    uint8_t *winner = (uint8_t *)nst_at(e, op->aux);
    uint32_t wide = op->in_width;
    bool inside = (uint32_t)(op->out_height - 1) * op->stride_height + 2 <= op->in_height &&
                  (uint32_t)(op->out_width - 1) * op->stride_width + 2 <= wide && op->pad_top == 0 && op->pad_left == 0;
    bool four = op->kernel_height == 2 && op->kernel_width == 2 && inside;
    for (uint32_t c = 0; c < op->out_channels; c++, in += op->in_height * wide)
        for (uint32_t y = 0; y < op->out_height; y++) {
            const float *row = in + y * op->stride_height * wide;
            for (uint32_t x = 0; x < op->out_width; x++, row += op->stride_width, winner++)
                *out++ = four ? best_of_four(row, row + wide, winner) : best_of(op, in, window(op, y, x), winner);
        }
}

static void max_pool_backward(nst_engine *e, const nst_op *op) {
    const float *g = nst_at(e, op->out_grad);
    const uint8_t *winner = (const uint8_t *)nst_at(e, op->aux);
    float *back = handed_on(e, op);
    for (uint32_t c = 0; back != NULL && c < op->out_channels; c++, back += (uint32_t)op->in_height * op->in_width)
        for (uint32_t y = 0; y < op->out_height; y++)
            for (uint32_t x = 0; x < op->out_width; x++, g++, winner++) {
                uint32_t r = y * op->stride_height + *winner / op->kernel_width - op->pad_top;
                uint32_t k = x * op->stride_width + *winner % op->kernel_width - op->pad_left;
                /* A foolish plan may have written over the winners. (Above and left of the input are large numbers here.) */
                if (r < op->in_height && k < op->in_width) back[r * op->in_width + k] += *g;
            }
}

static void avg_pool_forward(nst_engine *e, const nst_op *op) {
    const float *in = nst_at(e, op->first);
    float *out = nst_at(e, op->out), count = (float)((uint32_t)op->kernel_height * op->kernel_width);
    for (uint32_t c = 0; c < op->out_channels; c++, in += (uint32_t)op->in_height * op->in_width)
        for (uint32_t y = 0; y < op->out_height; y++)
            for (uint32_t x = 0; x < op->out_width; x++) {
                view v = window(op, y, x);
                float sum = 0.0f;
                for (int32_t r = v.y0; r < v.y1; r++)
                    for (int32_t k = v.x0; k < v.x1; k++) sum += in[r * op->in_width + k];
                *out++ = sum / count;
            }
}

static void avg_pool_backward(nst_engine *e, const nst_op *op) {
    const float *g = nst_at(e, op->out_grad);
    float *back = handed_on(e, op), count = (float)((uint32_t)op->kernel_height * op->kernel_width);
    for (uint32_t c = 0; back != NULL && c < op->out_channels; c++, back += (uint32_t)op->in_height * op->in_width)
        for (uint32_t y = 0; y < op->out_height; y++)
            for (uint32_t x = 0; x < op->out_width; x++) {
                view v = window(op, y, x);
                float share = *g++ / count;
                for (int32_t r = v.y0; r < v.y1; r++)
                    for (int32_t k = v.x0; k < v.x1; k++) back[r * op->in_width + k] += share;
            }
}

static void add_forward(nst_engine *e, const nst_op *op) {
    const float *a = nst_at(e, op->first), *b = nst_at(e, op->second);
    float *out = nst_at(e, op->out);
    uint32_t n = nst_out_size(op);
    for (uint32_t i = 0; i < n; i++) out[i] = a[i] + b[i];
}

static void hand(const nst_engine *e, uint32_t to, const float *grad, uint32_t n, bool added) {
    float *back = to == NST_NONE ? NULL : nst_at(e, to);
    if (back == NULL || back == grad) return;
    for (uint32_t i = 0; i < n; i++) back[i] = added ? back[i] + grad[i] : grad[i];
}

static void add_backward(nst_engine *e, const nst_op *op) {
    const float *grad = nst_at(e, op->out_grad);
    if ((op->flags & NST_INPUT_GRADIENT) == 0) return;
    hand(e, op->first_grad, grad, nst_in_size(op), (op->flags & NST_ADD_TO_FIRST) != 0);
    hand(e, op->second_grad, grad, nst_in_size(op), (op->flags & NST_ADD_TO_SECOND) != 0);
}

static void activation_forward(nst_engine *e, const nst_op *op) {
    const float *in = nst_at(e, op->first);
    float *out = nst_at(e, op->out);
    if (out != in) nst_copy(out, in, nst_out_size(op) * 4);
}

static void activation_backward(nst_engine *e, const nst_op *op) {
    if ((op->flags & NST_INPUT_GRADIENT) != 0)
        hand(e, op->first_grad, nst_at(e, op->out_grad), nst_in_size(op), (op->flags & NST_ADD_TO_FIRST) != 0);
}

static void affine_forward(nst_engine *e, const nst_op *op) {
    const float *in = nst_at(e, op->first), *w = parameters(e, op->weight), *b = parameters(e, op->bias);
    float *out = nst_at(e, op->out);
    uint32_t plane = (uint32_t)op->out_height * op->out_width;
    for (uint32_t c = 0; c < op->out_channels; c++) {
        float factor = w != NULL ? w[c] : 1.0f, shift = b != NULL ? b[c] : 0.0f;
        for (uint32_t i = 0; i < plane; i++) *out++ = *in++ * factor + shift;
    }
}

static void affine_backward(nst_engine *e, const nst_op *op) {
    const float *in = nst_at(e, op->first), *g = nst_at(e, op->out_grad), *w = parameters(e, op->weight);
    float *back = handed_on(e, op), *dw = gradients(e, op, op->weight);
    uint32_t plane = (uint32_t)op->out_height * op->out_width;
    bias_backward(op, g, gradients(e, op, op->bias));
    for (uint32_t c = 0; c < op->out_channels; c++, in += plane, g += plane) {
        float sum = 0.0f, factor = w != NULL ? w[c] : 1.0f;
        for (uint32_t i = 0; dw != NULL && i < plane; i++) sum += g[i] * in[i];
        if (dw != NULL) dw[c] += sum;
        for (uint32_t i = 0; back != NULL && i < plane; i++) *back++ += g[i] * factor;
    }
}

static void norm_forward(nst_engine *e, const nst_op *op) {
    const float *in = nst_at(e, op->first), *w = parameters(e, op->weight), *b = parameters(e, op->bias);
    float *out = nst_at(e, op->out), *kept = nst_at(e, op->aux);
    uint32_t plane = (uint32_t)op->out_height * op->out_width, channels = op->out_channels / op->groups, n = channels * plane;
    for (uint32_t g = 0; g < op->groups; g++, kept += 2) {
        float sum = 0.0f, squares = 0.0f;
        for (uint32_t i = 0; i < n; i++) sum += in[i];
        float mean = sum / (float)n;
        for (uint32_t i = 0; i < n; i++) squares += (in[i] - mean) * (in[i] - mean);
        float inverse = 1.0f / nst_sqrt(squares / (float)n + op->eps);
        kept[0] = mean;
        kept[1] = inverse;
        for (uint32_t c = g * channels; c < (g + 1) * channels; c++) {
            float factor = w != NULL ? w[c] : 1.0f, shift = b != NULL ? b[c] : 0.0f;
            for (uint32_t i = 0; i < plane; i++) *out++ = (*in++ - mean) * inverse * factor + shift;
        }
    }
}

static void norm_backward(nst_engine *e, const nst_op *op) {
    const float *in = nst_at(e, op->first), *grad = nst_at(e, op->out_grad), *kept = nst_at(e, op->aux);
    const float *w = parameters(e, op->weight);
    float *back = handed_on(e, op), *dw = gradients(e, op, op->weight);
    uint32_t plane = (uint32_t)op->out_height * op->out_width, channels = op->out_channels / op->groups, n = channels * plane;
    bias_backward(op, grad, gradients(e, op, op->bias));
    for (uint32_t g = 0; g < op->groups; g++, kept += 2, in += n, grad += n) {
        float mean = kept[0], inverse = kept[1], sum = 0.0f, along = 0.0f;
        for (uint32_t k = 0; k < channels; k++) {
            float factor = w != NULL ? w[g * channels + k] : 1.0f, own = 0.0f, ownx = 0.0f;
            for (uint32_t i = k * plane; i < (k + 1) * plane; i++) {
                own += grad[i];
                ownx += grad[i] * ((in[i] - mean) * inverse);
            }
            if (dw != NULL) dw[g * channels + k] += ownx;
            sum += own * factor;
            along += ownx * factor;
        }
        sum = sum / (float)n;
        along = along / (float)n;
        for (uint32_t k = 0; back != NULL && k < channels; k++) {
            float factor = w != NULL ? w[g * channels + k] : 1.0f;
            for (uint32_t i = k * plane; i < (k + 1) * plane; i++)
                *back++ += inverse * (grad[i] * factor - sum - (in[i] - mean) * inverse * along);
        }
    }
}

/* Tables, and not a choice between calls: a compiler that merged all operations into one function would give every one of them the
 * stack of the largest. */
typedef void operation(nst_engine *e, const nst_op *op);

static operation *const forward[] = {conv_forward, dense_forward, max_pool_forward, avg_pool_forward,
                                     add_forward,  norm_forward,  affine_forward,   activation_forward};
static operation *const backward[] = {conv_backward, dense_backward, max_pool_backward, avg_pool_backward,
                                      add_backward,  norm_backward,  affine_backward,   activation_backward};

void nst_op_forward(nst_engine *e, const nst_op *op) {
    forward[op->kind - NST_CONV](e, op);
    activate(op, nst_at(e, op->out));
}

void nst_op_backward(nst_engine *e, const nst_op *op) {
    undo(op, nst_at(e, op->out), nst_at(e, op->out_grad));
    backward[op->kind - NST_CONV](e, op);
}
