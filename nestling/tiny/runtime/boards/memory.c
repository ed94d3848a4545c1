/* The three functions that a compiler may call of its own accord. The empty statements keep it from finding a copy loop in a copy loop
   and calling the function from inside itself. */
#include <stddef.h>
#include <stdint.h>

typedef uint32_t __attribute__((may_alias)) word;

#define KEEP_THE_LOOP() __asm__ volatile("" ::: "memory")

void *memcpy(void *to, const void *from, size_t bytes);
void *memmove(void *to, const void *from, size_t bytes);
void *memset(void *to, int value, size_t bytes);

static void forwards(uint8_t *to, const uint8_t *from, size_t bytes)
{
    if ((((uintptr_t)to | (uintptr_t)from) & 3u) == 0u)
        for (; bytes >= 4u; bytes -= 4u, to += 4, from += 4) {
            *(word *)(void *)to = *(const word *)(const void *)from;
            KEEP_THE_LOOP();
        }
    for (; bytes > 0u; bytes--) {
        *to++ = *from++;
        KEEP_THE_LOOP();
    }
}

void *memcpy(void *to, const void *from, size_t bytes)
{
    forwards(to, from, bytes);
    return to;
}

void *memmove(void *to, const void *from, size_t bytes)
{
    uint8_t *target = to;
    const uint8_t *source = from;
    if ((uintptr_t)to - (uintptr_t)from >= bytes) {
        forwards(target, source, bytes);
        return to;
    }
    while (bytes-- > 0u) {
        target[bytes] = source[bytes];
        KEEP_THE_LOOP();
    }
    return to;
}

void *memset(void *to, int value, size_t bytes)
{
    uint8_t *target = to;
    uint32_t four = 0x01010101u * (uint8_t)value;
    for (; bytes > 0u && ((uintptr_t)target & 3u) != 0u; bytes--)
        *target++ = (uint8_t)value;
    for (; bytes >= 4u; bytes -= 4u, target += 4) {
        *(word *)(void *)target = four;
        KEEP_THE_LOOP();
    }
    for (; bytes > 0u; bytes--) {
        *target++ = (uint8_t)value;
        KEEP_THE_LOOP();
    }
    return to;
}
