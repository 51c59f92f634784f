#pragma once
// MPI in this process. It is started once, by the first group, and ended at exit if every group that was made has ended
// well: MPI_Finalize waits for all ranks, and would hang after a fault.

#include <mpi.h>

#include <string>
#include <vector>

#include "quern/communicator.h"

namespace quern::mpi {

/// A rank of a group, as it describes itself to its peers.
struct Member {
  std::string job;      // of mpirun
  int world_rank = 0;   // in MPI_COMM_WORLD
  std::string machine;  // and space of process ids
  int process = 0;
};

/// What each rank says of itself, by rank. Throws a config error when mpirun did not start this process, a
/// communication error when a rank does not come or is of another mpirun.
std::vector<Member> meet(const Rendezvous& rendezvous);

/// Whether MPI says that it reads and writes the memory of NVIDIA GPUs. Once MPI has started.
bool is_cuda_aware();

/// An MPI communicator of these ranks alone. Starts MPI, which waits for all ranks that mpirun started.
MPI_Comm begin_group(const std::vector<Member>& members);
/// Of a group that has ended well, by all ranks.
void end_group(MPI_Comm group);

}  // namespace quern::mpi
