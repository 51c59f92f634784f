#pragma once
// A sound model for faults to be added to: the tiny decoder with usual initial weights.

#include "quern/hf_config.h"
#include "quern/options.h"
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

/// An op with one input and an output like it, whose gradients are equal.
inline quern::OpSpec op_like_its_input(std::string kind) {
  return {.kind = std::move(kind),
          .inputs = {"x"},
          .outputs = {"y"},
          .infer =
              [](quern::InferContext& c) {
                if (c.inputs[0]->dtype != quern::DType::f32 && c.inputs[0]->dtype != quern::DType::bf16)
                  c.refuse(0, "f32 and bf16 only");
                c.outputs[0].shape = c.inputs[0]->shape;
                c.outputs[0].dtype = c.inputs[0]->dtype;
              },
          .backward = [](quern::BackwardContext& b) { b.set_input_grad(0, b.output_grad()); }};
}

/// A plain model whose option `fault` says what is wrong with it; 0: nothing.
class FaultyModel : public PlainModel {
 public:
  explicit FaultyModel(std::int64_t fault) : PlainModel({.vocabulary = 64}), fault_(fault) {}
  std::string hf_config() const override {
    quern::OptionValues fields;
    fields.set("fault", fault_);
    return quern::write_hf_config(hf_model(0), fields);
  }

  struct Options {
    std::int64_t fault = 0;
  };
  static quern::OptionTable<Options> options(int most) {
    quern::OptionTable<Options> t;
    t.add("fault", &Options::fault, "what is wrong; 0: nothing").at_least(0).at_most(most);
    return t;
  }
  static quern::HfModel hf_model(int most) {
    return {.model_type = "plain", .architecture = "PlainForCausalLM", .options = options(most).specs()};
  }

 protected:
  std::int64_t fault_;
};

/// Faults 1 to `most`.
template <class Faulty>
void add_faulty_model(quern::Manifest& manifest, const char* id, const char* summary, int most) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::Model>(
      id, summary, FaultyModel::hf_model(most).options, [most](const quern::OptionValues& given) {
        const auto made = FaultyModel::options(most).bind(quern::model_options(given, FaultyModel::hf_model(most)));
        return std::make_unique<Faulty>(made.fault);
      });
}
