#pragma once
// Options of the table [parallel.memcpy].

#include <cstdint>
#include <string>

#include "quern/options.h"

namespace quern::memcpy {

struct MemcpyOptions {
  std::int64_t piece_kib = 8192;
  std::string through = "auto";
};

inline OptionTable<MemcpyOptions> memcpy_options() {
  OptionTable<MemcpyOptions> t;
  t.add("piece_kib", &MemcpyOptions::piece_kib,
        "size of pieces of reductions and sends, in KiB for each rank; needs twice that memory for each rank; changes "
        "no bit")
      .at_least(1)
      .at_most(1 << 20);
  t.add("through", &MemcpyOptions::through,
        "where copies between ranks go: \"peer\", from device memory to device memory; \"host\", through pinned host "
        "memory, three pieces of it for each rank; or \"auto\", the first that works between all ranks; changes no bit")
      .one_of({"auto", "peer", "host"});
  return t;
}

}  // namespace quern::memcpy
