#include "ab/child.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "base/files/test_directory.h"

using namespace quern;
using namespace quern::ab;

namespace {

ChildResult shell(const TestDirectory& directory, const std::string& script) {
  return run_child({"/bin/sh", "-c", script}, directory / "out", directory / "err");
}

}  // namespace

TEST_CASE("a child's code, streams and memory come back") {
  TestDirectory directory;
  ChildResult result = shell(directory, "echo said; echo 'line one' >&2; echo 'quern: error: a: b' >&2; exit 7");
  CHECK(result.code == 7);
  CHECK_FALSE(result.interrupted);
  CHECK(result.peak_host_bytes > 100000);
  CHECK(read_text(directory / "out") == "said\n");
  CHECK(last_error(directory / "err") == "a: b");
  CHECK(shell(directory, "kill -11 $$").code == 128 + SIGSEGV);
  CHECK(shell(directory, "exit 0").code == 0);
  CHECK(run_child({"/nowhere/program"}, directory / "out", directory / "err").code == 127);
}

TEST_CASE("the last error is the last message with all its lines, or the last line") {
  TestDirectory directory;
  auto last = [&](const std::string& text) { return last_error(write_text(directory / "err", text)); };
  CHECK(last("quern: error: one\nquern: error: two\nand more\n\n") == "two\nand more");
  CHECK(last("first\nterminate called\n") == "terminate called");
  CHECK(last("") == "");
  CHECK(last(std::string(9999, 'x')).size() < 2100);
  CHECK(last_error(directory / "none") == "");
}

TEST_CASE("what a child leaves running ends with it") {
  TestDirectory directory;
  CHECK(shell(directory, "sleep 1000 & echo $!").code == 0);
  pid_t left = std::stoi(read_text(directory / "out"));
  for (int i = 0; i < 1000 && ::kill(left, 0) == 0; ++i) ::usleep(1000);
  // A container without an init process keeps it as a zombie, which is dead too.
  std::string state = read_text("/proc/" + std::to_string(left) + "/stat");
  CHECK((::kill(left, 0) != 0 || state.find(") Z") != std::string::npos));
}

namespace {

/// Runs a child that sleeps `seconds` in a process of its own, sends it `signal` once the child is up, and returns the
/// exit code: 42 when that signal ended the child.
int interrupted_by(int signal, const char* seconds, void (*disposition)(int)) {
  TestDirectory directory;
  pid_t runner = ::fork();  // signals to this program's process would end the tests
  REQUIRE(runner >= 0);
  if (runner == 0) {
    ::signal(signal, disposition);
    ChildResult result = shell(directory, std::string("echo up; sleep ") + seconds);
    ::_exit(result.interrupted.value_or(0) == signal && result.code == 128 + SIGKILL ? 42 : result.code);
  }
  while (read_text(directory / "out").empty()) ::usleep(1000);
  ::kill(runner, signal);
  int status = 0;
  REQUIRE(::waitpid(runner, &status, 0) == runner);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

}  // namespace

TEST_CASE("a signal ends the child and says which it was, unless it is ignored") {
  for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGXCPU}) {
    CAPTURE(signal);
    CHECK(interrupted_by(signal, "1000", SIG_DFL) == 42);
  }
  CHECK(interrupted_by(SIGHUP, "0.2", SIG_IGN) == 0);  // nohup
}
