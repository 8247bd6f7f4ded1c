// Matrix products with weights in few bits: in integers (integer.h), or with the weights of the unpacked model (full.h).

#include "products.h"

#include <omp.h>

#include <memory>

#include <type_traits>
#include <utility>

#include "full.h"
#include "integer.h"

namespace {

template <class T>
inline void put_sums(const floats& sums, const Product& w, int feature, int row, void* out) {
    const long at = (long)row * w.out + feature;
    for (int f = 0; f < GROUP; f += LANES) {
        vec v;
        std::memcpy(&v, (const float*)&sums + f, sizeof v);
        if (w.bias) v += load((const T*)w.bias + feature + f);
        w.is_wide ? store((float*)out + at + f, v) : store((T*)out + at + f, v);
    }
}

// `sums(number, row, out)` for all rows, some numbers of them at a time, the largest first.
template <int... NUMBERS, class Sums, class Put>
inline void by_rows(std::integer_sequence<int, NUMBERS...>, int rows, Sums sums, Put put) {
    floats out[16];
    int row = 0;
    const auto take = [&](auto number) {
        for (; rows - row >= number(); row += number()) {
            sums(number, row, out);
            for (int r = 0; r < number(); ++r) put(row + r, out[r]);
        }
    };
    (take(std::integral_constant<int, NUMBERS>{}), ...);
}

// What there are registers for; each number is code of its own.
#if defined(__AVX512F__)
using IntegerRows = std::integer_sequence<int, 8, 5, 4, 3, 2, 1>;
#else
using IntegerRows = std::integer_sequence<int, 4, 2, 1>;
#endif
using FullRows = std::integer_sequence<int, 4, 2, 1>;

// Bytes that activations are rounded to here. With tiles a prompt is read twice as fast by the unpacked weights.
template <class T>
inline int activation_bytes(const Product& w, int rows) {
#ifdef HAS_TILES
    if (std::is_same_v<T, bf16> && rows >= PROMPT_ROWS && has_tiles()) return 0;
#endif
    return w.activation_bytes;
}

template <class F, class T>
void multiply_group(const Product& w, const uint8_t* group, const T* x, const void* prepared, void* out, int rows,
                    int feature) {
    const int in = w.in;
    const auto put = [&](int row, const floats& sums) { put_sums<T>(sums, w, feature, row, out); };
    if (const int bytes = activation_bytes<T>(w, rows)) {
        const Rounded rounded((void*)prepared, bytes * rows, in);
        by_rows(IntegerRows{}, rows, [&](auto number, int row, floats* sums) {
            constexpr int R = decltype(number)::value;
            integer_sums<F, R>(group, rounded, in, row, sums);
            if (bytes < 2) return;
            floats rest[R];
            integer_sums<F, R>(group, rounded, in, rows + row, rest);
            for (int r = 0; r < R; ++r) sums[r] += rest[r];
        }, put);
        return;
    }
#ifdef HAS_BF16_PRODUCTS
    if constexpr (std::is_same_v<T, bf16>) {
#ifdef HAS_TILES
        if (has_tiles()) {
            alignas(64) float sums[MAX_TILES][TILE][GROUP];
            for (int row = 0; row < rows; row += MAX_TILES * TILE) {
                const int now = std::min(rows - row, MAX_TILES * TILE);
                tile_sums<F>(group, (const bf16*)prepared + (long)row * in, in, (now + TILE - 1) / TILE, sums[0][0]);
                for (int r = 0; r < now; ++r) put(row + r, read<floats>(sums[r / TILE][r % TILE]));
            }
            return;
        }
#endif
        by_rows(FullRows{}, rows, [&](auto number, int row, floats* sums) {
            full_sums<F, decltype(number)::value, bf16>(group, x + (long)row * in, in, sums);
        }, put);
        return;
    }
#endif
    by_rows(FullRows{}, rows, [&](auto number, int row, floats* sums) {
        full_sums<F, decltype(number)::value, T>(group, (const float*)prepared + (long)row * in, in, sums);
    }, put);
}

template <class T>
void multiply(const Product& w, const T* x, const void* prepared, void* out, int rows, int begin, int end) {
#ifdef HAS_TILES
    std::unique_ptr<Tiles> tiles;
    if (!activation_bytes<T>(w, rows) && std::is_same_v<T, bf16> && has_tiles()) tiles.reset(new Tiles(std::min(rows, TILE)));
#endif
    int first = 0;  // feature of the part
    for (int i = 0; i < w.num_parts; first += w.parts[i++].out) {
        const Weights& part = w.parts[i];
        with_format(part.type, [&](auto format) {
            using F = decltype(format);
            const long bytes = (long)w.in / F::UNIT * F::UNIT_BYTES;
            const int last = std::min(end, first + part.out);
            for (int feature = std::max(begin, first); feature < last; feature += GROUP)
                multiply_group<F>(w, part.data + (feature - first) / GROUP * bytes, x, prepared, out, rows, feature);
        });
    }
}

template <class T>
void prepare(const Product& w, const T* x, int rows, void* memory) {
    const int in = w.in;
    const int bytes = activation_bytes<T>(w, rows);
    const Rounded rounded(memory, bytes * rows, in);
    const auto round = [&](const auto* from, long row) {
        round_row(from, in, rounded.codes + row * in, rounded.scales + row * (in / BLOCK), rounded.sums + row * (in / 16));
    };
    const auto take = [&](int row) {
        const T* from = x + (long)row * in;
        if (bytes) {
            round(from, row);
            if (bytes < 2) return;
            static thread_local std::vector<float> rest;
            rest.resize(in);
            for (int i = 0; i < in; ++i)
                rest[i] = std::fma(-float(rounded.codes[(long)row * in + i]),
                                   rounded.scales[(long)row * (in / BLOCK) + i / BLOCK], to_float(from[i]));
            round(rest.data(), rows + row);
        } else if constexpr (std::is_same_v<T, float>)
            std::memcpy((float*)memory + (long)row * in, from, sizeof(float) * in);
        else
#ifdef HAS_BF16_PRODUCTS
            std::memcpy((bf16*)memory + (long)row * in, from, sizeof(bf16) * in);  // with room for whole tiles
#else
            as_floats(from, in, (float*)memory + (long)row * in);
#endif
    };
    if (rows <= FEW_ROWS) {
        for (int row = 0; row < rows; ++row) take(row);
    } else {
#pragma omp for schedule(static)
        for (int row = 0; row < rows; ++row) take(row);
    }
}

}  // namespace

int64_t prepared_bytes(int64_t rows, int64_t in) { return (rows + 16) * in * (int64_t)sizeof(float); }

void prepare(const Product& w, int is_bf16, const void* x, int rows, void* memory) {
    is_bf16 ? prepare(w, (const bf16*)x, rows, memory) : prepare(w, (const float*)x, rows, memory);
}

void multiply(const Product& w, int is_bf16, const void* x, const void* prepared, void* out, int rows, int begin, int end) {
    is_bf16 ? multiply(w, (const bf16*)x, prepared, out, rows, begin, end)
            : multiply(w, (const float*)x, prepared, out, rows, begin, end);
}

void unpack(int type, const uint8_t* packed, const int64_t* rows, int64_t num, int64_t in, float* out) {
    with_format(type, [&](auto format) {
        using F = decltype(format);
        for (int64_t i = 0; i < num; ++i)
            for (int64_t b = 0; b < in / BLOCK; ++b) {
                const int f = int(rows[i] % GROUP), block = int(b % F::BLOCKS);
                const uint8_t* unit = packed + (rows[i] / GROUP * (in / F::UNIT) + b / F::BLOCKS) * F::UNIT_BYTES;
                const auto factors = F::factors(unit, block);
                bytes codes[VECTORS];
                F::codes(unit, block, codes);
                for (int v = 0; v < VECTORS; ++v) {
                    floats w[VECTOR];
                    weights_of<F>(codes[v], factors.scale[v * F::SCALES / VECTORS], factors.minimum, w);
                    for (int k = 0; k < VECTOR; ++k) out[i * in + b * BLOCK + v * VECTOR + k] = w[k][f];
                }
            }
    });
}

template <class T>
static void embed(const Weights* packed, const T* dense, int64_t token, float scale, int width, T* out) {
    if (!packed) {
        std::memcpy(out, dense + token * width, sizeof(T) * width);
    } else {
        static thread_local std::vector<float> row;
        row.resize(width);
        unpack(packed->type, packed->data, &token, 1, width, row.data());
        for (int i = 0; i < width; ++i) put(out + i, row[i]);
    }
    for (int i = 0; scale != 1.0f && i < width; ++i) put(out + i, to_float(out[i]) * scale);
}

void embed(int is_bf16, const Weights* packed, const void* dense, int64_t token, float scale, int width, void* out) {
    is_bf16 ? embed(packed, (const bf16*)dense, token, scale, width, (bf16*)out)
            : embed(packed, (const float*)dense, token, scale, width, (float*)out);
}

extern "C" {

// Bytes of `rows` (a multiple of 16) of `in` weights as the kernels keep them; 0 if the format or its shape is unknown.
int64_t swiftgen_packed_bytes(int type, int64_t rows, int64_t in) {
    int64_t bytes = 0;
    with_format(type, [&](auto format) {
        if (in % format.UNIT == 0 && rows % GROUP == 0) bytes = rows / GROUP * (in / format.UNIT) * format.UNIT_BYTES;
    });
    return bytes;
}

// Rows of a GGUF tensor, `order[i]` the one that becomes row i, into the order of formats.h. `packed` is all zeros.
void swiftgen_pack(int type, const uint8_t* rows, const int64_t* order, int64_t num_rows, int64_t in, uint8_t* packed,
                   int num_threads) {
    with_format(type, [&](auto format) {
        using F = decltype(format);
        const int64_t units = in / F::UNIT;
#pragma omp parallel for num_threads(num_threads) schedule(static)
        for (int64_t group = 0; group < num_rows / GROUP; ++group)
            for (int f = 0; f < GROUP; ++f)
                for (int64_t u = 0; u < units; ++u)
                    F::put(rows + (order[group * GROUP + f] * units + u) * F::ROW_BYTES,
                           packed + (group * units + u) * F::UNIT_BYTES, f);
    });
}

void swiftgen_unpack(int type, const uint8_t* packed, const int64_t* rows, int64_t num, int64_t in, float* out) {
    unpack(type, packed, rows, num, in, out);
}

void swiftgen_multiply(int is_bf16, const void* x, const Product* w, void* out, int rows, int num_threads, void* memory) {
    if (!rows) return;
    const int64_t bytes = prepared_bytes(rows, w->in);
#pragma omp parallel num_threads(num_threads)
    {
        const int groups = w->out / GROUP, thread = omp_get_thread_num(), threads = omp_get_num_threads();
        void* own = (char*)memory + (rows <= FEW_ROWS ? thread * bytes : 0);
        prepare(*w, is_bf16, x, rows, own);
        multiply(*w, is_bf16, x, own, out, rows, int((int64_t)groups * thread / threads) * GROUP,
                 int((int64_t)groups * (thread + 1) / threads) * GROUP);
    }
}

int64_t swiftgen_prepared_bytes(int rows, int in, int num_threads) {
    return prepared_bytes(rows, in) * (rows <= FEW_ROWS ? num_threads : 1);
}

}  // extern "C"
