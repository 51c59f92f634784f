#include "checkpoint/checkpoint.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <utility>

#include "base/files/json_file.h"
#include "base/shorten.h"
#include "engine/host_tensor.h"
#include "program/names.h"
#include "quern/error.h"

namespace quern {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

constexpr std::string_view kTensorsBegin = "tensors", kTensorsEnd = ".safetensors";
constexpr const char* kState = "state.json";
constexpr const char* kFormat = "quern checkpoint";
constexpr int kVersionOfOne = 1, kVersion = 2;  // with one file of tensors, with one of each rank
constexpr int kStateDepth = 3;                  // the state, its files or libraries, one of them
constexpr std::size_t kLargestState = std::size_t{64} << 20;
constexpr const char* kUseOlder = "resume from an older checkpoint";

/// state.json as read: the run's part, and what the files must be.
struct StateFile {
  CheckpointMeta meta;
  std::vector<std::uint64_t> bytes;  // of the tensors' files, by rank
  std::vector<std::string> checksums;

  std::string file(std::size_t rank) const {
    return name_of(RankFile{static_cast<int>(rank), static_cast<int>(bytes.size())});
  }
};

// The checksum of everything in state.json but itself.
std::string own_checksum(json state) {
  state.erase("xxh3");
  std::string text = state.dump();
  return checksum_text(checksum_of(std::as_bytes(std::span(text))));
}

json json_of(const std::vector<LibraryIdentity>& libraries) {
  json list = json::array();
  for (const LibraryIdentity& library : libraries)
    list.push_back({{"name", library.name}, {"version", library.version}, {"xxh3", library.hash}});
  return list;
}

std::vector<LibraryIdentity> libraries_in(const json& list) {
  std::vector<LibraryIdentity> libraries;
  for (const json& library : list) libraries.push_back({library.at("name"), library.at("version"), library.at("xxh3")});
  return libraries;
}

std::string state_text(const std::string& path, const CheckpointMeta& meta, const std::vector<FileRecord>& files) {
  const int ranks = static_cast<int>(files.size());
  json state = {{"format", kFormat},
                {"version", ranks == 1 ? kVersionOfOne : kVersion},
                {"quern_version", meta.quern_version},
                {"libraries", json_of(meta.libraries)},
                {"step", meta.step},
                {"updates", meta.updates},
                {"evaluated", meta.evaluated},
                {"data_state", meta.data_state},
                {"device_state", meta.device_state},
                {"config", meta.config}};
  for (int rank = 0; rank < ranks; ++rank) {
    const FileRecord& file = files[static_cast<std::size_t>(rank)];
    state["files"][name_of(RankFile{rank, ranks})] = {{"bytes", file.bytes}, {"xxh3", checksum_text(file.checksum)}};
  }
  if (meta.tokens) state["tokens"] = *meta.tokens;
  if (!meta.evaluated_states.empty()) {
    state["evaluated_states"] = meta.evaluated_states;
    state["averaged"] = {{"largest_rate", meta.averaged.largest_rate}, {"weights", meta.averaged.weights}};
  }
  try {
    state["xxh3"] = own_checksum(state);
    return state.dump(2) + "\n";
  } catch (const json::exception& error) {
    fail_internal(path, std::string("saved state is not UTF-8 text: ") + error.what());
  }
}

/// A number that counts something. JSON's other numbers would be converted without a word: 1e300, 2.5, -1, true.
std::int64_t count_in(const json& object, const std::string& key, const std::string& path) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  const json& value = object.at(key);
  if (value.is_number_unsigned() && value.get<std::uint64_t>() <= std::uint64_t{kMost})
    return value.get<std::int64_t>();
  throw Error(ErrorCode::input,
              {path, key, printable(value.dump()), "a whole number from 0 to " + std::to_string(kMost), kUseOlder});
}

StateFile read_state(const std::string& path) {
  auto refuse = [&](const std::string& what, const std::string& found, const std::string& expected) {
    throw Error(ErrorCode::input, {path, what, found, expected, kUseOlder});
  };
  json state = read_strict_json(path, kLargestState, kStateDepth);
  try {
    if (state.at("format") != kFormat) refuse("not a quern checkpoint", quote_name(state["format"].dump()), kFormat);
    if (state.at("version") != kVersionOfOne && state["version"] != kVersion)
      refuse("checkpoint version", printable(state["version"].dump()), "1 or 2");
    std::string stated = state.at("xxh3"), actual = own_checksum(state);
    if (stated != actual) refuse("checksum of state.json", actual, printable(stated));
    StateFile read;
    const std::int64_t step = count_in(state, "step", path);
    read.meta = {step,
                 state.at("data_state"),
                 state.at("device_state"),
                 state.at("config"),
                 state.at("quern_version"),
                 state.contains("updates") ? count_in(state, "updates", path) : step,
                 {},
                 state.value("evaluated", true),
                 libraries_in(state.value("libraries", json::array()))};
    read.meta.evaluated_states = state.value("evaluated_states", std::vector<std::string>{});
    if (state.contains("averaged"))
      read.meta.averaged = {state["averaged"].at("largest_rate"), state["averaged"].at("weights")};
    if (state.contains("tokens")) read.meta.tokens = count_in(state, "tokens", path);
    const json& files = state.at("files");
    if (!files.is_object() || files.empty()) refuse("files", printable(files.dump()), "files of tensors");
    read.bytes.resize(files.size());
    for (std::size_t rank = 0; rank < read.bytes.size(); ++rank) {
      const json& file = files.at(read.file(rank));
      read.bytes[rank] = static_cast<std::uint64_t>(count_in(file, "bytes", path));
      read.checksums.push_back(file.at("xxh3"));
    }
    return read;
  } catch (const json::exception& error) {
    throw Error(ErrorCode::input,
                {path, "state.json misses a field or has one of another type", printable(error.what()), "", kUseOlder});
  }
}

std::string state_path(const std::string& path) { return path + "/state.json"; }

StateFile read_state_and_sizes(const std::string& path) {
  StateFile state = read_state(state_path(path));
  for (std::size_t rank = 0; rank < state.bytes.size(); ++rank) {
    std::error_code error;
    const std::string tensors = path + "/" + state.file(rank), expected = std::to_string(state.bytes[rank]) + " bytes";
    const std::uintmax_t bytes = fs::file_size(tensors, error);
    if (error || bytes != state.bytes[rank])
      throw Error(ErrorCode::input, {tensors, error ? "is missing" : "is damaged",
                                     error ? error.message() : std::to_string(bytes) + " bytes", expected, kUseOlder});
  }
  return state;
}

/// The tensors' files in a checkpoint's directory, without a look at its state.
std::vector<std::string> tensor_files_in(const std::string& path) {
  std::vector<std::string> files;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(path, error)) {
    const std::string name = entry.path().filename();
    if (name.starts_with(kTensorsBegin) && name.ends_with(kTensorsEnd)) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  if (files.empty()) throw Error(ErrorCode::input, {path, "has no tensors", "", "", kUseOlder});
  return files;
}

}  // namespace

std::string name_of(const RankFile& file) {
  char numbers[40] = "";
  if (file.ranks > 1) std::snprintf(numbers, sizeof numbers, "-%05d-of-%05d", file.rank, file.ranks);
  return std::string(kTensorsBegin) + numbers + std::string(kTensorsEnd);
}

FileRecord write_tensors(const std::string& folder, const RankFile& file, const std::vector<NamedView>& views,
                         const TensorReader& reader) {
  std::vector<NamedView> tensors = views;
  // Larger elements first, so that none is misaligned.
  std::stable_sort(tensors.begin(), tensors.end(), [](const NamedView& a, const NamedView& b) {
    return size_of(a.view.dtype) > size_of(b.view.dtype);
  });
  std::vector<TensorDeclaration> declared;
  declared.reserve(tensors.size());
  for (const NamedView& tensor : tensors)
    declared.push_back({tensor.name, stored_type_of(tensor.view.dtype), tensor.view.extents});
  SafetensorsWriter writer(folder + "/" + name_of(file), declared);
  for (const NamedView& tensor : tensors)
    writer.write({reader ? reader(tensor) : tensor.view.as<const std::byte>(), tensor.view.bytes()});
  return writer.finish();
}

std::vector<TensorDeclaration> parameters_in(const std::string& path) {
  std::vector<TensorDeclaration> parameters;
  const TensorFiles files(tensor_files_in(path));
  for (const StoredTensor& tensor : files.tensors())
    if (tensor.name.starts_with(kMasterPrefix)) parameters.push_back({tensor.name, tensor.type, tensor.extents});
  std::sort(parameters.begin(), parameters.end(),
            [](const TensorDeclaration& a, const TensorDeclaration& b) { return a.name < b.name; });
  return parameters;
}

std::string evaluated_name(const Checkpoint& checkpoint, const std::string& master) {
  for (const std::string& state : checkpoint.meta.evaluated_states)
    if (std::string name = state + "/" + master.substr(kMasterPrefix.size()); checkpoint.tensors.find(name))
      return name;
  return master;
}

void read_weights(const Checkpoint& checkpoint, const std::string& master, std::int64_t first,
                  std::span<float> values) {
  const StoredTensor& tensor = *checkpoint.tensors.find(evaluated_name(checkpoint, master));
  if (tensor.type != StoredType::i8) return checkpoint.tensors.read_floats(tensor, first, values);
  const std::string scales = std::string(names::kMasterScale) + "/" + master.substr(kMasterPrefix.size());
  std::vector<std::byte> integers(values.size());
  checkpoint.tensors.read(tensor, static_cast<std::uint64_t>(first), integers);
  decode(integers.data(), DType::i8, values);
  scale_rows(checkpoint.tensors.read_floats(scales), tensor.extents[1], first, values);
}

std::string checkpoint_path(const std::string& run_directory, std::int64_t step) {
  char name[40];
  std::snprintf(name, sizeof name, "step-%08lld", static_cast<long long>(step));
  return run_directory + "/checkpoints/" + name;
}

void write_state(const std::string& folder, const CheckpointMeta& meta, const std::vector<FileRecord>& files) {
  DurableFile state(state_path(folder));
  state.write(state_text(folder, meta, files));
  state.commit();
}

std::string write_checkpoint(const std::string& run_directory, const CheckpointMeta& meta,
                             const std::vector<NamedView>& tensors, const TensorReader& reader) {
  NewDirectory made(checkpoint_path(run_directory, meta.step));
  made.fill(
      [&](const std::string& folder) { write_state(folder, meta, {write_tensors(folder, {}, tensors, reader)}); });
  made.put_in_place();
  return made.path();
}

Checkpoint open_checkpoint(const std::string& path) {
  StateFile state = read_state_and_sizes(path);
  std::vector<std::string> files;
  for (std::size_t rank = 0; rank < state.bytes.size(); ++rank) files.push_back(path + "/" + state.file(rank));
  return {path, std::move(state.meta), std::move(state.checksums), TensorFiles(files)};
}

void verify_file(const Checkpoint& checkpoint, std::size_t file) {
  const SafetensorsFile& tensors = checkpoint.tensors.files()[file];
  const std::string actual = checksum_text(tensors.checksum());
  if (actual != checkpoint.checksums[file])
    throw Error(ErrorCode::input,
                {tensors.path(), "checksum", actual, printable(checkpoint.checksums[file]), kUseOlder});
}

Checkpoint read_checkpoint(const std::string& path) {
  Checkpoint checkpoint = open_checkpoint(path);
  for (std::size_t file = 0; file < checkpoint.checksums.size(); ++file) verify_file(checkpoint, file);
  return checkpoint;
}

CheckpointMeta check_checkpoint_files(const std::string& path) { return read_state_and_sizes(path).meta; }

}  // namespace quern
