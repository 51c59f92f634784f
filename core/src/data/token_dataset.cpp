#include "data/token_dataset.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "data/file_list.h"
#include "data/sources/prefetch_source.h"
#include "data/sources/token_source.h"
#include "quern/error.h"

namespace quern {

OptionTable<TokenDatasetOptions> token_dataset_options() {
  using O = TokenDatasetOptions;
  OptionTable<O> table;
  table.add("train", &O::train,
            "token files to train on, made by `quern-tools tokenize`: a path or pattern (*, ?, [...]), or a list");
  table.add("validation", &O::validation, "token files to evaluate on, given in the same way; empty: no evaluation");
  table.add("weights", &O::weights, "relative share of each entry of `train`; empty: every token is seen once a pass")
      .above(0);
  table.add("format", &O::format, "auto: quern's token files or LLMQ's BIN.TOK; uint16: bare 16-bit tokens, no header")
      .one_of({"auto", "uint16"});
  table.add("separator", &O::separator, "token that ends a document; -1: the files' own")
      .at_least(-1)
      .at_most(std::numeric_limits<std::int32_t>::max());
  table.add("verify", &O::verify, "verify the files' checksums once per start; over 16 MiB in total, during training");
  return table;
}

TokenDataset::TokenDataset(TokenDatasetOptions options) : options_(std::move(options)) {
  for (const auto& [where, list] :
       {std::pair("data.tokens.train", &options_.train), std::pair("data.tokens.validation", &options_.validation)})
    if (std::find(list->begin(), list->end(), "") != list->end())
      throw Error(ErrorCode::config, {.where = where,
                                      .what = "an entry is empty",
                                      .found = to_string(OptionValue(*list)),
                                      .expected = "paths of token files, or [] for none",
                                      .next = {}});
  if (!options_.weights.empty() && options_.weights.size() != options_.train.size())
    throw Error(ErrorCode::config, {.where = "data.tokens.weights",
                                    .what = "number of weights",
                                    .found = std::to_string(options_.weights.size()),
                                    .expected = std::to_string(options_.train.size()) + ", one an entry of `train`",
                                    .next = {}});
}

std::unique_ptr<DataSource> TokenDataset::open(const DataRequest& request) const {
  const bool train = request.split == Split::train;
  TokenFileOptions files{.entries = {},
                         .weights = train ? options_.weights : std::vector<double>{},
                         .shuffle = train,
                         .documents = request.documents,
                         .reading = {},
                         .verify = options_.verify,
                         .where = train ? "data.tokens.train" : "data.tokens.validation"};
  if (!has(request.split))
    throw Error(
        ErrorCode::config,
        {.where = files.where, .what = "no token file is named", .next = "make one with `quern-tools tokenize`"});
  for (const std::string& entry : entries(request.split)) files.entries.push_back(files_of(entry, files.where));
  files.reading.format = options_.format == "uint16" ? TokenFormat::uint16 : TokenFormat::by_magic;
  files.reading.vocabulary = request.vocabulary;
  if (options_.separator >= 0) files.reading.separator = static_cast<std::int32_t>(options_.separator);
  return std::make_unique<TokenFileSource>(files, request.geometry, request.seed);
}

void add_token_dataset(Manifest& manifest) {
  manifest.add<Dataset>(
      "tokens", "token files, a list for each split", token_dataset_options().specs(),
      [](const OptionValues& values) { return std::make_unique<TokenDataset>(token_dataset_options().bind(values)); });
}

}  // namespace quern
