// The reference is plain attention in double precision; its gradient is checked against finite differences here, so
// that the op's gradient can be compared with it at sizes where differences would be too slow.
#include <cmath>
#include <cstring>
#include <vector>

#include <doctest/doctest.h>

#include "quern/error.h"
#include "quern/testkit/refusal.h"
#include "tests/op_harness.h"

using namespace quern;
using namespace quern::cpu::harness;
using testkit::PoisonedTensor;

namespace {

struct Case {
  Geometry geometry;
  std::int64_t heads, kv_heads, head_dim;
  bool causal = true;
  std::vector<std::int32_t> documents = {};  ///< (N + 1), or empty
  DType dtype = DType::f32;
  double scale = 0.3;
  std::int64_t window = 0;
  double cap = 0;

  std::int64_t tokens() const { return geometry.tokens(); }
  std::int64_t packed() const { return (heads + 2 * kv_heads) * head_dim; }
  Attributes attributes() const {
    Attributes list{{"heads", heads},
                    {"kv_heads", kv_heads},
                    {"head_dim", head_dim},
                    {"mask", std::string(causal ? "causal" : "full")},
                    {"scale", scale}};
    if (window > 0) list.set("window", window);
    if (cap > 0) list.set("cap", cap);
    return list;
  }
  bool sees(std::int64_t query, std::int64_t key) const {
    if (causal && key > query) return false;
    if (window > 0 && key <= query - window) return false;
    if (query / geometry.sequence != key / geometry.sequence) return false;
    for (std::int32_t start : documents) {
      if ((query < start) != (key < start)) return false;
    }
    return true;
  }
};

struct Reference {
  std::vector<double> out, logsumexp;
};

double at(const std::vector<double>& x, std::int64_t i) { return x[static_cast<std::size_t>(i)]; }

/// Scores of one query and head, -infinity where it does not see.
std::vector<double> scores_of(const Case& c, const std::vector<double>& qkv, std::int64_t query, std::int64_t head) {
  std::vector<double> scores(static_cast<std::size_t>(c.tokens()), -INFINITY);
  std::int64_t kv = head / (c.heads / c.kv_heads);
  for (std::int64_t key = 0; key < c.tokens(); ++key) {
    if (!c.sees(query, key)) continue;
    double sum = 0;
    for (std::int64_t d = 0; d < c.head_dim; ++d) {
      sum += at(qkv, query * c.packed() + head * c.head_dim + d) *
             at(qkv, key * c.packed() + (c.heads + kv) * c.head_dim + d);
    }
    scores[static_cast<std::size_t>(key)] = c.cap > 0 ? c.cap * std::tanh(sum * c.scale / c.cap) : sum * c.scale;
  }
  return scores;
}

Reference attend(const Case& c, const std::vector<double>& qkv) {
  Reference r{std::vector<double>(static_cast<std::size_t>(c.tokens() * c.heads * c.head_dim)), {}};
  for (std::int64_t i = 0; i < c.tokens(); ++i) {
    for (std::int64_t h = 0; h < c.heads; ++h) {
      std::vector<double> scores = scores_of(c, qkv, i, h);
      double sum = 0;
      for (double s : scores) sum += std::exp(s);
      r.logsumexp.push_back(std::log(sum));
      std::int64_t kv = h / (c.heads / c.kv_heads);
      for (std::int64_t j = 0; j < c.tokens(); ++j) {
        for (std::int64_t d = 0; d < c.head_dim; ++d) {
          r.out[static_cast<std::size_t>((i * c.heads + h) * c.head_dim + d)] +=
              std::exp(at(scores, j)) / sum * at(qkv, j * c.packed() + (c.heads + c.kv_heads + kv) * c.head_dim + d);
        }
      }
    }
  }
  return r;
}

std::vector<double> attend_grad(const Case& c, const std::vector<double>& dout, const std::vector<double>& qkv,
                                const std::vector<double>& out, const std::vector<double>& logsumexp) {
  std::vector<double> dqkv(qkv.size());
  const std::int64_t D = c.head_dim, P = c.packed();
  for (std::int64_t i = 0; i < c.tokens(); ++i) {
    for (std::int64_t h = 0; h < c.heads; ++h) {
      const std::int64_t kv = h / (c.heads / c.kv_heads), o = (i * c.heads + h) * D;
      std::vector<double> scores = scores_of(c, qkv, i, h);
      double delta = 0;
      for (std::int64_t d = 0; d < D; ++d) delta += at(dout, o + d) * at(out, o + d);
      for (std::int64_t j = 0; j < c.tokens(); ++j) {
        const std::int64_t q = i * P + h * D, k = j * P + (c.heads + kv) * D,
                           v = j * P + (c.heads + c.kv_heads + kv) * D;
        double p = std::exp(at(scores, j) - at(logsumexp, i * c.heads + h)), dp = 0;
        for (std::int64_t d = 0; d < D; ++d) dp += at(dout, o + d) * at(qkv, v + d);
        double ds = p * (dp - delta) * c.scale;
        if (c.cap > 0 && p > 0) ds *= 1 - at(scores, j) * at(scores, j) / (c.cap * c.cap);
        for (std::int64_t d = 0; d < D; ++d) {
          dqkv[static_cast<std::size_t>(q + d)] += ds * at(qkv, k + d);
          dqkv[static_cast<std::size_t>(k + d)] += ds * at(qkv, q + d);
          dqkv[static_cast<std::size_t>(v + d)] += p * at(dout, o + d);
        }
      }
    }
  }
  return dqkv;
}

struct Tensors {
  explicit Tensors(const Case& c)
      : qkv(normal(c.dtype, {c.tokens(), c.packed()}, 1)),
        dout(normal(c.dtype, {c.tokens(), c.heads * c.head_dim}, 2)),
        out(c.dtype, {c.tokens(), c.heads * c.head_dim}),
        logsumexp(DType::f32, {c.tokens(), c.heads}),
        dqkv(c.dtype, {c.tokens(), c.packed()}),
        documents(integer_tensor(c.documents)) {}
  View document_view() const { return documents.view().extents[0] > 0 ? documents.view() : absent(DType::i32); }
  void forward(const Case& c, std::int64_t threads = 0) const {
    TestOp{"attention", {qkv.view(), document_view()}, {out.view(), logsumexp.view()}, c.attributes(), c.geometry}.run(
        threads);
  }
  void backward(const Case& c, const View& result, std::int64_t threads = 0) const {
    std::vector<View> inputs = {dout.view(), qkv.view(), out.view(), logsumexp.view(), document_view()};
    TestOp{"attention_grad", inputs, {result}, c.attributes(), c.geometry}.run(threads);
  }
  PoisonedTensor qkv, dout, out, logsumexp, dqkv, documents;
};

void check(const Case& c) {
  CAPTURE(to_string(Extents{c.geometry.batch, c.geometry.sequence, c.heads, c.kv_heads, c.head_dim}));
  CAPTURE(c.causal);
  CAPTURE(c.documents.size());
  CAPTURE(name_of(c.dtype));
  Tensors t(c);
  t.forward(c);
  Reference want = attend(c, doubles(t.qkv));
  // Slack: fp32 scores of size up to some ten (2^-24 each), exponentials within 2 ulp, sums over keys of values near
  // one.
  CHECK(compare(t.out.view(), want.out, 1e-5, 0) == "");
  CHECK(compare(t.logsumexp.view(), want.logsumexp, 1e-5, 0) == "");
  t.backward(c, t.dqkv.view());
  // From the op's own rounded out and logsumexp, as the op sees them. Sums of keys' gradients run over all queries.
  std::vector<double> grad = attend_grad(c, doubles(t.dout), doubles(t.qkv), doubles(t.out), doubles(t.logsumexp));
  CHECK(compare(t.dqkv.view(), grad, 5e-5, 0) == "");
}

/// Offsets of documents as the op takes them: ascending, then N up to capacity N + 1.
std::vector<std::int32_t> offsets(std::int64_t tokens, std::vector<std::int32_t> starts) {
  starts.resize(static_cast<std::size_t>(tokens + 1), static_cast<std::int32_t>(tokens));
  return starts;
}

}  // namespace

TEST_CASE("the reference gradient agrees with finite differences") {
  Case c{{2, 5}, 4, 2, 3, true, offsets(10, {0, 2, 5, 9})};
  c.cap = 0.7, c.window = 2;
  Tensors t(c);
  auto qkv = doubles(t.qkv), dout = doubles(t.dout);
  Reference r = attend(c, qkv);
  auto grad = attend_grad(c, dout, qkv, r.out, r.logsumexp);
  auto objective = [&](const std::vector<double>& x) {
    auto out = attend(c, x).out;
    double sum = 0;
    for (std::size_t i = 0; i < out.size(); ++i) sum += out[i] * dout[i];
    return sum;
  };
  for (std::size_t i = 0; i < qkv.size(); ++i) {
    CAPTURE(i);
    const double step = 1e-5;
    auto up = qkv, down = qkv;
    up[i] += step, down[i] -= step;
    // Central differences err by step^2 times a third derivative, and by 1e-16 / step.
    CHECK(std::fabs((objective(up) - objective(down)) / (2 * step) - grad[i]) < 1e-8);
  }
}

TEST_CASE("attention and its gradient at odd sizes, grouped heads, both masks, both formats") {
  for (DType dtype : {DType::f32, DType::bf16}) {
    for (bool causal : {true, false}) {
      check({{1, 1}, 1, 1, 1, causal, {}, dtype});
      check({{3, 7}, 4, 2, 5, causal, {}, dtype});
      check({{2, 33}, 3, 1, 17, causal, {}, dtype});
      check({{1, 65}, 2, 2, 64, causal, {}, dtype, 0.125});
      check({{2, 130}, 2, 1, 8, causal, {}, dtype});
    }
  }
}

TEST_CASE("attention over several blocks of keys") {
  check({{1, 577}, 1, 1, 4, true});
  check({{1, 1030}, 1, 1, 3, false});
}

TEST_CASE("attention stays within documents") {
  for (bool causal : {true, false}) {
    check({{2, 7}, 2, 1, 5, causal, offsets(14, {0, 3, 7, 8})});
    check({{2, 130}, 2, 1, 8, causal, offsets(260, {0, 1, 64, 65, 130, 250}), DType::bf16});
    check({{1, 600}, 1, 1, 4, causal, offsets(600, {0, 5, 80, 81, 590})});
  }
}

TEST_CASE("attention in windows, and with soft caps") {
  for (DType dtype : {DType::f32, DType::bf16}) {
    for (std::int64_t window : {1, 5, 64, 130, 200}) {
      check({{2, 130}, 2, 1, 8, true, {}, dtype, 0.3, window});
      check({{2, 33}, 3, 1, 17, true, offsets(66, {0, 9, 33, 34}), dtype, 0.3, window, 0.8});
    }
    check({{1, 65}, 2, 2, 7, true, {}, dtype, 0.3, 0, 1.5});
    check({{3, 7}, 4, 2, 5, false, {}, dtype, 0.3, 0, 0.5});
  }
  check({{1, 1100}, 1, 1, 4, true, {}, DType::f32, 0.3, 520, 2.0});  // over several blocks of keys
  check({{1, 1100}, 1, 1, 4, true, {}, DType::f32, 0.3, 7});
}

TEST_CASE("a window as long as the sequence changes no bit") {
  Case c{{3, 70}, 2, 1, 8};
  Tensors plain(c), windowed(c);
  plain.forward(c);
  c.window = 70;
  windowed.forward(c);
  CHECK(std::memcmp(plain.out.view().data, windowed.out.view().data, plain.out.view().bytes()) == 0);
}

TEST_CASE("documents that are rows change no bit") {
  Case c{{3, 70}, 2, 1, 8};
  Tensors plain(c);
  plain.forward(c);
  Case with = c;
  with.documents = offsets(210, {0, 70, 140});
  Tensors documents(with);
  documents.forward(with);
  CHECK(std::memcmp(plain.out.view().data, documents.out.view().data, plain.out.view().bytes()) == 0);
}

TEST_CASE("attention gives the same bits with any number of threads, and when the gradient overwrites qkv") {
  Case c{{3, 130}, 4, 2, 16};
  Tensors one(c), three(c);
  one.forward(c, 1);
  three.forward(c, 3);
  CHECK(std::memcmp(one.out.view().data, three.out.view().data, one.out.view().bytes()) == 0);
  one.backward(c, one.dqkv.view(), 1);
  three.backward(c, three.dqkv.view(), 3);
  CHECK(std::memcmp(one.dqkv.view().data, three.dqkv.view().data, one.dqkv.view().bytes()) == 0);
  three.backward(c, three.qkv.view(), 3);
  CHECK(std::memcmp(one.dqkv.view().data, three.qkv.view().data, one.dqkv.view().bytes()) == 0);
}

TEST_CASE("scores far apart and far out stay exact") {
  Case c{{1, 9}, 1, 1, 2};
  c.scale = 40;
  check(c);
}

TEST_CASE("logsumexp may go unread") {
  Case c{{1, 9}, 2, 1, 4};
  Tensors t(c), unread(c);
  t.forward(c);
  TestOp{"attention", {t.qkv.view()}, {unread.out.view(), absent(DType::f32, {9, 2})}, c.attributes(), c.geometry}
      .run();
  CHECK(std::memcmp(t.out.view().data, unread.out.view().data, t.out.view().bytes()) == 0);
}

TEST_CASE("attention refuses what does not fit") {
  Case c{{2, 7}, 2, 1, 4};
  Tensors t(c);
  Attributes wrong = c.attributes();
  wrong.set("mask", std::string("sliding"));
  TestOp op{"attention", {t.qkv.view()}, {t.out.view(), t.logsumexp.view()}, wrong, c.geometry};
  CHECK(op.refusal() == "attention knows the masks causal and full, not \"sliding\"");
  op.attributes = c.attributes();
  op.attributes.set("kv_heads", std::int64_t{2});
  CHECK(op.refusal() == "attention operand qkv: found (14, 16), expected (14, 24)");
  struct Bad {
    std::vector<std::int32_t> documents;
    const char* where;
  };
  for (const Bad& bad : {Bad{offsets(14, {1, 7}), "documents[0]"}, Bad{offsets(14, {0, 5}), "documents[2]"},
                         Bad{offsets(14, {0, 7, 3}), "documents[2]"}, Bad{offsets(14, {0, 7, 15}), "documents[2]"}}) {
    Case with = c;
    with.documents = bad.documents;
    const Error error = testkit::error_of([&] { Tensors(with).forward(with); });
    CHECK(error.code() == ErrorCode::input);
    CHECK(error.detail().where == bad.where);
  }
}
