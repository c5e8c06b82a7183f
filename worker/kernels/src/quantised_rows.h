// Rows of a quantised table as floats: embeddings. The table is as in the file, since only the rows
// that are used are read. Values equal those of gguf.quants bit for bit.
#pragma once

#include "quantised_packing.h"

namespace quantised {

namespace {

constexpr int64_t SERIAL = 1 << 14;  // fewer values than this are not worth a second thread

INLINE float float_of(uint16_t half) { return _cvtsh_ss(half); }

// Half of 2^(e - 127): below 2 a denormal.
INLINE float half_power(uint8_t e) {
    const uint32_t bits = e < 2 ? 0x00200000u << e : (uint32_t)(e - 1) << 23;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// 16 weights without their offset, as they are multiplied by their scale.
template <int F>
INLINE Floats weights(const uint8_t* values) {
    if (F == IQ4_NL || F == IQ4_XS || F == MXFP4) {
        uint8_t found[LANES];
        for (int i = 0; i < LANES; i++)
            found[i] = F == MXFP4 ? MXFP4_VALUES[values[i]] : IQ4_VALUES[values[i]];
        return load_u8(found) - all(F == MXFP4 ? offset<F>() : 128);
    }
    return load_u8(values) - all(is_8_bit<F>() ? 128 : offset<F>());
}

// One block of the file.
template <int F, typename T>
void put_block(const uint8_t* source, T* out) {
    constexpr Shape s = SHAPES[F];
    constexpr int PARTS = s.scales ? s.values / BLOCK * scaled_parts<F>() : 1;
    constexpr int SIZE = s.values / PARTS;  // values of a part, which has a scale of its own
    Unpacked block;
    unpack(F, source, block);
    const float d = s.halves ? float_of(block.halves[0]) : 0.0f;
    const float dmin = has_minima<F>() ? float_of(block.halves[1]) : 0.0f;
    for (int part = 0; part < PARTS; part++) {
        const uint8_t sub = s.scales ? block.scales[part] : 0;
        float scale = d, minimum = 0.0f;
        if (F == MXFP4) {
            scale = half_power(sub);
        } else if (F == Q2_K) {
            scale = d * (sub & 15), minimum = dmin * (sub >> 4);
        } else if (s.minima) {
            scale = d * sub, minimum = dmin * block.minima[part];
        } else if (s.scales) {
            scale = d * (int8_t)sub;
        } else if (has_minima<F>()) {
            minimum = -dmin;  // the file's m is added
        }
        for (int i = part * SIZE; i < (part + 1) * SIZE; i += LANES) {
            Floats value = all(scale) * weights<F>(block.values + i);
            if (has_minima<F>()) value = value - all(minimum);
            store(out + i, value);
        }
    }
}

template <int F, typename T>
void put_rows(const uint8_t* table, const int64_t* numbers, T* out, int64_t rows, int64_t columns,
              int threads) {
    constexpr Shape s = SHAPES[F];
    const int64_t blocks = columns / s.values;
#pragma omp parallel for num_threads(threads) if (rows * columns >= SERIAL)
    for (int64_t row = 0; row < rows; row++) {
        const uint8_t* source = table + numbers[row] * blocks * s.bytes;
        for (int64_t b = 0; b < blocks; b++)
            put_block<F>(source + b * s.bytes, out + row * columns + b * s.values);
    }
}

// See FormatKernels.
template <int F>
void unpack_rows(const uint8_t* table, const int64_t* numbers, void* out, int64_t rows,
                 int64_t columns, int type, int threads) {
    if (type == FLOAT32)
        put_rows<F>(table, numbers, (float*)out, rows, columns, threads);
    else
        put_rows<F>(table, numbers, (bf16*)out, rows, columns, threads);
}

}  // namespace

}  // namespace quantised
