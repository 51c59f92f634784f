#pragma once
// What the plugin that is linked into a test registers, made from options as the host would make it.

#include <memory>
#include <string_view>

#include "quern/error.h"
#include "quern/plugin.h"

extern "C" void quern_plugin_manifest(quern::Manifest& manifest);

namespace quern::testkit {

/// The one implementation that it has; another interface or id, or more of them, is an internal error.
template <class Interface>
std::unique_ptr<Interface> plugin_under_test(std::string_view id, const OptionValues& values = {}) {
  Manifest manifest;
  quern_plugin_manifest(manifest);
  if (manifest.factories.size() != 1)
    fail_internal("plugin_under_test", std::to_string(manifest.factories.size()) + " implementations");
  const Factory& factory = manifest.factories[0];
  if (factory.kind != kPluginKind<Interface> || factory.id != id)
    fail_internal("plugin_under_test", "it is " + factory.kind + "/" + factory.id);
  return std::unique_ptr<Interface>(static_cast<Interface*>(factory.create(values)));
}

}  // namespace quern::testkit
