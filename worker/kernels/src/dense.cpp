// Products with bf16 weights as checkpoints have them, [outputs, columns].
//
// A unit of work is UNIT outputs of one matrix, whose weights lie together in memory. A thread
// fetches the weights of its next unit while it computes the current one: memory is read in order
// and without a pause. Small batches take as long as that reading.
#include "dense_rows.h"
#include "dense_tiles.h"
#include "program.h"

#include <cstdlib>
#include <vector>

namespace dense {

namespace {

// Unit `index` of those of all matrices.
Unit unit_at(const Dense& d, int64_t index) {
    Unit unit{d.matrices, 0, 0, 0};
    for (; index >= d.units(); index -= d.units(), unit.matrix++) {
        unit.row += unit.matrix->rows;
        unit.tile += d.tiles(unit.matrix->rows);
    }
    unit.output = std::min(index * UNIT, d.outputs - UNIT);
    return unit;
}

}  // namespace

// y = x Wᵀ in bf16 with the rows of x that belong to each of `matrices` matrices, in order: `counts`
// each, or all `rows` to the only one if it is null. `pairs`: whether vectors multiply pairs of bf16
// instead of float32, where they can do both. `few`: rows of a matrix up to which they are not packed,
// where they can be. `scratch`: 64-byte aligned float32 [rows, columns + 16], with the rows of each
// matrix rounded up to 16.
EXPORT void dense_linear(const bf16* x, int64_t stride, int64_t rows, int64_t columns,
                         const bf16* const* weights, const int64_t* counts, int64_t matrices, bf16* y,
                         int64_t outputs, void* scratch, int pairs, int few, int threads) {
    std::vector<Matrix> used;
    int64_t next = 0, most = 0;
    for (int64_t m = 0; m < matrices; m++) {
        const int64_t count = counts ? counts[m] : rows;
        if (count) used.push_back({weights[m], count});
        most = std::max(most, count);
    }
    Dense d{x, stride, columns, used.data(), y, outputs, (uint32_t*)scratch,
            nullptr, few, true, false};
    const bool in_float32 = MAY_USE_FLOAT32 && !(pairs && HAS_PAIRS);
    d.pairs = HAS_PAIRS && !in_float32;
    d.streams = is_streamed(y, rows, outputs * (int64_t)sizeof(bf16));
    const bool packs = most > d.few && may_pack();
    if (in_float32 && !packs && rows > TOGETHER) d.widened = (float*)scratch;
#pragma omp parallel num_threads(threads)
    {
        float* wide = nullptr;  // the weights of a unit
        if (packs && in_float32)
            wide = (float*)aligned_alloc(LINE, UNIT * widened_stride(columns) * sizeof(float));
        if (d.widened) widen_rows(d, rows);
        if (packs) pack(d, (int)used.size());
        if (packs) begin_packed();
        hand_out((int64_t)used.size() * d.units(), next, [&](int64_t index, int64_t following) {
            const Unit unit = unit_at(d, index);
            Ahead ahead{};
            if (following >= 0) {
                ahead.at = (const char*)unit_at(d, following).weights(d);
                ahead.end = ahead.at + d.unit_bytes();
            }
            if (packs && unit.matrix->rows > d.few)
                unit_of_packed(d, unit, wide, ahead);
            else if (in_float32)
                unit_in_float32(d, unit, ahead);
            else
                unit_by_vectors(d, unit, ahead);
        });
        if (d.streams) _mm_sfence();
        if (packs) end_packed();
        free(wide);
    }
}
FROM_WORDS(dense_linear)

}  // namespace dense
