// Fault: built with the headers of another SDK version.
#include "quern/plugin.h"

static void fill(quern::Manifest&) {}

extern "C" __attribute__((visibility("default"))) const quern::ManifestHead* quern_plugin_manifest() {
  static const quern::ManifestHead head{sizeof(quern::ManifestHead), quern::kSdkVersion + 1, QUERN_ABI_TAG,
                                        "wrong_sdk_version", &fill};
  return &head;
}
