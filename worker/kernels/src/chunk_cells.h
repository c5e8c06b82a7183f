// Factors of the attention of chunks in cells of 32 bits: a float, or a pair of bf16, which one
// instruction multiplies and adds. An Intel CPU takes four times as long for that as for a product of
// floats, so that floats are faster there.
#pragma once

#include "simd.h"

namespace chunks {

namespace {

#ifdef AVX512
constexpr int SIDE = 8;  // keys or channels that are computed side by side
#else
constexpr int SIDE = 4;
#endif

template <typename T>
struct Single {
    typedef T Element;
    static constexpr int PER = 1;  // elements of a cell

    static Floats add_product(Floats total, Floats a, Floats b) { return fma(a, b, total); }
    // Up to 16 cells of a row that has `left` more elements.
    static Floats load_cells(const T* p, int) { return load(p); }
    static void copy(const T* row, int dim, float* cells) {
        for (int i = 0; i < dim; i += LANES) store(cells + i, load(row + i));
    }
    // Cells of 16 channels of PER rows.
    static Floats interleave(const T* const* rows, int channel) { return load(rows[0] + channel); }
    static Floats join(const Floats* weights) { return weights[0]; }
};

#ifdef PAIRS

struct Pairs {
    typedef bf16 Element;
    static constexpr int PER = 2;

    static Floats add_product(Floats total, Floats a, Floats b) {
        return _mm512_dpbf16_ps(total, (__m512bh)a, (__m512bh)b);
    }
    static Floats load_cells(const bf16* p, int left) {
        if (left >= 2 * LANES) return _mm512_loadu_ps(p);
        return (Floats)_mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i*)p));
    }
    static void copy(const bf16* row, int dim, float* cells) {
        memcpy(cells, row, dim * sizeof(bf16));
    }
    static Floats interleave(const bf16* const* rows, int channel) {
        const __m256i* first = (const __m256i*)(rows[0] + channel);
        __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(first));
        return (Floats)_mm512_or_si512(low, (__m512i)load(rows[1] + channel));
    }
    static Floats join(const Floats* weights) {
        __m512i low = _mm512_cvtepu16_epi32(rounded(weights[0]));
        __m512i high = _mm512_cvtepu16_epi32(rounded(weights[1]));
        return (Floats)_mm512_or_si512(low, _mm512_slli_epi32(high, 16));
    }
};

#endif

// totals[h][n] += Σ left[i][h] · right[n * side + i * step] over `count` cells.
template <typename Cells, int H>
INLINE void multiply(const float* left, const float* right, int64_t side, int64_t step, int count,
                     Floats (&totals)[H][SIDE]) {
    for (int i = 0; i < count; i++) {
        Floats lanes[H];
        for (int h = 0; h < H; h++) lanes[h] = load(left + (i * H + h) * LANES);
        for (int n = 0; n < SIDE; n++) {
            const Floats factor = all(right[n * side + i * step]);
            for (int h = 0; h < H; h++)
                totals[h][n] = Cells::add_product(totals[h][n], lanes[h], factor);
        }
    }
}

}  // namespace

}  // namespace chunks
