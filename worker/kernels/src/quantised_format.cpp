// The kernels of one format of quantised weights, which the compiler's flags name: -DFORMAT=Q4_K.
#if defined(__GNUC__) && !defined(__clang__) && !defined(__AVX512BW__)
// With its 16 registers, or else GCC 12 keeps sums of tiles in memory: see docs/optimisations.md.
#pragma GCC optimize("no-tree-ter", "no-tree-reassoc")
#endif

#include "quantised_bf16.h"
#include "quantised_packing.h"
#include "quantised_rows.h"
#include "quantised_tiles.h"

// For `use_format`, see quantised.cpp.
EXPORT const void* format_kernels() {
    using namespace quantised;
    static constexpr FormatKernels KERNELS{pack<FORMAT>, multiply_panels<FORMAT>,
                                           multiply_in_bf16<FORMAT>, unpack_rows<FORMAT>};
    return &KERNELS;
}
