// Products with bf16 weights as checkpoints have them, [outputs, columns].
//
// A unit of work is UNIT outputs of one matrix, whose weights lie together in memory. A thread
// fetches the weights of its next unit while it computes the current one: memory is read in order
// and without a pause. Small batches take as long as that reading.
#include "simd.h"
#include "tiles.h"
#include "work.h"

#include <algorithm>

namespace {

constexpr int UNIT = 32;  // outputs; dense.py checks that a matrix has as many
constexpr int STEP = 32;  // channels; columns are a multiple, dense.py checks it
// Rows that vectors multiply: up to 4 they are faster than the matrix unit, and a token and the 4
// guesses after it have the bits that they have one by one.
constexpr int FEW = 5;

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
    uint32_t* packed;  // x as the matrix unit reads it, see `pack_step`

    int64_t units() const { return (outputs + UNIT - 1) / UNIT; }
    int64_t steps() const { return columns / STEP; }
    int64_t unit_bytes() const { return UNIT * columns * (int64_t)sizeof(bf16); }
};

// Outputs [output, output + UNIT) of a matrix. The last unit begins earlier instead of being smaller.
struct Unit {
    const Matrix* matrix;
    int64_t output, row, tile;  // row and tile: the first of the matrix

    const bf16* weights(const Dense& d) const { return matrix->weight + output * d.columns; }
};

// Tiles of packed rows that a matrix needs.
INLINE int64_t tiles_of(int64_t rows) { return rows > FEW ? (rows + LANES - 1) / LANES : 0; }

// ---- Vectors -------------------------------------------------------------------------------------

#ifdef AVX512

constexpr int TOTALS = 16;    // sums in registers
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

// TOTALS / R outputs of R rows.
template <int R>
INLINE void vector_tile(const bf16* x, int64_t stride, const bf16* weights, int64_t columns,
                        bf16* y, int64_t y_stride, Ahead& ahead) {
    constexpr int N = TOTALS / R;
    Floats totals[TOTALS];
    for (int i = 0; i < TOTALS; i++) totals[i] = zeros();
    for (int64_t k = 0; k < columns; k += PART) {
        Part parts[R];
        for (int r = 0; r < R; r++) parts[r] = load_part(x + r * stride + k);
        for (int n = 0; n < N; n++) {
            const Part weight = load_part(weights + n * columns + k);
            for (int r = 0; r < R; r++)
                totals[n * R + r] = add_product(totals[n * R + r], parts[r], weight);
        }
        ahead.fetch(N);
    }
    float sums[LANES], row[LANES] = {};
    store_sums(sums, totals);
    for (int r = 0; r < R; r++) {
        for (int n = 0; n < N; n++) row[n] = sums[n * R + r];
        store_some(y + r * y_stride, load(row), N);
    }
}

template <int R>
int64_t vector_rows(const Dense& d, const Unit& unit, int64_t row, Ahead& ahead) {
    for (; row + R <= unit.matrix->rows; row += R)
        for (int n = 0; n < UNIT; n += TOTALS / R)
            vector_tile<R>(d.x + (unit.row + row) * d.stride, d.stride,
                           unit.weights(d) + n * d.columns, d.columns,
                           d.y + (unit.row + row) * d.outputs + unit.output + n, d.outputs, ahead);
    return row;
}

void unit_by_vectors(const Dense& d, const Unit& unit, Ahead& ahead) {
    int64_t row = 0;
#ifdef AVX512
    row = vector_rows<8>(d, unit, row, ahead);
#endif
    row = vector_rows<4>(d, unit, row, ahead);
    row = vector_rows<2>(d, unit, row, ahead);
    vector_rows<1>(d, unit, row, ahead);
}

// ---- Tiles of the matrix unit --------------------------------------------------------------------

#ifdef __AMX_BF16__

constexpr int64_t TILE = 256;  // 32-bit elements of a full register

// One step of up to TILE_ROWS rows of x: pairs of channels of all rows side by side.
INLINE void pack_step(const bf16* x, int64_t stride, int64_t rows, uint32_t* out) {
    const __mmask16 present = rows >= TILE_ROWS ? 0xffff : (__mmask16)((1 << rows) - 1);
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i offsets = _mm512_mullo_epi32(lanes, _mm512_set1_epi32((int32_t)stride));
    for (int pair = 0; pair < STEP / 2; pair++)
        _mm512_store_si512(out + pair * TILE_ROWS,
                           _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), present, offsets,
                                                       x + 2 * pair, sizeof(bf16)));
}

// Packs this thread's share of all rows, and waits for the others.
void start_tiles(const Dense& d, int matrices) {
    const int64_t steps = d.steps();
    int64_t row = 0, tile = 0;
    for (int m = 0; m < matrices; m++) {
        const int64_t rows = d.matrices[m].rows;
#pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < tiles_of(rows) * steps; i++) {
            const int64_t first = i / steps * TILE_ROWS;
            pack_step(d.x + (row + first) * d.stride + i % steps * STEP, d.stride, rows - first,
                      d.packed + (tile * steps + i) * TILE);
        }
        row += rows;
        tile += tiles_of(rows);
    }
#pragma omp barrier
    configure_tiles(LINE, TILE_ROWS);
}

void end_tiles() { _tile_release(); }

// y of 16 outputs and up to 16 rows ← sums [output][row].
INLINE void put_tile(const float* sums, int64_t rows, bf16* y, int64_t stride) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i offsets = _mm512_slli_epi32(lanes, 4);
    for (int64_t r = 0; r < rows && r < TILE_ROWS; r++)
        store(y + r * stride, _mm512_i32gather_ps(offsets, sums + r, sizeof(float)));
}

// UNIT outputs of one or two tiles of rows.
template <bool TWO>
INLINE void tile_pair(const bf16* weights, const uint32_t* x, int64_t columns, Ahead& ahead,
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
        if (TWO) {
            _tile_loadd(7, x + (steps + i) * TILE, LINE);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
        ahead.fetch(UNIT);
    }
    _tile_stored(0, sums, LINE);
    _tile_stored(1, sums + TILE, LINE);
    if (TWO) {
        _tile_stored(2, sums + 2 * TILE, LINE);
        _tile_stored(3, sums + 3 * TILE, LINE);
    }
}

void unit_by_tiles(const Dense& d, const Unit& unit, Ahead& ahead) {
    alignas(64) float sums[4 * TILE];
    const int64_t rows = unit.matrix->rows;
    for (int64_t row = 0; row < rows; row += 2 * TILE_ROWS) {
        const uint32_t* x = d.packed + (unit.tile + row / TILE_ROWS) * d.steps() * TILE;
        const bool two = rows - row > TILE_ROWS;
        if (two)
            tile_pair<true>(unit.weights(d), x, d.columns, ahead, sums);
        else
            tile_pair<false>(unit.weights(d), x, d.columns, ahead, sums);
        for (int i = 0; i < (two ? 4 : 2); i++) {
            const int64_t first = row + i / 2 * TILE_ROWS;
            put_tile(sums + i * TILE, rows - first,
                     d.y + (unit.row + first) * d.outputs + unit.output + i % 2 * LANES,
                     d.outputs);
        }
    }
}

#else

void start_tiles(const Dense&, int) {}
void end_tiles() {}
void unit_by_tiles(const Dense&, const Unit&, Ahead&) {}

#endif

// Unit `index` of those of all matrices.
Unit unit_at(const Dense& d, int64_t index) {
    Unit unit{d.matrices, 0, 0, 0};
    for (; index >= d.units(); index -= d.units(), unit.matrix++) {
        unit.row += unit.matrix->rows;
        unit.tile += tiles_of(unit.matrix->rows);
    }
    unit.output = std::min(index * UNIT, d.outputs - UNIT);
    return unit;
}

}  // namespace

// y = x Wᵀ in bf16 with the rows of x that belong to each of `matrices` matrices, in order. `table`
// holds the weights and the number of rows of each. `scratch`: 64-byte
// aligned, 2 bytes per column and row, the rows of each matrix rounded up to 16.
EXPORT void dense_linear(const bf16* x, int64_t stride, int64_t columns, const int64_t* table,
                         int matrices, bf16* y, int64_t outputs, uint32_t* scratch, int threads) {
    const Dense d{x, stride, columns, (const Matrix*)table, y, outputs, scratch};
    int64_t next = 0;
    bool tiles = false;
    for (int m = 0; m < matrices; m++) tiles |= d.matrices[m].rows > FEW;
    tiles = tiles && tiles_are_allowed();
#pragma omp parallel num_threads(threads)
    {
        if (tiles) start_tiles(d, matrices);
        hand_out(matrices * d.units(), next, [&](int64_t index, int64_t following) {
            const Unit unit = unit_at(d, index);
            Ahead ahead{};
            if (following >= 0) {
                ahead.at = (const char*)unit_at(d, following).weights(d);
                ahead.end = ahead.at + d.unit_bytes();
            }
            if (tiles && unit.matrix->rows > FEW)
                unit_by_tiles(d, unit, ahead);
            else
                unit_by_vectors(d, unit, ahead);
        });
        if (tiles) end_tiles();
    }
}
