#pragma once
// The dataset `tokens`: token files made by scripts/tokenize.py, one a split.

#include <string>

#include "quern/data_source.h"
#include "quern/plugin.h"

namespace quern {

struct TokenDatasetOptions {
  std::string train;
  std::string validation;
};
OptionTable<TokenDatasetOptions> token_dataset_options();

class TokenDataset : public Dataset {
 public:
  explicit TokenDataset(TokenDatasetOptions options) : options_(std::move(options)) {}
  bool has(Split split) const override { return !path(split).empty(); }
  std::unique_ptr<DataSource> open(const DataRequest& request) const override;

 private:
  const std::string& path(Split split) const { return split == Split::train ? options_.train : options_.validation; }
  TokenDatasetOptions options_;
};

/// Registers it as part of quern.
void add_token_dataset(Manifest& manifest);

}  // namespace quern
