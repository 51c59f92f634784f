// What can be asked of it without GPUs; the conformance kit asks the rest of groups of processes on several.
#include "nccl_communicator.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include <doctest/doctest.h>

#include "plugin/plugin_host.h"
#include "quern/error.h"
#include "quern/testkit/refusal.h"
#include "test_paths.h"

using namespace quern;
using namespace quern::nccl;

namespace {

/// Not open; null where the build has none.
std::unique_ptr<Device> device(const std::string& id) {
  const auto plugins = std::filesystem::path(QUERN_BUILD_DIR) / "plugins";
  if (!std::filesystem::exists(plugins / "device" / ("libquern_" + id + ".so"))) {
    MESSAGE("skipped: no device " << id << " in this build");
    return nullptr;
  }
  static PluginHost host({plugins});  // never unloads what it loaded
  return host.create<Device>(id, default_values(host.require("device", id).options));
}

void check_refused(ErrorCode code, const std::string& part, Device& device) {
  NcclCommunicator communicator({});
  testkit::check_refused(code, {part}, [&] { communicator.connect({.rank = 0, .size = 2, .address = ""}, device); });
}

}  // namespace

TEST_CASE("the traits name the settings that the order of its sums depends on") {
  auto sums_by = [](const NcclOptions& options) { return NcclCommunicator(options).traits().sums_by; };
  CHECK(sums_by({}).starts_with("NCCL 2."));
  // What the machine sets follows.
  const std::string chosen = ", algorithm NCCL's choice, protocol NCCL's choice, channels NCCL's choice";
  CHECK(sums_by({}).find(chosen) != std::string::npos);
  CHECK(sums_by({.algorithm = "Ring", .protocol = "Simple", .channels = 16})
            .find(", algorithm Ring, protocol Simple, channels 16") != std::string::npos);
  for (const char* variable :
       {"NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_NVLS_ENABLE", "NCCL_COLLNET_ENABLE", "NCCL_TUNER_PLUGIN"}) {
    ::setenv(variable, "1", 1);
    CHECK(sums_by({}).find(std::string(", ") + variable + "=1") != std::string::npos);
    ::unsetenv(variable);
  }
  const std::string file = std::filesystem::temp_directory_path() / ("nccl-" + std::to_string(::getpid()) + ".conf");
  ::setenv("NCCL_CONF_FILE", file.c_str(), 1);
  const std::string without = sums_by({});
  std::ofstream(file) << "NCCL_ALGO=Ring";
  const std::string ring = sums_by({});
  std::ofstream(file) << "NCCL_ALGO=Tree";
  CHECK(ring != without);
  CHECK(ring != sums_by({}));
  std::filesystem::remove(file);
  ::unsetenv("NCCL_CONF_FILE");
}

TEST_CASE("a file of faults for which there is no room is refused, and ends nobody later") {
  const std::string path = std::filesystem::temp_directory_path() / ("quern-faults-" + std::to_string(::getpid()));
  const rlimit before = [] {
    rlimit now{};
    ::getrlimit(RLIMIT_FSIZE, &now);
    return now;
  }();
  const rlimit none{100, before.rlim_max};  // as a disk that is full
  ::signal(SIGXFSZ, SIG_IGN);
  ::setrlimit(RLIMIT_FSIZE, &none);
  CHECK_THROWS_WITH_AS(FaultPage(path, 0, 2), doctest::Contains("ranks cannot share a file"), Error);
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::filesystem::remove(path);
  // Without holes: what is there stays there when the disk fills up.
  const FaultPage page(path, 0, 64);
  struct stat about {};
  REQUIRE(::stat(path.c_str(), &about) == 0);
  CHECK(about.st_blocks * 512 >= about.st_size);
  std::filesystem::remove(path);
}

TEST_CASE("other devices, and ranks that cannot exchange an id, are refused") {
  check_refused(ErrorCode::config, "nccl needs the cuda device: found cpu", *device("cpu"));
  const std::unique_ptr<Device> gpu = device("cuda");
  if (!gpu) return;
  check_refused(ErrorCode::config, "no way to exchange", *gpu);
}

TEST_CASE("ranks find what others told, however late, and each keeps its first fault") {
  const std::string path = std::filesystem::temp_directory_path() / ("quern-faults-" + std::to_string(::getpid()));
  std::unique_ptr<FaultPage> first = std::make_unique<FaultPage>(path, 0, 3), second;
  CHECK_FALSE(first->told());
  second = std::make_unique<FaultPage>(path, 1, 3);
  std::filesystem::remove(path);
  second->tell("rank 1 ended it");
  second->tell("something else");
  CHECK(first->told() == "rank 1 ended it");
  CHECK_FALSE(second->told());
  second.reset();  // gone
  CHECK(first->told() == "rank 1 ended it");
  first->tell(std::string(2000, 'x'));
  CHECK_THROWS_WITH_AS(FaultPage("/nowhere/page", 0, 2), doctest::Contains("ranks cannot share a file"), Error);
}

TEST_CASE("one rank needs no NCCL, and wrong calls are refused all the same") {
  const std::unique_ptr<Device> gpu = device("cuda");
  if (!gpu) return;
  NcclCommunicator communicator({});
  communicator.connect({}, *gpu);
  float memory[8] = {};
  auto view = [&](DType dtype, std::int64_t count) { return View{memory, dtype, {count}}; };
  CHECK_THROWS_AS(communicator.all_reduce(view(DType::f32, 8), Reduction::sum, {}), Error);  // not registered
  communicator.register_buffer(memory, sizeof memory);
  communicator.all_reduce(view(DType::f32, 8), Reduction::sum, {});
  communicator.all_gather(view(DType::f32, 8), view(DType::f32, 8), {}, {});
  CHECK_THROWS_AS(communicator.all_reduce(view(DType::i32, 8), Reduction::sum, {}), Error);
  CHECK_THROWS_AS(communicator.broadcast(view(DType::f32, 8), 1, {}), Error);
  communicator.unregister_buffer(memory);
  communicator.barrier();
  CHECK_FALSE(communicator.error());
  communicator.abort();
  CHECK(communicator.error());
  CHECK_THROWS_AS(communicator.barrier(), Error);
}
