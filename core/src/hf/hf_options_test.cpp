// config.json as transformers 4 and 5 write it, and everything that must be refused.
#include "quern/hf_config.h"

#include <filesystem>

#include <unistd.h>

#include <doctest/doctest.h>

#include "base/files/test_directory.h"
#include "hf/ignored_keys.h"
#include "quern/testkit/refusal.h"

using namespace quern;
using testkit::check_holds;
using testkit::refusal;
namespace fs = std::filesystem;

namespace {

struct Tiny {
  std::int64_t hidden_size = 0;
  std::int64_t num_hidden_layers = 2;
  double rms_norm_eps = 1e-6;
  bool tie = false;
  std::string hidden_act = "silu";
  double rope_theta = 10000.0;
  std::string rope_type = "default";
  double factor = 0;
};

HfModel tiny() {
  OptionTable<Tiny> t;
  t.add("hidden_size", &Tiny::hidden_size, "").required().at_least(1).at_most(4096);
  t.add("num_hidden_layers", &Tiny::num_hidden_layers, "").at_least(1);
  t.add("rms_norm_eps", &Tiny::rms_norm_eps, "").at_least(0);
  t.add("tie_word_embeddings", &Tiny::tie, "");
  t.add("hidden_act", &Tiny::hidden_act, "").one_of({"silu"});
  t.add("rope_theta", &Tiny::rope_theta, "").above(1);
  t.add("rope_scaling.rope_type", &Tiny::rope_type, "");
  t.add("rope_scaling.factor", &Tiny::factor, "");
  return {.model_type = "tiny",
          .architecture = "TinyForCausalLM",
          .options = t.specs(),
          .neutral = {{.key = "use_sliding_window", .accepted = {false}, .because = "no windows"},
                      {.key = "sliding_window"}}};
}

OptionValues parse(const std::string& fields) {
  return parse_hf_config("{\"model_type\": \"tiny\"" + (fields.empty() ? "" : ", " + fields) + "}", "c.json", tiny());
}

std::string refused(const std::string& fields) {
  return refusal(ErrorCode::input, [&] { parse(fields); });
}
std::string refused_text(const std::string& text) {
  return refusal(ErrorCode::input, [&] { parse_hf_config(text, "c.json", tiny()); });
}

}  // namespace

TEST_CASE("fields become options, integers stand for reals and null is absent") {
  OptionValues v = parse(
      R"("hidden_size": 64, "rms_norm_eps": 1, "tie_word_embeddings": true, "rope_scaling": null,
                 "num_hidden_layers": null)");
  CHECK(v.get<std::int64_t>("hidden_size") == 64);
  CHECK(v.get<double>("rms_norm_eps") == 1.0);
  CHECK(v.get<bool>("tie_word_embeddings"));
  CHECK(v.all().size() == 3);
}

TEST_CASE("neutral fields are read past") {
  CHECK(parse(
            R"("architectures": ["TinyForCausalLM"], "torch_dtype": "bfloat16", "dtype": "float32",
                 "transformers_version": "5.0.0",
                 "use_cache": true, "bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": null,
                 "pretraining_tp": 2, "is_causal": true, "activation": "swiglu", "rope_scaling": {"finetuned": true},
                 "attention_dropout": 0.0, "layer_types": ["full_attention", "full_attention"],
                 "use_sliding_window": false,
                 "sliding_window": 4096, "partial_rotary_factor": 1.0)")
            .all()
            .empty());
}

TEST_CASE("a neutral field with a value that would matter is refused with the reason") {
  CHECK(refused(R"("attention_dropout": 0.1)") ==
        "c.json: attention_dropout: found 0.1, expected 0: quern does not apply dropout; correct the file, or choose a "
        "model that quern trains");
  check_holds(refused(R"("is_causal": false)"), {"is_causal: found false, expected true: quern attends to earlier"});
  check_holds(refused(R"("activation": "gelu")"), {"activation: found \"gelu\", expected \"swiglu\" or \"silu\""});
  check_holds(refused(R"("layer_types": ["full_attention", "sliding_attention"])"), {"expected \"full_attention\""});
  check_holds(refused(R"("use_sliding_window": true)"), {"use_sliding_window: found true, expected false: no windows"});
  check_holds(refused(R"("attention_dropout": {"p": 0})"), {"attention_dropout: found {\"p\":0}"});
}

TEST_CASE("all spellings of rope scaling are one") {
  for (const char* text :
       {R"("rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0})",
        R"("rope_theta": 500000, "rope_scaling": {"type": "linear", "factor": 2})",
        R"("rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2, "rope_theta": 500000.0})",
        R"("rope_parameters": {"rope_theta": 500000.0, "rope_type": "linear", "factor": 2.0})",
        R"("rope_theta": 500000.0, "rope_parameters": {"rope_theta": 500000.0, "rope_type": "linear",
                 "factor": 2.0})",
        R"("rope_parameters": {"full_attention": {"rope_theta": 500000.0, "rope_type": "linear", "factor": 2.0}})"}) {
    OptionValues v = parse(text);
    CHECK(v.get<double>("rope_theta") == 500000.0);
    CHECK(v.get<std::string>("rope_scaling.rope_type") == "linear");
    CHECK(v.get<double>("rope_scaling.factor") == 2.0);
    CHECK(v.all().size() == 3);
  }
  check_holds(refused(R"("rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5})"), {"rope_parameters.rope_theta"});
  check_holds(refused(R"("rope_scaling": {"type": "yarn", "rope_type": "linear"})"), {"rope_scaling.type"});
  check_holds(refused(R"("rope_parameters": {"sliding_attention": {"rope_theta": 1e4}})"),
              {"rope_parameters.sliding_attention.rope_theta: found 10000.0"});
  check_holds(refused(R"("rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5})"),
              {"rope_parameters.partial_rotary_factor: found 0.5, expected 1: quern rotates whole heads"});
  check_holds(refused(R"("rope_scaling": {"truncate": false})"), {"rope_scaling.truncate: found false, expected true"});
  check_holds(refused(R"("rope_scaling": "linear")"), {"rope_scaling: found \"linear\""});
}

TEST_CASE("everything that is wrong is reported at once, by name, with the nearest one") {
  std::string text = refused(R"("hiden_size": 64, "hidden_size": "wide", "num_hidden_layers": 0, "hidden_act": "gelu",
                                "quantization_config": {"bits": 4}, "rms_norm_eps": [1], "sliding_windows": 3)");
  check_holds(text, {"c.json: 7 fields cannot be used:",
                     "hiden_size: found 64, which tiny in quern does not honour; nearest name `hidden_size`",
                     "hidden_size: wrong type, found \"wide\"", "num_hidden_layers: out of range, found 0",
                     "hidden_act: not a choice, found \"gelu\"",
                     "quantization_config: found {\"bits\":4}, which tiny in quern does not honour",
                     "rms_norm_eps: wrong type", "nearest name `sliding_window`"});
}

TEST_CASE("fields that no model reads are ignored, and named") {
  const std::string bookkeeping =
      R"("max_length": 4096, "temperature": 0.9, "top_p": 0.6, "do_sample": true, "num_return_sequences": 1,
      "id2label": {"0": "A"}, "problem_type": "x", "task_specific_params": {"a": {"b": 1}}, "unsloth_fixed": true,
      "_flash_attn_2_enabled": true, "use_flash_attn": true, "output_hidden_states": true, "return_dict": true, "tokenizer_class": "T",
      "model_max_length": 2048, "max_sequence_length": 2048, "transformers.js_config": {"kv_cache_dtype": {"q4": "f"}},
      "repetition_penalty": 1.1, "bad_words_ids": [[1]], "pruned_heads": {}, "add_cross_attention": false,
      "chunk_size_feed_forward": 0, "gradient_checkpointing": true, "neftune_noise_alpha": 5.0, "license": "mit",
      "unk_token_id": 0, "num_labels": 2, "trust_remote_code": true, "num_beam_groups": 1, "qk_layernorm": false,
      ".": 1, "": 1, "a_": 1, "-.note": 1)";
  CHECK(parse(bookkeeping).all().empty());
  for (const char* field : {"\"qk_layernorm\": true", "\"attn_logit_softcapping\": 50.0", "\"num_experts\": 8",
                            "\"auto_map\": {\"AutoModel\": \"m.M\"}", "\"logits.scaling\": 8", "\"embd-pdrop\": 0.1",
                            "\"alibi\": true", "\"hiden_size\": 64", "\"..experts\": 2"}) {
    CAPTURE(field);
    check_holds(refused(field), {"does not honour"});
  }

  const TestDirectory folder;
  write_text(folder / "config.json",
             "{\"model_type\": \"tiny\", \"dtype\": \"float32\", \"hidden_size\": 8, "
             "\"rope_parameters\": {}, \"bos_token_id\": 1, \"num_labels\": null, "
             "\"sliding_window\": 4096, \"top_p\": 0.6}");
  CHECK(ignored_hf_keys(folder.path(), R"({"model_type": "tiny", "hidden_size": 8})") ==
        std::vector<std::string>{"sliding_window", "top_p"});
}

TEST_CASE("the model type must be there and right") {
  check_holds(refused_text("{}"), {"model_type: missing, expected \"tiny\""});
  check_holds(refused_text(R"({"model_type": "llama"})"),
              {"model_type: found \"llama\", expected \"tiny\"; choose the model plugin of that type"});
  check_holds(refused_text(R"({"model_type": 3})"), {"model_type: found 3"});
}

TEST_CASE("text that is no sound JSON object is refused") {
  for (const char* text : {"", "{", "[]", "3", "null", "{\"a\" 1}", "{\"hidden_size\": NaN}",
                           "{\"hidden_size\": 1e999}", "{} {}", "\xff\xfe{}", "{\"a\": \"\xc3\"}"}) {
    CAPTURE(text);
    check_holds(refused_text(text), {"c.json: not "});
  }
  check_holds(refused_text("{\"a\": " + std::string(100000, '[') + std::string(100000, ']') + "}"),
              {"nested too deep: found more than 8 levels"});
  std::string objects;
  for (int i = 0; i < 5000; ++i) objects += "{\"a\":";
  check_holds(refused_text(objects), {"nested too deep"});
  check_holds(refused(R"("hidden_size": 64, "hidden_size": 128)"),
              {"a name stands twice in JSON: found 'hidden_size'"});
  check_holds(refused(R"("hidden_size": 18446744073709551615)"), {"hidden_size: wrong type"});
  check_holds(refused(R"("hidden_size": 9223372036854775807)"), {"hidden_size: out of range"});
  check_holds(refused(R"("rope_long": ")" + std::string(5000, 'x') + "\""), {"..."});
  std::string many = '"' + ("norm_" + std::string(5000, 'k')) + "\": 1";
  for (int i = 0; i < 5000; ++i) many += ", \"norm_" + std::to_string(i) + "\": \"\\u001b[2J\"";
  std::string text = refused(many);
  check_holds(text, {"5001 fields cannot be used", "and 4951 more"});
  CHECK(text.size() < 10000);
  CHECK(text.find('\x1b') == std::string::npos);
}

TEST_CASE("a file, or the folder that has it, is read, what cannot be is an input error that names it") {
  const TestDirectory folder;
  auto read = [&](const std::string& name) { return read_hf_config(folder / name, tiny()); };
  check_holds(refusal(ErrorCode::input, [&] { read("none.json"); }), {"none.json: no such file"});
  check_holds(refusal(ErrorCode::input, [&] { read(""); }), {"config.json: no such file"});
  write_text(folder / "config.json", R"({"model_type": "tiny", "hidden_size": 7})");
  CHECK(read("").get<std::int64_t>("hidden_size") == 7);
  CHECK(read("config.json").get<std::int64_t>("hidden_size") == 7);
  fs::create_directories(folder / "odd/config.json");
  check_holds(refusal(ErrorCode::input, [&] { read("odd"); }), {"config.json: not a regular file"});
  write_text(folder / "large.json", "{\"model_type\": \"tiny\"" + std::string(1 << 20, ' ') + "}");
  check_holds(refusal(ErrorCode::input, [&] { read("large.json"); }), {"larger than 1 MiB"});
}

TEST_CASE("TOML keys win over config.json, which wins over the defaults") {
  const TestDirectory folder;
  write_text(folder / "config.json", R"({"model_type": "tiny", "hidden_size": 7, "rms_norm_eps": 1e-5})");
  OptionValues given;
  given.set("config", folder.path());
  given.set("hidden_size", std::int64_t{9});
  OptionValues v = model_options(given, tiny());
  CHECK(v.get<std::int64_t>("hidden_size") == 9);
  CHECK(v.get<double>("rms_norm_eps") == 1e-5);
  CHECK(v.get<double>("rope_theta") == 10000.0);

  OptionValues alone;
  alone.set("hidden_size", std::int64_t{9});
  CHECK(model_options(alone, tiny()).all().size() == tiny().options.size());
  alone.set("config", std::string());
  CHECK(model_options(alone, tiny()).get<std::int64_t>("hidden_size") == 9);
}

TEST_CASE("a required option that neither gives, and a bad value, are config errors") {
  std::string text = refusal(ErrorCode::config, [] { model_options({}, tiny()); });
  check_holds(text, {"model.tiny", "hidden_size: missing, expected an integer from 1 to 4096",
                     "name a config.json in model.config"});
  OptionValues bad;
  bad.set("hidden_size", std::int64_t{5000});
  bad.set("rope_theta", 0.5);
  text = refusal(ErrorCode::config, [&] { model_options(bad, tiny()); });
  check_holds(text, {"hidden_size: out of range", "rope_theta: out of range"});
}

TEST_CASE("written options read back the same") {
  OptionValues fields;
  fields.set("hidden_size", std::int64_t{48});
  fields.set("rms_norm_eps", 1e-5);
  fields.set("tie_word_embeddings", true);
  fields.set("hidden_act", std::string("silu"));
  fields.set("rope_scaling.rope_type", std::string("linear"));
  fields.set("rope_scaling.factor", 8.0);
  std::string text = write_hf_config(tiny(), fields);
  CHECK(parse_hf_config(text, "c.json", tiny()).all() == fields.all());
  check_holds(text, {"\"TinyForCausalLM\"", "\"factor\": 8.0"});  // transformers wants a float
  HfModel nulls = tiny();
  nulls.null_when_off = {"sliding_window", "layer_types", "hidden_size"};
  fields.set("sliding_window", std::int64_t{0});
  fields.set("layer_types", std::vector<std::string>{});
  fields.set("no_rope_layers", std::vector<double>{1, 0});
  check_holds(write_hf_config(nulls, fields),
              {"\"sliding_window\": null", "\"layer_types\": null", "\"hidden_size\": 48", "1,\n    0\n"});
}
