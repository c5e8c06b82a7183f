// What the products with quantised weights share: see quantised.cpp.
#pragma once

#include "simd.h"

#include <type_traits>

namespace {

constexpr int BLOCK = 32;   // channels with one activation scale
constexpr int SUPER = 256;  // channels of a block of the K formats
constexpr int PER_SUPER = SUPER / BLOCK;
constexpr int PANEL = LANES;      // output rows side by side
constexpr int QUAD = 4;           // channels of one integer dot product
constexpr int VECTOR = PANEL * QUAD;  // bytes of one quad of a panel
constexpr int QUADS = BLOCK / QUAD;

enum FormatCode { Q4_0, Q8_0, Q4_K, Q5_K, Q6_K };  // the codes in quantised.py
template <FormatCode F>
using Code = std::integral_constant<FormatCode, F>;

// Rounded activations of all rows.
struct Rounded {
    int8_t* values;     // [rows, columns]
    float* scales;      // [rows, blocks]
    int32_t* sums;      // [rows, blocks, 2]: of the values of each half block
    float* minus_sums;  // [rows, blocks]: of the whole block, negated
    int64_t columns;

    int64_t blocks() const { return columns / BLOCK; }
    Rounded from(int64_t row) const {
        const int64_t at = row * blocks();
        return {values + row * columns, scales + at, sums + 2 * at, minus_sums + at, columns};
    }
};

// Where results go: y [rows, outputs] of either type, with `stride` elements between rows.
struct Output {
    void* y;
    int64_t stride;
    int type;
    bool streams;       // whether whole lines in bf16 are written past the caches
    int64_t first = 0;  // output of this matrix

    Output from(int64_t row) const {
        const int64_t bytes = type == FLOAT32 ? sizeof(float) : sizeof(bf16);
        return {(char*)y + row * stride * bytes, stride, type, streams};
    }
    int64_t at(int64_t row, int64_t panel) const { return row * stride + first + panel * PANEL; }
    void put(int64_t row, int64_t panel, Floats x) const {
        if (type == FLOAT32)
            store((float*)y + at(row, panel), x);
        else
            store((bf16*)y + at(row, panel), x);
    }
    // Whether this panel and the next are whole lines to be written past the caches, by `stream`.
    bool streams_from(int64_t panel) const { return streams && at(0, panel) % (2 * PANEL) == 0; }
    void stream(int64_t row, int64_t panel, Floats x, Floats next) const {
        ::stream((bf16*)y + at(row, panel), x, next);
    }
};

}  // namespace
