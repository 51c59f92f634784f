#pragma once
// The op reduce_ranks on what a communicator has brought together. One op for all, so that all give the same bits.

#include <map>
#include <memory>
#include <tuple>

#include "quern/communicator.h"

namespace quern::collectives {

class RankReduction {
 public:
  /// Throws a config error where the device has no such op without workspace. The device outlives this.
  RankReduction(const char* where, Device& device, int rank, int ranks);

  /// All ranks' elements at `staged`, (ranks, n), into `out` (n); this rank's are at `own`, if that is not null.
  void launch(void* staged, void* own, const View& out, Reduction reduction, Stream stream);

 private:
  using Key = std::tuple<DType, Reduction, std::int64_t, bool>;

  OpInstance instance(DType dtype, Reduction reduction, std::int64_t count, bool apart) const;

  Device& device_;
  const int rank_, ranks_;
  std::map<Key, std::unique_ptr<Kernel>> kernels_;
};

}  // namespace quern::collectives
