/* The UART of the nRF51. A byte is announced by an event; reading one announces the next. */
#include "cortex.h"
#include "../board.h"

#define START_RECEIVING NST_REGISTER(NST_UART + 0x000u)
#define START_SENDING NST_REGISTER(NST_UART + 0x008u)
#define RECEIVED NST_REGISTER(NST_UART + 0x108u)
#define SENT NST_REGISTER(NST_UART + 0x11Cu)
#define INTERRUPT_ON NST_REGISTER(NST_UART + 0x304u)
#define ENABLE NST_REGISTER(NST_UART + 0x500u)
#define INPUT NST_REGISTER(NST_UART + 0x518u)
#define OUTPUT NST_REGISTER(NST_UART + 0x51Cu)
#define BAUD NST_REGISTER(NST_UART + 0x524u)

enum { ON = 4u, RECEIVED_INTERRUPT = 1u << 2, BAUD_115200 = 0x01D7E000u };

void nst_uart_start(void)
{
    BAUD = BAUD_115200;
    ENABLE = ON;
    START_RECEIVING = 1u;
    START_SENDING = 1u;
    INTERRUPT_ON = RECEIVED_INTERRUPT;
    nst_interrupt_on(NST_IRQ);
}

int nst_board_getc(void)
{
    for (;;) {
        nst_interrupt_clear(NST_IRQ);
        if (RECEIVED != 0u) {
            RECEIVED = 0u; /* before the read, which may announce another */
            return (int)(INPUT & 0xFFu);
        }
        nst_wait();
    }
}

void nst_board_putc(uint8_t byte)
{
    SENT = 0u;
    OUTPUT = byte;
    while (SENT == 0u)
        ;
}
