#include "run/ranks/ranks.h"

#include <charconv>
#include <cstdlib>
#include <exception>
#include <map>
#include <sstream>
#include <utility>

#include "base/shorten.h"
#include "checkpoint/checkpoint_store.h"
#include "launch/starter_link.h"
#include "quern/error.h"
#include "run/ranks/machines_communicator.h"
#include "run/ranks/watchdog.h"

namespace quern {

namespace {

constexpr double kLater = 10;  // s: the watchdog, which knows more, speaks before the communicator

std::string name_of(const Communicator& communicator) { return "communicator " + communicator.traits().id; }

std::string place_of(int rank, int size) { return "rank " + std::to_string(rank) + " of " + std::to_string(size); }

RankPlace place_in(const Session& session) {
  const std::int64_t wanted = session.parallel.ranks;
  const RankPlace place = rank_place().value_or(RankPlace{});
  if (place.size == wanted) return place;
  throw Error(ErrorCode::config,
              {.where = session.config.where("parallel", "ranks"),
               .what = place.source.empty() ? "nothing started these ranks" : place.source + " started other ranks",
               .found = std::to_string(wanted),
               .expected = std::to_string(place.size),
               .next = "run quern train with a file as its config, not a pipe, or start as many ranks with mpirun, "
                       "srun or torchrun"});
}

/// The first lines that differ; "" for one that is not there.
std::pair<std::string, std::string> first_difference(const std::string& a, const std::string& b) {
  std::istringstream left(a), right(b);
  for (std::string x, y;; x.clear(), y.clear()) {
    std::getline(left, x);
    std::getline(right, y);
    if ((!left && !right) || x != y) return {x, y};
  }
}

// ---- what rank 0 tells those that follow it ----

constexpr char kRead = 'r', kDone = 'd', kFailed = 'e';

/// A tensor as all ranks know it, and a range of its elements.
std::string request_of(const PlannedTensor& tensor, std::int64_t first, std::int64_t count) {
  std::string text(1, kRead);
  for (const std::string& part : {tensor.kind, tensor.parameter, std::to_string(tensor.layer),
                                  std::to_string(tensor.part), std::to_string(first), std::to_string(count)})
    text.append(part).append(1, '\0');
  return text;
}

void serve(Engine& engine, const std::string& request) {
  std::vector<std::string> parts(1);
  for (char letter : request.substr(1))
    if (letter == '\0')
      parts.emplace_back();
    else
      parts.back() += letter;
  if (parts.size() != 7) fail_internal("ranks", "rank 0 requests an invalid read");
  const PlannedTensor tensor = engine.plan().part({parts[0], parts[1], std::stoi(parts[2]), std::stoi(parts[3])});
  engine.read(tensor, std::stoll(parts[4]), std::stoll(parts[5]), nullptr);
}

}  // namespace

Ranks::Ranks(const Session& session)
    : place_(place_in(session)),
      machines_(static_cast<int>(session.parallel.machines)),
      directory_(session.log.directory),
      unwinding_(std::uncaught_exceptions()) {
  if (place_.size == 1) return;
  const MeetingPoint point = MeetingPoint::of(
      place_, session.log.directory, [](const char* name) { return static_cast<const char*>(std::getenv(name)); });
  hosts_ = std::make_unique<HostGroup>(place_.rank, place_.size, point, session.parallel.timeout);
  rendezvous_ = std::make_unique<RankRendezvous>(
      Rendezvous{.rank = place_.rank,
                 .size = place_.size,
                 .address = {},
                 .timeout = hosts_->timeout(),
                 .exchange = [this](std::string own) { return hosts_->exchange(std::move(own)); }});
  watchdog_ = std::make_unique<Watchdog>(*hosts_, directory_, [this, resume = session.checkpoint.resume] {
    return says_how_to_continue() ? how_to_continue(directory_, resume) : "";
  });
}

Ranks::~Ranks() {
  if (communicator_ && std::uncaught_exceptions() > unwinding_) communicator_->abort();
}

std::vector<std::string> Ranks::alone(std::string& own) {
  std::vector<std::string> all;
  all.push_back(std::move(own));
  return all;
}

std::uint32_t Ranks::any(std::uint32_t own) {
  if (!hosts_) return own;
  std::uint32_t found = 0;
  const std::vector<std::string> answers = exchange(std::to_string(own));
  for (std::size_t rank = 0; rank < answers.size(); ++rank) {
    std::uint32_t bits = 0;
    const char* const end = answers[rank].data() + answers[rank].size();
    if (const auto [stop, error] = std::from_chars(answers[rank].data(), end, bits);
        error != std::errc() || stop != end)
      throw Error(ErrorCode::communication, {.where = "rank " + std::to_string(rank),
                                             .what = "does something else than this rank",
                                             .next = "make the same calls of the run on all ranks"});
    found |= bits;
  }
  return found;
}

void Ranks::be_busy(std::string what) {
  if (hosts_) hosts_->be_busy(std::move(what));
}

std::shared_ptr<void> Ranks::busy_scope(std::string what) {
  if (!hosts_) return nullptr;
  auto restore = [this](std::string* before) {
    be_busy(std::move(*before));
    delete before;
  };
  return std::shared_ptr<std::string>(new std::string(hosts_->be_busy(std::move(what))), restore);
}

void Ranks::busy(const std::string& what, const std::function<void()>& work) {
  const std::shared_ptr<void> scope = busy_scope(what);
  work();
}

void Ranks::together() {
  be_busy({});
  exchange({});
}

std::string Ranks::from_leader(const std::string& what, const std::function<std::string()>& make) {
  std::string made;
  if (leads()) busy(what, [&] { made = make(); });
  return exchange(std::move(made))[0];
}

void Ranks::need_same(const std::string& what, const std::string& own) {
  const std::vector<std::string> all = exchange(own);
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    const auto [found, expected] = first_difference(all[rank], all[0]);
    const std::string other = static_cast<int>(rank) == place_.rank ? "" : "rank " + std::to_string(rank);
    throw Error(ErrorCode::config, {.where = other,
                                    .what = "its " + what + " differs from rank 0's",
                                    .found = printable(found, 200),
                                    .expected = printable(expected, 200),
                                    .next = "start all ranks with one quern and one config, on devices of one kind"});
  }
}

void Ranks::lead(const std::string& what, Engine& engine, const std::function<void()>& work) {
  if (!hosts_) return work();
  engine.apply_update();
  if (!leads()) return follow(engine);
  engine.announce_reads([this](const PlannedTensor& tensor, std::int64_t first, std::int64_t count) {
    exchange(request_of(tensor, first, count));
    return busy_scope({});  // all read it together
  });
  std::string end(1, kDone);
  try {
    busy(what, work);
  } catch (const Error& error) {
    end = std::string(1, kFailed) + std::to_string(static_cast<int>(error.code())) + " " + error.what();
    engine.announce_reads({});
    exchange(std::move(end));
    throw;
  }
  engine.announce_reads({});
  exchange(std::move(end));
}

void Ranks::follow(Engine& engine) {
  for (;;) {
    const std::string told = exchange({})[0];
    if (told[0] == kDone) return;
    if (told[0] == kFailed) {
      const std::size_t space = told.find(' ');
      throw Error(static_cast<ErrorCode>(std::stoi(told.substr(1, space))),
                  {.where = "rank 0", .what = told.substr(space + 1)});
    }
    serve(engine, told);
  }
}

void Ranks::open(Device& device, std::int64_t first) {
  device.open(static_cast<int>(first) + (device.traits().units > 1 ? place_.local_rank : 0));
  const std::vector<std::string> units = exchange(device.traits().unit);
  std::map<std::string, std::size_t> owners;
  for (std::size_t rank = 0; rank < units.size(); ++rank) {
    const auto [owner, first_to_come] = owners.emplace(units[rank], rank);
    if (units[rank].empty() || first_to_come) continue;
    throw Error(
        ErrorCode::config,
        {.where = "rank " + std::to_string(rank),
         .what = "its " + device.traits().id + " device is already used by rank " + std::to_string(owner->second),
         .found = units[rank],
         .expected = "one of its own for each rank",
         .next = "start as many ranks as there are devices, and let each see its own or all"});
  }
}

void Ranks::connect(Communicator& communicator, Device& device) {
  communicator_ = &communicator;
  Rendezvous rendezvous = rendezvous_ ? rendezvous_->get(communicator.traits().id) : Rendezvous{};
  rendezvous.timeout += kLater;
  communicator.connect(rendezvous, device);
  if (communicator.rank() != shard() || communicator.size() != shards())
    throw Error(ErrorCode::communication, {.where = name_of(communicator),
                                           .what = "connected as another rank than it was asked to be",
                                           .found = place_of(communicator.rank(), communicator.size()),
                                           .expected = place_of(shard(), shards()),
                                           .next = "this is a fault in the plugin; please report it to its author"});
  communicator.barrier();
  rendezvous_.reset();  // its folder goes, so that ranks that are killed later leave none
}

void Ranks::join(Communicator& communicator, Device& device, Engine& engine) {
  together();
  if (watchdog_) watchdog_->connecting(communicator);
  connect(communicator, device);
  const auto* levels = dynamic_cast<MachinesCommunicator*>(&communicator);
  engine.join(communicator, levels ? &levels->inside() : nullptr);
  communicator.barrier();
  if (watchdog_) watchdog_->connected(engine.progress());
}

void Ranks::leave(Engine& engine) {
  if (!hosts_) return;
  hosts_->exchange({});
  engine.leave();
  watchdog_.reset();
}

std::shared_ptr<void> Ranks::time_to_finish() {
  if (!watchdog_) return nullptr;
  using Time = std::pair<std::shared_ptr<void>, std::shared_ptr<void>>;
  return std::make_shared<Time>(watchdog_->time_to_finish(), time_from_starter());
}

void Ranks::fail(const std::string& text) noexcept {
  if (watchdog_) watchdog_->leaving();
  if (hosts_) hosts_->end(text);
}

void Ranks::check(const std::string& where) {
  if (!communicator_) return;
  std::optional<std::string> fault = hosts_ ? hosts_->fault() : std::nullopt;  // from which others may follow
  if (!fault && (fault = communicator_->error()))
    fault = name_of(*communicator_) + ": " + *fault + (watchdog_ ? watchdog_->silent_ranks() : "");
  if (fault) throw Error(ErrorCode::communication, {.where = where, .what = *fault});
}

bool Ranks::says_how_to_continue() const {
  if (!hosts_ || starter_of_this_rank() != 0) return false;
  const std::string fault = hosts_->fault().value_or("");
  // What another rank ended because of rank 0 may reach this one through the communicator first.
  const std::vector<HostGroup::Note> notes = hosts_->notes();
  const bool leader_is_gone = fault.starts_with("rank 0 ") ||
                              fault.starts_with(std::string(kHang) + "rank 0 has sent") ||
                              (rank() != 0 && !notes.empty() && notes[0].silent > hosts_->timeout() / 2);
  return rank() == (leader_is_gone ? 1 : 0);
}

double Ranks::waited() const { return watchdog_ ? watchdog_->waited() : 0; }

}  // namespace quern
