#include "data/token_dataset.h"

#include "data/prefetch_source.h"
#include "data/token_source.h"
#include "quern/error.h"

namespace quern {

OptionTable<TokenDatasetOptions> token_dataset_options() {
  OptionTable<TokenDatasetOptions> table;
  table.add("train", &TokenDatasetOptions::train, "token file to train on (scripts/tokenize.py makes it)");
  table.add("validation", &TokenDatasetOptions::validation, "token file to evaluate on; empty: no evaluation");
  return table;
}

std::unique_ptr<DataSource> TokenDataset::open(const DataRequest& request) const {
  if (!has(request.split))
    throw Error(ErrorCode::config,
                {.where = request.split == Split::train ? "data.tokens.train" : "data.tokens.validation",
                 .what = "no token file is named",
                 .next = "make one with scripts/tokenize.py"});
  bool train = request.split == Split::train;
  auto source = std::make_unique<TokenFileSource>(TokenFileOptions{path(request.split), train}, request.geometry,
                                                  request.seed, request.rank, request.size);
  if (!train) return source;
  return std::make_unique<PrefetchSource>(std::move(source));
}

void add_token_dataset(Manifest& manifest) {
  manifest.add<Dataset>(
      "tokens", "token files, one a split", token_dataset_options().specs(),
      [](const OptionValues& values) { return std::make_unique<TokenDataset>(token_dataset_options().bind(values)); });
}

}  // namespace quern
