// Mixtures of experts: which experts a token goes to, and where its rows are among those of all experts.
#include "program.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace mixture {

namespace {

constexpr int64_t SERIAL = 1 << 14;  // fewer elements than this are not worth a second thread

// The `top_k` greatest of a softmax over a token's logits, in falling order; the first of equal ones.
template <typename T>
void select(const T* x, const float* bias, int experts, int top_k, bool normalise, T* weights,
            int64_t* chosen, std::vector<float>& logits) {
    float greatest = -INFINITY, total = 0;
    for (int e = 0; e < experts; e++) {
        logits[e] = scalar(x[e]) + (bias ? bias[e] : 0.0f);
        greatest = std::max(greatest, logits[e]);
    }
    for (int k = 0; k < top_k; k++) {
        int best = -1;
        for (int e = 0; e < experts; e++) {
            if (std::find(chosen, chosen + k, e) != chosen + k) continue;
            if (best < 0 || logits[e] > logits[best]) best = e;
        }
        chosen[k] = best;
    }
    if (normalise)
        for (int k = 0; k < top_k; k++) total += std::exp(logits[chosen[k]] - greatest);
    else
        for (float logit : logits) total += std::exp(logit - greatest);
    for (int k = 0; k < top_k; k++)
        store_some(weights + k, all(std::exp(logits[chosen[k]] - greatest) / total), 1);
}

template <typename T>
void select_all(const T* logits, int64_t stride, const float* bias, int64_t tokens, int experts,
                int top_k, bool normalise, T* weights, int64_t* chosen, int threads) {
#pragma omp parallel num_threads(threads) if (tokens * experts >= SERIAL)
    {
        std::vector<float> row(experts);
#pragma omp for schedule(static)
        for (int64_t token = 0; token < tokens; token++)
            select(logits + token * stride, bias, experts, top_k, normalise,
                   weights + token * top_k, chosen + token * top_k, row);
    }
}

template <typename T>
void add_row(T* y, const T* bias, int size) {
    for (int i = 0; i < size; i += LANES)
        store_up_to(y + i, load_up_to(y + i, size - i) + load_up_to(bias + i, size - i), size - i);
}

template <typename T>
void combine_all(const T* outputs, const T* weights, const int64_t* places, int64_t tokens, int top_k,
                 int size, T* y, int threads) {
#pragma omp parallel for num_threads(threads) if (tokens * top_k * size >= SERIAL)
    for (int64_t token = 0; token < tokens; token++) {
        for (int i = 0; i < size; i += LANES) {
            Floats total = zeros();
            for (int64_t k = token * top_k; k < (token + 1) * top_k; k++)
                total = fma(all(scalar(weights[k])),
                            load_up_to(outputs + places[k] * size + i, size - i), total);
            store_up_to(y + token * size + i, total, size - i);
        }
    }
}

}  // namespace

// weights and chosen [tokens, top_k] ← the greatest of softmax(logits [tokens, experts] + bias) and their
// indices; with `normalise`, the weights of a token are scaled to sum 1. `bias` may be null.
EXPORT void select_experts(const void* logits, int64_t stride, const float* bias, int64_t tokens,
                           int experts, int top_k, int normalise, void* weights, int64_t* chosen,
                           int type, int threads) {
    if (type == FLOAT32)
        select_all((const float*)logits, stride, bias, tokens, experts, top_k, normalise,
                   (float*)weights, chosen, threads);
    else
        select_all((const bf16*)logits, stride, bias, tokens, experts, top_k, normalise,
                   (bf16*)weights, chosen, threads);
}
FROM_WORDS(select_experts)

// Orders `pairs` pairs of a token and an expert by expert. `chosen`: the expert of each pair, top_k of
// each token. rows [pairs] ← the token of each pair in that order; places [pairs] ← where each pair went;
// counts [experts] ← the pairs of each expert.
EXPORT void group_by_expert(const int64_t* chosen, int64_t pairs, int top_k, int experts,
                            int64_t* rows, int64_t* places, int64_t* counts) {
    std::fill(counts, counts + experts, 0);
    for (int64_t i = 0; i < pairs; i++) counts[chosen[i]]++;
    std::vector<int64_t> ends(experts);
    for (int e = 1; e < experts; e++) ends[e] = ends[e - 1] + counts[e - 1];
    for (int64_t i = 0; i < pairs; i++) {
        places[i] = ends[chosen[i]]++;
        rows[places[i]] = i / top_k;
    }
}
FROM_WORDS(group_by_expert)

// Adds to the rows of y [rows, size] that belong to each expert, in order, its bias [experts, size].
EXPORT void add_biases(void* y, const void* biases, const int64_t* counts, int experts, int size,
                       int type) {
    int64_t row = 0;
    for (int e = 0; e < experts; e++)
        for (int64_t end = row + counts[e]; row < end; row++)
            if (type == FLOAT32)
                add_row((float*)y + row * size, (const float*)biases + (int64_t)e * size, size);
            else
                add_row((bf16*)y + row * size, (const bf16*)biases + (int64_t)e * size, size);
}
FROM_WORDS(add_biases)

// y [tokens, size] ← the sum of the outputs [tokens * top_k, size] at a token's places, each by its
// weight, rounded once.
EXPORT void combine_experts(const void* outputs, const void* weights, const int64_t* places,
                            int64_t tokens, int top_k, int size, void* y, int type, int threads) {
    if (type == FLOAT32)
        combine_all((const float*)outputs, (const float*)weights, places, tokens, top_k, size,
                    (float*)y, threads);
    else
        combine_all((const bf16*)outputs, (const bf16*)weights, places, tokens, top_k, size,
                    (bf16*)y, threads);
}
FROM_WORDS(combine_experts)

}  // namespace mixture
