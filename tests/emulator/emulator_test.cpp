// The emulator finds what it is for: each kernel here is right, and wrong without one of its lines.
#include <cstring>

#include <doctest/doctest.h>

#include "emulator/copies.h"
#include "emulator/machine.h"

using namespace quern::emulator;

namespace {

/// Of one parameter, the address `to` in %rd1; %r1 is the thread.
std::string kernel(const std::string& body) {
  return ".version 9.0\n.target sm_90a\n.address_size 64\n.extern .shared .align 128 .b8 memory[];\n"
         ".visible .entry test(\n.param .u64 to,\n.param .align 64 .b8 map[128]\n)\n{\n.reg .pred %p<9>;\n"
         ".reg .b32 %r<40>;\n.reg .b64 %rd<9>;\n"
         "ld.param.u64 %rd1, [to];\nmov.u32 %r1, %tid.x;\nmov.u32 %r2, memory;\n" +
         body + "ret;\n}\n";
}

/// %r7 to the thread's word, whose bytes are at %r3.
const std::string kWriteResult = R"(
    cvt.u64.u32 %rd2, %r3;
    add.s64 %rd3, %rd1, %rd2;
    st.global.u32 [%rd3], %r7;
)";

struct Result {
  std::vector<std::uint32_t> words;
  std::string fault = {};
};

/// `without`: a line to leave out.
Result run(std::string body, const std::string& without, std::uint32_t threads, std::uint64_t seed,
           const TensorMap& map = {}) {
  if (!without.empty()) {
    const std::size_t at = body.find(without);
    REQUIRE(at != std::string::npos);
    body.erase(at, body.find('\n', at) + 1 - at);
  }
  Module module;
  read(module, kernel(body));
  Kernel& test = module.kernels.at("test");
  Result result{std::vector<std::uint32_t>(threads)};
  std::vector<std::uint8_t> parameters(192);
  const std::uint32_t* const to = result.words.data();
  std::memcpy(parameters.data(), &to, sizeof to);
  std::memcpy(parameters.data() + 64, &map, sizeof map);
  try {
    decode(module, test);
    Machine(seed).launch(test, {.grid = {}, .block = {threads}, .cluster = 1, .dynamic_bytes = 4096}, parameters);
  } catch (const Fault& fault) {
    result.fault = fault.what();
  }
  return result;
}

/// Right under every seed, and found to be wrong without each of these lines, by a message that has the words.
void check(const std::string& body, std::uint32_t threads,
           const std::vector<std::pair<std::string, std::string>>& lines, std::uint32_t (*want)(std::uint32_t thread),
           const TensorMap& map = {}) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const Result right = run(body, {}, threads, seed, map);
    CHECK(right.fault == "");
    for (std::uint32_t thread = 0; thread < threads && want != nullptr; ++thread)
      CHECK(right.words[thread] == want(thread));
    for (const auto& [line, words] : lines) {
      CAPTURE(line);
      const Result wrong = run(body, line, threads, seed, map);
      CHECK_MESSAGE(wrong.fault.find(words) != std::string::npos, wrong.fault);
    }
  }
}

}  // namespace

TEST_CASE("what warps give each other through shared memory waits for a barrier, twice") {
  const std::string body = R"(
    shl.b32 %r3, %r1, 2;
    add.s32 %r4, %r2, %r3;
    st.shared.u32 [%r4], %r1;
    bar.sync 0;
    xor.b32 %r5, %r3, 252;
    add.s32 %r6, %r2, %r5;
    ld.shared.u32 %r7, [%r6];
    barrier.sync.aligned 0;
    st.shared.u32 [%r4], %r7;
)" + kWriteResult;
  check(body, 64, {{"    bar.sync", "nothing orders before it"}, {"    barrier.sync", "nothing orders before it"}},
        [](std::uint32_t thread) { return thread ^ 63; });
}

TEST_CASE("lanes see each other's writes behind a barrier of the warp") {
  const std::string body = R"(
    shl.b32 %r3, %r1, 2;
    add.s32 %r4, %r2, %r3;
    st.shared.u32 [%r4], %r1;
    bar.warp.sync -1;
    xor.b32 %r5, %r3, 124;
    add.s32 %r6, %r2, %r5;
    ld.shared.u32 %r7, [%r6];
)" + kWriteResult;
  auto want = [](std::uint32_t thread) { return thread ^ 31; };
  check(body, 32, {}, want);
  const Result wrong = run(body, "    bar.warp.sync", 32, 1);
  std::uint32_t differ = 0;
  for (std::uint32_t thread = 0; thread < 32; ++thread) differ += wrong.words[thread] != want(thread) ? 1 : 0;
  CHECK(differ > 0);
}

TEST_CASE("a warp that arrives and one that waits: without either, threads wait for ever") {
  const std::string body = R"(
    setp.lt.u32 %p1, %r1, 32;
    @%p1 bra $first;
    bar.sync 3, 64;
    bra.uni $end;
$first:
    bar.arrive 3, 64;
$end:
)";
  check(body, 64, {{"    bar.arrive", "deadlock"}}, nullptr);
}

TEST_CASE("copies of bytes are read once their barrier's phase has ended") {
  const std::string body = R"(
    mov.b64 %rd4, map;
    cvta.param.u64 %rd5, %rd4;
    setp.ne.u32 %p1, %r1, 0;
    mov.u32 %r9, 1;
    mov.u32 %r10, 128;
    add.s32 %r11, %r2, 1024;
    @!%p1 mbarrier.init.shared::cta.b64 [%r11], %r9;
    bar.sync 0;
    @!%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r11], %r10;
    @!%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd5], %r10, [%r11];
$wait:
    mov.u32 %r12, 0;
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r11], %r12;
    @!%p2 bra $wait;
    shl.b32 %r3, %r1, 2;
    add.s32 %r4, %r2, %r3;
    ld.shared.u32 %r7, [%r4];
)" + kWriteResult;
  TensorMap map{};
  const std::uint32_t numbers[] = {7, 8};
  std::memcpy(&map, numbers, sizeof numbers);
  const Result right = run(body, {}, 32, 1, map);
  CHECK(right.fault == "");
  CHECK(right.words[0] == 7);
  CHECK(right.words[1] == 8);
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    CHECK(run(body, "    mbarrier.try_wait", 32, seed, map).fault.find("nothing orders before it (by a copy)") !=
          std::string::npos);
    CHECK(run(body, "    @!%p1 mbarrier.arrive", 32, seed, map).fault.find("deadlock") != std::string::npos);
  }
}

TEST_CASE("a copy out of what threads wrote follows their fence, and is waited for before they write again") {
  const std::string body = R"(
    mov.b64 %rd4, map;
    cvta.param.u64 %rd5, %rd4;
    shl.b32 %r3, %r1, 2;
    add.s32 %r4, %r2, %r3;
    add.s32 %r5, %r1, 100;
    st.shared.u32 [%r4], %r5;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    setp.ne.u32 %p1, %r1, 0;
    mov.u32 %r6, 0;
    @!%p1 cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [%rd5, {%r6}], [%r2];
    @!%p1 cp.async.bulk.commit_group;
    @!%p1 cp.async.bulk.wait_group.read 0;
    bar.sync 0;
    st.shared.u32 [%r4], %r6;
)";
  std::vector<std::uint8_t> out(256);
  TensorMap map{};
  map.base = reinterpret_cast<std::uint64_t>(out.data());
  map.sizes[0] = map.box[0] = 256;
  map.rank = map.element_bytes = 1;
  check(body, 64,
        {{"    fence.proxy", "before that thread's fence"},
         {"    @!%p1 cp.async.bulk.wait_group", "an engine may still read"}},
        nullptr, map);
  for (std::size_t thread = 0; thread < 64; ++thread) CHECK(out[4 * thread] == thread + 100);
}

TEST_CASE("accesses beyond shared memory, misaligned ones and unknown instructions are refused") {
  auto fault = [](const std::string& body) { return run(body, {}, 32, 1).fault; };
  CHECK(fault("    ld.shared.u32 %r7, [%r2+4096];\n").find("out of shared memory's bounds") != std::string::npos);
  CHECK(fault("    ld.shared.u32 %r7, [%r2+2];\n").find("misaligned") != std::string::npos);
  CHECK(fault("    frobnicate.u32 %r7, %r2;\n").find("unknown instruction: frobnicate") != std::string::npos);
  CHECK(fault("    trap;\n").find("trap in test") != std::string::npos);
}
