#pragma once
// One checkpoint: a directory <run>/checkpoints/step-00001200/ with a file of tensors of each rank and, written last,
// state.json, which states the sizes and checksums of all files and of itself. It appears under its name whole or not
// at all.

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/tensor_files.h"
#include "optimizer/averaged_steps.h"
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
  AveragedSteps averaged = {};              ///< for optimizers that average
  std::vector<std::string> evaluated_states = {};  ///< kinds of tensors that are evaluated in place of masters
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
  std::vector<std::string> checksums;  ///< of the tensors' files, as state.json has them
  TensorFiles tensors;                 ///< in files each is aligned to its element size
};

/// Names of tensors: "master/qkv.weight/3" of a parameter in layer 3, "moment1/qkv.weight/3" of an optimizer's state of
/// it, and others of the precision backend's states.
inline constexpr std::string_view kMasterPrefix = "master/";

/// Of the master's name the tensor's that evaluations and exports read: an optimizer's average, or the master.
std::string evaluated_name(const Checkpoint& checkpoint, const std::string& master);
/// Elements first, first + 1, ... of that tensor; of a master in int8, by the scales of its rows.
void read_weights(const Checkpoint& checkpoint, const std::string& master, std::int64_t first, std::span<float> values);

/// <run>/checkpoints/step-00001200
std::string checkpoint_path(const std::string& run_directory, std::int64_t step);

/// Which of the ranks that write a checkpoint; each writes a file, with its rows of tensors.
struct RankFile {
  int rank = 0, ranks = 1;
};
/// "tensors.safetensors" of one rank; "tensors-00002-of-00004.safetensors"
std::string name_of(const RankFile& file);

/// Writes a rank's file into the unfinished checkpoint `folder`. A resources error (disk full, read-only, ...) names
/// the path. Without `reader` the views have their data.
FileRecord write_tensors(const std::string& folder, const RankFile& file, const std::vector<NamedView>& tensors,
                         const TensorReader& reader = {});
/// Writes state.json, the last of an unfinished checkpoint's files; `files` are of all ranks.
void write_state(const std::string& folder, const CheckpointMeta& meta, const std::vector<FileRecord>& files);

/// Writes the checkpoint of meta.step as its only rank, replacing one of that step, and returns its path. On failure,
/// as above, nothing new is left.
std::string write_checkpoint(const std::string& run_directory, const CheckpointMeta& meta,
                             const std::vector<NamedView>& tensors, const TensorReader& reader = {});

/// Opens a checkpoint directory and proves it whole, checksums included; an input error names the damaged part.
Checkpoint read_checkpoint(const std::string& path);
/// The same without the checksums of tensors.
Checkpoint open_checkpoint(const std::string& path);
/// The checksum of that proof for one of its files; an input error where it is another than state.json has.
void verify_file(const Checkpoint& checkpoint, std::size_t file);

/// The model's parameters in a checkpoint, sorted by name, without a look at their values.
std::vector<TensorDeclaration> parameters_in(const std::string& path);

/// The cheap part of that proof: state.json is whole and the files have their sizes.
CheckpointMeta check_checkpoint_files(const std::string& path);

}  // namespace quern
