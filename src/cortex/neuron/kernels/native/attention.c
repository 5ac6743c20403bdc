// Attention of decode rows over pages: one token of each row, from projected heads to mixed values. Consecutive rows may
// be consecutive tokens of one sequence, which attend to each other.

#include "operations.h"

enum { AHEAD = 16 };  // tokens whose keys and values are being loaded

// One head, normed and rotated. room: [dim]
static void rotated(
    const Attention *a, const void *from, int64_t first, const void *norm, int64_t row, float *out, float *room
) {
    widen(from, first, a->dim, a->is_half, out);
    if (norm) {
        float factor = 1 / __builtin_sqrtf(dot_product(out, out, a->dim) / a->dim + a->eps);
        widen(norm, 0, a->dim, a->is_norm_half, room);
        for (int64_t i = 0; i < a->dim; i++) out[i] *= factor * room[i];
    }
    const int64_t pairs = a->rotated_dims / 2, half = a->pair_distance;
    const float *cosines = a->rope + a->rope_positions[row] * a->rotated_dims, *sines = cosines + pairs;
    for (int64_t i = 0; i < pairs; i++) {
        float one = out[i], other = out[half + i];
        out[i] = one * cosines[i] - other * sines[i];
        out[half + i] = other * cosines[i] + one * sines[i];
    }
}

INLINE int64_t slot_of(const Attention *a, const int32_t *table, int64_t position) {
    return (int64_t)table[position / a->page_tokens] * a->page_tokens + position % a->page_tokens;
}

// Starts to load a head: since this layer's last step, the weights of all layers went through the caches.
INLINE void fetch(const Attention *a, const void *pages, int64_t place) {
    const int64_t size = a->is_half ? 2 : 4;
    for (int64_t line = 0; line < a->dim * size; line += 64) __builtin_prefetch((const char *)pages + place * size + line);
}

// The scores of one token. queries: [shared, dim], scores: `stride` apart
INLINE void score(
    const Attention *a, const float *queries, int64_t place, float *scores, int64_t stride, const int is_half
) {
    const int64_t dim = a->dim;
    for (int64_t head = 0; head < a->heads / a->kv_heads; head++, queries += dim) {
        Floats sums = {0};
        float rest = 0;
        int64_t d = 0;
        for (; d + LANES <= dim; d += LANES)
            sums += floats_at(queries + d) * widened_at(a->key_pages, place + d, is_half);
        for (; d < dim; d++) rest += queries[d] * number_at(a->key_pages, place + d, is_half);
        scores[head * stride] = (sum_of_lanes(sums) + rest) * a->scale;
    }
}

// The sums of `count` tokens' values, times weights, in `vectors` vectors from dimension `d` on.
INLINE void sum_values(
    const Attention *a, const float *weights, const int64_t *places, int64_t count, int64_t d, float *out, const int vectors,
    const int is_half
) {
    Floats sums[4] = {0};
    for (int64_t i = 0; i < count; i++)
#pragma GCC unroll 4
        for (int part = 0; part < vectors; part++)
            sums[part] += weights[i] * widened_at(a->value_pages, places[i] + d + part * LANES, is_half);
    memcpy(out + d, sums, vectors * sizeof(Floats));
}

// The query heads of one row that share a kv head. -1 if there is no memory.
INLINE int mix(const Attention *a, int64_t row, int64_t kv_head, const int is_half) {
    const int64_t dim = a->dim, shared = a->heads / a->kv_heads, length = a->positions[row] + 1;
    const int64_t begin = a->window && length > a->window ? length - a->window : 0, count = length - begin;
    const int32_t *table = a->page_table + a->table_rows[row] * a->table_columns;
    int64_t *places = malloc(count * sizeof(int64_t) + ((shared + 2) * dim + shared * count) * sizeof(float));
    if (!places) return -1;
    float *queries = (float *)(places + count), *one = queries + shared * dim, *other = one + dim, *scores = other + dim;

    const int64_t own = (a->slots[row] * a->kv_heads + kv_head) * dim;
    rotated(a, a->k, row * a->k_stride + kv_head * dim, a->k_norm, row, one, other);
    narrow(one, dim, a->key_pages, own, is_half);
    widen(a->v, row * a->v_stride + kv_head * dim, dim, is_half, one);
    narrow(one, dim, a->value_pages, own, is_half);
    for (int64_t head = 0; head < shared; head++) {
        const int64_t first = row * a->q_stride + (kv_head * shared + head) * a->q_head_stride;
        rotated(a, a->q, first, a->q_norm, row, queries + head * dim, other);
    }
    for (int64_t i = 0, slot = 0; i < count; i++, slot++) {
        if (i == 0 || (begin + i) % a->page_tokens == 0) slot = slot_of(a, table, begin + i);
        places[i] = (slot * a->kv_heads + kv_head) * dim;
        if (i < AHEAD) fetch(a, a->key_pages, places[i]);
    }
    for (int64_t i = 0; i < count; i++) {
        if (i + AHEAD < count) fetch(a, a->key_pages, places[i + AHEAD]);
        fetch(a, a->value_pages, places[i]);
        score(a, queries, places[i], scores + i, count, is_half);
    }
    for (int64_t head = 0; head < shared; head++) {
        float *line = scores + head * count, largest = line[0], total = 0;
        const float *sink = a->sinks ? a->sinks + kv_head * shared + head : 0;
        if (sink && *sink > largest) largest = *sink;
        for (int64_t i = 1; i < count; i++) largest = line[i] > largest ? line[i] : largest;
        if (sink) total = exponential(*sink - largest);
        for (int64_t i = 0; i < count; i++) line[i] = exponential(line[i] - largest);
        for (int64_t i = 0; i < count; i++) total += line[i];
        int64_t d = 0;
        for (; d + 4 * LANES <= dim; d += 4 * LANES) sum_values(a, line, places, count, d, one, 4, is_half);
        for (; d + LANES <= dim; d += LANES) sum_values(a, line, places, count, d, one, 1, is_half);
        for (; d < dim; d++) {
            one[d] = 0;
            for (int64_t i = 0; i < count; i++) one[d] += line[i] * number_at(a->value_pages, places[i] + d, is_half);
        }
        for (d = 0; d < dim; d++) one[d] /= total;
        narrow(one, dim, a->out, (row * a->heads + kv_head * shared + head) * dim, is_half);
    }
    free(places);
    return 0;
}

void run_attention(const Attention *a, const Member *member) {
    Team *team = member->team;
    for (int64_t number; (number = take(team, 1)) < team->rows * a->kv_heads;) {
        int64_t row = number / a->kv_heads;
        const int64_t kv_head = number % a->kv_heads, owner = a->table_rows[row];
        if (row && a->table_rows[row - 1] == owner) continue;  // computed with the sequence's first token
        for (; row < team->rows && a->table_rows[row] == owner; row++)
            if (a->is_half ? mix(a, row, kv_head, 1) : mix(a, row, kv_head, 0)) fail(team, NO_MEMORY);
    }
}
