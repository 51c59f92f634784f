// QK-norm against its definition in double precision, gradients against finite differences of it, and the form fused
// with rope against both ops run one after the other.
#include "tests/op_harness.h"

using namespace quern;
using namespace quern::cpu::harness;

namespace {

constexpr double kEps = 1e-5;
constexpr std::int64_t kSequence = 80;
constexpr DType kDtypes[] = {DType::f32, DType::bf16};

struct Layout {
  std::int64_t heads, kv_heads, head_dim, tokens;
  bool width = false;  ///< all heads together
  std::int64_t stretches() const { return width ? 2 : heads + kv_heads; }
  std::int64_t query_size() const { return width ? heads * head_dim : head_dim; }
  std::int64_t key_size() const { return width ? kv_heads * head_dim : head_dim; }
  std::int64_t packed() const { return (heads + 2 * kv_heads) * head_dim; }
};
const Layout kLayouts[] = {{1, 1, 2, 1},  {3, 1, 6, 7},       {2, 2, 10, 3},      {1, 1, 3, 33},
                           {5, 1, 2, 37}, {3, 1, 6, 7, true}, {2, 2, 5, 33, true}};

Attributes attributes_of(const Layout& layout) {
  std::vector<double> frequencies;
  for (std::int64_t i = 0; i < layout.head_dim / 2; ++i) frequencies.push_back(std::pow(0.1, static_cast<double>(i)));
  Attributes list{{"heads", layout.heads}, {"kv_heads", layout.kv_heads},        {"head_dim", layout.head_dim},
                  {"eps", kEps},           {"inverse_frequencies", frequencies}, {"magnitude", 1.1}};
  if (layout.width) list.set("over", std::string("width"));
  return list;
}

Doubles reference(const Layout& layout, const Doubles& x, const Doubles& query, const Doubles& key,
                  Doubles* rstd = nullptr) {
  Doubles y = x;
  auto packed = static_cast<std::size_t>(layout.packed());
  for (std::size_t token = 0; token < x.size() / packed; ++token) {
    std::size_t at = token * packed;
    for (std::int64_t i = 0; i < layout.stretches(); ++i) {
      const bool is_query = i < (layout.width ? 1 : layout.heads);
      auto size = static_cast<std::size_t>(is_query ? layout.query_size() : layout.key_size());
      double squares = 0;
      for (std::size_t j = 0; j < size; ++j) squares += x[at + j] * x[at + j];
      double scale = 1 / std::sqrt(squares / static_cast<double>(size) + kEps);
      if (rstd) rstd->push_back(scale);
      for (std::size_t j = 0; j < size; ++j) y[at + j] = x[at + j] * scale * (is_query ? query : key)[j];
      at += size;
    }
  }
  return y;
}

struct Case {
  Case(DType type, const Layout& l)
      : layout(l),
        dtype(type),
        size{l.tokens, l.packed()},
        x(normal(type, size, 1)),
        dy(normal(type, size, 2)),
        query(normal(type, {l.query_size()}, 3, 1.0, 0.3)),
        key(normal(type, {l.key_size()}, 4, 1.0, 0.3)),
        y(type, size),
        rstd(DType::f32, {l.tokens, l.stretches()}),
        dx(type, size),
        dquery(type, {l.query_size()}),
        dkey(type, {l.key_size()}) {}
  OpRun inputs(const char* kind, const View& from) const {
    return OpRun(kind, attributes_of(layout), {1, kSequence}).in(from).in(query.view()).in(key.view());
  }
  void forward() { inputs("head_norm", x.view()).out(y.view()).out(rstd.view()).run(); }
  OpRun gradient(const View& upstream) const {
    return OpRun("head_norm_grad", attributes_of(layout))
        .in(upstream)
        .in(x.view())
        .in(query.view())
        .in(key.view())
        .in(rstd.view());
  }
  const Layout layout;
  DType dtype;
  Extents size;
  PoisonedTensor x, dy, query, key, y, rstd, dx, dquery, dkey;
};

/// Of tokens that are in no order.
PoisonedTensor some_positions(std::int64_t tokens) {
  std::vector<float> positions;
  for (std::int64_t i = 0; i < tokens; ++i) positions.push_back(static_cast<float>((i * 11 + 5) % kSequence));
  return PoisonedTensor(DType::i32, {tokens}, positions);
}

}  // namespace

TEST_CASE("head_norm is its definition, in place too") {
  for (DType dtype : kDtypes) {
    for (const Layout& layout : kLayouts) {
      Case c(dtype, layout);
      CAPTURE(label(dtype, c.size));
      c.forward();
      Doubles rstd, y = reference(layout, doubles(c.x.view()), doubles(c.query.view()), doubles(c.key.view()), &rstd);
      CHECK(compare(c.y.view(), y) == "");
      CHECK(compare(c.rstd.view(), rstd) == "");
      c.inputs("head_norm", c.x.view()).out(c.x.view()).unread(DType::f32, {layout.tokens, layout.stretches()}).run();
      CHECK(difference(c.x.view(), c.y.view()) == "");
    }
  }
}

TEST_CASE("head_norm_grad is the slope of head_norm") {
  for (DType dtype : kDtypes) {
    for (const Layout& layout : kLayouts) {
      Case c(dtype, layout);
      CAPTURE(label(dtype, c.size));
      c.forward();
      c.gradient(c.dy.view()).out(c.dx.view()).out(c.dquery.view()).out(c.dkey.view()).run();
      Doubles x = doubles(c.x.view()), query = doubles(c.query.view()), key = doubles(c.key.view()),
              dy = doubles(c.dy.view());
      Doubles dx = numeric_gradient([&](const Doubles& at) { return dot(reference(layout, at, query, key), dy); }, x);
      Doubles dquery =
          numeric_gradient([&](const Doubles& at) { return dot(reference(layout, x, at, key), dy); }, query);
      Doubles dkey = numeric_gradient([&](const Doubles& at) { return dot(reference(layout, x, query, at), dy); }, key);
      // Heads of two channels: rstd may reach ten, and the two terms of dx nearly cancel.
      CHECK(compare(c.dx.view(), dx, 1e-4) == "");
      CHECK(compare(c.dquery.view(), dquery) == "");
      CHECK(compare(c.dkey.view(), dkey) == "");

      PoisonedTensor total = normal(dtype, {layout.key_size()}, 9), over = copy_of(c.dy.view());
      Doubles before = doubles(total.view());
      c.gradient(over.view()).out(over.view()).unread(dtype, {layout.query_size()}).out(total.view(), true).run();
      CHECK(compare(total.view(), plus(dkey, before)) == "");
      CHECK(difference(over.view(), c.dx.view()) == "");
    }
  }
}

TEST_CASE("head_norm_rope gives the bits of head_norm and rope") {
  for (DType dtype : kDtypes) {
    for (const Layout& layout : {Layout{1, 1, 2, 1}, Layout{3, 1, 6, 7}, Layout{2, 2, 34, 33}, Layout{4, 2, 64, 70}}) {
      Case c(dtype, layout);
      CAPTURE(label(dtype, c.size));
      c.forward();
      PoisonedTensor positions = some_positions(layout.tokens), z(dtype, c.size), y(dtype, c.size),
                     fused_z(dtype, c.size);
      PoisonedTensor rstd(DType::f32, c.rstd.view().extents);
      OpRun("rope", attributes_of(layout), {1, kSequence}).in(c.y.view()).in(positions.view()).out(z.view()).run();
      c.inputs("head_norm_rope", c.x.view())
          .in(positions.view())
          .out(y.view())
          .out(rstd.view())
          .out(fused_z.view())
          .run();
      CHECK(difference(y.view(), c.y.view()) == "");
      CHECK(difference(rstd.view(), c.rstd.view()) == "");
      CHECK(difference(fused_z.view(), z.view()) == "");
      PoisonedTensor over = copy_of(c.x.view());  // z over x, the norm unread
      c.inputs("head_norm_rope", over.view())
          .in(positions.view())
          .unread(dtype, c.size)
          .unread(DType::f32, c.rstd.view().extents)
          .out(over.view())
          .run();
      CHECK(difference(over.view(), z.view()) == "");
    }
  }
}

TEST_CASE("rope_grad_head_norm_grad gives the bits of rope_grad and head_norm_grad") {
  for (DType dtype : kDtypes) {
    for (const Layout& layout : {Layout{1, 1, 2, 1}, Layout{3, 1, 6, 7}, Layout{2, 2, 34, 33}, Layout{4, 2, 64, 70}}) {
      Case c(dtype, layout);
      CAPTURE(label(dtype, c.size));
      c.forward();
      PoisonedTensor positions = some_positions(layout.tokens), d(dtype, c.size), fused_d(dtype, c.size),
                     dx(dtype, c.size), dquery(dtype, {layout.query_size()}), dkey(dtype, {layout.key_size()});
      OpRun("rope_grad", attributes_of(layout), {1, kSequence})
          .in(c.dy.view())
          .in(positions.view())
          .out(d.view())
          .run();
      c.gradient(d.view()).out(c.dx.view()).out(c.dquery.view()).out(c.dkey.view()).run();
      auto fused = [&](const View& dy) {
        OpRun run("rope_grad_head_norm_grad", attributes_of(layout), {1, kSequence});
        run.in(dy).in(positions.view()).in(c.x.view()).in(c.query.view()).in(c.key.view()).in(c.rstd.view());
        return run;
      };
      fused(c.dy.view()).out(fused_d.view()).out(dx.view()).out(dquery.view()).out(dkey.view()).run();
      CHECK(difference(fused_d.view(), d.view()) == "");
      CHECK(difference(dx.view(), c.dx.view()) == "");
      CHECK(difference(dquery.view(), c.dquery.view()) == "");
      CHECK(difference(dkey.view(), c.dkey.view()) == "");
      PoisonedTensor over = copy_of(c.dy.view());  // dx over dy, the rest unread
      fused(over.view())
          .unread(dtype, c.size)
          .out(over.view())
          .unread(dtype, {layout.query_size()})
          .unread(dtype, {layout.key_size()})
          .run();
      CHECK(difference(over.view(), c.dx.view()) == "");
    }
  }
}

TEST_CASE("head_norm does not depend on threads") {
  const Layout layout{3, 1, 34, 131};
  Case c(DType::f32, layout);
  c.forward();
  c.gradient(c.dy.view()).out(c.dx.view()).out(c.dquery.view()).out(c.dkey.view()).run();
  for (int threads : {1, 2, 3, 5}) {
    CAPTURE(threads);
    Threads set(threads);
    Case again(DType::f32, layout);
    again.forward();
    again.gradient(again.dy.view()).out(again.dx.view()).out(again.dquery.view()).out(again.dkey.view()).run();
    CHECK(difference(again.y.view(), c.y.view()) == "");
    CHECK(difference(again.dx.view(), c.dx.view()) == "");
    CHECK(difference(again.dquery.view(), c.dquery.view()) == "");
    CHECK(difference(again.dkey.view(), c.dkey.view()) == "");
  }
}

TEST_CASE("head_norm refuses a value that is not a packed qkv") {
  Case c(DType::f32, {3, 1, 6, 7});
  PoisonedTensor wide = normal(DType::f32, {7, 36}, 1);
  CHECK(c.inputs("head_norm", wide.view()).out(wide.view()).out(c.rstd.view()).refusal() ==
        "head_norm operand qkv: found (7, 36), expected (7, 30)");
}
