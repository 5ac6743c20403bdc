// The operations of a step, and the threads that compute them together.
#pragma once

#include "values.h"

enum { NO_MEMORY = 1, NO_SUCH_ROW = 2 };

// What the threads of a run share. Parts of an operation are handed out one by one: other programs may slow some threads.
typedef struct {
    int64_t rows;
    uint8_t *room;      // for the inputs of products, or the sums of attention
    int32_t *finished;  // units of attention, by row and KV head; 0 between operations
    int32_t failed;
    _Alignas(64) int64_t next;  // of the parts that no thread has taken
    _Alignas(64) int32_t arrived;
    _Alignas(64) uint32_t barriers;  // it wraps
    int32_t sleepers;
} Team;

typedef struct {
    Team *team;
    int64_t number, threads;
} Member;

INLINE int64_t take(Team *team, int64_t count) { return __atomic_fetch_add(&team->next, count, __ATOMIC_RELAXED); }

INLINE void fail(Team *team, int32_t reason) { __atomic_store_n(&team->failed, reason, __ATOMIC_RELAXED); }

// Returns when all threads have called it. After it, no part is taken.
void await_barrier(const Member *member);

// Matrices are described in native.py. `bits` is 0 for four bits that number the entries of `table`.
typedef struct {
    const uint8_t *packed, *table;
    int64_t outputs, tiles;
    int32_t bits, zero, has_minimums;
} Matrix;

// out = f(x) Wᵀ + bias + residual. f divides by the length and multiplies with `norm` if that is given; with an `activation`, it is
// activation(first half) · second half. `stride`: between the rows of `out` and of `residual`. Values are bfloat16 if `is_half`,
// else float32; those of `norm` and `bias` have flags of their own.
typedef struct {
    int32_t kind, activation, is_half, is_norm_half, is_bias_half;
    float eps;
    const Matrix *matrix;
    const void *x, *norm, *bias, *residual;
    void *out;
    int64_t stride;
} Product;

// Pages: [pages, page tokens, kv heads, dim]. Values are bfloat16 if `is_half`, else float32; the weights of norms have a
// flag of their own, and sinks (of each head, or none) and the table of rotations are float32. `table_rows`: where the page table has each row.
// `rope_positions`: the row of that table for each token.
typedef struct {
    int32_t kind, is_half, is_norm_half;
    float scale, eps;
    const void *q, *k, *v, *q_norm, *k_norm;
    void *key_pages, *value_pages, *out;
    const float *sinks, *rope;
    const int64_t *positions, *rope_positions, *slots, *table_rows;
    const int32_t *page_table;
    int64_t heads, kv_heads, dim, rotated_dims, pair_distance, page_tokens, table_columns, window;
    int64_t q_stride, q_head_stride, k_stride, v_stride;
} Attention;

// The rows of a matrix with these ids. out: [rows, columns], bfloat16 if `is_half`, else float32.
typedef struct {
    int32_t kind, is_half;
    const Matrix *matrix;
    const int64_t *ids;
    void *out;
} Lookup;

// The first of the highest of each row's logits, and whether that is finite; NaN is the highest. logits: [rows, count]
typedef struct {
    int32_t kind;
    const float *logits;
    int64_t *tokens;
    uint8_t *is_finite;
    int64_t count;
} Argmax;

int64_t product_room(const Product *product, int64_t rows);
void run_product(const Product *product, const Member *member);
int64_t attention_room(const Attention *attention, int64_t rows);
void run_attention(const Attention *attention, const Member *member);
void run_lookup(const Lookup *lookup, const Member *member);
