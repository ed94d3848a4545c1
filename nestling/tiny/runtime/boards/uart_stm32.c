/* The USART of the STM32 F1, F2 and F4 families. */
#include "cortex.h"
#include "../board.h"

#define STATUS NST_REGISTER(NST_UART + 0x00u)
#define DATA NST_REGISTER(NST_UART + 0x04u)
#define CONTROL NST_REGISTER(NST_UART + 0x0Cu)

enum { FULL_IN = 1u << 5, EMPTY_OUT = 1u << 7, ENABLE = 1u << 13, SEND = 1u << 3, RECEIVE = 1u << 2, RECEIVE_INTERRUPT = 1u << 5 };

void nst_uart_start(void)
{
    CONTROL = ENABLE | SEND | RECEIVE | RECEIVE_INTERRUPT;
    nst_interrupt_on(NST_IRQ);
}

int nst_board_getc(void)
{
    for (;;) {
        nst_interrupt_clear(NST_IRQ);
        if ((STATUS & FULL_IN) != 0u)
            return (int)(DATA & 0xFFu);
        nst_wait();
    }
}

void nst_board_putc(uint8_t byte)
{
    while ((STATUS & EMPTY_OUT) == 0u)
        ;
    DATA = byte;
}
