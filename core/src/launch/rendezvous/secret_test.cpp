#include "launch/rendezvous/secret.h"

#include <doctest/doctest.h>

using namespace quern;

TEST_CASE("proofs are HMAC-SHA-256") {
  Secret secret{'J', 'e', 'f', 'e'};  // RFC 4231, test case 2; shorter keys are filled with zeros
  const std::string message = "what do ya want for nothing?";
  Secret proof{};
  const std::string got = proof_of(secret, message);
  REQUIRE(got.size() == proof.size());
  std::copy(got.begin(), got.end(), proof.begin());
  CHECK(hex_of(proof) == "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK(proves(secret, message, got));
  CHECK(!proves(secret, message + " ", got));
  CHECK(!proves(secret, message, got.substr(1)));
  secret[31] = 1;
  CHECK(!proves(secret, message, got));
}

TEST_CASE("secrets are written as hexadecimal digits") {
  const Secret secret = fresh_secret();
  CHECK(secret != fresh_secret());
  CHECK(secret_from(hex_of(secret)) == secret);
  CHECK(secret_from(std::string(64, 'A')) == secret_from(std::string(64, 'a')));
  for (const std::string& wrong :
       {std::string(), std::string(63, '0'), std::string(65, '0'), std::string(64, 'g'), std::string(64, '\x10')})
    CHECK(!secret_from(wrong));
}
