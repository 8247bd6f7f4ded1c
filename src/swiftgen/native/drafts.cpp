// A step of recurrent draft heads (heads.py) in one call. It comes between two passes, which have driven everything
// out of the caches: each operator would wait for its own code and for what it reads, many times longer than it takes.

#include "kernels.h"
#include "products.h"
#include "rows.h"

namespace {

template <class T>
void advance(const Cell& cell, const T* states, const int64_t* tokens, int rows, int columns, int num_threads,
             T* next, float* logits) {
    const int hidden = cell.down->out, width = cell.down->in, out = cell.lm_head->out, is_bf16 = sizeof(T) == 2;
    const int widest = std::max({2 * hidden, width});
    static thread_local std::vector<T> numbers;
    static thread_local std::vector<char> scratch;
    numbers.resize(size_t(rows) * (5 * hidden + 3 * width + out));
    scratch.resize(swiftgen_prepared_bytes(rows, widest, num_threads));
    T *embedded = numbers.data(), *normed = embedded + rows * hidden, *read = normed + rows * hidden,
      *gate_up = read + 2 * rows * hidden, *gated = gate_up + 2 * rows * width, *delta = gated + rows * width,
      *outputs = delta + rows * hidden;
    const auto multiply = [&](const T* x, const Product* w, T* y) {
        swiftgen_multiply(is_bf16, x, w, y, rows, num_threads, scratch.data());
    };
    const auto norm = [&](const T* x, const Norm& norm, int half) {
        swiftgen_rms_norm(is_bf16, x, &norm, normed, rows, hidden);
        for (int row = 0; row < rows; ++row)
            std::memcpy(read + (2l * row + half) * hidden, normed + (long)row * hidden, sizeof(T) * hidden);
    };
    for (int row = 0; row < rows; ++row)
        embed(is_bf16, cell.packed_embedding, cell.embedding, tokens[row], cell.embedding_scale, hidden,
              embedded + (long)row * hidden);
    norm(states, cell.state_norm, 0);
    norm(embedded, cell.token_norm, 1);
    multiply(read, cell.gate_up, gate_up);
    swiftgen_gate(is_bf16, SILU, gate_up, gated, rows, width);
    multiply(gated, cell.down, delta);
    const Norm none = {};
    swiftgen_add(is_bf16, states, delta, &none, 1.0f, next, rows, hidden);
    swiftgen_rms_norm(is_bf16, next, &cell.post_norm, normed, rows, hidden);
    multiply(normed, cell.lm_head, outputs);
    for (int row = 0; row < rows; ++row)
        for (int i = 0; i < columns; ++i) logits[(long)row * columns + i] = to_float(outputs[(long)row * out + i]);
}

}  // namespace

extern "C" {

// states and next are [rows][hidden], logits [rows][columns], the first columns of the lm_head.
void swiftgen_advance(int is_bf16, const Cell* cell, const void* states, const int64_t* tokens, int rows, int columns,
                      int num_threads, void* next, float* logits) {
    if (is_bf16)
        advance(*cell, (const bf16*)states, tokens, rows, columns, num_threads, (bf16*)next, logits);
    else
        advance(*cell, (const float*)states, tokens, rows, columns, num_threads, (float*)next, logits);
}

}  // extern "C"
