// Weights in few bits: the formats of GGUF files, as the kernels keep them.
//
// A format is one struct. 16 output features lie together (a group), and of them a unit of inputs, all in the order in
// which it is read:
//
//     scales   float16 [16]; in formats with parts, times the part's own
//     minima   the same, where the format has them: weight = code * scale - minimum, else (code - ZERO) * scale
//     parts    int8 [parts][16], then the factors of the minima, uint8 [blocks][16]
//     codes    of a block of 32 inputs eight vectors of 16 features x 4 consecutive inputs; 4 bits of two vectors lie in
//              the halves of 64 bytes, bits above those in planes behind them
//
// So a sum over inputs runs in the lanes of its feature, and nothing is transposed.

#pragma once

#include "kernels.h"
#include "structs.h"

namespace {

constexpr int GROUP = 16, BLOCK = 32, VECTOR = 4, VECTORS = BLOCK / VECTOR;

typedef uint8_t bytes __attribute__((vector_size(64)));   // [16 features][4 inputs]
typedef int32_t ints __attribute__((vector_size(64)));    // [16 features]
typedef uint32_t uints __attribute__((vector_size(64)));
typedef float floats __attribute__((vector_size(64)));
typedef uint16_t halves __attribute__((vector_size(32)));
typedef int8_t small __attribute__((vector_size(16)));
typedef uint8_t usmall __attribute__((vector_size(16)));

template <class V>
inline V read(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline float half_to_float(uint16_t half) {  // finite numbers only
    const uint32_t bits = uint32_t(half & 0x7fff) << 13;
    float f;
    std::memcpy(&f, &bits, 4);
    f *= 0x1p112f;
    return half & 0x8000 ? -f : f;
}
inline floats read_halves(const void* p) {
#ifdef __AVX512F__
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#else
    const uints wide = __builtin_convertvector(read<halves>(p), uints);
    return (floats)((wide & 0x7fff) << 13) * 0x1p112f * ((wide & 0x8000) != 0 ? floats{} - 1.0f : floats{} + 1.0f);
#endif
}

// BITS of a code; UNIT inputs have one pair of float16, and PART of them a factor of their own if PART < UNIT.
template <int BITS_, int ZERO_, bool HAS_MINIMA_, int UNIT_, int PART_>
struct Format {
    static constexpr int BITS = BITS_, ZERO = ZERO_, UNIT = UNIT_, PART = PART_;
    static constexpr bool HAS_MINIMA = HAS_MINIMA_, HAS_PARTS = PART < UNIT;
    static constexpr int PARTS = UNIT / PART, BLOCKS = UNIT / BLOCK, SCALES = BLOCK / PART;
    static constexpr int MINIMA_AT = 2 * GROUP, PARTS_AT = MINIMA_AT + (HAS_MINIMA ? 2 * GROUP : 0);
    static constexpr int FACTORS_AT = PARTS_AT + (HAS_PARTS ? PARTS * GROUP : 0);
    static constexpr int CODES_AT = FACTORS_AT + (HAS_PARTS && HAS_MINIMA ? BLOCKS * GROUP : 0);
    static constexpr int CODE_BYTES = GROUP * BLOCK * BITS / 8, UNIT_BYTES = CODES_AT + BLOCKS * CODE_BYTES;

    // Scales and minimum of the 16 features in a block; the minimum with its sign.
    struct Factors {
        floats scale[SCALES], minimum;
    };
    static inline Factors factors(const uint8_t* unit, int block) {
        Factors f;
        const floats scale = read_halves(unit);
        for (int i = 0; i < SCALES; ++i)
            f.scale[i] = HAS_PARTS ? scale * __builtin_convertvector(
                                                 read<small>(unit + PARTS_AT + (block * SCALES + i) * GROUP), floats)
                                   : scale;
        if (HAS_MINIMA) {
            f.minimum = read_halves(unit + MINIMA_AT);
            if (HAS_PARTS)
                f.minimum *= -__builtin_convertvector(read<usmall>(unit + FACTORS_AT + block * GROUP), floats);
        }
        return f;
    }

    // The codes of a block, without a sign.
    static inline void codes(const uint8_t* unit, int block, bytes out[VECTORS]) {
        const uint8_t* at = unit + CODES_AT + block * CODE_BYTES;
        if (BITS == 8) {
            for (int i = 0; i < VECTORS; ++i) out[i] = read<bytes>(at + 64 * i);
            return;
        }
        for (int i = 0; i < VECTORS; i += 2) {
            const uints pair = read<uints>(at + 32 * i);
            out[i] = (bytes)(pair & 0x0f0f0f0f);
            out[i + 1] = (bytes)((pair >> 4) & 0x0f0f0f0f);
        }
        if (BITS == 5) {
            const uints plane = read<uints>(at + 256);
            for (int i = 0; i < VECTORS; ++i)
                out[i] |= (bytes)((i < 4 ? plane << (4 - i) : plane >> (i - 4)) & 0x10101010);
        }
        if (BITS == 6)
            for (int i = 0; i < VECTORS; ++i) {
                const uints plane = read<uints>(at + 256 + 64 * (i / 4));
                const int shift = 4 - 2 * (i % 4);
                out[i] |= (bytes)((shift > 0 ? plane << shift : plane >> -shift) & 0x30303030);
            }
    }

    // Fetches what a thread reads a page later, a block's share: processors look ahead only to the end of a page.
    static inline void fetch_ahead(const uint8_t* unit, int block) {
        constexpr int PAGE = 4096, LINE = 64, SHARE = UNIT_BYTES / BLOCKS;
        for (int at = 0; at < SHARE; at += LINE) __builtin_prefetch(unit + block * SHARE + at + PAGE);
    }

    // The opposite of `codes`: one code to its place.
    static inline void put_code(uint8_t* unit, int block, int feature, int input, uint8_t code) {
        uint8_t* at = unit + CODES_AT + block * CODE_BYTES;
        const int vector = input / VECTOR, byte = feature * VECTOR + input % VECTOR;
        if (BITS == 8) {
            at[64 * vector + byte] = code;
            return;
        }
        at[64 * (vector / 2) + byte] |= (code & 15) << 4 * (vector % 2);
        if (BITS == 5) at[256 + byte] |= (code >> 4) << vector;
        if (BITS == 6) at[256 + 64 * (vector / 4) + byte] |= (code >> 4) << 2 * (vector % 4);
    }

    static void put_half(uint8_t* unit, int offset, int feature, const uint8_t* half) {
        std::memcpy(unit + offset + 2 * feature, half, 2);
    }
};

// The scales and minima of eight blocks, in 6 bits each (ggml's `get_scale_min_k4`).
inline void put_parts_k4(const uint8_t* packed, uint8_t* scales, uint8_t* minima) {
    for (int j = 0; j < 8; ++j) {
        const uint8_t* q = packed + j;
        scales[j * GROUP] = j < 4 ? q[0] & 63 : (q[4] & 15) | (q[-4] >> 6) << 4;
        minima[j * GROUP] = j < 4 ? q[4] & 63 : q[4] >> 4 | (q[0] >> 6) << 4;
    }
}

// Each format: its number in GGUF files, the bytes of a unit of one row there, and how that is put into a group.

struct Q4_0 : Format<4, 8, false, 32, 32> {
    static constexpr int TYPE = 2, ROW_BYTES = 18;
    static void put(const uint8_t* row, uint8_t* unit, int f) {
        put_half(unit, 0, f, row);
        for (int i = 0; i < 32; ++i) put_code(unit, 0, f, i, i < 16 ? row[2 + i] & 15 : row[2 + i - 16] >> 4);
    }
};

struct Q4_1 : Format<4, 0, true, 32, 32> {
    static constexpr int TYPE = 3, ROW_BYTES = 20;
    static void put(const uint8_t* row, uint8_t* unit, int f) {
        put_half(unit, 0, f, row);
        put_half(unit, MINIMA_AT, f, row + 2);
        for (int i = 0; i < 32; ++i) put_code(unit, 0, f, i, i < 16 ? row[4 + i] & 15 : row[4 + i - 16] >> 4);
    }
};

// The fifth bits of 32 codes follow each other.
inline uint8_t with_fifth(const uint8_t* bits, const uint8_t* nibbles, int i) {
    return (i < 16 ? nibbles[i] & 15 : nibbles[i - 16] >> 4) | (bits[i / 8] >> i % 8 & 1) << 4;
}

struct Q5_0 : Format<5, 16, false, 32, 32> {
    static constexpr int TYPE = 6, ROW_BYTES = 22;
    static void put(const uint8_t* row, uint8_t* unit, int f) {
        put_half(unit, 0, f, row);
        for (int i = 0; i < 32; ++i) put_code(unit, 0, f, i, with_fifth(row + 2, row + 6, i));
    }
};

struct Q5_1 : Format<5, 0, true, 32, 32> {
    static constexpr int TYPE = 7, ROW_BYTES = 24;
    static void put(const uint8_t* row, uint8_t* unit, int f) {
        put_half(unit, 0, f, row);
        put_half(unit, MINIMA_AT, f, row + 2);
        for (int i = 0; i < 32; ++i) put_code(unit, 0, f, i, with_fifth(row + 4, row + 8, i));
    }
};

struct Q8_0 : Format<8, 128, false, 32, 32> {
    static constexpr int TYPE = 8, ROW_BYTES = 34;
    static void put(const uint8_t* row, uint8_t* unit, int f) {
        put_half(unit, 0, f, row);
        for (int i = 0; i < 32; ++i) put_code(unit, 0, f, i, row[2 + i] ^ 0x80);
    }
};

struct Q4_K : Format<4, 0, true, 256, 32> {
    static constexpr int TYPE = 12, ROW_BYTES = 144;
    static void put(const uint8_t* row, uint8_t* unit, int f) {
        put_half(unit, 0, f, row);
        put_half(unit, MINIMA_AT, f, row + 2);
        put_parts_k4(row + 4, unit + PARTS_AT + f, unit + FACTORS_AT + f);
        for (int b = 0; b < 8; ++b)
            for (int i = 0; i < 32; ++i)
                put_code(unit, b, f, i, row[16 + b / 2 * 32 + i] >> 4 * (b % 2) & 15);
    }
};

struct Q5_K : Format<5, 0, true, 256, 32> {
    static constexpr int TYPE = 13, ROW_BYTES = 176;
    static void put(const uint8_t* row, uint8_t* unit, int f) {
        put_half(unit, 0, f, row);
        put_half(unit, MINIMA_AT, f, row + 2);
        put_parts_k4(row + 4, unit + PARTS_AT + f, unit + FACTORS_AT + f);
        for (int b = 0; b < 8; ++b)
            for (int i = 0; i < 32; ++i)
                put_code(unit, b, f, i,
                         (row[48 + b / 2 * 32 + i] >> 4 * (b % 2) & 15) | (row[16 + i] >> b & 1) << 4);
    }
};

struct Q6_K : Format<6, 32, false, 256, 16> {
    static constexpr int TYPE = 14, ROW_BYTES = 210;
    static void put(const uint8_t* row, uint8_t* unit, int f) {
        put_half(unit, 0, f, row + 208);
        for (int j = 0; j < 16; ++j) unit[PARTS_AT + j * GROUP + f] = row[192 + j];
        for (int i = 0; i < 256; ++i) {
            const int half = i / 128, quarter = i % 128 / 32, place = i % 32;
            const uint8_t low = row[64 * half + place + 32 * (quarter % 2)] >> 4 * (quarter / 2) & 15;
            const uint8_t high = row[128 + 32 * half + place] >> 2 * quarter & 3;
            put_code(unit, i / 32, f, i % 32, low | high << 4);
        }
    }
};

// Calls `use` with the format of this number; false if there is none.
template <class Use>
bool with_format(int type, Use use) {
    const auto is = [&](auto format) {
        if (type != format.TYPE) return false;
        use(format);
        return true;
    };
    return is(Q4_0{}) || is(Q4_1{}) || is(Q5_0{}) || is(Q5_1{}) || is(Q8_0{}) || is(Q4_K{}) || is(Q5_K{}) ||
           is(Q6_K{});
}

}  // namespace
