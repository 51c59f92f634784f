// Round trips of every type and shape, halves against their definition, and one damaged file for every fault.
#include "checkpoint/safetensors.h"

#include <cmath>

#include <doctest/doctest.h>

#include "base/files/test_directory.h"
#include "base/test_time.h"
#include "checkpoint/half.h"
#include "checkpoint/stored_tensor.h"
#include "checkpoint/test_support.h"
#include "quern/numeric.h"
#include "quern/testkit/refusal.h"

using namespace quern;
using testkit::check_refused;

namespace {

std::vector<std::byte> pattern(std::size_t count) {
  std::vector<std::byte> bytes(count);
  for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(i * 31 + 7);
  return bytes;
}

std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":[" + shape + "],\"data_offsets\":[" + offsets + "]}";
}

std::string braces(const std::string& text) { return std::string(1, '{').append(text).append(1, '}'); }

}  // namespace

TEST_CASE("tensors of every type and shape survive writing and reading") {
  TestDirectory directory;
  std::string path = directory / "all.safetensors";
  std::vector<TensorDeclaration> declared;
  int number = 0;
  for (const Extents& extents :
       {Extents{}, Extents{1}, Extents{0}, Extents{3, 5}, Extents{7, 0, 2}, Extents{2, 3, 1, 2}})
    for (int type = 0; type <= static_cast<int>(StoredType::boolean); ++type)
      declared.push_back({std::to_string(number++) + ".\xc3\xa4\"", static_cast<StoredType>(type), extents});
  std::size_t total = 0;
  for (const auto& tensor : declared) total += *stored_bytes(tensor.type, tensor.extents);
  auto data = pattern(total);
  FileRecord record;
  {
    SafetensorsWriter writer(path, declared, {{"format", "pt"}, {"who", "\"me\""}});
    for (std::size_t at = 0; at < total; at += 13)
      writer.write(std::span(data).subspan(at, std::min<std::size_t>(13, total - at)));
    record = writer.finish();
  }
  SafetensorsFile file(path);
  const std::string text = read_text(path);
  CHECK(record.bytes == text.size());
  CHECK(record.checksum == checksum_of(std::as_bytes(std::span(text))));
  CHECK(record.checksum == file.checksum());
  CHECK((text.size() - total) % 8 == 0);
  CHECK(file.metadata() == std::map<std::string, std::string>{{"format", "pt"}, {"who", "\"me\""}});
  REQUIRE(file.tensors().size() == declared.size());
  std::size_t at = 0;
  for (const auto& want : declared) {
    const StoredTensor& got = file.at(want.name);
    CHECK(got.type == want.type);
    CHECK(got.extents == want.extents);
    auto bytes = file.bytes(got);
    CHECK(bytes.size() == *stored_bytes(want.type, want.extents));
    CHECK(std::equal(bytes.begin(), bytes.end(), data.begin() + static_cast<long>(at)));
    at += bytes.size();
    if (is_floating(got.type))
      CHECK(file.read_floats(want.name).size() == static_cast<std::size_t>(got.count()));
    else
      check_refused(ErrorCode::input, {"does not hold real numbers"}, [&] { file.read_floats(want.name); });
  }
  CHECK(file.find("nothing") == nullptr);
  check_refused(ErrorCode::input, {"no tensor 'nothing'"}, [&] { file.at("nothing"); });
}

TEST_CASE("floats of every width are read exactly, in pieces and unaligned") {
  TestDirectory directory;
  std::string path = directory / "floats.safetensors";
  const std::vector<float> values{0.0f, -1.5f, 448.0f, -0.015625f, 2.0f};  // exact in every format
  SafetensorsWriter writer(path, {{"byte", StoredType::u8, {1}},
                                  {"f64", StoredType::f64, {5}},
                                  {"f32", StoredType::f32, {5}},
                                  {"f16", StoredType::f16, {5}},
                                  {"bf16", StoredType::bf16, {5}},
                                  {"f8_e4m3", StoredType::f8_e4m3, {5}},
                                  {"f8_e5m2", StoredType::f8_e5m2, {5}}});
  auto put = [&](auto value) { writer.write(std::as_bytes(std::span(&value, 1))); };
  put(std::uint8_t{1});
  for (float value : values) put(double{value});
  for (float value : values) put(value);
  for (std::uint16_t half : {0x0000, 0xbe00, 0x5f00, 0xa400, 0x4000}) put(half);
  for (float value : values) put(float_to_bf16(value));
  for (float value : values) put(float_to_e4m3(value));
  for (float value : values) put(float_to_e5m2(value));
  writer.finish();
  SafetensorsFile file(path);
  for (const char* name : {"f64", "f32", "f16", "bf16", "f8_e4m3"}) {
    CAPTURE(name);
    CHECK(file.read_floats(name) == values);
    float piece[2] = {-9, -9};
    file.read_floats(file.at(name), 3, piece);
    CHECK(piece[0] == values[3]);
    CHECK(piece[1] == values[4]);
    CHECK_THROWS_AS(file.read_floats(file.at(name), 4, piece), Error);
  }
  CHECK(file.read_floats("f8_e5m2") == std::vector<float>{0.0f, -1.5f, 448.0f, -0.015625f, 2.0f});
}

TEST_CASE("every half is its sign, exponent and fraction") {
  for (int bits = 0; bits < 0x10000; ++bits) {
    int exponent = (bits >> 10) & 31, fraction = bits & 1023;
    double magnitude = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
    if (exponent == 31) magnitude = fraction == 0 ? INFINITY : NAN;
    float got = half_to_float(static_cast<std::uint16_t>(bits));
    if (std::isnan(magnitude))
      CHECK(std::isnan(got));
    else
      CHECK(got == static_cast<float>(bits & 0x8000 ? -magnitude : magnitude));
    CHECK(std::signbit(got) == ((bits & 0x8000) != 0));
  }
}

TEST_CASE("unusual but valid headers are accepted") {
  TestDirectory directory;
  std::string path = directory / "odd.safetensors";
  const std::string a = entry("a", "F32", "2", "0,8"), b = entry("b", "U8", "3", "8,11"),
                    empty = entry("e", "F32", "0,4", "8,8");
  const std::string metadata = "\"__metadata__\":{\"k\":\"v\"}";
  for (const std::string& header :
       {"{" + a + "," + b + "}", "{" + b + "," + a + "}   ", "{" + b + "," + empty + "," + a + "}",
        "{" + metadata + "," + a + "," + b + "}\n\n"}) {
    CAPTURE(header);
    write_text(path, raw_safetensors(header, 11));
    SafetensorsFile file(path);
    CHECK(file.at("b").offset == 8);
    CHECK(file.at("a").count() == 2);
  }
  write_text(path, raw_safetensors("{}", 0));
  CHECK(SafetensorsFile(path).tensors().empty());
}

TEST_CASE("a header of eight times as many tensors takes about eight times as long") {
  constexpr int kFew = 2000, kFactor = 8;
  auto seconds = [](int tensors) {
    std::string entries;
    for (int i = 0; i < tensors; ++i)
      entries += (i == 0 ? "" : ",") + entry("layer." + std::to_string(i) + ".weight", "U8", "1",
                                             std::to_string(i) + "," + std::to_string(i + 1));
    const std::string header = braces(entries);
    return seconds_of([&] { parse_safetensors_header("x", header, static_cast<std::uint64_t>(tensors)); });
  };
  const double few = seconds(kFew), many = seconds(kFew * kFactor);
  CAPTURE(few);
  CAPTURE(many);
  CHECK(many < 4 * kFactor * few);  // the square would be 8 * kFactor times
}

TEST_CASE("every fault of a file is refused with what was found") {
  TestDirectory directory;
  std::string path = directory / "bad.safetensors";
  auto refused = [&](const std::string& words, const std::string& bytes) {
    write_text(path, bytes);
    check_refused(ErrorCode::input, {words}, [&] { SafetensorsFile file(path); });
    check_refused(ErrorCode::input, {path}, [&] { SafetensorsFile file(path); });
  };
  auto header = [&](const std::string& words, const std::string& text, std::size_t data_bytes = 8) {
    refused(words, raw_safetensors(text, data_bytes));
  };
  const std::string a = entry("a", "F32", "2", "0,8");
  const std::string good = raw_safetensors("{" + a + "}", 8);

  refused("0 bytes", "");
  refused("7 bytes", good.substr(0, 7));
  for (std::size_t size = 8; size + 8 < good.size(); ++size) refused("truncated", good.substr(0, size));
  refused("ends after the file's end", good.substr(0, good.size() - 1));
  refused("bytes after the last tensor", good + "x");
  refused("header length", std::string(8, '\xff'));
  refused("header length: found 104857601", std::string("\x01\0\x40\x06\0\0\0\0", 8));

  header("no JSON object", "");
  header("no JSON object", " {" + a + "}");
  header("no JSON object", "[1]");
  header("not valid JSON", "{" + a);
  header("not valid JSON", "{" + a + "} x");
  header("a zero byte", "{" + a + "}" + std::string(3, '\0'));
  header("a zero byte", std::string("{\0", 2) + a + "}");
  header("not valid JSON", braces(entry("\xff", "F32", "2", "0,8")));
  header("not valid JSON", braces(entry("\xc0\xaf", "F32", "2", "0,8")));
  header("nested too deep", "{\"a\":{\"shape\":[[2]]}}");
  header("nested too deep", "{\"a\":" + std::string(100000, '['));
  header("'a', expected each name once", "{" + a + "," + a + "}");
  header("'dtype', expected each name once", R"({"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}})");
  header("entry: found number", "{\"a\":1}");
  header("unknown field: found 'x'", R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1}})");
  header("tensor 'a': dtype: found nothing", R"({"a":{"shape":[2],"data_offsets":[0,8]}})");
  header("tensor 'a': shape: found nothing", R"({"a":{"dtype":"F32","data_offsets":[0,8]}})");
  header("data_offsets: found nothing", R"({"a":{"dtype":"F32","shape":[2]}})");
  header("dtype: found 'F4'", braces(entry("a", "F4", "2", "0,8")));
  header("dtype: found number", R"({"a":{"dtype":1,"shape":[2],"data_offsets":[0,8]}})");
  header("shape: found number", R"({"a":{"dtype":"F32","shape":2,"data_offsets":[0,8]}})");
  for (const char* extent : {"-2", "2.0", "\"2\"", "null", "9223372036854775808", "18446744073709551616"})
    header("shape: found", braces(entry("a", "F32", extent, "0,8")));
  for (const char* overflow :
       {"9223372036854775807", "4294967296,4294967296", "4294967296,4294967296,0", "2,2305843009213693952"})
    header("fits into 63 bits", braces(entry("a", "F32", overflow, "0,8")));
  header("8 bytes, expected 12", braces(entry("a", "F32", "3", "0,8")));
  header("8 bytes, expected 4 for () F32", braces(entry("a", "F32", "", "0,8")));
  header("1 numbers", braces(entry("a", "F32", "2", "0")));
  header("3 numbers", braces(entry("a", "F32", "2", "0,8,8")));
  header("end not before the begin", braces(entry("a", "F32", "2", "8,0")));
  header("whole numbers", braces(entry("a", "F32", "2", "-8,0")));
  header("leaves a hole", braces(entry("a", "F32", "1", "4,8")));
  header("leaves a hole", braces(entry("a", "U8", "2", "0,2") + "," + entry("b", "F32", "1", "4,8")));
  header("'b': overlaps", braces(entry("a", "U8", "6", "0,6") + "," + entry("b", "F32", "1", "4,8")));
  header("overlaps", braces(entry("a", "F32", "2", "0,8") + "," + entry("b", "F32", "2", "0,8")));
  header("overlaps", braces(entry("a", "F32", "2", "0,8") + "," + entry("e", "F32", "0", "4,4")));
  header("ends after", braces(entry("a", "U8", "4611686018427387904", "0,4611686018427387904")));
  header("metadata: found number", "{\"__metadata__\":1," + a + "}");
  header("texts only", "{\"__metadata__\":{\"a\":1}," + a + "}");
  header("metadata: found array", "{\"__metadata__\":[]," + a + "}");
  header("bytes after the last tensor", "{}", 1);
}

TEST_CASE("no byte of a header changed at random crashes the reader") {
  TestDirectory directory;
  std::string path = directory / "fuzz.safetensors";
  const std::string good =
      raw_safetensors(braces(entry("a", "F32", "2", "0,8") + "," + entry("b", "BF16", "2,3", "8,20")), 20);
  int accepted = 0;
  for (std::size_t at = 0; at + 20 < good.size(); ++at)
    for (int flip : {0x01, 0x02, 0x10, 0x20, 0x80, 0xff}) {
      std::string bad = good;
      bad[at] = static_cast<char>(bad[at] ^ flip);
      write_text(path, bad);
      accepted += testkit::refusal(ErrorCode::input, [&] {
                    SafetensorsFile file(path);
                    for (const auto& t : file.tensors())
                      if (is_floating(t.type)) file.read_floats(t.name);
                  }) == "accepted";
    }
  CHECK(accepted > 0);  // another letter in a name is as good
}

TEST_CASE("a writer that is not finished leaves nothing, and misuse is found") {
  TestDirectory directory;
  std::string path = directory / "w.safetensors";
  std::vector<TensorDeclaration> two{{"a", StoredType::f32, {2}}, {"b", StoredType::u8, {1}}};
  {
    SafetensorsWriter writer(path, two);
    writer.write(pattern(9));
  }
  CHECK(directory.entries() == 0);
  SafetensorsWriter writer(path, two);
  check_refused(ErrorCode::internal, {"1 bytes of the declared tensors are missing"}, [&] {
    writer.write(pattern(8));
    writer.finish();
  });
  check_refused(ErrorCode::internal, {"more bytes"}, [&] { writer.write(pattern(2)); });
  check_refused(ErrorCode::internal, {"twice"}, [&] { SafetensorsWriter(path, {two[0], two[0]}); });
  check_refused(ErrorCode::internal, {"declared badly"}, [&] {
    SafetensorsWriter(path, {{"a", StoredType::f32, {-1}}});
  });
  check_refused(ErrorCode::internal, {"declared badly"}, [&] {
    SafetensorsWriter(path, {{"__metadata__", StoredType::f32, {1}}});
  });
}
