#pragma once

#include <string>

#include "quern/options.h"

namespace quern::disk {

struct DiskOptions {
  std::string folder = {};
  double read_rate = 3, write_rate = 2;
  std::int64_t threads = 8;
};

inline OptionTable<DiskOptions> disk_options() {
  OptionTable<DiskOptions> table;
  table.add("folder", &DiskOptions::folder,
            "where the file is, which has no name and is gone with the run; empty: log.directory");
  table.add("read_rate", &DiskOptions::read_rate, "GB/s that plans take the disk to read").above(0).at_most(1000);
  table.add("write_rate", &DiskOptions::write_rate, "GB/s that plans take it to write").above(0).at_most(1000);
  table.add("threads", &DiskOptions::threads, "requests to the disk at a time").at_least(1).at_most(256);
  return table;
}

}  // namespace quern::disk
