#include "log/background_output.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <sstream>
#include <thread>
#include <utility>

#include <doctest/doctest.h>

using namespace quern;
using namespace std::chrono_literals;

namespace {

/// A pipe that takes one page before it is full.
struct Pipe {
  int ends[2];
  Pipe() {
    REQUIRE(::pipe(ends) == 0);
    ::fcntl(ends[1], F_SETPIPE_SZ, 4096);
    ::signal(SIGPIPE, SIG_IGN);
  }
  ~Pipe() {
    close_reader();
    ::close(ends[1]);
  }
  void close_reader() {
    if (ends[0] >= 0) ::close(ends[0]);
    ends[0] = -1;
  }
  std::string read_until(const std::string& last) const {
    std::string text;
    char part[4096];
    while (text.find(last) == std::string::npos) {
      const ssize_t count = ::read(ends[0], part, sizeof part);
      if (count <= 0) break;
      text.append(part, static_cast<std::size_t>(count));
    }
    return text;
  }
};

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

TEST_CASE("flushed text reaches the descriptor, in order, and the stream has its buffer back") {
  Pipe pipe;
  std::ostringstream stream;
  stream << "before";
  {
    BackgroundOutput output(stream, pipe.ends[1]);
    stream << "one " << 1 << std::endl;
    stream << "two\n";  // not flushed: the end does
  }
  stream << ", after";
  CHECK(pipe.read_until("two\n") == "one 1\ntwo\n");
  CHECK(stream.str() == "before, after");
  CHECK(stream.good());
}

TEST_CASE("a reader that stalls holds up nobody, and learns how many lines are missing") {
  Pipe pipe;
  std::ostringstream stream;
  BackgroundOutput output(stream, pipe.ends[1], 2000, 10s);
  const auto begin = std::chrono::steady_clock::now();
  constexpr int kLines = 1000;
  for (int i = 0; i < kLines; ++i) stream << "line " << i << std::endl;
  CHECK(seconds_since(begin) < 5);
  std::string text;
  std::atomic<bool> done{false};
  std::thread reader([&] {
    text = pipe.read_until("the last\n");
    done = true;
  });
  for (; !done; std::this_thread::sleep_for(1ms)) stream << "the last" << std::endl;  // until there is room
  reader.join();
  std::istringstream lines(text);
  int whole = 0, dropped = 0, last = -1;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("(")) dropped += std::stoi(line.substr(1));
    if (!line.starts_with("line ")) continue;
    ++whole;
    CHECK(std::stoi(line.substr(5)) > std::exchange(last, std::stoi(line.substr(5))));
  }
  CHECK(whole > 50);
  CHECK(whole + dropped >= kLines);
}

TEST_CASE("the end waits for the reader no longer than its limit") {
  Pipe pipe;
  std::ostringstream stream;
  const auto begin = std::chrono::steady_clock::now();
  {
    BackgroundOutput output(stream, pipe.ends[1], 100000, 100ms);
    stream << std::string(50000, 'x') << std::endl;
  }
  CHECK(seconds_since(begin) >= 0.1);
  CHECK(seconds_since(begin) < 5);
  CHECK(stream.good());
  pipe.close_reader();  // ends the thread
}

TEST_CASE("a reader that is gone leaves the stream in a bad state at the end") {
  Pipe pipe;
  pipe.close_reader();
  std::ostringstream stream;
  {
    BackgroundOutput output(stream, pipe.ends[1]);
    for (int i = 0; i < 1000; ++i) stream << "line" << std::endl;
    CHECK(stream.good());
  }
  CHECK_FALSE(stream.good());
}
