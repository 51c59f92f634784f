// Fault 1: two tensors of one size have each other's names in checkpoints.
#include <utility>

#include "plain.h"

namespace {

using namespace quern;

class ExchangedNames final : public FaultyModel {
 public:
  using FaultyModel::FaultyModel;
  std::vector<ParameterSpec> parameters() const override {
    auto list = FaultyModel::parameters();
    ParameterSpec *first = nullptr, *second = nullptr;
    for (ParameterSpec& spec : list) {
      if (spec.name == "attn_norm.weight") first = &spec;
      if (spec.name == "ffn_norm.weight") second = &spec;
    }
    if (fault_ == 1) std::swap(first->parts[0].hf_name, second->parts[0].hf_name);
    return list;
  }
};

}  // namespace

QUERN_PLUGIN("model", "exchanged_names", manifest) {
  add_faulty_model<ExchangedNames>(manifest, "exchanged_names", "a norm's weight under the name of another", 1);
}
