#pragma once
// The dataset `tokens`: lists of token files, one list a split.

#include <cstdint>
#include <string>
#include <vector>

#include "quern/data_source.h"
#include "quern/plugin.h"

namespace quern {

struct TokenDatasetOptions {
  std::vector<std::string> train = {};
  std::vector<std::string> validation = {};
  std::vector<double> weights = {};
  std::string format = "auto";
  std::int64_t separator = -1;
  bool verify = true;
};
OptionTable<TokenDatasetOptions> token_dataset_options();

class TokenDataset : public Dataset {
 public:
  /// A config error when there are weights, but not one for each entry of `train`.
  explicit TokenDataset(TokenDatasetOptions options);
  bool has(Split split) const override { return !entries(split).empty(); }
  std::unique_ptr<DataSource> open(const DataRequest& request) const override;

 private:
  const std::vector<std::string>& entries(Split split) const {
    return split == Split::train ? options_.train : options_.validation;
  }
  TokenDatasetOptions options_;
};

/// Registers it as part of quern.
void add_token_dataset(Manifest& manifest);

}  // namespace quern
