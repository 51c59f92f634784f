#include <memory>

#include "mpi_communicator.h"
#include "quern/plugin.h"

QUERN_PLUGIN("communicator", "mpi", manifest) {
  using namespace quern;
  manifest.name = "mpi";
  manifest.version = "0.1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<Communicator>("mpi", "ranks that mpirun starts, on any number of machines, through host memory",
                             mpi::mpi_options().specs(), [](const OptionValues& values) {
                               return std::make_unique<mpi::MpiCommunicator>(mpi::mpi_options().bind(values));
                             });
}
