#pragma once
// What configs in tests begin with.

namespace quern::testing {

/// A Llama of 20 thousand parameters over 64 tokens.
inline constexpr const char* kTinyModel = R"([model]
id = "llama"

[model.llama]
vocab_size = 64
hidden_size = 32
intermediate_size = 48
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
max_position_embeddings = 32

)";

}  // namespace quern::testing
