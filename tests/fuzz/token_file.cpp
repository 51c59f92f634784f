// A token file of any format: the first byte says whether it is read as headerless, the rest is the file.

#include "data/tokens/token_file.h"
#include "data/sources/token_source.h"
#include "fuzz.h"

using namespace quern;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string path = fuzz::file("train.tok", fuzz::text(data + 1, size - 1));
  TokenReading reading;
  reading.format = (data[0] & 1) != 0 ? TokenFormat::uint16 : TokenFormat::by_magic;
  if ((data[0] & 2) != 0) reading.separator = data[0] >> 2;
  fuzz::accepted({ErrorCode::input}, [&] {
    TokenFile file(path, reading);
    std::vector<std::uint8_t> counts(static_cast<std::size_t>(file.count()));
    file.read_targets(0, counts);
    file.first_target(true);
    std::vector<std::int32_t> tokens(counts.size());
    file.read(0, tokens);
    for (std::int32_t token : tokens)
      if (token < 0 || token >= file.vocabulary()) fuzz::fail("a token over the vocabulary", std::to_string(token));
  });
  fuzz::accepted({ErrorCode::input}, [&] { TokenFile(path, reading).verify(); });
  fuzz::accepted({ErrorCode::input}, [&] {
    TokenFileOptions options{.entries = {{path}},
                             .documents = (data[0] & 2) != 0,
                             .reading = reading,
                             .verify = (data[0] & 128) != 0,
                             .where = "data"};
    TokenFileSource source(options, {2, 4}, 1);
    Batch batch;
    for (int i = 0; i < 3; ++i) source.next(batch);
    std::string state = source.save_state();
    source.load_state(state);
    if (source.save_state() != state) fuzz::fail("a saved position does not come back", state);
  });
  return 0;
}
