#include <memory>

#include "nccl_communicator.h"
#include "quern/plugin.h"

QUERN_PLUGIN("communicator", "nccl", manifest) {
  using namespace quern;
  manifest.name = "nccl";
  manifest.version = "0.1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<Communicator>("nccl", "NVIDIA GPUs of any number of machines, by NCCL", nccl::nccl_options().specs(),
                             [](const OptionValues& values) {
                               return std::make_unique<nccl::NcclCommunicator>(nccl::nccl_options().bind(values));
                             });
}
