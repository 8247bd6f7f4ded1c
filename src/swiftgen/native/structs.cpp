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
        AT(num_tail), AT(num_kinds), AT(is_draft), AT(rotary_dim), AT(kinds), AT(places), AT(queries), AT(workspace), -1};
    return at;
}

template <>
Layout layout<LayerKind>() {
    using Struct = LayerKind;
    static const int64_t at[] = {
        sizeof(Struct), AT(cos), AT(signed_sin), AT(bias), AT(edge_keys), AT(edge_values), AT(prefix_keys), AT(prefix_values),
        AT(tail_keys), AT(tail_values), AT(prefix_stride), AT(tail_stride), AT(prefix_layer_stride), AT(tail_layer_stride),
        AT(num_edge), AT(num_prefix), -1};
    return at;
}

template <>
Layout layout<LayerPlace>() {
    using Struct = LayerPlace;
    static const int64_t at[] = {sizeof(Struct), AT(kind), AT(index), -1};
    return at;
}

template <>
Layout layout<Norm>() {
    using Struct = Norm;
    static const int64_t at[] = {sizeof(Struct), AT(weight), AT(eps), -1};
    return at;
}

template <>
Layout layout<Heads>() {
    using Struct = Heads;
    static const int64_t at[] = {sizeof(Struct), AT(q_norm), AT(k_norm), AT(scaling), AT(cap), -1};
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
    static const int64_t at[] = {sizeof(Struct), AT(input_norm), AT(attention_norm), AT(mlp_norm), AT(output_norm),
                                 AT(q_norm), AT(k_norm), AT(heads), AT(qkv), AT(out), AT(gate_up), AT(down),
                                 AT(residual_scale), AT(activation), -1};
    return at;
}

template <>
Layout layout<Model>() {
    using Struct = Model;
    static const int64_t at[] = {sizeof(Struct), AT(layers),     AT(packed_embedding), AT(embedding), AT(norm), AT(lm_head),
                                 AT(num_layers), AT(hidden), AT(embedding_scale), -1};
    return at;
}

template <>
Layout layout<Cell>() {
    using Struct = Cell;
    static const int64_t at[] = {sizeof(Struct), AT(state_norm), AT(token_norm), AT(post_norm), AT(packed_embedding), AT(embedding),
                                 AT(gate_up), AT(down), AT(lm_head), AT(embedding_scale), -1};
    return at;
}

}  // namespace

extern "C" {

// Of the struct of this name; null if there is none.
const int64_t* swiftgen_layout(const char* name) {
    const auto is = [&](const char* other) { return std::strcmp(name, other) == 0; };
    return is("Pass")           ? layout<Pass>()
           : is("LayerKind")    ? layout<LayerKind>()
           : is("LayerPlace")   ? layout<LayerPlace>()
           : is("Norm")         ? layout<Norm>()
           : is("Heads")        ? layout<Heads>()
           : is("Weights")      ? layout<Weights>()
           : is("Product")      ? layout<Product>()
           : is("DecoderLayer") ? layout<DecoderLayer>()
           : is("Model")        ? layout<Model>()
           : is("Cell")         ? layout<Cell>()
                                : nullptr;
}

}  // extern "C"
