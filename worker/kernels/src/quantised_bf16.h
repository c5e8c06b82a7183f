// Products of many rows of bf16, which the matrix unit multiplies with weights that are dequantised
// to bf16.
#pragma once

#include "quantised_formats.h"
#include "tiles.h"
#include "work.h"

namespace quantised {

namespace {

constexpr int WIDE_PANELS = 2;  // that it multiplies together

INLINE int64_t bf16_panel_bytes(int64_t columns) { return columns * PANEL * (int64_t)sizeof(bf16); }

#ifdef __AMX_BF16__

// One block of a panel as bf16: pairs of channels of the 16 rows side by side.
template <int F>
INLINE void widen(const Panel& panel, int64_t b, uint8_t* out) {
    const Scales scales = scales_of<F>(panel, b);
    for (int c = 0; c < QUADS; c++) {
        const Ints bytes = quad<F>(panel, b, c);
        const int part = scaled_parts<F>() == 2 ? c / (QUADS / 2) : 0;
        __m512i channels[QUAD];
        for (int i = 0; i < QUAD; i++) {
            Ints byte = _mm512_and_si512(_mm512_srli_epi32(bytes, 8 * i), ints(255));
            Floats value = (to_floats(byte) - all(offset<F>())) * scales.scale[part];
            if (has_minima<F>()) value = value - scales.minimum[part];
            channels[i] = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(value));
        }
        for (int i = 0; i < QUAD; i += 2)
            _mm512_store_si512(out + (c * QUAD + i) / 2 * VECTOR,
                               either(channels[i], _mm512_slli_epi32(channels[i + 1], 16)));
    }
}

// 2 · TILE_ROWS rows of x by two panels of bf16 → sums [panel][row][output].
INLINE void multiply_bf16(const bf16* x, int64_t stride, const uint8_t* first,
                          const uint8_t* second, int64_t blocks, float* sums) {
    constexpr int TILE = TILE_ROWS * PANEL;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t b = 0; b < blocks; b++) {
        _tile_loadd(4, x + b * BLOCK, stride * sizeof(bf16));
        _tile_loadd(6, first + b * BLOCK * PANEL * sizeof(bf16), VECTOR);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, x + TILE_ROWS * stride + b * BLOCK, stride * sizeof(bf16));
        _tile_dpbf16ps(1, 5, 6);
        _tile_loadd(7, second + b * BLOCK * PANEL * sizeof(bf16), VECTOR);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, VECTOR);
    _tile_stored(1, sums + TILE, VECTOR);
    _tile_stored(2, sums + 2 * TILE, VECTOR);
    _tile_stored(3, sums + 3 * TILE, VECTOR);
}

// See FormatKernels.
template <int F>
void multiply_in_bf16(const Part& part, int64_t first, int count, const bf16* x, int64_t stride,
                      int64_t columns, const Output& y, uint8_t* memory) {
    constexpr int ROWS = 2 * TILE_ROWS;
    const int64_t blocks = columns / BLOCK, size = bf16_panel_bytes(columns);
    alignas(64) float sums[2 * ROWS * PANEL];
    for (int p = 0; p < count; p++) {
        const Panel panel = panel_at(part.packed, SHAPES[F], blocks, first + p);
        for (int64_t b = 0; b < blocks; b++)
            widen<F>(panel, b, memory + p * size + b * BLOCK * PANEL * sizeof(bf16));
    }
    for (int64_t row = 0; row < part.rows; row += ROWS) {
        const int64_t at = row + ROWS <= part.rows ? row : part.rows - ROWS;  // the last rows overlap
        multiply_bf16(x + at * stride, stride, memory, memory + (count - 1) * size, blocks, sums);
        for (int p = 0; p < count; p++)
            for (int r = 0; r < ROWS; r++)
                y.put(at + r, first + p, load(sums + (p * ROWS + r) * PANEL));
    }
}

INLINE void begin_bf16() { configure_tiles(VECTOR, TILE_ROWS); }
INLINE void end_bf16() { _tile_release(); }

#else

template <int F>
void multiply_in_bf16(const Part&, int64_t, int, const bf16*, int64_t, int64_t, const Output&,
                      uint8_t*) {}
INLINE void begin_bf16() {}
INLINE void end_bf16() {}

#endif

}  // namespace

}  // namespace quantised
