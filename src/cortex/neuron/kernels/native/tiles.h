// The tiles of quantised matrices. native.py says how a matrix lies in memory.
//
// A tile has 16 rows and 32 columns. A step has four columns of all its rows: each row is one lane of 32 bits.
#pragma once

#include "operations.h"

enum { ROWS = 16, COLUMNS = 32, STEPS = 8, STEP_BYTES = 64, PARTS = STEP_BYTES / WIDTH, CODEBOOK = 0 };

typedef uint8_t Bytes __attribute__((vector_size(WIDTH)));

// What a table of 16 bytes has for each code.
INLINE Bytes looked_up(const uint8_t *table, Bytes codes) {
#if WIDTH == 16
    return (Bytes)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)codes);
#elif WIDTH == 64
    __m512i entries = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table));
    return (Bytes)_mm512_shuffle_epi8(entries, (__m512i)codes);
#else
    __m256i entries = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
    return (Bytes)_mm256_shuffle_epi8(entries, (__m256i)codes);
#endif
}

INLINE Bytes bytes_at(const uint8_t *from) {
    Bytes bytes;
    memcpy(&bytes, from, sizeof bytes);
    return bytes;
}

// Scales and minimums are float16, as in GGUF files, in units of UNIT: float16 has few digits for values below 2⁻¹⁴.
#define UNIT 0x1p-8f

INLINE Floats halves_at(const uint8_t *from) {
#if WIDTH == 16
    return (Floats)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from)));
#elif WIDTH == 64
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#else
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#endif
}

// Where a tile has which bits of its codes. `bits` is CODEBOOK for four bits that number the entries of a table.
INLINE int has_four(int bits) { return bits == CODEBOOK || bits == 4 || bits == 5 || bits == 6; }
INLINE int has_two(int bits) { return bits == 2 || bits == 3 || bits == 6; }
INLINE int has_one(int bits) { return bits == 3 || bits == 5; }
INLINE int twos_at(int bits) { return has_four(bits) ? 4 * STEP_BYTES : 0; }
INLINE int ones_at(int bits) { return twos_at(bits) + (has_two(bits) ? 2 * STEP_BYTES : 0); }
INLINE int codes_bytes(int bits) {
    return bits == 8 ? STEPS * STEP_BYTES : ones_at(bits) + (has_one(bits) ? STEP_BYTES : 0);
}

INLINE Bytes shifted(Bytes bytes, int left) { return left >= 0 ? bytes << left : bytes >> -left; }

// The codes of one part of a step.
INLINE Bytes codes_of(const uint8_t *tile, int bits, int step, int part, const uint8_t *table) {
    tile += part * WIDTH;
    if (bits == 8) return bytes_at(tile + step * STEP_BYTES) ^ FLIP;
    Bytes codes = {0};
    if (has_four(bits)) {
        Bytes pair = bytes_at(tile + step / 2 * STEP_BYTES);
        codes = step % 2 ? (pair >> 4) & 15 : pair & 15;
    }
    if (bits == CODEBOOK) return looked_up(table, codes) ^ FLIP;
    if (has_two(bits)) {
        int to = has_four(bits) ? 4 : 0;
        Bytes four = bytes_at(tile + twos_at(bits) + step / 4 * STEP_BYTES);
        codes |= shifted(four, to - 2 * (step % 4)) & (uint8_t)(3 << to);
    }
    if (has_one(bits)) {
        int to = has_four(bits) ? 4 : 2;
        codes |= shifted(bytes_at(tile + ones_at(bits)), to - step) & (uint8_t)(1 << to);
    }
    return codes;
}

// Groups of a tile: of 16 columns, or of all 32.
INLINE int groups_of(int bits) { return bits == 2 || bits == 3 || bits == 6 ? 2 : 1; }

// Matrices of two bits have short scales: of four bits, in units that two tiles share.
INLINE int64_t tile_bytes(int bits, int has_minimums) {
    if (bits == 2) return codes_bytes(2) + 4 * ROWS;
    return codes_bytes(bits) + groups_of(bits) * ROWS * 2 * (has_minimums ? 2 : 1);
}

// The tiles of 16 rows.
INLINE const uint8_t *block_at(const Matrix *m, int64_t block) {
    const int64_t tiles = m->tiles + (m->bits == 2 ? m->tiles % 2 : 0);
    return m->packed + block * tiles * tile_bytes(m->bits, m->has_minimums);
}

// The short scales of a part of a tile's rows in the low halves of bytes, and the minimums in the high ones.
INLINE Ints shorts_at(const uint8_t *tile, int group, int part) {
    const uint8_t *from = tile + codes_bytes(2) + group * ROWS + part * LANES;
#if WIDTH == 16
    return (Ints)vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vld1_dup_u32((const uint32_t *)from)))));
#elif WIDTH == 64
    return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
#else
    return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
#endif
}

// Their units. The first tile of two has those of the scales, the second those of the minimums.
INLINE Floats units_at(const uint8_t *tile, int64_t number, int part, int of_minimums) {
    const int64_t size = codes_bytes(2) + 4 * ROWS;
    return halves_at(tile + (of_minimums - number % 2) * size + codes_bytes(2) + 2 * ROWS + part * WIDTH / 2);
}

// Whether codes have more than seven bits. They are multiplied with FLIP less.
INLINE int is_wide(int bits) { return bits == 8 || bits == CODEBOOK; }

// The scales of a group, and its minimums where it has them.
INLINE void scales_of(const uint8_t *tile, int64_t number, int bits, int has_minimums, int group, int part, Floats *scale,
                      Floats *minimum) {
    if (bits == 2) {
        const Ints shorts = shorts_at(tile, group, part);
        *scale = __builtin_convertvector(shorts & 15, Floats) * units_at(tile, number, part, 0);
        *minimum = __builtin_convertvector(shorts >> 4, Floats) * -units_at(tile, number, part, 1);
        return;
    }
    const uint8_t *scales = tile + codes_bytes(bits) + group * ROWS * 2 + part * WIDTH / 2;
    *scale = halves_at(scales);
    if (!has_minimums) return;
    *minimum = halves_at(scales + groups_of(bits) * ROWS * 2);
    if (FLIP && is_wide(bits)) *minimum += *scale * (float)FLIP;
}
