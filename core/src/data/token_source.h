#pragma once
// Micro-batches out of a token file: windows of sequence + 1 tokens at stride `sequence`, in an order that is shuffled
// anew each epoch. All ranks walk one global order, so the number of ranks and the micro-batch size only group it.

#include <cstdint>
#include <string>

#include "data/token_file.h"
#include "quern/data_source.h"

namespace quern {

struct TokenFileOptions {
  std::string path;
  bool shuffle = true;  ///< false: the file's order, for validation
};

class TokenFileSource : public DataSource {
 public:
  /// Rank `rank` of `size` takes places rank, rank + size, ... of the global order. An input error when the file is
  /// shorter than one sequence or no target counts.
  TokenFileSource(const TokenFileOptions& options, Geometry geometry, std::uint64_t seed, int rank = 0, int size = 1);

  std::int64_t vocabulary() const override { return file_.vocabulary(); }
  std::int64_t epoch_tokens() const override { return windows_ * geometry_.sequence; }
  /// Positions count from 0 in each row; `documents` stays empty. A batch may end one epoch and begin the next.
  void next(Batch& batch) override;
  /// The same on all ranks that took as many batches.
  std::string save_state() const override;
  /// Accepts another batch and rank count; refuses another file, sequence, seed or order.
  void load_state(const std::string& state) override;

  /// Windows of one epoch.
  std::int64_t windows() const { return windows_; }
  const TokenFile& file() const { return file_; }

 private:
  void read_window(std::uint64_t place, std::int64_t row, Batch& batch);

  TokenFile file_;
  Geometry geometry_;
  std::uint64_t seed_;
  std::uint64_t rank_, size_;
  bool shuffle_;
  std::int64_t windows_ = 0;
  std::uint64_t place_ = 0;  ///< in the global order over all epochs: the first that no rank has taken
  std::vector<std::int32_t> window_;
};

}  // namespace quern
