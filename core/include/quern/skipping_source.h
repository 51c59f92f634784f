#pragma once
// What a data source may offer beside quern/data_source.h: to go on without reading. Ranks, which leave
// each other's batches out, and `quern data show` look for it.

#include "quern/data_source.h"

namespace quern {

class SkippingSource : public DataSource {
 public:
  /// As that many calls of `next`. A config error when there are not as many.
  virtual void skip(std::int64_t batches) = 0;
};

/// That many calls of `next`, without reading where the source can.
inline void skip(DataSource& source, std::int64_t batches) {
  if (auto* skipping = dynamic_cast<SkippingSource*>(&source)) return skipping->skip(batches);
  Batch batch;
  for (std::int64_t i = 0; i < batches; ++i) source.next(batch);
}

}  // namespace quern
