// Checkpoints come back whole or not at all: damage of every byte is seen, and a crash at any point leaves the one
// before.
#include "checkpoint/checkpoint.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <limits>
#include <numeric>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "base/checksum.h"
#include "base/files/test_directory.h"
#include "checkpoint/checkpoint_store.h"
#include "checkpoint/test_support.h"
#include "quern/testkit/refusal.h"

using namespace quern;
using testkit::check_refused;
using testkit::error_of;
namespace fs = std::filesystem;

namespace {

CheckpointMeta meta_of(std::int64_t step) {
  return {step,
          "data at " + std::to_string(step),
          "device \"x\"\n\xc3\xa4",
          "[train]\nsteps = 5\n",
          "0.1.0",
          0,
          64 * step,
          true,
          {{"quern", "0.1.0", "0123456789abcdef"}, {"plugin x", "2", "f"}}};
}

/// Tensors of several types, whose content depends on the step.
struct State {
  explicit State(std::int64_t step) : bytes(7), weights(6), count(1, step) {
    std::iota(bytes.begin(), bytes.end(), static_cast<std::uint8_t>(step));
    std::iota(weights.begin(), weights.end(), static_cast<float>(step));
  }
  std::vector<NamedView> views() {
    return {{"moments", {bytes.data(), DType::e4m3, {7}}},
            {"weights", {weights.data(), DType::f32, {2, 3}}},
            {"empty", {nullptr, DType::bf16, {0}}},
            {"count", {count.data(), DType::i64, {}}}};
  }
  std::vector<std::uint8_t> bytes;
  std::vector<float> weights;
  std::vector<std::int64_t> count;
};

std::string write_step(const std::string& run, std::int64_t step) {
  return write_checkpoint(run, meta_of(step), State(step).views());
}

std::int64_t newest_step(const std::string& run) {
  NewestCheckpoint newest = find_newest(run);
  return newest.checkpoint ? newest.checkpoint->meta.step : -1;
}

std::vector<std::string> names_in(const std::string& directory) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(directory)) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace

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

TEST_CASE("the newest whole checkpoint is found past damaged and unfinished ones, which are reported") {
  TestDirectory run;
  CHECK(newest_step(run / "none") == -1);
  CHECK(newest_step(run.path()) == -1);
  for (std::int64_t step : {9, 10, 100, 200, 300}) write_step(run.path(), step);
  CHECK(newest_step(run.path()) == 300);
  fs::resize_file(run / "checkpoints/step-00000300/tensors.safetensors", 20);
  fs::remove(run / "checkpoints/step-00000200/state.json");
  fs::rename(run / "checkpoints/step-00000010", run / "checkpoints/step-00000400");  // its state.json says 10
  fs::create_directory(run / "checkpoints/.tmp-step-00000500");
  fs::create_directory(run / "checkpoints/step-600");
  write_text(run / "checkpoints/notes.txt", "");
  NewestCheckpoint newest = find_newest(run.path());
  REQUIRE(newest.checkpoint);
  CHECK(newest.checkpoint->meta.step == 100);
  CHECK(newest.strangers.size() == 2);
  REQUIRE(newest.skipped.size() == 4);
  const std::pair<const char*, const char*> kExpected[] = {{".tmp-step-00000500", "unfinished"},
                                                           {"step-00000400", "step in state.json: found 10"},
                                                           {"step-00000300", "20 bytes"},
                                                           {"step-00000200", "state.json"}};
  for (std::size_t i = 0; i < 4; ++i) {
    CAPTURE(newest.skipped[i].reason);
    CHECK(newest.skipped[i].path == run / "checkpoints/" + kExpected[i].first);
    CHECK(newest.skipped[i].reason.find(kExpected[i].second) != std::string::npos);
  }
}

TEST_CASE("a process killed at any point while writing leaves the previous checkpoint") {
  TestDirectory run;
  write_step(run.path(), 1);
  std::vector<float> large(std::size_t{1} << 20, 1.0f);  // 4 MiB: the kill lands in all stages
  int unfinished = 0;
  for (int microseconds = 0; microseconds < 12000; microseconds += 400) {
    pid_t child = ::fork();
    if (child == 0) {
      for (std::int64_t step = 2;; ++step)
        write_checkpoint(run.path(), meta_of(step), {{"large", {large.data(), DType::f32, {1 << 20}}}});
    }
    ::usleep(static_cast<useconds_t>(microseconds));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    NewestCheckpoint newest = find_newest(run.path());
    REQUIRE(newest.checkpoint);
    for (const auto& skipped : newest.skipped) {
      CAPTURE(skipped.path);
      CHECK(skipped.reason == "unfinished");
    }
    unfinished += newest.skipped.empty() ? 0 : 1;
    remove_leftovers(run.path());
    CHECK(find_newest(run.path()).skipped.empty());
  }
  MESSAGE("kills that left an unfinished directory: " << unfinished << " of 30");
}

TEST_CASE("a crash between two renames, where a file system cannot exchange names, loses no checkpoint") {
  TestDirectory run;
  const std::string whole = write_step(run.path(), 2), replaced = run / "checkpoints/.tmp-step-00000002-old";
  const std::string next = run / "checkpoints/.tmp-step-00000002";
  fs::rename(whole, replaced);
  fs::create_directory(next);
  CHECK(remove_leftovers(run.path()) == std::vector<std::string>{next});
  CHECK(newest_step(run.path()) == 2);
  fs::create_directory(replaced);  // left where the new one is in place
  CHECK(remove_leftovers(run.path()) == std::vector<std::string>{replaced});
  CHECK(newest_step(run.path()) == 2);
}

TEST_CASE("leftovers of every stage of a crash are passed over and then removed") {
  TestDirectory run;
  write_step(run.path(), 1);
  std::string temporary = run / "checkpoints/.tmp-step-00000002";
  const std::string whole = write_step(run.path(), 2);
  auto check_stage = [&] {
    CHECK(newest_step(run.path()) == 1);
    CHECK(remove_leftovers(run.path()) == std::vector<std::string>{temporary});
    CHECK(names_in(run / "checkpoints") == std::vector<std::string>{"step-00000001"});
  };
  fs::rename(whole, temporary);  // everything is there but the last rename
  check_stage();
  for (const char* file : {"", "tensors.safetensors", ".tmp-tensors.safetensors", ".tmp-state.json"}) {
    fs::create_directory(temporary);
    if (*file != 0) write_text(temporary + "/" + file, "part");
    check_stage();
  }
  fs::create_directory(temporary);
  write_step(run.path(), 2);  // a stale directory of the same step is no obstacle
  CHECK(newest_step(run.path()) == 2);
  CHECK(remove_leftovers(run.path()).empty());
}

TEST_CASE("a step that is written again replaces the older one") {
  TestDirectory run;
  write_step(run.path(), 5);
  CheckpointMeta meta = meta_of(5);
  meta.config = "other";
  write_checkpoint(run.path(), meta, State(6).views());
  CHECK(find_newest(run.path()).checkpoint->meta.config == "other");
  CHECK(names_in(run / "checkpoints").size() == 1);
}

TEST_CASE("old checkpoints go, the newest and later ones stay") {
  TestDirectory run;
  for (std::int64_t step : {1, 2, 3, 4, 5}) write_step(run.path(), step);
  CHECK(remove_old_checkpoints(run.path(), {.keep_last = 0}, 5).empty());
  CHECK(remove_old_checkpoints(run.path(), {.keep_last = 9}, 5).empty());
  fs::remove(run / "checkpoints/step-00000004/state.json");  // does not count as one of the three
  CHECK(remove_old_checkpoints(run.path(), {.keep_last = 3}, 5) ==
        std::vector<std::string>{run / "checkpoints/step-00000001"});
  CHECK(names_in(run / "checkpoints") ==
        std::vector<std::string>{"step-00000002", "step-00000003", "step-00000004", "step-00000005"});
  // The run was wound back to 2 and wrote 3: the newest is 3 and later steps are not touched.
  CHECK(remove_old_checkpoints(run.path(), {.keep_last = 1}, 3) ==
        std::vector<std::string>{run / "checkpoints/step-00000002"});
  CHECK(remove_old_checkpoints(run.path(), {.keep_last = 1}, 5).size() == 2);
  CHECK(newest_step(run.path()) == 5);
  CHECK(names_in(run / "checkpoints").size() == 1);
  CHECK(remove_old_checkpoints(run / "none", {.keep_last = 1}, 5).empty());
}

TEST_CASE("only checkpoints with the parameters of the newest are counted and removed") {
  TestDirectory run;
  std::vector<float> values(6);
  auto write = [&](std::int64_t step, const std::string& name, const Extents& extents, DType dtype = DType::f32) {
    write_checkpoint(run.path(), meta_of(step),
                     {{"m/" + std::to_string(step), {values.data(), DType::f32, {1}}},  // not the model's
                      {"master/" + name, {values.data(), dtype, extents}}});
  };
  write(1, "w", {2, 3});
  write(2, "w", {3, 2});
  write(3, "w", {2, 3});
  write(4, "v", {2, 3});
  write(5, "w", {2, 3}, DType::bf16);
  write(6, "w", {2, 3});
  fs::resize_file(run / "checkpoints/step-00000003/tensors.safetensors", 20);
  write(7, "w", {2, 3});
  write(8, "w", {2, 3});
  CHECK(remove_old_checkpoints(run.path(), {.keep_last = 2}, 8) ==
        std::vector<std::string>{checkpoint_path(run.path(), 6), checkpoint_path(run.path(), 1)});
  CHECK(names_in(run / "checkpoints").size() == 6);
  fs::remove(run / "checkpoints/step-00000008/tensors.safetensors");
  CHECK(remove_old_checkpoints(run.path(), {.keep_last = 1}, 8).empty());
}

TEST_CASE("major checkpoints stay for good, and count among the newest") {
  TestDirectory run;
  for (std::int64_t step : {2, 4, 6, 8, 10, 12}) {
    write_step(run.path(), step);
    remove_old_checkpoints(run.path(), {.keep_last = 2, .keep_every = 6}, step);
  }
  CHECK(names_in(run / "checkpoints") == std::vector<std::string>{"step-00000006", "step-00000010", "step-00000012"});
  // A damaged one of the newest does not count, so an older one is kept in its place.
  fs::resize_file(run / "checkpoints/step-00000012/tensors.safetensors", 20);
  write_step(run.path(), 14);
  CHECK(remove_old_checkpoints(run.path(), {.keep_last = 2, .keep_every = 7}, 14) ==
        std::vector<std::string>{run / "checkpoints/step-00000006"});
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

TEST_CASE("one run at a time writes into a directory") {
  TestDirectory directory;
  {
    RunLock lock(directory / "run");
    check_refused(ErrorCode::resources,
                  {"another run writes into this directory: found process " + std::to_string(::getpid())},
                  [&] { RunLock(directory / "run"); });
    RunLock other(directory / "other");
  }
  RunLock again(directory / "run");
  fs::remove(directory / "run/.lock");
  check_refused(ErrorCode::resources, {"another run writes into this directory"}, [&] { RunLock(directory / "run"); });
  pid_t child = ::fork();
  if (child == 0) ::_exit(error_of([&] { RunLock lock(directory / "run"); }).code() == ErrorCode::resources ? 0 : 1);
  int status = -1;
  ::waitpid(child, &status, 0);
  CHECK(status == 0);
  write_text(directory / "file", "");
  check_refused(ErrorCode::resources, {directory / "file"}, [&] { RunLock(directory / "file"); });
}

TEST_CASE("a lock follows its directory, and takes a new one in the place of one that is gone") {
  TestDirectory directory;
  const std::string run = directory / "run", moved = directory / "moved";
  RunLock lock(run);
  CHECK(lock.directory() == run);
  fs::rename(run, moved);
  CHECK(lock.directory() == moved);
  {
    RunLock other(run);
    CHECK(lock.directory() == moved);
    fs::remove_all(moved);
    for (int again : {1, 2}) {
      CAPTURE(again);
      check_refused(ErrorCode::resources, {"another run writes into this directory"}, [&] { lock.directory(); });
    }
    fs::remove_all(run);
  }
  CHECK(lock.directory() == run);
  check_refused(ErrorCode::resources, {"another run writes into this directory"}, [&] { RunLock second(run); });
}
