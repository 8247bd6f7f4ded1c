// The matrix tiles of a processor: eight registers of 16 rows of 64 bytes, and products of pairs of bfloat16.

#pragma once

#include "kernels.h"

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__) && defined(__AMX_BF16__) && defined(__linux__)
#define HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int TILE = 16, MAX_TILES = 4;

struct TileConfig {
    uint8_t palette = 1, start_row = 0, unused[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

// Tiles 0 to 3 and 5 have `rows` rows, tile 4 has 16. Leaves the tiles as it found them: PyTorch's own kernels rely on
// theirs.
struct Tiles {
    alignas(64) TileConfig before, own;
    explicit Tiles(int rows = TILE) {
        _tile_storeconfig(&before);
        for (int i = 0; i < MAX_TILES + 2; ++i) own.bytes[i] = 64, own.rows[i] = i == MAX_TILES ? TILE : rows;
        _tile_loadconfig(&own);
    }
    ~Tiles() { before.palette ? _tile_loadconfig(&before) : _tile_release(); }
};

// Linux gives the tiles to those who ask.
inline bool has_tiles() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    static const bool granted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return granted;
}

}  // namespace

#endif
