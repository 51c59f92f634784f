// Which GPU a name means.
#include "run/assumed_gpu.h"

#include <doctest/doctest.h>

#include "quern/testkit/refusal.h"

using namespace quern;

namespace {

OptionSpec gpus() {
  OptionSpec spec{.key = "assume", .type = OptionType::text};
  spec.choices = {"H100",
                  "H100-PCIe",
                  "A100",
                  "A100-40GB",
                  "A100-PCIe",
                  "RTX-4070",
                  "RTX-4070-Ti-Super",
                  "RTX-4090",
                  "RTX-4090-Laptop",
                  "RTX-4060-Ti-16GB",
                  "RTX-4080",
                  "RTX-4060-Ti-8GB",
                  "RTX-6000-Ada",
                  "RTX-PRO-6000",
                  "RTX-PRO-6000-Max-Q",
                  "L4",
                  "L40",
                  "L40S"};
  spec.spellings = {{"NVIDIA H100 80GB HBM3", "H100"},
                    {"NVIDIA GeForce RTX 4090", "RTX-4090"},
                    {"NVIDIA GeForce RTX 4090 Laptop GPU", "RTX-4090-Laptop"},
                    {"NVIDIA GeForce RTX 4060 Ti", "RTX-4060-Ti-16GB"},
                    {"NVIDIA GeForce RTX 4060 Ti", "RTX-4060-Ti-8GB"},
                    {"NVIDIA L40", "L40"}};
  return spec;
}

std::string id(const std::string& name) { return gpu_named("--gpu", name, gpus()); }
std::string refusal(const std::string& name) {
  return testkit::refusal(ErrorCode::config, [&] { id(name); });
}

}  // namespace

TEST_CASE("a GPU is found by its id, by its card's name, and by words that only it and its variants have") {
  for (const std::string& known : gpus().choices) CHECK(id(known) == known);
  for (const char* name : {"RTX 4090", "rtx-4090", "rtx4090", "NVIDIA GeForce RTX 4090", "4090"})
    CHECK(id(name) == "RTX-4090");
  for (const char* name : {"nvidia geforce rtx 4090 laptop gpu", "4090 Laptop"}) CHECK(id(name) == "RTX-4090-Laptop");
  CHECK(id("NVIDIA H100 80GB HBM3") == "H100");
  CHECK(id("H100 PCIe") == "H100-PCIe");
  CHECK(id("RTX 4060 Ti 16GB") == "RTX-4060-Ti-16GB");
  CHECK(id("NVIDIA L40") == "L40");
  CHECK(id("6000 Ada") == "RTX-6000-Ada");
  CHECK(id("Pro 6000") == "RTX-PRO-6000");
}

TEST_CASE("a number before a name is the number of GPUs") {
  for (const char* name : {"4x RTX 4090", "4 x RTX 4090", "4xRTX-4090", "4x4090"}) {
    CAPTURE(name);
    const AssumedGpus four = gpus_named("--gpu", name, gpus());
    CHECK(four.id == "RTX-4090");
    CHECK(four.count == 4);
  }
  for (const char* name : {"RTX 4090", "4090"}) {
    CHECK(gpus_named("--gpu", name, gpus()).id == "RTX-4090");
    CHECK(gpus_named("--gpu", name, gpus()).count == 0);
  }
  for (const char* name : {"0x L4", "70000x L4"})
    CHECK(testkit::refusal(ErrorCode::config, [&] {
            gpus_named("--gpu", name, gpus());
          }).starts_with("--gpu: number of GPUs: found "));
  CHECK(testkit::refusal(ErrorCode::config, [&] {
          gpus_named("--gpu", "4x", gpus());
        }).starts_with("--gpu: no GPU that is known"));
}

TEST_CASE("a name that means no GPU, or several, is refused with the nearest, never taken for another") {
  const std::string unknown = "--gpu: no GPU that is known: found ",
                    several = "--gpu: several GPUs have that name: found ";
  CHECK(refusal("A100 40").starts_with(unknown + "\"A100 40\", expected one of A100, A100-40GB, A100-PCIe"));
  CHECK(refusal("RTX 4070 Ti").starts_with(unknown + "\"RTX 4070 Ti\", expected one of RTX-4070, RTX-4070-Ti-Super"));
  for (const char* other : {"L400", "A10G", "H100 SXM", "RTX 4090 Ti", "RTX 9090", "NVIDIA L40G", "D", "Max-Q"}) {
    CAPTURE(other);
    CHECK(refusal(other).starts_with(unknown));
  }
  CHECK(refusal("all").starts_with(unknown + "\"all\", expected one of H100, "));
  CHECK(refusal("").starts_with(unknown));
  CHECK(refusal("Voodoo 2").starts_with(unknown + "\"Voodoo 2\", expected one of H100, "));
  CHECK(refusal("RTX 4060 Ti")
            .starts_with(several + "\"RTX 4060 Ti\", expected one of RTX-4060-Ti-16GB, RTX-4060-Ti-8GB"));
  CHECK(refusal("4060").starts_with(several));
  CHECK(refusal("6000").starts_with(several));
}
