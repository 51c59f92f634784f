// State on disk, behind staging memory.
#include "quern/plugin.h"

#include "disk_store.h"

QUERN_PLUGIN("offload", "disk", manifest) {
  using namespace quern;
  manifest.version = "0.1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<OffloadStore>(
      "disk", "a file on a local disk, read and written past the page cache", disk::disk_options().specs(),
      [](const OptionValues& values) { return std::make_unique<disk::DiskStore>(disk::disk_options().bind(values)); });
}
