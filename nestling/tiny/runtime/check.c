/* Nothing of a descriptor is used before it went through here: after NST_OK no operation reads or writes outside of the arena, and
 * none writes over the parameters. (A plan may still be a foolish one and compute nonsense inside its own scratch.) */
#include "nestling.h"

typedef struct {
    uint32_t start, end; /* bytes; equal: no such buffer */
} span;

enum { BLOCKS = 7 };

typedef struct {
    const nst_header *h;
    span block[BLOCKS];
} checker;

static bool apart(span a, span b) { return a.end <= b.start || b.end <= a.start || a.start == a.end || b.start == b.end; }
static bool same(span a, span b) { return a.start == b.start && a.end == b.end; }

/* A buffer inside the arena, aligned, not empty. */
static bool place(const nst_header *h, uint32_t offset, uint64_t bytes, span *found) {
    found->start = found->end = 0;
    if (offset == NST_NONE || (offset & 3u) != 0 || bytes == 0) return false;
    if (bytes > h->arena || offset > h->arena - bytes) return false;
    found->start = offset;
    found->end = offset + (uint32_t)bytes;
    return true;
}

static bool place_or_none(const nst_header *h, uint32_t offset, uint64_t bytes, span *found) {
    found->start = found->end = 0;
    return offset == NST_NONE || place(h, offset, bytes, found);
}

/* Scratch: a place that touches no block. */
static int scratch(const checker *c, uint32_t offset, uint64_t bytes, span *found) {
    if (!place(c->h, offset, bytes, found)) return NST_BAD_PLACE;
    for (int k = 0; k < BLOCKS; k++)
        if (!apart(*found, c->block[k])) return NST_BAD_OVERLAP;
    return NST_OK;
}

static int scratch_or_none(const checker *c, uint32_t offset, uint64_t bytes, span *found) {
    found->start = found->end = 0;
    return offset == NST_NONE ? NST_OK : scratch(c, offset, bytes, found);
}

static int blocks(checker *c) {
    const nst_header *h = c->h;
    uint64_t trained = (uint64_t)h->trained * 4, classes = (uint64_t)h->classes * 4, flags = ((uint64_t)h->trained + 31) / 32 * 4;
    bool ok = place(h, h->weights, (uint64_t)h->params * 4, &c->block[0]);
    ok = ok && (h->trained == 0 ? h->grads == NST_NONE : place(h, h->grads, trained, &c->block[1]));
    ok = ok && place_or_none(h, h->momentum, trained, &c->block[2]);
    ok = ok && place_or_none(h, h->anchor, trained, &c->block[3]);
    ok = ok && place_or_none(h, h->mask, flags, &c->block[4]);
    ok = ok && place_or_none(h, h->target, classes, &c->block[5]);
    ok = ok && place_or_none(h, h->present, classes, &c->block[6]);
    if (!ok) return NST_BAD_PLACE;
    for (int a = 0; a < BLOCKS; a++)
        for (int b = 0; b < a; b++)
            if (!apart(c->block[a], c->block[b])) return NST_BAD_OVERLAP;
    return NST_OK;
}

static int header(checker *c) {
    const nst_header *h = c->h;
    if (h->params == 0 || h->trained > h->params || h->classes == 0) return NST_BAD_HEADER;
    if (h->in_channels == 0 || h->in_height == 0 || h->in_width == 0) return NST_BAD_SHAPE;
    if (h->in_channels > 0xFFFFu || h->in_height > 0xFFFFu || h->in_width > 0xFFFFu) return NST_BAD_SHAPE;
    int bad = blocks(c);
    if (bad) return bad;
    span input, output, grad;
    bad = scratch(c, h->input, (uint64_t)h->in_channels * h->in_height * h->in_width * 4, &input);
    if (!bad) bad = scratch(c, h->output, (uint64_t)h->classes * 4, &output);
    if (!bad) bad = h->trained == 0 ? scratch_or_none(c, h->output_grad, (uint64_t)h->classes * 4, &grad)
                                    : scratch(c, h->output_grad, (uint64_t)h->classes * 4, &grad);
    if (bad) return bad;
    return apart(output, grad) || same(output, grad) ? NST_OK : NST_BAD_OVERLAP;
}

static bool has_window(const nst_op *op) { return op->kind == NST_CONV || op->kind == NST_MAX_POOL || op->kind == NST_AVG_POOL; }
static bool has_parameters(const nst_op *op) {
    return op->kind == NST_CONV || op->kind == NST_DENSE || op->kind == NST_GROUP_NORM || op->kind == NST_AFFINE;
}

static int words(const nst_op *op) {
    uint32_t known = NST_TRAINED | NST_INPUT_GRADIENT | NST_ADD_TO_FIRST | NST_ADD_TO_SECOND;
    if (op->kind < NST_CONV || op->kind > NST_ACTIVATION || op->activation > NST_RELU6 || op->unused != 0) return NST_BAD_KIND;
    if ((op->flags & ~known) != 0) return NST_BAD_KIND;
    if ((op->flags & (NST_ADD_TO_FIRST | NST_ADD_TO_SECOND)) != 0 && (op->flags & NST_INPUT_GRADIENT) == 0) return NST_BAD_KIND;
    if ((op->flags & NST_ADD_TO_SECOND) != 0 && op->kind != NST_ADD) return NST_BAD_KIND;
    if ((op->flags & NST_TRAINED) != 0 && !has_parameters(op)) return NST_BAD_KIND;
    return nst_finite(op->scale) && nst_finite(op->eps) && op->eps >= 0.0f ? NST_OK : NST_BAD_NUMBER;
}

/* One direction of a window. Padding at the far end is what the output's size implies: so little that the last window still begins
 * on the input or, of a convolution, no more than at the near end. */
static bool window(uint32_t in, uint32_t out, uint32_t kernel, uint32_t stride, uint32_t pad, bool pool) {
    if (kernel == 0 || stride == 0 || (pool && pad >= kernel)) return false;
    uint64_t reach = (uint64_t)(out - 1) * stride + kernel; /* of the last window, counted from the start of the padding */
    uint64_t most = (uint64_t)pad + in + (pad >= kernel ? pad : kernel - 1);
    uint64_t unread = reach < (uint64_t)pad + in ? (uint64_t)pad + in - reach : 0;
    return reach <= most && unread < stride;
}

static int shape(const nst_op *op) {
    if (!op->in_channels || !op->in_height || !op->in_width || !op->out_channels || !op->out_height || !op->out_width)
        return NST_BAD_SHAPE;
    bool same_plane = op->in_height == op->out_height && op->in_width == op->out_width;
    if (has_window(op)) {
        bool pool = op->kind != NST_CONV;
        if (!window(op->in_height, op->out_height, op->kernel_height, op->stride_height, op->pad_top, pool)) return NST_BAD_SHAPE;
        if (!window(op->in_width, op->out_width, op->kernel_width, op->stride_width, op->pad_left, pool)) return NST_BAD_SHAPE;
        if (op->kind == NST_MAX_POOL && (uint32_t)op->kernel_height * op->kernel_width > 256) return NST_BAD_SHAPE;
    } else if (op->kind == NST_DENSE) {
        if (op->out_height != 1 || op->out_width != 1) return NST_BAD_SHAPE;
    } else if (!same_plane) {
        return NST_BAD_SHAPE;
    }
    bool grouped = op->kind == NST_CONV || op->kind == NST_GROUP_NORM;
    if (grouped && (op->groups == 0 || op->in_channels % op->groups || op->out_channels % op->groups)) return NST_BAD_SHAPE;
    bool mixes = op->kind == NST_CONV || op->kind == NST_DENSE;
    return mixes || op->in_channels == op->out_channels ? NST_OK : NST_BAD_SHAPE;
}

static uint64_t weight_count(const nst_op *op) {
    if (op->kind == NST_CONV)
        return (uint64_t)op->out_channels * (op->in_channels / op->groups) * op->kernel_height * op->kernel_width;
    if (op->kind == NST_DENSE) return (uint64_t)op->in_channels * op->in_height * op->in_width * op->out_channels;
    return op->out_channels;
}

/* Inside the block, and not across the border between what is trained and what is not. */
static bool parameter(const nst_header *h, uint32_t offset, uint64_t count) {
    if (offset == NST_NONE) return true;
    if (count > h->params || offset > h->params - count) return false;
    return offset >= h->trained || offset + count <= h->trained;
}

static int parameters(const nst_header *h, const nst_op *op) {
    if (!has_parameters(op)) return op->weight == NST_NONE && op->bias == NST_NONE ? NST_OK : NST_BAD_PARAMETER;
    bool needed = op->kind == NST_CONV || op->kind == NST_DENSE;
    if (needed && op->weight == NST_NONE) return NST_BAD_PARAMETER;
    if (!parameter(h, op->weight, weight_count(op)) || !parameter(h, op->bias, op->out_channels)) return NST_BAD_PARAMETER;
    bool any = (op->weight != NST_NONE && op->weight < h->trained) || (op->bias != NST_NONE && op->bias < h->trained);
    return any || (op->flags & NST_TRAINED) == 0 ? NST_OK : NST_BAD_PARAMETER;
}

typedef struct {
    span first, second, out, first_grad, second_grad, out_grad, aux;
} places;

static int find_places(const checker *c, const nst_op *op, places *p) {
    uint64_t in = (uint64_t)op->in_channels * op->in_height * op->in_width * 4;
    uint64_t out = (uint64_t)op->out_channels * op->out_height * op->out_width * 4;
    uint64_t aux = op->kind == NST_MAX_POOL ? out / 4 : op->kind == NST_GROUP_NORM ? (uint64_t)op->groups * 8 : 0;
    bool backward = (op->flags & (NST_TRAINED | NST_INPUT_GRADIENT)) != 0;
    if ((op->kind == NST_ADD) != (op->second != NST_NONE) || (op->kind != NST_ADD && op->second_grad != NST_NONE))
        return NST_BAD_PLACE;
    if ((aux == 0) != (op->aux == NST_NONE) || (backward && op->out_grad == NST_NONE)) return NST_BAD_PLACE;
    int bad = scratch(c, op->first, in, &p->first);
    if (!bad) bad = scratch_or_none(c, op->second, in, &p->second);
    if (!bad) bad = scratch(c, op->out, out, &p->out);
    if (!bad) bad = scratch_or_none(c, op->first_grad, in, &p->first_grad);
    if (!bad) bad = scratch_or_none(c, op->second_grad, in, &p->second_grad);
    if (!bad) bad = scratch_or_none(c, op->out_grad, out, &p->out_grad);
    if (!bad) bad = scratch_or_none(c, op->aux, aux, &p->aux);
    if (bad) return bad;
    if ((op->flags & NST_INPUT_GRADIENT) == 0) return NST_OK;
    if (op->kind == NST_ADD) return op->first_grad != NST_NONE || op->second_grad != NST_NONE ? NST_OK : NST_BAD_PLACE;
    return op->first_grad != NST_NONE ? NST_OK : NST_BAD_PLACE;
}

/* Whether backward reads the operation's input. */
static bool reads_input(const nst_op *op) {
    if (op->kind == NST_GROUP_NORM) return true;
    return (op->flags & NST_TRAINED) != 0 && has_parameters(op);
}

static int forward_overlaps(const nst_op *op, const places *p) {
    bool entrywise = op->kind == NST_ADD || op->kind == NST_ACTIVATION;
    if (!apart(p->first, p->out) && !(entrywise && same(p->first, p->out))) return NST_BAD_OVERLAP;
    if (!apart(p->second, p->out) && !same(p->second, p->out)) return NST_BAD_OVERLAP;
    return apart(p->aux, p->first) && apart(p->aux, p->out) ? NST_OK : NST_BAD_OVERLAP;
}

/* A gradient may take the place of the output's where it is handed on entry by entry, unless it has to be added there. */
static bool handed_on(const nst_op *op, span grad, span out_grad, uint32_t added) {
    if (apart(grad, out_grad)) return true;
    return (op->kind == NST_ADD || op->kind == NST_ACTIVATION) && same(grad, out_grad) && (op->flags & added) == 0;
}

static int backward_overlaps(const nst_op *op, const places *p) {
    if ((op->flags & (NST_TRAINED | NST_INPUT_GRADIENT)) == 0) return NST_OK;
    if (op->activation != NST_LINEAR && !apart(p->out, p->out_grad)) return NST_BAD_OVERLAP;
    if (reads_input(op) && !apart(p->first, p->out_grad)) return NST_BAD_OVERLAP;
    if (!apart(p->aux, p->out_grad)) return NST_BAD_OVERLAP;
    if ((op->flags & NST_INPUT_GRADIENT) == 0) return NST_OK;
    if (!handed_on(op, p->first_grad, p->out_grad, NST_ADD_TO_FIRST)) return NST_BAD_OVERLAP;
    if (!handed_on(op, p->second_grad, p->out_grad, NST_ADD_TO_SECOND)) return NST_BAD_OVERLAP;
    if (!apart(p->first_grad, p->second_grad) && !same(p->first_grad, p->second_grad)) return NST_BAD_OVERLAP;
    if (reads_input(op) && !apart(p->first, p->first_grad)) return NST_BAD_OVERLAP;
    return apart(p->aux, p->first_grad) ? NST_OK : NST_BAD_OVERLAP;
}

static int operation(const checker *c, const nst_op *op) {
    places p;
    int bad = words(op);
    if (!bad) bad = shape(op);
    if (!bad) bad = parameters(c->h, op);
    if (!bad) bad = find_places(c, op, &p);
    if (!bad) bad = forward_overlaps(op, &p);
    return bad ? bad : backward_overlaps(op, &p);
}

/* The network begins at the input and ends at the logits. */
static int ends(const nst_header *h, const nst_op *ops) {
    const nst_op *first = &ops[0], *last = &ops[h->ops - 1];
    if (first->first != h->input || nst_in_size(first) != h->in_channels * h->in_height * h->in_width) return NST_BAD_SHAPE;
    if (last->out != h->output || nst_out_size(last) != h->classes) return NST_BAD_SHAPE;
    bool backward = (last->flags & (NST_TRAINED | NST_INPUT_GRADIENT)) != 0;
    if (h->trained != 0 && !backward) return NST_BAD_HEADER; /* no gradient would arrive anywhere */
    return !backward || last->out_grad == h->output_grad ? NST_OK : NST_BAD_PLACE;
}

int nst_check(nst_engine *e) {
    checker c;
    c.h = e->header;
    for (int k = 0; k < BLOCKS; k++) c.block[k].start = c.block[k].end = 0;
    int bad = header(&c);
    if (bad) return bad;
    for (uint32_t k = 0; k < c.h->ops; k++) {
        bad = operation(&c, &e->ops[k]);
        if (bad) {
            e->bad_op = k;
            return bad;
        }
    }
    return ends(c.h, e->ops);
}
