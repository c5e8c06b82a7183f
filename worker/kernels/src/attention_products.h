// How single tokens multiply with the keys and values of a cache. Each way has the same members:
// types of what is stored and of queries; `prepare`, which returns the queries of a unit as
// `Products` want them, `stride` apart; products of G queries with up to BLOCK columns, which fetch
// the next columns meanwhile; and `finish`, which writes weighted values.
#pragma once

#include "attention.h"
#include "work.h"

#include <type_traits>

namespace {

constexpr int BLOCK = 32;         // columns whose scores are kept
constexpr int MAX_GROUP = 64;     // query heads per key-value head; attention.py checks both
constexpr int MAX_STATE = 16384;  // query heads per key-value head · channels
constexpr int STEP = 32;          // channels that are read together
constexpr int RUNS = BLOCK / PAGE;
static_assert(RUNS == 2 && PAGE == LANES);

// The memory of the runs of a block: that of each is fetched while the same run of another is used.
struct AheadOfRuns {
    Ahead of[RUNS];
};

// The columns of a block of one head: PAGE columns follow each other, but for the last ones.
template <typename T>
struct Runs {
    const T* first[RUNS];

    AheadOfRuns ahead(int count, int dim) const {
        const int rest = count > PAGE ? count - PAGE : 0;
        return {{of(first[0], count - rest, dim), rest ? of(first[1], rest, dim) : Ahead{}}};
    }

   private:
    static Ahead of(const T* columns, int count, int dim) {
        return {(const char*)columns, (const char*)(columns + count * dim)};
    }
};

// Floats per head of the weighted values.
INLINE int padded(int dim) { return (dim + STEP - 1) / STEP * STEP; }

// In float32, 16 channels at a time. Queries of bf16 are widened once for all columns.
template <typename T>
struct AsTheyAre {
    typedef T Element;
    typedef float Query;
    static constexpr int WIDENED = std::is_same_v<T, float> ? 1 : MAX_STATE;
    static int stride(int dim) { return dim; }
    static const float* prepare(const T* queries, int heads, int dim, float* widened) {
        if constexpr (std::is_same_v<T, float>) {
            return queries;
        } else {
            for (int i = 0; i < heads * dim; i += LANES) store(widened + i, load(queries + i));
            return widened;
        }
    }

    template <int G>
    struct Products {
        // out[g][column] = q · k
        static void scores(const float* q, const Runs<T>& keys, int count, int dim,
                           float (*out)[BLOCK], AheadOfRuns& ahead) {
            for (int j = 0; j < count; j++) {
                Floats partial[G];
                for (int g = 0; g < G; g++) partial[g] = zeros();
                const T* column = keys.first[j / PAGE] + (int64_t)(j % PAGE) * dim;
                for (int i = 0; i < dim; i += LANES) {
                    Floats key = load(column + i);
                    for (int g = 0; g < G; g++)
                        partial[g] = fma(load(q + g * dim + i), key, partial[g]);
                    ahead.of[j / PAGE].fetch(1);
                }
                for (int g = 0; g < G; g++) out[g][j] = sum(partial[g]);
            }
        }

        // sums[g] += Σ weights[g][column] · values[column]
        static void add_values(float (*weights)[BLOCK], const Runs<T>& values, int count, int dim,
                               float* sums, AheadOfRuns& ahead) {
            const int width = padded(dim);
            for (int i = 0; i < dim; i += LANES) {
                Floats total[G];
                for (int g = 0; g < G; g++) total[g] = load(sums + g * width + i);
                for (int start = 0; start < count; start += PAGE) {
                    const T* columns = values.first[start / PAGE] + i;
                    const int end = count - start < PAGE ? count : start + PAGE;
                    for (int j = start; j < end; j++, columns += dim) {
                        Floats value = load(columns);
                        for (int g = 0; g < G; g++)
                            total[g] = fma(all(weights[g][j]), value, total[g]);
                        ahead.of[start / PAGE].fetch(1);
                    }
                }
                for (int g = 0; g < G; g++) store(sums + g * width + i, total[g]);
            }
        }
    };

    static void finish(const float* sums, float factor, int dim, T* out) {
        for (int i = 0; i < dim; i += LANES) store(out + i, load(sums + i) * all(factor));
    }
};

#ifdef AVX512

// 32 elements, or the last 16 of a row followed by zeros.
INLINE __m512i load_step(const bf16* p, int left) {
    if (left >= STEP) return _mm512_loadu_si512(p);
    return _mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i*)p));
}

// Writes 32 channels, or the last 16 of a row, whose sums are in the order that `first` and `second`
// take them from.
INLINE void store_step(const float* sums, float factor, int left, __m512i first, __m512i second,
                       bf16* out) {
    const Floats low = load(sums) * all(factor), high = load(sums + LANES) * all(factor);
    store(out, _mm512_permutex2var_ps(low, first, high));
    if (left >= STEP) store(out + LANES, _mm512_permutex2var_ps(low, second, high));
}

#ifdef PAIRS

// bf16 products in pairs, summed in float32.
struct Pairs {
    typedef bf16 Element;
    typedef bf16 Query;
    static constexpr int WIDENED = 1;
    static int stride(int dim) { return dim; }
    static const bf16* prepare(const bf16* queries, int, int, bf16*) { return queries; }

    template <int G>
    struct Products {
        static constexpr int PANEL = 8 / G;  // steps of values side by side: 16 sums in registers

        static void scores(const bf16* q, const Runs<bf16>& keys, int count, int dim,
                           float (*out)[BLOCK], AheadOfRuns& ahead) {
            // With a constant size the compiler keeps the queries in registers.
            if (dim == 128)
                scores_of<128>(q, keys, count, 128, out, ahead);
            else if (dim == 64)
                scores_of<64>(q, keys, count, 64, out, ahead);
            else
                scores_of<0>(q, keys, count, dim, out, ahead);
        }

        template <int DIM>
        static void scores_of(const bf16* q, const Runs<bf16>& keys, int count, int given,
                              float (*out)[BLOCK], AheadOfRuns& ahead) {
            const int dim = DIM ? DIM : given;
            for (int start = 0; start < count; start += LANES) {
                Floats partial[G][LANES];
                const bf16* columns = keys.first[start / PAGE];
                Ahead& next = ahead.of[start / PAGE];
                for (int j = 0; j < LANES; j++) {
                    const int column = start + j < count ? j : count - 1 - start;
                    const bf16* key = columns + (int64_t)column * dim;
                    Floats total[G];
                    for (int g = 0; g < G; g++) total[g] = zeros();
                    for (int i = 0; i < dim; i += STEP) {
                        __m512bh pairs = (__m512bh)load_step(key + i, dim - i);
                        for (int g = 0; g < G; g++) {
                            __m512bh query = (__m512bh)load_step(q + g * dim + i, dim - i);
                            total[g] = _mm512_dpbf16_ps(total[g], query, pairs);
                        }
                        next.fetch(1);
                    }
                    for (int g = 0; g < G; g++) partial[g][j] = total[g];
                }
                for (int g = 0; g < G; g++) store(out[g] + start, sums_of_16(partial[g]));
            }
        }

        static void add_values(float (*weights)[BLOCK], const Runs<bf16>& values, int count, int dim,
                               float* sums, AheadOfRuns& ahead) {
            bf16 rounded[G][BLOCK];
            for (int g = 0; g < G; g++) {
                for (int j = count; j < BLOCK; j++) weights[g][j] = 0.0f;
                for (int j = 0; j < BLOCK; j += LANES)
                    store(rounded[g] + j, load(weights[g] + j));
            }
            int i = 0;
            for (; i + PANEL * STEP <= dim; i += PANEL * STEP)
                add_panel<PANEL>(rounded, values, count, dim, i, sums, ahead);
            for (; i < dim; i += STEP) add_panel<1>(rounded, values, count, dim, i, sums, ahead);
        }

        // Channels from `start` on, two columns at a time: they are interleaved, so that one
        // instruction multiplies with a pair of weights. `sums` stay in the order that this gives.
        template <int WIDE>
        static void add_panel(const bf16 (*weights)[BLOCK], const Runs<bf16>& values,
                              int count, int dim, int start, float* sums, AheadOfRuns& ahead) {
            Floats low[G][WIDE], high[G][WIDE];
            float* first_sum = sums + start;
            const int width = padded(dim);
            for (int g = 0; g < G; g++)
                for (int n = 0; n < WIDE; n++) {
                    low[g][n] = load(first_sum + g * width + n * STEP);
                    high[g][n] = load(first_sum + g * width + n * STEP + LANES);
                }
            for (int run = 0; run * PAGE < count; run++) {
                const bf16* first = values.first[run] + start;
                Ahead& next = ahead.of[run];
                const int end = count - run * PAGE < PAGE ? count : (run + 1) * PAGE;
                for (int j = run * PAGE; j < end; j += 2, first += 2 * dim) {
                    const bf16* second = j + 1 < end ? first + dim : first;
                    __m512bh pair[G];
                    for (int g = 0; g < G; g++) {
                        int32_t both;
                        memcpy(&both, weights[g] + j, sizeof both);
                        pair[g] = (__m512bh)_mm512_set1_epi32(both);
                    }
                    for (int n = 0; n < WIDE; n++) {
                        const int left = WIDE > 1 ? STEP : dim - start;
                        __m512i a = load_step(first + n * STEP, left);
                        __m512i b = load_step(second + n * STEP, left);
                        __m512bh even = (__m512bh)_mm512_unpacklo_epi16(a, b);
                        __m512bh odd = (__m512bh)_mm512_unpackhi_epi16(a, b);
                        for (int g = 0; g < G; g++) {
                            low[g][n] = _mm512_dpbf16_ps(low[g][n], pair[g], even);
                            high[g][n] = _mm512_dpbf16_ps(high[g][n], pair[g], odd);
                        }
                        next.fetch(2);
                    }
                }
            }
            for (int g = 0; g < G; g++)
                for (int n = 0; n < WIDE; n++) {
                    store(first_sum + g * width + n * STEP, low[g][n]);
                    store(first_sum + g * width + n * STEP + LANES, high[g][n]);
                }
        }
    };

    static void finish(const float* sums, float factor, int dim, bf16* out) {
        const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21,
                                                22, 23);
        const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28,
                                                 29, 30, 31);
        for (int i = 0; i < dim; i += STEP)
            store_step(sums + i, factor, dim - i, first, second, out + i);
    }
};

#endif

// bf16 products in float32, for CPUs that multiply pairs more slowly or not at all. Each step of
// channels becomes its even channels and then the odd ones.
struct Widened {
    typedef bf16 Element;
    typedef float Query;
    static constexpr int WIDENED = MAX_STATE + LANES * MAX_GROUP;
    static int stride(int dim) { return padded(dim); }
    static const float* prepare(const bf16* queries, int heads, int dim, float* widened) {
        for (int head = 0; head < heads; head++)
            for (int i = 0; i < dim; i += STEP) {
                const __m512i step = load_step(queries + head * dim + i, dim - i);
                float* out = widened + head * padded(dim) + i;
                store(out, half_of(step, false));
                store(out + LANES, half_of(step, true));
            }
        return widened;
    }

    template <int G>
    struct Products {
        static constexpr int PANEL = G < 4 ? 4 : 2;  // steps of values side by side

        static void scores(const float* q, const Runs<bf16>& keys, int count, int dim,
                           float (*out)[BLOCK], AheadOfRuns& ahead) {
            if (dim == 128)
                scores_of<128>(q, keys, count, 128, out, ahead);
            else
                scores_of<0>(q, keys, count, dim, out, ahead);
        }

        template <int DIM>
        static void scores_of(const float* q, const Runs<bf16>& keys, int count, int given,
                              float (*out)[BLOCK], AheadOfRuns& ahead) {
            const int dim = DIM ? DIM : given, width = padded(dim);
            for (int start = 0; start < count; start += LANES) {
                Floats partial[G][LANES];
                const bf16* columns = keys.first[start / PAGE];
                Ahead& next = ahead.of[start / PAGE];
                for (int j = 0; j < LANES; j++) {
                    const int column = start + j < count ? j : count - 1 - start;
                    const bf16* key = columns + (int64_t)column * dim;
                    Floats even[G], odd[G];
                    for (int g = 0; g < G; g++) even[g] = odd[g] = zeros();
                    for (int i = 0; i < dim; i += STEP) {
                        const __m512i step = load_step(key + i, dim - i);
                        const Floats first = half_of(step, false), second = half_of(step, true);
                        for (int g = 0; g < G; g++) {
                            even[g] = fma(load(q + g * width + i), first, even[g]);
                            odd[g] = fma(load(q + g * width + i + LANES), second, odd[g]);
                        }
                        next.fetch(1);
                    }
                    for (int g = 0; g < G; g++) partial[g][j] = even[g] + odd[g];
                }
                for (int g = 0; g < G; g++) store(out[g] + start, sums_of_16(partial[g]));
            }
        }

        static void add_values(float (*weights)[BLOCK], const Runs<bf16>& values, int count, int dim,
                               float* sums, AheadOfRuns& ahead) {
            int i = 0;
            for (; i + PANEL * STEP <= dim; i += PANEL * STEP)
                add_panel<PANEL>(weights, values, count, dim, i, sums, ahead);
            for (; i < dim; i += STEP) add_panel<1>(weights, values, count, dim, i, sums, ahead);
        }

        template <int WIDE>
        static void add_panel(const float (*weights)[BLOCK], const Runs<bf16>& values,
                              int count, int dim, int start, float* sums, AheadOfRuns& ahead) {
            Floats total[G][WIDE][2];
            const int width = padded(dim);
            for (int g = 0; g < G; g++)
                for (int n = 0; n < WIDE; n++)
                    for (int odd = 0; odd < 2; odd++)
                        total[g][n][odd] = load(sums + g * width + start + n * STEP + odd * LANES);
            for (int j = 0; j < count; j++) {
                const bf16* column = values.first[j / PAGE] + (int64_t)(j % PAGE) * dim + start;
                for (int n = 0; n < WIDE; n++) {
                    const int left = WIDE > 1 ? STEP : dim - start;
                    const __m512i step = load_step(column + n * STEP, left);
                    for (int odd = 0; odd < 2; odd++) {
                        const Floats value = half_of(step, odd);
                        for (int g = 0; g < G; g++)
                            total[g][n][odd] = fma(all(weights[g][j]), value, total[g][n][odd]);
                    }
                    ahead.of[j / PAGE].fetch(1);
                }
            }
            for (int g = 0; g < G; g++)
                for (int n = 0; n < WIDE; n++)
                    for (int odd = 0; odd < 2; odd++)
                        store(sums + g * width + start + n * STEP + odd * LANES,
                              total[g][n][odd]);
        }
    };

    static void finish(const float* sums, float factor, int dim, bf16* out) {
        const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7,
                                                23);
        const __m512i second = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14,
                                                 30, 15, 31);
        for (int i = 0; i < dim; i += STEP)
            store_step(sums + i, factor, dim - i, first, second, out + i);
    }
};

#endif

}  // namespace
