#pragma once
// One checkpoint: a directory <run>/checkpoints/step-00001200/ with tensors.safetensors and, written last, state.json,
// which states the sizes and checksums of all files and of itself. It appears under its name whole or not at all.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/safetensors.h"
#include "quern/view.h"

namespace quern {

/// What computed a run: quern itself, a plugin, or what a communicator sums by.
struct LibraryIdentity {
  std::string name, version;
  std::string hash = {};  ///< checksum of its file, as text; empty: it has none
  bool operator==(const LibraryIdentity&) const = default;
};

/// What a run needs beside its tensors to continue with the same bits. All text is UTF-8.
struct CheckpointMeta {
  std::int64_t step = 0;     ///< optimizer steps finished
  std::string data_state;    ///< DataSource::save_state
  std::string device_state;  ///< Device::save_state
  std::string config;        ///< resolved config, TOML
  std::string quern_version;
  std::int64_t updates = 0;                 ///< of these, steps that moved the weights: not those that were skipped
  std::optional<std::int64_t> tokens = {};  ///< that these steps trained on; older checkpoints do not have it
  bool evaluated = true;                    ///< false: the evaluation that was due at this step was cut short
  std::vector<LibraryIdentity> libraries;   ///< of the process that wrote it; empty: not known
  bool operator==(const CheckpointMeta&) const = default;
};

/// Host memory, borrowed for the call; without data where a TensorReader fetches it.
struct NamedView {
  std::string name;
  View view;
};

/// The bytes of a tensor, valid until the next call. Lets a state be written that the host has no room for as a whole.
using TensorReader = std::function<const std::byte*(const NamedView&)>;

struct Checkpoint {
  std::string path;
  CheckpointMeta meta;
  SafetensorsFile tensors;  ///< each tensor aligned to its element size
};

/// Names of tensors: "master/qkv.weight/3" of a parameter in layer 3, "moment1/qkv.weight/3" of an optimizer's state of
/// it, and others of the precision backend's states.
inline constexpr std::string_view kMasterPrefix = "master/";

/// <run>/checkpoints/step-00001200
std::string checkpoint_path(const std::string& run_directory, std::int64_t step);

/// Writes the checkpoint of meta.step, replacing one of that step, and returns its path. A resources error (disk full,
/// read-only, ...) names the path and leaves nothing new. Without `reader` the views have their data.
std::string write_checkpoint(const std::string& run_directory, const CheckpointMeta& meta,
                             const std::vector<NamedView>& tensors, const TensorReader& reader = {});

/// Opens a checkpoint directory and proves it whole, checksums included; an input error names the damaged part.
Checkpoint read_checkpoint(const std::string& path);

/// The model's parameters in a checkpoint, sorted by name, without a look at their values.
std::vector<TensorDeclaration> parameters_in(const std::string& path);

/// The cheap part of that proof: state.json is whole and the files have their sizes.
CheckpointMeta check_checkpoint_files(const std::string& path);

}  // namespace quern
