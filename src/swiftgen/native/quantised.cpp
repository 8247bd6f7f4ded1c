// Matrix products with weights in 4 or 8 bits, in the blocks of GGUF files. Built and called by native.py.
//
// A weight is what the unpacked model has: code * scale + minimum, rounded to the model's dtype. Only the memory it
// is read from is smaller, and at a few rows reading weights is what a product costs. Each number of the result is
// one sum in an order of its own, whatever rows are computed beside it.

#include <omp.h>

#include <type_traits>

#include "kernels.h"

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define HAS_BF16_PRODUCTS
#include <immintrin.h>
#if defined(__AMX_BF16__) && defined(__linux__)
#define HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace {

constexpr int BLOCK = 32;  // weights along a row that share scale and minimum
constexpr int GROUP = 16;  // features whose blocks lie together

inline float half_to_float(uint16_t half) {  // finite numbers only
    const uint32_t bits = uint32_t(half & 0x7fff) << 13;
    float f;
    std::memcpy(&f, &bits, 4);
    f *= 0x1p112f;
    return half & 0x8000 ? -f : f;
}

inline float rounded(float x, const float*) { return x; }
inline float rounded(float x, const bf16*) {
    bf16 b;
    put(&b, x);
    return to_float(b);
}

// A block takes 16 bytes with 4 bits, the first half of its weights in the low ones, and 32 signed bytes with 8.
constexpr int code_bytes(int bits) { return BLOCK * bits / 8; }

// Where in `scales` the block b of a feature is; times `code_bytes` where in `codes`.
inline long place_of(const Weights& w, int feature, int b) {
    return ((long)(feature / GROUP) * (w.in / BLOCK) + b) * GROUP + feature % GROUP;
}

// F features times R rows, in plain vectors: sums[f * R + r].
template <class T, int F, int R>
inline void product(const float* x, const Weights& w, int feature, float* sums) {
    vec acc[F][R] = {};
    for (int b = 0; b < w.in / BLOCK; ++b)
        for (int f = 0; f < F; ++f) {
            const long place = place_of(w, feature + f, b);
            const uint8_t* codes = w.codes + place * code_bytes(w.bits);
            const float scale = half_to_float(w.scales[place]);
            float weights[BLOCK];
            if (w.bits == 4) {
                const float minimum = half_to_float(w.minima[place]);
                for (int i = 0; i < BLOCK / 2; ++i) {
                    weights[i] = rounded(float(codes[i] & 15) * scale + minimum, (T*)nullptr);
                    weights[i + BLOCK / 2] = rounded(float(codes[i] >> 4) * scale + minimum, (T*)nullptr);
                }
            } else {
                for (int i = 0; i < BLOCK; ++i)
                    weights[i] = rounded(float((int8_t)codes[i]) * scale, (T*)nullptr);
            }
            for (int i = 0; i < BLOCK; i += LANES)
                for (int r = 0; r < R; ++r)
                    acc[f][r] += load(weights + i) * load(x + (long)r * w.in + b * BLOCK + i);
        }
    for (int f = 0; f < F; ++f)
        for (int r = 0; r < R; ++r) sums[f * R + r] = sum(acc[f][r]);
}

#ifdef HAS_BF16_PRODUCTS

// The sums of 16 vectors.
inline __m512 sums_of(const __m512* v) {
    __m512 a[8], b[4], c[2];
    for (int i = 0; i < 8; ++i)
        a[i] = _mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]) + _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]);
    for (int i = 0; i < 4; ++i) {
        const __m512d x = _mm512_castps_pd(a[2 * i]), y = _mm512_castps_pd(a[2 * i + 1]);
        b[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y)) + _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
    }
    for (int i = 0; i < 2; ++i)
        c[i] = _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x88) +
               _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xdd);
    return _mm512_shuffle_f32x4(c[0], c[1], 0x88) + _mm512_shuffle_f32x4(c[0], c[1], 0xdd);
}

// The 32 weights of a block of 4 bits, its 16 possible values looked up by the codes. They come in the order in
// which one instruction can pick the codes out of a block that is read four times over: see `place_of`.
inline __m512i looked_up(const uint8_t* codes, float scale, float minimum) {
    const __m512 steps = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 values = _mm512_fmadd_ps(steps, _mm512_set1_ps(scale), _mm512_set1_ps(minimum));
    const __m512i table = _mm512_castsi256_si512((__m256i)_mm512_cvtneps_pbh(values));
    const __m512i four = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)codes));
    const long low = 0x0018001000080000, high = 0x001c0014000c0004, next = 0x0020002000200020;
    const __m512i shifts = _mm512_setr_epi64(low, low, low + next, low + next, high, high, high + next, high + next);
    const __m512i picked = _mm512_and_si512(_mm512_multishift_epi64_epi8(shifts, four), _mm512_set1_epi16(15));
    return _mm512_permutexvar_epi16(picked, table);
}

// Which four weights of a block of 4 bits stand at the i-th place.
constexpr int PLACES[8] = {0, 2, 1, 3, 4, 6, 5, 7};

inline __m512i scaled(const uint8_t* codes, float scale) {
    const __m512i low = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)codes));
    const __m512i high = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)codes + 1));
    const __m512 factor = _mm512_set1_ps(scale);
    return (__m512i)_mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(high) * factor, _mm512_cvtepi32_ps(low) * factor);
}

template <int BITS>
inline __m512i weights_of(const uint8_t* codes, float scale, float minimum) {
    return BITS == 4 ? looked_up(codes, scale, minimum) : scaled(codes, scale);
}

inline void as_floats(const uint16_t* halves, float* out) {  // 16 of them
    _mm512_storeu_ps(out, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)halves)));
}

// Scales and minima of GROUP features in float32, [in / BLOCK][GROUP].
struct Factors {
    std::vector<float> scales, minima;

    void read(const Weights& w, int feature) {
        const int count = w.in / BLOCK * GROUP;
        scales.resize(count);
        minima.resize(count);
        const long begin = place_of(w, feature, 0);
        for (int i = 0; i < count; i += GROUP) {
            as_floats(w.scales + begin + i, &scales[i]);
            if (w.bits == 4) as_floats(w.minima + begin + i, &minima[i]);
        }
    }
};

// F features times R rows, 16 in all: sums[f * R + r]. The values of `x` lie as `looked_up` gives the weights.
template <int BITS, int F, int R>
inline void product(const bf16* x, const Weights& w, int feature, const Factors& factors, float* sums) {
    static_assert(F * R == 16, "as many as sums_of takes");
    __m512 acc[F * R];
    for (int i = 0; i < F * R; ++i) acc[i] = _mm512_setzero_ps();
    const long group_bytes = (long)w.in / BLOCK * GROUP * code_bytes(BITS);
    const float *scales = &factors.scales[feature % GROUP], *minima = &factors.minima[feature % GROUP];
    for (int b = 0; b < w.in / BLOCK; ++b, scales += GROUP, minima += GROUP) {
        const uint8_t* codes = w.codes + place_of(w, feature, b) * code_bytes(BITS);
        // What the next group has at this place: few features at a time make strides that no processor foresees.
        for (int i = 0; i < F * code_bytes(BITS); i += 64) __builtin_prefetch(codes + group_bytes + i);
        __m512i weights[F];
        for (int f = 0; f < F; ++f) weights[f] = weights_of<BITS>(codes + f * code_bytes(BITS), scales[f], minima[f]);
        for (int r = 0; r < R; ++r) {
            const __m512i values = _mm512_loadu_si512(x + (long)r * w.in + b * BLOCK);
            for (int f = 0; f < F; ++f)
                acc[f * R + r] = _mm512_dpbf16_ps(acc[f * R + r], (__m512bh)weights[f], (__m512bh)values);
        }
    }
    _mm512_storeu_ps(sums, sums_of(acc));
}

#ifdef HAS_TILES

constexpr int TILE_ROWS = GROUP, MAX_TILES = 4;

// Tiles 0 to 3 are sums [16 features][columns], 4 is weights [16 features][32], 5 is values [16 pairs][columns].
struct TileConfig {
    uint8_t palette = 1, start_row = 0, unused[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

// Leaves the tiles as it found them: PyTorch's own kernels rely on theirs.
struct Tiles {
    alignas(64) TileConfig before, own;
    explicit Tiles(int columns) {
        _tile_storeconfig(&before);
        for (int i = 0; i < MAX_TILES + 2; ++i) own.bytes[i] = 4 * columns, own.rows[i] = TILE_ROWS;
        own.bytes[MAX_TILES] = 4 * TILE_ROWS;
        _tile_loadconfig(&own);
    }
    ~Tiles() { before.palette ? _tile_loadconfig(&before) : _tile_release(); }
};

// Linux gives the tiles to those who ask.
bool has_tiles() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    static const bool granted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return granted;
}

// 16 features times up to 64 rows. `x` is [tiles of rows][in / 2][16] pairs of values, `sums` [tiles][16][16].
template <int BITS, int NUM_TILES>
inline void tile_product(const uint32_t* x, const Weights& w, int feature, float* sums) {
    alignas(64) uint16_t weights[2][TILE_ROWS][BLOCK];
    alignas(64) float scales[GROUP], minima[GROUP];
    _tile_zero(0);
    if (NUM_TILES > 1) _tile_zero(1);
    if (NUM_TILES > 2) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int b = 0; b < w.in / BLOCK; ++b) {
        const long place = place_of(w, feature, b);
        as_floats(w.scales + place, scales);
        if (BITS == 4) as_floats(w.minima + place, minima);
        for (int f = 0; f < TILE_ROWS; ++f) {
            const uint8_t* codes = w.codes + (place + f) * code_bytes(BITS);
            _mm512_store_si512(weights[b % 2][f], weights_of<BITS>(codes, scales[f], minima[f]));
        }
        _tile_loadd(4, weights[b % 2], sizeof weights[0][0]);
        const uint32_t* values = x + (long)b * (BLOCK / 2) * TILE_ROWS;
        const long stride = (long)w.in / 2 * TILE_ROWS;
        _tile_loadd(5, values, 4 * TILE_ROWS);
        _tile_dpbf16ps(0, 4, 5);
        if (NUM_TILES > 1) {
            _tile_loadd(5, values + stride, 4 * TILE_ROWS);
            _tile_dpbf16ps(1, 4, 5);
        }
        if (NUM_TILES > 2) {
            _tile_loadd(5, values + 2 * stride, 4 * TILE_ROWS);
            _tile_dpbf16ps(2, 4, 5);
            _tile_loadd(5, values + 3 * stride, 4 * TILE_ROWS);
            _tile_dpbf16ps(3, 4, 5);
        }
    }
    constexpr int SIZE = TILE_ROWS * TILE_ROWS;
    _tile_stored(0, sums, 4 * TILE_ROWS);
    if (NUM_TILES > 1) _tile_stored(1, sums + SIZE, 4 * TILE_ROWS);
    if (NUM_TILES > 2) {
        _tile_stored(2, sums + 2 * SIZE, 4 * TILE_ROWS);
        _tile_stored(3, sums + 3 * SIZE, 4 * TILE_ROWS);
    }
}

template <int BITS, int NUM_TILES>
void multiply_tiles(const uint32_t* x, const Weights& w, bf16* out, int rows, int begin, int end) {
    alignas(64) float sums[NUM_TILES][TILE_ROWS][TILE_ROWS];
    for (int feature = begin; feature < end; feature += TILE_ROWS) {
        tile_product<BITS, NUM_TILES>(x, w, feature, sums[0][0]);
        for (int row = 0; row < rows; ++row)
            for (int f = 0; f < TILE_ROWS; ++f) {
                const float bias = w.bias ? to_float(((const bf16*)w.bias)[feature + f]) : 0.0f;
                put(out + (long)row * w.out + feature + f, sums[row / TILE_ROWS][f][row % TILE_ROWS] + bias);
            }
    }
}

// All rows, up to four tiles at a time.
void multiply_tiles(const uint32_t* x, const Weights& w, bf16* out, int rows, int begin, int end) {
    const Tiles tiles(rows < TILE_ROWS ? rows : TILE_ROWS);
    const long tile = (long)w.in / 2 * TILE_ROWS;
    for (; rows > 0; rows -= MAX_TILES * TILE_ROWS, x += MAX_TILES * tile, out += (long)MAX_TILES * TILE_ROWS * w.out) {
        const int now = std::min(rows, MAX_TILES * TILE_ROWS);
        if (now <= TILE_ROWS)
            w.bits == 4 ? multiply_tiles<4, 1>(x, w, out, now, begin, end)
                        : multiply_tiles<8, 1>(x, w, out, now, begin, end);
        else if (now <= 2 * TILE_ROWS)
            w.bits == 4 ? multiply_tiles<4, 2>(x, w, out, now, begin, end)
                        : multiply_tiles<8, 2>(x, w, out, now, begin, end);
        else
            w.bits == 4 ? multiply_tiles<4, 4>(x, w, out, now, begin, end)
                        : multiply_tiles<8, 4>(x, w, out, now, begin, end);
    }
}

// Values as the tiles take them, [tiles][in / 2][16] pairs: the i-th of `in / 2` pairs of all rows.
inline void pair_up(const bf16* x, const Weights& w, int rows, int i, uint32_t* out) {
    const int place = i % (BLOCK / 2), source = w.bits == 4 ? 2 * PLACES[place / 2] + place % 2 : place;
    const bf16* pair = x + 2 * (i - place + source);
    for (int first = 0; first < rows; first += TILE_ROWS, out += (long)w.in / 2 * TILE_ROWS)
        for (int row = first; row < std::min(rows, first + TILE_ROWS); ++row)
            std::memcpy(out + (long)i * TILE_ROWS + row - first, pair + (long)row * w.in, 4);
}

#endif

#endif

template <int F, int R, class X, class T>
inline void features(const X* x, const Weights& w, T* out, int begin, int end) {
    float sums[F * R];
#ifdef HAS_BF16_PRODUCTS
    static thread_local Factors factors;
#endif
    for (int feature = begin; feature < end; feature += F) {
#ifdef HAS_BF16_PRODUCTS
        if constexpr (std::is_same_v<X, bf16>) {
            if (feature % GROUP == 0) factors.read(w, feature);
            w.bits == 4 ? product<4, F, R>(x, w, feature, factors, sums)
                        : product<8, F, R>(x, w, feature, factors, sums);
        } else
#endif
            product<T, F, R>(x, w, feature, sums);
        for (int f = 0; f < F; ++f)
            for (int r = 0; r < R; ++r) {
                const float bias = w.bias ? to_float(((const T*)w.bias)[feature + f]) : 0.0f;
                put(out + (long)r * w.out + feature + f, sums[f * R + r] + bias);
            }
    }
}

// All rows for some features, as many rows at a time as SUMS allows.
template <int SUMS, class X, class T>
void multiply(const X* x, const Weights& w, T* out, int rows, int begin, int end) {
    const auto take = [&](auto number) {
        constexpr int R = decltype(number)::value;
        for (; rows >= R; rows -= R, x += (long)R * w.in, out += (long)R * w.out)
            features<SUMS / R, R>(x, w, out, begin, end);
    };
    take(std::integral_constant<int, 8>{});
    take(std::integral_constant<int, 4>{});
    take(std::integral_constant<int, 2>{});
    take(std::integral_constant<int, 1>{});
}

}  // namespace

extern "C" {

void swiftgen_multiply(int is_bf16, const void* x, const Weights* w, void* out, int rows, int num_threads,
                       float* scratch) {
    if (!rows) return;
#pragma omp parallel num_threads(num_threads)
    {
        const int groups = w->out / 16, thread = omp_get_thread_num(), threads = omp_get_num_threads();
        const int begin = groups * thread / threads * 16, end = groups * (thread + 1) / threads * 16;
        if (!is_bf16) {
            multiply<8>((const float*)x, *w, (float*)out, rows, begin, end);
#ifdef HAS_TILES
        } else if (has_tiles()) {
#pragma omp for schedule(static)
            for (int i = 0; i < w->in / 2; ++i) pair_up((const bf16*)x, *w, rows, i, (uint32_t*)scratch);
            multiply_tiles((const uint32_t*)scratch, *w, (bf16*)out, rows, begin, end);
#endif
        } else {
#ifdef HAS_BF16_PRODUCTS
#pragma omp for schedule(static)
            for (int row = 0; row < rows; ++row)
                for (int i = 0; i < w->in / 4; ++i) {
                    const int place = i % 8, source = w->bits == 4 ? PLACES[place] : place;
                    std::memcpy((bf16*)scratch + (long)row * w->in + 4 * i,
                                (const bf16*)x + (long)row * w->in + 4 * (i - place + source), 8);
                }
            multiply<16>((const bf16*)scratch, *w, (bf16*)out, rows, begin, end);
#else
#pragma omp for schedule(static)
            for (int row = 0; row < rows; ++row)
                as_floats((const bf16*)x + (long)row * w->in, w->in, scratch + (long)row * w->in);
            multiply<8>((const float*)scratch, *w, (bf16*)out, rows, begin, end);
#endif
        }
    }
}

}  // extern "C"
