// Fault: the parts of a packed parameter are fewer rows than the parameter has.
#include "plain.h"

namespace {

class WrongShape final : public PlainModel {
 public:
  std::vector<quern::ParameterSpec> parameters() const override {
    auto list = PlainModel::parameters();
    list[0].parts[0].rows -= 1;
    return list;
  }
};

}  // namespace

QUERN_PLUGIN("model", "wrong_shape", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::Model>("wrong_shape", "a model with a row too few", {},
                             [](const quern::OptionValues&) { return std::make_unique<WrongShape>(); });
}
