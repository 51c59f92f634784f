#include "launch/local_ranks.h"

#include <unistd.h>

#include <cstdlib>

#include "launch/rank_place.h"
#include "launch/rendezvous/secret.h"
#include "quern/error.h"

namespace quern {

namespace {

constexpr const char* kStarter = "QUERN_STARTER";

std::vector<std::string> with_arguments(std::vector<std::string> words, const std::vector<std::string>& arguments) {
  words.insert(words.end(), arguments.begin(), arguments.end());
  return words;
}

}  // namespace

std::vector<RankProcess> local_ranks(int size, const std::vector<std::string>& arguments) {
  std::vector<RankProcess> ranks;
  const std::string launch = hex_of(fresh_secret()).substr(0, 16), count = std::to_string(size);
  for (int i = 0; i < size; ++i) {
    const std::string rank = std::to_string(i);
    ranks.push_back({.name = "rank " + rank,
                     .words = with_arguments({"/proc/self/exe"}, arguments),
                     .environment = {{"QUERN_RANK", rank},
                                     {"QUERN_RANKS", count},
                                     {"QUERN_LOCAL_RANK", rank},
                                     {"QUERN_LOCAL_RANKS", count},
                                     {"QUERN_LAUNCH", launch},
                                     {kStarter, std::to_string(::getpid())}},
                     .shows_output = i == 0});
  }
  return ranks;
}

int starter_of_this_rank() {
  const char* const text = std::getenv(kStarter);
  const int starter = text ? std::atoi(text) : 0;
  return starter == ::getppid() ? starter : 0;
}

std::string rank_prefix() {
  try {
    const std::optional<RankPlace> place = rank_place();
    if (place && place->size > 1 && starter_of_this_rank() == 0) return "rank " + std::to_string(place->rank) + ": ";
  } catch (const Error&) {  // then that is what is reported
  }
  return "";
}

}  // namespace quern
