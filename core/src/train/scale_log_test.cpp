// What a state's event says; tests/scale_log_test.cpp reads those of whole runs.
#include "train/scale_log.h"

#include <doctest/doctest.h>

#include "log/jsonl_sink.h"

using namespace quern;

TEST_CASE("an event has the figures of the state, and fractions where elements were counted") {
  ScaledTensor tensor{.name = "ffn_norm.e4m3", .layer = 3, .format = "e4m3", .state = {}};
  ScaleState state{.scale = 0.0078125f, .amax = 2.5f, .redone = 1};
  CHECK(to_json_line(scale_event(tensor, state, 20)) ==
        R"({"event":"scale","step":20,"tensor":"ffn_norm.e4m3","layer":3,"format":"e4m3","amax":2.5,)"
        R"("scale":0.0078125,"redone":1})");
  // 2^34 elements, beyond 32 bits.
  state.elements[1] = 4, state.clipped[1] = 1, state.underflowed[0] = 1u << 31;
  tensor.layer = -1;
  CHECK(to_json_line(scale_event(tensor, state, 20)) ==
        R"({"event":"scale","step":20,"tensor":"ffn_norm.e4m3","format":"e4m3","amax":2.5,"scale":0.0078125,)"
        R"("redone":1,"clipped":0.25,"underflowed":0.125})");
}
