// Attention of decode rows over pages: one token of each row, from projected heads to mixed values.

#include "numbers.h"

// Pages: [pages, page tokens, kv heads, dim]. All numbers are bfloat16 if `is_half`, else float32, except the norms' weights
// and the table of rotations, which are float32.
typedef struct {
    const void *q, *k, *v;
    void *key_pages, *value_pages, *out;
    const float *q_norm, *k_norm, *rope;
    const int64_t *positions, *slots, *lengths, *page_table;
    int64_t rows, heads, kv_heads, dim, rotated_dims, page_tokens, table_columns, window;
    int64_t q_stride, q_head_stride, k_stride, v_stride;
    float scale, eps;
    int32_t is_half;
} Attention;

typedef struct {
    const Attention *attention;
    int64_t next, failed;
} Job;

// One head, normed and rotated.
static void rotated(const Attention *a, const void *from, int64_t first, const float *norm, int64_t row, float *out) {
    widen(from, first, a->dim, a->is_half, out);
    if (norm) {
        float factor = 1 / __builtin_sqrtf(dot_product(out, out, a->dim) / a->dim + a->eps);
        for (int64_t i = 0; i < a->dim; i++) out[i] *= factor * norm[i];
    }
    const int64_t half = a->rotated_dims / 2;
    const float *cosines = a->rope + a->positions[row] * a->rotated_dims, *sines = cosines + half;
    for (int64_t i = 0; i < half; i++) {
        float one = out[i], other = out[half + i];
        out[i] = one * cosines[i] - other * sines[i];
        out[half + i] = other * cosines[i] + one * sines[i];
    }
}

INLINE int64_t slot_of(const Attention *a, const int64_t *table, int64_t position) {
    return table[position / a->page_tokens] * a->page_tokens + position % a->page_tokens;
}

// The head of a token in the pages, as float32, in `room` if it has to be widened.
INLINE const float *head_at(const Attention *a, const void *pages, int64_t slot, int64_t kv_head, float *room) {
    const int64_t first = (slot * a->kv_heads + kv_head) * a->dim;
    if (!a->is_half) return (const float *)pages + first;
    widen(pages, first, a->dim, 1, room);
    return room;
}

// The query heads of one row that share a kv head. -1 if there is no memory.
static int mix(const Attention *a, int64_t row, int64_t kv_head) {
    const int64_t dim = a->dim, shared = a->heads / a->kv_heads, length = a->lengths[row];
    const int64_t begin = a->window && length > a->window ? length - a->window : 0, count = length - begin;
    const int64_t *table = a->page_table + row * a->table_columns;
    float *room = malloc(((2 * shared + 1) * dim + shared * count) * sizeof(float));
    if (!room) return -1;
    float *queries = room, *mixed = queries + shared * dim, *one = mixed + shared * dim, *scores = one + dim;

    const int64_t own = (a->slots[row] * a->kv_heads + kv_head) * dim;
    rotated(a, a->k, row * a->k_stride + kv_head * dim, a->k_norm, row, one);
    narrow(one, dim, a->key_pages, own, a->is_half);
    widen(a->v, row * a->v_stride + kv_head * dim, dim, a->is_half, one);
    narrow(one, dim, a->value_pages, own, a->is_half);
    for (int64_t head = 0; head < shared; head++) {
        const int64_t first = row * a->q_stride + (kv_head * shared + head) * a->q_head_stride;
        rotated(a, a->q, first, a->q_norm, row, queries + head * dim);
    }
    for (int64_t i = 0, slot = 0; i < count; i++, slot++) {
        if (i == 0 || (begin + i) % a->page_tokens == 0) slot = slot_of(a, table, begin + i);
        const float *key = head_at(a, a->key_pages, slot, kv_head, one);
        for (int64_t head = 0; head < shared; head++)
            scores[head * count + i] = dot_product(queries + head * dim, key, dim) * a->scale;
    }
    for (int64_t head = 0; head < shared; head++) {
        float *line = scores + head * count, largest = line[0], total = 0;
        for (int64_t i = 1; i < count; i++) largest = line[i] > largest ? line[i] : largest;
        for (int64_t i = 0; i < count; i++) line[i] = exponential(line[i] - largest);
        for (int64_t i = 0; i < count; i++) total += line[i];
        for (int64_t i = 0; i < count; i++) line[i] /= total;
    }
    memset(mixed, 0, shared * dim * sizeof(float));
    for (int64_t i = 0, slot = 0; i < count; i++, slot++) {
        if (i == 0 || (begin + i) % a->page_tokens == 0) slot = slot_of(a, table, begin + i);
        const float *restrict value = head_at(a, a->value_pages, slot, kv_head, one);
        for (int64_t head = 0; head < shared; head++) {
            const float weight = scores[head * count + i];
            float *restrict line = mixed + head * dim;
            for (int64_t d = 0; d < dim; d++) line[d] += weight * value[d];
        }
    }
    narrow(mixed, shared * dim, a->out, (row * a->heads + kv_head * shared) * dim, a->is_half);
    free(room);
    return 0;
}

static void work(void *data) {
    Job *job = data;
    const Attention *a = job->attention;
    for (;;) {
        int64_t number = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        if (number >= a->rows * a->kv_heads) return;
        if (mix(a, number / a->kv_heads, number % a->kv_heads)) __atomic_store_n(&job->failed, 1, __ATOMIC_RELAXED);
    }
}

// 0, or -1 if there is no memory.
int decode_attention(const Attention *attention, Parallel parallel, int threads) {
    Job job = {attention, 0, 0};
    if (parallel && threads > 1)
        parallel(work, &job, threads, 0);
    else
        work(&job);
    return job.failed ? -1 : 0;
}
