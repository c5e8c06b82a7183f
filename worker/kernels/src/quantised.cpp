// Products with GGUF's quantised weights, in integers.
//
// Activations are rounded to int8 with one scale per token and 32 channels, so a row's result does
// not depend on the others. Weights stay quantised, but are packed at load: 16 output rows (a panel)
// lie side by side, four channels of each row adjacent, as integer dot products read them. All
// tiles add in the same order: a row's result is the same, bit for bit, in every batch. With AMX, many
// rows of bf16 (prefill) are not rounded, but multiplied with weights that are dequantised to bf16.
//
// This part rounds and hands out the work. What differs between formats is in their libraries.
#include "program.h"
#include "quantised_bf16.h"
#include "quantised_tiles.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <vector>

namespace quantised {

namespace {

const FormatKernels* used_formats[FORMATS];  // null: its library has not been loaded

// Whole numbers within ±127 as bytes.
#ifdef AVX512
INLINE void store_bytes(int8_t* p, Floats x) {
    _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
}
#else
INLINE void store_bytes(int8_t* p, Floats x) {
    __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high));
    words = _mm256_permute4x64_epi64(words, 0xd8);
    __m128i low = _mm256_castsi256_si128(words), high = _mm256_extracti128_si256(words, 1);
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(low, high));
}
#endif

// One block: int8 values, their scale and the sums of both halves. A block with NaN or infinity
// gets the scale NaN, which makes the row's products NaN.
template <typename T>
void round_block(const T* x, int8_t* values, float* scale, int32_t* sums, float* minus_sum) {
    Floats parts[2] = {load(x), load(x + LANES)};
    Floats strange = (parts[0] - parts[0]) + (parts[1] - parts[1]);
    float highest = largest(larger(magnitude(parts[0]), magnitude(parts[1])));
    bool finite = sum(strange) == 0.0f;
    float factor = finite && highest > 0 ? 127.0f / highest : 0.0f;
    *scale = finite ? highest / 127.0f : NAN;
    if (!(factor < INFINITY)) factor = 0.0f;  // all values are denormal: they become zero
    for (int h = 0; h < 2; h++) {
        Floats rounded = finite ? nearest(parts[h] * all(factor)) : zeros();
        store_bytes(values + h * LANES, rounded);
        sums[h] = (int32_t)sum(rounded);
    }
    *minus_sum = (float)-(sums[0] + sums[1]);
}

// The share of this thread of all rows.
template <typename T>
void round_rows(const T* x, int64_t stride, int64_t rows, const Rounded& out) {
    const int64_t blocks = out.blocks();
#pragma omp for schedule(static)
    for (int64_t at = 0; at < rows * blocks; at++)
        round_block(x + at / blocks * stride + at % blocks * BLOCK, out.values + at * BLOCK,
                    out.scales + at, out.sums + at * 2, out.minus_sums + at);
}

// The parts that have rows, with their units of work one after the other.
std::vector<Part> parts_of(const int64_t* table, int parts, const int64_t* counts, int64_t matrices,
                           int64_t rows, int64_t columns, int64_t wide_from, int threads) {
    std::vector<Part> found;
    int64_t row = 0, begin = 0;
    for (int64_t m = 0; m < matrices; m++) {
        const int64_t count = counts ? counts[m] : rows;
        int64_t output = 0;
        for (int i = 0; i < parts && count; i++) {
            const int64_t* facts = table + 3 * (m * parts + i);
            Part part{(FormatCode)facts[0], (const uint8_t*)facts[1], panels_of(facts[2]), row,
                      count, output, facts[2], count >= wide_from, 0, 0, begin};
            part.panel_bytes = panel_bytes(SHAPES[part.format], columns / BLOCK);
            part.together = part.widens ? WIDE_PANELS : PANELS;
            if (count < MANY)
                part.together = panels_of_few_rows(part.panel_bytes, part.panels, threads);
            output += facts[2];
            begin += part.units();
            found.push_back(part);
        }
        row += count;
    }
    return found;
}

const Part& part_of(const std::vector<Part>& parts, int64_t unit) {
    const auto later = [](int64_t unit, const Part& part) { return unit < part.begin; };
    return *std::prev(std::upper_bound(parts.begin(), parts.end(), unit, later));
}

}  // namespace

// `kernels`: from the library of the format, which stays loaded. Functions that take a format need it.
EXPORT void use_format(int format, const void* kernels) {
    used_formats[format] = (const FormatKernels*)kernels;
}

// Bytes of `rows` packed rows of `columns` channels.
EXPORT int64_t packed_bytes(int format, int64_t rows, int64_t columns) {
    return panels_of(rows) * panel_bytes(SHAPES[format], columns / BLOCK);
}

// The file's blocks of `rows` rows → `packed`.
EXPORT void pack_rows(int format, const uint8_t* blocks, uint8_t* packed, int64_t rows,
                      int64_t columns, int threads) {
    used_formats[format]->pack(blocks, packed, rows, columns, threads);
}
FROM_WORDS(pack_rows)

// out [rows, columns] = the rows with these numbers of a table in the file's blocks.
EXPORT void unpack_rows(int format, const uint8_t* table, const int64_t* numbers, void* out,
                        int64_t rows, int64_t columns, int type, int threads) {
    used_formats[format]->unpack_rows(table, numbers, out, rows, columns, type, threads);
}
FROM_WORDS(unpack_rows)

// y [rows, outputs] = x Wᵀ with the rows of x that belong to each of `matrices` matrices, in order:
// `counts` each, or all `rows` to the only one if it is null. A matrix is `parts` packed ones, one below
// the other; `table` holds the format, the packed rows and the number of outputs of each. `scratch`: 48
// bytes per row and block. `wide_from`: rows of bf16 from which the matrix unit multiplies in bf16, where
// there is one.
EXPORT void quantised_linear(const void* x, int64_t stride, int64_t rows, int64_t columns,
                             int type, const int64_t* table, int parts, const int64_t* counts,
                             int64_t matrices, void* y, int64_t y_stride, uint8_t* scratch,
                             int wide_from, int threads) {
    const int64_t blocks = rows * (columns / BLOCK);
    float* scales = (float*)(scratch + blocks * BLOCK);
    const Rounded rounded{(int8_t*)scratch, scales, (int32_t*)(scales + 2 * blocks),
                          scales + blocks, columns};
    const bool may_widen = type == BFLOAT16 && tiles_are_allowed();
    const std::vector<Part> used = parts_of(table, parts, counts, matrices, rows, columns,
                                            may_widen ? wide_from : INT64_MAX, threads);
    if (used.empty()) return;
    const int64_t units = used.back().begin + used.back().units();
    bool rounds = false, widens = false;
    int64_t bytes = 0;  // that a thread needs for dequantised or widened panels
    for (const Part& part : used) {
        (part.widens ? widens : rounds) = true;
        if (part.widens)
            bytes = std::max(bytes, WIDE_PANELS * bf16_panel_bytes(columns));
        else if (part.rows >= MANY)
            bytes = std::max(bytes, widened_bytes(columns / BLOCK));
    }
    int64_t next = 0;
    const bool streams =
        type == BFLOAT16 && is_streamed(y, rows, y_stride * (int64_t)sizeof(bf16));
#pragma omp parallel num_threads(threads)
    {
        if (rounds && type == FLOAT32)
            round_rows((const float*)x, stride, rows, rounded);
        else if (rounds)
            round_rows((const bf16*)x, stride, rows, rounded);
        uint8_t* memory = bytes ? (uint8_t*)aligned_alloc(LINE, bytes) : nullptr;
        if (widens) begin_bf16();
        hand_out(units, next, [&](int64_t unit, int64_t following) {
            const Part& part = part_of(used, unit);
            const Output out{y, y_stride, type, streams, part.row, part.output, part.outputs};
            Ahead ahead{};
            if (following >= 0) {
                const Part& then = part_of(used, following);
                ahead.at = (const char*)then.start(following);
                ahead.end = ahead.at + then.count(following) * then.panel_bytes;
            }
            const FormatKernels& kernels = *used_formats[part.format];
            if (part.widens)
                kernels.multiply_in_bf16(part, part.first(unit), part.count(unit),
                                         (const bf16*)x + part.row * stride, stride, columns, out,
                                         memory);
            else
                kernels.multiply(part, part.first(unit), part.count(unit), rounded.from(part.row),
                                 out, memory, ahead);
        });
        if (streams) _mm_sfence();
        if (widens) end_bf16();
        free(memory);
    }
}
FROM_WORDS(quantised_linear)

}  // namespace quantised
