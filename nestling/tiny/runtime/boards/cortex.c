/* Interrupts, the clock and the memory map of a Cortex-M board. */
#include "cortex.h"
#include "../board.h"

#define SYSTICK 0xE000E010u
#define NVIC_ENABLE 0xE000E100u
#define NVIC_CLEAR 0xE000E280u
#define TICK_BITS 0x00FFFFFFu

extern uint8_t nst_region[], nst_region_end[];
extern const uint8_t nst_blob[], nst_flash_end[];

void nst_interrupt_on(uint32_t number)
{
    NST_REGISTER(NVIC_ENABLE + 4u * (number / 32u)) = 1u << (number % 32u);
}

void nst_interrupt_clear(uint32_t number)
{
    NST_REGISTER(NVIC_CLEAR + 4u * (number / 32u)) = 1u << (number % 32u);
}

/* The clock stands still meanwhile: nothing is being timed, and one that runs would wake what can sleep. */
void nst_wait(void)
{
    NST_REGISTER(SYSTICK) = 0u;
    __asm__ volatile("dsb\n\twfi" ::: "memory");
}

/* SysTick counts 24 bits down; the upper bits are counted here, which is why it must be read in time. A clock that has stood still
   begins at the next multiple of 2^24. */
uint32_t nst_board_ticks(void)
{
    static uint32_t ticks;
    if ((NST_REGISTER(SYSTICK) & 1u) == 0u) {
        ticks = (ticks + TICK_BITS) & ~TICK_BITS;
        NST_REGISTER(SYSTICK + 4u) = TICK_BITS;
        NST_REGISTER(SYSTICK + 8u) = 0u;
        NST_REGISTER(SYSTICK) = 5u; /* the core's clock, no interrupt */
    }
    uint32_t now = TICK_BITS - (NST_REGISTER(SYSTICK + 8u) & TICK_BITS);
    ticks += (now - ticks) & TICK_BITS;
    return ticks;
}

const void *nst_board_data(uint32_t *bytes)
{
    *bytes = (uint32_t)((uintptr_t)nst_flash_end - (uintptr_t)nst_blob);
    return nst_blob;
}

void *nst_board_region(uint32_t *bytes)
{
    *bytes = (uint32_t)((uintptr_t)nst_region_end - (uintptr_t)nst_region);
    return nst_region;
}
