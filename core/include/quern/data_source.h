#pragma once
// Where micro-batches come from.

#include <cstdint>
#include <string>
#include <vector>

#include "quern/shape.h"

namespace quern {

/// One micro-batch in host memory, each vector (batch * sequence).
struct Batch {
  std::vector<std::int32_t> tokens;
  std::vector<std::int32_t> targets;    ///< the next token; -1 where it does not count
  std::vector<std::int32_t> positions;  ///< restart with each document when documents are packed
  std::vector<std::int32_t> documents;  ///< start offsets of documents, ascending, last = token count; empty: one a row
};

class DataSource {
 public:
  virtual ~DataSource() = default;
  virtual std::int64_t vocabulary() const = 0;
  /// Tokens of one pass over the data.
  virtual std::int64_t epoch_tokens() const = 0;
  /// Fills the next micro-batch; never ends (a new epoch is shuffled anew). Throws an input error when the data are
  /// bad.
  virtual void next(Batch& batch) = 0;
  /// Exact position, as text for checkpoints, of the batch that `next` would return.
  virtual std::string save_state() const = 0;
  /// Continues at a saved position; an input error when the data are not those it was saved with.
  virtual void load_state(const std::string& state) = 0;
};

}  // namespace quern
