// Models with one fault each.
#include "checked.h"

#include <doctest/doctest.h>

using namespace quern;
using namespace quern::conformance;

TEST_CASE("a model that sees the future") {
  check_broken("model", "sees_future", {"causal"}, {"targets before and beside position", "bit for bit"});
}

TEST_CASE("a wrong backward rule") {
  check_broken("model", "wrong_gradient", {"gradients"},
               {"gradient of embedding.weight", "got ", "by finite differences"});
}

TEST_CASE("a parameter whose parts do not fill it") {
  check_broken("model", "wrong_shape", {"parameters and shapes"}, {"embedding.weight: rows of its parts"});
}

TEST_CASE("a config.json without one of the options") {
  check_broken("model", "forgets_option", {"config.json"}, {"scale", "other parameters or programs"});
}

TEST_CASE("scratch that launches share") {
  check_sound(checked("model", "shared_scratch"));
  for (const auto& [fault, part] : {std::pair("fault=1", "kernel_copy, launch "),
                                    {"fault=2", "process_copy, launch "},
                                    {"fault=3", "exclusive_copy, launch "}}) {
    const Report report = checked_with("model", "shared_scratch", {fault}, {"own ops"});
    const std::string text = report.text();
    CAPTURE(text);
    CHECK(report.count(Verdict::broken) == 2);  // own ops in f32 and in bf16
    CHECK(text.find(part) != std::string::npos);
    CHECK(text.find("while other ops run, and the same on another device: got other bits") != std::string::npos);
  }
}

TEST_CASE("an op that is taken only where it adds up is checked there") {
  check_sound(checked("model", "sums_only"));
  for (const auto& [fault, part] :
       {std::pair("fault=1", "heap after 1000 times shift_grad"), {"fault=2", "shift_grad, output 0 that adds up"}}) {
    const std::string text = checked_with("model", "sums_only", {fault}).text();
    CAPTURE(text);
    CHECK(text.find(part) != std::string::npos);
  }
}

TEST_CASE("a tensor with a layer's name, or with none") {
  check_setting("model", "wrong_names", "fault=1", "parameters and shapes", "used twice: layers.1.attn_norm.weight");
  check_setting("model", "wrong_names", "fault=2", "parameters and shapes", "a part without a Hugging Face name");
}

TEST_CASE("gradients that are wrong with another value of an option") {
  check_broken("model", "wrong_when_scaled", {"gradients of variants"}, {"with power = 1.5", "by finite differences"});
}

TEST_CASE("states that grow without bound, and sums that forget what was there or always add") {
  check_sound(checked("model", "bad_state"));
  check_setting("model", "bad_state", "fault=1", "states", "finite numbers");
  // Both own ops in f32 and in bf16; sums that are always added to are not in a checkpoint.
  for (const auto& [fault, contracts] : {std::pair("fault=2", 2), std::pair("fault=3", 3)}) {
    const Report report = checked_with("model", "bad_state", {fault});
    const std::string text = report.text();
    CAPTURE(text);
    CHECK(report.count(Verdict::broken) == contracts);
    CHECK(text.find("bad_state_sums, output 0 that adds up") != std::string::npos);
  }
}

TEST_CASE("an op that is right at some sizes or dtypes only, or keeps memory") {
  check_sound(checked("model", "some_sizes"));
  for (const auto& [fault, op] : std::initializer_list<std::pair<const char*, std::string_view>>{
           {"fault=1", "pack_copy(f32(17, 43)"},
           {"fault=2", "(2387, 43)"},
           {"fault=3", "any_copy(f64(21, 16) ) -> (f64(21, 16) ), which is accepted"},
           {"fault=4", "heap after 1000 times kept_copy"},
           {"fault=5", "element 0 of output 0: got not written, or not finite"}}) {
    const Report report = checked_with("model", "some_sizes", {fault});
    const std::string text = report.text();
    CAPTURE(text);
    CHECK(report.count(Verdict::broken) == (op.starts_with("any") ? 1 : 2));  // own ops in bf16, and in f32
    CHECK(text.find(op) != std::string::npos);
  }
}
