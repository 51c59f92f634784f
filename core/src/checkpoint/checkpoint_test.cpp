// Checkpoints come back whole or not at all: damage of every byte is seen.
#include "checkpoint/checkpoint.h"

#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <limits>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "base/checksum.h"
#include "base/files/test_directory.h"
#include "checkpoint/checkpoint_store.h"
#include "checkpoint/test_steps.h"
#include "checkpoint/test_support.h"
#include "quern/testkit/refusal.h"

using namespace quern;
using testkit::check_refused;
using testkit::error_of;
namespace fs = std::filesystem;

TEST_CASE("a checkpoint comes back bit for bit, each tensor aligned") {
  TestDirectory run;
  std::string path = write_step(run.path(), 1200);
  CHECK(path == run / "checkpoints/step-00001200");
  CHECK(names_in(path) == std::vector<std::string>{"state.json", "tensors.safetensors"});
  Checkpoint checkpoint = read_checkpoint(path);
  CHECK(checkpoint.meta == meta_of(1200));
  State state(1200);
  for (const NamedView& tensor : state.views()) {
    CAPTURE(tensor.name);
    const StoredTensor& stored = checkpoint.tensors.at(tensor.name);
    CHECK(stored.type == stored_type_of(tensor.view.dtype));
    CHECK(stored.extents == tensor.view.extents);
    auto bytes = checkpoint.tensors.bytes(stored);
    CHECK(reinterpret_cast<std::uintptr_t>(bytes.data()) % size_of(tensor.view.dtype) == 0);
    CHECK(std::equal(bytes.begin(), bytes.end(), tensor.view.as<const std::byte>(),
                     tensor.view.as<const std::byte>() + tensor.view.bytes()));
  }
  CHECK(checkpoint_path("r", 123456789) == "r/checkpoints/step-123456789");
}

namespace {

/// The rows of `weights` and `moments` that a rank of three writes, and rank 0 what has no rows.
std::vector<NamedView> rows_of(State& state, int rank) {
  std::vector<NamedView> views = state.views(), own;
  const std::int64_t weights[] = {0, 1, 2, 2},
                     moments[] = {0, 3, 3, 7};  // the last rank has no weights, one no moments
  auto add = [&](const NamedView& whole, const std::int64_t* bounds) {
    Extents rows = whole.view.extents;
    rows[0] = bounds[rank + 1] - bounds[rank];
    if (rank > 0 && rows[0] == 0) return;
    const std::size_t row = whole.view.bytes() / static_cast<std::size_t>(whole.view.extents[0]);
    std::byte* data = whole.view.as<std::byte>() + static_cast<std::size_t>(bounds[rank]) * row;
    own.push_back({whole.name, {data, whole.view.dtype, rows}});
  };
  add(views[0], moments);
  add(views[1], weights);
  if (rank == 0) own.insert(own.end(), views.begin() + 2, views.end());
  return own;
}

std::string write_by_three(const std::string& run, std::int64_t step) {
  State state(step);
  NewDirectory made(checkpoint_path(run, step));
  made.fill([&](const std::string& folder) {
    std::vector<FileRecord> files;
    for (int rank = 0; rank < 3; ++rank) files.push_back(write_tensors(folder, {rank, 3}, rows_of(state, rank)));
    write_state(folder, meta_of(step), files);
  });
  made.put_in_place();
  return made.path();
}

}  // namespace

TEST_CASE("a checkpoint that three ranks write has the tensors of one that a single rank writes") {
  TestDirectory run, alone;
  const Checkpoint parts = read_checkpoint(write_by_three(run.path(), 5));
  const Checkpoint whole = read_checkpoint(write_step(alone.path(), 5));
  CHECK(names_in(parts.path) == std::vector<std::string>{"state.json", "tensors-00000-of-00003.safetensors",
                                                         "tensors-00001-of-00003.safetensors",
                                                         "tensors-00002-of-00003.safetensors"});
  CHECK(parts.meta == whole.meta);
  CHECK(parts.tensors.tensors().size() == whole.tensors.tensors().size());
  for (const StoredTensor& tensor : whole.tensors.tensors()) {
    CAPTURE(tensor.name);
    const StoredTensor& found = parts.tensors.at(tensor.name);
    CHECK(found.type == tensor.type);
    CHECK(found.extents == tensor.extents);
    CHECK(parts.tensors.bytes(found) == whole.tensors.bytes(tensor));
  }
  // Any range, over the files' bounds.
  const std::vector<float> weights = whole.tensors.read_floats("weights");
  for (std::int64_t first = 0; first <= 6; ++first)
    for (std::int64_t count = 0; first + count <= 6; ++count) {
      std::vector<float> found(static_cast<std::size_t>(count));
      parts.tensors.read_floats(parts.tensors.at("weights"), first, found);
      CHECK(std::equal(found.begin(), found.end(), weights.begin() + first));
    }
  CHECK(parameters_in(parts.path) == parameters_in(whole.path));
}

TEST_CASE("every damage of a checkpoint that three ranks wrote is an error that names the file") {
  TestDirectory directory;
  const std::string sound = write_by_three(directory / "sound", 5), path = checkpoint_path(directory / "run", 5);
  auto damaged = [&](const std::function<void()>& damage) {
    fs::remove_all(path);
    fs::create_directories(fs::path(path).parent_path());
    fs::copy(sound, path);
    damage();
    return testkit::refusal(ErrorCode::input, [&] { read_checkpoint(path); });
  };
  CHECK(damaged([] {}) == "accepted");
  for (int rank = 0; rank < 3; ++rank) {
    const std::string file = path + "/" + name_of(RankFile{rank, 3});
    CAPTURE(file);
    CHECK(damaged([&] { fs::remove(file); }).starts_with(file + ": is missing"));
    CHECK(damaged([&] { fs::resize_file(file, 40); }).starts_with(file + ": is damaged: found 40 bytes"));
    std::string bytes = read_text(sound + "/" + name_of(RankFile{rank, 3}));
    bytes.back() ^= 1;
    CHECK(damaged([&] { write_text(file, bytes); }).starts_with(file + ": checksum: found "));
  }
  const std::string first = name_of(RankFile{0, 3}), second = name_of(RankFile{1, 3});
  CHECK(damaged([&] {
          fs::rename(path + "/" + first, path + "/x");
          fs::rename(path + "/" + second, path + "/" + first);
          fs::rename(path + "/x", path + "/" + second);
        }) != "accepted");
  CHECK(damaged([&] {
          change_state(path, [&](nlohmann::json& state) { state["files"].erase(second); });
        }).find("state.json misses a field") != std::string::npos);
  CHECK(damaged([&] {
          change_state(path, [&](nlohmann::json& state) { state["files"] = nlohmann::json::object(); });
        }).find("files: found {}") != std::string::npos);
  CHECK(damaged([&] {
          change_state(path, [&](nlohmann::json& state) { state["version"] = 3; });
        }).find("checkpoint version: found 3, expected 1 or 2") != std::string::npos);
}

TEST_CASE("files whose rows do not fit each other are refused") {
  TestDirectory directory;
  auto file = [&](int rank, StoredType type, const Extents& extents) {
    const std::string path = directory / ("file" + std::to_string(rank));
    SafetensorsWriter writer(path, {{"a", type, extents}});
    writer.write(std::vector<std::byte>(*stored_bytes(type, extents)));
    writer.finish();
    return path;
  };
  auto fault = [&](const std::string& second) {
    return testkit::refusal(ErrorCode::input, [&] { TensorFiles({directory / "file0", second}); });
  };
  file(0, StoredType::f32, {2, 3});
  CHECK(fault(file(1, StoredType::f32, {5, 3})) == "accepted");
  CHECK(fault(file(1, StoredType::f32, {0, 3})) == "accepted");
  const std::string where =
      directory / "file1" + ": its rows of tensor 'a' do not continue the rows of the files before it: ";
  CHECK(fault(file(1, StoredType::bf16, {2, 3})) ==
        where + "found BF16, expected F32; resume from an older checkpoint");
  for (const Extents& other : {Extents{2, 4}, Extents{6}, Extents{}, Extents{2, 3, 1}})
    CHECK(fault(file(1, StoredType::f32, other)).starts_with(where + "found "));
}

TEST_CASE("any changed or missing byte of any file is seen") {
  TestDirectory run;
  std::string path = write_step(run.path(), 3);
  for (const std::string& name : names_in(path)) {
    CAPTURE(name);
    const std::string good = read_text(path + "/" + name);
    int harmless = 0;
    for (std::size_t at = 0; at < good.size(); ++at) {
      std::string bad = good;
      bad[at] = static_cast<char>(bad[at] ^ 0x04);
      write_text(path + "/" + name, bad);
      CAPTURE(at);
      const std::string refusal = testkit::refusal(ErrorCode::input, [&] { read_checkpoint(path); });
      if (refusal == "accepted") {
        ++harmless;  // only white space between tokens can change without meaning
        CHECK(read_checkpoint(path).meta == meta_of(3));
      } else {
        testkit::check_holds(refusal, {path});
      }
      if (at % 16 != 0) continue;
      write_text(path + "/" + name, good.substr(0, at));
      check_refused(ErrorCode::input, {path}, [&] { read_checkpoint(path); });
    }
    CHECK(harmless == 0);
    fs::remove(path + "/" + name);
    check_refused(ErrorCode::input, {name}, [&] { read_checkpoint(path); });
    write_text(path + "/" + name, good);
  }
  CHECK(read_checkpoint(path).meta == meta_of(3));
}

TEST_CASE("a state.json that is whole but not of this format is refused") {
  TestDirectory run;
  std::string path = write_step(run.path(), 3);
  for (const char* text : {"", "{}", "[]", "{\"format\":\"other\"}", "{\"format\":\"quern checkpoint\",\"version\":2}",
                           "{\"format\":\"quern checkpoint\",\"version\":1}", "{\"a\":1,\"a\":1}"}) {
    write_text(path + "/state.json", text);
    check_refused(ErrorCode::input, {"state.json"}, [&] { read_checkpoint(path); });
  }
}

TEST_CASE("in a checkpoint that does not say how many steps moved the weights, as older ones, all did") {
  TestDirectory run;
  const std::string path = write_step(run.path(), 3);
  CHECK(read_checkpoint(path).meta.updates == 0);
  change_state(path, [](nlohmann::json& state) { state.erase("updates"); });
  CHECK(read_checkpoint(path).meta.updates == 3);
}

TEST_CASE("a count in state.json that is no whole number of its range is refused by name") {
  TestDirectory run;
  using Change = std::function<nlohmann::json&(nlohmann::json&)>;
  const std::pair<const char*, Change> kCounts[] = {
      {"step", [](nlohmann::json& state) -> nlohmann::json& { return state["step"]; }},
      {"updates", [](nlohmann::json& state) -> nlohmann::json& { return state["updates"]; }},
      {"tokens", [](nlohmann::json& state) -> nlohmann::json& { return state["tokens"]; }},
      {"bytes",
       [](nlohmann::json& state) -> nlohmann::json& { return state["files"]["tensors.safetensors"]["bytes"]; }}};
  for (const auto& [key, count] : kCounts) {
    for (const char* value : {"1e300", "2.5", "3.0", "-1", "9223372036854775808", "true", "null", "\"3\"", "1e18"}) {
      const std::string path = write_step(run.path(), 3);
      change_state(path,
                   [&count = count, value](nlohmann::json& state) { count(state) = nlohmann::json::parse(value); });
      const std::string found = nlohmann::json::parse(value).dump();
      check_refused(ErrorCode::input,
                    {path + "/state.json: " + key + ": found " + found +
                     ", expected a whole number from 0 to 9223372036854775807; resume from an older checkpoint"},
                    [&] { read_checkpoint(path); });
      CHECK(find_newest(run.path()).skipped.size() == 1);
    }
  }
  const std::string path = write_step(run.path(), 3);
  change_state(path, [](nlohmann::json& state) { state["updates"] = std::numeric_limits<std::int64_t>::max(); });
  CHECK(read_checkpoint(path).meta.updates == std::numeric_limits<std::int64_t>::max());
}

TEST_CASE("tensors may be fetched one by one, and unknown entries are reported") {
  TestDirectory run, other;
  State state(3);
  std::vector<NamedView> with = state.views(), without = with;
  for (NamedView& view : without) view.view.data = nullptr;
  write_checkpoint(run.path(), meta_of(3), with);
  write_checkpoint(other.path(), meta_of(3), without, [&](const NamedView& wanted) {
    for (const NamedView& view : with)
      if (view.name == wanted.name) return view.view.as<const std::byte>();
    return static_cast<const std::byte*>(nullptr);
  });
  for (const char* name : {"tensors.safetensors", "state.json"})
    CHECK(read_text(checkpoint_path(run.path(), 3) + "/" + name) ==
          read_text(checkpoint_path(other.path(), 3) + "/" + name));
  write_text(run / "checkpoints/notes.txt", "");
  fs::create_directory(run / "checkpoints/step-4");
  CHECK(find_newest(run.path()).strangers ==
        std::vector<std::string>{run / "checkpoints/notes.txt", run / "checkpoints/step-4"});
}

TEST_CASE("a write that fails leaves nothing new and names the path") {
  TestDirectory run;
  write_step(run.path(), 1);
  State state(2);
  std::vector<float> large(10000);
  auto views = state.views();
  views.push_back({"large", {large.data(), DType::f32, {10000}}});
  // A file size limit stands in for a full disk: write() fails in the same place.
  auto old_handler = ::signal(SIGXFSZ, SIG_IGN);
  rlimit old{};
  ::getrlimit(RLIMIT_FSIZE, &old);
  rlimit small{8192, old.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &small);
  const Error error = error_of([&] { write_checkpoint(run.path(), meta_of(2), views); });
  ::setrlimit(RLIMIT_FSIZE, &old);
  ::signal(SIGXFSZ, old_handler);
  CHECK(error.code() == ErrorCode::resources);
  testkit::check_holds(error.what(), {checkpoint_path(run.path(), 2) + "/tensors.safetensors: ", "File too large"});
  CHECK(names_in(run / "checkpoints") == std::vector<std::string>{"step-00000001"});
  write_text(run / "file", "");
  check_refused(ErrorCode::resources, {run / "file"}, [&] { write_step(run / "file", 1); });
  CheckpointMeta binary = meta_of(2);
  binary.data_state = "\xff";
  check_refused(ErrorCode::internal, {"not UTF-8"}, [&] { write_checkpoint(run.path(), binary, {}); });
  CHECK(names_in(run / "checkpoints") == std::vector<std::string>{"step-00000001"});
}
