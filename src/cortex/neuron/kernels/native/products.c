// Products of vectors with quantised matrices. Each row of a tile is one lane: sums over columns stay in their lanes, and scales
// are multiplied lane by lane.

#include "tiles.h"

// Adds the products of four codes and four inputs to each lane. `wide`: codes may have more than seven bits.
INLINE Ints dot(Ints sums, Bytes codes, const int8_t *inputs, int wide) {
    (void)wide;
#if WIDTH == 64  // in assembly, as compilers make two instructions of it: one repeats the inputs in all lanes
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(codes), "m"(*(const int8_t(*)[4])inputs));
    return sums;
#else
    int32_t four;
    memcpy(&four, inputs, 4);
#if WIDTH == 16
    return vdotq_s32(sums, (int8x16_t)codes, (int8x16_t)vdupq_n_s32(four));
#else
    __m256i x = _mm256_set1_epi32(four), one = _mm256_set1_epi16(1);
    if (!wide) return sums + (Ints)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)codes, x), one);
    __m256i low = (__m256i)(codes & 15), high = (__m256i)((codes >> 4) & 15);  // pairs of whole codes could overflow
    sums += (Ints)_mm256_madd_epi16(_mm256_maddubs_epi16(low, x), one);
    return sums + (Ints)_mm256_madd_epi16(_mm256_maddubs_epi16(high, x), _mm256_set1_epi16(16));
#endif
#endif
}

// Inputs, quantised to sixteen bits, 256 · high + low, with one scale per tile. The second dot product of codes costs little
// next to their load and unpacking; with inputs of eight bits the answers of a small model change.
enum { MOST_ROWS = WIDTH == 64 ? 6 : 2, PLANES = 2, LARGEST = 127 * 256 };

typedef struct {
    int8_t *values;  // of each tile and row the high halves of its columns, then the low ones
    float *scales;   // of each tile and row; include UNIT
    float *shifts;   // what a group's zero, or its minimum, is multiplied by: the sum of its columns with their scale
} Inputs;

// Rows are divided into equal parts of up to MOST_ROWS, so that the codes of a tile are unpacked as rarely as possible. More
// at a time would gain little, and the compiler would take longer: hosts wait for it once.
typedef struct {
    const Product *call;
    int64_t rows;
    int64_t part_rows, larger_parts;  // rows of a part, and how many parts have one more
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

// The columns of one tile and row, the number of which is `at`.
INLINE void quantise(const float *x, Inputs inputs, int64_t at, const Matrix *m) {
    typedef int8_t Planes __attribute__((vector_size(LANES)));
    const Floats whole = repeated(0x1.8p23f);  // sums with it end before the point, in the lowest bits of their words
    Floats most = {0}, doubt = {0};  // NaN, if one of the inputs is not finite
    for (int i = 0; i < COLUMNS; i += LANES) {
        const Floats some = floats_at(x + i);
        most = larger(most, (Floats)((Ints)some & INT32_MAX));
        doubt += some * 0;
    }
    const float largest = largest_of_lanes(most);
    const float factor = largest > 1e-30f ? LARGEST / largest : 0;  // of smaller ones it would not be finite
    const float scale = largest / LARGEST * UNIT + sum_of_lanes(doubt);
    int8_t *high = inputs.values + at * PLANES * COLUMNS, *low = high + COLUMNS;
    float sums[2];
    for (int half = 0; half < 2; half++) {
        Floats sum = {0};
        for (int i = half * 16; i < half * 16 + 16; i += LANES) {
            const Ints numbers = (Ints)(floats_at(x + i) * factor + whole) - (Ints)whole;
            const Planes above = __builtin_convertvector((numbers + 128) >> 8, Planes);
            const Planes below = __builtin_convertvector(numbers, Planes);
            memcpy(high + i, &above, LANES);
            memcpy(low + i, &below, LANES);
            sum += __builtin_convertvector(numbers, Floats);
        }
        sums[half] = sum_of_lanes(sum);
    }
    const float factor_of_sum = m->has_minimums ? scale : -scale * (float)(m->zero - (is_wide(m->bits) ? FLIP : 0));
    inputs.scales[at] = scale;
    inputs.shifts[2 * at] = (groups_of(m->bits) == 2 ? sums[0] : sums[0] + sums[1]) * factor_of_sum;
    inputs.shifts[2 * at + 1] = sums[1] * factor_of_sum;
}

// Bias and residual added to `count` rows of 16 outputs, in one function for all kinds of matrices.
static void put_outputs(const Product *call, int64_t block, int64_t row, int count, const Floats (*totals)[PARTS]) {
    const int64_t outputs = call->matrix->outputs, first = block * ROWS;
    const int64_t rows = outputs - first < ROWS ? outputs - first : ROWS;
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

// 16 rows of the matrix times `count` inputs, the first of which is `row`. The last three are constants wherever it is called:
// branches inside the loop would take longer than the products.
INLINE void block_product(const Job *job, int64_t block, int64_t row, int count, int bits, int has_minimums) {
    const Product *call = job->call;
    const Matrix *m = call->matrix;
    const int64_t tiles = m->tiles, size = tile_bytes(bits, has_minimums), rows = job->rows;
    const int group_steps = STEPS / groups_of(bits);
    const uint8_t *tile = block_at(m, block);
    const int8_t *values = job->inputs.values + row * PLANES * COLUMNS;
    const float *scales = job->inputs.scales + row, *shifts = job->inputs.shifts + 2 * row;
    Floats totals[MOST_ROWS][PARTS] = {0};
    for (int64_t t = 0; t < tiles; t++, tile += size, values += rows * PLANES * COLUMNS, scales += rows, shifts += 2 * rows) {
        if (FETCHED_AHEAD)
            for (int64_t line = 0; line < size; line += 64) __builtin_prefetch(tile + FETCHED_AHEAD + line);
#pragma GCC unroll 2
        for (int group = 0; group < groups_of(bits); group++) {
            Ints highs[MOST_ROWS][PARTS] = {0}, lows[MOST_ROWS][PARTS] = {0};
#pragma GCC unroll 8
            for (int step = group * group_steps; step < (group + 1) * group_steps; step++) {
#pragma GCC unroll 4
                for (int part = 0; part < PARTS; part++) {
                    const Bytes codes = codes_of(tile, bits, step, part, m->table);
#pragma GCC unroll 8
                    for (int i = 0; i < count; i++) {
                        const int8_t *from = values + i * PLANES * COLUMNS + 4 * step;
                        highs[i][part] = dot(highs[i][part], codes, from, is_wide(bits));
                        lows[i][part] = dot(lows[i][part], codes, from + COLUMNS, is_wide(bits));
                    }
                }
            }
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; part++) {
                Floats scale, minimum;
                scales_of(tile, t, bits, has_minimums, group, part, &scale, &minimum);
#pragma GCC unroll 8
                for (int i = 0; i < count; i++) {
                    const Floats whole = __builtin_convertvector((highs[i][part] << 8) + lows[i][part], Floats);
                    const Floats shift = repeated(shifts[2 * i + group]);
                    Floats value = repeated(scales[i]);
                    if (has_minimums) {
                        value *= whole;
                        totals[i][part] = added(totals[i][part], minimum, shift);
                    } else {
                        value = added(shift, whole, value);
                    }
                    totals[i][part] = added(totals[i][part], value, scale);
                }
            }
        }
    }
    put_outputs(call, block, row, count, totals);
}

#define KERNEL(BITS, HAS_MINIMUMS)                                                                   \
    static void block_of_##BITS##_##HAS_MINIMUMS(const Job *job, int64_t block) {                    \
        for (int64_t row = 0, part = 0, count; row < job->rows; row += count, part++) {              \
            count = job->part_rows + (part < job->larger_parts);                                     \
            EACH_COUNT(BITS, HAS_MINIMUMS)                                                           \
        }                                                                                            \
    }
#define COUNT(NUMBER, BITS, HAS_MINIMUMS) \
    if (NUMBER <= MOST_ROWS && count == NUMBER) block_product(job, block, row, NUMBER, BITS, HAS_MINIMUMS);
#define EACH_COUNT(...)                                                                         \
    COUNT(1, __VA_ARGS__) COUNT(2, __VA_ARGS__) COUNT(3, __VA_ARGS__)                           \
    COUNT(4, __VA_ARGS__) COUNT(5, __VA_ARGS__) COUNT(6, __VA_ARGS__)
KERNEL(0, 0)
KERNEL(2, 1)
KERNEL(3, 0)
KERNEL(4, 0)
KERNEL(4, 1)
KERNEL(5, 0)
KERNEL(5, 1)
KERNEL(6, 0)
KERNEL(8, 0)
KERNEL(8, 1)

int64_t product_room(const Product *call, int64_t rows) { return rows * call->matrix->tiles * (PLANES * COLUMNS + 3 * 4); }

void run_product(const Product *call, const Member *member) {
    static void (*const kernels[][2])(const Job *, int64_t) = {
        [0] = {block_of_0_0},
        [2] = {0, block_of_2_1},
        [3] = {block_of_3_0},
        [4] = {block_of_4_0, block_of_4_1},
        [5] = {block_of_5_0, block_of_5_1},
        [6] = {block_of_6_0},
        [8] = {block_of_8_0, block_of_8_1},
    };
    Team *team = member->team;
    if (!team->rows) return;
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
        quantise(values, inputs, at % tiles * team->rows + row, call->matrix);
    }
    await_barrier(member);
    const int64_t parts = (team->rows + MOST_ROWS - 1) / MOST_ROWS;
    const Job job = {call, team->rows, team->rows / parts, team->rows % parts, inputs};
    const int64_t blocks = (call->matrix->outputs + ROWS - 1) / ROWS, chunk = blocks / (8 * member->threads) + 1;
    for (int64_t first; (first = take(team, chunk)) < blocks;)
        for (int64_t block = first; block < first + chunk && block < blocks; block++)
            kernels[call->matrix->bits][call->matrix->has_minimums](&job, block);
}
