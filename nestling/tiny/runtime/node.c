#include "node.h"

#include <stddef.h>

#include "board.h"

/* ------------------------------------------------------------------------------------------------------------------- the bytes */

static uint32_t half(const uint8_t *from) { return from[0] | (uint32_t)from[1] << 8; }

static uint32_t word(const uint8_t *from) { return half(from) | half(from + 2) << 16; }

static uint32_t bits(float value) {
    union {
        float number;
        uint32_t word;
    } both;
    both.number = value;
    return both.word;
}

/* ----------------------------------------------------------------------------------------------------------------- the answers */

static void say(nst_node *node, uint32_t words) {
    node->head.status = NST_DONE;
    node->head.length = (uint16_t)(words * 4u);
    node->body = (const uint8_t *)node->answer;
}

static void refuse(nst_node *node, uint32_t why) {
    say(node, 0);
    node->head.status = (uint8_t)why;
}

static void refuse_with(nst_node *node, int code) {
    node->answer[0] = (uint32_t)code;
    node->answer[1] = (uint32_t)node->engine.bad_op;
    say(node, 2);
    node->head.status = NST_REFUSED_ENGINE;
}

static void tell_state(nst_node *node) {
    uint32_t reserved;
    uint32_t *to = node->answer;
    *to++ = NST_PROTOCOL | NST_PAYLOAD << 16;
    *to++ = NST_BUILD;
    *to++ = node->region_bytes;
    *to++ = nst_board_stack(&reserved);
    *to++ = reserved;
    *to++ = node->flags;
    *to++ = node->flags & NST_LOADED ? word(node->region + 12) : 0; /* the descriptor's own CRC */
    *to++ = node->job;
    *to++ = node->engine.steps;
    *to++ = node->engine.pending;
    *to++ = node->data.rows;
    *to++ = node->data.channels | (uint32_t)nst_of_bytes(&node->data) << 16;
    *to++ = node->data.height | node->data.width << 16;
    *to++ = node->data.crc;
    *to++ = node->damaged;
    *to++ = node->repeated;
    say(node, NST_INFO_WORDS);
}

/* -------------------------------------------------------------------------------------------------------------------- the plan */

static void forget_job(nst_node *node) {
    node->flags &= (uint8_t)~(NST_BEGUN | NST_READY | NST_STEPPED);
    node->job = 0;
    node->engine.pending = 0;
    node->engine.steps = 0;
}

static void attach(nst_node *node) {
    int code = nst_attach(&node->engine, node->region, node->whole, node->region + node->whole, node->region_bytes - node->whole);
    node->loaded = 0;
    if (code) {
        refuse_with(node, code);
        return;
    }
    node->flags |= NST_LOADED;
    say(node, 0);
}

/* offset, size of the whole, bytes. The pieces come in order; offset 0 starts anew and ends what was there. */
static void load(nst_node *node, const uint8_t *payload, uint32_t length) {
    if (length <= 8) {
        refuse(node, NST_REFUSED_LENGTH);
        return;
    }
    uint32_t offset = word(payload), whole = word(payload + 4), bytes = length - 8;
    if (whole % 4 || whole > node->region_bytes || bytes > whole || offset > whole - bytes) {
        refuse(node, NST_REFUSED_RANGE);
        return;
    }
    if (offset && (offset != node->loaded || whole != node->whole)) {
        refuse(node, NST_REFUSED_ORDER);
        return;
    }
    forget_job(node);
    node->flags &= (uint8_t)~NST_LOADED;
    nst_copy(node->region + offset, payload + 8, bytes);
    node->loaded = offset + bytes;
    node->whole = whole;
    if (node->loaded == whole)
        attach(node);
    else
        say(node, 0);
}

/* ------------------------------------------------------------------------------------------------------------------ the blocks */

/* The piece of a block that a request names, or NULL with the refusal said. */
static uint8_t *piece(nst_node *node, const uint8_t *payload, uint32_t bytes) {
    uint32_t offset = word(payload + 4), size = 0;
    if (!(node->flags & NST_LOADED)) {
        refuse(node, NST_REFUSED_ORDER);
        return NULL;
    }
    uint8_t *block = nst_block(&node->engine, word(payload), &size);
    if (!block || !bytes || bytes > size || offset > size - bytes) {
        refuse(node, NST_REFUSED_RANGE);
        return NULL;
    }
    return block + offset;
}

/* block, offset, bytes. Whoever changes a block ends the job that was at work with it. */
static void write_block(nst_node *node, const uint8_t *payload, uint32_t length) {
    if (length <= 8) {
        refuse(node, NST_REFUSED_LENGTH);
        return;
    }
    if (word(payload) > NST_BLOCK_PRESENT) {
        refuse(node, NST_REFUSED_RANGE);
        return;
    }
    uint8_t *to = piece(node, payload, length - 8);
    if (!to) return;
    if (node->flags & NST_READY) forget_job(node);
    nst_copy(to, payload + 8, length - 8);
    say(node, 0);
}

/* block, offset, count. */
static void read_block(nst_node *node, const uint8_t *payload, uint32_t length) {
    if (length != 12) {
        refuse(node, NST_REFUSED_LENGTH);
        return;
    }
    uint32_t count = word(payload + 8);
    if (count > NST_PAYLOAD) {
        refuse(node, NST_REFUSED_RANGE);
        return;
    }
    const uint8_t *from = piece(node, payload, count);
    if (!from) return;
    say(node, 0);
    node->head.length = (uint16_t)count;
    node->body = from; /* sent from where it lies, and from there again if it is asked for again */
}

/* --------------------------------------------------------------------------------------------------------------------- the job */

/* job, settings. */
static void begin(nst_node *node, const uint8_t *payload, uint32_t length) {
    if (length != 4 + sizeof(nst_settings)) {
        refuse(node, NST_REFUSED_LENGTH);
        return;
    }
    if (!(node->flags & NST_LOADED)) {
        refuse(node, NST_REFUSED_ORDER);
        return;
    }
    forget_job(node);
    int code = nst_begin(&node->engine, (const nst_settings *)(const void *)(payload + 4)); /* which is aligned, see nst_link */
    if (code) {
        refuse_with(node, code);
        return;
    }
    node->job = word(payload);
    node->flags |= NST_BEGUN;
    say(node, 0);
}

/* job, steps that are done already. */
static void start(nst_node *node, const uint8_t *payload, uint32_t length) {
    if (length != 8) {
        refuse(node, NST_REFUSED_LENGTH);
        return;
    }
    if (!(node->flags & NST_BEGUN) || node->flags & NST_READY || word(payload) != node->job) {
        refuse(node, NST_REFUSED_ORDER);
        return;
    }
    node->engine.steps = word(payload + 4);
    node->flags |= NST_READY;
    say(node, 0);
}

/* --------------------------------------------------------------------------------------------------------------------- a step */

/* number, batch u16, first u16, inner u16, count u8, flags u8; then rows u16; shifts, two i8 a row; up to the next word; targets. */
typedef struct {
    uint32_t number, batch, first, inner, count, flags;
    const uint8_t *rows;
    const int8_t *shifts;
    const float *targets;
} nst_samples;

#define NST_STEP_HEAD 12u

static bool parse_step(const nst_node *node, const uint8_t *payload, uint32_t length, nst_samples *step) {
    if (length < NST_STEP_HEAD) return false;
    step->number = word(payload);
    step->batch = half(payload + 4);
    step->first = half(payload + 6);
    step->inner = half(payload + 8);
    step->count = payload[10];
    step->flags = payload[11];
    uint32_t place = NST_STEP_HEAD;
    step->rows = payload + place;
    place += 2 * step->count;
    step->shifts = step->flags & NST_SHIFTS ? (const int8_t *)payload + place : NULL;
    if (step->shifts) place += 2 * step->count;
    step->targets = NULL;
    if (step->flags & NST_TARGETS) {
        place = (place + 3u) & ~3u;
        uint32_t classes = node->engine.header->classes;
        if (classes > NST_PAYLOAD) return false; /* so that the product below is small */
        step->targets = (const float *)(const void *)(payload + place);
        place += 4 * step->count * classes;
    }
    return place == length;
}

static bool is_near(int shift) { return shift >= -NST_REACH && shift <= NST_REACH; }

static bool rows_are_there(const nst_node *node, const nst_samples *step) {
    for (uint32_t k = 0; k < step->count; k++) {
        if (half(step->rows + 2 * k) >= node->data.rows) return false;
        if (!step->shifts) continue;
        const int8_t *shift = step->shifts + 2 * k;
        if (!is_near(shift[0]) || !is_near(shift[1])) return false;
    }
    return true;
}

/* The samples of one frame; gives back the engine's code. Ticks are read at every sample, before the counter can wrap twice. */
static int train(nst_node *node, const nst_samples *step, uint32_t *ticks) {
    uint32_t classes = node->engine.header->classes, before = nst_board_ticks();
    for (uint32_t k = 0; k < step->count; k++) {
        const int8_t *shift = step->shifts ? step->shifts + 2 * k : NULL;
        const float *target = step->targets ? step->targets + k * classes : NULL;
        int code = nst_sample(&node->engine, &node->data, half(step->rows + 2 * k), shift ? shift[0] : 0, shift ? shift[1] : 0, step->batch,
                              step->inner, target, NULL);
        if (code) return code;
        (void)nst_board_ticks();
    }
    int code = 0;
    if (node->engine.pending == step->batch) {
        code = nst_step(&node->engine);
        node->flags |= NST_STEPPED;
    }
    *ticks = nst_board_ticks() - before;
    return code;
}

static void tell_progress(nst_node *node, uint32_t ticks) {
    node->answer[0] = node->engine.steps;
    node->answer[1] = node->engine.pending;
    node->answer[2] = bits(node->engine.loss);
    node->answer[3] = ticks;
    say(node, 4);
}

/* Whether the frame holds what comes next; of what was done already only the last is remembered, and acknowledged. */
static bool is_next(const nst_node *node, const nst_samples *step) {
    if (step->number != node->engine.steps + 1u || step->first != node->engine.pending) return false;
    return !step->first || (step->batch == node->engine.batch && step->inner == node->inner);
}

static bool is_done(const nst_node *node, const nst_samples *step) {
    if (step->number == node->engine.steps && !node->engine.pending) return node->flags & NST_STEPPED;
    return step->number == node->engine.steps + 1u && step->first + step->count <= node->engine.pending;
}

static void take_step(nst_node *node, const uint8_t *payload, uint32_t length) {
    nst_samples step;
    uint32_t ticks = 0;
    if (!(node->flags & NST_READY) || !(node->flags & NST_DATA)) {
        refuse(node, NST_REFUSED_ORDER);
        return;
    }
    if (!parse_step(node, payload, length, &step)) {
        refuse(node, NST_REFUSED_LENGTH);
        return;
    }
    if (!step.count || step.first + step.count > step.batch || step.flags > (NST_SHIFTS | NST_TARGETS) || !rows_are_there(node, &step)) {
        refuse(node, NST_REFUSED_RANGE);
        return;
    }
    if (is_done(node, &step)) {
        tell_progress(node, 0);
        return;
    }
    if (!is_next(node, &step)) {
        refuse(node, NST_REFUSED_NUMBER);
        return;
    }
    node->inner = (uint16_t)step.inner;
    int code = train(node, &step, &ticks);
    if (code) {
        forget_job(node); /* half a batch is in the gradients: what is there is no longer the job's */
        refuse_with(node, code);
        return;
    }
    tell_progress(node, ticks);
}

/* ----------------------------------------------------------------------------------------------------------------- the requests */

static void serve(nst_node *node, const uint8_t *payload, const nst_head *request) {
    switch (request->type) {
        case NST_HELLO:
            if (request->length)
                refuse(node, NST_REFUSED_LENGTH);
            else
                tell_state(node);
            return;
        case NST_LOAD: load(node, payload, request->length); return;
        case NST_WRITE: write_block(node, payload, request->length); return;
        case NST_READ: read_block(node, payload, request->length); return;
        case NST_BEGIN: begin(node, payload, request->length); return;
        case NST_START: start(node, payload, request->length); return;
        case NST_STEP: take_step(node, payload, request->length); return;
        default: refuse(node, NST_REFUSED_TYPE);
    }
}

static void send_bare(uint8_t type, uint8_t status, const nst_head *request) {
    nst_head head = {type, status, 0, request->session, request->sequence};
    nst_link_send(&head, NULL);
}

static void arrived(nst_node *node, const nst_head *request) {
    if (request->type & NST_ANSWER) return; /* an echo of the line's, and answering it would never end */
    bool ours = request->session == node->head.session;
    bool opens = request->type == NST_HELLO && request->session && !ours;
    if (!opens && (!ours || !request->session)) {
        send_bare((uint8_t)(request->type | NST_ANSWER), NST_REFUSED_SESSION, request);
        return;
    }
    uint16_t ahead = (uint16_t)(request->sequence - node->head.sequence);
    if (!opens && ahead > 1) return; /* a straggler */
    if (opens || ahead == 1) {
        node->head.type = (uint8_t)(request->type | NST_ANSWER);
        node->head.session = request->session;
        node->head.sequence = request->sequence;
        serve(node, nst_link_payload(&node->link), request);
    } else {
        node->repeated++;
    }
    nst_link_send(&node->head, node->body);
}

void nst_node_feed(nst_node *node, uint8_t byte) {
    nst_head request;
    nst_arrival arrival = nst_link_feed(&node->link, byte, &request);
    if (arrival == NST_ARRIVED) arrived(node, &request);
    if (arrival == NST_DAMAGED) {
        nst_head none = {0, 0, 0, 0, 0};
        node->damaged++;
        send_bare(NST_AGAIN, 0, &none);
    }
}

void nst_node_start(nst_node *node) {
    nst_zero(node, sizeof *node);
    node->region = nst_board_region(&node->region_bytes);
    uint32_t bytes = 0;
    const void *data = nst_board_data(&bytes);
    if (data && !nst_blob_open(&node->data, data, bytes)) node->flags |= NST_DATA;
}

void nst_node_run(nst_node *node) {
    nst_node_start(node);
    tell_state(node);
    node->head.type = NST_BEACON;
    nst_link_send(&node->head, node->body);
    for (;;) {
        int byte = nst_board_getc();
        if (byte < 0) return;
        nst_node_feed(node, (uint8_t)byte);
    }
}
