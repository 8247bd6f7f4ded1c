// Attention of a pass: RoPE, the KV cache, and sums over the keys.
//
// Every number of a row is computed by the same instructions in the same order, however many rows there are and
// wherever the row lies among them; a key that a row does not see adds an exact zero. So a draft tree gives
// each of its rows the bits that plain decoding gives, without any wider arithmetic.

#include <type_traits>

#include "dots.h"
#include "key_tiles.h"
#include "pairs.h"

namespace {

constexpr int SPAN_UNIT = 128;  // a prefix is cut into at most MAX_SPANS spans of a multiple of this many keys
constexpr int MAX_SPANS = 8, MAX_PARTS = MAX_SPANS + 2;  // the tail, and the edge of a window
constexpr int MAX_HEAD_DIM = 512, MAX_GROUP = 32;

}  // namespace

extern "C" {

// Whether keys in bfloat16 are multiplied in pairs or by tiles, which is fast with many query rows too.
int swiftgen_has_pairs(int head_dim) {
#if defined(HAS_PAIRS)
    return 1;
#elif defined(HAS_TILES)
    return can_tile(head_dim);
#else
    return 0;
#endif
}

int swiftgen_padded_rows(int rows) { return (rows + LANES - 1) / LANES * LANES; }

// Keys of a span of the prefix; depends on nothing but its length.
static int span_of(int prefix) {
    return (prefix + SPAN_UNIT * MAX_SPANS - 1) / (SPAN_UNIT * MAX_SPANS) * SPAN_UNIT;
}
static int num_spans(int prefix) { return prefix ? (prefix + span_of(prefix) - 1) / span_of(prefix) : 0; }

// Room for a query, in float32 and in pairs.
static int64_t query_floats(int head_dim) { return head_dim + head_dim / 2; }

// Floats that a pass needs as workspace.
int64_t swiftgen_workspace(const Pass* p) {
    const int64_t group = p->num_heads / p->num_kv_heads, rows = swiftgen_padded_rows(group * p->num_rows);
    int64_t parts = 0;
    for (int i = 0; i < p->num_kinds; ++i)
        parts = std::max<int64_t>(parts, num_spans(p->kinds[i].num_prefix) + 1 + (p->kinds[i].num_edge > 0));
    return p->num_kv_heads * rows * (query_floats(p->head_dim) + parts * (p->head_dim + 2));
}

}  // extern "C"

namespace {

// Where the keys of a layer lie.
struct Place {
    const LayerKind& kind;
    long prefix, tail;  // to the layer from the first of those that share its cache

    Place(const Pass& p, int layer) : kind(p.kinds[p.places[layer].kind]) {
        prefix = p.places[layer].index * kind.prefix_layer_stride;
        tail = p.places[layer].index * kind.tail_layer_stride;
    }
};

// One head of one row: RMSNorm if there is a weight, then RoPE in float32.
template <class T>
inline void rotated(const T* head, const Norm& norm, const Pass& p, const LayerKind& kind, int row, float* out) {
    const int d = p.head_dim, turned = p.rotary_dim, half = turned / 2;
    float scaled[MAX_HEAD_DIM];
    float factor = 1.0f;
    if (norm.weight) {
        float squares = 0;
        for (int i = 0; i < d; ++i) squares += to_float(head[i]) * to_float(head[i]);
        factor = 1.0f / std::sqrt(squares / d + norm.eps);
    }
    for (int i = 0; i < d; ++i) scaled[i] = norm.weight ? to_float(head[i]) * factor * norm.weight[i] : to_float(head[i]);
    const float *cos = kind.cos + (long)row * turned, *sin = kind.signed_sin + (long)row * turned;
    for (int i = 0; i < half; ++i) {
        out[i] = scaled[i] * cos[i] + scaled[i + half] * sin[i];
        out[i + half] = scaled[i + half] * cos[i + half] + scaled[i] * sin[i + half];
    }
    for (int i = turned; i < d; ++i) out[i] = scaled[i];
}

// RoPE and the cache: queries, keys and values of a pass go where they belong, by the threads of a parallel region.
// With `scaled`, queries go there too, [head_dim][padded rows] for each KV head, `head_floats` apart, and behind them in
// pairs of dimensions as they are, [head_dim / 2][padded rows].
template <class T>
void rotate(const Pass& p, const Heads& heads, int layer, const T* qkv, float* scaled, long head_floats) {
    const int d = p.head_dim, kv = p.num_kv_heads, group = p.num_heads / kv, t = p.num_rows;
    const int rows = swiftgen_padded_rows(group * t);
    const long qkv_stride = (long)(p.num_heads + 2 * kv) * d;
    T* queries = (T*)p.queries + (long)layer * p.num_heads * t * d;
    const Place at(p, layer);
#pragma omp for schedule(static)
    for (int h = 0; h < kv; ++h) {
        const long begin = at.tail + h * at.kind.tail_stride + (long)(p.num_tail - t) * d;
        T *keys = (T*)at.kind.tail_keys + begin, *values = (T*)at.kind.tail_values + begin;
        float* q = scaled ? scaled + h * head_floats : nullptr;
        if (q) std::memset(q, 0, sizeof(float) * rows * query_floats(d));
        float out[MAX_HEAD_DIM];
        for (int row = 0; row < t; ++row) {
            const T* in = qkv + row * qkv_stride;
            for (int g = 0; g < group; ++g) {
                rotated(in + (h * group + g) * d, heads.q_norm, p, at.kind, row, out);
                T* kept = queries + ((long)(h * group + g) * t + row) * d;
                for (int i = 0; i < d; ++i) put(kept + i, out[i]);
                for (int i = 0; q && i < d; ++i) q[(long)i * rows + g * t + row] = to_float(kept[i]) * heads.scaling;
#if defined(HAS_PAIRS) || defined(HAS_TILES)
                for (int i = 0; q && sizeof(T) == 2 && i + 1 < d; i += 2)
                    std::memcpy(q + (long)(d + i / 2) * rows + g * t + row, kept + i, 4);
#endif
            }
            rotated(in + (p.num_heads + h) * d, heads.k_norm, p, at.kind, row, out);
            for (int i = 0; i < d; ++i) put(keys + (long)row * d + i, out[i]);
            std::memcpy(values + (long)row * d, in + (p.num_heads + kv + h) * d, sizeof(T) * d);
        }
    }
}

// One row of a draft.
template <class T, int HEAD_DIM>
void attend_draft(const Pass& p, const Heads& heads, int layer, const T* qkv, T* attended) {
    const int d = p.head_dim, kv = p.num_kv_heads, group = p.num_heads / kv;
    const Place place(p, layer);
    const LayerKind& kind = place.kind;
    const int span = span_of(kind.num_prefix), spans = num_spans(kind.num_prefix), parts = spans + 1;
    const long part_floats = (long)group * (d + 2);
    rotate(p, heads, layer, qkv, nullptr, 0);
    const T* queries = (const T*)p.queries + (long)layer * p.num_heads * d;
#pragma omp for schedule(dynamic)
    for (int task = 0; task < kv * parts; ++task) {
        const int h = task % kv, i = task / kv;
        float *largest = p.workspace + task * part_floats, *weight = largest + group, *out = weight + group;
        std::fill(largest, largest + group, NEG_INF);
        std::memset(weight, 0, sizeof(float) * group * (d + 1));
        float scaled[MAX_GROUP * MAX_HEAD_DIM];
        for (int j = 0; j < group * d; ++j) scaled[j] = to_float(queries[h * group * d + j]) * heads.scaling;
        const bool is_tail = i == spans;
        const long at = is_tail ? place.tail + h * kind.tail_stride
                                : place.prefix + h * kind.prefix_stride + (long)i * span * d;
        add_keys_by_rows<HEAD_DIM>((const T*)(is_tail ? kind.tail_keys : kind.prefix_keys) + at,
                                   (const T*)(is_tail ? kind.tail_values : kind.prefix_values) + at,
                                   is_tail ? p.num_tail : std::min(span, kind.num_prefix - i * span), scaled, group, d, heads.cap,
                                   largest, weight, out);
    }
#pragma omp for schedule(static)
    for (int head = 0; head < p.num_heads; ++head) {
        const int h = head / group, g = head % group;
        const auto part = [&](int i) { return p.workspace + (i * kv + h) * part_floats; };
        float largest = NEG_INF, weight = 0, factor[MAX_PARTS];
        for (int i = 0; i < parts; ++i) largest = std::max(largest, part(i)[g]);
        for (int i = 0; i < parts; ++i) {
            factor[i] = exp(splat(part(i)[g] - largest))[0];
            weight += factor[i] * part(i)[group + g];
        }
        for (int j = 0; j < d; ++j) {
            float value = 0;
            for (int i = 0; i < parts; ++i) value += factor[i] * part(i)[2 * group + g * d + j];
            put(attended + (long)head * d + j, value / weight);
        }
    }
}

// Adds keys of the prefix by the fastest products there are; queries as `rotate` leaves them.
template <int HEAD_DIM, class T>
void add_prefix(const T* keys, const T* values, int count, const float* queries, const Heads& heads, int live, int rows,
                int head_dim, Part part) {
    if constexpr (std::is_same_v<T, bf16>) {
        const uint32_t* pairs = (const uint32_t*)queries + (long)rows * head_dim;
#ifdef HAS_PAIRS
        return add_key_pairs(keys, values, count, pairs, heads.scaling, heads.cap, live, rows, head_dim, part);
#endif
#ifdef HAS_TILES
        if (can_tile(head_dim))
            return add_key_tiles(keys, values, count, pairs, heads.scaling, heads.cap, live, rows, head_dim, part);
#endif
    }
    add_keys<HEAD_DIM>(keys, values, count, KEY_BLOCK, queries, heads.cap, nullptr, rows, head_dim, part);
}

template <class T, int HEAD_DIM>
void attend(const Pass& p, const Heads& heads, int layer, const T* qkv, T* attended) {
    if (p.is_draft) return attend_draft<T, HEAD_DIM>(p, heads, layer, qkv, attended);
    const int d = p.head_dim, kv = p.num_kv_heads, group = p.num_heads / kv, t = p.num_rows;
    const Place place(p, layer);
    const LayerKind& kind = place.kind;
    const int rows = swiftgen_padded_rows(group * t), spans = num_spans(kind.num_prefix);
    const int parts = spans + 1 + (kind.num_edge > 0), span = span_of(kind.num_prefix);
    const long part_floats = (long)rows * (d + 2), head_floats = rows * query_floats(d) + parts * part_floats;
    auto queries_of = [&](int h) { return p.workspace + h * head_floats; };  // [d][rows]
    auto part_of = [&](int h, int i) {
        float* base = queries_of(h) + rows * query_floats(d) + i * part_floats;
        return Part{base, base + rows, base + 2 * rows};
    };
    auto tail = [&](void* tensor, int h) { return (T*)tensor + place.tail + h * kind.tail_stride; };
    auto before = [&](void* tensor, int h) { return (const T*)tensor + place.prefix + h * kind.prefix_stride; };

    rotate(p, heads, layer, qkv, p.workspace, head_floats);
#pragma omp for schedule(dynamic)
    for (int task = 0; task < kv * parts; ++task) {
        const int h = task % kv, i = task / kv;
        Part part = part_of(h, i);
        std::fill(part.largest, part.largest + rows, NEG_INF);
        std::memset(part.weight, 0, sizeof(float) * rows * (d + 1));
        if (i == spans) {
            // In one block: where a row's ancestors lie among the drafts must not matter.
            add_keys<HEAD_DIM>(tail(kind.tail_keys, h), tail(kind.tail_values, h), p.num_tail, p.num_tail,
                               queries_of(h), heads.cap, kind.bias + (long)kind.num_edge * rows, rows, d, part);
        } else if (i > spans) {
            add_keys<HEAD_DIM>(before(kind.edge_keys, h), before(kind.edge_values, h), kind.num_edge, kind.num_edge,
                               queries_of(h), heads.cap, kind.bias, rows, d, part);
        } else {
            const T *keys = before(kind.prefix_keys, h) + (long)i * span * d;
            const T* values = before(kind.prefix_values, h) + (long)i * span * d;
            const int count = std::min(span, kind.num_prefix - i * span);
            add_prefix<HEAD_DIM>(keys, values, count, queries_of(h), heads, group * t, rows, d, part);
        }
    }
#pragma omp for schedule(static)
    for (int h = 0; h < kv; ++h) {
        for (int first = 0; first < rows; first += LANES) {
            vec largest = splat(NEG_INF), weight = {};
            for (int i = 0; i < parts; ++i) largest = max(largest, load(part_of(h, i).largest + first));
            vec factor[MAX_PARTS];
            for (int i = 0; i < parts; ++i) {
                factor[i] = exp(load(part_of(h, i).largest + first) - largest);
                weight += factor[i] * load(part_of(h, i).weight + first);
            }
            for (int j = 0; j < d; ++j) {
                vec value = {};
                for (int i = 0; i < parts; ++i)
                    value += factor[i] * load(part_of(h, i).values + (long)j * rows + first);
                value /= weight;
                for (int lane = 0; lane < LANES; ++lane) {
                    const int row = first + lane, g = row / t;
                    T* out = attended + ((long)(row % t) * p.num_heads + h * group + g) * d + j;
                    if (g < group) put(out, value[lane]);  // else padding
                }
            }
        }
    }
}

template <class T>
void attend(const Pass& p, const Heads& heads, int layer, const T* qkv, T* attended) {
    switch (p.head_dim) {
        case 64: return attend<T, 64>(p, heads, layer, qkv, attended);
        case 128: return attend<T, 128>(p, heads, layer, qkv, attended);
        default: return attend<T, 0>(p, heads, layer, qkv, attended);
    }
}

}  // namespace

extern "C" {

void swiftgen_rotate(const Pass* pass, const Heads* heads, int layer, const void* qkv) {
#pragma omp parallel num_threads(pass->num_threads)
    pass->is_bf16 ? rotate(*pass, *heads, layer, (const bf16*)qkv, nullptr, 0)
                  : rotate(*pass, *heads, layer, (const float*)qkv, nullptr, 0);
}

void swiftgen_attend_together(const Pass* pass, const Heads* heads, int layer, const void* qkv, void* attended) {
    pass->is_bf16 ? attend(*pass, *heads, layer, (const bf16*)qkv, (bf16*)attended)
                  : attend(*pass, *heads, layer, (const float*)qkv, (float*)attended);
}

void swiftgen_attend(const Pass* pass, const Heads* heads, int layer, const void* qkv, void* attended) {
#pragma omp parallel num_threads(pass->num_threads)
    swiftgen_attend_together(pass, heads, layer, qkv, attended);
}

}  // extern "C"
