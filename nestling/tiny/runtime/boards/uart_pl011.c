/* ARM's PL011 (Stellaris boards). */
#include "cortex.h"
#include "../board.h"

#define DATA NST_REGISTER(NST_UART + 0x00u)
#define FLAGS NST_REGISTER(NST_UART + 0x18u)
#define LINE NST_REGISTER(NST_UART + 0x2Cu)
#define CONTROL NST_REGISTER(NST_UART + 0x30u)
#define MASK NST_REGISTER(NST_UART + 0x38u)
#define CLEAR NST_REGISTER(NST_UART + 0x44u)

enum { EMPTY_IN = 1u << 4, FULL_OUT = 1u << 5, EIGHT_BITS_FIFO = 7u << 4, ENABLE = 1u | 1u << 8 | 1u << 9 };
enum { RECEIVED = 1u << 4 | 1u << 6 }; /* enough of them, or some left alone for a while */

void nst_uart_start(void)
{
    LINE = EIGHT_BITS_FIFO;
    MASK = RECEIVED;
    CONTROL = ENABLE;
    nst_interrupt_on(NST_IRQ);
}

int nst_board_getc(void)
{
    for (;;) {
        /* Cleared before the look at the receiver: a byte that comes between the two leaves the interrupt pending. */
        CLEAR = RECEIVED;
        nst_interrupt_clear(NST_IRQ);
        if ((FLAGS & EMPTY_IN) == 0u)
            return (int)(DATA & 0xFFu);
        nst_wait();
    }
}

void nst_board_putc(uint8_t byte)
{
    while ((FLAGS & FULL_OUT) != 0u)
        ;
    DATA = byte;
}
