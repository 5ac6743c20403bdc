// What the functions for CPUs share.
#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

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

// eˣ, exact to a few units in the last place. Without branches, so that compilers make vectors of it.
INLINE float exponential(float x) {
    x = x < -87 ? -87 : x > 88 ? 88 : x;
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
    return sum * scale;
}

// Numbers in the kind that `out` has.
INLINE void narrow(const float *from, int64_t count, void *out, int64_t first, int is_half) {
    if (!is_half) {
        memcpy((float *)out + first, from, count * sizeof(float));
        return;
    }
    for (int64_t i = 0; i < count; i++) ((uint16_t *)out)[first + i] = rounded(from[i]);
}

// The sum of products. Sixteen sums at a time: compilers may not change the order of a sum.
INLINE float dot_product(const float *a, const float *b, int64_t count) {
    float sums[16] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + 16 <= count; i += 16)
        for (int lane = 0; lane < 16; lane++) sums[lane] += a[i + lane] * b[i + lane];
    for (; i < count; i++) sum += a[i] * b[i];
    for (int lane = 0; lane < 16; lane++) sum += sums[lane];
    return sum;
}
