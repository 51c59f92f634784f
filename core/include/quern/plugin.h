#pragma once
// What a plugin exports: one C symbol that returns a versioned manifest. The fixed C head is read and checked before
// anything C++ behind it is touched. A whole plugin.cpp:
//
//   static std::unique_ptr<quern::Model> make(const quern::OptionValues& values) { ... }
//   QUERN_PLUGIN("llama", manifest) {
//     manifest.version = "1.0"; manifest.licence = "Apache-2.0";
//     manifest.add<quern::Model>("llama", "Llama 2, 3, 3.1, 3.2", llama_options().specs(), make);
//   }

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "quern/communicator.h"
#include "quern/data_source.h"
#include "quern/device.h"
#include "quern/log_sink.h"
#include "quern/model.h"
#include "quern/offload.h"
#include "quern/optimizer.h"
#include "quern/options.h"
#include "quern/precision.h"

namespace quern {

/// Changes whenever an interface, or a type that crosses it, changes.
inline constexpr std::uint32_t kSdkVersion = 2;

#define QUERN_STRINGIFY_(x) #x
#define QUERN_STRINGIFY(x) QUERN_STRINGIFY_(x)
/// Compiler ABI, standard library and language version: C++ objects cross the boundary, so all must agree.
#define QUERN_ABI_TAG \
  "cxxabi" QUERN_STRINGIFY(__GXX_ABI_VERSION) "-cxx11str" QUERN_STRINGIFY(_GLIBCXX_USE_CXX11_ABI) "-cxx20"

/// Config tables that select an implementation by id.
template <class Interface>
inline constexpr const char* kPluginKind = nullptr;
template <>
inline constexpr const char* kPluginKind<Device> = "device";
template <>
inline constexpr const char* kPluginKind<Model> = "model";
template <>
inline constexpr const char* kPluginKind<PrecisionBackend> = "precision";
template <>
inline constexpr const char* kPluginKind<Communicator> = "communicator";
template <>
inline constexpr const char* kPluginKind<OffloadStore> = "offload";
template <>
inline constexpr const char* kPluginKind<Optimizer> = "optimizer";
template <>
inline constexpr const char* kPluginKind<Schedule> = "schedule";
template <>
inline constexpr const char* kPluginKind<Dataset> = "data";
template <>
inline constexpr const char* kPluginKind<LogSink> = "log";

/// One implementation that can be made by id.
struct Factory {
  std::string kind;  ///< kPluginKind of its interface
  std::string id;
  std::string summary;
  std::vector<OptionSpec> options;  ///< of the table [kind.id]
  /// Returns an Interface, owned by the caller, as void*; made by Manifest::add so that the cast is right.
  std::function<void*(const OptionValues&)> create;
};

/// A kernel of a custom op for the device with that id.
struct CustomKernel {
  std::string device;
  std::string op;
  KernelFactory factory;
};

struct Manifest {
  std::string name, version, licence;
  std::vector<Factory> factories;
  std::vector<OpSpec> ops;  ///< custom op kinds
  std::vector<CustomKernel> kernels;

  template <class Interface, class Make>
  void add(std::string id, std::string summary, std::vector<OptionSpec> options, Make make) {
    static_assert(kPluginKind<Interface> != nullptr, "not a plugin interface");
    factories.push_back({kPluginKind<Interface>, std::move(id), std::move(summary), std::move(options),
                         [make](const OptionValues& values) -> void* {
                           std::unique_ptr<Interface> made = make(values);
                           return made.release();
                         }});
  }
};

/// The C head of a manifest; the first four fields never change.
struct ManifestHead {
  std::uint32_t struct_size;  ///< sizeof(ManifestHead) as the plugin was built
  std::uint32_t sdk_version;  ///< kSdkVersion
  const char* abi_tag;        ///< QUERN_ABI_TAG
  const char* name;
  void (*fill)(Manifest&);  ///< called once, after the head was checked
};

}  // namespace quern

/// Defines the plugin's one exported symbol; the body fills `manifest`.
#define QUERN_PLUGIN(plugin_name, manifest)                                                                     \
  static void quern_fill_manifest(::quern::Manifest& manifest);                                                 \
  extern "C" __attribute__((visibility("default"))) const ::quern::ManifestHead* quern_plugin_manifest() {      \
    static const ::quern::ManifestHead head{sizeof(::quern::ManifestHead), ::quern::kSdkVersion, QUERN_ABI_TAG, \
                                            plugin_name, &quern_fill_manifest};                                 \
    return &head;                                                                                               \
  }                                                                                                             \
  static void quern_fill_manifest(::quern::Manifest& manifest)
