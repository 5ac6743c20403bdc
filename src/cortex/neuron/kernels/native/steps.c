// Runs lists of operations: each thread goes through the whole list, with a barrier after each operation.

#include "operations.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { PRODUCT, ATTENTION, LOOKUP, ARGMAX };
enum { SPINS = 2000 };  // some tens of microseconds: a thread that waits longer sleeps

INLINE void pause_briefly(void) {
#if defined(__aarch64__)
    __asm__ volatile("isb");
#else
    _mm_pause();
#endif
}

void await_barrier(const Member *member) {
    Team *team = member->team;
    const uint32_t barriers = __atomic_load_n(&team->barriers, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&team->arrived, 1, __ATOMIC_ACQ_REL) == member->threads) {
        team->next = team->arrived = 0;
        __atomic_store_n(&team->barriers, barriers + 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&team->sleepers, __ATOMIC_SEQ_CST))
            syscall(SYS_futex, &team->barriers, FUTEX_WAKE_PRIVATE, INT32_MAX);
        return;
    }
    for (int spins = 0; spins < SPINS; spins++) {
        if (__atomic_load_n(&team->barriers, __ATOMIC_ACQUIRE) != barriers) return;
        pause_briefly();
    }
    __atomic_add_fetch(&team->sleepers, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&team->barriers, __ATOMIC_SEQ_CST) == barriers)
        syscall(SYS_futex, &team->barriers, FUTEX_WAIT_PRIVATE, barriers, (void *)0);
    __atomic_sub_fetch(&team->sleepers, 1, __ATOMIC_SEQ_CST);
}

static void run_argmax(const Argmax *argmax, const Member *member) {
    const int64_t count = argmax->count;
    for (int64_t row; (row = take(member->team, 1)) < member->team->rows;) {
        const float *logits = argmax->logits + row * count;
        float highest = logits[0];  // NaN, if there is one
        Floats most = highest - (Floats){0};
        Ints doubt = {0};
        int64_t i = 0, first = 0;
        for (; i + LANES <= count; i += LANES) {
            const Floats some = floats_at(logits + i);
            most = larger(some, most);
            doubt |= some != some;
        }
        for (; i < count; i++) highest = logits[i] > highest || logits[i] != logits[i] ? logits[i] : highest;
        for (int lane = 0; lane < LANES; lane++) {
            if (most[lane] > highest) highest = most[lane];
            if (doubt[lane]) highest = __builtin_nanf("");
        }
        while (first < count - 1 && logits[first] != highest && logits[first] == logits[first]) first++;
        argmax->tokens[row] = first;
        argmax->is_finite[row] = highest - highest == 0;
    }
}

typedef struct {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
    int (*num_threads)(void);
    int (*thread_number)(void);
} Threads;

typedef struct {
    const void *const *operations;
    int64_t count;
    const Threads *threads;
    Team team;
} Run;

INLINE int kind_of(const void *operation) { return *(const int32_t *)operation; }

static void work(void *data) {
    Run *run = data;
    const Threads *threads = run->threads;
    const Member member = {&run->team, threads ? threads->thread_number() : 0, threads ? threads->num_threads() : 1};
    for (int64_t i = 0; i < run->count; i++) {
        const void *operation = run->operations[i];
        switch (kind_of(operation)) {
            case PRODUCT: run_product(operation, &member); break;
            case ATTENTION: run_attention(operation, &member); break;
            case LOOKUP: run_lookup(operation, &member); break;
            case ARGMAX: run_argmax(operation, &member); break;
        }
        await_barrier(&member);
    }
}

// Runs operations on rows, on several threads if `threads` says how. 0, NO_MEMORY or NO_SUCH_ROW.
int run(const void *const *operations, int64_t count, int64_t rows, const Threads *threads, unsigned num_threads) {
    int64_t room = 0, kv_heads = 0;
    for (int64_t i = 0; i < count; i++) {
        const Attention *attention = operations[i];
        int64_t own = 0;
        if (kind_of(operations[i]) == PRODUCT) own = product_room(operations[i], rows);
        if (kind_of(operations[i]) == ATTENTION) {
            own = attention_room(attention, rows);
            kv_heads = attention->kv_heads > kv_heads ? attention->kv_heads : kv_heads;
        }
        room = own > room ? own : room;
    }
    Run run = {operations, count, num_threads > 1 ? threads : 0, {.rows = rows}};
    if (room && !(run.team.room = malloc(room))) return NO_MEMORY;
    if (kv_heads && !(run.team.finished = calloc(rows * kv_heads, sizeof(int32_t)))) {
        free(run.team.room);
        return NO_MEMORY;
    }
    if (run.threads)
        threads->parallel(work, &run, num_threads, 0);
    else
        work(&run);
    free(run.team.room);
    free(run.team.finished);
    return run.team.failed;
}
