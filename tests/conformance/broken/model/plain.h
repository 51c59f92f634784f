#pragma once
// A sound model for faults to be added to: the tiny decoder with usual initial weights.

#include "quern/plugin.h"
#include "quern/testkit/tiny_model.h"

class PlainModel : public quern::testkit::TinyModel {
 public:
  using TinyModel::TinyModel;
  std::vector<quern::ParameterSpec> parameters() const override {
    auto list = TinyModel::parameters();
    for (quern::ParameterSpec& spec : list)
      for (quern::ParameterPart& part : spec.parts) part.init.deviation = 0.02;
    return list;
  }
  std::string hf_config() const override { return R"({"model_type": "plain"})"; }
};
