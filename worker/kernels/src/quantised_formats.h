// How the packed formats lie in memory, and what is read from them: the weights of a panel as
// unsigned bytes, their offset and their scales.
#pragma once

#include "quantised.h"
#include "quantised_ints.h"

namespace {

// Bytes that a panel has per block of 32 channels, or with `per_super` per 256 channels.
struct Shape {
    int quants;   // low 4 bits, or all 8
    int high;     // further bits
    int scales;   // one byte per row, or two
    int minima;   // one byte per row
    int halves;   // fp16 numbers per row: d, dmin
    bool per_super;  // whether the halves belong to 256 channels
    int values;   // channels of a block in the file
    int bytes;    // of a block in the file
};

constexpr Shape SHAPES[] = {
    {256, 0, 0, 0, 1, false, BLOCK, 18},      // Q4_0
    {512, 0, 0, 0, 1, false, BLOCK, 34},      // Q8_0
    {256, 0, 16, 16, 2, true, SUPER, 144},    // Q4_K
    {256, 64, 16, 16, 2, true, SUPER, 176},   // Q5_K
    {256, 128, 32, 0, 1, true, SUPER, 210},   // Q6_K
    {256, 0, 16, 0, 0, false, BLOCK, 17},     // MXFP4
};

// The parts of one panel, one after the other.
struct Panel {
    const uint8_t *quants, *high, *scales, *minima;
    const uint16_t *d, *dmin;
};

INLINE int64_t panel_bytes(const Shape& s, int64_t blocks) {
    int64_t groups = s.per_super ? blocks / PER_SUPER : blocks;
    int64_t bytes = blocks * (s.quants + s.high + s.scales + s.minima);
    bytes += groups * s.halves * PANEL * (int64_t)sizeof(uint16_t);
    return (bytes + VECTOR - 1) / VECTOR * VECTOR;
}

INLINE Panel panel_at(const uint8_t* packed, const Shape& s, int64_t blocks, int64_t index) {
    Panel p;
    p.quants = packed + index * panel_bytes(s, blocks);
    p.high = p.quants + blocks * s.quants;
    p.scales = p.high + blocks * s.high;
    p.minima = p.scales + blocks * s.scales;
    p.d = (const uint16_t*)(p.minima + blocks * s.minima);
    p.dmin = p.d + (s.per_super ? blocks / PER_SUPER : blocks) * PANEL;
    return p;
}

// Twice the values of a 4-bit float (e2m1), with an offset of 12 (OCP Microscaling Formats, 1.0).
alignas(16) constexpr uint8_t MXFP4_VALUES[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                                  12, 11, 10, 9,  8,  6,  4,  0};

// Quad `c` of block `b` of a panel: unsigned bytes.
template <int F>
INLINE Ints quad(const Panel& p, int64_t b, int c) {
    if (F == Q8_0) return load_bytes(p.quants + b * 512 + c * VECTOR);
    Ints both = load_bytes(p.quants + b * 256 + (c % 4) * VECTOR);
    Ints low = masked(c < 4 ? both : right(both, 4), 0x0f);
    if (F == Q5_K) {  // bit c of each byte
        Ints bits = load_bytes(p.high + b * 64);
        return either(low, masked(c < 4 ? left(bits, 4 - c) : right(bits, c - 4), 0x10));
    }
    if (F == Q6_K) {  // two bits per byte and quad, four quads per vector
        Ints bits = load_bytes(p.high + b * 128 + c / 4 * VECTOR);
        int at = c % 4 * 2;
        return either(low, masked(at < 4 ? left(bits, 4 - at) : right(bits, at - 4), 0x30));
    }
    return F == MXFP4 ? look_up(low, MXFP4_VALUES) : low;
}

// What is subtracted from every weight, as a multiple of its scale.
template <int F>
constexpr int offset() {
    return F == Q4_0 ? 8 : F == Q6_K ? 32 : F == MXFP4 ? 12 : F == Q8_0 && !SIGNED_BYTES ? 128 : 0;
}

// The weight scales of one block of a panel: of its halves for Q6_K, or scale and minimum.
struct Scales {
    Floats first, second;
};

template <int F>
INLINE Scales scales_of(const Panel& p, int64_t block) {
    if (F == Q4_0 || F == Q8_0) return {load_f16(p.d + block * PANEL), zeros()};
    if (F == MXFP4) return {half_power_of_2(p.scales + block * PANEL), zeros()};
    Floats d = load_f16(p.d + block / PER_SUPER * PANEL);
    if (F == Q6_K) {
        const int8_t* scales = (const int8_t*)p.scales + block * 2 * PANEL;
        return {d * load_s8(scales), d * load_s8(scales + PANEL)};
    }
    Floats dmin = load_f16(p.dmin + block / PER_SUPER * PANEL);
    return {d * load_u8(p.scales + block * PANEL), dmin * load_u8(p.minima + block * PANEL)};
}

}  // namespace
