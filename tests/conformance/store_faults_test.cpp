// Stores with one fault each.
#include "checked.h"

#include <doctest/doctest.h>

using namespace quern;
using namespace quern::conformance;

TEST_CASE("a store that rounds offsets") {
  check_broken("offload", "rounds_offset", {"parts of a slot", "streams", "neighbouring parts"}, {"got ", "want "});
}

TEST_CASE("a store that does not wait for the stream") {
  check_broken("offload", "at_once", {"streams"}, {"a get behind a late put on another stream, byte 0"});
}

TEST_CASE("a store whose flush does not wait") {
  check_broken("offload", "never_flushes", {"flush"}, {"a get on another stream behind flush", "want 93"});
}

TEST_CASE("a store that passes over a put of one byte") {
  check_broken("offload", "drops_byte", {"put and get"}, {"a slot of 1 bytes, byte 0", "got 0"});
}

TEST_CASE("a store that works no longer where memory ran out once") {
  check_broken("offload", "keeps_size", {"memory that runs out"}, {"allocation 1 of the device fails", "got "});
}

TEST_CASE("a store of which all streams share a buffer") {
  check_broken("offload", "one_buffer", {"streams at once"}, {"a put and a get beside another stream's"});
}

TEST_CASE("a store of which ranks share a file") {
  check_broken("offload", "forgets_rank", {"ranks"}, {"a slot of rank 1 before its first put"});
}

TEST_CASE("a store that passes over failing writes and reads, or leaves its file") {
  check_sound(checked("offload", "in_file"));
  check_setting("offload", "in_file", "fault=writes", "writes that fail",
                "files may have 0 bytes, and error() says nothing");
  check_setting("offload", "in_file", "fault=reads", "reads that fail",
                "a get whose reads fail, and error() says nothing");
  check_setting("offload", "in_file", "fault=stale", "reads that fail",
                "a get whose reads fail, and error() says nothing");
  check_setting("offload", "in_file", "fault=file", "stores leave nothing", "the run's folder after 200 times");
  const std::string text = checked_with("offload", "in_file", {"fault=ends"}).text();
  CAPTURE(text);
  CHECK(text.find("files may have 1048576 bytes, and error() says nothing") != std::string::npos);
  CHECK(text.find("a get from a file that ends early, and error() says nothing") != std::string::npos);
}

TEST_CASE("a store that ends where memory runs out says so, and need do nothing more") {
  check_sound(checked("offload", "gives_up"));
}

TEST_CASE("a store whose puts wait for the stream") {
  check_broken("offload", "waits", {"calls that enqueue"}, {"9 calls behind work that is late"});
}

TEST_CASE("a store whose calls are slow, and do not wait for the stream") {
  const Report report = checked("offload", "slow", {"calls that enqueue"});
  const std::string text = report.text();
  CAPTURE(text);
  CHECK(report.exit_code() == 0);
}

TEST_CASE("a store that reports a fault where there is none") {
  check_broken("offload", "false_alarm", {"put and get"},
               {"error() of a store whose puts and gets succeed", "page 1 changed by itself"});
}

TEST_CASE("a checksum that leaves out the last byte") {
  const std::string text = checked("offload", "unsummed_end", {"a bit that flips"}).text();
  CAPTURE(text);
  CHECK(text.find("nothing reports it") != std::string::npos);
}

TEST_CASE("calls that leave memory or files behind") {
  check_setting("offload", "leaks", "kept=memory", "calls leave nothing", "heap after 1000 times put and get");
  check_setting("offload", "leaks", "kept=unflushed", "calls leave nothing", "heap after 1000 times put and get");
  check_setting("offload", "leaks", "kept=files", "calls leave nothing", "open files after 1000 times");
  check_setting("offload", "leaks", "kept=opened", "stores leave nothing", "open files after 200 times a store opened");
  check_setting("offload", "leaks", "kept=pinned", "stores leave nothing",
                "allocations of the device by a store that is gone: got 1 not released");
}

TEST_CASE("a store that keeps the size of memory that it has seen") {
  // Others break too where the allocator gives an address again.
  const std::string text = checked("offload", "knows_memory").text();
  CAPTURE(text);
  CHECK(text.find("a put of 5000 bytes at byte 0 of a block, byte 100: got 0") != std::string::npos);
}
