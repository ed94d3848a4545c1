#include "link.h"

#include "board.h"
#include "nestling.h"

static uint32_t half(const uint8_t *from) { return from[0] | (uint32_t)from[1] << 8; }

static uint32_t word(const uint8_t *from) { return half(from) | half(from + 2) << 16; }

/* ------------------------------------------------------------------------------------------------------------------ receiving */

static void restart(nst_link *link) {
    link->got = 0;
    link->code = 0;
    link->left = 0;
    link->broken = false;
}

static void append(nst_link *link, uint8_t byte) {
    if (link->got == NST_FRAME) {
        link->broken = true;
        return;
    }
    ((uint8_t *)link->raw)[link->got++] = byte;
}

static bool parse(const nst_link *link, nst_head *head) {
    const uint8_t *raw = (const uint8_t *)link->raw;
    if (link->broken || link->left || link->got < NST_HEAD + 4u) return false;
    head->type = raw[0];
    head->status = raw[1];
    head->length = (uint16_t)half(raw + 2);
    head->session = (uint16_t)half(raw + 4);
    head->sequence = (uint16_t)half(raw + 6);
    uint32_t body = link->got - 4u;
    return head->length == body - NST_HEAD && word(raw + body) == nst_crc32(0, raw, body);
}

static nst_arrival finish(nst_link *link, nst_head *head) {
    /* Two zeros in a row are no frame: a sender puts one in front as well, to end whatever noise was before it. */
    nst_arrival arrival = !link->code ? NST_NOTHING : parse(link, head) ? NST_ARRIVED : NST_DAMAGED;
    restart(link);
    return arrival;
}

nst_arrival nst_link_feed(nst_link *link, uint8_t byte, nst_head *head) {
    if (!byte) return finish(link, head);
    if (link->left) {
        append(link, byte);
        link->left--;
        return NST_NOTHING;
    }
    if (link->code && link->code != 0xFF) append(link, 0);
    link->code = byte;
    link->left = (uint8_t)(byte - 1u);
    return NST_NOTHING;
}

/* -------------------------------------------------------------------------------------------------------------------- sending */

typedef struct {
    uint8_t head[NST_HEAD];
    uint8_t crc[4];
    const uint8_t *payload;
    uint32_t body; /* head and payload */
} nst_parts;

static void put_half(uint8_t *to, uint32_t value) {
    to[0] = (uint8_t)value;
    to[1] = (uint8_t)(value >> 8);
}

static uint8_t at(const nst_parts *parts, uint32_t place) {
    if (place < NST_HEAD) return parts->head[place];
    if (place < parts->body) return parts->payload[place - NST_HEAD];
    return parts->crc[place - parts->body];
}

static uint32_t run_from(const nst_parts *parts, uint32_t start) {
    uint32_t run = 0;
    while (run < 254 && start + run < parts->body + 4u && at(parts, start + run)) run++;
    return run;
}

static void put_cobs(const nst_parts *parts) {
    uint32_t place = 0;
    for (;;) {
        uint32_t run = run_from(parts, place);
        nst_board_putc((uint8_t)(run + 1u));
        for (uint32_t k = 0; k < run; k++) nst_board_putc(at(parts, place + k));
        place += run;
        if (place == parts->body + 4u) return;
        if (run < 254) place++; /* the zero that the block's length stands for */
    }
}

void nst_link_send(const nst_head *head, const uint8_t *payload) {
    nst_parts parts;
    parts.head[0] = head->type;
    parts.head[1] = head->status;
    put_half(parts.head + 2, head->length);
    put_half(parts.head + 4, head->session);
    put_half(parts.head + 6, head->sequence);
    parts.payload = payload;
    parts.body = NST_HEAD + head->length;
    uint32_t crc = nst_crc32(nst_crc32(0, parts.head, NST_HEAD), payload, head->length);
    put_half(parts.crc, crc & 0xFFFFu);
    put_half(parts.crc + 2, crc >> 16);
    nst_board_putc(0);
    put_cobs(&parts);
    nst_board_putc(0);
}
