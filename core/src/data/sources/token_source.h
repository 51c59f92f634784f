#pragma once
// Micro-batches out of token files: windows of sequence + 1 tokens at stride `sequence` of each file, in an order that
// is shuffled anew each pass. All ranks walk one global order, so the number of ranks and the micro-batch size only
// group it.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "data/sources/window_order.h"
#include "data/tokens/payload_check.h"
#include "data/tokens/token_file.h"
#include "quern/skipping_source.h"

namespace quern {

struct TokenFileOptions {
  std::vector<std::vector<std::string>> entries;  ///< files by entry of the config's list
  std::vector<double> weights = {};               ///< of the entries; empty: every window once a pass
  bool shuffle = true;                            ///< false: the files' order, for validation
  bool documents = false;                         ///< see DataRequest
  TokenReading reading = {};
  bool verify = true;      ///< prove the checksums that the files state
  std::string where = {};  ///< config key of the list, for messages
};

class TokenFileSource : public SkippingSource {
 public:
  /// An input error when a file is
  /// shorter than one sequence, files are of different vocabularies, documents are asked for and a file has no
  /// separator, or no target counts. A payload that is not what its header states is an input error of some batch.
  TokenFileSource(const TokenFileOptions& options, Geometry geometry, std::uint64_t seed);

  /// As the files state it; if that is more than options.reading has, one more than the largest token in them.
  std::int64_t vocabulary() const override { return vocabulary_; }
  std::int64_t epoch_tokens() const override { return windows() * geometry_.sequence; }
  /// A batch may end one pass and begin the next.
  void next(Batch& batch) override;
  std::string save_state() const override;
  /// A config error when there are not as many.
  void skip(std::int64_t batches) override;
  /// Accepts another batch size, and files that moved; refuses other files, another sequence, seed or order. Goes on by
  /// the rule that the position was saved under.
  void load_state(const std::string& state) override;

  /// Windows of one pass.
  std::int64_t windows() const { return static_cast<std::int64_t>(order_.windows()); }

 private:
  /// A file and where its windows are in its group.
  struct Part {
    TokenFile file;
    std::uint64_t begin, end;
  };
  using Group = std::vector<Part>;

  static std::vector<Group> open(const TokenFileOptions& options, std::int64_t sequence);
  WindowOrder make_order(OrderRule rule) const;
  void check_files();
  void take_used_vocabulary();
  void check_targets() const;
  std::vector<const TokenFile*> files() const;
  /// A position's text without its place.
  std::string describe(const WindowOrder& order) const;
  void read_window(std::uint64_t place, std::int64_t row, Batch& batch);

  Geometry geometry_;
  std::uint64_t seed_;
  bool shuffle_, documents_;
  std::string where_;
  std::vector<Group> groups_;
  std::vector<double> weights_;
  WindowOrder order_;
  std::int64_t vocabulary_ = 0;
  std::string description_;  ///< of the data and their order: what a saved position must agree with
  std::uint64_t place_ = 0;  ///< in the order over all passes: the next window
  std::vector<std::int32_t> window_;
  std::vector<std::uint8_t> counts_;  ///< of its tokens, whether each is a target
  std::unique_ptr<PayloadCheck> check_;
};

}  // namespace quern
