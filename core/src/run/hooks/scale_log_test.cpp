// What an observation's event says; tests/scale_log_test.cpp reads whole runs'.
#include "run/hooks/scale_log.h"

#include <doctest/doctest.h>

#include "log/jsonl_sink.h"

using namespace quern;

TEST_CASE("an event has the figures of the observation, and of a delayed scale its repairs") {
  ObservedTensor tensor{.name = "ffn_norm.e4m3", .layer = 3, .format = "e4m3", .observation = {}, .state = {}};
  ScaleObservation seen{.amax = 2.5f, .largest_scale = 0.0078125f, .smallest_scale = 0.0078125f};
  const ScaleState state{.scale = 0.0078125f, .amax = 2.5f, .redone = 1};
  CHECK(to_json_line(scale_event(tensor, seen, &state, 20)) ==
        R"({"event":"scale","step":20,"tensor":"ffn_norm.e4m3","layer":3,"format":"e4m3","amax":2.5,)"
        R"("scale":0.0078125,"redone":1})");
  // 2^34 elements, beyond 32 bits.
  seen.elements = std::uint64_t{1} << 34, seen.clipped = std::uint64_t{1} << 32, seen.underflowed = 1u << 31;
  seen.smallest_scale = 0.00390625f, seen.non_finite = std::uint64_t{1} << 31;
  tensor.layer = -1;
  CHECK(to_json_line(scale_event(tensor, seen, nullptr, 20)) ==
        R"({"event":"scale","step":20,"tensor":"ffn_norm.e4m3","format":"e4m3","amax":2.5,"scale":0.0078125,)"
        R"("smallest_scale":0.00390625,"clipped":0.25,"underflowed":0.125,"non_finite":0.125})");
}
