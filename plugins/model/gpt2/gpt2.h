#pragma once
// GPT-2: LayerNorm, learned positions, biases everywhere, and matrices stored as (in, out). Radford et al., "Language
// Models are Unsupervised Multitask Learners" (2019).

#include "shared/decoder/family.h"

namespace quern::gpt2 {

inline decoder::Description describe(const decoder::Fields& f) {
  decoder::Description d = decoder::llama_shape(f);
  d.ffn = f.n_inner > 0 ? f.n_inner : 4 * f.hidden_size;
  d.norm = decoder::NormKind::layer;
  d.activation = f.hidden_act == "gelu" ? decoder::Activation::gelu_erf : decoder::Activation::gelu_tanh;
  d.biases = {.qkv = true, .o = true, .gate_up = true, .down = true};
  d.forms = {{}};  // no rope
  d.names = {.embedding = "transformer.wte",
             .final_norm = "transformer.ln_f",
             .positions = "transformer.wpe",
             .layer = "transformer.h.{layer}.",
             .attn_norm = "ln_1",
             .ffn_norm = "ln_2",
             .qkv = {"attn.c_attn"},
             .o = "attn.c_proj",
             .gate_up = {"mlp.c_fc"},
             .down = "mlp.c_proj",
             .transposed = true};
  return d;
}

inline decoder::Family family() {
  return {
      .model_type = "gpt2",
      .architecture = "GPT2LMHeadModel",
      .summary = "GPT-2",
      .fields = {"n_inner"},
      .defaults = {{"max_position_embeddings", std::int64_t{1024}},
                   {"rms_norm_eps", 1e-5},
                   {"tie_word_embeddings", true}},
      .without = {"intermediate_size", "num_key_value_heads", "head_dim", "rope_theta", "rope_scaling"},
      .renamed = {{"hidden_size", "n_embd"},
                  {"num_hidden_layers", "n_layer"},
                  {"num_attention_heads", "n_head"},
                  {"max_position_embeddings", "n_positions"},
                  {"rms_norm_eps", "layer_norm_epsilon"},
                  {"hidden_act", "activation_function"}},
      .hidden_act = {"gelu_new", "gelu_pytorch_tanh", "gelu"},
      .neutral =
          {{.key = "attn_pdrop"},  // published files have the dropout of pretraining; a run names what it ignores
           {.key = "embd_pdrop"},
           {.key = "resid_pdrop"},
           {.key = "summary_first_dropout"},  // of another head
           {.key = "n_ctx"},
           {.key = "add_cross_attention", .accepted = {false}, .because = "quern has no encoder"},
           {.key = "scale_attn_weights", .accepted = {true}, .because = "quern scales scores"},
           {.key = "scale_attn_by_inverse_layer_idx", .accepted = {false}, .because = "quern scales all layers alike"},
           {.key = "reorder_and_upcast_attn", .accepted = {false}, .because = "quern computes scores in fp32 always"}},
      .describe = describe};
}

}  // namespace quern::gpt2
