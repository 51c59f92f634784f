// Fault: three mismatches at once; all must be reported.
#include "quern/plugin.h"

static void fill(quern::Manifest&) {}

extern "C" __attribute__((visibility("default"))) const quern::ManifestHead* quern_plugin_manifest() {
  static const quern::ManifestHead head{128, 7, "other", "another", &fill};
  return &head;
}
