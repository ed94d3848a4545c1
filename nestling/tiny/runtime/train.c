/* A phase of training: samples one by one, their losses and gradients, and the update. */
#include "nestling.h"

int nst_attach(nst_engine *e, const void *descriptor, uint32_t bytes, void *arena, uint32_t arena_bytes) {
    if (e == NULL) return NST_BAD_ARGUMENT;
    nst_zero(e, sizeof *e);
    e->bad_op = NST_NONE;
    if (descriptor == NULL || arena == NULL || (((uintptr_t)descriptor | (uintptr_t)arena) & 3u) != 0) return NST_BAD_ARGUMENT;
    const nst_header *h = (const nst_header *)descriptor;
    if (bytes < sizeof *h) return NST_BAD_LENGTH;
    if (h->magic != NST_MAGIC || h->version != NST_VERSION) return NST_BAD_MAGIC;
    if (h->ops == 0 || h->ops > NST_MOST_OPS) return NST_BAD_HEADER;
    if (bytes != sizeof *h + h->ops * sizeof(nst_op) || h->words != bytes / 4) return NST_BAD_LENGTH;
    if (nst_crc32(0, &h->ops, bytes - 16) != h->crc) return NST_BAD_CRC;
    if (h->arena > arena_bytes) return NST_TOO_LARGE;
    e->header = h;
    e->ops = (const nst_op *)(const void *)(h + 1);
    e->arena = (uint8_t *)arena;
    e->arena_bytes = arena_bytes;
    int bad = nst_check(e);
    if (bad) e->header = NULL;
    return bad;
}

static bool at_least(float value, float least) { return nst_finite(value) && value >= least; }

int nst_begin(nst_engine *e, const nst_settings *s) {
    if (e == NULL || s == NULL) return NST_BAD_ARGUMENT;
    if (e->header == NULL) return NST_BAD_STATE;
    e->begun = 0;
    const nst_header *h = e->header;
    bool ok = at_least(s->lr, 0.0f) && at_least(s->momentum, 0.0f) && at_least(s->decay, 0.0f) && at_least(s->clip, 0.0f) &&
              at_least(s->mu, 0.0f) && at_least(s->ce, 0.0f) && at_least(s->mse, 0.0f) && at_least(s->kd, 0.0f) &&
              at_least(s->temperature, FLT_MIN) && at_least(s->inner, 0.0f);
    if (!ok) return NST_BAD_NUMBER;
    if (h->trained == 0) return NST_BAD_SETTINGS;
    if ((s->momentum > 0.0f && h->momentum == NST_NONE) || (s->mu > 0.0f && h->anchor == NST_NONE)) return NST_BAD_SETTINGS;
    if ((s->mse > 0.0f || s->kd > 0.0f) && h->target == NST_NONE) return NST_BAD_SETTINGS;
    e->settings = *s;
    e->steps = e->batch = e->pending = 0;
    e->loss = 0.0f;
    nst_zero(nst_at(e, h->grads), h->trained * 4);
    if (h->momentum != NST_NONE) nst_zero(nst_at(e, h->momentum), h->trained * 4);
    e->begun = 1;
    return NST_OK;
}

static NST_APART int load(nst_engine *e, const nst_blob *data, uint32_t row, int down, int right) {
    const nst_header *h = e->header;
    if (data->channels != h->in_channels || data->height != h->in_height || data->width != h->in_width) return NST_BAD_DATA;
    if (row >= data->rows) return NST_BAD_ROW;
    return nst_load(nst_at(e, h->input), data, row, down, right);
}

static void forward(nst_engine *e) {
    for (uint32_t k = 0; k < e->header->ops; k++) nst_op_forward(e, &e->ops[k]);
}

int nst_forward(nst_engine *e, const nst_blob *data, uint32_t row) {
    if (e == NULL || data == NULL) return NST_BAD_ARGUMENT;
    if (e->header == NULL) return NST_BAD_STATE;
    int bad = load(e, data, row, 0, 0);
    if (!bad) forward(e);
    return bad;
}

/* log(sum(exp(z))) in two numbers: the largest z, and the sum of exp(z - largest). */
typedef struct {
    float largest, sum;
} soft;

static NST_APART soft softmax(const float *z, const float *factor, float divisor, uint32_t n) {
    soft s = {-FLT_MAX, 0.0f};
    for (uint32_t i = 0; i < n; i++) {
        float v = (factor != NULL ? z[i] * factor[i] : z[i]) / divisor;
        if (v > s.largest) s.largest = v;
    }
    for (uint32_t i = 0; i < n; i++) s.sum += nst_exp((factor != NULL ? z[i] * factor[i] : z[i]) / divisor - s.largest);
    return s;
}

/* The losses that need teacher logits or a regression target. Gives their sum and leaves the cross-entropy to the caller. */
static NST_APART float target_losses(const nst_engine *e, const float *z, const float *target, soft student, soft teacher) {
    const nst_settings *s = &e->settings;
    uint32_t n = e->header->classes;
    float squares = 0.0f, divergence = 0.0f, loss = 0.0f;
    if (s->mse > 0.0f) {
        for (uint32_t i = 0; i < n; i++) squares += (z[i] - target[i]) * (z[i] - target[i]);
        loss += s->mse * (squares / (float)n);
    }
    if (s->kd > 0.0f) {
        float log_student = nst_log(student.sum), log_teacher = nst_log(teacher.sum);
        for (uint32_t i = 0; i < n; i++) {
            float q = z[i] / s->temperature - student.largest, p = target[i] / s->temperature - teacher.largest;
            divergence += nst_exp(p) / teacher.sum * ((p - log_teacher) - (q - log_student));
        }
        loss += s->kd * s->temperature * s->temperature * divergence;
    }
    return loss;
}

/* The loss of the logits; their gradient (of the mean over the batch) goes to output_grad, which may be their own place. */
static NST_APART float loss_of_logits(nst_engine *e, uint32_t label, float share) {
    const nst_header *h = e->header;
    const nst_settings *s = &e->settings;
    const float *z = nst_at(e, h->output);
    const float *present = h->present != NST_NONE ? nst_at(e, h->present) : NULL;
    const float *target = h->target != NST_NONE ? nst_at(e, h->target) : NULL;
    float *grad = nst_at(e, h->output_grad), loss = 0.0f;
    soft plain = {0.0f, 1.0f}, student = plain, teacher = plain;
    if (s->ce > 0.0f) {
        plain = softmax(z, present, 1.0f, h->classes);
        float own = present != NULL ? z[label] * present[label] : z[label];
        loss += s->ce * (nst_log(plain.sum) - (own - plain.largest));
    }
    if (s->kd > 0.0f) {
        student = softmax(z, NULL, s->temperature, h->classes);
        teacher = softmax(target, NULL, s->temperature, h->classes);
    }
    loss += target_losses(e, z, target, student, teacher);
    float pull = 2.0f * s->mse / (float)h->classes, distil = s->kd * s->temperature;
    for (uint32_t i = 0; i < h->classes; i++) {
        float zi = z[i], g = 0.0f;
        if (s->ce > 0.0f) {
            float factor = present != NULL ? present[i] : 1.0f;
            float p = nst_exp(zi * factor - plain.largest) / plain.sum;
            g += s->ce * (i == label ? p - 1.0f : p) * factor;
        }
        if (s->mse > 0.0f) g += pull * (zi - target[i]);
        if (s->kd > 0.0f) {
            float q = nst_exp(zi / s->temperature - student.largest) / student.sum;
            float p = nst_exp(target[i] / s->temperature - teacher.largest) / teacher.sum;
            g += distil * (q - p);
        }
        grad[i] = g * share;
    }
    return loss;
}

/* A logit of the network whose last operation sees only its first inputs. They are computed when needed and nowhere kept: there is
 * no room for them in the plan. */
static float inner_logit(const nst_engine *e, const nst_op *op, uint32_t o) {
    const float *weights = nst_at(e, e->header->weights), *x = nst_at(e, op->first);
    const float *w = weights + op->weight + (size_t)o * nst_in_size(op);
    float sum = op->bias != NST_NONE ? weights[op->bias + o] : 0.0f;
    for (uint32_t i = 0; i < e->inner; i++) sum += w[i] * x[i];
    return sum * op->scale;
}

static soft inner_softmax(const nst_engine *e, const nst_op *op) {
    soft s = {-FLT_MAX, 0.0f};
    for (uint32_t o = 0; o < e->header->classes; o++) {
        float z = inner_logit(e, op, o);
        if (z > s.largest) s.largest = z;
    }
    for (uint32_t o = 0; o < e->header->classes; o++) s.sum += nst_exp(inner_logit(e, op, o) - s.largest);
    return s;
}

/* What an inner logit's gradient is to the last operation, whose own backward is done. */
static void hand_inner(nst_engine *e, const nst_op *op, uint32_t o, float g) {
    const nst_header *h = e->header;
    uint32_t size = nst_in_size(op);
    const float *w = nst_at(e, h->weights) + op->weight + (size_t)o * size, *x = nst_at(e, op->first);
    float *grads = nst_at(e, h->grads);
    float *back = (op->flags & NST_INPUT_GRADIENT) != 0 ? nst_at(e, op->first_grad) : NULL;
    float *to = op->weight < h->trained ? grads + op->weight + (size_t)o * size : NULL;
    for (uint32_t i = 0; to != NULL && i < e->inner; i++) to[i] += g * x[i];
    for (uint32_t i = 0; back != NULL && i < e->inner; i++) back[i] += g * w[i];
    if (op->bias != NST_NONE && op->bias < h->trained) grads[op->bias + o] += g;
}

/* Adds the inner loss's gradient: of labels the cross-entropy, */
static NST_APART float inner_loss(nst_engine *e, uint32_t label, float share) {
    const nst_op *op = &e->ops[e->header->ops - 1];
    soft s = inner_softmax(e, op);
    float loss = nst_log(s.sum) - (inner_logit(e, op, label) - s.largest);
    for (uint32_t o = 0; o < e->header->classes; o++) {
        float p = nst_exp(inner_logit(e, op, o) - s.largest) / s.sum;
        hand_inner(e, op, o, e->settings.inner * (o == label ? p - 1.0f : p) * share * op->scale);
    }
    return e->settings.inner * loss;
}

/* of values the squared error. */
static NST_APART float inner_squares(nst_engine *e, float share) {
    const nst_op *op = &e->ops[e->header->ops - 1];
    const float *target = nst_at(e, e->header->target);
    float pull = 2.0f * e->settings.inner / (float)e->header->classes, squares = 0.0f;
    for (uint32_t o = 0; o < e->header->classes; o++) {
        float apart = inner_logit(e, op, o) - target[o];
        squares += apart * apart;
        hand_inner(e, op, o, pull * apart * share * op->scale);
    }
    return e->settings.inner * (squares / (float)e->header->classes);
}

static bool inner_possible(const nst_engine *e, uint32_t inner) {
    const nst_op *op = &e->ops[e->header->ops - 1];
    return op->kind == NST_DENSE && op->activation == NST_LINEAR && (op->flags & NST_TRAINED) != 0 && inner <= nst_in_size(op);
}

/* Whether the data have the target that the settings ask for, or the caller brings it. */
static int check_target(const nst_engine *e, const nst_blob *data, uint32_t row, uint32_t inner, const float *target) {
    const nst_settings *s = &e->settings;
    if (nst_values(data) == 0) {
        if ((s->mse > 0.0f || s->kd > 0.0f) && target == NULL) return NST_BAD_DATA;
        bool labelled = s->ce > 0.0f || inner != 0;
        return labelled && nst_label(data, row) >= e->header->classes ? NST_BAD_LABEL : NST_OK;
    }
    if (s->ce > 0.0f) return NST_BAD_DATA;
    if (inner != 0 && e->header->target == NST_NONE) return NST_BAD_SETTINGS;
    return target == NULL && nst_target_size(data) != e->header->classes ? NST_BAD_DATA : NST_OK;
}

static NST_APART int check_sample(const nst_engine *e, const nst_blob *data, uint32_t row, uint32_t batch, uint32_t inner,
                                  const float *target) {
    if (e->header == NULL || !e->begun) return NST_BAD_STATE;
    if (batch == 0 || (e->pending != 0 && (batch != e->batch || e->pending >= batch))) return NST_BAD_STATE;
    if (inner != 0 && !inner_possible(e, inner)) return NST_BAD_INNER;
    if (target != NULL && e->header->target == NST_NONE) return NST_BAD_SETTINGS;
    if (row >= data->rows) return NST_BAD_ROW;
    return check_target(e, data, row, inner, target);
}

static NST_APART float backward(nst_engine *e, bool values, uint32_t label, float share) {
    float loss = loss_of_logits(e, label, share);
    for (uint32_t k = e->header->ops; k-- > 0;) {
        const nst_op *op = &e->ops[k];
        if ((op->flags & (NST_TRAINED | NST_INPUT_GRADIENT)) == 0) continue; /* nothing before it is trained */
        nst_op_backward(e, op);
        if (k == e->header->ops - 1 && e->inner != 0) loss += values ? inner_squares(e, share) : inner_loss(e, label, share);
    }
    return loss;
}

int nst_sample(nst_engine *e, const nst_blob *data, uint32_t row, int down, int right, uint32_t batch, uint32_t inner,
               const float *target, float *loss) {
    if (e == NULL || data == NULL) return NST_BAD_ARGUMENT;
    int bad = check_sample(e, data, row, batch, inner, target);
    if (!bad) bad = load(e, data, row, down, right);
    if (bad) return bad;
    if (target != NULL)
        nst_copy(nst_at(e, e->header->target), target, e->header->classes * 4);
    else if (nst_values(data) != 0 && e->header->target != NST_NONE)
        nst_load_target(nst_at(e, e->header->target), data, row);
    if (e->pending == 0) e->loss = 0.0f;
    e->batch = batch;
    e->inner = inner;
    forward(e);
    float own = backward(e, nst_values(data) != 0, nst_values(data) == 0 ? nst_label(data, row) : 0, 1.0f / (float)batch);
    e->pending += 1;
    e->loss += own;
    if (loss != NULL) *loss = own;
    return NST_OK;
}

/* Sums run in stretches, which keeps their rounding small however long the vector. */
enum { STRETCH = 64 };

/* Adds the proximal term's gradient; gives the term. */
static float pull_to_anchor(nst_engine *e) {
    const nst_header *h = e->header;
    const float *w = nst_at(e, h->weights), *anchor = nst_at(e, h->anchor);
    float *grads = nst_at(e, h->grads), mu = e->settings.mu, sum = 0.0f;
    for (uint32_t start = 0; start < h->trained; start += STRETCH) {
        float part = 0.0f;
        for (uint32_t i = start; i < h->trained && i < start + STRETCH; i++) {
            float apart = w[i] - anchor[i];
            grads[i] += mu * apart;
            part += apart * apart;
        }
        sum += part;
    }
    return mu * 0.5f * sum;
}

static void mask_gradients(nst_engine *e) {
    const nst_header *h = e->header;
    const uint32_t *mask = (const uint32_t *)(const void *)nst_at(e, h->mask);
    float *grads = nst_at(e, h->grads);
    for (uint32_t i = 0; i < h->trained; i++)
        if ((mask[i / 32] >> (i % 32) & 1u) == 0) grads[i] = 0.0f;
}

/* What all gradients are multiplied by so that their joint norm is at most `clip`. */
static float clipping(const nst_engine *e) {
    const nst_header *h = e->header;
    const float *grads = nst_at(e, h->grads);
    float sum = 0.0f;
    for (uint32_t start = 0; start < h->trained; start += STRETCH) {
        float part = 0.0f;
        for (uint32_t i = start; i < h->trained && i < start + STRETCH; i++) part += grads[i] * grads[i];
        sum += part;
    }
    float factor = e->settings.clip / (nst_sqrt(sum) + 1e-6f);
    return factor > 1.0f ? 1.0f : factor;
}

/* A NaN has many bit patterns and machines differ in which they make: one of them stands for all, so that even a training that
 * broke down gives the same bits everywhere. */
static float one_nan(float x) {
    static const uint32_t pattern = 0x7FC00000u;
    float nan;
    if (x == x) return x;
    nst_copy(&nan, &pattern, 4);
    return nan;
}

static void update(nst_engine *e, float factor) {
    const nst_header *h = e->header;
    const nst_settings *s = &e->settings;
    float *w = nst_at(e, h->weights), *grads = nst_at(e, h->grads);
    float *momentum = s->momentum > 0.0f ? nst_at(e, h->momentum) : NULL;
    for (uint32_t i = 0; i < h->trained; i++) {
        float g = grads[i] * factor;
        if (s->decay > 0.0f) g += s->decay * w[i];
        if (momentum != NULL) {
            g = momentum[i] * s->momentum + g;
            momentum[i] = one_nan(g);
        }
        w[i] = one_nan(w[i] - s->lr * g);
        grads[i] = 0.0f;
    }
}

int nst_step(nst_engine *e) {
    if (e == NULL) return NST_BAD_ARGUMENT;
    if (e->header == NULL || !e->begun || e->pending == 0 || e->pending != e->batch) return NST_BAD_STATE;
    if (e->settings.mu > 0.0f) e->loss += pull_to_anchor(e) * (float)e->batch;
    if (e->header->mask != NST_NONE) mask_gradients(e);
    update(e, e->settings.clip > 0.0f ? clipping(e) : 1.0f);
    e->loss = one_nan(e->loss);
    e->pending = 0;
    e->steps += 1;
    return NST_OK;
}

int nst_batch(nst_engine *e, const nst_blob *data, const uint32_t *rows, const int8_t *shifts, const float *targets, uint32_t batch,
              uint32_t inner) {
    if (e == NULL || data == NULL || rows == NULL) return NST_BAD_ARGUMENT;
    if (e->header == NULL) return NST_BAD_STATE;
    for (uint32_t k = 0; k < batch; k++) {
        if (rows[k] >= data->rows) return NST_BAD_ROW;
        const float *target = targets != NULL ? targets + (size_t)rows[k] * e->header->classes : NULL;
        int down = shifts != NULL ? shifts[2 * k] : 0, right = shifts != NULL ? shifts[2 * k + 1] : 0;
        int bad = nst_sample(e, data, rows[k], down, right, batch, inner, target, NULL);
        if (bad) return bad;
    }
    return nst_step(e);
}

void *nst_block(nst_engine *e, uint32_t which, uint32_t *bytes) {
    *bytes = 0;
    if (e == NULL || e->header == NULL) return NULL;
    const nst_header *h = e->header;
    uint32_t offset = NST_NONE, size = h->trained * 4;
    switch (which) {
    case NST_BLOCK_WEIGHTS: offset = h->weights; size = h->params * 4; break;
    case NST_BLOCK_MOMENTUM: offset = h->momentum; break;
    case NST_BLOCK_ANCHOR: offset = h->anchor; break;
    case NST_BLOCK_MASK: offset = h->mask; size = (h->trained + 31) / 32 * 4; break;
    case NST_BLOCK_PRESENT: offset = h->present; size = h->classes * 4; break;
    case NST_BLOCK_TARGET: offset = h->target; size = h->classes * 4; break;
    case NST_BLOCK_LOGITS: offset = h->output; size = h->classes * 4; break;
    default: break;
    }
    if (offset == NST_NONE) return NULL;
    *bytes = size;
    return nst_at(e, offset);
}

uint32_t nst_sizes(void) { return (uint32_t)(sizeof(nst_engine) * 65536u + sizeof(nst_blob)); }
