// Decode attention: new tokens, of which each attends to its sequence's cache.
//
// A unit of work is one token and one key-value head with the query heads that read it, so a
// token's result does not depend on the others that are computed beside it. Columns are read in blocks, keys before values,
// with a running maximum and sum (online softmax), so that the cache is read once.
#include "attention.h"
#include "program.h"
#include "work.h"

namespace {

constexpr int BLOCK = 32;         // columns whose scores are kept
constexpr int MAX_GROUP = 64;     // query heads per key-value head; attention.py checks both
constexpr int MAX_STATE = 16384;  // query heads per key-value head · channels
constexpr int TOGETHER = 4;       // query heads for which one read of a key or value serves

struct Decode : Attention {
    const int64_t *slots, *positions;  // [rows]
    int64_t rows;
};

constexpr int PAIRS = 32;  // bf16 elements of a register

// Floats per head of the weighted values.
INLINE int padded(int dim) { return (dim + PAIRS - 1) / PAIRS * PAIRS; }

// Scores of G queries with `count` <= BLOCK keys: out[g][column] = q · k.
template <int G, typename T>
struct Products {
    static void scores(const T* q, const T* keys, int count, int dim, float (*out)[BLOCK]) {
        for (int j = 0; j < count; j++) {
            Floats partial[G];
            for (int g = 0; g < G; g++) partial[g] = zeros();
            for (int i = 0; i < dim; i += LANES) {
                Floats key = load(keys + (int64_t)j * dim + i);
                for (int g = 0; g < G; g++)
                    partial[g] = fma(load(q + g * dim + i), key, partial[g]);
            }
            for (int g = 0; g < G; g++) out[g][j] = sum(partial[g]);
        }
    }

    // sums[g] += Σ weights[g][column] · values[column]
    static void add_values(float (*weights)[BLOCK], const T* values, int count, int dim,
                           float* sums) {
        const int width = padded(dim);
        for (int i = 0; i < dim; i += LANES) {
            Floats total[G];
            for (int g = 0; g < G; g++) total[g] = load(sums + g * width + i);
            for (int j = 0; j < count; j++) {
                Floats value = load(values + (int64_t)j * dim + i);
                for (int g = 0; g < G; g++) total[g] = fma(all(weights[g][j]), value, total[g]);
            }
            for (int g = 0; g < G; g++) store(sums + g * width + i, total[g]);
        }
    }

    static void finish(const float* sums, float factor, int dim, T* out) {
        for (int i = 0; i < dim; i += LANES) store(out + i, load(sums + i) * all(factor));
    }
};

#ifdef AVX512

// 32 elements, or the last 16 of a row followed by zeros.
INLINE __m512i load_pairs(const bf16* p, int left) {
    if (left >= PAIRS) return _mm512_loadu_si512(p);
    return _mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i*)p));
}

// bf16 products in pairs, summed in float32.
template <int G>
struct Products<G, bf16> {
    static constexpr int PANEL = 8 / G;  // registers of values side by side: 16 sums in registers

    static void scores(const bf16* q, const bf16* keys, int count, int dim,
                       float (*out)[BLOCK]) {
        // With a constant size the compiler keeps the queries in registers.
        if (dim == 128)
            scores_of<128>(q, keys, count, 128, out);
        else if (dim == 64)
            scores_of<64>(q, keys, count, 64, out);
        else
            scores_of<0>(q, keys, count, dim, out);
    }

    template <int DIM>
    static void scores_of(const bf16* q, const bf16* keys, int count, int given,
                          float (*out)[BLOCK]) {
        const int dim = DIM ? DIM : given;
        for (int start = 0; start < count; start += LANES) {
            Floats partial[G][LANES];
            for (int j = 0; j < LANES; j++) {
                int column = start + j < count ? start + j : count - 1;
                const bf16* key = keys + (int64_t)column * dim;
                Floats total[G];
                for (int g = 0; g < G; g++) total[g] = zeros();
                for (int i = 0; i < dim; i += PAIRS) {
                    __m512bh pairs = (__m512bh)load_pairs(key + i, dim - i);
                    for (int g = 0; g < G; g++) {
                        __m512bh query = (__m512bh)load_pairs(q + g * dim + i, dim - i);
                        total[g] = _mm512_dpbf16_ps(total[g], query, pairs);
                    }
                }
                for (int g = 0; g < G; g++) partial[g][j] = total[g];
            }
            for (int g = 0; g < G; g++) store(out[g] + start, sums_of_16(partial[g]));
        }
    }

    static void add_values(float (*weights)[BLOCK], const bf16* values, int count, int dim,
                           float* sums) {
        bf16 rounded[G][BLOCK];
        for (int g = 0; g < G; g++) {
            for (int j = count; j < BLOCK; j++) weights[g][j] = 0.0f;
            for (int j = 0; j < BLOCK; j += LANES) store(rounded[g] + j, load(weights[g] + j));
        }
        int i = 0;
        for (; i + PANEL * PAIRS <= dim; i += PANEL * PAIRS)
            add_panel<PANEL>(rounded, values, count, dim, i, sums);
        for (; i < dim; i += PAIRS) add_panel<1>(rounded, values, count, dim, i, sums);
    }

    // Channels from `start` on, two columns at a time: they are interleaved, so that one instruction
    // multiplies with a pair of weights. `sums` stay in the order that this gives, see `finish`.
    template <int WIDE>
    static void add_panel(const bf16 (*weights)[BLOCK], const bf16* values, int count, int dim,
                          int start, float* sums) {
        Floats low[G][WIDE], high[G][WIDE];
        float* first_sum = sums + start;
        const int width = padded(dim);
        for (int g = 0; g < G; g++)
            for (int n = 0; n < WIDE; n++) {
                low[g][n] = load(first_sum + g * width + n * PAIRS);
                high[g][n] = load(first_sum + g * width + n * PAIRS + LANES);
            }
        for (int j = 0; j < count; j += 2) {
            const bf16* first = values + (int64_t)j * dim + start;
            const bf16* second = j + 1 < count ? first + dim : first;
            __m512bh pair[G];
            for (int g = 0; g < G; g++) {
                int32_t both;
                memcpy(&both, weights[g] + j, sizeof both);
                pair[g] = (__m512bh)_mm512_set1_epi32(both);
            }
            for (int n = 0; n < WIDE; n++) {
                const int left = WIDE > 1 ? PAIRS : dim - start;
                __m512i a = load_pairs(first + n * PAIRS, left);
                __m512i b = load_pairs(second + n * PAIRS, left);
                __m512bh even = (__m512bh)_mm512_unpacklo_epi16(a, b);
                __m512bh odd = (__m512bh)_mm512_unpackhi_epi16(a, b);
                for (int g = 0; g < G; g++) {
                    low[g][n] = _mm512_dpbf16_ps(low[g][n], pair[g], even);
                    high[g][n] = _mm512_dpbf16_ps(high[g][n], pair[g], odd);
                }
            }
        }
        for (int g = 0; g < G; g++)
            for (int n = 0; n < WIDE; n++) {
                store(first_sum + g * width + n * PAIRS, low[g][n]);
                store(first_sum + g * width + n * PAIRS + LANES, high[g][n]);
            }
    }

    static void finish(const float* sums, float factor, int dim, bf16* out) {
        const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21,
                                                22, 23);
        const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28,
                                                 29, 30, 31);
        for (int i = 0; i < dim; i += PAIRS) {
            Floats low = load(sums + i) * all(factor), high = load(sums + i + LANES) * all(factor);
            store(out + i, _mm512_permutex2var_ps(low, first, high));
            if (dim - i >= PAIRS)
                store(out + i + LANES, _mm512_permutex2var_ps(low, second, high));
        }
    }
};

#endif

// The running softmax of the query heads of one unit.
template <typename T>
struct Softmax {
    alignas(64) float sums[MAX_STATE + LANES * MAX_GROUP];  // weighted values, [group, width]
    float top[MAX_GROUP], total[MAX_GROUP];
    int width;

    void start(const Attention& a, int kv_head) {
        width = padded(a.dim);
        memset(sums, 0, sizeof(float) * width * a.group());
        for (int g = 0; g < a.group(); g++) {
            top[g] = a.sinks ? a.sinks[kv_head * a.group() + g] : -INFINITY;
            total[g] = a.sinks ? 1.0f : 0.0f;  // e^(sink - top)
        }
    }

    // Scores → weights e^(score - top) of head g, after correcting what was summed before.
    void weigh(const Attention& a, int g, float* scores, int count) {
        for (int j = count; j < BLOCK; j++) scores[j] = -INFINITY;
        Floats best = all(-INFINITY);
        for (int j = 0; j < BLOCK; j += LANES) {
            Floats s = scaled(a, load(scores + j));
            store(scores + j, s);
            best = larger(best, s);
        }
        if (a.cap > 0)
            for (int j = count; j < BLOCK; j++) scores[j] = -INFINITY;
        float highest = largest(best);
        if (highest > top[g]) {
            float correction = std::exp(top[g] - highest);
            for (int i = 0; i < width; i += LANES)
                store(sums + g * width + i, load(sums + g * width + i) * all(correction));
            total[g] *= correction;
            top[g] = highest;
        }
        Floats added = zeros();
        for (int j = 0; j < BLOCK; j += LANES) {
            Floats weight = exponential(load(scores + j) - all(top[g]));
            store(scores + j, weight);
            added = added + weight;
        }
        total[g] += sum(added);
    }

    template <int G>
    void add_block(const Attention& a, int g, const T* q, const T* keys, const T* values,
                   int count) {
        alignas(64) float scores[G][BLOCK];
        Products<G, T>::scores(q + g * a.dim, keys, count, a.dim, scores);
        for (int i = 0; i < G; i++) weigh(a, g + i, scores[i], count);
        Products<G, T>::add_values(scores, values, count, a.dim, sums + g * width);
    }
};

template <typename T>
void attend_one(const Decode& a, int64_t row, int kv_head) {
    const int dim = a.dim, group = a.group();
    const int64_t position = a.positions[row], plane = a.plane(a.slots[row], kv_head);
    const T *keys = (const T*)a.keys + plane, *values = (const T*)a.values + plane;
    const int64_t seen = a.window && position >= a.window ? a.window : position + 1;
    const T* q = (const T*)a.q + row * a.q_stride + (int64_t)kv_head * group * dim;
    Softmax<T> softmax;
    softmax.start(a, kv_head);
    for (int64_t start = 0; start < seen; start += BLOCK) {
        const int count = seen - start < BLOCK ? (int)(seen - start) : BLOCK;
        const T *block_keys = keys + start * dim, *block_values = values + start * dim;
        int g = 0;
        for (; g + TOGETHER <= group; g += TOGETHER)
            softmax.template add_block<TOGETHER>(a, g, q, block_keys, block_values, count);
        for (; g + 2 <= group; g += 2)
            softmax.template add_block<2>(a, g, q, block_keys, block_values, count);
        if (g < group) softmax.template add_block<1>(a, g, q, block_keys, block_values, count);
    }
    T* out = (T*)a.out + (row * a.heads + (int64_t)kv_head * group) * dim;
    for (int g = 0; g < group; g++)
        Products<1, T>::finish(softmax.sums + g * softmax.width, 1.0f / softmax.total[g], dim,
                               out + g * dim);
}

template <typename T>
void attend_all(const Decode& a) {
    const int64_t units = a.rows * a.kv_heads;
    if (a.window) {
        // In the order of a sequence: its tokens take columns of the ring that those before them see.
#pragma omp parallel for num_threads(a.threads) schedule(dynamic)
        for (int64_t unit = 0; unit < units; unit++) {
            const int64_t first = unit / a.kv_heads, kv_head = unit % a.kv_heads;
            const int64_t end = end_of_sequence(a.slots, first, a.rows);
            for (int64_t row = first; row < end; row++) {
                store_row<T>(a, row, a.slots[row], a.positions[row], (int)kv_head);
                attend_one<T>(a, row, (int)kv_head);
            }
        }
        return;
    }
#pragma omp parallel num_threads(a.threads)
    {
#pragma omp for
        for (int64_t unit = 0; unit < units; unit++) {
            const int64_t row = unit / a.kv_heads;
            store_row<T>(a, row, a.slots[row], a.positions[row], (int)(unit % a.kv_heads));
        }
        // All is stored: rows may belong to one sequence.
#pragma omp for schedule(dynamic)
        for (int64_t unit = 0; unit < units; unit++)
            attend_one<T>(a, unit / a.kv_heads, (int)(unit % a.kv_heads));
    }
}

}  // namespace

// Stores the new keys and values in the caches, and attends: see Attention and Decode.
EXPORT void attend_decode(const void* q, int64_t q_stride, const void* k, int64_t k_stride,
                          const void* v, int64_t v_stride, void* keys, void* values,
                          const int64_t* slots, const int64_t* positions, const float* sinks,
                          void* out, int64_t rows, int64_t capacity, int64_t window, int heads,
                          int kv_heads, int dim, float scale, float cap, int type, int threads) {
    const Decode a{{q, k, v, q_stride, k_stride, v_stride, keys, values, sinks, out, capacity,
                    window, heads, kv_heads, dim, scale, cap, threads},
                   slots, positions, rows};
    if (type == FLOAT32)
        attend_all<float>(a);
    else
        attend_all<bf16>(a);
}
FROM_WORDS(attend_decode)
