// What the functions for CPUs share.
#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#define WIDTH 16
#define FLIP 128  // codes of eight bits are signed here: 128 less
#elif defined(__AVX512VNNI__)
#include <immintrin.h>
#define WIDTH 64
#define FLIP 0
#elif defined(__AVX2__)
#include <immintrin.h>
#define WIDTH 32
#define FLIP 0
#else
#error "no products of bytes on this processor"
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float Floats __attribute__((vector_size(WIDTH)));

// Calls a function on a number of threads.
typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);

// Numbers of either kind as float32.
INLINE void widen(const void *from, int64_t first, int64_t count, int is_half, float *out) {
    if (!is_half) {
        memcpy(out, (const float *)from + first, count * sizeof(float));
        return;
    }
    const uint16_t *halves = (const uint16_t *)from + first;
    for (int64_t i = 0; i < count; i++) {
        uint32_t word = (uint32_t)halves[i] << 16;
        memcpy(out + i, &word, 4);
    }
}

INLINE uint16_t rounded(float number) {
    uint32_t word;
    memcpy(&word, &number, 4);
    if (number != number) return (uint16_t)(word >> 16 | 64);
    return (uint16_t)((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

// eˣ, exact to a few units in the last place. Without branches, so that compilers make vectors of it. Below e⁻⁸⁰ it is 0:
// processors take many times as long for numbers next to the smallest.
INLINE float exponential(float given) {
    float x = given < -80 ? -80 : given > 88 ? 88 : given;
    float whole = __builtin_rintf(x * 1.44269504f);
    float rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    float sum = 1.9875691e-4f;
    sum = sum * rest + 1.3981999e-3f;
    sum = sum * rest + 8.3334519e-3f;
    sum = sum * rest + 4.1665796e-2f;
    sum = sum * rest + 1.6666665e-1f;
    sum = sum * rest + 5.0000001e-1f;
    sum = sum * rest * rest + rest + 1;
    int32_t power = ((int32_t)whole + 127) << 23;
    float scale;
    memcpy(&scale, &power, 4);
    return given < -80 ? 0 : sum * scale;
}

// Numbers in the kind that `out` has.
INLINE void narrow(const float *from, int64_t count, void *out, int64_t first, int is_half) {
    if (!is_half) {
        memcpy((float *)out + first, from, count * sizeof(float));
        return;
    }
    for (int64_t i = 0; i < count; i++) ((uint16_t *)out)[first + i] = rounded(from[i]);
}

INLINE Floats floats_at(const float *from) {
    Floats floats;
    memcpy(&floats, from, sizeof floats);
    return floats;
}

// The sum of products. Several sums at a time, because compilers may not change the order of a sum.
INLINE float dot_product(const float *a, const float *b, int64_t count) {
    enum { LANES = WIDTH / 4, SUMS = 4 };
    Floats sums[SUMS] = {0};
    float sum = 0;
    int64_t i = 0;
    for (; i + SUMS * LANES <= count; i += SUMS * LANES)
        for (int part = 0; part < SUMS; part++)
            sums[part] += floats_at(a + i + part * LANES) * floats_at(b + i + part * LANES);
    for (; i < count; i++) sum += a[i] * b[i];
    Floats all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    for (int lane = 0; lane < LANES; lane++) sum += all[lane];
    return sum;
}
