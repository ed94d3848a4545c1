/* The node: what a board does with the frames that arrive. nestling/tiny/link/session.py is the other end.

   The gateway asks and the node answers; the node speaks first only once, after a start. A request is known by its session and
   sequence number: one that comes again is answered again and not done again, an older one is ignored.

   A job is begun in this order: LOAD (the descriptor, unless it is there), BEGIN (the settings; momentum is zero), WRITE (weights and
   whatever else the plan has), START (from which step). Only then the node counts as being at work on that job, so that a gateway
   that comes back later finds either a job that is whole or none. Then STEP after STEP, and READ.

   Everything that arrives is checked here or in the engine: lengths, order, ranges, numbers. */
#ifndef NST_NODE_H
#define NST_NODE_H

#include "link.h"
#include "nestling.h"

#define NST_PROTOCOL 1u
#ifndef NST_BUILD
#define NST_BUILD 0u /* says which firmware this is */
#endif

/* Requests; an answer has the same type with NST_ANSWER added. */
enum { NST_HELLO = 1, NST_LOAD, NST_WRITE, NST_READ, NST_BEGIN, NST_START, NST_STEP };
enum { NST_ANSWER = 0x80, NST_BEACON = 0xF0, NST_AGAIN = 0xF1 /* something unreadable arrived: send it again */ };

/* Why a request is refused. With NST_REFUSED_ENGINE come the engine's code and the number of the operation. */
enum {
    NST_DONE = 0,
    NST_REFUSED_SESSION, /* the node has (re)started or another gateway has spoken: say HELLO */
    NST_REFUSED_TYPE,
    NST_REFUSED_LENGTH,
    NST_REFUSED_ORDER, /* not now: no plan, no job, no data */
    NST_REFUSED_RANGE,
    NST_REFUSED_NUMBER, /* not the step or the sample that comes next */
    NST_REFUSED_ENGINE
};

/* Flags of the state. */
enum { NST_LOADED = 1, NST_BEGUN = 2, NST_READY = 4, NST_DATA = 8, NST_STEPPED = 16 /* since START */ };

/* Flags of a STEP. */
enum { NST_SHIFTS = 1, NST_TARGETS = 2 };

#define NST_INFO_WORDS 16u

typedef struct {
    nst_link link;
    nst_engine engine;
    nst_blob data;
    uint8_t *region; /* the descriptor, then the arena */
    uint32_t region_bytes;
    uint32_t loaded; /* bytes of a descriptor that have arrived, */
    uint32_t whole; /* of so many */
    uint32_t job;
    uint32_t damaged; /* frames */
    uint32_t repeated; /* requests */
    uint16_t inner; /* of the batch at work; the engine counts its samples and sums its loss */
    uint8_t flags;
    nst_head head; /* of the last answer; it is also the memory of which request came last */
    const uint8_t *body;
    uint32_t answer[NST_INFO_WORDS];
} nst_node;

void nst_node_start(nst_node *node);
void nst_node_feed(nst_node *node, uint8_t byte);

/* Starts the node, says so, and serves until the link ends, which on a board is never. */
void nst_node_run(nst_node *node);

#endif
