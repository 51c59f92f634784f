#include "optimizer/adamw.h"

#include "quern/error.h"

namespace quern {

std::vector<OptimizerState> AdamW::states() const {
  auto dtype = dtype_named(options_.moments);
  if (!dtype) fail_internal("adamw", "moments of unknown dtype " + options_.moments);
  return {{.name = "moment1", .dtype = *dtype}, {.name = "moment2", .dtype = *dtype}};
}

UpdateOp AdamW::update(const ParameterSpec& parameter) const {
  return {.kind = "adamw",
          .attributes = {{"beta1", options_.beta1},
                         {"beta2", options_.beta2},
                         {"eps", options_.eps},
                         {"weight_decay", parameter.decay ? options_.weight_decay : 0.0}}};
}

std::vector<Factory> optimizer_factories() {
  Manifest manifest;
  manifest.add<Optimizer>(
      "adamw", "AdamW, with moments in fp32 or bf16", adamw_options().specs(),
      [](const OptionValues& values) { return std::make_unique<AdamW>(adamw_options().bind(values)); });
  return std::move(manifest.factories);
}

}  // namespace quern
