// Attention of decode rows over pages: one token of each row, from projected heads to mixed values. Consecutive rows may
// be consecutive tokens of one sequence, which attend to each other.
//
// The positions of a sequence are divided into chunks, always at the same places, so that a row's result does not depend on
// the other rows. A unit is one chunk and one KV head: its keys and values are loaded once for all tokens and query heads
// that attend to them. Whoever computes the last unit of a head adds the sums of its chunks.

#include "operations.h"

enum {
    CHUNK = 128,  // positions
    KEYS = 4,     // whose scores are computed at a time
    VALUES = 16,  // that are added at a time: they stay in the first cache
    HEADS = 4,    // most query heads that are computed at a time
    VECTORS = WIDTH == 32 ? 2 : 4,  // most vectors of a head that are computed at a time; AVX2 has few registers
    AHEAD = 16,   // positions whose keys and values are being loaded
};

// Consecutive rows that are tokens of one sequence.
typedef struct {
    int64_t row, rows;
    int64_t chunk, chunks;  // the first, and how many
    int64_t unit, sums;     // where its units begin, and its sums in the room
} Sequence;

// What a thread needs for a unit.
typedef struct {
    float *queries;   // [rows, shared heads, width]
    float *scores;    // [rows, shared heads, CHUNK]
    float *keys;      // [KEYS, width]
    float *values;    // [VALUES, width]
    float *heads[2];  // [width]
} Desk;

// Dimensions of a head in whole vectors.
INLINE int64_t width_of(const Attention *a) { return (a->dim + LANES - 1) / LANES * LANES; }

// The sums of a chunk for one query head: its values, the largest score, and the total of the weights.
INLINE int64_t sums_size(const Attention *a) { return width_of(a) + LANES; }

INLINE int64_t first_position(const Attention *a, int64_t row) {
    const int64_t length = a->positions[row] + 1;
    return a->window && length > a->window ? length - a->window : 0;
}

// Goes on to the next sequence of a step; 0: there is none.
static int next_sequence(const Attention *a, int64_t all, Sequence *s) {
    s->unit += s->chunks * a->kv_heads;
    s->sums += s->rows * s->chunks * a->heads * sums_size(a);
    s->row += s->rows;
    if (s->row >= all) return 0;
    int64_t first = INT64_MAX, last = 0, row = s->row;
    for (; row < all && a->table_rows[row] == a->table_rows[s->row]; row++) {
        const int64_t begin = first_position(a, row), own = a->positions[row];
        first = begin < first ? begin : first;
        last = own > last ? own : last;
    }
    s->rows = row - s->row;
    s->chunk = first / CHUNK;
    s->chunks = last / CHUNK - s->chunk + 1;
    return 1;
}

int64_t attention_room(const Attention *a, int64_t rows) {
    Sequence s = {0};
    while (next_sequence(a, rows, &s)) continue;
    return s.sums * sizeof(float);
}

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
    int64_t i = 0;
    for (; i + LANES <= pairs; i += LANES) {
        const Floats one = floats_at(out + i), other = floats_at(out + half + i);
        const Floats cosine = floats_at(cosines + i), sine = floats_at(sines + i);
        put_floats(out + i, one * cosine - other * sine);
        put_floats(out + half + i, other * cosine + one * sine);
    }
    for (; i < pairs; i++) {
        float one = out[i], other = out[half + i];
        out[i] = one * cosines[i] - other * sines[i];
        out[half + i] = other * cosines[i] + one * sines[i];
    }
}

// Starts to load a head: since this layer's last step, the weights of all layers went through the caches.
INLINE void fetch(const Attention *a, const void *pages, int64_t place) {
    const int64_t size = a->is_half ? 2 : 4;
    const char *line = (const char *)pages + place * size, *end = line + a->dim * size;
#pragma GCC unroll 4
    for (; line < end; line += 64) __builtin_prefetch(line);
}

// A head of a page in whole vectors: where it is, or in `room`, whose dimensions after the last are 0.
INLINE const float *head_at(const Attention *a, const void *pages, int64_t place, float *room) {
    if (!a->is_half && a->dim % LANES == 0) return (const float *)pages + place;
    int64_t d = 0;
    if (a->is_half)
        for (; d + LANES <= a->dim; d += LANES) put_floats(room + d, widened_at(pages, place + d, 1));
    widen(pages, place + d, a->dim - d, a->is_half, room + d);
    return room;
}

// The keys and values of the step's own tokens, as far as they belong to this chunk.
static void keep_own(const Attention *a, const Sequence *s, int64_t kv_head, int64_t chunk, const Desk *desk) {
    for (int64_t row = s->row; row < s->row + s->rows; row++) {
        if (a->positions[row] / CHUNK != chunk) continue;
        const int64_t own = (a->slots[row] * a->kv_heads + kv_head) * a->dim;
        rotated(a, a->k, row * a->k_stride + kv_head * a->dim, a->k_norm, row, desk->heads[0], desk->heads[1]);
        narrow(desk->heads[0], a->dim, a->key_pages, own, a->is_half);
        widen(a->v, row * a->v_stride + kv_head * a->dim, a->dim, a->is_half, desk->heads[0]);
        narrow(desk->heads[0], a->dim, a->value_pages, own, a->is_half);
    }
}

static void load_queries(const Attention *a, const Sequence *s, int64_t kv_head, const Desk *desk) {
    const int64_t shared = a->heads / a->kv_heads, width = width_of(a);
    float *query = desk->queries;
    for (int64_t row = s->row; row < s->row + s->rows; row++) {
        for (int64_t head = 0; head < shared; head++, query += width) {
            const int64_t first = row * a->q_stride + (kv_head * shared + head) * a->q_head_stride;
            rotated(a, a->q, first, a->q_norm, row, query, desk->heads[1]);
            for (int64_t d = 0; d < a->dim; d++) query[d] *= a->scale;
        }
    }
}

// The scores of KEYS keys.
INLINE void score(const float *query, const float *const *keys, int64_t width, float *scores) {
    Floats sums[KEYS] = {0};
    for (int64_t d = 0; d < width; d += LANES) {
        const Floats some = floats_at(query + d);
#pragma GCC unroll 4
        for (int key = 0; key < KEYS; key++) sums[key] = added(sums[key], some, floats_at(keys[key] + d));
    }
    sums_of_lanes(sums, scores);
}

// Makes weights of the scores of one query head. `begin`, `end`: those to which the token attends. Sets the largest score
// and the total of the weights.
static void weigh(float *scores, int64_t begin, int64_t end, float *largest, float *total) {
    for (int64_t i = 0; i < begin; i++) scores[i] = -__builtin_inff();
    for (int64_t i = end; i % LANES; i++) scores[i] = -__builtin_inff();
    Floats most = floats_at(scores), sums = {0};
    for (int64_t i = LANES; i < end; i += LANES) most = larger(floats_at(scores + i), most);
    const float top = largest_of_lanes(most);
    for (int64_t i = 0; i < (end + LANES - 1) / LANES * LANES; i++) scores[i] = exponential(scores[i] - top);
    for (int64_t i = 0; i < end; i += LANES) sums += floats_at(scores + i);
    *largest = top;
    *total = sum_of_lanes(sums);
}

// Adds values from `begin` to `end`, times their weights, to the sums of `heads` query heads, in `vectors` vectors.
INLINE void add_values(
    const float *const *values, const float *weights, int64_t begin, int64_t end, int64_t d, float *sums, int64_t size,
    const int heads, const int vectors
) {
    Floats totals[HEADS][VECTORS];
#pragma GCC unroll 4
    for (int head = 0; head < heads; head++)
#pragma GCC unroll 4
        for (int part = 0; part < vectors; part++) totals[head][part] = floats_at(sums + head * size + part * LANES);
    for (int64_t i = begin; i < end; i++)
#pragma GCC unroll 4
        for (int head = 0; head < heads; head++) {
            const Floats weight = repeated(weights[head * CHUNK + i]);
#pragma GCC unroll 4
            for (int part = 0; part < vectors; part++)
                totals[head][part] = added(totals[head][part], weight, floats_at(values[i] + d + part * LANES));
        }
#pragma GCC unroll 4
    for (int head = 0; head < heads; head++)
#pragma GCC unroll 4
        for (int part = 0; part < vectors; part++) put_floats(sums + head * size + part * LANES, totals[head][part]);
}

#define HEADS_OF(COUNT)                                                                                             \
    static void add_to_##COUNT(                                                                                     \
        const float *const *values, const float *weights, int64_t begin, int64_t end, float *sums, int64_t size,    \
        int64_t width                                                                                               \
    ) {                                                                                                             \
        int64_t d = 0;                                                                                              \
        for (; d + VECTORS * LANES <= width; d += VECTORS * LANES)                                                  \
            add_values(values, weights, begin, end, d, sums + d, size, COUNT, VECTORS);                             \
        for (; d < width; d += LANES) add_values(values, weights, begin, end, d, sums + d, size, COUNT, 1);         \
    }
HEADS_OF(1)
HEADS_OF(2)
HEADS_OF(3)
HEADS_OF(4)

// One unit. sums: [rows, heads, sums_size], of this chunk; `stride` between rows
static void attend(
    const Attention *a, const Sequence *s, int64_t kv_head, int64_t chunk, const Desk *desk, float *sums, int64_t stride
) {
    const int64_t shared = a->heads / a->kv_heads, width = width_of(a), size = sums_size(a);
    const int32_t *table = a->page_table + a->table_rows[s->row] * a->table_columns;
    static void (*const adders[])(const float *const *, const float *, int64_t, int64_t, float *, int64_t, int64_t) = {
        0, add_to_1, add_to_2, add_to_3, add_to_4
    };
    int64_t begins[s->rows], ends[s->rows], begin = CHUNK, end = 0, places[CHUNK], next_page = 0;
    for (int64_t row = 0; row < s->rows; row++) {
        const int64_t low = first_position(a, s->row + row) - chunk * CHUNK, high = a->positions[s->row + row] + 1 - chunk * CHUNK;
        begins[row] = low < 0 ? 0 : low;
        ends[row] = high > CHUNK ? CHUNK : high;
        if (begins[row] >= ends[row]) continue;
        begin = begins[row] < begin ? begins[row] : begin;
        end = ends[row] > end ? ends[row] : end;
    }
    keep_own(a, s, kv_head, chunk, desk);
    load_queries(a, s, kv_head, desk);
    begin -= begin % KEYS;
    for (int64_t i = begin, place = 0; i < end; i++, place += a->kv_heads * a->dim) {
        const int64_t position = chunk * CHUNK + i;
        if (i == begin || position == next_page) {
            const int64_t page = position / a->page_tokens, slot = table[page] * a->page_tokens + position % a->page_tokens;
            place = (slot * a->kv_heads + kv_head) * a->dim;
            next_page = (page + 1) * a->page_tokens;
        }
        places[i] = place;
        if (i < begin + AHEAD) fetch(a, a->key_pages, place);
    }
    for (int64_t i = begin; i < end; i += KEYS) {
        const float *keys[KEYS];
        for (int key = 0; key < KEYS; key++) {
            const int64_t at = i + key < end ? i + key : end - 1;
            if (at + AHEAD < end) fetch(a, a->key_pages, places[at + AHEAD]);
            fetch(a, a->value_pages, places[at]);
            keys[key] = head_at(a, a->key_pages, places[at], desk->keys + key * width);
        }
        for (int64_t row = 0; row < s->rows; row++)
            if (i < ends[row] && i + KEYS > begins[row])
                for (int64_t head = row * shared; head < (row + 1) * shared; head++)
                    score(desk->queries + head * width, keys, width, desk->scores + head * CHUNK + i);
    }
    for (int64_t row = 0; row < s->rows; row++)
        for (int64_t head = 0; head < shared; head++) {
            float *own = sums + row * stride + head * size;
            memset(own, 0, width * sizeof(float));
            own[width] = -__builtin_inff();
            own[width + 1] = 0;
            if (begins[row] < ends[row])
                weigh(desk->scores + (row * shared + head) * CHUNK, begins[row], ends[row], own + width, own + width + 1);
        }
    for (int64_t first = begin; first < end; first += VALUES) {
        const int64_t stop = first + VALUES < end ? first + VALUES : end;
        const float *values[VALUES];
        for (int64_t i = first; i < stop; i++)
            values[i - first] = head_at(a, a->value_pages, places[i], desk->values + (i - first) * width);
        for (int64_t row = 0; row < s->rows; row++) {
            const int64_t low = begins[row] > first ? begins[row] - first : 0, high = (ends[row] < stop ? ends[row] : stop) - first;
            if (low >= high) continue;
            const float *weights = desk->scores + row * shared * CHUNK + first;
            float *own = sums + row * stride;
            for (int64_t head = 0; head < shared; head += HEADS)
                adders[shared - head < HEADS ? shared - head : HEADS](
                    values, weights + head * CHUNK, low, high, own + head * size, size, width
                );
        }
    }
}

// Adds the chunks of one KV head's query heads. sums: [rows, chunks, heads, sums_size]
static void add_chunks(const Attention *a, const Sequence *s, int64_t kv_head, const float *sums, float *out) {
    const int64_t shared = a->heads / a->kv_heads, width = width_of(a), size = sums_size(a), stride = a->heads * size;
    for (int64_t row = 0; row < s->rows; row++) {
        for (int64_t head = kv_head * shared; head < (kv_head + 1) * shared; head++) {
            const float *own = sums + row * s->chunks * stride + head * size, *sink = a->sinks ? a->sinks + head : 0;
            float largest = own[width], total = 0;
            for (int64_t i = 1; i < s->chunks; i++) largest = own[i * stride + width] > largest ? own[i * stride + width] : largest;
            if (sink && *sink > largest) largest = *sink;
            if (sink) total = exponential(*sink - largest);
            memset(out, 0, width * sizeof(float));
            for (int64_t i = 0; i < s->chunks; i++, own += stride) {
                const float weight = exponential(own[width] - largest);
                total += weight * own[width + 1];
                for (int64_t d = 0; d < width; d += LANES)
                    put_floats(out + d, added(floats_at(out + d), repeated(weight), floats_at(own + d)));
            }
            for (int64_t d = 0; d < a->dim; d++) out[d] /= total;
            narrow(out, a->dim, a->out, ((s->row + row) * a->heads + head) * a->dim, a->is_half);
        }
    }
}

void run_attention(const Attention *a, const Member *member) {
    Team *team = member->team;
    const int64_t shared = a->heads / a->kv_heads, width = width_of(a), size = sums_size(a);
    int64_t most = 0;  // tokens of a sequence
    for (Sequence s = {0}; next_sequence(a, team->rows, &s);) most = s.rows > most ? s.rows : most;
    const int64_t floats = most * shared * (width + CHUNK) + (KEYS + VALUES + 2) * width;
    float *memory = aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64);
    if (!memory) {
        fail(team, NO_MEMORY);
        return;
    }
    memset(memory, 0, floats * sizeof(float));
    const Desk desk = {
        .queries = memory,
        .scores = memory + most * shared * width,
        .keys = memory + most * shared * (width + CHUNK),
        .values = memory + most * shared * (width + CHUNK) + KEYS * width,
        .heads = {memory + floats - 2 * width, memory + floats - width},
    };
    Sequence s = {0};
    int has_more = next_sequence(a, team->rows, &s);
    for (int64_t unit = take(team, 1); has_more; unit = take(team, 1)) {
        while (has_more && unit >= s.unit + s.chunks * a->kv_heads) has_more = next_sequence(a, team->rows, &s);
        if (!has_more) break;
        const int64_t kv_head = (unit - s.unit) % a->kv_heads, chunk = (unit - s.unit) / a->kv_heads;
        float *sums = (float *)team->room + s.sums;
        float *own = sums + chunk * a->heads * size + kv_head * shared * size;
        const int64_t stride = s.chunks * a->heads * size;
        attend(a, &s, kv_head, s.chunk + chunk, &desk, own, stride);
        int32_t *finished = team->finished + s.row * a->kv_heads + kv_head;
        if (__atomic_add_fetch(finished, 1, __ATOMIC_ACQ_REL) == s.chunks) {
            *finished = 0;  // for the next layer
            add_chunks(a, &s, kv_head, sums, desk.heads[0]);
        }
    }
    free(memory);
}
