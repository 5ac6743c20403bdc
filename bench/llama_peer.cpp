// llama.cpp for bench/cpu.py. `llama_peer FILE THREADS`; each line "PROMPT DECODED" on stdin is one run on an empty cache.
// Prints the seconds of the prompt, the seconds of decoding, and the processor seconds of decoding.
#include "llama.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <vector>

static double wall_s() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static double processor_s() {
    timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

int main(int count, char **arguments) {
    if (count != 3) return 2;
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    auto *model = llama_model_load_from_file(arguments[1], llama_model_default_params());
    auto params = llama_context_default_params();
    params.n_ctx = 1024;
    params.n_threads = params.n_threads_batch = atoi(arguments[2]);
    auto *context = model ? llama_init_from_model(model, params) : nullptr;
    if (!context) return 1;
    const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
    auto next = [&] {
        const float *logits = llama_get_logits_ith(context, -1);
        return llama_token(std::max_element(logits, logits + vocabulary) - logits);
    };
    int prompt, decoded;
    while (scanf("%d %d", &prompt, &decoded) == 2) {
        llama_memory_clear(llama_get_memory(context), true);
        std::vector<llama_token> tokens(prompt);
        for (int i = 0; i < prompt; i++) tokens[i] = 100 + i;
        const double start = wall_s();
        if (llama_decode(context, llama_batch_get_one(tokens.data(), prompt))) return 1;
        llama_token token = next();
        const double middle = wall_s(), processor = processor_s();
        for (int i = 0; i < decoded; i++) {
            if (llama_decode(context, llama_batch_get_one(&token, 1))) return 1;
            token = next();
        }
        printf("%.6f %.6f %.6f\n", middle - start, wall_s() - middle, processor_s() - processor);
        fflush(stdout);
    }
}
