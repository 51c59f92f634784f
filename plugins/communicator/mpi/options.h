#pragma once
// Options of the table [parallel.mpi].

#include <cstdint>
#include <string>

#include "quern/options.h"

namespace quern::mpi {

struct MpiOptions {
  std::int64_t piece_kib = 1024;
  std::string staging = "auto";
};

inline OptionTable<MpiOptions> mpi_options() {
  OptionTable<MpiOptions> t;
  t.add("piece_kib", &MpiOptions::piece_kib,
        "size of pieces to and from each rank, in KiB; needs four times that pinned memory for each rank; changes no "
        "bit")
      .at_least(1)
      .at_most(1 << 20);
  t.add("staging", &MpiOptions::staging,
        "pinned: pieces go through pinned memory; none: MPI reads and writes the device's memory itself; auto: none on "
        "GPUs where MPI is CUDA-aware; changes no bit")
      .one_of({"auto", "pinned", "none"});
  return t;
}

}  // namespace quern::mpi
