// Fault: built by a compiler whose C++ objects differ.
#include "quern/plugin.h"

static void fill(quern::Manifest&) {}

extern "C" __attribute__((visibility("default"))) const quern::ManifestHead* quern_plugin_manifest() {
  static const quern::ManifestHead head{sizeof(quern::ManifestHead), quern::kSdkVersion, "cxxabi9999-cxx98",
                                        "wrong_abi_tag", &fill};
  return &head;
}
