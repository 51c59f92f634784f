// Which GPU a name means.
#include "run/assumed_gpu.h"

#include <doctest/doctest.h>

#include "quern/testkit/refusal.h"

using namespace quern;

namespace {

const std::vector<std::string> kIds = {
    "H100",     "H100-PCIe",        "H200",         "GH200", "A100-40GB", "A100", "RTX-4090",
    "RTX-4080", "RTX-4060-Ti-16GB", "RTX-6000-Ada", "L4",    "L40S"};

std::string refusal(const std::string& name) {
  return testkit::refusal(ErrorCode::config, [&] { gpu_named(name, kIds); });
}

}  // namespace

TEST_CASE("a GPU is found by its id, by a product's name, and by a part that only one has") {
  for (const std::string& id : kIds) CHECK(gpu_named(id, kIds) == id);
  for (const char* name : {"RTX 4090", "rtx-4090", "NVIDIA GeForce RTX 4090", "4090"})
    CHECK(gpu_named(name, kIds) == "RTX-4090");
  CHECK(gpu_named("NVIDIA H100 80GB HBM3", kIds) == "H100");
  CHECK(gpu_named("NVIDIA H100 PCIe", kIds) == "H100-PCIe");
  CHECK(gpu_named("RTX 4060 Ti 16GB", kIds) == "RTX-4060-Ti-16GB");
  CHECK(gpu_named("NVIDIA L40S", kIds) == "L40S");
  CHECK(gpu_named("RTX 6000 Ada", kIds) == "RTX-6000-Ada");
}

TEST_CASE("a name that means no GPU, or several, is refused with what it could be") {
  CHECK(refusal("Voodoo 2").starts_with("--gpu: no GPU that is known: found \"Voodoo 2\", expected one of H100, "));
  CHECK(refusal("").starts_with("--gpu: no GPU that is known"));
  CHECK(refusal("RTX").find("--gpu: several GPUs have that in their name: found \"RTX\", expected one of RTX-4090, "
                            "RTX-4080, ") == 0);
}
