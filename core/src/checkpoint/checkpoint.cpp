#include "checkpoint/checkpoint.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <utility>

#include "base/files/json_file.h"
#include "base/shorten.h"
#include "quern/error.h"

namespace quern {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

constexpr const char* kTensors = "tensors.safetensors";
constexpr const char* kState = "state.json";
constexpr const char* kFormat = "quern checkpoint";
constexpr int kVersion = 1;
constexpr int kStateDepth = 3;  // the state, its files or libraries, one of them
constexpr std::size_t kLargestState = std::size_t{64} << 20;
constexpr const char* kUseOlder = "resume from an older checkpoint";

/// state.json as read: the run's part, and what the files must be.
struct StateFile {
  CheckpointMeta meta;
  std::uint64_t bytes = 0;  // of the tensors' file
  std::string checksum;
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

std::string state_text(const std::string& path, const CheckpointMeta& meta, const FileRecord& tensors) {
  json state = {{"format", kFormat},
                {"version", kVersion},
                {"quern_version", meta.quern_version},
                {"libraries", json_of(meta.libraries)},
                {"step", meta.step},
                {"updates", meta.updates},
                {"evaluated", meta.evaluated},
                {"data_state", meta.data_state},
                {"device_state", meta.device_state},
                {"config", meta.config},
                {"files", {{kTensors, {{"bytes", tensors.bytes}, {"xxh3", checksum_text(tensors.checksum)}}}}}};
  if (meta.tokens) state["tokens"] = *meta.tokens;
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
    if (state.at("version") != kVersion)
      refuse("checkpoint version", printable(state["version"].dump()), std::to_string(kVersion));
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
    if (state.contains("tokens")) read.meta.tokens = count_in(state, "tokens", path);
    const json& tensors = state.at("files").at(kTensors);
    read.bytes = static_cast<std::uint64_t>(count_in(tensors, "bytes", path));
    read.checksum = tensors.at("xxh3");
    return read;
  } catch (const json::exception& error) {
    throw Error(ErrorCode::input,
                {path, "state.json misses a field or has one of another type", printable(error.what()), "", kUseOlder});
  }
}

StateFile read_state_and_sizes(const std::string& path) {
  StateFile state = read_state(path + "/" + kState);
  std::error_code error;
  std::string tensors = path + "/" + kTensors;
  std::uintmax_t bytes = fs::file_size(tensors, error);
  if (error || bytes != state.bytes)
    throw Error(ErrorCode::input, {tensors, error ? "is missing" : "is damaged",
                                   error ? error.message() : std::to_string(bytes) + " bytes",
                                   std::to_string(state.bytes) + " bytes", kUseOlder});
  return state;
}

FileRecord write_tensors(const std::string& path, std::vector<NamedView> tensors, const TensorReader& reader) {
  // Larger elements first, so that none is misaligned.
  std::stable_sort(tensors.begin(), tensors.end(), [](const NamedView& a, const NamedView& b) {
    return size_of(a.view.dtype) > size_of(b.view.dtype);
  });
  std::vector<TensorDeclaration> declared;
  declared.reserve(tensors.size());
  for (const NamedView& tensor : tensors)
    declared.push_back({tensor.name, stored_type_of(tensor.view.dtype), tensor.view.extents});
  SafetensorsWriter writer(path, declared);
  for (const NamedView& tensor : tensors)
    writer.write({reader ? reader(tensor) : tensor.view.as<const std::byte>(), tensor.view.bytes()});
  return writer.finish();
}

}  // namespace

std::vector<TensorDeclaration> parameters_in(const std::string& path) {
  std::vector<TensorDeclaration> parameters;
  const SafetensorsFile file(path + "/" + kTensors);
  for (const StoredTensor& tensor : file.tensors())
    if (tensor.name.starts_with(kMasterPrefix)) parameters.push_back({tensor.name, tensor.type, tensor.extents});
  std::sort(parameters.begin(), parameters.end(),
            [](const TensorDeclaration& a, const TensorDeclaration& b) { return a.name < b.name; });
  return parameters;
}

std::string checkpoint_path(const std::string& run_directory, std::int64_t step) {
  char name[40];
  std::snprintf(name, sizeof name, "step-%08lld", static_cast<long long>(step));
  return run_directory + "/checkpoints/" + name;
}

std::string write_checkpoint(const std::string& run_directory, const CheckpointMeta& meta,
                             const std::vector<NamedView>& tensors, const TensorReader& reader) {
  const std::string path = checkpoint_path(run_directory, meta.step);
  write_directory(path, [&](const std::string& temporary) {
    FileRecord record = write_tensors(temporary + "/" + kTensors, tensors, reader);
    DurableFile state(temporary + "/" + kState);
    state.write(state_text(path, meta, record));
    state.commit();
  });
  return path;
}

Checkpoint read_checkpoint(const std::string& path) {
  StateFile state = read_state_and_sizes(path);
  SafetensorsFile tensors(path + "/" + kTensors);
  std::string actual = checksum_text(tensors.checksum());
  if (actual != state.checksum)
    throw Error(ErrorCode::input, {tensors.path(), "checksum", actual, printable(state.checksum), kUseOlder});
  return {path, std::move(state.meta), std::move(tensors)};
}

CheckpointMeta check_checkpoint_files(const std::string& path) { return read_state_and_sizes(path).meta; }

}  // namespace quern
