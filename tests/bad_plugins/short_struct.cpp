// Fault: a head that ends after its two numbers; the pointers that follow must not be followed.
#include "quern/plugin.h"

static void fill(quern::Manifest&) {}

extern "C" __attribute__((visibility("default"))) const quern::ManifestHead* quern_plugin_manifest() {
  static const quern::ManifestHead head{8, quern::kSdkVersion, reinterpret_cast<const char*>(8),
                                        reinterpret_cast<const char*>(8), &fill};
  return &head;
}
