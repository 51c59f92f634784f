// The program as a user meets it: what it prints, where, and its exit code.
#include <sys/wait.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>

#include <doctest/doctest.h>
#include <unistd.h>

#include "test_paths.h"

namespace {

namespace fs = std::filesystem;

struct Outcome {
  int code;
  std::string text;  // both streams, as far as `arguments` lets them through
};

Outcome quern(const std::string& arguments, const std::string& environment = "") {
  const std::string command = environment + " " + QUERN_BUILD_DIR "/bin/quern" + " " + arguments;
  FILE* pipe = popen(command.c_str(), "r");
  REQUIRE(pipe != nullptr);
  Outcome outcome{0, {}};
  char buffer[4096];
  while (std::size_t count = fread(buffer, 1, sizeof buffer, pipe)) outcome.text.append(buffer, count);
  const int status = pclose(pipe);
  REQUIRE(WIFEXITED(status));
  outcome.code = WEXITSTATUS(status);
  return outcome;
}

bool has(const Outcome& outcome, const std::string& part) { return outcome.text.find(part) != std::string::npos; }

struct ConfigFile {
  fs::path path = fs::path(QUERN_BUILD_DIR) / ("cli_test_" + std::to_string(getpid()) + ".toml");
  explicit ConfigFile(const std::string& text) { std::ofstream(path) << text; }
  ~ConfigFile() { fs::remove(path); }
};

}  // namespace

TEST_CASE("help and version go to standard output and succeed") {
  for (const char* words : {"--help", "-h", "", "config --help", "plugins", "config show --help", "data show --help",
                            "plugins info -h", "ab --help", "generate --help", "eval --help"}) {
    CAPTURE(words);
    Outcome outcome = quern(std::string(words) + " 2>/dev/null");
    CHECK(outcome.code == 0);
    CHECK(has(outcome, "usage: quern"));
  }
  CHECK(has(quern("--version"), "quern 0."));
}

TEST_CASE("an unknown command is a config error with the nearest name, on standard error") {
  Outcome outcome = quern("confg 2>&1 >/dev/null");
  CHECK(outcome.code == 2);
  CHECK(
      outcome.text ==
      "quern: error: quern: unknown command: found \"confg\", expected one of train, generate, eval, plan, bench, ab, "
      "data, checkpoint, export, config, plugins; nearest name `config`\n");
  CHECK(quern("config shw 2>&1").code == 2);
  CHECK(has(quern("config show 2>&1"), "missing FILE"));
  CHECK(quern("config show a b 2>&1").code == 2);
  CHECK(quern("config show --sett a.b=1 x 2>&1").code == 2);
  CHECK(quern("config show --se a.b=1 x 2>&1").code == 2);  // no guessing: a later option must not change a script
}

TEST_CASE("config errors come together and leave with code 2, unreadable files with 3") {
  ConfigFile file("[model]\n[device]\nordinal = -1\n[modle]\n");
  Outcome outcome = quern("config check " + file.path.string() + " --set device.foo=1 2>&1 >/dev/null");
  CHECK(outcome.code == 2);
  for (const char* part :
       {"model.id: missing", ":3:1: device.ordinal: out of range, found -1", ":4:2: modle: unknown section",
        "nearest name `model`", "--set device.foo: device.foo: unknown key"}) {
    CAPTURE(part);
    CHECK(has(outcome, part));
  }
  CHECK(quern("config check /nowhere/run.toml 2>&1").code == 3);
}

TEST_CASE("a plan shows, checks and draws its schedule") {
  ConfigFile file(
      "[model]\nid = \"llama\"\n[model.llama]\nvocab_size = 64\nhidden_size = 16\nintermediate_size = 32\n"
      "num_hidden_layers = 2\nnum_attention_heads = 2\n[data.tokens]\ntrain = \"x.tok\"\n[precision]\nid = \"fp32\"\n");
  const std::string plan = "plan " + file.path.string() + " ";
  const Outcome shown = quern(plan + "--show schedule 2>&1");
  CHECK(shown.code == 0);
  for (const char* part : {"\nfirst micro-step: ", "\nlater micro-step: ", "matmul d.down.weight, layer 1",
                           " -> gradient.down.weight@1\n", "\nupdate: ", "wait"}) {
    CAPTURE(part);
    CHECK(has(shown, part));
  }
  const Outcome one = quern(plan + "--show schedule --run update 2>&1");
  CHECK(one.text.starts_with("update: "));
  CHECK_FALSE(has(one, "micro-step"));
  const Outcome unknown = quern(plan + "--show schedule --run updat 2>&1");
  CHECK(unknown.code == 2);
  CHECK(has(unknown, "--run: no run of that name in this plan: found updat, expected upload, evaluate, "));
  CHECK(quern(plan + "--show programs 2>&1").code == 2);
  CHECK(has(quern(plan + "--verify 2>&1"), " actions: every read was written, no overlap, no race\n"));
  CHECK(
      quern(plan + "--verify --set train.accumulation=3 --set parallel.ranks=3 --set parallel.communicator=memcpy 2>&1")
          .code == 0);

  const fs::path drawn = file.path.string() + ".json";
  CHECK(quern(plan + "--timeline " + drawn.string() + " 2>&1").code == 0);
  CHECK(quern(plan + "--timeline " + drawn.string() + " 2>&1").code == 0);  // over its own
  std::string text;
  std::getline(std::ifstream(drawn), text, '\0');
  CHECK(text.find("\"traceEvents\":[") != std::string::npos);
  const Outcome measured =
      quern("bench " + file.path.string() + " --steps 1 --set train.sequence=16 --set memory.moments=host --timeline " +
            drawn.string() + " 2>&1");
  CHECK(measured.code == 0);
  for (const char* part : {"\nlater micro-step: estimated ", "\nupdate: estimated ", ", measured ",
                           "\nin a step kernels wait for ", "\n  optimizer state ", "\nstart to first step "}) {
    CAPTURE(part);
    CHECK(has(measured, part));
  }
  std::getline(std::ifstream(drawn), text, '\0');
  for (const char* bar : {"\"fetch optimizer state\"", "\"release optimizer state\"", "\"first micro-step, updating\""})
    CHECK(text.find(bar) != std::string::npos);
  std::ofstream(drawn) << "somebody's";
  const Outcome refused = quern(plan + "--timeline " + drawn.string() + " 2>&1");
  CHECK(refused.code == 4);
  CHECK(has(refused, "choose another --timeline file"));
  fs::remove(drawn);
}

TEST_CASE("a plan is made for a GPU that is not here, for several in a table, and written with what it chose") {
  ConfigFile file(
      "[model]\nid = \"qwen2\"\n[model.qwen2]\nvocab_size = 4096\nhidden_size = 512\nintermediate_size = 1024\n"
      "num_hidden_layers = 8\nnum_attention_heads = 8\nnum_key_value_heads = 8\n[train]\naccumulation = 4\n"
      "[data.tokens]\ntrain = \"x.tok\"\n[device]\nid = \"cuda\"\n");
  const std::string plan = "plan " + file.path.string() + " ";
  const Outcome other = quern(plan + "--set device.id=cpu --gpu H100 2>&1");
  CHECK(other.code == 2);
  CHECK(has(other, "plans for no other hardware: found cpu, expected a device with the option assume"));
  for (const char* several : {"--gpu H100 --gpu L4", "--gpus H100 --gpu L4"}) {
    CAPTURE(several);
    const Outcome refused = quern(plan + several + " 2>&1 >/dev/null");
    CHECK(refused.code == 2);
    CHECK(has(refused, "; --gpus "));
  }
  const std::string piped = "cat " + file.path.string() + " |";
  CHECK(quern("plan /dev/stdin --set device.id=cpu --host-memory 1GiB >/dev/null", piped).code == 0);
  CHECK(
      has(quern("plan /dev/stdin --gpus H100 2>&1", piped), "/dev/stdin: read several times for --gpus: found a pipe"));
  if (!fs::exists(QUERN_BUILD_DIR "/plugins/device/libquern_cuda.so")) {
    MESSAGE("the rest is skipped: built without the cuda device");
    return;
  }
  const Outcome one = quern(plan + "--gpu 'NVIDIA H100 80GB HBM3' 2>&1");
  CHECK(one.code == 0);
  for (const char* part : {"device          cuda (NVIDIA H100 (assumed))\n", "\n  device's own ", "with the update\n"})
    CHECK(has(one, part));
  const std::string preset = "plan " QUERN_SOURCE_DIR
                             "/configs/qwen2.5/0.5b.toml --set device.id=cuda "
                             "--set precision.id=e4m3 --show program --pass fuse ";
  auto ends_in_codes = [&](const std::string& kind, const std::string& more) {
    const Outcome program = quern(preset + more + " 2>&1");
    CHECK(program.code == 0);
    return has(program, kind);
  };
  auto both = [](const std::string& scaling) {
    return " --set precision.e4m3.activation_scaling=" + scaling + " --set precision.e4m3.gradient_scaling=" + scaling;
  };
  const std::string squares = both("square"), e5m2 = " --set precision.e4m3.gradient_format=e5m2";
  for (const auto& [way, scales] : {std::pair{"delayed", std::string()},
                                    {"squares", squares},
                                    {"squares", squares + e5m2},
                                    {"blocks", both("block")},
                                    {"blocks", both("block") + e5m2}})
    for (const char* producer : {" = matmul_swiglu_quantize_", " = matmul_swiglu_grad_quantize_"}) {
      const std::string kind = producer + std::string(way) + "(";
      CHECK(ends_in_codes(kind, "--gpu H100" + scales));
      CHECK_FALSE(ends_in_codes(kind, "--gpu H100 --set device.cuda.products=library" + scales));
      if (scales.empty()) CHECK_FALSE(ends_in_codes(kind, "--gpu L40S --set train.micro_batch=4"));
    }
  for (const char* kind : {" = add_rms_norm_quantize_squares(", " = rope_grad_column_sum_quantize_squares("})
    CHECK(ends_in_codes(kind, "--gpu H100" + squares));
  CHECK(quern(plan + "--gpu H100 --set optimizer.adamw.moments=f33 2>&1").code == 2);
  for (const char* name : {"Voodoo 2", "A100 40", "RTX 4070 Tie", "L400", "all", ""}) {
    CAPTURE(name);
    const Outcome refused = quern(plan + "--gpu '" + name + "' 2>&1 >/dev/null");
    CHECK(refused.code == 2);
    CHECK(has(refused, "quern: error: --gpu: "));
  }
  CHECK(has(quern(plan + "--gpu 'A100 40' 2>&1"),
            "no GPU that is known: found \"A100 40\", expected one of A100, A100-40GB, A100-PCIe, A100-PCIe-40GB"));
  CHECK(has(quern(plan + "--gpu 'NVIDIA L40' 2>&1"), "(NVIDIA L40 (assumed))\n"));
  CHECK(has(quern(plan + "--set 'device.cuda.assume=GeForce RTX 4090' 2>&1"), "(NVIDIA RTX-4090 (assumed))\n"));

  const Outcome table = quern(plan + "--host-memory 2GiB --gpus 'RTX 4090,H200' 2>&1");
  CHECK(table.code == 0);
  CHECK(has(table, "\nNVIDIA RTX-4090 (assumed) "));
  CHECK(has(table, "\nNVIDIA H200 (assumed) "));
  CHECK_FALSE(has(table, "NVIDIA H100"));
  // GPUs of one machine: the same step over ranks, its tokens a second in all, and its host memory together.
  const Outcome pair = quern(plan + "--host-memory 2GiB --gpus '2x RTX 4090' --set parallel.zero=3 2>&1");
  CHECK(pair.code == 0);
  CHECK(has(pair, "\n2 x NVIDIA RTX-4090 (assumed) "));
  CHECK(has(pair, "; sharded: master, moments, gradients, weights\n"));
  CHECK(has(quern(plan + "--gpu '0x H100' 2>&1"), "--gpu: number of GPUs: found \"0x H100\""));
  CHECK(has(quern(plan + "--set memory.device_budget=710MiB --host-memory 1MiB --gpus H100 2>&1"), "does not fit"));

  const fs::path chosen = file.path.string() + ".chosen.toml";
  for (const std::string& other : {"--write " + chosen.string(), "--timeline " + chosen.string(),
                                   std::string("--verify"), std::string("--show program"), std::string("--gpu H200")}) {
    CAPTURE(other);
    const Outcome refused = quern(plan + "--gpus H100 " + other + " 2>&1 >/dev/null");
    CHECK(refused.code == 2);
    CHECK(
        has(refused, "--gpus: makes a table of GPUs and nothing else: found also " + other.substr(0, other.find(' '))));
    CHECK_FALSE(fs::exists(chosen));
  }
  for (const char* names : {"''", "H100,,L4", "RTX"}) CHECK(quern(plan + "--gpus " + names + " 2>&1").code == 2);
  const Outcome slow = quern(plan +
                             "--gpu 'RTX 4090' --set precision.id=bf16 --set model.qwen2.num_attention_heads=2 "
                             "--set model.qwen2.num_key_value_heads=2 2>&1");
  CHECK(has(slow,
            "\nslow            attention on CUDA cores, not tensor cores, as cuDNN does not take bf16 heads of 256 "));
  CHECK(slow.text.find("\nslow ") == slow.text.rfind("\nslow "));
  CHECK_FALSE(has(quern(plan + "--gpu 'RTX 4090' --set precision.id=bf16 2>&1"), "\nslow "));
  const Outcome written =
      quern(plan + "--set memory.device_budget=1GiB --gpu H100 --write " + chosen.string() + " 2>&1");
  CHECK(written.code == 0);
  CHECK(has(written, "\nchosen\n"));
  fs::remove(chosen);
  CHECK(quern(plan + "--set memory.device_budget=1GiB --gpu H100 --show program --write " + chosen.string() + " 2>&1")
            .code == 0);
  const Outcome again = quern("plan " + chosen.string() + " 2>&1");
  CHECK(again.code == 0);
  auto speed = [](const std::string& text) { return text.substr(text.find("a micro-batch, ")); };
  CHECK(speed(again.text) == speed(written.text));
  fs::remove(chosen);
  const Outcome sharing = quern(plan + "--gpu '4x H100' --write " + chosen.string() + " 2>&1");
  CHECK(sharing.code == 0);
  CHECK(has(sharing, "\n  parallel.zero = "));
  CHECK(speed(quern("plan " + chosen.string() + " 2>&1").text) == speed(sharing.text));
  fs::remove(chosen);
}

TEST_CASE("plugins are listed, broken ones with their refusal, and described") {
  const std::string folder = "QUERN_PLUGIN_PATH=" QUERN_BUILD_DIR "/tests/bad_plugins";
  Outcome list = quern("plugins list 2>&1", folder);
  CHECK(list.code == 0);
  CHECK(has(list, "log good: writes nothing (good 1.2, "));
  CHECK(has(list, "log wrong_id: CANNOT BE LOADED: "));
  CHECK(has(list, QUERN_BUILD_DIR "/plugins\n"));
  Outcome info = quern("plugins info log good 2>&1", folder);
  CHECK(info.code == 0);
  CHECK(has(info, "`every`"));
  CHECK(has(info, "licence: Apache-2.0"));
  CHECK(has(quern("plugins info log goof 2>&1", folder), "nearest name `good`"));
  CHECK(has(quern("plugins info logg good 2>&1", folder), "nearest name `log`"));
}

TEST_CASE(
    "a device is described as it opens here, a slow kernel with the fix, and one that cannot be opened by the reason") {
  const std::string info = "plugins info device cpu 2>&1";
  const Outcome slow = quern(info, "OMP_NUM_THREADS=2 OPENBLAS_CORETYPE=Prescott");
  CHECK(slow.code == 0);
  CHECK(has(slow, "here: 2 cores, "));
  if (has(slow, "OpenBLAS") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    CHECK(has(slow, ", Prescott\nwarning: matmuls may be slow: "));
    CHECK(has(slow, "unset OPENBLAS_CORETYPE"));
    const Outcome fast = quern(info, "unset OPENBLAS_CORETYPE;");
    CHECK(has(fast, "here: "));
    CHECK_FALSE(has(fast, "warning"));
  }
  const Outcome refused = quern(info, "OMP_NUM_THREADS=1000000");
  CHECK(refused.code == 0);
  CHECK(has(refused, "here: cannot be opened: device cpu: too many threads"));
}

TEST_CASE("log sinks, also plugins', have their tables in the config") {
  ConfigFile file(
      "[model]\nid = \"llama\"\nconfig = \"not read here\"\n[data.tokens]\ntrain = \"train.tok\"\n[log]\n"
      "sinks = [\"jsonl\", \"good\"]\n[log.jsonl]\npath = \"x.jsonl\"\n[log.good]\nevery = 3\n");
  const std::string folder = "QUERN_PLUGIN_PATH=" QUERN_BUILD_DIR "/tests/bad_plugins";
  Outcome shown = quern("config show " + file.path.string() + " 2>&1", folder);
  CHECK(shown.code == 0);
  CHECK(has(shown, "[log.jsonl]  # log plugin: built in\npath = \"x.jsonl\"\n"));
  CHECK(has(shown, "[log.good]  # log plugin: good 1.2, "));
  CHECK(has(shown, "/libquern_good.so\nevery = 3\n"));
  Outcome refused =
      quern("config check " + file.path.string() + " --set log.good.every=0 --set log.jsonl.pth=y 2>&1", folder);
  CHECK(refused.code == 2);
  CHECK(has(refused, "--set log.good.every: log.good.every: out of range, found 0, expected an integer of at least 1"));
  CHECK(has(refused, "log.jsonl.pth: unknown key, expected one of path; nearest name `path`"));
  CHECK(has(quern("config check " + file.path.string() + " 2>&1"),
            ":7:1: log.sinks: no such log plugin: found \"good\""));
}

TEST_CASE("the reference is printed") {
  Outcome outcome = quern("config reference 2>/dev/null");
  CHECK(outcome.code == 0);
  CHECK(has(outcome, "# Configuration reference"));
  CHECK(has(outcome, "## [device]"));
}

TEST_CASE("output that cannot be written is an error") {
  if (!fs::exists("/dev/full")) {
    MESSAGE("skipped: this system has no /dev/full");
    return;
  }
  Outcome outcome = quern("config reference 2>&1 >/dev/full");
  CHECK(outcome.code == 4);
  CHECK(has(outcome, "standard output: cannot be written"));
}

TEST_CASE("a plugin file that is cut off is refused, and one that ends the program does not end it with code 0") {
  const fs::path folder = fs::path(QUERN_BUILD_DIR) / "tests" / "bad_plugins";
  const fs::path cut = fs::path(QUERN_BUILD_DIR) / ("cli_test_" + std::to_string(getpid())) / "libquern_good.so";
  fs::create_directories(cut.parent_path());
  fs::copy_file(folder / "log" / "libquern_good.so", cut);
  fs::resize_file(cut, fs::file_size(cut) / 2);
  Outcome outcome = quern("plugins info log good --path " + cut.string() + " 2>&1 >/dev/null");
  CHECK(outcome.code == 2);
  CHECK(has(outcome, "plugin refused: found a damaged file"));
  fs::remove_all(cut.parent_path());

  const std::string environment = "QUERN_PLUGIN_PATH=" + (folder / "fatal").string();
  for (auto [id, what] : {std::pair("exits", "found exit(0), expected a return"),
                          std::pair("throws", "an exception that nothing catches: no licence file")}) {
    CAPTURE(id);
    outcome = quern("plugins info log " + std::string(id) + " 2>&1 >/dev/null", environment);
    CAPTURE(outcome.text);
    CHECK(outcome.code == 1);
    CHECK(has(outcome, "fatal/log/libquern_" + std::string(id) + ".so: the program was ended from inside"));
    CHECK(has(outcome, what));
  }
  outcome = quern("plugins check log/exits_later 2>&1", environment);
  CHECK(outcome.code == 1);
  CHECK(has(outcome, "libquern_exits_later.so: the program was ended from inside: found exit(0)"));
  outcome = quern("plugins check log/crashes 2>&1", environment);
  CHECK(outcome.code == 1);
  const std::string file = (folder / "fatal" / "log" / "libquern_crashes.so").string();
  CHECK(
      has(outcome, "quern: error: " + file + ": crashed: found signal 11 (Segmentation fault) in " + file + "; this"));
}

TEST_CASE("a fault names what the user wrote, and no plugin for the system's faults") {
  CHECK(quern("plugins check '' 2>&1").code == 2);
  const fs::path loop = fs::path(QUERN_BUILD_DIR) / ("loop_" + std::to_string(getpid()));
  fs::create_symlink(loop, loop);
  const Outcome looped = quern("eval " QUERN_SOURCE_DIR
                               "/configs/demo.toml --set device.id=cpu --set precision.id=fp32 "
                               "--from " +
                               loop.string() + " 2>&1");
  fs::remove(loop);
  CHECK(looped.code == 4);
  CHECK(has(looped, "the system cannot work with this path: found Too many levels of symbolic links"));
  ConfigFile file("[model]\nid = \"llama\"\n");
  const std::string train = "train " + file.path.string() + " ";
  Outcome outcome = quern("plan " + file.path.string() + " --host-memory 9999999TiB 2>&1");
  CHECK(outcome.code == 2);
  CHECK(has(outcome, "quern: error: --host-memory: not a size: found \"9999999TiB\""));
  outcome = quern(train + "--set 'model.config=\"a\\u0000b\"' 2>&1");
  CHECK(outcome.code == 2);
  CHECK(has(outcome, "model.config: a zero byte in it"));
  outcome = quern(train + "--set memory.device_budget=10000000000GiB 2>&1");
  CHECK(outcome.code == 2);
  CHECK(has(outcome, "memory.device_budget: out of range, found \"10000000000GiB\""));
  for (const char* limit : {"12000", "16000", "24000", "40000", "60000", "90000", "130000"}) {
    CAPTURE(limit);
    outcome = quern("plugins info device cpu 2>&1", "ulimit -v " + std::string(limit) + ";");
    CAPTURE(outcome.text);
    CHECK_FALSE(has(outcome, "plugin refused"));
    CHECK_FALSE(has(outcome, "fault in the plugin"));
  }
}

TEST_CASE("what the system does not grant to the CPU device is a resources error") {
  ConfigFile file(R"([model]
id = "llama"
[model.llama]
vocab_size = 64
hidden_size = 32
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
[train]
micro_batch = 1
sequence = 16
[precision]
id = "fp32"
)");
  const std::string bench = "bench " + file.path.string() + " --steps 1 2>&1 >/dev/null";
  for (auto [limit, what] : {std::pair("OMP_NUM_THREADS=1000000", "too many threads in OMP_NUM_THREADS: found 1000000"),
                             std::pair("ulimit -v 300000;", "too little address space"),
                             std::pair("OMP_NUM_THREADS=2 OMP_STACKSIZE=64K", "too little stack for a thread"),
                             std::pair("ulimit -s 32;", "too little stack")}) {
    CAPTURE(limit);
    const Outcome outcome = quern(bench, limit);
    CAPTURE(outcome.text);
    CHECK(outcome.code == 4);
    CHECK(has(outcome, what));
  }
  CHECK(quern("plugins info device cpu >/dev/null", "ulimit -v 200000; OMP_NUM_THREADS=1000000").code == 0);
  CHECK(quern(bench, "OMP_NUM_THREADS=3").code == 0);
}
