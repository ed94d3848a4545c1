/* What a board gives to the node: bytes in and out, a clock, its memory and its data. Every board (boards/) and the host have these. */
#ifndef NST_BOARD_H
#define NST_BOARD_H

#include <stdint.h>

/* Waits for the next byte of the link, asleep where the core can sleep. -1: the link is gone (the host only; a board waits for ever). */
int nst_board_getc(void);

/* Sends one byte; waits while the transmitter is busy. */
void nst_board_putc(uint8_t byte);

/* A free-running counter of 32 bits, 0 for ever where the board has none. It is only right if it is read at least once every
   2^24 ticks (one instruction is one nanosecond of the clock where instructions are counted). */
uint32_t nst_board_ticks(void);

/* The client's data in flash, and how many bytes of flash there are from there on (the blob says itself how long it is). */
const void *nst_board_data(uint32_t *bytes);

/* The RAM that is free for a descriptor and its arena; aligned to 8 bytes. */
void *nst_board_region(uint32_t *bytes);

/* The most bytes of stack used since the start, and in `reserved` how many there are. */
uint32_t nst_board_stack(uint32_t *reserved);

#endif
