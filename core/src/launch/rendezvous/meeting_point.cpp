#include "launch/rendezvous/meeting_point.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdio>
#include <sstream>

#include "base/files/durable_file.h"
#include "quern/error.h"

namespace quern {

namespace {

constexpr const char* kAddress = "QUERN_RENDEZVOUS";
constexpr const char* kSecret = "QUERN_SECRET";
constexpr const char* kTitle = "quern-rendezvous-1";
const std::string kFile = std::string(kTemporaryPrefix) + "rendezvous";
constexpr const char* kLoopback = "127.0.0.1";

[[noreturn]] void refuse(const char* variable, std::string found, std::string expected) {
  throw Error(ErrorCode::config,
              {.where = std::string("environment variable ") + variable,
               .what = "does not define a rendezvous",
               .found = std::move(found),
               .expected = std::move(expected),
               .next = std::string("set ") + kAddress + " and " + kSecret + " alike for all ranks, or neither"});
}

RankZero by_hand(const char* address, const char* secret) {
  if (!address) refuse(kAddress, "nothing", "host:port, as QUERN_SECRET is set");
  if (!secret) refuse(kSecret, "nothing", "64 hexadecimal digits: openssl rand -hex 32");
  const std::string text = address;
  const std::size_t colon = text.rfind(':');
  std::string host = text.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  RankZero zero{.hosts = {host}};
  if (colon != std::string::npos) {
    const char* const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data() + colon + 1, end, zero.port);
    if (error != std::errc() || stop != end) zero.port = 0;
  }
  if (host.empty() || zero.port < 1 || zero.port > 65535) refuse(kAddress, text, "host:port, [IPv6]:port");
  const std::optional<Secret> key = secret_from(secret);
  if (!key) refuse(kSecret, "another text", "64 hexadecimal digits: openssl rand -hex 32");
  zero.secret = *key;
  return zero;
}

/// Whole or not at all, for this user alone.
void write_private(const std::string& path, const std::string& text) {
  const std::string temporary = path + "-" + std::to_string(::getpid());
  ::unlink(temporary.c_str());
  const OwnedDescriptor file(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!file || !write_all(file.get(), text) || ::fsync(file.get()) != 0 ||
      ::rename(temporary.c_str(), path.c_str()) != 0) {
    const int error = errno;
    ::unlink(temporary.c_str());
    fail_resources(path, "rank 0 cannot publish its address", error);
  }
}

}  // namespace

MeetingPoint MeetingPoint::in(const std::string& directory, const std::string& name, bool local) {
  MeetingPoint point;
  point.launch_ = name;
  point.directory_ = directory;
  // What has this prefix may be removed by a run that takes over the directory.
  point.file_ = directory + "/" + kFile + (name.empty() ? "" : "-" + name);
  point.local_ = local;
  return point;
}

MeetingPoint MeetingPoint::of(const RankPlace& place, const std::string& directory, const Environment& environment) {
  MeetingPoint point = in(directory, place.launch, place.local_size == place.size);
  const char *const address = environment(kAddress), *const secret = environment(kSecret);
  if (address || secret) point.fixed_ = by_hand(address, secret);
  const char* const master = environment("MASTER_ADDR");
  if (master && place.source == "torchrun") point.first_host_ = master;
  return point;
}

Listener MeetingPoint::open(Secret& secret) const {
  if (fixed_) {
    secret = fixed_->secret;
    const std::string& host = fixed_->hosts[0];
    return listen_for_ranks(fixed_->port, host == kLoopback || host == "localhost");
  }
  secret = fresh_secret();
  Listener listener = listen_for_ranks(0, local_);
  std::string text =
      std::string(kTitle) + "\nsecret " + hex_of(secret) + "\nport " + std::to_string(listener.port) + "\n";
  std::vector<std::string> hosts = local_ ? std::vector<std::string>{kLoopback} : own_hosts();
  if (!local_ && !first_host_.empty()) hosts.insert(hosts.begin(), first_host_);
  for (const std::string& host : hosts) text += "host " + host + "\n";
  make_directories(directory_);
  write_private(file_, text + "end\n");
  return listener;
}

void MeetingPoint::close() const noexcept {
  if (!fixed_) ::unlink(file_.c_str());
}

void MeetingPoint::remove_left(const std::string& directory) noexcept { remove_named(directory, kFile, ""); }

std::optional<RankZero> MeetingPoint::look() const {
  if (fixed_) return fixed_;
  // Opening the directory makes a network file system look whether the file is new.
  if (DIR* directory = ::opendir(directory_.c_str())) ::closedir(directory);
  const OwnedDescriptor file(::open(file_.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  struct stat about {};
  if (!file || ::fstat(file.get(), &about) != 0 || !S_ISREG(about.st_mode) || about.st_uid != ::geteuid())
    return std::nullopt;
  std::string text(1 << 16, '\0');
  const ssize_t size = ::read(file.get(), text.data(), text.size());
  std::istringstream lines(text.substr(0, size < 0 ? 0 : static_cast<std::size_t>(size)));
  RankZero zero;
  std::string key, value;
  if (!(lines >> key) || key != kTitle) return std::nullopt;
  while (lines >> key && key != "end" && lines >> value) {
    if (key == "secret") zero.secret = secret_from(value).value_or(Secret{});
    if (key == "port") std::from_chars(value.data(), value.data() + value.size(), zero.port);
    if (key == "host") zero.hosts.push_back(value);
  }
  if (key != "end" || zero.port < 1 || zero.port > 65535) return std::nullopt;
  return zero;
}

}  // namespace quern
