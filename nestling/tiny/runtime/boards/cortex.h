/* What all Cortex-M boards share: waiting for an interrupt without taking it. */
#ifndef NST_CORTEX_H
#define NST_CORTEX_H

#include <stdint.h>

#define NST_REGISTER(address) (*(volatile uint32_t *)(uintptr_t)(address))

/* Interrupts stay masked (PRIMASK) from reset on, so that none is ever taken: a pending one only ends a wait. This needs no handler,
   no state shared with one, and no stack for one. */
void nst_interrupt_on(uint32_t number);
void nst_interrupt_clear(uint32_t number);
void nst_wait(void);

/* The board's UART: one of uart_*.c. */
void nst_uart_start(void);

#endif
