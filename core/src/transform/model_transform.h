#pragma once
// A model with another's programs and parameters, changed: what adapters and the groups of a config are. The passes and
// all that follows see a model like others.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "quern/model.h"

namespace quern {

/// Forwards everything.
class ModelTransform : public Model {
 public:
  explicit ModelTransform(std::unique_ptr<Model> model) : model_(std::move(model)) {}

  ModelTraits traits() const override { return model_->traits(); }
  std::vector<ParameterSpec> parameters() const override { return model_->parameters(); }
  std::int64_t block_kind(std::int64_t layer) const override { return model_->block_kind(layer); }
  void embed(ProgramBuilder& b) const override { model_->embed(b); }
  void block(ProgramBuilder& b, std::int64_t layer) const override { model_->block(b, layer); }
  void head(ProgramBuilder& b) const override { model_->head(b); }
  std::string hf_config() const override { return model_->hf_config(); }

 protected:
  const Model& base() const { return *model_; }

 private:
  std::unique_ptr<Model> model_;
};

}  // namespace quern
