#pragma once
// Sources of micro-batches. The config selects a dataset; it opens one source for each split.

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "quern/shape.h"

namespace quern {

/// One micro-batch in host memory: what the model's programs declare as inputs, by name. A source of tokens fills the
/// first four, each (batch * sequence).
struct Batch {
  std::vector<std::int32_t> tokens;
  std::vector<std::int32_t> targets;    ///< the next token, or what the model is to predict; -1 where it does not count
  std::vector<std::int32_t> positions;  ///< restart with each document when documents are packed
  /// Start offsets of documents, ascending from 0, last = token count; one starts with each row. Empty: one a row.
  std::vector<std::int32_t> documents;
  /// A readable name of each row: "train.tok window 17". Empty: the source has no names.
  std::vector<std::string> names = {};
  /// Other inputs: their elements, row-major, in the dtype that the model declares.
  std::map<std::string, std::vector<std::byte>> inputs = {};

  template <class T>
  void set(const std::string& input, std::span<const T> elements) {
    const auto bytes = std::as_bytes(elements);
    inputs[input].assign(bytes.begin(), bytes.end());
  }
  /// From token `first` of the micro-batch on no target counts; targets may be one a token or one a row.
  void discount(std::int64_t first, const Geometry& geometry);
};

/// Called by one thread at a time, which need not be the one that opened it.
class DataSource {
 public:
  virtual ~DataSource() = default;
  /// A bound that all tokens are below; 0: the data have no tokens.
  virtual std::int64_t vocabulary() const { return 0; }
  /// Tokens of one pass over the data.
  virtual std::int64_t epoch_tokens() const = 0;
  /// Fills the next micro-batch; never ends (each epoch is shuffled again). Throws an input error if the data are
  /// bad.
  virtual void next(Batch& batch) = 0;
  /// Exact position, as text for checkpoints, of the batch that `next` would return.
  virtual std::string save_state() const = 0;
  /// Continues at a saved position; an input error if the data have changed since.
  virtual void load_state(const std::string& state) = 0;
};

enum class Split : std::uint8_t { train, validation };

struct DataRequest {
  Split split = Split::train;
  Geometry geometry;
  std::uint64_t seed = 0;
  /// Rows are packed documents that do not attend to each other: positions restart with each, and a target in another
  /// document than its token does not count. A dataset without document boundaries throws.
  bool documents = false;
  std::int64_t vocabulary = 0;  ///< the model's: the bound of tokens in data that state none; 0: unknown
};

class Dataset {
 public:
  virtual ~Dataset() = default;
  virtual bool has(Split split) const = 0;
  /// Validation comes in the data's own order. An input error when the data are bad or there is no such split.
  virtual std::unique_ptr<DataSource> open(const DataRequest& request) const = 0;
};

}  // namespace quern
