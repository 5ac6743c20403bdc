// The experts of a mixture that lie in host memory, in the layouts of a GPU (quantised/layout.py, float8/layout.py) or dense.
//
// A chunk of a packed row is 128 columns in sixteen units of eight. Each unit is one lane of 32 bits: inputs are arranged as the
// codes lie, so that codes are multiplied as they are loaded. The four groups of 32 columns of a chunk are the lanes modulo 4.
// Threads are our own. A device hands its rows to one of them by flags in memory that both see, or has the CUDA driver call
// `host_experts`.

#define _GNU_SOURCE
#include "operations.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { CHUNK = 128, UNITS = 16, VECTOR = 64, PARTS = VECTOR / WIDTH, MOST_ROWS = 4, BLOCK = 16, LARGEST = 127 * 256 };
enum { PACKED, BFLOAT16, FLOAT32, FLOAT8 };
enum { OWN_ZERO = -2 };
enum { POOL_SPINS = 20000 };  // some hundred microseconds to a millisecond: a decode step has pauses of that length
enum { SHORT_PAUSE_NS = 20000, SHORT_PAUSES = 5000, LONG_PAUSE_NS = 10000000 };  // between looks at a device that gives no rows

typedef uint8_t Bytes __attribute__((vector_size(WIDTH)));
typedef uint16_t Shorts __attribute__((vector_size(WIDTH / 2)));
typedef uint8_t Quarters __attribute__((vector_size(WIDTH / 4)));
typedef uint32_t Words __attribute__((vector_size(WIDTH)));

// A matrix of equally many rows of each place, one place below the other. `zero` < 0: groups have minimums, or if
// it is OWN_ZERO, zeros.
typedef struct {
    const uint8_t *low, *high, *scales, *table;
    int64_t rows, columns;
    int32_t form, low_bits, high_bits, group, zero, block;
} Store;

typedef struct Pool Pool;

// The experts of one layer. `place_of`: by expert, below 0: on the device. Biases are by expert. `counts`: how often each
// expert was chosen.
typedef struct {
    Store gate_up, down;
    const void *gate_up_bias, *down_bias;
    const int32_t *place_of;
    int64_t *counts;
    int64_t width, inner, experts, slots;
    int32_t is_half, activation, is_gated, is_counted;
} Layer;

// out = the sum of weight · expert(x) over the experts of each row that have a place. `room`: see `experts_room`.
typedef struct {
    Layer *layer;
    Pool *pool;
    const void *x;
    const int32_t *chosen;
    const float *weights;
    void *out;
    uint8_t *room;
    int64_t rows;
} Call;

typedef struct {
    int64_t row, number;  // of the token, and of the pair in order of experts
    int32_t place, expert;
    float weight;
} Pair;

typedef struct {
    int64_t first, count;
    int32_t place, expert;
} Used;

typedef struct {
    const Call *call;
    Pair *pairs;
    Used *used;
    int64_t num_pairs, num_used;
    float *inner;      // [pairs, inner]
    uint8_t *x, *mid;  // arranged inputs of rows, and of pairs
} Work;

// How a device hands over the rows of a call, and how it gets them back. Turns count up, from one.
typedef struct {
    uint64_t call;                // where it is
    _Alignas(64) uint32_t given;  // the turn, once call and rows are written
    _Alignas(64) uint32_t done;   // the turn, once the results are
} Signals;

struct Pool {
    Team team;
    Work work;
    Signals *signals;
    int64_t threads;
    _Alignas(64) uint32_t generation;  // it wraps after some days
    int32_t sleepers, stops;
    _Alignas(64) uint32_t stirs;  // steps that began: the listener looks out for their rows
    pthread_t listener, *workers;
    Member *members;
};

INLINE int64_t chunks_of(const Store *s) { return (s->columns + CHUNK - 1) / CHUNK; }
INLINE int halves_of(const Store *s) { return s->group == 16 ? 2 : 1; }

// Whether a vector has inputs of both halves, which then needs a copy for each, zeros in the place of the other's.
INLINE int is_mixed(int low_bits, int halves) { return halves == 2 && low_bits != 2; }

// Arranged inputs of a chunk: shifts of 2 halves, the scale, then bytes [copy, plane, vector, 64].
enum { HEAD_FLOATS = 2 * UNITS + UNITS };
INLINE int64_t chunk_bytes(const Store *s) {
    return HEAD_FLOATS * 4 + (1 + is_mixed(s->low_bits, halves_of(s))) * 4 * VECTOR;
}
INLINE int64_t input_bytes(const Store *s) {
    return s->form == PACKED ? chunks_of(s) * chunk_bytes(s) : (chunks_of(s) * CHUNK) * 4;
}

typedef uint32_t Four __attribute__((vector_size(16)));
typedef uint16_t FourShorts __attribute__((vector_size(8)));
#ifdef __clang__
#define PICKED(A, B, ...) __builtin_shufflevector(A, B, __VA_ARGS__)
#else
#define PICKED(A, B, ...) __builtin_shuffle(A, B, (Four){__VA_ARGS__})
#endif

INLINE Four four_shorts(const void *from) {
    FourShorts shorts;
    memcpy(&shorts, from, sizeof shorts);
    return __builtin_convertvector(shorts, Four);
}

// The bytes of a plane in the order of codes: column 32 g + 16 a + 8 b + 2 c + d is in unit 4 c + g. There it is byte 2 d + a of
// vector b, or if codes are spread, byte 2 b + d of vector a. Those of other halves `a` than `half` are 0, unless it is below 0.
INLINE void put_plane(const int8_t *columns, int is_spread, int half, int8_t *to) {
    for (int vector = 0; vector < 2; vector++) {
        Four rows[4];
        for (int group = 0; group < 4; group++) {
            const int8_t *from = columns + 32 * group + (is_spread ? 16 : 8) * vector;
            const Four first = four_shorts(from), second = four_shorts(from + (is_spread ? 8 : 16));
            const Four ones = is_spread ? first : (first | first << 8) & 0x00ff00ffu;
            const Four others = is_spread ? second << 16 : ((second | second << 8) & 0x00ff00ffu) << 8;
            rows[group] = (half < 0 || half == (is_spread ? vector : 0) ? ones : (Four){0}) |
                          (half < 0 || half == (is_spread ? vector : 1) ? others : (Four){0});
        }
        const Four a = PICKED(rows[0], rows[1], 0, 4, 1, 5), b = PICKED(rows[2], rows[3], 0, 4, 1, 5);
        const Four c = PICKED(rows[0], rows[1], 2, 6, 3, 7), d = PICKED(rows[2], rows[3], 2, 6, 3, 7);
        const Four units[4] = {PICKED(a, b, 0, 1, 4, 5), PICKED(a, b, 2, 3, 6, 7), PICKED(c, d, 0, 1, 4, 5), PICKED(c, d, 2, 3, 6, 7)};
        memcpy(to + vector * VECTOR, units, VECTOR);
    }
}

// values: 128 columns, 0 after the last
static void arrange(const Store *s, const float *values, uint8_t *out) {
    float *shifts = (float *)out, *scales = shifts + 2 * UNITS;
    Floats most = {0}, doubts = {0};  // NaN, if one is not finite
    for (int i = 0; i < CHUNK; i += LANES) {
        const Floats some = floats_at(values + i);
        most = larger((Floats)((Ints)some & 0x7fffffff), most);
        doubts += some * 0;
    }
    const float largest = largest_of_lanes(most);
    const float factor = largest > 1e-30f ? LARGEST / largest : 0, scale = largest / LARGEST + sum_of_lanes(doubts);
    int32_t numbers[CHUNK];
    int8_t high[CHUNK], low[CHUNK];
    for (int i = 0; i < CHUNK; i++) numbers[i] = (int32_t)__builtin_rintf(values[i] * factor);
    for (int i = 0; i < CHUNK; i++) {
        const int32_t above = (numbers[i] + 128) >> 8;
        high[i] = (int8_t)above;
        low[i] = (int8_t)(numbers[i] - (above << 8));
    }
    float sums[8];
    for (int i = 0; i < 8; i++) {
        uint32_t sum = 0;
        for (int k = 0; k < 16; k++) sum += (uint32_t)numbers[16 * i + k];
        sums[i] = (float)(int32_t)sum;
    }
    const float of_sum = s->zero < 0 ? scale : -scale * (float)s->zero;
    const int halves = halves_of(s);
    memset(shifts, 0, 2 * UNITS * sizeof(float));
    for (int group = 0; group < 4; group++)
        for (int half = 0; half < 2; half++)
            shifts[half * UNITS + group] = (halves == 2 ? sums[2 * group + half] : sums[2 * group] + sums[2 * group + 1]) * of_sum;
    for (int unit = 0; unit < UNITS; unit++) scales[unit] = scale;
    int8_t *bytes = (int8_t *)(out + HEAD_FLOATS * 4);
    const int mixed = is_mixed(s->low_bits, halves), is_spread = s->low_bits == 2 || s->table;
    for (int half = 0; half <= mixed; half++) {
        int8_t *to = bytes + half * 4 * VECTOR;
        if (is_spread) {
            put_plane(high, 1, -1, to);
            put_plane(low, 1, -1, to + 2 * VECTOR);
        } else {
            put_plane(high, 0, mixed ? half : -1, to);
            put_plane(low, 0, mixed ? half : -1, to + 2 * VECTOR);
        }
    }
}

INLINE Bytes load(const void *from) {
    Bytes bytes;
    memcpy(&bytes, from, sizeof bytes);
    return bytes;
}

// Adds the products of four codes and four inputs to each lane. `wide`: codes may have more than seven bits.
INLINE Ints dot_lanes(Ints sums, Bytes codes, const int8_t *inputs, int wide) {
    (void)wide;
#if WIDTH == 64
    return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, (__m512i)load(inputs));
#elif WIDTH == 16
    const int8x16_t x = (int8x16_t)load(inputs);
    if (!wide) return vdotq_s32(sums, (int8x16_t)codes, x);
    sums = vdotq_s32(sums, (int8x16_t)(codes & 15), x);
    return sums + (vdotq_s32((Ints){0}, (int8x16_t)(codes >> 4), x) << 4);
#else
    const __m256i x = (__m256i)load(inputs), one = _mm256_set1_epi16(1);
    if (!wide) return sums + (Ints)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)codes, x), one);
    sums += (Ints)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)(codes & 15), x), one);
    return sums + (Ints)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)((codes >> 4) & 15), x), _mm256_set1_epi16(16));
#endif
}

INLINE Bytes book_entries(const uint8_t *table, Bytes codes) {
#if WIDTH == 16
    return (Bytes)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)codes);
#elif WIDTH == 64
    return (Bytes)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table)), (__m512i)codes);
#else
    return (Bytes)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table)), (__m256i)codes);
#endif
}

// Four float32 numbers, by their bits, again and again in all lanes.
INLINE Floats repeated_four(Four bits) {
#if WIDTH == 16
    return (Floats)bits;
#elif WIDTH == 64
    return (Floats)_mm512_broadcast_f32x4((__m128)bits);
#else
    return (Floats)_mm256_insertf128_ps(_mm256_castps128_ps256((__m128)bits), (__m128)bits, 1);
#endif
}

// The scales of a chunk's four groups, or of the halves of all groups, and their minimums.
INLINE void scales_of_chunk(const uint8_t *from, int group, int has_minimums, int is_book, int has_zeros, Floats *scale,
                            Floats *minimum) {
    Four words, others;
    if (is_book) {
        scale[0] = repeated_four(four_shorts(from) << 16);
        return;
    }
    memcpy(&words, from, sizeof words);
    if (has_zeros) {
        typedef int32_t FourInts __attribute__((vector_size(16)));
        typedef float FourFloats __attribute__((vector_size(16)));
        const FourFloats kept = (FourFloats)(words & 0xffffff00u);
        scale[0] = repeated_four((Four)kept);
        minimum[0] = repeated_four((Four)(-__builtin_convertvector((FourInts)(words & 255), FourFloats) * kept));
        return;
    }
    if (group == 16 && has_minimums) {  // of both halves of a group, one after the other
        memcpy(&others, from + sizeof words, sizeof others);
        const Four first = PICKED(words, others, 0, 2, 4, 6), second = PICKED(words, others, 1, 3, 5, 7);
        scale[0] = repeated_four(first << 16);
        scale[1] = repeated_four(second << 16);
        minimum[0] = repeated_four(first & 0xffff0000u);
        minimum[1] = repeated_four(second & 0xffff0000u);
        return;
    }
    scale[0] = repeated_four(words << 16);
    (has_minimums ? minimum : scale + 1)[0] = repeated_four(words & 0xffff0000u);
}

// GCC converts vectors to a wider type in several steps, or one number after the other.
INLINE Words widened_shorts(const uint8_t *from) {
#if WIDTH == 64
    return (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
#elif WIDTH == 32
    return (Words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
#else
    Shorts shorts;
    memcpy(&shorts, from, sizeof shorts);
    return __builtin_convertvector(shorts, Words);
#endif
}

INLINE Shorts widened_bytes(const uint8_t *from) {
#if WIDTH == 64
    return (Shorts)_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)from));
#elif WIDTH == 32
    return (Shorts)_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)from));
#else
    Quarters bytes;
    memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(bytes, Shorts);
#endif
}

// The codes of one vector of a low plane. `part`: which lanes.
INLINE Bytes low_codes(const uint8_t *plane, int bits, int vector, int part) {
    if (bits == 4) {
        const Bytes bytes = load(plane + part * WIDTH);
        return (vector ? bytes >> 4 : bytes) & 15;
    }
    const Words words = widened_shorts(plane + part * WIDTH / 2);
    const Words spread = words | ((words << 14) & 0xffff0000u);
    return (Bytes)(vector ? spread >> 4 : spread) & 3;
}

// What a high plane adds to the codes of a vector, in the order of the low plane: slot i is in bits i or 2 i of a unit.
INLINE Bytes high_codes(const uint8_t *plane, int bits, int low_bits, int vector, int part) {
    if (bits == 2) {
        Words words = widened_shorts(plane + part * WIDTH / 2);
        words = (words | words << 8) & 0x00ff00ffu;
        words = (words | words << 4) & 0x0f0f0f0fu;
        return (Bytes)(words << (vector ? 2 : 4)) & 0x30;
    }
    const Shorts shorts = widened_bytes(plane + part * WIDTH / 4);
    const Words words = widened_shorts((const uint8_t *)&shorts) * 0x01010101u;
    const uint32_t masks[2][2] = {{0x20021001u, 0x80084004u}, {0x40100401u, 0x80200802u}};
    return (Bytes)((Bytes)(words & masks[low_bits == 4][vector]) != 0) & (uint8_t)(1 << low_bits);
}

// One packed row times `count` inputs. The row that comes `ahead` rows later is fetched meanwhile. The last six are constants
// wherever it is called.
INLINE void packed_row(const Store *s, int64_t row, int64_t ahead, const uint8_t *const *inputs, float *sums, int count,
                       int low_bits, int high_bits, int group, int has_minimums, int is_book) {
    const int64_t chunks = chunks_of(s);
    const int halves = group == 16 ? 2 : 1, scale_words = group == 16 && has_minimums ? 2 : 1;
    const int64_t low_bytes = low_bits == 8 ? 64 : 16 * low_bits, high_bytes = low_bits == 8 ? 64 : 16 * high_bits;
    const int64_t scale_bytes = 4 * scale_words * (is_book ? 2 : 4);
    const int64_t size = chunk_bytes(s);
    const uint8_t *low = s->low + row * chunks * low_bytes, *high = s->high + row * chunks * high_bytes;
    const uint8_t *scales = s->scales + row * chunks * scale_bytes;
    const int wide = low_bits == 8 || is_book;
    Floats totals[MOST_ROWS][PARTS] = {0};
    for (int64_t c = 0; c < chunks; c++, low += low_bytes, high += high_bytes, scales += scale_bytes) {
        __builtin_prefetch(low + ahead * chunks * low_bytes);
        __builtin_prefetch(scales + ahead * chunks * scale_bytes);
        if (high_bytes) __builtin_prefetch(high + ahead * chunks * high_bytes);
        Floats scale[2], minimum[2];
        scales_of_chunk(scales, group, has_minimums, is_book, s->zero == OWN_ZERO, scale, minimum);
        Bytes codes[2][PARTS];
#pragma GCC unroll 2
        for (int vector = 0; vector < 2; vector++)
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; part++) {
                if (low_bits == 8)
                    codes[vector][part] = load((vector ? high : low) + part * WIDTH);
                else
                    codes[vector][part] = low_codes(low, low_bits, vector, part);
                if (is_book) codes[vector][part] = book_entries(s->table, codes[vector][part]);
                if (high_bits) codes[vector][part] |= high_codes(high, high_bits, low_bits, vector, part);
            }
#pragma GCC unroll 4
        for (int i = 0; i < count; i++) {
            const uint8_t *input = inputs[i] + c * size;
            const float *shifts = (const float *)input, *factors = shifts + 2 * UNITS;
            const int8_t *bytes = (const int8_t *)(input + HEAD_FLOATS * 4);
#pragma GCC unroll 2
            for (int half = 0; half < halves; half++)
#pragma GCC unroll 4
                for (int part = 0; part < PARTS; part++) {
                    Ints above = {0}, below = {0};
#pragma GCC unroll 2
                    for (int vector = 0; vector < 2; vector++) {
                        if (halves == 2 && !is_mixed(low_bits, halves) && vector != half) continue;
                        const int8_t *from = bytes + (is_mixed(low_bits, halves) * half * 4 + vector) * VECTOR + part * WIDTH;
                        above = dot_lanes(above, codes[vector][part], from, wide);
                        below = dot_lanes(below, codes[vector][part], from + 2 * VECTOR, wide);
                    }
                    const Floats whole = __builtin_convertvector((above << 8) + below, Floats);
                    const Floats shift = floats_at(shifts + half * UNITS + part * LANES);
                    const Floats factor = floats_at(factors + part * LANES), by = scale[half];
                    if (has_minimums) {
                        totals[i][part] = added(totals[i][part], by, whole * factor);
                        totals[i][part] = added(totals[i][part], minimum[half], shift);
                    } else {
                        totals[i][part] = added(totals[i][part], by, added(shift, whole, factor));
                    }
                }
        }
    }
    for (int i = 0; i < count; i++) {
        Floats total = totals[i][0];
        for (int part = 1; part < PARTS; part++) total += totals[i][part];
        sums[i] = sum_of_lanes(total);
    }
}

// Eight-bit floating-point numbers, 2⁻⁸ of their value: in half precision their exponent has one bit more.
INLINE Floats float8_at(const uint8_t *from) {
    const Shorts wide = widened_bytes(from);
    const Shorts halves = (wide & 0x7f) << 7 | (wide & 0x80) << 8;
#if WIDTH == 16
    return (Floats)vcvt_f32_f16(vreinterpret_f16_u16((uint16x4_t)halves));
#elif WIDTH == 64
    return (Floats)_mm512_cvtph_ps((__m256i)halves);
#else
    return (Floats)_mm256_cvtph_ps((__m128i)halves);
#endif
}

// One dense row, or one in eight-bit floats. inputs: float32, 0 after the last column up to a whole chunk
INLINE void float_row(const Store *s, int64_t row, int64_t ahead, const uint8_t *const *inputs, float *sums, int count,
                      int form) {
    const int64_t columns = s->columns, item = form == FLOAT8 ? 1 : form == BFLOAT16 ? 2 : 4;
    const uint8_t *from = s->low + row * columns * item;
    Floats totals[MOST_ROWS] = {0};
    float tails[MOST_ROWS] = {0};
    const int64_t step = form == FLOAT8 && s->block ? s->block : columns, across = (columns + step - 1) / step;
    const float *scales = (const float *)s->scales + (form != FLOAT8 ? 0 : s->block ? row / s->block * across : row);
    for (int64_t first = 0, b = 0; first < columns; first += step, b++) {
        const int64_t stop = first + step < columns ? first + step : columns;
        Floats parts[MOST_ROWS] = {0};
        int64_t i = first;
        for (; i + LANES <= stop; i += LANES) {
            if (i * item % 64 == 0) __builtin_prefetch(from + (ahead * columns + i) * item);
            const Floats weights = form == FLOAT8     ? float8_at(from + i)
                                   : form == BFLOAT16 ? widened_at(from, i, 1)
                                                      : floats_at((const float *)from + i);
#pragma GCC unroll 4
            for (int k = 0; k < count; k++) parts[k] = added(parts[k], weights, floats_at((const float *)inputs[k] + i));
        }
        const float scale = form == FLOAT8 ? 256 * scales[b] : 1;
        for (int k = 0; k < count; k++) {
            totals[k] += parts[k] * scale;
            if (form != FLOAT8)
                for (int64_t j = i; j < stop; j++) tails[k] += number_at(from, j, form == BFLOAT16) * ((const float *)inputs[k])[j];
        }
    }
    for (int k = 0; k < count; k++) sums[k] = sum_of_lanes(totals[k]) + tails[k];
}

typedef void (*RowProduct)(const Store *, int64_t, int64_t, const uint8_t *const *, float *);
#define PACKED_ROW(COUNT, NAME, ...)                                                                                       \
    static void row_of_##NAME##_##COUNT(const Store *s, int64_t row, int64_t ahead, const uint8_t *const *inputs,          \
                                        float *sums) {                                                                     \
        packed_row(s, row, ahead, inputs, sums, COUNT, __VA_ARGS__);                                                       \
    }
#define FLOAT_ROW(COUNT, NAME, FORM)                                                                                       \
    static void row_of_##NAME##_##COUNT(const Store *s, int64_t row, int64_t ahead, const uint8_t *const *inputs,          \
                                        float *sums) {                                                                     \
        float_row(s, row, ahead, inputs, sums, COUNT, FORM);                                                               \
    }
#define EACH_ROW(KIND, NAME, ...) KIND(1, NAME, __VA_ARGS__) KIND(2, NAME, __VA_ARGS__) KIND(4, NAME, __VA_ARGS__)
EACH_ROW(PACKED_ROW, q2, 2, 0, 16, 1, 0)
EACH_ROW(PACKED_ROW, q3, 2, 1, 16, 0, 0)
EACH_ROW(PACKED_ROW, q4, 4, 0, 32, 1, 0)
EACH_ROW(PACKED_ROW, q5, 4, 1, 32, 1, 0)
EACH_ROW(PACKED_ROW, q6, 4, 2, 16, 0, 0)
EACH_ROW(PACKED_ROW, q8, 8, 0, 32, 1, 0)
EACH_ROW(PACKED_ROW, book, 4, 0, 32, 0, 1)
EACH_ROW(FLOAT_ROW, bfloat16, BFLOAT16)
EACH_ROW(FLOAT_ROW, float32, FLOAT32)
EACH_ROW(FLOAT_ROW, float8, FLOAT8)
#define ROWS_OF(NAME) \
    { row_of_##NAME##_1, row_of_##NAME##_2, row_of_##NAME##_4 }

static const RowProduct *products_of(const Store *s) {
    static const RowProduct all[][3] = {ROWS_OF(q2), ROWS_OF(q3),   ROWS_OF(q4),       ROWS_OF(q5),      ROWS_OF(q6),
                                        ROWS_OF(q8), ROWS_OF(book), ROWS_OF(bfloat16), ROWS_OF(float32), ROWS_OF(float8)};
    if (s->form != PACKED) return all[6 + s->form];
    if (s->table) return all[6];
    if (s->low_bits == 8) return all[5];
    return all[s->low_bits == 2 ? s->high_bits : 2 + s->high_bits];
}

// `rows` rows of a store from `first` on, times the inputs of up to MOST_ROWS vectors. Those from `next` on are fetched, which
// are computed next. sums: [rows, MOST_ROWS]
static void block_products(const Store *s, int64_t first, int64_t next, int rows, const uint8_t *const *inputs, int count,
                           float *sums) {
    const RowProduct *products = products_of(s);
    const int64_t ahead = next - first;
    for (int row = 0; row < rows; row++) {
        float *to = sums + row * MOST_ROWS;
        switch (count) {
            case 1: products[0](s, first + row, ahead, inputs, to); break;
            case 2: products[1](s, first + row, ahead, inputs, to); break;
            case 3:
                products[1](s, first + row, ahead, inputs, to);
                products[0](s, first + row, 0, inputs + 2, to + 2);
                break;
            default: products[2](s, first + row, ahead, inputs, to);
        }
    }
}

// The inputs of a chunk for a store. values: 128
INLINE void put_input(const Store *s, const float *values, uint8_t *inputs, int64_t chunk) {
    if (s->form == PACKED)
        arrange(s, values, inputs + chunk * chunk_bytes(s));
    else
        memcpy(inputs + chunk * CHUNK * 4, values, CHUNK * 4);
}

// The pairs whose experts have a place, in the order of places.
static void list_pairs(Work *work) {
    const Call *call = work->call;
    const Layer *layer = call->layer;
    const int64_t all = call->rows * layer->slots;
    int64_t count = 0, used = 0;
    for (int64_t at = 0; at < all; at++) {
        const int32_t expert = call->chosen[at];
        if (expert < 0 || expert >= layer->experts) continue;  // shared ones follow those of the router
        if (layer->is_counted) layer->counts[expert]++;
        const int32_t place = layer->place_of[expert];
        if (place < 0 || call->weights[at] == 0) continue;
        int64_t to = count++;
        for (; to > 0 && work->pairs[to - 1].place > place; to--) work->pairs[to] = work->pairs[to - 1];
        work->pairs[to] = (Pair){at / layer->slots, 0, place, expert, call->weights[at]};
    }
    for (int64_t at = 0; at < count; at++) {
        if (!used || work->used[used - 1].place != work->pairs[at].place)
            work->used[used++] = (Used){at, 0, work->pairs[at].place, work->pairs[at].expert};
        work->used[used - 1].count++;
    }
    work->num_pairs = count;
    work->num_used = used;
}

INLINE int64_t blocks_of(int64_t rows) { return (rows + BLOCK - 1) / BLOCK; }

// One block of rows of an expert. `next`: that which comes then.
static void expand(const Work *work, int64_t at, int64_t next) {
    const Layer *layer = work->call->layer;
    const Store *s = &layer->gate_up;
    const int64_t inner = layer->inner, blocks = blocks_of(inner), first = at % blocks * BLOCK;
    const int64_t left = inner - first, size = input_bytes(s);
    const int rows = left < BLOCK ? left : BLOCK;
    const Used *used = work->used + at / blocks;
    const int64_t base = used->place * s->rows, of_bias = used->expert * s->rows;
    const int64_t then = work->used[next / blocks].place * s->rows + next % blocks * BLOCK;
    for (int64_t start = 0; start < used->count; start += MOST_ROWS) {
        const int count = used->count - start < MOST_ROWS ? used->count - start : MOST_ROWS;
        const uint8_t *inputs[MOST_ROWS];
        float gates[BLOCK * MOST_ROWS], ups[BLOCK * MOST_ROWS];
        for (int i = 0; i < count; i++) inputs[i] = work->x + work->pairs[used->first + start + i].row * size;
        const int64_t gate = base + first, up = gate + inner;
        block_products(s, gate, layer->is_gated ? up : then, rows, inputs, count, gates);
        if (layer->is_gated) block_products(s, up, then, rows, inputs, count, ups);
        for (int i = 0; i < count; i++) {
            float *to = work->inner + (used->first + start + i) * inner + first;
            for (int row = 0; row < rows; row++) {
                float gate = gates[row * MOST_ROWS + i], up = layer->is_gated ? ups[row * MOST_ROWS + i] : 0;
                if (layer->gate_up_bias) {
                    gate += number_at(layer->gate_up_bias, of_bias + first + row, layer->is_half);
                    if (layer->is_gated) up += number_at(layer->gate_up_bias, of_bias + inner + first + row, layer->is_half);
                }
                if (layer->is_gated)
                    to[row] = activated(gate, up, layer->activation);
                else
                    to[row] = gate > 0 ? gate * gate : 0;
            }
        }
    }
}

// One block of rows of all experts. `next`: that which comes then.
static void contract(const Work *work, int64_t block, int64_t next) {
    const Call *call = work->call;
    const Layer *layer = call->layer;
    const Store *s = &layer->down;
    const int64_t width = layer->width, first = block * BLOCK, left = width - first, size = input_bytes(s);
    const int rows = left < BLOCK ? left : BLOCK;
    float *sums = (float *)(call->room) + block * BLOCK * call->rows;  // [rows of x, BLOCK]
    memset(sums, 0, call->rows * BLOCK * sizeof(float));
    for (int64_t e = 0; e < work->num_used; e++) {
        const Used *used = work->used + e;
        const int64_t then = e + 1 < work->num_used ? used[1].place * s->rows + first : work->used->place * s->rows + next * BLOCK;
        for (int64_t start = 0; start < used->count; start += MOST_ROWS) {
            const int count = used->count - start < MOST_ROWS ? used->count - start : MOST_ROWS;
            const uint8_t *inputs[MOST_ROWS];
            float values[BLOCK * MOST_ROWS];
            for (int i = 0; i < count; i++) inputs[i] = work->mid + (used->first + start + i) * size;
            block_products(s, used->place * s->rows + first, then, rows, inputs, count, values);
            for (int i = 0; i < count; i++) {
                const Pair *pair = work->pairs + used->first + start + i;
                for (int row = 0; row < rows; row++) {
                    float value = values[row * MOST_ROWS + i];
                    if (layer->down_bias) value += number_at(layer->down_bias, used->expert * s->rows + first + row, layer->is_half);
                    sums[pair->row * BLOCK + row] += pair->weight * value;
                }
            }
        }
    }
    for (int64_t row = 0; row < call->rows; row++) narrow(sums + row * BLOCK, rows, call->out, row * width + first, layer->is_half);
}

INLINE int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Memory for `rows` rows: sums of outputs, pairs, experts in use, inner values, and arranged inputs.
int64_t experts_room(const Layer *layer, int64_t rows) {
    const int64_t pairs = rows * layer->slots;
    return aligned((layer->width + BLOCK) * rows * 4) + aligned(pairs * sizeof(Pair)) + aligned(pairs * sizeof(Used)) +
           aligned(pairs * (layer->inner + CHUNK) * 4) + aligned(rows * input_bytes(&layer->gate_up)) +
           aligned(pairs * input_bytes(&layer->down));
}

// Calls `compute` with blocks of this thread. It takes the next one before, so that it can be fetched, but not the last ones:
// others may be faster.
INLINE void each_block(const Work *work, const Member *member, int64_t count, void (*compute)(const Work *, int64_t, int64_t)) {
    const int64_t early = count - 2 * member->threads;
    for (int64_t at = take(member->team, 1); at < count;) {
        const int64_t next = at < early ? take(member->team, 1) : at;
        compute(work, at, next < count ? next : at);
        at = next == at ? take(member->team, 1) : next;
    }
}

static void compute_experts(Work *work, const Member *member) {
    const Call *call = work->call;
    const Layer *layer = call->layer;
    if (!member->number) list_pairs(work);
    const int64_t width = layer->width, inner = layer->inner;
    const int64_t x_chunks = chunks_of(&layer->gate_up), mid_chunks = chunks_of(&layer->down);
    float values[CHUNK];
    for (int64_t at; (at = take(member->team, 1)) < call->rows * x_chunks;) {
        const int64_t row = at / x_chunks, first = at % x_chunks * CHUNK;
        const int64_t count = width - first < CHUNK ? width - first : CHUNK;
        memset(values, 0, sizeof values);
        widen(call->x, row * width + first, count, layer->is_half, values);
        put_input(&layer->gate_up, values, work->x + row * input_bytes(&layer->gate_up), at % x_chunks);
    }
    await_barrier(member);
    each_block(work, member, work->num_used * blocks_of(inner), expand);
    await_barrier(member);
    for (int64_t at; (at = take(member->team, 1)) < work->num_pairs * mid_chunks;) {
        const int64_t pair = at / mid_chunks, first = at % mid_chunks * CHUNK;
        const int64_t count = inner - first < CHUNK ? inner - first : CHUNK;
        memset(values, 0, sizeof values);
        memcpy(values, work->inner + pair * inner + first, count * 4);
        put_input(&layer->down, values, work->mid + pair * input_bytes(&layer->down), at % mid_chunks);
    }
    await_barrier(member);
    each_block(work, member, blocks_of(width), contract);
    await_barrier(member);
}

INLINE void relax(void) {
#if defined(__aarch64__)
    __asm__ volatile("isb");
#else
    _mm_pause();
#endif
}

static void *serve(void *data) {
    const Member *member = data;
    Pool *pool = (Pool *)member->team;  // its first field
    for (uint32_t seen = 0;;) {
        int spins = 0;
        while (__atomic_load_n(&pool->generation, __ATOMIC_ACQUIRE) == seen) {
            if (++spins < POOL_SPINS) {
                relax();
                continue;
            }
            __atomic_add_fetch(&pool->sleepers, 1, __ATOMIC_SEQ_CST);
            if (__atomic_load_n(&pool->generation, __ATOMIC_SEQ_CST) == seen)
                syscall(SYS_futex, &pool->generation, FUTEX_WAIT_PRIVATE, seen, (void *)0);
            __atomic_sub_fetch(&pool->sleepers, 1, __ATOMIC_SEQ_CST);
        }
        seen++;
        if (__atomic_load_n(&pool->stops, __ATOMIC_ACQUIRE)) return 0;
        compute_experts(&pool->work, member);
    }
}

static void wake(Pool *pool) {
    __atomic_add_fetch(&pool->generation, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&pool->sleepers, __ATOMIC_SEQ_CST))
        syscall(SYS_futex, &pool->generation, FUTEX_WAKE_PRIVATE, INT32_MAX);
}

// A step begins: its rows will soon be there.
void host_pool_stir(Pool *pool) {
    __atomic_add_fetch(&pool->stirs, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, &pool->stirs, FUTEX_WAKE_PRIVATE, 1);
}

void host_pool_stop(Pool *pool) {
    __atomic_store_n(&pool->stops, 1, __ATOMIC_RELEASE);
    if (pool->signals) {
        host_pool_stir(pool);
        pthread_join(pool->listener, 0);
    }
    wake(pool);
    for (int64_t i = 1; i < pool->threads; i++) pthread_join(pool->workers[i], 0);
    free(pool->workers);
    free(pool->members);
    free(pool);
}

static void bind(pthread_t thread, const int32_t *processors, int64_t count) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int64_t i = 0; i < count; i++) CPU_SET(processors[i], &set);
    if (count) pthread_setaffinity_np(thread, sizeof set, &set);
}

// Threads for experts, the calling one included; on these processors, if there are some. 0: there is no memory for them.
Pool *host_pool_start(int64_t threads, const int32_t *processors, int64_t num_processors) {
    Pool *pool = aligned_alloc(64, aligned(sizeof(Pool)));
    if (!pool) return 0;
    memset(pool, 0, sizeof *pool);
    pool->workers = calloc(threads, sizeof(pthread_t));
    pool->members = calloc(threads, sizeof(Member));
    if (!pool->workers || !pool->members) {
        free(pool->workers);
        free(pool->members);
        free(pool);
        return 0;
    }
    for (int64_t i = 0; i < threads; i++) pool->members[i] = (Member){&pool->team, i, threads};
    pool->threads = 1;
    for (int64_t i = 1; i < threads; i++) {
        if (pthread_create(pool->workers + i, 0, serve, pool->members + i)) {
            host_pool_stop(pool);
            return 0;
        }
        pool->threads = i + 1;
        bind(pool->workers[i], processors, num_processors);
    }
    return pool;
}

// Called by the CUDA driver, in the order of a stream, or by us.
void host_experts(void *data) {
    const Call *call = data;
    const Layer *layer = call->layer;
    Pool *pool = call->pool;
    const int64_t pairs = call->rows * layer->slots;
    uint8_t *room = call->room + aligned((layer->width + BLOCK) * call->rows * 4);
    Work *work = &pool->work;
    work->call = call;
    work->pairs = (Pair *)room;
    room += aligned(pairs * sizeof(Pair));
    work->used = (Used *)room;
    room += aligned(pairs * sizeof(Used));
    work->inner = (float *)room;
    room += aligned(pairs * (layer->inner + CHUNK) * 4);
    work->x = room;
    work->mid = room + aligned(call->rows * input_bytes(&layer->gate_up));
    wake(pool);
    compute_experts(work, pool->members);
}

// Returns 1 when the device has given the rows of a turn, or 0 when the pool stops.
static int await_rows(Pool *pool, uint32_t turn) {
    uint32_t seen = __atomic_load_n(&pool->stirs, __ATOMIC_ACQUIRE);
    for (int64_t looks = 0; (int32_t)(__atomic_load_n(&pool->signals->given, __ATOMIC_ACQUIRE) - turn) < 0; looks++) {
        if (__atomic_load_n(&pool->stops, __ATOMIC_ACQUIRE)) return 0;
        if (looks < POOL_SPINS) {
            relax();
            continue;
        }
        const struct timespec pause = {0, looks < POOL_SPINS + SHORT_PAUSES ? SHORT_PAUSE_NS : LONG_PAUSE_NS};
        syscall(SYS_futex, &pool->stirs, FUTEX_WAIT_PRIVATE, seen, &pause);
        const uint32_t stirs = __atomic_load_n(&pool->stirs, __ATOMIC_ACQUIRE);
        if (stirs != seen) looks = -1;
        seen = stirs;
    }
    return 1;
}

static void *listen(void *data) {
    Pool *pool = data;
    Signals *signals = pool->signals;
    for (uint32_t turn = 1; await_rows(pool, turn); turn++) {
        host_experts((Call *)(uintptr_t)signals->call);
        __atomic_store_n(&signals->done, turn, __ATOMIC_RELEASE);
    }
    return 0;
}

// Has a thread of its own compute the rows that a device gives; it is the first of the pool. Returns whether there is one.
int32_t host_pool_listen(Pool *pool, Signals *signals, const int32_t *processors, int64_t num_processors) {
    pool->signals = signals;
    if (pthread_create(&pool->listener, 0, listen, pool)) pool->signals = 0;
    if (pool->signals) bind(pool->listener, processors, num_processors);
    return pool->signals != 0;
}

// Two experts that have changed places, in the order of a stream: {table, on the device, in host memory, its place}.
typedef struct {
    int32_t *place_of;
    int64_t leaves, comes, place;
} Swap;

void swap_places(void *data) {
    const Swap *swap = data;
    swap->place_of[swap->comes] = -1;
    swap->place_of[swap->leaves] = (int32_t)swap->place;
}
