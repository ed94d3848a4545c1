/* The UART of ARM's Cortex-M system design kit (MPS2 boards, and those that Unicorn runs). */
#include "cortex.h"
#include "../board.h"

#define DATA NST_REGISTER(NST_UART + 0x00u)
#define STATE NST_REGISTER(NST_UART + 0x04u)
#define CONTROL NST_REGISTER(NST_UART + 0x08u)
#define INTERRUPT NST_REGISTER(NST_UART + 0x0Cu)
#define DIVIDER NST_REGISTER(NST_UART + 0x10u)

enum { FULL_OUT = 1u, FULL_IN = 2u, SEND = 1u, RECEIVE = 2u, RECEIVE_INTERRUPT = 8u, RECEIVED = 2u };

void nst_uart_start(void)
{
    DIVIDER = 16u;
    CONTROL = SEND | RECEIVE | RECEIVE_INTERRUPT;
    nst_interrupt_on(NST_IRQ);
}

int nst_board_getc(void)
{
    for (;;) {
        /* Cleared before the look at the receiver: a byte that comes between the two leaves the interrupt pending. */
        INTERRUPT = RECEIVED;
        nst_interrupt_clear(NST_IRQ);
        if ((STATE & FULL_IN) != 0u)
            return (int)(DATA & 0xFFu);
        nst_wait();
    }
}

void nst_board_putc(uint8_t byte)
{
    while ((STATE & FULL_OUT) != 0u)
        ;
    DATA = byte;
}
