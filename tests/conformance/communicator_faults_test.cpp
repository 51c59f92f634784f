// Communicators with one fault each.
#include "checked.h"

#include <algorithm>

#include <doctest/doctest.h>

using namespace quern;
using namespace quern::conformance;

TEST_CASE("a collective that hands on whole packs only") {
  check_broken("communicator", "short_gather", {"all_gather", "buffers used again"}, {"elements of f32", "nan"});
}

TEST_CASE("a sum in another order than it says") {
  check_broken("communicator", "backwards_sum", {"all_reduce sum", "reduce_scatter"},
               {"rank 0 of 3", "all_reduce of ", "elements of f32"});
}

TEST_CASE("a communicator that keeps its faults to itself") {
  check_broken("communicator", "silent",
               {"abort", "a call that differs", "a call that a rank leaves out", "a rank that is late",
                "a rank that is stopped", "a rank that is killed", "a rank that aborts"},
               {"error() after abort()", "got nothing"});
}

TEST_CASE("groups that need an exchange for one rank, or leave something behind") {
  check_setting("communicator", "leaves", "fault=file", "groups leave nothing",
                "open files after 60 times a group of 1");
  check_setting("communicator", "leaves", "fault=memory", "groups leave nothing",
                "allocations of the device by a group that is gone: got 1 not released");
  check_setting("communicator", "leaves", "fault=exchange", "without address or exchange", "bad_function_call");
}

TEST_CASE("a communicator whose abort leaves no fault") {
  check_broken("communicator", "deaf", {"abort"}, {"error() after abort()", "got nothing"});
}

TEST_CASE("a communicator that takes calls that do not fit, or works after a fault") {
  check_setting("communicator", "careless", "fault=calls", "wrong calls",
                "a sum of i32 by the only rank: got accepted");
  check_setting("communicator", "careless", "fault=goes_on", "abort", "the output of all_gather after abort(), byte 0");
  check_broken("communicator", "writes_after", {"a rank that is killed"},
               {"the memory of a collective after a fault, byte 0: got 0"}, {"killed"});
}

TEST_CASE("a communicator that takes memory that is not registered") {
  check_broken("communicator", "any_memory", {"memory that is not registered"},
               {"all_reduce of memory that is not registered", "accepted"});
}

TEST_CASE("a maximum that passes over NaN") {
  check_broken("communicator", "drops_nan", {"NaN in a maximum"}, {"all_reduce of maxima", "want nan"});
}

TEST_CASE("a communicator that says nothing of calls that differ or that a peer leaves out") {
  const Report report = checked_with("communicator", "silent", {"of_calls=true"});
  const std::string text = report.text();
  CAPTURE(text);
  CHECK(report.count(Verdict::broken) == 2);
  for (const char* contract : {"a call that differs", "a call that a rank leaves out"})
    CHECK(std::any_of(report.findings().begin(), report.findings().end(), [&](const Finding& finding) {
      return finding.contract == contract && finding.verdict == Verdict::broken &&
             finding.detail.find("got nothing") != std::string::npos;
    }));
}

TEST_CASE("a communicator whose waits end by abort alone") {
  const Report report = checked("communicator", "watched", {"a rank that", "a call that"});
  CAPTURE(report.text());
  check_sound(report);
}
