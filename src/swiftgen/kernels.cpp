// CPU kernels of a pass: everything between its matrix products. Built and called by native.py.
//
// Every number of a row is computed by the same instructions in the same order, however many rows there are and
// wherever the row lies among them; a key that a row does not see adds an exact zero. So a draft tree gives
// each of its rows the bits that plain decoding gives, without any wider arithmetic.
//
// Vectors hold one value of many query rows, keys are read as scalars: keys need no transposing, and sums over
// keys run in the order of the text.

#include "kernels.h"

namespace {

constexpr int KEY_BLOCK = 64;   // keys converted to float32 and scored at a time
constexpr int SPAN_UNIT = 128;  // a prefix is cut into at most MAX_SPANS spans of a multiple of this many keys
constexpr int MAX_SPANS = 8;
constexpr int PANEL = 4;        // vectors of query rows that are computed together
constexpr int MAX_HEAD_DIM = 512;
constexpr int MANY_ROWS = 8;    // from here on, rows are worth more than one thread

// e^x for x <= 88; 0 below -87 (float32 has no normal numbers there). Error below 2 units in the last place.
inline vec exp(vec x) {
    const vec clamped = max(x, splat(-87.0f));
    const vec shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    vec n = clamped * 1.44269504f + shift;
    const ivec exponent = (ivec)n << 23;
    n -= shift;
    const vec r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
    vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return x < -87.0f ? vec{} : (vec)((ivec)p + exponent);
}

// c[m][n] = (ADD ? c[m][n] : 0) + sum over k of a[m * a_m + k * a_k] * b[k * b_k + n], k ascending, for M values of
// m and N vectors of n. Strides known to the compiler keep the addresses of M scalars out of the registers.
template <int M, int N, bool ADD>
inline __attribute__((always_inline)) void tile(const float* a, long a_m, long a_k, const float* b, long b_k,
                                                float* c, long c_m, int depth) {
    vec acc[M][N];
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) acc[m][n] = ADD ? load(c + m * c_m + n * LANES) : vec{};
    for (int k = 0; k < depth; ++k) {
        vec row[N];
        for (int n = 0; n < N; ++n) row[n] = load(b + k * b_k + n * LANES);
        for (int m = 0; m < M; ++m) {
            const float scalar = a[m * a_m + k * a_k];
            for (int n = 0; n < N; ++n) acc[m][n] += scalar * row[n];
        }
    }
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) store(c + m * c_m + n * LANES, acc[m][n]);
}

// A[num][depth], or its transpose, times B[depth][N vectors].
template <int N, bool ADD, bool TRANSPOSED, int STRIDE>
void product(const float* a, int a_stride, const float* b, long b_k, float* c, long c_m, int num, int depth) {
    constexpr int M = REGISTERS / N >= 16 ? 16 : REGISTERS / N >= 8 ? 8 : REGISTERS / N >= 4 ? 4 : 2;
    const long stride = STRIDE ? STRIDE : a_stride, a_m = TRANSPOSED ? 1 : stride, a_k = TRANSPOSED ? stride : 1;
    int m = 0;
    for (; m + M <= num; m += M) tile<M, N, ADD>(a + m * a_m, a_m, a_k, b, b_k, c + m * c_m, c_m, depth);
    for (; m < num; ++m) tile<1, N, ADD>(a + m * a_m, a_m, a_k, b, b_k, c + m * c_m, c_m, depth);
}

// The same for any number of vectors up to PANEL.
template <bool ADD, bool TRANSPOSED, int STRIDE>
void product(int vectors, const float* a, int a_stride, const float* b, long b_k, float* c, long c_m, int num,
             int depth) {
    switch (vectors) {
        case 1: return product<1, ADD, TRANSPOSED, STRIDE>(a, a_stride, b, b_k, c, c_m, num, depth);
        case 2: return product<2, ADD, TRANSPOSED, STRIDE>(a, a_stride, b, b_k, c, c_m, num, depth);
        case 3: return product<3, ADD, TRANSPOSED, STRIDE>(a, a_stride, b, b_k, c, c_m, num, depth);
        default: return product<4, ADD, TRANSPOSED, STRIDE>(a, a_stride, b, b_k, c, c_m, num, depth);
    }
}

// A partial result of attention: per query row the largest score, the sum of weights and of weighted values.
struct Part {
    float *largest, *weight, *values;  // [rows], [rows], [head_dim][rows]
};

// Turns scores of one vector of query rows into weights, in place, and scales what the part has so far to them.
// Scores lie `width` apart; `bias` is added to them, `rows` apart, or null.
inline void weigh(float* scores, int num, int width, const float* bias, int rows, int head_dim, Part part, int row) {
    const vec before = load(part.largest + row);
    vec largest = before;
    for (int j = 0; j < num; ++j) {
        vec score = load(scores + j * width);
        if (bias) {
            score += load(bias + (long)j * rows);
            store(scores + j * width, score);
        }
        largest = max(largest, score);
    }
    // A row that has seen nothing yet keeps its zeros.
    const vec base = largest == NEG_INF ? vec{} : largest, factor = exp(before - base);
    vec weight = load(part.weight + row) * factor;
    for (int j = 0; j < num; ++j) {
        const vec w = exp(load(scores + j * width) - base);
        weight += w;
        store(scores + j * width, w);
    }
    store(part.largest + row, largest);
    store(part.weight + row, weight);
    if (std::memcmp(&before, &largest, sizeof before))  // else the factor is 1
        for (int d = 0; d < head_dim; ++d) {
            float* value = part.values + (long)d * rows + row;
            store(value, load(value) * factor);
        }
}

// Adds keys to a partial result, `block` at a time: with each block the largest score may change, and with it the
// rounding. `bias` is added to the scores, [count][rows], or null.
template <int HEAD_DIM, class T>
void add_keys(const T* keys, const T* values, int count, int block, const float* queries, const float* bias, int rows,
              int head_dim, Part part) {
    static thread_local std::vector<float> memory;
    memory.resize(std::max(memory.size(), size_t(block) * (head_dim + PANEL * LANES)));
    float *scratch = memory.data(), *weights = scratch + (long)block * head_dim;
    for (int first = 0; first < count; first += block) {
        const int num = std::min(block, count - first);
        for (int panel = 0; panel < rows; panel += PANEL * LANES) {
            const int width = std::min(PANEL * LANES, rows - panel), vectors = width / LANES;
            const float* k = as_floats(keys + (long)first * head_dim, num * head_dim, scratch);
            product<false, false, HEAD_DIM>(vectors, k, head_dim, queries + panel, rows, weights, width, num,
                                            head_dim);
            for (int column = 0; column < width; column += LANES)
                weigh(weights + column, num, width, bias ? bias + (long)first * rows + panel + column : nullptr, rows,
                      head_dim, part, panel + column);
            const float* v = as_floats(values + (long)first * head_dim, num * head_dim, scratch);
            product<true, true, HEAD_DIM>(vectors, v, head_dim, weights, width, part.values + panel, rows, head_dim,
                                          num);
        }
    }
}

}  // namespace

extern "C" {

int swiftgen_padded_rows(int rows) { return (rows + LANES - 1) / LANES * LANES; }

// Keys of a span of the prefix; depends on nothing but its length.
static int span_of(int prefix) {
    return (prefix + SPAN_UNIT * MAX_SPANS - 1) / (SPAN_UNIT * MAX_SPANS) * SPAN_UNIT;
}
static int num_spans(int prefix) { return prefix ? (prefix + span_of(prefix) - 1) / span_of(prefix) : 0; }

// Floats that a pass needs as workspace.
int64_t swiftgen_workspace(const Pass* p) {
    const int64_t group = p->num_heads / p->num_kv_heads;
    const int64_t rows = swiftgen_padded_rows(group * p->num_rows), parts = num_spans(p->num_prefix) + 1;
    return p->num_kv_heads * rows * (p->head_dim + parts * (p->head_dim + 2));
}

}  // extern "C"

namespace {

// One head of one row: RMSNorm if there is a weight, then RoPE in float32.
template <class T>
inline void rotated(const T* head, const void* norm_weight, float eps, const Pass& p, int row, float* out) {
    const T* norm = (const T*)norm_weight;
    const int d = p.head_dim, half = d / 2;
    float scaled[MAX_HEAD_DIM];
    float factor = 1.0f;
    if (norm) {
        float squares = 0;
        for (int i = 0; i < d; ++i) squares += to_float(head[i]) * to_float(head[i]);
        factor = 1.0f / std::sqrt(squares / d + eps);
    }
    for (int i = 0; i < d; ++i) scaled[i] = norm ? to_float(head[i]) * factor * to_float(norm[i]) : to_float(head[i]);
    const float *cos = p.cos + (long)row * d, *sin = p.signed_sin + (long)row * d;
    for (int i = 0; i < half; ++i) {
        out[i] = scaled[i] * cos[i] + scaled[i + half] * sin[i];
        out[i + half] = scaled[i + half] * cos[i + half] + scaled[i] * sin[i + half];
    }
}

// RoPE and the cache: queries, keys and values of a pass go where they belong, by the threads of a parallel region.
// With `scaled`, queries go there too, [head_dim][padded rows] for each KV head, `head_floats` apart.
template <class T>
void rotate(const Pass& p, const Heads& heads, int layer, const T* qkv, float* scaled, long head_floats) {
    const int d = p.head_dim, kv = p.num_kv_heads, group = p.num_heads / kv, t = p.num_rows;
    const int rows = swiftgen_padded_rows(group * t);
    const long qkv_stride = (long)(p.num_heads + 2 * kv) * d;
    T* queries = (T*)p.queries + (long)layer * p.num_heads * t * d;
#pragma omp for schedule(static)
    for (int h = 0; h < kv; ++h) {
        const long begin = layer * p.tail_layer_stride + h * p.tail_stride + (long)(p.num_tail - t) * d;
        T *keys = (T*)p.tail_keys + begin, *values = (T*)p.tail_values + begin;
        float* q = scaled ? scaled + h * head_floats : nullptr;
        if (q) std::memset(q, 0, sizeof(float) * rows * d);
        float out[MAX_HEAD_DIM];
        for (int row = 0; row < t; ++row) {
            const T* in = qkv + row * qkv_stride;
            for (int g = 0; g < group; ++g) {
                rotated(in + (h * group + g) * d, heads.q_norm, heads.norm_eps, p, row, out);
                T* kept = queries + ((long)(h * group + g) * t + row) * d;
                for (int i = 0; i < d; ++i) put(kept + i, out[i]);
                for (int i = 0; q && i < d; ++i) q[(long)i * rows + g * t + row] = to_float(kept[i]) * heads.scaling;
            }
            rotated(in + (p.num_heads + h) * d, heads.k_norm, heads.norm_eps, p, row, out);
            for (int i = 0; i < d; ++i) put(keys + (long)row * d + i, out[i]);
            std::memcpy(values + (long)row * d, in + (p.num_heads + kv + h) * d, sizeof(T) * d);
        }
    }
}

template <class T, int HEAD_DIM>
void attend(const Pass& p, const Heads& heads, int layer, const T* qkv, T* attended) {
    const int d = p.head_dim, kv = p.num_kv_heads, group = p.num_heads / kv, t = p.num_rows;
    const int rows = swiftgen_padded_rows(group * t), spans = num_spans(p.num_prefix), parts = spans + 1;
    const int span = span_of(p.num_prefix);
    const long part_floats = (long)rows * (d + 2), head_floats = (long)rows * d + parts * part_floats;
    auto queries_of = [&](int h) { return p.workspace + h * head_floats; };  // [d][rows]
    auto part_of = [&](int h, int i) {
        float* base = queries_of(h) + (long)rows * d + i * part_floats;
        return Part{base, base + rows, base + 2 * rows};
    };
    auto tail = [&](void* tensor, int h) { return (T*)tensor + layer * p.tail_layer_stride + h * p.tail_stride; };

#pragma omp parallel num_threads(p.num_threads)
    {
        rotate(p, heads, layer, qkv, p.workspace, head_floats);
#pragma omp for schedule(dynamic)
        for (int task = 0; task < kv * parts; ++task) {
            const int h = task % kv, i = task / kv;
            Part part = part_of(h, i);
            std::fill(part.largest, part.largest + rows, NEG_INF);
            std::memset(part.weight, 0, sizeof(float) * rows * (d + 1));
            if (i == spans) {
                // In one block: where a row's ancestors lie among the drafts must not matter.
                add_keys<HEAD_DIM>(tail(p.tail_keys, h), tail(p.tail_values, h), p.num_tail, p.num_tail,
                                   queries_of(h), p.bias, rows, d, part);
            } else {
                const long begin = layer * p.prefix_layer_stride + h * p.prefix_stride + (long)i * span * d;
                add_keys<HEAD_DIM>((const T*)p.prefix_keys + begin, (const T*)p.prefix_values + begin,
                                   std::min(span, p.num_prefix - i * span), KEY_BLOCK, queries_of(h), nullptr, rows,
                                   d, part);
            }
        }
#pragma omp for schedule(static)
        for (int h = 0; h < kv; ++h) {
            for (int first = 0; first < rows; first += LANES) {
                vec largest = splat(NEG_INF), weight = {};
                for (int i = 0; i < parts; ++i) largest = max(largest, load(part_of(h, i).largest + first));
                vec factor[MAX_SPANS + 1];
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
}

template <class T>
void attend(const Pass& p, const Heads& heads, int layer, const T* qkv, T* attended) {
    switch (p.head_dim) {
        case 64: return attend<T, 64>(p, heads, layer, qkv, attended);
        case 128: return attend<T, 128>(p, heads, layer, qkv, attended);
        default: return attend<T, 0>(p, heads, layer, qkv, attended);
    }
}

// x becomes x + delta (if there is one); out = RMSNorm(x) * weight.
template <class T>
void rms_norm(const T* x, const T* delta, T* total, const T* weight, float eps, T* out, int rows, int width) {
#pragma omp parallel for if (rows >= MANY_ROWS)
    for (int row = 0; row < rows; ++row) {
        const long begin = (long)row * width;
        vec squares = {};
        for (int i = 0; i < width; i += LANES) {
            vec v = load_upto(x + begin + i, width - i);
            if (delta) {
                v += load_upto(delta + begin + i, width - i);
                store_upto(total + begin + i, v, width - i);
                v = load_upto(total + begin + i, width - i);  // rounded
            }
            squares += v * v;
        }
        const T* in = (delta ? total : x) + begin;
        const float factor = 1.0f / std::sqrt(sum(squares) / width + eps);
        for (int i = 0; i < width; i += LANES) {
            const vec scaled = load_upto(in + i, width - i) * factor * load_upto(weight + i, width - i);
            store_upto(out + begin + i, scaled, width - i);
        }
    }
}

template <class T>
void silu_mul(const T* gate_up, T* out, int rows, int width) {
#pragma omp parallel for if (rows >= MANY_ROWS)
    for (int row = 0; row < rows; ++row)
        for (int i = 0; i < width; i += LANES) {
            const T* gates = gate_up + 2l * row * width;
            const vec gate = load_upto(gates + i, width - i), up = load_upto(gates + width + i, width - i);
            // e^-|x| keeps the exponential in range.
            const vec e = exp(gate < 0.0f ? gate : -gate);
            const vec silu = (gate < 0.0f ? gate * e : gate) / (1.0f + e);
            store_upto(out + (long)row * width + i, silu * up, width - i);
        }
}

}  // namespace

extern "C" {

void swiftgen_rotate(const Pass* pass, const Heads* heads, int layer, const void* qkv) {
#pragma omp parallel num_threads(pass->num_threads)
    pass->is_bf16 ? rotate(*pass, *heads, layer, (const bf16*)qkv, nullptr, 0)
                  : rotate(*pass, *heads, layer, (const float*)qkv, nullptr, 0);
}

void swiftgen_attend(const Pass* pass, const Heads* heads, int layer, const void* qkv, void* attended) {
    pass->is_bf16 ? attend(*pass, *heads, layer, (const bf16*)qkv, (bf16*)attended)
                  : attend(*pass, *heads, layer, (const float*)qkv, (float*)attended);
}

void swiftgen_rms_norm(int is_bf16, const void* x, const void* delta, void* total, const void* weight, float eps,
                       void* out, int rows, int width) {
    if (is_bf16)
        rms_norm((const bf16*)x, (const bf16*)delta, (bf16*)total, (const bf16*)weight, eps, (bf16*)out, rows, width);
    else
        rms_norm((const float*)x, (const float*)delta, (float*)total, (const float*)weight, eps, (float*)out, rows,
                 width);
}

void swiftgen_silu_mul(int is_bf16, const void* gate_up, void* out, int rows, int width) {
    is_bf16 ? silu_mul((const bf16*)gate_up, (bf16*)out, rows, width)
            : silu_mul((const float*)gate_up, (float*)out, rows, width);
}

}  // extern "C"
