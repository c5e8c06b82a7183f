// The matrix unit of AMX: permission, and the shape of its registers.
#pragma once

#include <cstdint>

constexpr int TILE_ROWS = 16;  // rows of a register

#ifdef __AMX_BF16__

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

constexpr int TILE_BYTES = 64;   // bytes of a row
constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // arch_prctl(2)

// The kernel grants the use of tile registers on request.
static inline bool tiles_are_allowed() {
    static const bool allowed = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return allowed;
}

// Registers 0 to 3 hold sums, 4 and 5 left factors, 6 and 7 right factors.
static inline void configure_tiles(int left_bytes, int right_rows) {
    struct alignas(64) {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = {};
    config.palette = 1;
    for (int i = 0; i < 8; i++) {
        config.bytes[i] = i == 4 || i == 5 ? left_bytes : TILE_BYTES;
        config.rows[i] = i < 6 ? TILE_ROWS : right_rows;
    }
    _tile_loadconfig(&config);
}

#else

static inline bool tiles_are_allowed() { return false; }

#endif
