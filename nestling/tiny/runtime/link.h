/* Frames on a byte stream. nestling/tiny/link/frames.py is the other end.

   A frame is a head of eight bytes, up to NST_PAYLOAD bytes of payload and the CRC-32 of both, COBS-encoded, so that a zero byte is
   found between frames and nowhere else: whatever a noisy line did to one frame, the next zero is a fresh start. */
#ifndef NST_LINK_H
#define NST_LINK_H

#include <stdbool.h>
#include <stdint.h>

#define NST_PAYLOAD 256u
#define NST_HEAD 8u
#define NST_FRAME (NST_HEAD + NST_PAYLOAD + 4u)

typedef struct {
    uint8_t type;
    uint8_t status; /* of an answer; 0 in a request */
    uint16_t length; /* of the payload */
    uint16_t session;
    uint16_t sequence;
} nst_head;

typedef struct {
    uint32_t raw[NST_FRAME / 4]; /* words, so that the payload's numbers are aligned */
    uint16_t got; /* bytes of `raw` that are filled */
    uint8_t code; /* of the COBS block that is being read; 0 before the first */
    uint8_t left; /* bytes of it that are still to come */
    bool broken; /* too long: nothing counts until the next zero */
} nst_link;

typedef enum { NST_NOTHING, NST_ARRIVED, NST_DAMAGED } nst_arrival;

/* One byte of the stream. NST_ARRIVED: `head` and the payload are good until the next byte is fed. */
nst_arrival nst_link_feed(nst_link *link, uint8_t byte, nst_head *head);

static inline uint8_t *nst_link_payload(nst_link *link) { return (uint8_t *)link->raw + NST_HEAD; }

/* Sends a frame with nst_board_putc. The payload is read where it lies, which spares a second buffer. */
void nst_link_send(const nst_head *head, const uint8_t *payload);

#endif
