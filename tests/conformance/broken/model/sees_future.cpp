// Fault: attention is not masked.

#include "plain.h"

namespace {

using namespace quern;

class SeesFuture final : public PlainModel {
 public:
  void block(ProgramBuilder& b, std::int64_t) const override {
    const HeadLayout heads{4, 2, 4};
    ValueId x = b.stream(traits().width);
    ValueId qkv = b.linear(b.rms_norm(x, "attn_norm.weight", 1e-6, "attn_norm"), "qkv.weight", "qkv");
    x = b.add(
        x, b.linear(b.attention(qkv, heads, {.mask = AttentionMask::full, .scale = 0.5}, "attention"), "o.weight", "o"),
        "sum");
    ValueId up = b.linear(b.rms_norm(x, "ffn_norm.weight", 1e-6, "ffn_norm"), "up.weight", "up");
    b.output(b.add(x, b.linear(b.swiglu(up, "activated"), "down.weight", "down"), "ffn_sum"));
  }
};

}  // namespace

QUERN_PLUGIN("model", "sees_future", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<Model>("sees_future", "a model that sees what it is to predict", {},
                      [](const OptionValues&) { return std::make_unique<SeesFuture>(); });
}
