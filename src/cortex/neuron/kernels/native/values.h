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
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define WIDTH 32
#define FLIP 0
#else
#error "no products of bytes on this processor"
#endif

// Bytes of a matrix that are being loaded while earlier ones are multiplied. ARM's own prefetching is as fast.
#define FETCHED_AHEAD (WIDTH == 16 ? 0 : 4096)

#define INLINE static inline __attribute__((always_inline))

typedef float Floats __attribute__((vector_size(WIDTH)));
typedef int32_t Ints __attribute__((vector_size(WIDTH)));
enum { LANES = WIDTH / 4 };

// Values of either kind as float32.
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
// processors take many times as long for values next to the smallest.
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

// The activations of gated feed-forward blocks, as activations.py numbers them. (1 + tanh(x)) / 2 is the sigmoid of 2 x.
enum { SILU = 1, GELU_TANH, CLAMPED_SWIGLU };

INLINE float activated(float gate, float up, int activation) {
    float x = gate;
    if (activation == GELU_TANH) x = 1.59576912f * (gate + 0.044715f * gate * gate * gate);
    if (activation == CLAMPED_SWIGLU) {
        gate = gate < 7 ? gate : 7;
        up = (up < -7 ? -7 : up < 7 ? up : 7) + 1;
        x = 1.702f * gate;
    }
    return gate / (1 + exponential(-x)) * up;
}

// Values in the kind that `out` has.
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

INLINE void put_floats(float *to, Floats floats) { memcpy(to, &floats, sizeof floats); }

// One number, or a vector of them, of either kind as float32.
INLINE float number_at(const void *from, int64_t at, int is_half) {
    float number;
    widen(from, at, 1, is_half, &number);
    return number;
}

INLINE Floats widened_at(const void *from, int64_t first, int is_half) {
    if (!is_half) return floats_at((const float *)from + first);
    const uint16_t *halves = (const uint16_t *)from + first;
#if WIDTH == 16
    return (Floats)vshll_n_u16(vld1_u16(halves), 16);
#elif WIDTH == 64
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)halves)), 16);
#else
    return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)halves)), 16);
#endif
}

// sums + a · b, rounded once: the same in every function, as compilers do not make it by themselves here.
INLINE Floats added(Floats sums, Floats a, Floats b) {
#if WIDTH == 16
    return (Floats)vfmaq_f32((float32x4_t)sums, (float32x4_t)a, (float32x4_t)b);
#elif WIDTH == 64
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sums);
#else
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sums);
#endif
}

INLINE Floats repeated(float number) {
#if WIDTH == 16
    return (Floats)vdupq_n_f32(number);
#elif WIDTH == 64
    return (Floats)_mm512_set1_ps(number);
#else
    return (Floats)_mm256_set1_ps(number);
#endif
}

INLINE float sum_of_lanes(Floats floats) {
#if WIDTH == 16
    return vaddvq_f32((float32x4_t)floats);
#elif WIDTH == 64
    return _mm512_reduce_add_ps((__m512)floats);
#else
    __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)floats), _mm256_extractf128_ps((__m256)floats, 1));
    four = _mm_hadd_ps(four, four);
    return _mm_cvtss_f32(_mm_hadd_ps(four, four));
#endif
}

// The sums of four vectors.
INLINE void sums_of_lanes(const Floats *floats, float *out) {
#if WIDTH == 16
    const float32x4_t some = vpaddq_f32((float32x4_t)floats[0], (float32x4_t)floats[1]);
    vst1q_f32(out, vpaddq_f32(some, vpaddq_f32((float32x4_t)floats[2], (float32x4_t)floats[3])));
#else
#if WIDTH == 64
    __m256 halves[4];
    for (int i = 0; i < 4; i++)
        halves[i] = _mm256_add_ps(_mm512_castps512_ps256((__m512)floats[i]), _mm512_extractf32x8_ps((__m512)floats[i], 1));
#else
    const __m256 *halves = (const __m256 *)floats;
#endif
    const __m256 some = _mm256_hadd_ps(halves[0], halves[1]), others = _mm256_hadd_ps(halves[2], halves[3]);
    const __m256 both = _mm256_hadd_ps(some, others);
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1)));
#endif
}

INLINE Floats larger(Floats a, Floats b) {
    const Ints is_larger = a > b;
    return (Floats)(((Ints)a & is_larger) | ((Ints)b & ~is_larger));
}

INLINE float largest_of_lanes(Floats floats) {
#if WIDTH == 16
    return vmaxvq_f32((float32x4_t)floats);
#elif WIDTH == 64
    return _mm512_reduce_max_ps((__m512)floats);
#else
    __m128 four = _mm_max_ps(_mm256_castps256_ps128((__m256)floats), _mm256_extractf128_ps((__m256)floats, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
#endif
}

// The sum of products. Several sums at a time, because compilers may not change the order of a sum.
INLINE float dot_product(const float *a, const float *b, int64_t count) {
    enum { SUMS = 4 };
    Floats sums[SUMS] = {0};
    float sum = 0;
    int64_t i = 0;
    for (; i + SUMS * LANES <= count; i += SUMS * LANES)
        for (int part = 0; part < SUMS; part++)
            sums[part] += floats_at(a + i + part * LANES) * floats_at(b + i + part * LANES);
    for (; i < count; i++) sum += a[i] * b[i];
    return sum + sum_of_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
}
