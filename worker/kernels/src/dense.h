// What the products with bf16 weights share: see dense.cpp.
#pragma once

#include "simd.h"
#include "work.h"

namespace dense {

constexpr int UNIT = 32;  // outputs; dense.py checks that a matrix has as many
constexpr int STEP = 32;  // channels; columns are a multiple, dense.py checks it

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
    uint32_t* packed;  // rows of x side by side, see dense_tiles.h
    float* widened;    // or all rows of x in float32, see dense_rows.h; may be null
    int few;           // up to so many rows of a matrix are multiplied without packing them
    bool pairs;        // whether packed ones are multiplied in pairs of bf16, or else in float32
    bool streams;      // whether their y is written past the caches

    int64_t units() const { return (outputs + UNIT - 1) / UNIT; }
    int64_t steps() const { return columns / STEP; }
    // Tiles of packed rows that a matrix needs.
    int64_t tiles(int64_t rows) const { return rows > few ? (rows + LANES - 1) / LANES : 0; }
    int64_t unit_bytes() const { return UNIT * columns * (int64_t)sizeof(bf16); }
};

// Elements from one row or output in float32 to the next: not a power of two, so that the same channels
// lie in different sets of the first-level cache.
INLINE int64_t widened_stride(int64_t columns) { return columns + LANES; }

// Outputs [output, output + UNIT) of a matrix. The last unit begins earlier instead of being smaller.
struct Unit {
    const Matrix* matrix;
    int64_t output, row, tile;  // row and tile: the first of the matrix

    const bf16* weights(const Dense& d) const { return matrix->weight + output * d.columns; }
};

}  // namespace dense
