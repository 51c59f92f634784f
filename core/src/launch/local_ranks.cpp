#include "launch/local_ranks.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "launch/rank_place.h"
#include "launch/rendezvous/secret.h"
#include "launch/starter_link.h"
#include "quern/error.h"

namespace quern {

std::string this_program() {
  constexpr const char* kSelf = "/proc/self/exe";
  std::error_code gone;
  const std::filesystem::path path = std::filesystem::read_symlink(kSelf, gone);
  return !gone && std::filesystem::equivalent(path, kSelf, gone) ? path.string() : kSelf;
}

std::vector<RankProcess> local_ranks(int size, const std::vector<std::string>& words) {
  std::vector<RankProcess> ranks;
  const std::string launch = hex_of(fresh_secret()).substr(0, 16), count = std::to_string(size);
  for (int i = 0; i < size; ++i) {
    const std::string rank = std::to_string(i);
    ranks.push_back({.name = "rank " + rank,
                     .words = words,
                     .environment = {{"QUERN_RANK", rank},
                                     {"QUERN_RANKS", count},
                                     {"QUERN_LOCAL_RANK", rank},
                                     {"QUERN_LOCAL_RANKS", count},
                                     {"QUERN_LAUNCH", launch},
                                     {kStarterVariable, std::to_string(::getpid())}},
                     .shows_output = i == 0});
  }
  return ranks;
}

std::string said_by(const std::string& name, const std::string& text) {
  return text.starts_with(name + ": ") ? text : name + ": " + text;
}

std::string rank_prefix() {
  try {
    const std::optional<RankPlace> place = rank_place();
    if (place && place->size > 1 && starter_of_this_rank() == 0) return "rank " + std::to_string(place->rank) + ": ";
  } catch (const Error&) {  // then that error is reported
  }
  return "";
}

}  // namespace quern
