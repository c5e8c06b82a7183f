// Rows of x that are multiplied with bf16 weights as they are: sums of products of channels.
#pragma once

#include "dense.h"

#include <algorithm>
#include <type_traits>

namespace dense {

namespace {

constexpr int TOGETHER = 5;  // most rows that one pass over the weights multiplies

#ifdef PAIRS
constexpr int PART = STEP;  // channels of one multiplication
typedef __m512bh Part;
INLINE Part load_part(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
INLINE Floats add_product(Floats total, Part a, Part b) { return _mm512_dpbf16_ps(total, a, b); }
#else
constexpr int PART = LANES;
typedef Floats Part;
INLINE Part load_part(const bf16* p) { return load(p); }
INLINE Floats add_product(Floats total, Part a, Part b) { return fma(a, b, total); }
#endif

#ifdef AVX512
constexpr int TOTALS = 16;  // vectors that are summed together
INLINE void store_sums(float* out, const Floats* totals) { store(out, sums_of_16(totals)); }
#else
constexpr int TOTALS = 4;
INLINE void store_sums(float* out, const Floats* totals) {
    for (int i = 0; i < TOTALS; i++) out[i] = sum(totals[i]);
}
#endif

// y of a unit and R rows ← the sums of `totals` [output][row].
template <int R>
void put_totals(const Dense& d, const Unit& unit, int64_t row, const Floats* totals) {
    float sums[UNIT * R];
    for (int i = 0; i < UNIT * R; i += TOTALS) store_sums(sums + i, totals + i);
    for (int r = 0; r < R; r++) {
        float outputs[UNIT];
        for (int n = 0; n < UNIT; n++) outputs[n] = sums[n * R + r];
        bf16* y = d.y + (unit.row + row + r) * d.outputs + unit.output;
        for (int n = 0; n < UNIT; n += LANES) store(y + n, load(outputs + n));
    }
}

// The outputs of R rows, one after the other, so that weights are read in order. All R add in the
// same order.
template <int R>
void vector_rows(const Dense& d, const Unit& unit, int64_t row, Ahead& ahead) {
    const bf16 *x = d.x + (unit.row + row) * d.stride, *weights = unit.weights(d);
    Floats totals[UNIT * R];
    for (int n = 0; n < UNIT; n++, weights += d.columns) {
        Floats output[R];
        for (int r = 0; r < R; r++) output[r] = zeros();
        for (int64_t k = 0; k < d.columns; k += STEP) {
            for (int64_t at = k; at < k + STEP; at += PART) {
                const Part weight = load_part(weights + at);
                for (int r = 0; r < R; r++)
                    output[r] = add_product(output[r], load_part(x + r * d.stride + at), weight);
            }
            ahead.fetch(1);
        }
        for (int r = 0; r < R; r++) totals[n * R + r] = output[r];
    }
    put_totals<R>(d, unit, row, totals);
}

// In pairs of bf16, or else in float32.
void unit_by_vectors(const Dense& d, const Unit& unit, Ahead& ahead) {
    int64_t row = 0, left = unit.matrix->rows;
    for (; left > TOGETHER; row += 4, left -= 4) vector_rows<4>(d, unit, row, ahead);
    switch (left) {
        case 1: return vector_rows<1>(d, unit, row, ahead);
        case 2: return vector_rows<2>(d, unit, row, ahead);
        case 3: return vector_rows<3>(d, unit, row, ahead);
        case 4: return vector_rows<4>(d, unit, row, ahead);
        case 5: return vector_rows<5>(d, unit, row, ahead);
    }
}

// ---- In float32 -----------------------------------------------------------------------------------

#if defined(AVX512) && !defined(__AMX_BF16__)

constexpr bool MAY_USE_FLOAT32 = true;
constexpr int OUTPUTS = 4, MOST_ROWS = 6;  // of a tile: as many sums as there are registers for
constexpr int64_t CHUNK = 512;  // channels of six rows that stay in the first-level cache

INLINE Floats half_step(const bf16* step, bool odd) {
    return half_of(_mm512_loadu_si512(step), odd);
}
INLINE Floats half_step(const float* step, bool odd) { return load(step + odd * LANES); }

// The outputs of R rows of x in either type, with `stride` elements between rows. All rows add in the
// same order. Of each step and OUTPUTS, one part in `tiles` of the next unit's lines is fetched.
template <int R, typename X>
void rows_in_float32(const Dense& d, const Unit& unit, int64_t row, const X* x, int64_t stride,
                     Ahead& ahead, int tiles) {
    int due = 0;  // lines, multiplied by `tiles`
    // Rows in bf16 are so few that they stay there anyway; their weights are read in order.
    const int64_t together = std::is_same_v<X, bf16> ? d.columns : CHUNK;
    Floats totals[UNIT * R];
    for (auto& total : totals) total = zeros();
    for (int64_t begin = 0; begin < d.columns; begin += together) {
        const int64_t end = std::min(begin + together, d.columns);
        const bf16* weights = unit.weights(d);
        for (int first = 0; first < UNIT; first += OUTPUTS, weights += OUTPUTS * d.columns) {
            Floats sums[OUTPUTS][R];
            for (int n = 0; n < OUTPUTS; n++)
                for (int r = 0; r < R; r++) sums[n][r] = totals[(first + n) * R + r];
            for (int64_t k = begin; k < end; k += STEP) {
                for (int odd = 0; odd < 2; odd++) {
                    Floats weight[OUTPUTS];
                    for (int n = 0; n < OUTPUTS; n++)
                        weight[n] = half_step(weights + n * d.columns + k, odd);
                    for (int r = 0; r < R; r++) {
                        const Floats channels = half_step(x + r * stride + k, odd);
                        for (int n = 0; n < OUTPUTS; n++)
                            sums[n][r] = fma(channels, weight[n], sums[n][r]);
                    }
                }
                for (due += OUTPUTS; due >= tiles; due -= tiles) ahead.fetch(1);
            }
            for (int n = 0; n < OUTPUTS; n++)
                for (int r = 0; r < R; r++) totals[(first + n) * R + r] = sums[n][r];
        }
    }
    put_totals<R>(d, unit, row, totals);
}

// `x`: the rows of the unit's matrix.
template <typename X>
void tiles_in_float32(const Dense& d, const Unit& unit, const X* x, int64_t stride, Ahead& ahead) {
    const int64_t rows = unit.matrix->rows;
    // What is fetched is spread over all tiles, so that memory and arithmetic units are always busy.
    const int tiles = (int)((rows + MOST_ROWS - 1) / MOST_ROWS);
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t row = tile * rows / tiles;
        const X* first = x + row * stride;
        switch ((tile + 1) * rows / tiles - row) {
            case 1: rows_in_float32<1>(d, unit, row, first, stride, ahead, tiles); break;
            case 2: rows_in_float32<2>(d, unit, row, first, stride, ahead, tiles); break;
            case 3: rows_in_float32<3>(d, unit, row, first, stride, ahead, tiles); break;
            case 4: rows_in_float32<4>(d, unit, row, first, stride, ahead, tiles); break;
            case 5: rows_in_float32<5>(d, unit, row, first, stride, ahead, tiles); break;
            case 6: rows_in_float32<6>(d, unit, row, first, stride, ahead, tiles); break;
        }
    }
}

void unit_in_float32(const Dense& d, const Unit& unit, Ahead& ahead) {
    const int64_t stride = widened_stride(d.columns);
    if (d.widened)
        tiles_in_float32(d, unit, d.widened + unit.row * stride, stride, ahead);
    else
        tiles_in_float32(d, unit, d.x + unit.row * d.stride, d.stride, ahead);
}

// Widens this thread's share of `rows` rows of x, and waits for the others. Each step of a row becomes
// its even channels and then the odd ones.
void widen_rows(const Dense& d, int64_t rows) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        float* out = d.widened + row * widened_stride(d.columns);
        for (int64_t k = 0; k < d.columns; k += STEP)
            for (int odd = 0; odd < 2; odd++)
                store(out + k + odd * LANES, half_step(d.x + row * d.stride + k, odd));
    }
}

#else

// AVX2 has no pairs, and AMX needs no float32.
constexpr bool MAY_USE_FLOAT32 = false;
void widen_rows(const Dense&, int64_t) {}
void unit_in_float32(const Dense&, const Unit&, Ahead&) {}

#endif

}  // namespace

}  // namespace dense
