// All decoder layers of a pass in one call, where every weight has few bits: at that speed a call from Python for
// each step of each layer would take as long as the step.

#include "kernels.h"

// One pre-norm decoder layer.
struct DecoderLayer {
    const void *input_norm, *mlp_norm;  // weights
    float input_eps, mlp_eps;
    Heads heads;
    const Weights *qkv, *out, *gate_up, *down;
};

namespace {

// Where the steps of a layer leave their results, each [rows][...].
template <class T>
struct Results {
    T *normed, *qkv, *attended, *gate_up, *gated, *delta;
    float* scratch;
};

// Their places in `memory`; returns the bytes they take.
template <class T>
int64_t arrange(const DecoderLayer& layer, int64_t rows, char* memory, Results<T>* results) {
    const int64_t width = layer.qkv->in, inner = layer.down->in;
    int64_t used = 0;
    auto take = [&](int64_t bytes) {
        char* place = memory + used;
        used += (bytes + 63) / 64 * 64;
        return place;
    };
    auto numbers = [&](int64_t columns) { return (T*)take(sizeof(T) * rows * columns); };
    const Results<T> placed = {numbers(width), numbers(layer.qkv->out), numbers(layer.out->in), numbers(2 * inner),
                               numbers(inner), numbers(width), nullptr};
    const int64_t widest = std::max(std::max(width, inner), (int64_t)layer.out->in);
    float* scratch = (float*)take(sizeof(float) * (rows + 16) * widest);
    if (results) *results = placed, results->scratch = scratch;
    return used;
}

template <class T>
void run(const Pass& p, const DecoderLayer* layers, int num_layers, T* hidden, char* memory) {
    const int rows = p.num_rows, width = layers->qkv->in, inner = layers->down->in, is_bf16 = p.is_bf16;
    Results<T> r;
    arrange(*layers, rows, memory, &r);
    auto multiply = [&](const T* x, const Weights* w, T* out) {
        swiftgen_multiply(is_bf16, x, w, out, rows, p.num_threads, r.scratch);
    };
    for (int i = 0; i < num_layers; ++i) {
        const DecoderLayer& l = layers[i];
        const T* delta = i ? r.delta : nullptr;  // what the layer before has yet to add
        swiftgen_rms_norm(is_bf16, hidden, delta, hidden, l.input_norm, l.input_eps, r.normed, rows, width);
        multiply(r.normed, l.qkv, r.qkv);
        swiftgen_attend(&p, &l.heads, i, r.qkv, r.attended);
        multiply(r.attended, l.out, r.delta);
        swiftgen_rms_norm(is_bf16, hidden, r.delta, hidden, l.mlp_norm, l.mlp_eps, r.normed, rows, width);
        multiply(r.normed, l.gate_up, r.gate_up);
        swiftgen_silu_mul(is_bf16, r.gate_up, r.gated, rows, inner);
        multiply(r.gated, l.down, r.delta);
    }
    for (long i = 0; i < (long)rows * width; ++i) put(hidden + i, to_float(hidden[i]) + to_float(r.delta[i]));
}

}  // namespace

extern "C" {

// Bytes that `swiftgen_layers` needs as memory.
int64_t swiftgen_layers_memory(const DecoderLayer* layer, int is_bf16, int rows) {
    return is_bf16 ? arrange<bf16>(*layer, rows, nullptr, nullptr) : arrange<float>(*layer, rows, nullptr, nullptr);
}

// Takes hidden states [rows][width] through all layers, in place.
void swiftgen_layers(const Pass* pass, const DecoderLayer* layers, int num_layers, void* hidden, void* memory) {
    pass->is_bf16 ? run(*pass, layers, num_layers, (bf16*)hidden, (char*)memory)
                  : run(*pass, layers, num_layers, (float*)hidden, (char*)memory);
}

}  // extern "C"
