#include "conformance/communicator/rank_processes.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>

#include "conformance/report.h"

namespace quern::conformance {

namespace {

using Clock = std::chrono::steady_clock;

/// The first byte of what a rank writes; its texts follow, with zero bytes between them.
constexpr char kReturned = 'r', kThrew = 't', kBroken = 'b', kSkipped = 's';

struct Rank {
  pid_t process = -1;
  int pipe = -1;
  std::string written = {};
};

std::string said(const std::function<std::string(int)>& body, int rank) {
  const std::string zero(1, '\0');
  try {
    return kReturned + body(rank);
  } catch (const Broken& fault) {
    return kBroken + fault.what + zero + fault.got + zero + fault.want;
  } catch (const Skipped& skipped) {
    return kSkipped + skipped.reason;
  } catch (const Error& error) {
    return kThrew + std::string(1, static_cast<char>(error.code())) + error.what();
  } catch (const std::exception& error) {
    return kBroken + std::string("a rank") + zero + "an exception: " + error.what() + zero + "none";
  }
}

[[noreturn]] void be_rank(const std::function<std::string(int)>& body, int rank, int pipe) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  const std::string text = said(body, rank);
  for (std::size_t done = 0; done < text.size();) {
    const ssize_t now = ::write(pipe, text.data() + done, text.size() - done);
    if (now <= 0) break;
    done += static_cast<std::size_t>(now);
  }
  ::_exit(0);  // not the exit of the program that was forked
}

bool stopped(const Rank& rank) {
  siginfo_t info{};
  return ::waitid(P_PID, static_cast<id_t>(rank.process), &info, WSTOPPED | WNOHANG | WNOWAIT) == 0 &&
         info.si_pid == rank.process;
}

/// Reads what the ranks write until it is too late or those that have not ended are stopped.
void listen(std::vector<Rank>& ranks, Clock::time_point deadline) {
  constexpr int kLook = 100;  // ms
  for (;;) {
    std::vector<pollfd> open;
    bool runs = false;
    for (const Rank& rank : ranks) {
      if (rank.pipe < 0) continue;
      open.push_back({.fd = rank.pipe, .events = POLLIN, .revents = 0});
      runs = runs || !stopped(rank);
    }
    if (!runs || Clock::now() > deadline) return;
    ::poll(open.data(), open.size(), kLook);
    for (const pollfd& at : open) {
      if (at.revents == 0) continue;
      Rank& rank = *std::find_if(ranks.begin(), ranks.end(), [&](const Rank& r) { return r.pipe == at.fd; });
      char bytes[4096];
      const ssize_t got = ::read(rank.pipe, bytes, sizeof bytes);
      if (got > 0) {
        rank.written.append(bytes, static_cast<std::size_t>(got));
      } else {
        ::close(rank.pipe);
        rank.pipe = -1;
        if (rank.written.starts_with(kSkipped)) return;  // the others would wait for it
      }
    }
  }
}

RankOutcome end(Rank& rank, double limit) {
  const bool late = rank.pipe >= 0;
  if (late) {
    ::kill(rank.process, SIGKILL);
    ::close(rank.pipe);
  }
  int status = 0;
  ::waitpid(rank.process, &status, 0);
  if (late) return {.text = "was stopped, or did not end within " + number(limit) + " s"};
  if (WIFSIGNALED(status)) return {.text = "was killed by signal " + std::to_string(WTERMSIG(status))};
  if (rank.written.empty()) return {.text = "left with exit code " + std::to_string(WEXITSTATUS(status))};
  if (rank.written[0] == kThrew)
    return {RankOutcome::Kind::threw, rank.written.substr(2), static_cast<ErrorCode>(rank.written[1])};
  return {RankOutcome::Kind::returned, rank.written.substr(1)};
}

}  // namespace

std::vector<RankOutcome> run_ranks(int size, double limit, const std::function<std::string(int rank)>& body) {
  std::vector<Rank> ranks;
  for (int rank = 0; rank < size; ++rank) {
    int ends[2] = {-1, -1};
    if (::pipe2(ends, O_CLOEXEC) != 0) throw Error(ErrorCode::resources, {.where = "a rank", .what = "no pipe"});
    const pid_t process = ::fork();
    if (process == 0) be_rank(body, rank, ends[1]);
    ::close(ends[1]);
    ranks.push_back({.process = process, .pipe = ends[0]});
    if (process < 0) break;
  }
  const bool all = ranks.back().process >= 0;
  listen(ranks,
         Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(all ? limit : 0)));
  std::vector<RankOutcome> outcomes;
  for (Rank& rank : ranks)
    if (rank.process > 0) outcomes.push_back(end(rank, limit));
  if (!all) throw Error(ErrorCode::resources, {.where = "a rank", .what = "no process for it"});
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const std::string& text = ranks[i].written;
    if (text.empty() || outcomes[i].kind == RankOutcome::Kind::died) continue;
    if (text[0] == kSkipped) throw Skipped{text.substr(1)};
    if (text[0] != kBroken) continue;
    const std::size_t got = text.find('\0'), want = text.find('\0', got + 1);
    broken("rank " + std::to_string(i) + " of " + std::to_string(size) + ": " + text.substr(1, got - 1),
           text.substr(got + 1, want - got - 1), text.substr(want + 1));
  }
  return outcomes;
}

std::vector<RankOutcome> run_all_ranks(int size, double limit, const std::function<std::string(int rank)>& body) {
  std::vector<RankOutcome> outcomes = run_ranks(size, limit, body);
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank)
    need(outcomes[rank].kind == RankOutcome::Kind::returned,
         "rank " + std::to_string(rank) + " of " + std::to_string(size), outcomes[rank].text, "no fault");
  return outcomes;
}

}  // namespace quern::conformance
