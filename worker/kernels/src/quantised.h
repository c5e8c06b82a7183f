// What the products with quantised weights share: see quantised.cpp. The kernels of each format are a
// library of their own, which is compiled when a model needs it: see quantised_format.cpp.
#pragma once

#include "simd.h"
#include "work.h"

namespace quantised {

constexpr int BLOCK = 32;   // channels with one activation scale
constexpr int SUPER = 256;  // channels of a block of the K formats
constexpr int PER_SUPER = SUPER / BLOCK;
constexpr int PANEL = LANES;      // output rows side by side
constexpr int QUAD = 4;           // channels of one integer dot product
constexpr int VECTOR = PANEL * QUAD;  // bytes of one quad of a panel
constexpr int QUADS = BLOCK / QUAD;

INLINE int64_t panels_of(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }

enum FormatCode {  // the codes in quantised.py
    Q4_0, Q8_0, Q4_K, Q5_K, Q6_K, MXFP4, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, IQ4_NL, IQ4_XS, FORMATS
};
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
    bool streams;               // whether whole lines in bf16 are written past the caches
    int64_t first_row, output;  // where those of a part begin
    int64_t outputs;            // of the part: its last panel may have fewer than PANEL

    int64_t at(int64_t row, int64_t panel) const {
        return (first_row + row) * stride + output + panel * PANEL;
    }
    void put(int64_t row, int64_t panel, Floats x) const {
        const int count = (int)least(PANEL, outputs - panel * PANEL);
        if (type == FLOAT32)
            store_up_to((float*)y + at(row, panel), x, count);
        else
            store_up_to((bf16*)y + at(row, panel), x, count);
    }
    // Whether this panel and the next are whole lines to be written past the caches, by `stream`.
    bool streams_from(int64_t panel) const {
        return streams && at(0, panel) % (2 * PANEL) == 0 && (panel + 2) * PANEL <= outputs;
    }
    void stream(int64_t row, int64_t panel, Floats x, Floats next) const {
        ::stream((bf16*)y + at(row, panel), x, next);
    }
};

// One packed matrix, and the rows that are multiplied with it.
struct Part {
    FormatCode format;
    const uint8_t* packed;
    int64_t panels;
    int64_t row, rows;        // of x: the first one, and how many
    int64_t output, outputs;  // the first one, and how many
    bool widens;          // whether the matrix unit multiplies with weights that are dequantised
    int64_t panel_bytes;
    int64_t together;     // panels of a unit of work
    int64_t begin;        // the first of its units among those of all parts

    int64_t units() const { return (panels + together - 1) / together; }
    // Panels of a unit.
    int64_t first(int64_t unit) const { return (unit - begin) * together; }
    int count(int64_t unit) const { return (int)least(together, panels - first(unit)); }
    const uint8_t* start(int64_t unit) const { return packed + first(unit) * panel_bytes; }
};

// What the library of a format computes.
struct FormatKernels {
    // The file's blocks of `rows` rows → `packed`.
    void (*pack)(const uint8_t* blocks, uint8_t* packed, int64_t rows, int64_t columns, int threads);
    // y of `count` panels of a part from the one at `first` on. `memory`: for widened panels.
    void (*multiply)(const Part& part, int64_t first, int count, const Rounded& x, const Output& y,
                     uint8_t* memory, Ahead& ahead);
    // The same of rows in bf16, which are not rounded further, and of one or two panels. These are
    // dequantised to `memory` once for all rows.
    void (*multiply_in_bf16)(const Part& part, int64_t first, int count, const bf16* x,
                             int64_t stride, int64_t columns, const Output& y, uint8_t* memory);
    // out [rows, columns] = the rows with these numbers of a table in the file's blocks.
    void (*unpack_rows)(const uint8_t* table, const int64_t* numbers, void* out, int64_t rows,
                        int64_t columns, int type, int threads);
};

}  // namespace quantised
