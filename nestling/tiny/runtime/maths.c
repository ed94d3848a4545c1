/* exp, log, sqrt and CRC-32 from binary32 and integer operations alone, so that every machine gives the same bits. */
#include "nestling.h"

typedef union {
    float f;
    uint32_t u;
} either;

static uint32_t bits_of(float x) {
    either e;
    e.f = x;
    return e.u;
}

static float float_of(uint32_t u) {
    either e;
    e.u = u;
    return e.f;
}

#define INFINITE 0x7F800000u
#define NOT_A_NUMBER 0x7FC00000u
#define LN2_HIGH 0.693145751953125f /* so few bits that its product with an exponent is exact */
#define LN2_LOW 1.42860682e-6f

bool nst_finite(float x) { return (bits_of(x) & INFINITE) != INFINITE; }

/* exp(x) = 2^n exp(r) with |r| <= ln(2)/2. Results below the normal numbers are 0. */
float nst_exp(float x) {
    if (x != x) return float_of(NOT_A_NUMBER);
    if (x > 88.72283f) return float_of(INFINITE);
    if (x < -87.33654f) return 0.0f;
    float scaled = x * 1.44269504f;
    int32_t n = (int32_t)(scaled < 0.0f ? scaled - 0.5f : scaled + 0.5f);
    float r = (x - (float)n * LN2_HIGH) - (float)n * LN2_LOW;
    float p = 1.39337336e-3f; /* fitted to (exp(r) - 1 - r) / r^2 */
    p = p * r + 8.36323574e-3f;
    p = p * r + 4.1666463e-2f;
    p = p * r + 0.166665763f;
    p = p * r + 0.5f;
    p = (p * r * r + r) + 1.0f;
    /* n may be 128, which is no exponent: two factors. */
    int32_t half = n / 2;
    return p * float_of((uint32_t)(half + 127) << 23) * float_of((uint32_t)(n - half + 127) << 23);
}

/* log(m 2^n) = n ln(2) + 2 artanh((m - 1) / (m + 1)), m around 1. */
float nst_log(float x) {
    if (x != x || x < 0.0f) return float_of(NOT_A_NUMBER);
    if (x == 0.0f) return float_of(INFINITE | 0x80000000u);
    uint32_t u = bits_of(x);
    if (u == INFINITE) return x;
    int32_t n = 0;
    if (u < 0x00800000u) {
        u = bits_of(x * 33554432.0f);
        n = -25;
    }
    n += (int32_t)(u >> 23) - 127;
    float m = float_of((u & 0x007FFFFFu) | 0x3F800000u);
    if (m > 1.41421356f) {
        m = m * 0.5f;
        n += 1;
    }
    float s = (m - 1.0f) / (m + 1.0f);
    float z = s * s;
    float p = 0.233345315f; /* fitted to (2 artanh(s) - 2 s) / s^3 */
    p = p * z + 0.285506517f;
    p = p * z + 0.400001228f;
    p = p * z + 0.666666687f;
    p = p * z * s + 2.0f * s;
    return (float)n * LN2_HIGH + (p + (float)n * LN2_LOW);
}

/* One bit of the root at a time, rounded to nearest as IEEE 754 asks. */
float nst_sqrt(float x) {
    if (x != x || x < 0.0f) return float_of(NOT_A_NUMBER);
    uint32_t u = bits_of(x);
    if (x == 0.0f || u == INFINITE) return x;
    int32_t shift = 0;
    if (u < 0x00800000u) {
        u = bits_of(x * 16777216.0f);
        shift = -12;
    }
    int32_t exponent = (int32_t)(u >> 23) - 127;
    uint64_t rest = (u & 0x007FFFFFu) | 0x00800000u;
    if (exponent & 1) {
        rest <<= 1;
        exponent -= 1;
    }
    rest <<= 25; /* between 2^48 and 2^50: its root has one bit more than a float keeps */
    uint64_t root = 0;
    for (uint64_t bit = (uint64_t)1 << 48; bit != 0; bit >>= 2) {
        if (rest >= root + bit) {
            rest -= root + bit;
            root = (root >> 1) + bit;
        } else {
            root >>= 1;
        }
    }
    /* There are no ties: an odd root leaves a remainder. */
    uint32_t mantissa = ((uint32_t)root + 1u) >> 1;
    return float_of(((uint32_t)(exponent / 2 + shift + 127) << 23) + (mantissa - 0x00800000u));
}

uint32_t nst_crc32(uint32_t crc, const void *data, uint32_t bytes) {
    static const uint32_t nibble[16] = {
        0x00000000u, 0x1DB71064u, 0x3B6E20C8u, 0x26D930ACu, 0x76DC4190u, 0x6B6B51F4u, 0x4DB26158u, 0x5005713Cu,
        0xEDB88320u, 0xF00F9344u, 0xD6D6A3E8u, 0xCB61B38Cu, 0x9B64C2B0u, 0x86D3D2D4u, 0xA00AE278u, 0xBDBDF21Cu};
    const uint8_t *at = (const uint8_t *)data;
    crc = ~crc;
    for (uint32_t k = 0; k < bytes; k++) {
        crc ^= at[k];
        crc = (crc >> 4) ^ nibble[crc & 15u];
        crc = (crc >> 4) ^ nibble[crc & 15u];
    }
    return ~crc;
}

/* The barrier keeps compilers from turning these loops into calls of memcpy and memset, which may be these very functions. */
#define BARRIER() __asm__ volatile("" ::: "memory")

void nst_copy(void *to, const void *from, uint32_t bytes) {
    uint8_t *t = (uint8_t *)to;
    const uint8_t *f = (const uint8_t *)from;
    if ((((uintptr_t)t | (uintptr_t)f) & 3u) == 0) {
        for (; bytes >= 4; bytes -= 4, t += 4, f += 4) {
            *(uint32_t *)(void *)t = *(const uint32_t *)(const void *)f;
            BARRIER();
        }
    }
    for (; bytes != 0; bytes--) {
        *t++ = *f++;
        BARRIER();
    }
}

static void fill(void *to, uint8_t value, uint32_t bytes) {
    uint8_t *t = (uint8_t *)to;
    uint32_t word = value * 0x01010101u;
    for (; bytes != 0 && ((uintptr_t)t & 3u) != 0; bytes--) {
        *t++ = value;
        BARRIER();
    }
    for (; bytes >= 4; bytes -= 4, t += 4) {
        *(uint32_t *)(void *)t = word;
        BARRIER();
    }
    for (; bytes != 0; bytes--) {
        *t++ = value;
        BARRIER();
    }
}

void nst_zero(void *to, uint32_t bytes) { fill(to, 0, bytes); }

#if !__STDC_HOSTED__
/* Compilers call these even in freestanding code. Weak: a board may bring better ones. */
__attribute__((weak)) void *memcpy(void *restrict to, const void *restrict from, size_t bytes) {
    nst_copy(to, from, (uint32_t)bytes);
    return to;
}

__attribute__((weak)) void *memset(void *to, int value, size_t bytes) {
    fill(to, (uint8_t)value, (uint32_t)bytes);
    return to;
}
#endif
