#include "gpt2.h"

#include "shared/decoder/family_testing.h"

using namespace quern;
using namespace quern::decoder;

namespace {

const Family kGpt2 = gpt2::family();

// GPT-2 (124M), as published.
const std::string kSmall =
    R"({"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
  "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
  "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
  "resid_pdrop": 0.1, "summary_activation": null, "summary_first_dropout": 0.1, "summary_proj_to_labels": true,
  "summary_type": "cls_index", "summary_use_proj": true,
  "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}}, "vocab_size": 50257})";

}  // namespace

TEST_CASE("published models have their published sizes, and their config.json survives reading and writing") {
  check_published(kGpt2, kSmall, 124439808);
}

TEST_CASE("matrices of layers are transposed in the file, and the embeddings are not") {
  const std::vector<ParameterSpec> list = model_from(kGpt2, kSmall)->parameters();
  CHECK(parameter(list, "qkv.weight").parts[0].transposed);
  CHECK(parameter(list, "qkv.weight").parts[0].hf_name == "transformer.h.{layer}.attn.c_attn.weight");
  CHECK(parameter(list, "up.weight").extents == Extents{4 * 768, 768});
  CHECK(parameter(list, "positions.weight").extents == Extents{1024, 768});
  CHECK(!parameter(list, "embedding.weight").parts[0].transposed);
  CHECK(parameter(list, "final_norm.bias").group == ParameterGroup::head);
}

TEST_CASE("goldens use every switch of the family") { check_goldens(kGpt2); }

TEST_CASE("what GPT-2 computes elsewhere is refused") {
  check_refuses(kGpt2, kSmall, R"("scale_attn_by_inverse_layer_idx": true)",
                "scale_attn_by_inverse_layer_idx: found true");
  std::string relu = kSmall;
  relu.replace(relu.find("gelu_new"), 8, "relu");
  CHECK_THROWS_WITH_AS(model_from(kGpt2, relu), doctest::Contains("activation_function"), Error);
}
