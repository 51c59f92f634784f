#include "traced.h"

#include <fcntl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <filesystem>
#include <optional>
#include <utility>

#include <doctest/doctest.h>

// After sys/ptrace.h, whose names it would define again.
#include <linux/ptrace.h>

namespace quern::testing {

namespace fs = std::filesystem;

namespace {

using Words = std::array<std::uint64_t, 6>;  // arguments of a system call

template <class Request>
long trace(Request request, pid_t process, void* address, std::uintptr_t data) {
  return ::ptrace(static_cast<__ptrace_request>(request), process, address, reinterpret_cast<void*>(data));
}

std::string text_at(pid_t process, std::uint64_t address) {
  std::string text;
  char byte = 0;
  iovec here{&byte, 1};
  for (;; ++address) {
    iovec there{reinterpret_cast<void*>(address), 1};
    if (::process_vm_readv(process, &here, 1, &there, 1, 0) != 1 || byte == 0) return text;
    text += byte;
  }
}

std::string path_of(pid_t process, std::uint64_t descriptor) {
  std::error_code error;
  return fs::read_symlink("/proc/" + std::to_string(process) + "/fd/" + std::to_string(static_cast<int>(descriptor)),
                          error);
}

/// A name relative to an open directory, as the *at calls have it.
std::string path_at(pid_t process, std::uint64_t directory, std::uint64_t address) {
  std::string name = text_at(process, address);
  if (name.starts_with("/")) return name;
  std::error_code error;
  bool here = static_cast<int>(directory) == AT_FDCWD;
  fs::path base = here ? fs::read_symlink("/proc/" + std::to_string(process) + "/cwd", error)
                       : fs::path(path_of(process, directory));
  return base / name;
}

std::optional<FileOperation> operation(pid_t process, std::uint64_t call, const Words& a) {
  FileOperation found{process, "", "", ""};
  const auto here = static_cast<std::uint64_t>(AT_FDCWD);
  auto is = [&](const char* name, std::string path, std::string to = "") {
    found = {process, name, std::move(path), std::move(to)};
  };
  switch (call) {
    case SYS_write:
    case SYS_pwrite64: is("write", path_of(process, a[0])); break;
    case SYS_ftruncate: is("truncate", path_of(process, a[0])); break;
    case SYS_fsync:
    case SYS_fdatasync: is("fsync", path_of(process, a[0])); break;
    case SYS_openat:
      if ((a[2] & (O_WRONLY | O_RDWR | O_CREAT)) != 0) is("open", path_at(process, a[0], a[1]));
      break;
    case SYS_renameat:
    case SYS_renameat2: is("rename", path_at(process, a[0], a[1]), path_at(process, a[2], a[3])); break;
    case SYS_mkdirat: is("mkdir", path_at(process, a[0], a[1])); break;
    case SYS_unlinkat: is("remove", path_at(process, a[0], a[1])); break;
#ifdef SYS_rename  // newer architectures have only the *at calls
    case SYS_rename: is("rename", path_at(process, here, a[0]), path_at(process, here, a[1])); break;
    case SYS_mkdir: is("mkdir", path_at(process, here, a[0])); break;
    case SYS_unlink:
    case SYS_rmdir: is("remove", path_at(process, here, a[0])); break;
#endif
    default: break;
  }
  return found.call.empty() ? std::nullopt : std::optional(found);
}

/// What the stopped thread is about to do; empty at the end of a call, and for calls of no interest.
std::optional<FileOperation> pending(pid_t process) {
  __ptrace_syscall_info info{};
  if (trace(PTRACE_GET_SYSCALL_INFO, process, reinterpret_cast<void*>(sizeof info),
            reinterpret_cast<std::uintptr_t>(&info)) <= 0 ||
      info.op != PTRACE_SYSCALL_INFO_ENTRY)
    return std::nullopt;
  Words words;
  for (std::size_t i = 0; i < words.size(); ++i) words[i] = info.entry.args[i];
  return operation(process, info.entry.nr, words);
}

pid_t start(const std::function<void()>& body) {
  pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    if (trace(PTRACE_TRACEME, 0, nullptr, 0) != 0) ::_exit(125);
    ::raise(SIGSTOP);
    body();
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  if (!WIFSTOPPED(status)) return -1;
  constexpr auto kOptions = PTRACE_O_TRACESYSGOOD | PTRACE_O_TRACECLONE | PTRACE_O_EXITKILL | PTRACE_O_TRACEEXEC;
  trace(PTRACE_SETOPTIONS, child, nullptr, kOptions);
  return child;
}

}  // namespace

bool can_trace() {
  pid_t child = start([] {});
  if (child < 0) return false;
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  return true;
}

int run_traced(const std::string& directory, const std::function<void()>& body, const Visit& visit) {
  pid_t child = start(body);
  REQUIRE(child > 0);
  trace(PTRACE_SYSCALL, child, nullptr, 0);
  for (int status = 0;;) {
    pid_t stopped = ::waitpid(-1, &status, __WALL);
    REQUIRE(stopped > 0);
    if (!WIFSTOPPED(status)) {
      if (stopped != child) continue;  // one of its threads
      return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    }
    int signal = WSTOPSIG(status);
    if (signal == (SIGTRAP | 0x80)) {
      signal = 0;
      if (auto next = pending(stopped); next && (next->path.starts_with(directory) || next->to.starts_with(directory)))
        if (int sent = visit(*next)) ::syscall(SYS_tgkill, child, stopped, sent);  // before the call returns
    } else if (signal == SIGTRAP || signal == SIGSTOP) {
      signal = 0;  // a new thread, or an exec
    }
    trace(PTRACE_SYSCALL, stopped, nullptr, static_cast<std::uintptr_t>(signal));
  }
}

int run_traced(const std::string& directory, std::vector<std::string> words, const Visit& visit) {
  words.insert(words.begin(), QUERN_CLI);
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  auto body = [&] {
    int sink = ::open("/dev/null", O_WRONLY);
    ::dup2(sink, STDOUT_FILENO);
    ::dup2(sink, STDERR_FILENO);
    ::execv(pointers[0], pointers.data());
  };
  return run_traced(directory, body, visit);
}

}  // namespace quern::testing
