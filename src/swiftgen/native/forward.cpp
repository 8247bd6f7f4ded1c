// A whole pass in one call and one parallel region: at that speed, starting threads or a call from
// Python for each step of each layer would take as long as the step.
//
// Few rows are normed and prepared by each thread for itself, which takes less time than to wait for the other.

#include <omp.h>

#include "products.h"
#include "rows.h"

namespace {

// Where the steps of a layer leave their results, each [rows][...].
template <class T>
struct Results {
    T *qkv, *attended, *gate_up, *gated, *delta;  // of all threads
    T *hidden, *normed;                           // of each thread, or of all if there are many rows
    void* prepared;
};

// Their places in `memory`; returns the bytes they take.
template <class T>
int64_t arrange(const DecoderLayer& layer, int64_t rows, int thread, int num_threads, char* memory, Results<T>* results) {
    const int64_t width = layer.qkv->in, inner = layer.down->in;
    const int64_t widest = std::max(std::max(width, inner), (int64_t)layer.out->in);
    const int num_own = rows <= FEW_ROWS ? num_threads : 1, own = rows <= FEW_ROWS ? thread : 0;
    int64_t used = 0;
    const auto take = [&](int64_t bytes) {
        char* place = memory + used;
        used += (bytes + 63) / 64 * 64;
        return place;
    };
    const auto numbers = [&](int64_t columns) { return (T*)take(sizeof(T) * rows * columns); };
    const auto owned = [&](int64_t bytes) {
        bytes = (bytes + 63) / 64 * 64;
        return take(bytes * num_own) + bytes * own;
    };
    const Results<T> placed = {numbers(layer.qkv->out),
                               numbers(layer.out->in),
                               numbers(2 * inner),
                               numbers(inner),
                               numbers(width),
                               (T*)owned(sizeof(T) * rows * width),
                               (T*)owned(sizeof(T) * rows * width),
                               owned(prepared_bytes(rows, widest))};
    if (results) *results = placed;
    return used;
}

template <class T>
struct Team {
    const Pass& pass;
    const int rows, is_bf16, thread, threads;

    template <class Use>
    void each_row(Use use) const {
        if (rows <= FEW_ROWS) {
            for (int row = 0; row < rows; ++row) use(row);
        } else {
#pragma omp for schedule(static)
            for (int row = 0; row < rows; ++row) use(row);
        }
    }

    // This thread's share of `size` features from `first` on, in groups of 16.
    int begin(int size, int first = 0) const { return first + size / 16 * thread / threads * 16; }
    int end(int size, int first = 0) const { return first + size / 16 * (thread + 1) / threads * 16; }

    void multiply(const Product& w, const T* x, const void* prepared, T* out) const {
        ::multiply(w, is_bf16, x, prepared, out, rows, begin(w.out), end(w.out));
#pragma omp barrier
    }

    // What a step has made is added to the hidden states, if there is any, and they are normed for the next step.
    void add_and_norm(T* hidden, const T* delta, Norm of_delta, float scale, Norm next, T* normed, int width) const {
        each_row([&](int row) {
            const long at = (long)row * width;
            if (delta) add_row(hidden + at, delta + at, of_delta, scale, hidden + at, width);
            norm_row(hidden + at, next, normed + at, width);
        });
    }

    // Norms that go over all query heads, and over all key heads.
    void norm_heads(const DecoderLayer& l, T* qkv) const {
        if (!l.q_norm.weight) return;
        const int queries = pass.num_heads * pass.head_dim, keys = pass.num_kv_heads * pass.head_dim;
#pragma omp for schedule(static)
        for (int row = 0; row < rows; ++row) {
            T* q = qkv + (long)row * l.qkv->out;
            norm_row(q, l.q_norm, q, queries);
            norm_row(q + queries, l.k_norm, q + queries, keys);
        }
    }

    void run(const Model& model, const int64_t* tokens, T* hidden, char* memory) const {
        const DecoderLayer* layers = model.layers;
        const int width = model.hidden, inner = layers->down->in, num_layers = model.num_layers;
        Results<T> r;
        arrange(*layers, rows, thread, threads, memory, &r);
        each_row([&](int row) {
            embed(is_bf16, model.packed_embedding, model.embedding, tokens[row], model.embedding_scale, width,
                  r.hidden + (long)row * width);
        });
        for (int i = 0; i < num_layers; ++i) {
            const DecoderLayer& l = layers[i];
            const DecoderLayer& before = i ? layers[i - 1] : l;
            add_and_norm(r.hidden, i ? r.delta : nullptr, before.output_norm, before.residual_scale, l.input_norm, r.normed,
                         width);
            prepare(*l.qkv, is_bf16, r.normed, rows, r.prepared);
            multiply(*l.qkv, r.normed, r.prepared, r.qkv);
            norm_heads(l, r.qkv);
            swiftgen_attend_together(&pass, &l.heads, i, r.qkv, r.attended);
            prepare(*l.out, is_bf16, r.attended, rows, r.prepared);
            multiply(*l.out, r.attended, r.prepared, r.delta);
            add_and_norm(r.hidden, r.delta, l.attention_norm, l.residual_scale, l.mlp_norm, r.normed, width);
            prepare(*l.gate_up, is_bf16, r.normed, rows, r.prepared);
            const int first = begin(inner), last = end(inner);
            ::multiply(*l.gate_up, is_bf16, r.normed, r.prepared, r.gate_up, rows, first, last);
            ::multiply(*l.gate_up, is_bf16, r.normed, r.prepared, r.gate_up, rows, inner + first, inner + last);
            for (int row = 0; row < rows; ++row) {
                const T* gate = r.gate_up + 2l * row * inner;
                gate_row(l.activation, gate + first, gate + inner + first, r.gated + (long)row * inner + first,
                         last - first);
            }
#pragma omp barrier
            prepare(*l.down, is_bf16, r.gated, rows, r.prepared);
            multiply(*l.down, r.gated, r.prepared, r.delta);
        }
        const DecoderLayer& last = layers[num_layers - 1];
#pragma omp for schedule(static)
        for (int row = 0; row < rows; ++row) {
            const long at = (long)row * width;
            add_row(r.hidden + at, r.delta + at, last.output_norm, last.residual_scale, hidden + at, width);
        }
    }
};

template <class T>
void run(const Pass& p, const Model& model, const int64_t* tokens, T* hidden, char* memory) {
#pragma omp parallel num_threads(p.num_threads)
    Team<T>{p, p.num_rows, p.is_bf16, omp_get_thread_num(), omp_get_num_threads()}.run(model, tokens, hidden, memory);
}

template <class T>
void unembed(const Model& model, const T* hidden, int rows, int num_threads, float* logits, char* memory) {
    const Product& lm_head = *model.lm_head;
    const int is_bf16 = sizeof(T) == 2, width = model.hidden, groups = lm_head.out / 16;
    const int64_t bytes = prepared_bytes(rows, width) + sizeof(T) * rows * width;
#pragma omp parallel num_threads(num_threads)
    {
        const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
        char* own = memory + (rows <= FEW_ROWS ? thread * bytes : 0);
        T* normed = (T*)(own + prepared_bytes(rows, width));
        if (rows <= FEW_ROWS || !thread)
            for (int row = 0; row < rows; ++row) {
                const long at = (long)row * width;
                norm_row(hidden + at, model.norm, normed + at, width);
            }
        if (rows > FEW_ROWS) {
#pragma omp barrier
        }
        prepare(lm_head, is_bf16, normed, rows, own);
        multiply(lm_head, is_bf16, normed, own, logits, rows, int((int64_t)groups * thread / threads) * 16,
                 int((int64_t)groups * (thread + 1) / threads) * 16);
    }
}

}  // namespace

extern "C" {

// Bytes that `swiftgen_forward` and `swiftgen_unembed` need as memory.
int64_t swiftgen_forward_memory(const Model* model, int is_bf16, int rows, int num_threads) {
    return is_bf16 ? arrange<bf16>(*model->layers, rows, 0, num_threads, nullptr, nullptr)
                   : arrange<float>(*model->layers, rows, 0, num_threads, nullptr, nullptr);
}
int64_t swiftgen_unembed_memory(const Model* model, int rows, int num_threads) {
    const int64_t bytes = prepared_bytes(rows, model->hidden) + (int64_t)sizeof(float) * rows * model->hidden;
    return bytes * (rows <= FEW_ROWS ? num_threads : 1);
}

// Takes tokens through the layers: hidden states before the last norm [rows][hidden].
void swiftgen_forward(const Pass* pass, const Model* model, const int64_t* tokens, void* hidden, void* memory) {
    pass->is_bf16 ? run(*pass, *model, tokens, (bf16*)hidden, (char*)memory)
                  : run(*pass, *model, tokens, (float*)hidden, (char*)memory);
}

// The last norm and the lm_head, which is wide: logits [rows][vocab].
void swiftgen_unembed(const Model* model, int is_bf16, const void* hidden, int rows, int num_threads, float* logits,
                      void* memory) {
    is_bf16 ? unembed(*model, (const bf16*)hidden, rows, num_threads, logits, (char*)memory)
            : unembed(*model, (const float*)hidden, rows, num_threads, logits, (char*)memory);
}

}  // extern "C"
