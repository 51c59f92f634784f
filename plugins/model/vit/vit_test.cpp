#include "vit.h"

#include <doctest/doctest.h>

#include "quern/testkit/model_conformance.h"
#include "quern/testkit/refusal.h"

using namespace quern;
using testkit::check_refused;

namespace {

vit::Options sizes(std::int64_t width, std::int64_t depth, std::int64_t heads, std::int64_t patch = 16) {
  vit::Options options;
  options.embed_dim = width, options.depth = depth, options.num_heads = heads, options.patch_size = patch;
  return options;
}

std::int64_t count(const vit::Options& options) { return testkit::parameter_count(vit::Vit(options)); }

}  // namespace

TEST_CASE("programs, parameters and traits agree, whatever the options") {
  vit::Options options = sizes(32, 2, 4, 4);
  options.img_size = 12, options.num_classes = 5;
  for (const bool class_token : {true, false})
    for (const char* pool : {"token", "avg"})
      for (const bool bias : {true, false}) {
        if (!class_token && pool == std::string("token")) continue;
        options.class_token = class_token, options.global_pool = pool, options.qkv_bias = bias;
        options.weighted = bias;
        CHECK(testkit::model_faults(vit::Vit(options)) == std::vector<std::string>{});
        for (const ParameterSpec& spec : vit::Vit(options).parameters())
          CHECK(spec.parts[0].heads ==
                (spec.name == "qkv.weight" ? std::vector<HeadRows>{{12, 8, 1}} : std::vector<HeadRows>{}));
      }
}

TEST_CASE("timm's models have the sizes that timm states") {
  CHECK(count(sizes(192, 12, 3)) == 5717416);    // vit_tiny_patch16_224
  CHECK(count(sizes(768, 12, 12)) == 86567656);  // vit_base_patch16_224
  vit::Options giant = sizes(1408, 40, 16, 14);
  giant.mlp_ratio = 48.0 / 11;
  CHECK(count(giant) == 1012611432);  // vit_giant_patch14_224
}

TEST_CASE("sizes that do not fit together are refused by name") {
  check_refused(ErrorCode::config, {"model.vit.embed_dim", "100", "a multiple of 3"},
                [] { vit::Vit{sizes(100, 1, 3)}; });
  check_refused(ErrorCode::config, {"model.vit.img_size", "224", "a multiple of 15"},
                [] { vit::Vit{sizes(96, 1, 3, 15)}; });
  vit::Options options = sizes(96, 1, 3);
  options.class_token = false;
  check_refused(ErrorCode::config, {"model.vit.global_pool", "\"avg\", or class_token = true"},
                [&] { vit::Vit{options}; });
  const OptionValues values = parse_hf_config(vit::Vit(sizes(96, 2, 3)).hf_config(), "config.json", vit::hf_model());
  CHECK(values.get<std::int64_t>("embed_dim") == 96);
}
