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
        "how sums are taken, as NCCL_ALGO spells it (\"Ring\"); changes bits; empty: NCCL chooses");
  t.add("protocol", &NcclOptions::protocol, "as NCCL_PROTO spells it (\"Simple\"); empty: NCCL chooses");
  t.add("channels", &NcclOptions::channels, "channels, one multiprocessor each; may change bits; 0: NCCL chooses")
      .at_least(0)
      .at_most(64);
  t.add("blocks", &NcclOptions::blocks,
        "multiprocessors that NCCL takes from products: default: what is fastest; efficient: fewer; none: copy engines "
        "where it can, at some cost of speed")
      .one_of({"default", "efficient", "none"});
  return t;
}

}  // namespace quern::nccl
