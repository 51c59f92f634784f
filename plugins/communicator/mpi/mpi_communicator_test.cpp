// What the conformance kit does not ask: how ranks are started, and how MPI ends. CTest also runs this program by
// mpirun.
#include "mpi_communicator.h"

#include <cstdlib>
#include <filesystem>

#include <doctest/doctest.h>

#include "launch/rendezvous/host_group.h"
#include "plugin/plugin_host.h"
#include "quern/testkit/refusal.h"
#include "test_paths.h"

using namespace quern;
using namespace quern::mpi;
using testkit::check_refused;

// mpirun fails where a rank leaves without MPI_Finalize.
TEST_CASE("ranks of mpirun: two groups in one process, and a good end") {
  const std::optional<RankPlace> place = rank_place();
  if (!place || place->source != "mpirun") {
    MESSAGE("skipped: not started by mpirun");
    return;
  }
  const std::string folder = std::filesystem::temp_directory_path();
  HostGroup hosts(place->rank, place->size, MeetingPoint::in(folder, place->launch, true), 60);
  PluginHost host({std::filesystem::path(QUERN_BUILD_DIR) / "plugins"});
  const std::unique_ptr<Device> cpu = host.create<Device>("cpu", default_values(host.require("device", "cpu").options));
  cpu->open(0);
  const Stream stream = cpu->stream(StreamKind::communication);
  MpiCommunicator first({.piece_kib = 1}), second({});
  std::vector<float> memory(1001, static_cast<float>(1 + place->rank));
  for (MpiCommunicator* group : {&first, &second}) {
    group->connect({.rank = place->rank,
                    .size = place->size,
                    .address = "",
                    .exchange = [&](std::string own) { return hosts.exchange(std::move(own)); }},
                   *cpu);
    group->register_buffer(memory.data(), memory.size() * sizeof(float));
  }
  for (MpiCommunicator* group : {&first, &second})
    group->all_reduce({memory.data(), DType::f32, {1001}}, Reduction::sum, stream);
  cpu->synchronize(stream);
  const int sum = place->size * place->size * (place->size + 1) / 2;
  CHECK(memory == std::vector<float>(1001, static_cast<float>(sum)));
  CHECK_FALSE(first.error());
  CHECK_FALSE(second.error());
}

TEST_CASE("ranks that mpirun did not start, or several did, are refused") {
  ::unsetenv("PMIX_NAMESPACE");
  ::unsetenv("PMIX_RANK");
  const Rendezvous meeting{.rank = 0, .size = 2, .address = ""};
  check_refused(ErrorCode::config, {"mpi ranks are started by mpirun", "mpirun -n N quern train FILE"},
                [&] { meet(meeting); });

  ::setenv("PMIX_NAMESPACE", "job-1", 1);
  ::setenv("PMIX_RANK", "0", 1);
  check_refused(ErrorCode::config, {"no exchange"}, [&] { meet(meeting); });
  for (const char* other : {"job-2 1 5 here", "job-1 0 5 here", ""}) {
    Rendezvous mixed = meeting;
    mixed.exchange = [&](const std::string& own) { return std::vector<std::string>{own, other}; };
    check_refused(ErrorCode::communication, {"rank 1 is of another mpirun, or is a rank twice"}, [&] { meet(mixed); });
  }
}
