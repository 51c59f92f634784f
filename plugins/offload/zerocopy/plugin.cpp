// Pinned host memory in which kernels read and write in place.
#include "quern/plugin.h"

#include "shared/pinned_store/pinned_store.h"

QUERN_PLUGIN("offload", "zerocopy", manifest) {
  using namespace quern;
  manifest.version = "0.1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<OffloadStore>(
      "zerocopy", "host memory that kernels read and write in place", {}, [](const OptionValues&) {
        return std::make_unique<PinnedStore>(
            OffloadTraits{.id = "zerocopy", .mappable = true, .can_capture = true, .in_host_memory = true},
            MemoryKind::pinned);
      });
}
