// Faults in the names that tensors have in checkpoints: 1 the final norm has the name of a layer's, 2 it has none.
#include <algorithm>

#include "plain.h"

namespace {

class WrongNames final : public FaultyModel {
 public:
  using FaultyModel::FaultyModel;
  std::vector<quern::ParameterSpec> parameters() const override {
    auto list = FaultyModel::parameters();
    auto& norm = *std::ranges::find(list, "final_norm.weight", &quern::ParameterSpec::name);
    if (fault_ > 0) norm.parts[0].hf_name = fault_ == 1 ? "layers.1.attn_norm.weight" : "";
    return list;
  }
};

}  // namespace

QUERN_PLUGIN("model", "wrong_names", manifest) {
  add_faulty_model<WrongNames>(manifest, "wrong_names", "a model whose tensors share a name or have none", 2);
}
