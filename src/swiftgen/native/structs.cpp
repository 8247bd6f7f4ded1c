// Where the fields of each struct lie, so that a mirror of it (structs.py) can be checked when the library is loaded.

#include "structs.h"

#include <cstddef>
#include <cstring>

namespace {

#define AT(field) (int64_t) offsetof(Struct, field)

using Layout = const int64_t*;  // size, then offsets in order, then -1

template <class Struct>
Layout layout();

template <>
Layout layout<Pass>() {
    using Struct = Pass;
    static const int64_t at[] = {
        sizeof(Struct), AT(is_bf16), AT(num_threads), AT(num_rows), AT(num_heads), AT(num_kv_heads), AT(head_dim),
        AT(num_prefix), AT(num_tail), AT(is_draft), AT(prefix_keys), AT(prefix_values), AT(tail_keys), AT(tail_values), AT(queries),
        AT(prefix_stride), AT(tail_stride), AT(prefix_layer_stride), AT(tail_layer_stride), AT(cos), AT(signed_sin),
        AT(bias), AT(workspace), -1};
    return at;
}

template <>
Layout layout<Heads>() {
    using Struct = Heads;
    static const int64_t at[] = {sizeof(Struct), AT(q_norm), AT(k_norm), AT(norm_eps), AT(scaling), -1};
    return at;
}

template <>
Layout layout<Weights>() {
    using Struct = Weights;
    static const int64_t at[] = {sizeof(Struct), AT(type), AT(out), AT(data), -1};
    return at;
}

template <>
Layout layout<Product>() {
    using Struct = Product;
    static const int64_t at[] = {sizeof(Struct),  AT(in),      AT(out),   AT(num_parts),
                                 AT(activation_bytes), AT(is_wide), AT(parts), AT(bias),      -1};
    return at;
}

template <>
Layout layout<DecoderLayer>() {
    using Struct = DecoderLayer;
    static const int64_t at[] = {sizeof(Struct), AT(input_norm), AT(mlp_norm), AT(input_eps), AT(mlp_eps), AT(heads),
                                 AT(qkv), AT(out), AT(gate_up), AT(down), -1};
    return at;
}

template <>
Layout layout<Model>() {
    using Struct = Model;
    static const int64_t at[] = {sizeof(Struct), AT(layers),     AT(packed_embedding), AT(embedding), AT(norm), AT(lm_head),
                                 AT(num_layers), AT(hidden), AT(eps), AT(embedding_scale), -1};
    return at;
}

template <>
Layout layout<Cell>() {
    using Struct = Cell;
    static const int64_t at[] = {sizeof(Struct), AT(state_norm), AT(token_norm), AT(post_norm), AT(packed_embedding), AT(embedding),
                                 AT(gate_up), AT(down), AT(lm_head), AT(eps), AT(embedding_scale), -1};
    return at;
}

}  // namespace

extern "C" {

// Of the struct of this name; null if there is none.
const int64_t* swiftgen_layout(const char* name) {
    const auto is = [&](const char* other) { return std::strcmp(name, other) == 0; };
    return is("Pass")           ? layout<Pass>()
           : is("Heads")        ? layout<Heads>()
           : is("Weights")      ? layout<Weights>()
           : is("Product")      ? layout<Product>()
           : is("DecoderLayer") ? layout<DecoderLayer>()
           : is("Model")        ? layout<Model>()
           : is("Cell")         ? layout<Cell>()
                                : nullptr;
}

}  // extern "C"
