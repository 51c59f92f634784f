#pragma once
// Options of the table [parallel.memcpy].

#include <cstdint>

#include "quern/options.h"

namespace quern::memcpy {

struct MemcpyOptions {
  std::int64_t piece_kib = 8192;
};

inline OptionTable<MemcpyOptions> memcpy_options() {
  OptionTable<MemcpyOptions> t;
  t.add("piece_kib", &MemcpyOptions::piece_kib,
        "size of pieces of reductions and sends, in KiB for each rank; needs twice that memory for each rank; changes "
        "no bit")
      .at_least(1)
      .at_most(1 << 20);
  return t;
}

}  // namespace quern::memcpy
