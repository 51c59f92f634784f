#pragma once
// One implementation under test, and how the kit makes it again and again: with fresh state each time.

#include <memory>
#include <string>
#include <vector>

#include "plugin/plugin_host.h"

namespace quern::conformance {

/// What the check is run with.
struct CheckOptions {
  std::vector<std::string> settings;  ///< "key=value", options of the plugin under test
  std::string device = "cpu";         ///< that communicators and stores work with
  int ordinal = 0;
  std::vector<std::string> only = {};  ///< parts of contracts' names; empty: all contracts
  std::string expected = {};           ///< file of expected values; empty: there is none
  bool write_expected = false;         ///< writes the file instead of comparing
};

struct Subject {
  PluginHost& host;
  const Factory& factory;
  OptionValues values;  ///< the defaults, the kit's values for required options, and the settings
  const CheckOptions& options;

  template <class Interface>
  std::unique_ptr<Interface> make() const {
    return host.create<Interface>(factory.id, values);
  }
  template <class Interface>
  std::unique_ptr<Interface> make_with(const std::string& key, OptionValue value) const {
    OptionValues changed = values;
    changed.set(key, std::move(value));
    return host.create<Interface>(factory.id, changed);
  }
};

/// The key of "key=value".
std::string key_of(const std::string& setting);
bool has_option(const Factory& factory, const std::string& key);
/// The defaults, the kit's values for sizes, and the settings that are this implementation's.
OptionValues values_of(PluginHost& host, const Factory& factory, const CheckOptions& options);

/// Other values of an option than it has here, from which one may be taken.
std::vector<OptionValue> other_values(const OptionSpec& spec, const OptionValue& now);

/// The oracle: a fresh CPU device, open, with the kernels that loaded plugins bring for it.
std::unique_ptr<Device> oracle(PluginHost& host);
/// A fresh device by id, with kernels as above; not open.
std::unique_ptr<Device> fresh_device(PluginHost& host, const std::string& id);

/// The device that the check was told to use, open. Skips the contract when its hardware is not here.
std::unique_ptr<Device> open_device(PluginHost& host, const CheckOptions& options);

/// "a=1, b=x": what differs from the defaults.
std::string settings_text(const Subject& subject);

}  // namespace quern::conformance
