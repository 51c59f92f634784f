#include "optimizer/optimizers.h"

#include <algorithm>
#include <iterator>

#include "quern/error.h"

namespace quern {

namespace {

class ByGroups final : public Optimizer {
 public:
  ByGroups(std::string id, std::unique_ptr<Optimizer> run,
           std::vector<std::pair<std::string, std::unique_ptr<Optimizer>>> others)
      : id_(std::move(id)), run_(std::move(run)), others_(std::move(others)) {}

  void check(std::span<const ParameterSpec> parameters) const override {
    std::vector<const Optimizer*> all{run_.get()};
    for (const auto& [id, optimizer] : others_) all.push_back(optimizer.get());
    for (const Optimizer* optimizer : all) {
      std::vector<ParameterSpec> own;
      std::copy_if(parameters.begin(), parameters.end(), std::back_inserter(own),
                   [&](const ParameterSpec& parameter) { return &of(parameter) == optimizer; });
      if (!own.empty()) optimizer->check(own);
    }
  }
  std::vector<OptimizerState> states(const ParameterSpec& parameter) const override {
    return of(parameter).states(parameter);
  }
  void update(UpdateBuilder& b, const ParameterSpec& parameter) const override { of(parameter).update(b, parameter); }

 private:
  const Optimizer& of(const ParameterSpec& parameter) const {
    if (parameter.optimizer.empty() || parameter.optimizer == id_) return *run_;
    for (const auto& [id, optimizer] : others_)
      if (id == parameter.optimizer) return *optimizer;
    throw Error(ErrorCode::config, {.where = "parameter " + parameter.name,
                                    .what = "the run has no optimizer that the model names for it",
                                    .found = parameter.optimizer,
                                    .next = "name it in a group of train.groups"});
  }

  std::string id_;
  std::unique_ptr<Optimizer> run_;
  std::vector<std::pair<std::string, std::unique_ptr<Optimizer>>> others_;
};

}  // namespace

std::vector<Factory> optimizer_factories() {
  Manifest manifest;
  for (auto add : {add_adamw, add_lion, add_muon, add_schedule_free, add_sgd}) add(manifest);
  return std::move(manifest.factories);
}

std::unique_ptr<Optimizer> by_groups(std::string id, std::unique_ptr<Optimizer> run,
                                     std::vector<std::pair<std::string, std::unique_ptr<Optimizer>>> others) {
  return std::make_unique<ByGroups>(std::move(id), std::move(run), std::move(others));
}

}  // namespace quern
