#pragma once
// The exports of a plugin: a note with its kind, id and versions, which quern reads from the file and compares before
// any code of the library runs; and one symbol that fills a manifest. A whole plugin.cpp:
//
//   static std::unique_ptr<quern::Model> make(const quern::OptionValues& values) { ... }
//   QUERN_PLUGIN("model", "llama", manifest) {
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

/// Changes with every interface, and every type that an interface uses. CHANGELOG.md has an entry for each version.
#define QUERN_SDK_VERSION 15
inline constexpr std::uint32_t kSdkVersion = QUERN_SDK_VERSION;

#define QUERN_STRINGIFY_(x) #x
#define QUERN_STRINGIFY(x) QUERN_STRINGIFY_(x)
#ifdef _GLIBCXX_DEBUG  // containers with other sizes
#define QUERN_DEBUG_TAG "-debug"
#else
#define QUERN_DEBUG_TAG ""
#endif
/// Compiler ABI, standard library and language version: C++ objects cross the boundary, so all must agree. GCC's ABI
/// number differs between major versions; clang's is the same in all versions, and differs from GCC's.
#define QUERN_ABI_TAG                                                      \
  "cxxabi" QUERN_STRINGIFY(__GXX_ABI_VERSION) "-cxx11str" QUERN_STRINGIFY( \
      _GLIBCXX_USE_CXX11_ABI) "-cxx" QUERN_STRINGIFY(__cplusplus) QUERN_DEBUG_TAG

/// For messages.
#ifdef __clang__
#define QUERN_COMPILER "clang " QUERN_STRINGIFY(__clang_major__) "." QUERN_STRINGIFY(__clang_minor__)
#else
#define QUERN_COMPILER "GCC " __VERSION__
#endif

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
  std::vector<OptionSpec> options;  ///< of the table [kind.id]; [memory.id] of stores, [parallel.id] of communicators
  /// Returns an Interface, owned by the caller, as void*; made by Manifest::add so that the cast is right.
  std::function<void*(const OptionValues&)> create;
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

/// An ELF note (System V ABI, chapter 5) of owner "quern": texts "key=value", each with a zero byte behind it.
template <std::size_t kTextSize>
struct PluginNote {
  std::uint32_t owner_size = sizeof("quern"), text_size = kTextSize, type = 1;
  char owner[8] = "quern";
  char text[kTextSize];
};

}  // namespace quern

#define QUERN_PLUGIN_NOTE(note_text)                                                                            \
  __attribute__((used, section(".note.quern"), aligned(4))) static const ::quern::PluginNote<sizeof(note_text)> \
      quern_plugin_note {                                                                                       \
    .text = note_text                                                                                           \
  }

/// Defines the plugin's note and its one exported symbol, whose body fills `manifest`. Kind and id are literals and
/// match the file's name <kind>/libquern_<id>.so; the manifest has a factory for them.
#define QUERN_PLUGIN(kind, id, manifest)                                                                          \
  QUERN_PLUGIN_NOTE("sdk=" QUERN_STRINGIFY(QUERN_SDK_VERSION) "\0abi=" QUERN_ABI_TAG "\0compiler=" QUERN_COMPILER \
                                                              "\0kind=" kind "\0id=" id);                         \
  extern "C" __attribute__((visibility("default"))) void quern_plugin_manifest(::quern::Manifest& manifest)
