#include "world.h"

#include <unistd.h>

#if __has_include(<mpi-ext.h>)
#include <mpi-ext.h>
#endif

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <sstream>

#include "quern/error.h"

namespace quern::mpi {

namespace {

constexpr const char* kWhere = "communicator mpi";

std::atomic<int> open_groups{0};

void start() {
  int started = 0;
  MPI_Initialized(&started);
  if (started) return;
  ::setenv("OMPI_MCA_mpi_yield_when_idle", "1", 0);
  int threads = 0;
  if (MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &threads) != MPI_SUCCESS || threads != MPI_THREAD_MULTIPLE)
    throw Error(ErrorCode::config, {.where = kWhere,
                                    .what = "MPI does not start",
                                    .found = "thread level " + std::to_string(threads),
                                    .expected = "MPI_THREAD_MULTIPLE",
                                    .next = "use an Open MPI that was built with threads"});
  std::atexit([] {
    if (open_groups == 0) MPI_Finalize();
  });
}

/// What mpirun's runtime tells each process.
Member self() {
  const char* const job = std::getenv("PMIX_NAMESPACE");
  const char* const rank = std::getenv("PMIX_RANK");
  if (!job || !rank)
    throw Error(ErrorCode::config, {.where = kWhere,
                                    .what = "mpi ranks are started by mpirun",
                                    .found = "a process that mpirun did not start",
                                    .next = "mpirun -n N quern train FILE"});
  char host[256] = {};
  ::gethostname(host, sizeof host - 1);
  std::error_code unknown;
  return {.job = job,
          .world_rank = std::atoi(rank),
          .machine = host + std::filesystem::read_symlink("/proc/self/ns/pid", unknown).string(),
          .process = ::getpid()};
}

}  // namespace

std::vector<Member> meet(const Rendezvous& rendezvous) {
  const Member own = self();
  if (!rendezvous.exchange)
    throw Error(ErrorCode::config, {.where = kWhere,
                                    .what = "the ranks have no exchange before MPI starts",
                                    .found = "a rendezvous without `exchange`",
                                    .expected = "one that quern makes for ranks that it starts",
                                    .next = "start the run by quern, or choose another communicator"});
  std::ostringstream line;
  line << own.job << ' ' << own.world_rank << ' ' << own.process << ' ' << own.machine;
  std::vector<Member> members;
  std::set<int> places;
  for (const std::string& text : rendezvous.exchange(line.str())) {
    Member member;
    std::istringstream(text) >> member.job >> member.world_rank >> member.process >> member.machine;
    if (member.job != own.job || !places.insert(member.world_rank).second)
      throw Error(ErrorCode::communication,
                  {.where = kWhere,
                   .what = "rank " + std::to_string(members.size()) + " is of another mpirun, or is a rank twice",
                   .found = "rank " + std::to_string(member.world_rank) + " of " + member.job,
                   .expected = "another rank of " + own.job,
                   .next = "start all ranks by one mpirun"});
    members.push_back(std::move(member));
  }
  return members;
}

bool is_cuda_aware() {
#ifdef MPIX_CUDA_AWARE_SUPPORT
  return MPIX_Query_cuda_support() == 1;
#else
  return false;
#endif
}

MPI_Comm begin_group(const std::vector<Member>& members) {
  start();
  std::vector<int> ranks;
  for (const Member& member : members) ranks.push_back(member.world_rank);
  MPI_Group world, group;
  MPI_Comm comm = MPI_COMM_NULL;
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  MPI_Comm_group(MPI_COMM_WORLD, &world);
  const bool made = MPI_Group_incl(world, static_cast<int>(ranks.size()), ranks.data(), &group) == MPI_SUCCESS &&
                    MPI_Comm_create_group(MPI_COMM_WORLD, group, 0, &comm) == MPI_SUCCESS;
  if (!made) throw Error(ErrorCode::communication, {.where = kWhere, .what = "MPI makes no communicator of the ranks"});
  MPI_Group_free(&group);
  MPI_Group_free(&world);
  ++open_groups;
  return comm;
}

void end_group(MPI_Comm group) {
  MPI_Comm_free(&group);
  --open_groups;
}

}  // namespace quern::mpi
