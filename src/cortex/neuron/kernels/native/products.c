// Products of vectors with quantised matrices. native.py says how a matrix lies in memory.
//
// A tile has 16 rows and 32 columns. A step multiplies four columns of all its rows: each row is one lane of 32 bits. So
// sums over columns stay in their lanes, and scales are multiplied lane by lane.

#include "operations.h"

enum { ROWS = 16, COLUMNS = 32, STEPS = 8, STEP_BYTES = 64, PARTS = STEP_BYTES / WIDTH, CODEBOOK = 0 };

typedef uint8_t Bytes __attribute__((vector_size(WIDTH)));

// Adds the products of four codes and four inputs to each lane. `wide`: codes may have more than seven bits.
INLINE Ints dot(Ints sums, Bytes codes, int32_t inputs, int wide) {
    (void)wide;
#if WIDTH == 16
    return vdotq_s32(sums, (int8x16_t)codes, (int8x16_t)vdupq_n_s32(inputs));
#elif WIDTH == 64
    return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, _mm512_set1_epi32(inputs));
#else
    __m256i x = _mm256_set1_epi32(inputs), one = _mm256_set1_epi16(1);
    if (!wide) return sums + (Ints)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)codes, x), one);
    __m256i low = (__m256i)(codes & 15), high = (__m256i)((codes >> 4) & 15);  // pairs of whole codes could overflow
    sums += (Ints)_mm256_madd_epi16(_mm256_maddubs_epi16(low, x), one);
    return sums + (Ints)_mm256_madd_epi16(_mm256_maddubs_epi16(high, x), _mm256_set1_epi16(16));
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

// Matrices of two bits have short scales: of four bits, in units that two tiles share.
INLINE int64_t tile_bytes(const Matrix *m) {
    if (m->bits == 2) return codes_bytes(2) + 4 * ROWS;
    return codes_bytes(m->bits) + COLUMNS / m->group * ROWS * 2 * (m->has_minimums ? 2 : 1);
}

INLINE int64_t block_bytes(const Matrix *m) { return (m->tiles + (m->bits == 2 ? m->tiles % 2 : 0)) * tile_bytes(m); }

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

// Inputs, quantised to sixteen bits, 256 · high + low, with one scale per tile. The second dot product of codes costs little
// next to their load and unpacking; with inputs of eight bits the answers of a small model change.
enum { MOST_ROWS = WIDTH == 64 ? 4 : 2, PLANES = 2, LARGEST = 127 * 256 };

typedef struct {
    int8_t *values;  // per tile the high halves of its columns, then the low ones
    float *scales;   // include UNIT
    float *shifts;   // what a group's zero, or its minimum, is multiplied by: the sum of its columns with their scale
} Inputs;

typedef struct {
    const Product *call;
    int64_t rows;
    Inputs inputs;
} Job;

// What the norm of a row multiplies its values by.
static float norm_factor(const Product *call, int64_t row, int64_t columns) {
    enum { SOME = 512 };
    float some[SOME], sum = 0;
    for (int64_t i = 0; i < columns; i += SOME) {
        const int64_t count = columns - i < SOME ? columns - i : SOME;
        widen(call->x, row * columns + i, count, call->is_half, some);
        sum += dot_product(some, some, count);
    }
    return 1 / __builtin_sqrtf(sum / columns + call->eps);
}

// f of a tile's columns. factor: of the row's norm
INLINE void prepare(const Product *call, int64_t row, int64_t tile, float factor, float *out) {
    const int64_t columns = call->matrix->tiles * COLUMNS, first = tile * COLUMNS;
    float other[COLUMNS];
    if (call->activation) {
        widen(call->x, 2 * row * columns + first, COLUMNS, call->is_half, out);
        widen(call->x, (2 * row + 1) * columns + first, COLUMNS, call->is_half, other);
        for (int i = 0; i < COLUMNS; i++) out[i] = activated(out[i], other[i], call->activation);
        return;
    }
    widen(call->x, row * columns + first, COLUMNS, call->is_half, out);
    if (!call->norm) return;
    widen(call->norm, first, COLUMNS, call->is_norm_half, other);
    for (int i = 0; i < COLUMNS; i++) out[i] *= factor * other[i];
}

// Whether the groups of a tile have 16 columns.
INLINE int is_split(const Matrix *m) { return m->bits == 2 || m->group == 16; }

// The code that stands for 0, as codes are multiplied.
INLINE int stored_zero(const Matrix *m) { return m->zero - (m->bits == 8 || m->bits == CODEBOOK ? FLIP : 0); }

// One tile of inputs, the number of which is `at`.
INLINE void quantise(const float *x, Inputs inputs, int64_t at, const Matrix *m) {
    int8_t *high = inputs.values + at * PLANES * COLUMNS, *low = high + COLUMNS;
    float largest = 0, doubt = 0;  // NaN, if one of the inputs is not finite
    for (int i = 0; i < COLUMNS; i++) {
        float size = __builtin_fabsf(x[i]);
        largest = size > largest ? size : largest;
        doubt += x[i] * 0;
    }
    const float factor = largest > 1e-30f ? LARGEST / largest : 0;  // of smaller ones it would not be finite
    const float scale = largest / LARGEST * UNIT + doubt;
    int32_t sums[2] = {0};
    for (int i = 0; i < COLUMNS; i++) {
        const int32_t number = (int32_t)__builtin_rintf(x[i] * factor);
        high[i] = (int8_t)((number + 128) >> 8);
        low[i] = (int8_t)number;
        sums[i / 16] += number;
    }
    const float factor_of_sum = m->has_minimums ? scale : -scale * (float)stored_zero(m);
    inputs.scales[at] = scale;
    inputs.shifts[2 * at] = (float)(is_split(m) ? sums[0] : sums[0] + sums[1]) * factor_of_sum;
    inputs.shifts[2 * at + 1] = (float)sums[1] * factor_of_sum;
}

// The scales of a group, and its minimums where it has them.
INLINE void scales_of(const Matrix *m, const uint8_t *tile, int64_t number, int bits, int group, int part, Floats *scale,
                      Floats *minimum) {
    if (bits == 2) {
        const Ints shorts = shorts_at(tile, group, part);
        *scale = __builtin_convertvector(shorts & 15, Floats) * units_at(tile, number, part, 0);
        *minimum = __builtin_convertvector(shorts >> 4, Floats) * -units_at(tile, number, part, 1);
        return;
    }
    const uint8_t *scales = tile + codes_bytes(bits) + group * ROWS * 2 + part * WIDTH / 2;
    *scale = halves_at(scales);
    if (m->has_minimums) *minimum = halves_at(scales + (is_split(m) ? 2 : 1) * ROWS * 2) - *scale * (float)stored_zero(m);
}

// 16 rows of the matrix times `count` inputs, the first of which is `row`.
INLINE void block_product(const Job *job, int64_t block, int64_t row, const int count, const int bits) {
    const Product *call = job->call;
    const Matrix *m = call->matrix;
    const int64_t tiles = m->tiles, size = tile_bytes(m);
    const uint8_t *tile = m->packed + block * block_bytes(m);
    const int has_minimums = bits == 2 || m->has_minimums, last = is_split(m) ? STEPS / 2 - 1 : STEPS - 1;
    Floats totals[MOST_ROWS][PARTS] = {0};
    for (int64_t t = 0; t < tiles; t++, tile += size) {
        if (FETCHED_AHEAD)
            for (int64_t line = 0; line < size; line += 64) __builtin_prefetch(tile + FETCHED_AHEAD + line);
        Ints highs[MOST_ROWS][PARTS] = {0}, lows[MOST_ROWS][PARTS] = {0};
#pragma GCC unroll 8
        for (int step = 0; step < STEPS; step++) {
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; part++) {
                const Bytes codes = codes_of(tile, bits, step, part, m->table);
#pragma GCC unroll 4
                for (int i = 0; i < count; i++) {
                    const int8_t *from = job->inputs.values + ((row + i) * tiles + t) * PLANES * COLUMNS + 4 * step;
                    int32_t high, low;
                    memcpy(&high, from, 4);
                    memcpy(&low, from + COLUMNS, 4);
                    highs[i][part] = dot(highs[i][part], codes, high, bits == 8 || bits == CODEBOOK);
                    lows[i][part] = dot(lows[i][part], codes, low, bits == 8 || bits == CODEBOOK);
                }
            }
            if (step != STEPS - 1 && step != last) continue;
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; part++) {
                const int group = step != last;
                Floats scale, minimum = {0};
                scales_of(m, tile, t, bits, group, part, &scale, &minimum);
#pragma GCC unroll 4
                for (int i = 0; i < count; i++) {
                    const int64_t at = (row + i) * tiles + t;
                    const Ints whole = (highs[i][part] << 8) + lows[i][part];
                    const Floats shift = repeated(job->inputs.shifts[2 * at + group]);
                    Floats value = repeated(job->inputs.scales[at]);
                    if (has_minimums) {
                        value *= __builtin_convertvector(whole, Floats);
                        totals[i][part] = added(totals[i][part], minimum, shift);
                    } else {
                        value = added(shift, __builtin_convertvector(whole, Floats), value);
                    }
                    totals[i][part] = added(totals[i][part], value, scale);
                    highs[i][part] = lows[i][part] = (Ints){0};
                }
            }
        }
    }
    const int64_t first = block * ROWS, rows = m->outputs - first < ROWS ? m->outputs - first : ROWS;
    float bias[ROWS] = {0};
    if (call->bias) widen(call->bias, first, rows, call->is_bias_half, bias);
    for (int i = 0; i < count; i++) {
        const int64_t at = (row + i) * call->stride + first;
        float sums[ROWS], residual[ROWS] = {0};
        memcpy(sums, totals[i], sizeof sums);
        if (call->residual) widen(call->residual, at, rows, call->is_half, residual);
        for (int lane = 0; lane < ROWS; lane++) sums[lane] += bias[lane] + residual[lane];
        narrow(sums, rows, call->out, at, call->is_half);
    }
}

#define KERNEL(BITS)                                                                     \
    static void block_of_##BITS(const Job *job, int64_t block) {                         \
        int64_t row = 0;                                                                 \
        for (; row + MOST_ROWS <= job->rows; row += MOST_ROWS)                           \
            block_product(job, block, row, MOST_ROWS, BITS);                             \
        for (; row < job->rows; row++) block_product(job, block, row, 1, BITS);          \
    }
KERNEL(0)
KERNEL(2)
KERNEL(3)
KERNEL(4)
KERNEL(5)
KERNEL(6)
KERNEL(8)

int64_t product_room(const Product *call, int64_t rows) { return rows * call->matrix->tiles * (PLANES * COLUMNS + 3 * 4); }

void run_product(const Product *call, const Member *member) {
    static void (*const kernels[])(const Job *, int64_t) = {
        block_of_0, 0, block_of_2, block_of_3, block_of_4, block_of_5, block_of_6, 0, block_of_8,
    };
    Team *team = member->team;
    const int64_t tiles = call->matrix->tiles, all = team->rows * tiles;
    uint8_t *room = team->room;
    const Inputs inputs = {(int8_t *)room, (float *)(room + all * PLANES * COLUMNS),
                           (float *)(room + all * (PLANES * COLUMNS + 4))};
    const int64_t stop = all * (member->number + 1) / member->threads;
    float factor = 0, values[COLUMNS];
    for (int64_t at = all * member->number / member->threads, row = -1; at < stop; at++) {
        if (at / tiles != row) {
            row = at / tiles;
            if (call->norm) factor = norm_factor(call, row, tiles * COLUMNS);
        }
        prepare(call, row, at % tiles, factor, values);
        quantise(values, inputs, at, call->matrix);
    }
    await_barrier(member);
    const Job job = {call, team->rows, inputs};
    const int64_t blocks = (call->matrix->outputs + ROWS - 1) / ROWS, chunk = blocks / (8 * member->threads) + 1;
    for (int64_t first; (first = take(team, chunk)) < blocks;)
        for (int64_t block = first; block < first + chunk && block < blocks; block++)
            kernels[call->matrix->bits](&job, block);
}

static void look_up(const Matrix *m, int64_t number, float *out) {
    const int64_t size = tile_bytes(m), lane = number % ROWS;
    const int bits = m->bits;
    const uint8_t *tile = m->packed + number / ROWS * block_bytes(m);
    for (int64_t t = 0; t < m->tiles; t++, tile += size) {
        for (int column = 0; column < COLUMNS; column++) {
            const int step = column / 4;
            const uint8_t *from = tile + lane * 4 + column % 4;
            int code = bits == 8 ? from[step * STEP_BYTES] : 0;
            if (has_four(bits)) code = from[step / 2 * STEP_BYTES] >> (step % 2 * 4) & 15;
            if (bits == CODEBOOK) code = m->table[code];
            int place = has_four(bits) ? 4 : 0;
            if (has_two(bits)) {
                code |= (from[twos_at(bits) + step / 4 * STEP_BYTES] >> (step % 4 * 2) & 3) << place;
                place += 2;
            }
            if (has_one(bits)) code |= (from[ones_at(bits)] >> step & 1) << place;
            const int part = lane / LANES, at = lane % LANES, group = column / m->group;
            float scale, minimum = 0;
            if (bits == 2) {
                const int32_t shorts = shorts_at(tile, group, part)[at];
                scale = units_at(tile, t, part, 0)[at] * (shorts & 15);
                minimum = -units_at(tile, t, part, 1)[at] * (shorts >> 4);
            } else {
                const uint8_t *scales = tile + codes_bytes(bits) + group * ROWS * 2 + part * WIDTH / 2;
                scale = halves_at(scales)[at];
                if (m->has_minimums) minimum = halves_at(scales + COLUMNS / m->group * ROWS * 2)[at];
            }
            out[t * COLUMNS + column] = ((float)(code - m->zero) * scale + minimum) * UNIT;
        }
    }
}

void run_lookup(const Lookup *lookup, const Member *member) {
    const Matrix *m = lookup->matrix;
    const int64_t columns = m->tiles * COLUMNS;
    for (int64_t row; (row = take(member->team, 1)) < member->team->rows;) {
        const int64_t number = lookup->ids[row];
        float *line = number < 0 || number >= m->outputs ? 0 : malloc(columns * sizeof(float));
        if (!line) {
            fail(member->team, number < 0 || number >= m->outputs ? NO_SUCH_ROW : NO_MEMORY);
            continue;
        }
        look_up(m, number, line);
        narrow(line, columns, lookup->out, row * columns, lookup->is_half);
        free(line);
    }
}
