// Options of the bf16 backend over whole runs.
#include <cmath>

#include <doctest/doctest.h>

#include "end_to_end.h"

using namespace quern;
using namespace quern::testing;

TEST_CASE("transposed weights change a run by no more than the order of sums, whatever the masters") {
  TinyFiles files;
  for (const char* master : {"fp32", "bf16"}) {
    CAPTURE(master);
    auto losses = [&](const std::string& transposed) {
      return train_here(files, {files.run(master + transposed), "precision.id=bf16", "train.steps=6",
                                "precision.bf16.transposed_weights=" + transposed, "checkpoint.export=false",
                                std::string("optimizer.master=") + master})
          .losses;
    };
    const Losses plain = losses("none"), kept = losses("kept");
    REQUIRE(plain.size() == 6);
    for (const auto& [step, loss] : plain) CHECK(std::fabs(kept.at(step) - loss) < 0.01);
  }
}
