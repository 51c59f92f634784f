#pragma once
// Options of the table [parallel.nccl].

#include <cstdint>
#include <string>

#include "quern/options.h"

namespace quern::nccl {

struct NcclOptions {
  std::string algorithm, protocol;
  std::int64_t channels = 0;
  std::string blocks = "default";
};

inline OptionTable<NcclOptions> nccl_options() {
  OptionTable<NcclOptions> t;
  t.add("algorithm", &NcclOptions::algorithm,
        "algorithm of reductions, as in NCCL_ALGO (\"Ring\"); changes bits; empty: NCCL chooses");
  t.add("protocol", &NcclOptions::protocol, "as in NCCL_PROTO (\"Simple\"); empty: NCCL chooses");
  t.add("channels", &NcclOptions::channels, "channels, one multiprocessor each; may change bits; 0: NCCL chooses")
      .at_least(0)
      .at_most(64);
  t.add("blocks", &NcclOptions::blocks,
        "multiprocessors that NCCL uses: default: for the fastest transfers; efficient: fewer; none: copy engines "
        "where possible, at some cost of speed")
      .one_of({"default", "efficient", "none"});
  return t;
}

}  // namespace quern::nccl
