/* From reset to the node: the vector table, the first state of RAM, the FPU. */
#include "cortex.h"
#include "../board.h"
#include "../node.h"

#define PAINT 0x5AFEC0DEu /* what unused stack holds */
#define CPACR 0xE000ED88u
#define AIRCR 0xE000ED0Cu

extern uint32_t nst_stack_bottom[], nst_stack_top[];
extern uint32_t nst_data_start[], nst_data_end[], nst_bss_start[], nst_bss_end[];
extern const uint32_t nst_data_image[];

void nst_reset(void);
static void fault(void);

typedef void (*nst_vector)(void);
__attribute__((section(".vectors"), used)) static const nst_vector vectors[16] = {
    (nst_vector)(void *)nst_stack_top, nst_reset, fault, fault, fault, fault, fault, 0, 0, 0, 0, fault, fault, 0, fault, fault};

static nst_node node;

/* Nothing is left to be saved: the board starts afresh and the gateway goes on from its last note. */
static void fault(void)
{
    NST_REGISTER(AIRCR) = 0x05FA0004u;
    for (;;)
        ;
}

static void prepare_memory(void)
{
    /* The words right below the stack pointer are this function's own. */
    uint32_t *limit = (uint32_t *)__builtin_frame_address(0) - 32;
    for (volatile uint32_t *p = nst_stack_bottom; p < limit; p++)
        *p = PAINT;
    const uint32_t *from = nst_data_image;
    for (volatile uint32_t *p = nst_data_start; p < nst_data_end; p++)
        *p = *from++;
    for (volatile uint32_t *p = nst_bss_start; p < nst_bss_end; p++)
        *p = 0;
}

static void start_fpu(void)
{
#ifdef __ARM_FP
    NST_REGISTER(CPACR) |= 0xFu << 20;
    __asm__ volatile("dsb\n\tisb" ::: "memory");
#endif
}

void nst_reset(void)
{
    __asm__ volatile("cpsid i" ::: "memory");
    start_fpu();
    prepare_memory();
    nst_uart_start();
    nst_node_run(&node);
    fault();
}

uint32_t nst_board_stack(uint32_t *reserved)
{
    const uint32_t *p = nst_stack_bottom;
    while (p < nst_stack_top && *p == PAINT)
        p++;
    *reserved = (uint32_t)((uintptr_t)nst_stack_top - (uintptr_t)nst_stack_bottom);
    return (uint32_t)((uintptr_t)nst_stack_top - (uintptr_t)p);
}
