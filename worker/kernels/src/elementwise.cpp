// Norms, gates, rotary positions and the search for the greatest logit: all that is bound by the
// number of passes over the activations. Each row is computed on its own.
#include "program.h"
#include "simd.h"

#include <cmath>

namespace elementwise {

namespace {

constexpr int64_t SERIAL = 1 << 14;  // fewer elements than this are not worth a second thread
constexpr int MAX_HEAD = 1024;       // channels of one head; library.py checks it

// x * rsqrt(mean(x²) + eps) * weight. `T` of the activations, `W` of the weight.
template <typename T, typename W>
void normalise(const T* x, const W* weight, T* out, int size, float eps) {
    Floats squares = zeros();
    for (int i = 0; i < size; i += LANES) {
        Floats v = load_up_to(x + i, size - i);
        squares = fma(v, v, squares);
    }
    Floats scale = all(1.0f / std::sqrt(sum(squares) / size + eps));
    for (int i = 0; i < size; i += LANES) {
        Floats v = load_up_to(x + i, size - i) * scale * load_up_to(weight + i, size - i);
        store_up_to(out + i, v, size - i);
    }
}

// total = x + delta, rounded to T as torch rounds it.
template <typename T>
void add(const T* x, const T* delta, T* total, int size) {
    for (int i = 0; i < size; i += LANES) {
        int n = size - i;
        store_up_to(total + i, load_up_to(x + i, n) + load_up_to(delta + i, n), n);
    }
}

// out [rows, size] = a + b; `b_stride` is 0 where b has a single row.
template <typename T>
void add_rows(const T* a, const T* b, int64_t b_stride, T* out, int64_t rows, int size,
              int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size >= SERIAL)
    for (int64_t row = 0; row < rows; row++)
        add(a + row * size, b + row * b_stride, out + row * size, size);
}

template <typename T>
void scale(const T* x, float factor, T* out, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES) {
        const int n = (int)(size - i < LANES ? size - i : LANES);
        store_up_to(out + i, load_up_to(x + i, n) * all(factor), n);
    }
}

template <typename T, typename W>
void normalise_rows(const T* x, int64_t stride, const T* delta, const W* weight, T* total, T* out,
                    int64_t rows, int size, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size >= SERIAL)
    for (int64_t row = 0; row < rows; row++) {
        const T* source = x + row * stride;
        if (delta) {
            add(source, delta + row * size, total + row * size, size);
            source = total + row * size;
        }
        normalise(source, weight, out + row * size, size, eps);
    }
}

enum Activation { SILU = 0, GELU_TANH = 1, CLAMPED = 2 };

struct Gate {
    int kind;
    float slope, limit;  // of CLAMPED

    Floats operator()(Floats x, Floats up) const {
        if (kind == SILU) return x * sigmoid(x) * up;
        if (kind == CLAMPED) {
            x = smaller(all(limit), x);
            up = smaller(all(limit), larger(all(-limit), up));
            return (up + all(1.0f)) * x * sigmoid(all(slope) * x);
        }
        constexpr float SQRT_2_OVER_PI = 0.7978845608f, CUBIC = 0.044715f;
        Floats inner = all(SQRT_2_OVER_PI) * fma(all(CUBIC) * x * x, x, x);
        return all(0.5f) * x * (all(1.0f) + hyperbolic_tangent(inner)) * up;
    }
};

constexpr int GATE_PIECE = 1024;  // channels per unit of work

template <typename T>
void gate_rows(const T* gates, const T* ups, int64_t stride, T* out, int64_t rows, int inner,
               const Gate& by, int threads) {
    const int pieces = (inner + GATE_PIECE - 1) / GATE_PIECE;
#pragma omp parallel for num_threads(threads) if (rows * inner >= SERIAL)
    for (int64_t unit = 0; unit < rows * pieces; unit++) {
        int64_t row = unit / pieces;
        int start = (int)(unit % pieces) * GATE_PIECE;
        int end = start + GATE_PIECE < inner ? start + GATE_PIECE : inner;
        const T *gate = gates + row * stride, *up = ups + row * stride;
        for (int i = start; i < end; i += LANES) {
            int n = end - i;
            Floats value = by(load_up_to(gate + i, n), load_up_to(up + i, n));
            store_up_to(out + row * inner + i, value, n);
        }
    }
}

// The first `turned` channels rotated by half (rotate-half layout), the rest as it is. `cos` and
// `sin` [turned]; the first half of `sin` is negated. Products are rounded once, at the end.
template <typename T>
void rotate(const T* x, const T* cos, const T* sin, T* out, int turned, int dim) {
    const int half = turned / 2;
    for (int i = 0; i < half; i += LANES) {
        int n = half - i;
        Floats a = load_up_to(x + i, n), b = load_up_to(x + half + i, n);
        Floats low = fma(b, load_up_to(sin + i, n), a * load_up_to(cos + i, n));
        Floats high = a * load_up_to(sin + half + i, n);
        high = fma(b, load_up_to(cos + half + i, n), high);
        store_up_to(out + i, low, n);
        store_up_to(out + half + i, high, n);
    }
    memcpy(out + turned, x + turned, (dim - turned) * sizeof(T));
}

// One head: norm (if there is a weight), then rotation (if there are angles).
template <typename T, typename W>
void prepare_head(const T* x, const W* weight, float eps, const T* cos, const T* sin, T* out,
                  int turned, int dim) {
    T normed[MAX_HEAD];
    if (weight) {
        normalise(x, weight, turned ? normed : out, dim, eps);
        x = normed;
    }
    if (turned) rotate(x, cos, sin, out, turned, dim);
}

// Heads of one row of queries and keys.
struct Heads {
    const void *q, *k;             // [rows, heads, dim] and [rows, kv_heads, dim], heads adjacent
    int64_t q_stride, k_stride;    // elements between rows
    const void *q_norm, *k_norm;   // [dim], or null
    const void *cos, *sin;         // [rows, turned]
    void *q_out, *k_out;           // contiguous
    int64_t rows;
    int heads, kv_heads, dim, turned;
    float q_eps, k_eps;
    int threads;
};

template <typename T, typename W>
void prepare_heads(const Heads& h) {
    const int per_row = h.heads + h.kv_heads;
#pragma omp parallel for num_threads(h.threads) if (h.rows * per_row * h.dim >= SERIAL)
    for (int64_t row = 0; row < h.rows; row++) {
        const T* cos = (const T*)h.cos + row * h.turned;
        const T* sin = (const T*)h.sin + row * h.turned;
        const T* q = (const T*)h.q + row * h.q_stride;
        const T* k = (const T*)h.k + row * h.k_stride;
        T* q_out = (T*)h.q_out + row * h.heads * h.dim;
        T* k_out = (T*)h.k_out + row * h.kv_heads * h.dim;
        for (int i = 0; i < h.heads; i++)
            prepare_head(q + i * h.dim, (const W*)h.q_norm, h.q_eps, cos, sin, q_out + i * h.dim,
                         h.turned, h.dim);
        for (int i = 0; i < h.kv_heads; i++)
            prepare_head(k + i * h.dim, (const W*)h.k_norm, h.k_eps, cos, sin, k_out + i * h.dim,
                         h.turned, h.dim);
    }
}

// The first index of the greatest element, and that element. NaN counts as greatest, as in torch.
template <typename T>
float argmax_of(const T* x, int64_t size, int64_t* index) {
    constexpr int64_t BLOCK = 1024;
    float best = -INFINITY;
    int64_t block = 0;
    for (int64_t start = 0; start < size; start += BLOCK) {
        int64_t end = start + BLOCK < size ? start + BLOCK : size;
        Floats top = all(-INFINITY), nan = zeros();
        int64_t i = start;
        for (; i + LANES <= end; i += LANES) {
            Floats v = load(x + i);
            top = larger(v, top);
            nan = nan + (v - v);  // NaN for NaN and for infinity
        }
        float piece = largest(top), strange = sum(nan);
        for (; i < end; i++) {
            const float v = scalar(x[i]);
            piece = v > piece ? v : piece;
            strange += v - v;
        }
        if (strange != strange)
            for (int64_t j = start; j < end; j++) {
                const float v = scalar(x[j]);
                if (v != v) {
                    *index = j;
                    return v;
                }
            }
        if (piece > best) {
            best = piece;
            block = start;
        }
    }
    *index = block;
    while (*index + 1 < size && scalar(x[*index]) != best) ++*index;
    return best;
}

template <typename T>
void argmax_of_rows(const T* x, int64_t stride, float* values, int64_t* indices,
                           int64_t rows, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1 && rows * size >= SERIAL)
    for (int64_t row = 0; row < rows; row++)
        values[row] = argmax_of(x + row * stride, size, indices + row);
}

}  // namespace

// out = rms_norm(x [rows, size] with `stride` between rows); with `delta` first total = x + delta.
EXPORT void rms_norm(const void* x, int64_t stride, const void* delta, const void* weight,
                     void* total, void* out, int64_t rows, int size, float eps, int type,
                     int weight_type, int threads) {
    if (type == FLOAT32)
        normalise_rows((const float*)x, stride, (const float*)delta, (const float*)weight,
                       (float*)total, (float*)out, rows, size, eps, threads);
    else if (weight_type == FLOAT32)
        normalise_rows((const bf16*)x, stride, (const bf16*)delta, (const float*)weight,
                       (bf16*)total, (bf16*)out, rows, size, eps, threads);
    else
        normalise_rows((const bf16*)x, stride, (const bf16*)delta, (const bf16*)weight,
                       (bf16*)total, (bf16*)out, rows, size, eps, threads);
}
FROM_WORDS(rms_norm)

// out [rows, size] = a + b, both without gaps, or b a single row if `b_stride` is 0.
EXPORT void add_tensors(const void* a, const void* b, int64_t b_stride, void* out, int64_t rows,
                        int size, int type, int threads) {
    if (type == FLOAT32)
        add_rows((const float*)a, (const float*)b, b_stride, (float*)out, rows, size, threads);
    else
        add_rows((const bf16*)a, (const bf16*)b, b_stride, (bf16*)out, rows, size, threads);
}
FROM_WORDS(add_tensors)

// out [rows, inner] = activation(gate) * up, with `stride` between rows of gate and of up; for CLAMPED
// (up + 1) * gate * sigmoid(slope * gate) with gate at most `limit` and up within ±limit.
EXPORT void gated_activation(const void* gate, const void* up, int64_t stride, void* out,
                             int64_t rows, int inner, int kind, float slope, float limit, int type,
                             int threads) {
    const Gate by{kind, slope, limit};
    if (type == FLOAT32)
        gate_rows((const float*)gate, (const float*)up, stride, (float*)out, rows, inner, by,
                  threads);
    else
        gate_rows((const bf16*)gate, (const bf16*)up, stride, (bf16*)out, rows, inner, by, threads);
}
FROM_WORDS(gated_activation)

// Queries and keys of all rows: norm per head, then rotary positions.
EXPORT void prepare_queries_and_keys(const void* q, int64_t q_stride, const void* k,
                                     int64_t k_stride, const void* q_norm, const void* k_norm,
                                     float q_eps, float k_eps, const void* cos,
                                     const void* sin, int turned, void* q_out, void* k_out,
                                     int64_t rows, int heads, int kv_heads, int dim, int type,
                                     int weight_type, int threads) {
    Heads h{q,     k,    q_stride, k_stride, q_norm, k_norm, cos,   sin,   q_out,
            k_out, rows, heads,    kv_heads, dim,    turned, q_eps, k_eps, threads};
    if (type == FLOAT32)
        prepare_heads<float, float>(h);
    else if (weight_type == FLOAT32)
        prepare_heads<bf16, float>(h);
    else
        prepare_heads<bf16, bf16>(h);
}
FROM_WORDS(prepare_queries_and_keys)

// Per row of x [rows, size], with `stride` between rows: the greatest element and its first index.
EXPORT void argmax(const void* x, int64_t stride, float* values, int64_t* indices, int64_t rows,
                   int64_t size, int type, int threads) {
    if (type == FLOAT32)
        argmax_of_rows((const float*)x, stride, values, indices, rows, size, threads);
    else
        argmax_of_rows((const bf16*)x, stride, values, indices, rows, size, threads);
}
FROM_WORDS(argmax)

// out [rows] = the rows with these numbers; `bytes` each. `table` has those from `first` on; others
// are 0.
EXPORT void gather_rows(const char* table, int64_t first, int64_t count, const int64_t* numbers,
                        char* out, int64_t rows, int64_t bytes) {
    for (int64_t row = 0; row < rows; row++) {
        const int64_t at = numbers[row] - first;
        if (0 <= at && at < count)
            memcpy(out + row * bytes, table + at * bytes, bytes);
        else
            memset(out + row * bytes, 0, bytes);
    }
}
FROM_WORDS(gather_rows)

// out = x: `rows` of `bytes`, with gaps between them in both.
EXPORT void copy_rows(const char* x, int64_t stride, char* out, int64_t out_stride, int64_t rows,
                      int64_t bytes) {
    for (int64_t row = 0; row < rows; row++)
        memcpy(out + row * out_stride, x + row * stride, bytes);
}
FROM_WORDS(copy_rows)

// out [size] = x * factor.
EXPORT void multiply(const void* x, float factor, void* out, int64_t size, int type) {
    if (type == FLOAT32)
        scale((const float*)x, factor, (float*)out, size);
    else
        scale((const bf16*)x, factor, (bf16*)out, size);
}
FROM_WORDS(multiply)

// out [size] = x + number.
EXPORT void add_to_integers(const int64_t* x, int64_t number, int64_t* out, int64_t size) {
    for (int64_t i = 0; i < size; i++) out[i] = x[i] + number;
}
FROM_WORDS(add_to_integers)

}  // namespace elementwise
