// Rows of x that are packed side by side, 16 together, for products with bf16 weights: by the matrix
// unit, or by vectors whose lanes are rows, so that nothing is summed across a register.
#pragma once

#include "dense.h"
#include "tiles.h"

namespace dense {

namespace {

#ifdef AVX512

constexpr int64_t TILE = STEP / 2 * TILE_ROWS;  // pairs of channels of one step of a tile

// One step of up to TILE_ROWS rows of x: pairs of channels of all rows side by side, or else single
// channels in float32.
INLINE void pack_step(const Dense& d, const bf16* x, int64_t rows, uint32_t* out) {
    Floats pairs[TILE_ROWS];  // of each row, and transposed of each pair of channels
    for (int r = 0; r < TILE_ROWS; r++)
        pairs[r] = r < rows ? _mm512_loadu_ps(x + r * d.stride) : zeros();
    transpose(pairs);
    for (int pair = 0; pair < STEP / 2; pair++) {
        const __m512i both = _mm512_castps_si512(pairs[pair]);
        if (d.pairs) {
            _mm512_store_si512(out + pair * TILE_ROWS, both);
        } else {
            store((float*)out + 2 * pair * TILE_ROWS, half_of(both, false));
            store((float*)out + (2 * pair + 1) * TILE_ROWS, half_of(both, true));
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

// y of a unit and up to 16 rows ← sums [output][row]. Pairs of outputs are transposed: a row is one line.
INLINE void put_tile(const float* sums, int64_t rows, bf16* y, int64_t stride, bool streams) {
    const __m512i interleaved = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19,
        3, 18, 2, 17, 1, 16, 0);
    Floats pairs[TILE_ROWS];  // of outputs, and transposed the rows
    for (int n = 0; n < TILE_ROWS; n++) {
        const float* sum = sums + 2 * n * TILE_ROWS;
        const __m512i both = rounded(load(sum), load(sum + TILE_ROWS));
        pairs[n] = _mm512_castsi512_ps(_mm512_permutexvar_epi16(interleaved, both));
    }
    transpose(pairs);
    for (int64_t r = 0; r < rows && r < TILE_ROWS; r++, y += stride) {
        if (streams)
            _mm512_stream_ps((float*)y, pairs[r]);
        else
            _mm512_storeu_ps(y, pairs[r]);
    }
}

#endif

#ifdef __AMX_BF16__

constexpr int MOST_TILES = 2;  // of rows, multiplied together

bool may_pack() { return tiles_are_allowed(); }
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

bool may_pack() { return true; }
void begin_packed() {}
void end_packed() {}

template <int T>
constexpr int outputs_together() { return T == 1 ? 16 : 8; }  // as many sums as there are registers for

#ifdef PAIRS

// The same by vectors: each pair of weights by all rows of a tile.
template <int T>
INLINE void multiply(const bf16* weights, const uint32_t* x, int64_t columns, Ahead& ahead,
                     float* sums) {
    constexpr int N = outputs_together<T>();
    const int64_t steps = columns / STEP;
    // Where outputs lie 4 KiB apart, the same channels of all are in one set of the first-level cache,
    // which has less than 16 ways: each pair of channels would be fetched again.
    alignas(LINE) bf16 copied[T == 1 ? N : 1][STEP];
    for (int first = 0; first < UNIT; first += N, weights += N * columns) {
        Floats totals[N][T];
        for (int n = 0; n < N; n++)
            for (int t = 0; t < T; t++) totals[n][t] = zeros();
        for (int64_t i = 0; i < steps; i++) {
            if (T == 1)
                for (int n = 0; n < N; n++) memcpy(copied[n], weights + n * columns + i * STEP, LINE);
            for (int pair = 0; pair < STEP / 2; pair++) {
                Part rows[T];
                for (int t = 0; t < T; t++)
                    rows[t] = (Part)_mm512_load_si512(x + (t * steps + i) * TILE +
                                                      pair * TILE_ROWS);
                for (int n = 0; n < N; n++) {
                    int32_t two;
                    memcpy(&two, (T == 1 ? copied[n] : weights + n * columns + i * STEP) + 2 * pair,
                           sizeof two);
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

#endif

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
    const int64_t groups = (tiles + MOST_TILES - 1) / MOST_TILES;  // of nearly equal size
    for (int64_t group = 0; group < groups; group++) {
        const int64_t tile = group * tiles / groups;
        const int64_t together = (group + 1) * tiles / groups - tile;
        const uint32_t* x = d.packed + (unit.tile + tile) * size;
        if (together == 1)
            multiply<1>(weights, x, d.columns, ahead, sums);
        else if (together == 2)
            multiply<2>(weights, x, d.columns, ahead, sums);
        else
            multiply<MOST_TILES>(weights, x, d.columns, ahead, sums);
        for (int64_t t = 0; t < together; t++) {
            const int64_t row = (tile + t) * TILE_ROWS;
            bf16* y = d.y + (unit.row + row) * d.outputs + unit.output;
            put_tile(sums + t * UNIT * TILE_ROWS, rows - row, y, d.outputs, d.streams);
        }
    }
}

void unit_of_packed(const Dense& d, const Unit& unit, float* widened, Ahead& ahead) {
    const bf16* weights = unit.weights(d);
#ifdef PAIRS
    if (d.pairs) return multiply_tiles(d, unit, weights, ahead);
#endif
#ifndef __AMX_BF16__
    for (int n = 0; n < UNIT; n++)
        for (int64_t c = 0; c < d.columns; c += LANES)
            store(widened + n * widened_stride(d.columns) + c, load(weights + n * d.columns + c));
    multiply_tiles<float>(d, unit, widened, ahead);
#endif
}

#else

bool may_pack() { return false; }
void pack(const Dense&, int) {}
void begin_packed() {}
void end_packed() {}
void unit_of_packed(const Dense&, const Unit&, float*, Ahead&) {}

#endif

}  // namespace

}  // namespace dense
