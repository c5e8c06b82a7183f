// How the packed formats lie in memory, and what is read from them: the weights of a panel as
// unsigned bytes, their offset and their scales.
#pragma once

#include "quantised.h"
#include "quantised_ints.h"

namespace quantised {

namespace {

// Bytes that a panel has per block of 32 channels, or with `per_super` per 256 channels.
struct Shape {
    int quants;   // low 2 or 4 bits, or all 8
    int high;     // further bits
    int scales;   // one byte per row, or two: of its halves, each 16 channels
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
    {256, 0, 0, 0, 2, false, BLOCK, 20},      // Q4_1
    {256, 64, 0, 0, 1, false, BLOCK, 22},     // Q5_0
    {256, 64, 0, 0, 2, false, BLOCK, 24},     // Q5_1
    {128, 0, 32, 0, 2, true, SUPER, 84},      // Q2_K: minima in the upper bits of scales
    {128, 64, 32, 0, 1, true, SUPER, 110},    // Q3_K
    {256, 0, 0, 0, 1, false, BLOCK, 18},      // IQ4_NL
    {256, 0, 16, 0, 1, true, SUPER, 136},     // IQ4_XS
};

// Bits of a weight in `quants` and in `high`.
template <int F> constexpr int low_bits() { return SHAPES[F].quants / VECTOR; }
template <int F> constexpr int high_bits() { return SHAPES[F].high / VECTOR; }
// Weights whose low bits share a byte.
template <int F> constexpr int fields() { return 8 / low_bits<F>(); }
// Parts of a block that have scales of their own, and whether they have minima.
template <int F> constexpr int scaled_parts() { return SHAPES[F].scales == 2 * PANEL ? 2 : 1; }
template <int F> constexpr bool has_minima() { return SHAPES[F].halves == 2; }
// Formats whose weights are numbers of 8 bits, possibly after a look-up.
template <int F>
constexpr bool is_8_bit() {
    return F == Q8_0 || F == IQ4_NL || F == IQ4_XS;
}
// The greatest number that `quad` returns.
template <int F>
constexpr int highest() {
    return is_8_bit<F>() ? 255 : F == MXFP4 ? 24 : (1 << (low_bits<F>() + high_bits<F>())) - 1;
}

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
// The values of IQ4_NL and IQ4_XS, with an offset of 128.
alignas(16) constexpr uint8_t IQ4_VALUES[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                                129, 141, 153, 166, 181, 197, 217, 241};

// x with its bits moved up, or down if `bits` is negative.
INLINE Ints moved(Ints x, int bits) { return bits >= 0 ? left(x, bits) : right(x, -bits); }

// Quad `c` of block `b` of a panel: unsigned bytes.
template <int F>
INLINE Ints quad(const Panel& p, int64_t b, int c) {
    constexpr Shape s = SHAPES[F];
    constexpr int LOW = low_bits<F>(), HIGH = high_bits<F>();
    Ints value = load_bytes(p.quants + b * s.quants + c % LOW * VECTOR);
    if (LOW < 8) value = masked(moved(value, -(c / LOW * LOW)), (1 << LOW) - 1);
    if (HIGH > 0) {  // HIGH bits per byte and quad
        constexpr int QUADS_PER_VECTOR = 8 / (HIGH > 0 ? HIGH : 1);
        Ints bits = load_bytes(p.high + b * s.high + c / QUADS_PER_VECTOR * VECTOR);
        bits = moved(bits, LOW - c % QUADS_PER_VECTOR * HIGH);
        value = either(value, masked(bits, ((1 << HIGH) - 1) << LOW));
    }
    if (F == MXFP4) return look_up(value, MXFP4_VALUES);
    return F == IQ4_NL || F == IQ4_XS ? look_up(value, IQ4_VALUES) : value;
}

// What is subtracted from every weight, as a multiple of its scale.
template <int F>
constexpr int offset() {
    if (is_8_bit<F>()) return SIGNED_BYTES ? 0 : 128;
    return F == Q4_0 ? 8 : F == Q5_0 ? 16 : F == Q6_K ? 32 : F == MXFP4 ? 12 : F == Q3_K ? 4 : 0;
}

// The scales of one block of a panel, or of each of its two parts, and what is subtracted from its
// scaled weights: only as many as the format has.
struct Scales {
    Floats scale[2], minimum[2];
};

template <int F>
INLINE Scales scales_of(const Panel& p, int64_t block) {
    constexpr Shape s = SHAPES[F];
    const uint8_t* scales = p.scales + block * s.scales;
    Scales out;
    if (F == MXFP4) {
        out.scale[0] = half_power_of_2(scales);
        return out;
    }
    const int64_t group = (s.per_super ? block / PER_SUPER : block) * PANEL;
    const Floats d = load_f16(p.d + group);
    const Floats dmin = has_minima<F>() ? load_f16(p.dmin + group) : zeros();
    if (s.scales == 0) {
        out.scale[0] = d;
        if (has_minima<F>()) out.minimum[0] = zeros() - dmin;  // the file's m is added
    } else if (s.minima) {
        out.scale[0] = d * load_u8(scales);
        out.minimum[0] = dmin * load_u8(p.minima + block * s.minima);
    } else {
        for (int h = 0; h < scaled_parts<F>(); h++) {
            if (F != Q2_K) {
                out.scale[h] = d * load_s8((const int8_t*)scales + h * PANEL);
            } else {
                out.scale[h] = d * load_nibbles(scales + h * PANEL, 0);
                out.minimum[h] = dmin * load_nibbles(scales + h * PANEL, 4);
            }
        }
    }
    return out;
}

}  // namespace

}  // namespace quantised
