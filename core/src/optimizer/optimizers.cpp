#include "optimizer/optimizers.h"

namespace quern {

namespace {

class ByGroups final : public Optimizer {
 public:
  ByGroups(std::unique_ptr<Optimizer> run, std::vector<std::pair<std::string, std::unique_ptr<Optimizer>>> others)
      : run_(std::move(run)), others_(std::move(others)) {}

  std::vector<OptimizerState> states(const ParameterSpec& parameter) const override {
    return of(parameter).states(parameter);
  }
  void update(UpdateBuilder& b, const ParameterSpec& parameter) const override { of(parameter).update(b, parameter); }

 private:
  const Optimizer& of(const ParameterSpec& parameter) const {
    for (const auto& [id, optimizer] : others_)
      if (id == parameter.optimizer) return *optimizer;
    return *run_;
  }

  std::unique_ptr<Optimizer> run_;
  std::vector<std::pair<std::string, std::unique_ptr<Optimizer>>> others_;
};

}  // namespace

std::vector<Factory> optimizer_factories() {
  Manifest manifest;
  for (auto add : {add_adamw, add_lion, add_muon, add_sgd}) add(manifest);
  return std::move(manifest.factories);
}

std::unique_ptr<Optimizer> by_groups(std::unique_ptr<Optimizer> run,
                                     std::vector<std::pair<std::string, std::unique_ptr<Optimizer>>> others) {
  if (others.empty()) return run;
  return std::make_unique<ByGroups>(std::move(run), std::move(others));
}

}  // namespace quern
