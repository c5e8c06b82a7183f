// A few tokens of each sequence through a gated delta net: the causal convolution, and the recurrence
//
//     S ← decay S;  S ← S + k ⊗ β (v - kᵀS);  o = qᵀS
//
// in one pass over the state for each token, which is read and written in place. Rows of one sequence
// are computed in their order, each like the only one.
#include "program.h"
#include "simd.h"
#include "work.h"

#include <cmath>

namespace delta_net {

namespace {

constexpr int64_t SERIAL = 1 << 14;
constexpr int MAX_KEY = 512;  // channels of a key; delta_net.py checks it
constexpr int WIDE = 4;       // registers of value channels at a time: their state fits in the cache

// y = silu(Σ inputs · weights), and the inputs move up by one. The sum and the result are rounded to
// T, as in torch.
template <typename T>
void convolve_row(T* inputs, const T* input, const float* weights, float* y, int kernel,
                  int64_t channels) {
    for (int64_t c = 0; c < channels; c += LANES) {
        const int n = channels - c < LANES ? (int)(channels - c) : LANES;
        Floats total = zeros();
        for (int j = 0; j < kernel; j++) {
            const T* source = j + 1 < kernel ? inputs + j * channels + c : input + c;
            Floats value = load_up_to(source, n);
            total = fma(value, load_up_to(weights + j * channels + c, n), total);
            if (j > 0) store_up_to(inputs + (j - 1) * channels + c, value, n);
        }
        T rounded[LANES];
        store(rounded, total);
        Floats x = load(rounded);
        store(rounded, x * sigmoid(x));
        store_up_to(y + c, load(rounded), n);
    }
}

template <typename T>
void convolve_rows(T* cache, const int64_t* slots, const T* inputs, int64_t stride,
                   const float* weights, float* y, int64_t rows, int kernel, int64_t channels,
                   int threads) {
#pragma omp parallel for num_threads(threads) if (rows * channels >= SERIAL)
    for (int64_t first = 0; first < rows; first++) {
        const int64_t end = end_of_sequence(slots, first, rows);
        for (int64_t row = first; row < end; row++)
            convolve_row(cache + slots[row] * (kernel - 1) * channels, inputs + row * stride,
                         weights, y + row * channels, kernel, channels);
    }
}

// x scaled to unit length, times `factor`.
void unit(const float* x, float* out, int size, float factor) {
    constexpr float EPS = 1e-6f;
    Floats squares = zeros();
    for (int i = 0; i < size; i += LANES) {
        Floats v = load_up_to(x + i, size - i);
        squares = fma(v, v, squares);
    }
    const float scale = factor / std::sqrt(sum(squares) + EPS);
    for (int i = 0; i < size; i += LANES)
        store_up_to(out + i, load_up_to(x + i, size - i) * all(scale), size - i);
}

// The recurrence for N registers of value channels, of which the last has `last` channels.
template <int N>
void recur_channels(float* state, const float* q, const float* k, const float* v, float* out,
                    float decay, float beta, int key_dim, int value_dim, int last) {
    auto lanes = [last](int n) { return n == N - 1 ? last : LANES; };
    Floats predicted[N], output[N];
    for (int n = 0; n < N; n++) predicted[n] = output[n] = zeros();
    for (int i = 0; i < key_dim; i++)
        for (int n = 0; n < N; n++) {
            const float* s = state + (int64_t)i * value_dim + n * LANES;
            predicted[n] = fma(load_up_to(s, lanes(n)) * all(decay), all(k[i]), predicted[n]);
        }
    Floats change[N];
    for (int n = 0; n < N; n++)
        change[n] = all(beta) * (load_up_to(v + n * LANES, lanes(n)) - predicted[n]);
    for (int i = 0; i < key_dim; i++)
        for (int n = 0; n < N; n++) {
            float* s = state + (int64_t)i * value_dim + n * LANES;
            Floats next = fma(all(k[i]), change[n], load_up_to(s, lanes(n)) * all(decay));
            store_up_to(s, next, lanes(n));
            output[n] = fma(all(q[i]), next, output[n]);
        }
    for (int n = 0; n < N; n++) store_up_to(out + n * LANES, output[n], lanes(n));
}

struct Recurrence {
    float* state;  // [slots, value_heads, key_dim, value_dim]
    const int64_t* slots;
    const float *y, *log_decay, *beta;
    float* out;
    int key_heads, value_heads, key_dim, value_dim;

    // One token of one value head.
    void advance(int64_t row, int64_t head) const {
        const int64_t keys = (int64_t)key_heads * key_dim, at = row * value_heads + head;
        const int64_t channels = 2 * keys + (int64_t)value_heads * value_dim;
        const int64_t key_head = head / (value_heads / key_heads);
        const float* source = y + row * channels;
        float q[MAX_KEY], k[MAX_KEY];
        unit(source + key_head * key_dim, q, key_dim, 1.0f / std::sqrt((float)key_dim));
        unit(source + keys + key_head * key_dim, k, key_dim, 1.0f);
        const float* v = source + 2 * keys + head * value_dim;
        float* own = state + (slots[row] * value_heads + head) * key_dim * value_dim;
        const float decay = std::exp(log_decay[at]);
        int i = 0;
        for (; i + WIDE * LANES <= value_dim; i += WIDE * LANES)
            recur_channels<WIDE>(own + i, q, k, v + i, out + at * value_dim + i, decay, beta[at],
                                 key_dim, value_dim, LANES);
        for (; i < value_dim; i += LANES)
            recur_channels<1>(own + i, q, k, v + i, out + at * value_dim + i, decay, beta[at],
                              key_dim, value_dim, value_dim - i < LANES ? value_dim - i : LANES);
    }
};

}  // namespace

// Convolution and SiLU of one new input [channels] per row; `cache` [slots, kernel - 1, channels].
EXPORT void delta_convolve(void* cache, const int64_t* slots, const void* inputs, int64_t stride,
                           const float* weights, float* y, int64_t rows, int kernel,
                           int64_t channels, int type, int threads) {
    if (type == FLOAT32)
        convolve_rows((float*)cache, slots, (const float*)inputs, stride, weights, y, rows, kernel,
                      channels, threads);
    else
        convolve_rows((bf16*)cache, slots, (const bf16*)inputs, stride, weights, y, rows, kernel,
                      channels, threads);
}
FROM_WORDS(delta_convolve)

// y [rows, queries | keys | values] → out [rows, value_heads, value_dim]. `log_decay` and `beta`
// [rows, value_heads]; `state` [slots, value_heads, key_dim, value_dim].
EXPORT void delta_recur(float* state, const int64_t* slots, const float* y, const float* log_decay,
                        const float* beta, float* out, int64_t rows, int key_heads,
                        int value_heads, int key_dim, int value_dim, int threads) {
    const Recurrence r{state,     slots,       y,       log_decay, beta, out,
                       key_heads, value_heads, key_dim, value_dim};
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t at = 0; at < rows * value_heads; at++) {
        const int64_t head = at / rows, first = at % rows;
        const int64_t end = end_of_sequence(slots, first, rows);
        for (int64_t row = first; row < end; row++) r.advance(row, head);
    }
}
FROM_WORDS(delta_recur)

}  // namespace delta_net
