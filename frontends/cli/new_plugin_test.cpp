#include "new_plugin.h"

#include <fstream>
#include <iterator>

#include <doctest/doctest.h>

#include "base/files/test_directory.h"
#include "quern/testkit/refusal.h"

using namespace quern;
using namespace quern::cli;
using testkit::check_refused;

TEST_CASE("a name is replaced in all spellings") {
  CHECK(renamed("my_op MyOp my_op_test.cpp kMyOpx", "my_op", "our_own") == "our_own OurOwn our_own_test.cpp kOurOwnx");
  CHECK(renamed("solo Solo", "solo", "solo_two") == "solo_two SoloTwo");
}

TEST_CASE("a plugin begins as an example, under its own name") {
  const TestDirectory folder;
  const std::filesystem::path examples = folder.path() + "/examples";
  std::filesystem::create_directories(examples / "my_op");
  std::ofstream(examples / "my_op" / "CMakeLists.txt") << "project(my_op)\nadd_quern_plugin(my_op KIND model)\n";
  std::ofstream(examples / "my_op" / "my_op.h") << "class MyOp;\n";
  const std::vector<Example> found = examples_in(examples);
  REQUIRE(found.size() == 1);
  CHECK(found[0].kind == "model");
  CHECK(found[0].id == "my_op");
  copy_example(found[0], "our_own", folder.path());
  auto text = [&](const char* file) {
    std::ifstream in(folder.path() + "/our_own/" + file);
    return std::string{std::istreambuf_iterator<char>(in), {}};
  };
  CHECK(text("CMakeLists.txt") == "project(our_own)\nadd_quern_plugin(our_own KIND model)\n");
  CHECK(text("our_own.h") == "class OurOwn;\n");
  check_refused(ErrorCode::config, {"is there already"}, [&] { copy_example(found[0], "our_own", folder.path()); });
  for (const char* name : {"", "Ours", "4th", "a-b", "../x"})
    check_refused(ErrorCode::config, {"not a name of a plugin"}, [&] { copy_example(found[0], name, folder.path()); });
  check_refused(ErrorCode::resources, {"no examples", "installed quern"},
                [&] { examples_in(folder.path() + "/none"); });
}
