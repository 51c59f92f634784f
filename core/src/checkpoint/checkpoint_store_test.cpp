// The checkpoints of a run: the newest whole one is found, a crash at any point leaves the one before, and old ones go.
#include "checkpoint/checkpoint_store.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>

#include <doctest/doctest.h>

#include "base/files/test_directory.h"
#include "checkpoint/test_steps.h"
#include "quern/testkit/refusal.h"

using namespace quern;
using testkit::check_refused;
using testkit::error_of;
namespace fs = std::filesystem;

namespace {

std::int64_t newest_step(const std::string& run) {
  NewestCheckpoint newest = find_newest(run);
  return newest.checkpoint ? newest.checkpoint->meta.step : -1;
}

}  // namespace

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
