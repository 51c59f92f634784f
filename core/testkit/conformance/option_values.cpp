// Options from which the kit makes an implementation.
#include "conformance/subject.h"

#include <algorithm>
#include <set>

#include "config/resolve.h"
#include "conformance/report.h"

namespace quern::conformance {

namespace {

/// Values for options that size a model, by their Hugging Face names, old and new: small, and odd where they may be.
constexpr std::pair<const char*, std::int64_t> kSmallSizes[] = {{"vocab_size", 67},
                                                                {"hidden_size", 32},
                                                                {"n_embd", 32},
                                                                {"embed_dim", 32},
                                                                {"d_model", 32},
                                                                {"intermediate_size", 44},
                                                                {"n_inner", 44},
                                                                {"ffn_dim", 44},
                                                                {"num_hidden_layers", 2},
                                                                {"n_layer", 2},
                                                                {"depth", 2},
                                                                {"num_layers", 2},
                                                                {"num_attention_heads", 4},
                                                                {"n_head", 4},
                                                                {"num_heads", 4},
                                                                {"num_key_value_heads", 2},
                                                                {"img_size", 12},
                                                                {"patch_size", 4},
                                                                {"num_classes", 5},
                                                                {"max_position_embeddings", 64},
                                                                {"n_positions", 64},
                                                                {"n_ctx", 64}};

}  // namespace

std::string key_of(const std::string& setting) { return setting.substr(0, setting.find('=')); }

bool has_option(const Factory& factory, const std::string& key) {
  return std::any_of(factory.options.begin(), factory.options.end(),
                     [&](const OptionSpec& spec) { return spec.key == key; });
}

OptionValues values_of(PluginHost& host, const Factory& factory, const CheckOptions& options) {
  const std::string table = factory.kind + "." + factory.id + ".";
  std::set<std::string> given;
  ConfigDocument document = ConfigDocument::parse("", "quern plugins check");
  if (factory.kind == kPluginKind<Model>)
    for (const auto& [key, value] : kSmallSizes)
      for (const OptionSpec& spec : factory.options)
        if (spec.key == key && spec.type == OptionType::integer) {
          document.set(table + key + "=" + std::to_string(value));
          given.insert(key);
        }
  for (const std::string& setting : options.settings)
    if (has_option(factory, key_of(setting))) {
      document.set(table + setting);
      given.insert(key_of(setting));
    }
  SectionSchema schema;
  schema.name = schema.plugin_kind = factory.kind;
  schema.default_id = factory.id;
  try {
    return resolve(document, {schema}, host).plugin_options(factory.kind);
  } catch (const Error& error) {
    const bool missing = std::any_of(factory.options.begin(), factory.options.end(), [&](const OptionSpec& spec) {
      return spec.required && !given.contains(spec.key);
    });
    if (!missing) throw;
    ErrorDetail detail = error.detail();
    detail.next = "the kit knows values for usual sizes only: give others with --set key=value";
    throw Error(error.code(), std::move(detail));
  }
}

}  // namespace quern::conformance
