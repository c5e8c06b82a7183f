// Products with bf16 weights as checkpoints have them, [outputs, columns].
//
// A unit of work is UNIT outputs of one matrix, whose weights lie together in memory. A thread
// fetches the weights of its next unit while it computes the current one: memory is read in order
// and without a pause. Small batches take as long as that reading.
#include "program.h"
#include "simd.h"
#include "tiles.h"
#include "work.h"

#include <algorithm>
#include <cstdlib>

namespace {

constexpr int UNIT = 32;  // outputs; dense.py checks that a matrix has as many
constexpr int STEP = 32;  // channels; columns are a multiple, dense.py checks it
constexpr int TOGETHER = 5;  // most rows that are multiplied as they are in one pass over the weights

// One matrix, and the rows that are multiplied with it.
struct Matrix {
    const bf16* weight;  // [outputs, columns]
    int64_t rows;
};

struct Dense {
    const bf16* x;         // [rows of all matrices, columns], with `stride` elements between rows
    int64_t stride, columns;
    const Matrix* matrices;
    bf16* y;  // [rows of all matrices, outputs]
    int64_t outputs;
    uint32_t* packed;  // rows of x side by side, see `pack_step`
    int64_t few;       // up to so many rows of a matrix are multiplied as they are
    bool pairs;        // whether packed ones are multiplied in pairs of bf16, or else in float32

    int64_t units() const { return (outputs + UNIT - 1) / UNIT; }
    int64_t steps() const { return columns / STEP; }
    // Tiles of packed rows that a matrix needs.
    int64_t tiles(int64_t rows) const { return rows > few ? (rows + LANES - 1) / LANES : 0; }
    int64_t unit_bytes() const { return UNIT * columns * (int64_t)sizeof(bf16); }
};

// Outputs [output, output + UNIT) of a matrix. The last unit begins earlier instead of being smaller.
struct Unit {
    const Matrix* matrix;
    int64_t output, row, tile;  // row and tile: the first of the matrix

    const bf16* weights(const Dense& d) const { return matrix->weight + output * d.columns; }
};

// ---- Vectors -------------------------------------------------------------------------------------

#ifdef AVX512

constexpr int TOTALS = 16;    // vectors that are summed together
constexpr int PART = STEP;    // channels of one multiplication
typedef __m512bh Part;
INLINE Part load_part(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
INLINE Floats add_product(Floats total, Part a, Part b) { return _mm512_dpbf16_ps(total, a, b); }
INLINE void store_sums(float* out, const Floats* totals) { store(out, sums_of_16(totals)); }

#else

constexpr int TOTALS = 4;
constexpr int PART = LANES;
typedef Floats Part;
INLINE Part load_part(const bf16* p) { return load(p); }
INLINE Floats add_product(Floats total, Part a, Part b) { return fma(a, b, total); }
INLINE void store_sums(float* out, const Floats* totals) {
    for (int i = 0; i < TOTALS; i++) out[i] = sum(totals[i]);
}

#endif

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
    float sums[UNIT * R];  // [output][row]
    for (int i = 0; i < UNIT * R; i += TOTALS) store_sums(sums + i, totals + i);
    for (int r = 0; r < R; r++) {
        float outputs[UNIT];
        for (int n = 0; n < UNIT; n++) outputs[n] = sums[n * R + r];
        bf16* y = d.y + (unit.row + row + r) * d.outputs + unit.output;
        for (int n = 0; n < UNIT; n += LANES) store(y + n, load(outputs + n));
    }
}

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

// Elements from one output to the next of weights in float32: not a power of two, so that those of a
// channel lie in different sets of the first-level cache.
INLINE int64_t widened_stride(int64_t columns) { return columns + LANES; }

// ---- Packed rows ---------------------------------------------------------------------------------

#ifdef AVX512

constexpr int64_t TILE = STEP / 2 * TILE_ROWS;  // pairs of channels of one step of a tile

// The numbers of a vector of pairs in float32: of the even channels and of the odd ones.
INLINE __m512i even_channels(__m512i pairs) { return _mm512_slli_epi32(pairs, 16); }
INLINE __m512i odd_channels(__m512i pairs) {
    return _mm512_and_si512(pairs, _mm512_set1_epi32((int32_t)0xffff0000));
}

// One step of up to TILE_ROWS rows of x: pairs of channels of all rows side by side, or else single
// channels in float32.
INLINE void pack_step(const Dense& d, const bf16* x, int64_t rows, uint32_t* out) {
    const __mmask16 present = rows >= TILE_ROWS ? 0xffff : (__mmask16)((1 << rows) - 1);
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i offsets = _mm512_mullo_epi32(lanes, _mm512_set1_epi32((int32_t)d.stride));
    for (int pair = 0; pair < STEP / 2; pair++) {
        const __m512i both = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), present, offsets,
                                                         x + 2 * pair, sizeof(bf16));
        if (d.pairs) {
            _mm512_store_si512(out + pair * TILE_ROWS, both);
        } else {
            _mm512_store_si512(out + 2 * pair * TILE_ROWS, even_channels(both));
            _mm512_store_si512(out + (2 * pair + 1) * TILE_ROWS, odd_channels(both));
        }
    }
}

// Packs this thread's share of all rows, and waits for the others.
void pack(const Dense& d, int matrices) {
    const int64_t steps = d.steps(), size = d.pairs ? TILE : 2 * TILE;
    int64_t row = 0, tile = 0;
    for (int m = 0; m < matrices; m++) {
        const int64_t rows = d.matrices[m].rows;
#pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < d.tiles(rows) * steps; i++) {
            const int64_t first = i / steps * TILE_ROWS;
            pack_step(d, d.x + (row + first) * d.stride + i % steps * STEP, rows - first,
                      d.packed + (tile * steps + i) * size);
        }
        row += rows;
        tile += d.tiles(rows);
    }
#pragma omp barrier
}

// y of 16 outputs and up to 16 rows ← sums [output][row].
INLINE void put_tile(const float* sums, int64_t rows, bf16* y, int64_t stride) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i offsets = _mm512_slli_epi32(lanes, 4);
    for (int64_t r = 0; r < rows && r < TILE_ROWS; r++)
        store(y + r * stride, _mm512_i32gather_ps(offsets, sums + r, sizeof(float)));
}

#endif

#ifdef __AMX_BF16__

constexpr int MOST_TILES = 2;  // of rows, multiplied together

void begin_packed() { configure_tiles(LINE, TILE_ROWS); }
void end_packed() { _tile_release(); }

// sums [tile][output][row] of UNIT outputs of T tiles of rows, by the matrix unit.
template <int T>
INLINE void multiply(const bf16* weights, const uint32_t* x, int64_t columns, Ahead& ahead,
                     float* sums) {
    const int64_t steps = columns / STEP, bytes = columns * sizeof(bf16);
    const bf16* second = weights + TILE_ROWS * columns;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < steps; i++) {
        _tile_loadd(4, weights + i * STEP, bytes);
        _tile_loadd(6, x + i * TILE, LINE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, second + i * STEP, bytes);
        _tile_dpbf16ps(1, 5, 6);
        if (T == 2) {
            _tile_loadd(7, x + (steps + i) * TILE, LINE);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
        ahead.fetch(UNIT);
    }
    _tile_stored(0, sums, LINE);
    _tile_stored(1, sums + TILE, LINE);
    if (T == 2) {
        _tile_stored(2, sums + 2 * TILE, LINE);
        _tile_stored(3, sums + 3 * TILE, LINE);
    }
}

#elif defined(AVX512)

constexpr int MOST_TILES = 3;

void begin_packed() {}
void end_packed() {}

template <int T>
constexpr int outputs_together() { return T == 1 ? 16 : 8; }  // as many sums as there are registers for

// The same by vectors: each pair of weights by all rows of a tile.
template <int T>
INLINE void multiply(const bf16* weights, const uint32_t* x, int64_t columns, Ahead& ahead,
                     float* sums) {
    constexpr int N = outputs_together<T>();
    const int64_t steps = columns / STEP;
    for (int first = 0; first < UNIT; first += N, weights += N * columns) {
        Floats totals[N][T];
        for (int n = 0; n < N; n++)
            for (int t = 0; t < T; t++) totals[n][t] = zeros();
        for (int64_t i = 0; i < steps; i++) {
            for (int pair = 0; pair < STEP / 2; pair++) {
                Part rows[T];
                for (int t = 0; t < T; t++)
                    rows[t] = (Part)_mm512_load_si512(x + (t * steps + i) * TILE +
                                                      pair * TILE_ROWS);
                for (int n = 0; n < N; n++) {
                    int32_t two;
                    memcpy(&two, weights + n * columns + i * STEP + 2 * pair, sizeof two);
                    const Part weight = (Part)_mm512_set1_epi32(two);
                    for (int t = 0; t < T; t++)
                        totals[n][t] = add_product(totals[n][t], rows[t], weight);
                }
            }
            ahead.fetch<_MM_HINT_T0>(N);
        }
        for (int n = 0; n < N; n++)
            for (int t = 0; t < T; t++)
                store(sums + (t * UNIT + first + n) * TILE_ROWS, totals[n][t]);
    }
}

// The same with weights and rows in float32.
template <int T>
INLINE void multiply(const float* weights, const uint32_t* packed, int64_t columns, Ahead& ahead,
                     float* sums) {
    constexpr int N = outputs_together<T>();
    const int64_t stride = widened_stride(columns);
    const float* x = (const float*)packed;
    for (int first = 0; first < UNIT; first += N, weights += N * stride) {
        Floats totals[N][T];
        for (int n = 0; n < N; n++)
            for (int t = 0; t < T; t++) totals[n][t] = zeros();
        for (int64_t k = 0; k < columns; k += STEP) {
            for (int64_t c = k; c < k + STEP; c++) {
                Floats rows[T];
                for (int t = 0; t < T; t++) rows[t] = load(x + (t * columns + c) * TILE_ROWS);
                for (int n = 0; n < N; n++)
                    for (int t = 0; t < T; t++)
                        totals[n][t] = fma(rows[t], all(weights[n * stride + c]), totals[n][t]);
            }
            ahead.fetch<_MM_HINT_T0>(N);
        }
        for (int n = 0; n < N; n++)
            for (int t = 0; t < T; t++)
                store(sums + (t * UNIT + first + n) * TILE_ROWS, totals[n][t]);
    }
}

#endif

#ifdef AVX512

// `weights`: those of the unit, of either type.
template <typename W>
void multiply_tiles(const Dense& d, const Unit& unit, const W* weights, Ahead& ahead) {
    alignas(64) float sums[MOST_TILES * UNIT * TILE_ROWS];
    const int64_t rows = unit.matrix->rows, tiles = d.tiles(rows);
    const int64_t size = d.steps() * (d.pairs ? TILE : 2 * TILE);
    for (int64_t tile = 0; tile < tiles; tile += MOST_TILES) {
        const uint32_t* x = d.packed + (unit.tile + tile) * size;
        const int64_t together = std::min<int64_t>(tiles - tile, MOST_TILES);
        if (together == 1)
            multiply<1>(weights, x, d.columns, ahead, sums);
        else if (together == 2)
            multiply<2>(weights, x, d.columns, ahead, sums);
        else
            multiply<MOST_TILES>(weights, x, d.columns, ahead, sums);
        for (int64_t t = 0; t < together; t++) {
            const int64_t row = (tile + t) * TILE_ROWS;
            bf16* y = d.y + (unit.row + row) * d.outputs + unit.output;
            for (int half = 0; half < UNIT; half += LANES)
                put_tile(sums + (t * UNIT + half) * TILE_ROWS, rows - row, y + half, d.outputs);
        }
    }
}

void unit_of_packed(const Dense& d, const Unit& unit, float* widened, Ahead& ahead) {
    const bf16* weights = unit.weights(d);
    if (d.pairs) return multiply_tiles(d, unit, weights, ahead);
#ifndef __AMX_BF16__
    for (int n = 0; n < UNIT; n++)
        for (int64_t c = 0; c < d.columns; c += LANES)
            store(widened + n * widened_stride(d.columns) + c, load(weights + n * d.columns + c));
    multiply_tiles<float>(d, unit, widened, ahead);
#endif
}

constexpr bool PACKS = true;

#else

constexpr bool PACKS = false;
void pack(const Dense&, int) {}
void begin_packed() {}
void end_packed() {}
void unit_of_packed(const Dense&, const Unit&, float*, Ahead&) {}

#endif

// Unit `index` of those of all matrices.
Unit unit_at(const Dense& d, int64_t index) {
    Unit unit{d.matrices, 0, 0, 0};
    for (; index >= d.units(); index -= d.units(), unit.matrix++) {
        unit.row += unit.matrix->rows;
        unit.tile += d.tiles(unit.matrix->rows);
    }
    unit.output = std::min(index * UNIT, d.outputs - UNIT);
    return unit;
}

}  // namespace

// y = x Wᵀ in bf16 with the rows of x that belong to each of `matrices` matrices, in order. `table`
// holds the weights and the number of rows of each. `few` and `pairs`: see Dense; AMX has its own.
// `scratch`: 64-byte aligned, 2 bytes per column and row, or 4 without pairs, the rows of each
// matrix rounded up to 16.
EXPORT void dense_linear(const bf16* x, int64_t stride, int64_t columns, const int64_t* table,
                         int matrices, bf16* y, int64_t outputs, uint32_t* scratch, int few,
                         int pairs, int threads) {
#ifdef __AMX_BF16__
    few = TOGETHER;
    pairs = 1;
#endif
    const Dense d{x, stride, columns, (const Matrix*)table, y, outputs, scratch, few, pairs != 0};
    int64_t next = 0;
    bool packs = false;
    for (int m = 0; m < matrices; m++) packs |= d.matrices[m].rows > few;
    packs = packs && PACKS;
#ifdef __AMX_BF16__
    packs = packs && tiles_are_allowed();
#endif
#pragma omp parallel num_threads(threads)
    {
        float* widened = nullptr;
        if (packs && !pairs)
            widened = (float*)aligned_alloc(LINE, UNIT * widened_stride(columns) * sizeof(float));
        if (packs) pack(d, matrices);
        if (packs) begin_packed();
        hand_out(matrices * d.units(), next, [&](int64_t index, int64_t following) {
            const Unit unit = unit_at(d, index);
            Ahead ahead{};
            if (following >= 0) {
                ahead.at = (const char*)unit_at(d, following).weights(d);
                ahead.end = ahead.at + d.unit_bytes();
            }
            if (packs && unit.matrix->rows > few)
                unit_of_packed(d, unit, widened, ahead);
            else
                unit_by_vectors(d, unit, ahead);
        });
        if (packs) end_packed();
        free(widened);
    }
}
FROM_WORDS(dense_linear)
