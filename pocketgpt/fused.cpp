// What a training step on a CPU does beside its matrix products, in one pass over memory each.
//
// In bfloat16 the products are fast, and what lies between them took half of the step (docs/LOG.md): torch's operators read and
// write each activation several times, and convert it on the way. Here an activation, of bfloat16 or float32, is read once,
// computed with in float32, and written once. Attention leaves out the keys that a block of queries cannot see.
// pocketgpt/fused.py has the formulas' names, and the gradients' places.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Floats = at::vec::Vectorized<float>;
constexpr int64_t LANES = Floats::size();
constexpr int64_t ROWS = 64;      // that share a sum of weight gradients: fixed, so that threads do not change the result
constexpr int64_t QUERIES = 128;  // per block of attention: fewer make small products, more see more of what is masked

template <typename T>
inline Floats load(const T* p, int64_t n = LANES) {
  return at::vec::convert<float>(at::vec::Vectorized<T>::loadu(p, n));
}

// e^v for results of type T: to 20 units in the last place of a float32 where they are rounded to bfloat16 anyway.
template <typename T>
inline Floats exponential(Floats v) {
  return std::is_same_v<T, float> ? v.exp() : v.exp_u20();
}

template <typename T>
inline void store(T* p, Floats v, int64_t n = LANES) {
  at::vec::convert<T>(v).store(p, n);
}

// f(i, lanes) for the vectors of n numbers; only the last is not a whole one.
template <typename F>
inline void parts(int64_t n, F f) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) f(i, std::integral_constant<int64_t, LANES>{});
  if (i < n) f(i, n - i);
}

// The same, where f returns what is to be summed; lanes past the end are 0 as `load` leaves them.
template <typename F>
inline float sum(int64_t n, F f) {
  Floats total(0.0f);
  parts(n, [&](int64_t i, auto lanes) { total = total + f(i, lanes); });
  return at::vec::vec_reduce_all<float>([](Floats a, Floats b) { return a + b; }, total);
}

// Calls f with a null pointer of the type of the tensor's numbers.
template <typename F>
void by_type(const Tensor& t, F f) {
  if (t.scalar_type() == at::kBFloat16) return f(static_cast<at::BFloat16*>(nullptr));
  TORCH_CHECK(t.scalar_type() == at::kFloat, "float32 or bfloat16");
  f(static_cast<float*>(nullptr));
}

template <typename T>
using Of = std::remove_pointer_t<T>;

// The i-th row's pair of cosines and sines, repeating.
struct Angles {
  const float *cos = nullptr, *sin = nullptr;
  int64_t rows = 1, half = 0;
  Angles(const OptionalTensor& c, const OptionalTensor& s) {
    if (!c) return;
    TORCH_CHECK(c->is_contiguous() && s->is_contiguous() && c->scalar_type() == at::kFloat);
    half = c->size(-1), rows = c->numel() / half;
    cos = c->const_data_ptr<float>(), sin = s->const_data_ptr<float>();
  }
};

// RMSNorm over the last dimension, then rotation, either of which may be left out: x (N, heads, D), any strides but
// the last; weight (D); cos, sin (rows, D/2), for x's row n the row n % rows. Returns y of dtype, and 1/rms (N, heads).
std::tuple<Tensor, Tensor> norm_rotate(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& cos,
                                       const OptionalTensor& sin, double eps, at::ScalarType dtype) {
  TORCH_CHECK(x.dim() == 3 && x.stride(2) == 1);
  const int64_t N = x.size(0), H = x.size(1), D = x.size(2);
  Tensor y = at::empty({N, H, D}, x.options().dtype(dtype)), scale = at::empty({N, H}, x.options().dtype(at::kFloat));
  const Angles angles(cos, sin);
  const float* w = weight ? weight->const_data_ptr<float>() : nullptr;
  float* r = scale.mutable_data_ptr<float>();
  by_type(x, [&](auto* in_type) {
    by_type(y, [&](auto* out_type) {
      using In = Of<decltype(in_type)>;
      using Out = Of<decltype(out_type)>;
      const In* from = x.const_data_ptr<In>();
      Out* to = y.mutable_data_ptr<Out>();
      at::parallel_for(0, N, ROWS, [&](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; ++n)
          for (int64_t h = 0; h < H; ++h) {
            const In* a = from + n * x.stride(0) + h * x.stride(1);
            Out* out = to + (n * H + h) * D;
            float s = 1.0f;
            if (w) {
              const float squares = sum(D, [&](int64_t i, auto lanes) { const Floats v = load(a + i, lanes); return v * v; });
              s = 1.0f / std::sqrt(squares / D + static_cast<float>(eps));
            }
            r[n * H + h] = s;
            auto normed = [&](int64_t i, auto lanes) {
              const Floats v = load(a + i, lanes);
              return w ? v * Floats(s) * load(w + i, lanes) : v;
            };
            if (!angles.cos) {
              parts(D, [&](int64_t i, auto lanes) { store(out + i, normed(i, lanes), lanes); });
              continue;
            }
            const int64_t half = angles.half, at = n % angles.rows * half;
            parts(half, [&](int64_t i, auto lanes) {
              const Floats u = normed(i, lanes), v = normed(half + i, lanes);
              const Floats c = load(angles.cos + at + i, lanes), d = load(angles.sin + at + i, lanes);
              store(out + i, u * c - v * d, lanes);
              store(out + half + i, v * c + u * d, lanes);
            });
          }
      });
    });
  });
  return {y, scale};
}

// The gradients of x and weight. With dx = s w g - s^3 x sum(x w g) / D, where g is the gradient before the rotation.
std::tuple<Tensor, Tensor> norm_rotate_backward(const Tensor& grad, const Tensor& x, const OptionalTensor& weight,
                                                const OptionalTensor& cos, const OptionalTensor& sin, const Tensor& scale) {
  TORCH_CHECK(grad.is_contiguous() && x.stride(2) == 1);
  const int64_t N = x.size(0), H = x.size(1), D = x.size(2), blocks = (N + ROWS - 1) / ROWS;
  Tensor dx = at::empty({N, H, D}, x.options());
  Tensor dw = at::zeros({weight ? blocks : 0, D}, scale.options());
  const Angles angles(cos, sin);
  const float *w = weight ? weight->const_data_ptr<float>() : nullptr, *r = scale.const_data_ptr<float>();
  float* sums = dw.mutable_data_ptr<float>();
  by_type(x, [&](auto* x_type) {
    by_type(grad, [&](auto* g_type) {
      using X = Of<decltype(x_type)>;
      using G = Of<decltype(g_type)>;
      const X* from = x.const_data_ptr<X>();
      const G* upper = grad.const_data_ptr<G>();
      X* to = dx.mutable_data_ptr<X>();
      at::parallel_for(0, blocks, 1, [&](int64_t first, int64_t last) {
        std::vector<float> buffer(D);
        float* g = buffer.data();
        for (int64_t n = first * ROWS; n < std::min(N, last * ROWS); ++n)
          for (int64_t h = 0; h < H; ++h) {
            const X* a = from + n * x.stride(0) + h * x.stride(1);
            const G* d = upper + (n * H + h) * D;
            X* out = to + (n * H + h) * D;
            if (angles.cos) {
              const int64_t half = angles.half, at = n % angles.rows * half;
              parts(half, [&](int64_t i, auto lanes) {
                const Floats u = load(d + i, lanes), v = load(d + half + i, lanes);
                const Floats c = load(angles.cos + at + i, lanes), e = load(angles.sin + at + i, lanes);
                store(g + i, u * c + v * e, lanes);
                store(g + half + i, v * c - u * e, lanes);
              });
            } else {
              parts(D, [&](int64_t i, auto lanes) { store(g + i, load(d + i, lanes), lanes); });
            }
            if (!w) {
              parts(D, [&](int64_t i, auto lanes) { store(out + i, load(g + i, lanes), lanes); });
              continue;
            }
            const float s = r[n * H + h];
            float* dwn = sums + n / ROWS * D;
            const float dot = sum(D, [&](int64_t i, auto lanes) {
              const Floats xg = load(a + i, lanes) * load(g + i, lanes);
              store(dwn + i, load(dwn + i, lanes) + xg * Floats(s), lanes);
              return xg * load(w + i, lanes);
            });
            const Floats pull(s * s * s * dot / D);
            parts(D, [&](int64_t i, auto lanes) {
              store(out + i, load(g + i, lanes) * load(w + i, lanes) * Floats(s) - load(a + i, lanes) * pull, lanes);
            });
          }
      });
    });
  });
  return {dx, dw.sum(0)};
}

template <typename T>
inline Floats sigmoid(Floats v) {
  return Floats(1.0f) / (Floats(1.0f) + exponential<T>(v.neg()));
}

// silu(gate) up, of equal shapes.
Tensor swiglu(const Tensor& gate, const Tensor& up) {
  TORCH_CHECK(gate.is_contiguous() && up.is_contiguous() && gate.scalar_type() == up.scalar_type());
  Tensor y = at::empty_like(gate);
  by_type(gate, [&](auto* type) {
    using T = Of<decltype(type)>;
    const T *g = gate.const_data_ptr<T>(), *u = up.const_data_ptr<T>();
    T* out = y.mutable_data_ptr<T>();
    at::parallel_for(0, gate.numel(), 1 << 14, [&](int64_t begin, int64_t end) {
      parts(end - begin, [&](int64_t i, auto lanes) {
        const Floats v = load(g + begin + i, lanes);
        store(out + begin + i, v * sigmoid<T>(v) * load(u + begin + i, lanes), lanes);
      });
    });
  });
  return y;
}

std::tuple<Tensor, Tensor> swiglu_backward(const Tensor& grad, const Tensor& gate, const Tensor& up) {
  TORCH_CHECK(grad.is_contiguous() && grad.scalar_type() == gate.scalar_type());
  Tensor dgate = at::empty_like(gate), dup = at::empty_like(up);
  by_type(gate, [&](auto* type) {
    using T = Of<decltype(type)>;
    const T *d = grad.const_data_ptr<T>(), *g = gate.const_data_ptr<T>(), *u = up.const_data_ptr<T>();
    T *dg = dgate.mutable_data_ptr<T>(), *du = dup.mutable_data_ptr<T>();
    at::parallel_for(0, gate.numel(), 1 << 14, [&](int64_t begin, int64_t end) {
      parts(end - begin, [&](int64_t i, auto lanes) {
        const Floats v = load(g + begin + i, lanes), y = load(d + begin + i, lanes), s = sigmoid<T>(v);
        store(du + begin + i, y * v * s, lanes);
        store(dg + begin + i, y * load(u + begin + i, lanes) * s * (Floats(1.0f) + v * (Floats(1.0f) - s)), lanes);
      });
    });
  });
  return {dgate, dup};
}

// Which keys [first, last) any query of a block sees.
struct Seen {
  int64_t first, last;
};

// The pattern of what queries see: a mask (B or 1, 1, T, S) of bool, or the triangle whose last row sees all.
struct Pattern {
  OptionalTensor mask;
  int64_t T, S;

  const bool* row(int64_t b, int64_t t) const {
    return mask->const_data_ptr<bool>() + ((mask->size(0) == 1 ? 0 : b) * T + t) * S;
  }
  Seen seen(int64_t from, int64_t to) const {
    if (!mask) return {0, to + S - T};
    Seen found{S, 0};
    for (int64_t b = 0; b < mask->size(0); ++b)
      for (int64_t t = from; t < to; ++t) {
        const bool* r = row(b, t);
        found.first = std::min<int64_t>(found.first, std::find(r, r + found.first, true) - r);
        int64_t last = S;
        while (last > found.last && !r[last - 1]) --last;
        found.last = std::max(found.last, last);
      }
    return found.first < found.last ? found : Seen{0, 1};
  }
};

// In place: scores (B KV, groups x rows, keys) of queries [from, from + rows) -> probabilities of softmax(scale scores),
// 0 where a query does not see a key, and where it sees none.
template <typename T>
void probabilities(const Tensor& scores, const Pattern& pattern, int64_t from, int64_t rows, Seen seen, int64_t kv, float scale) {
  const int64_t K = scores.size(2), per = scores.size(1);
  T* all = scores.mutable_data_ptr<T>();
  at::parallel_for(0, scores.size(0) * per, 64, [&](int64_t begin, int64_t end) {
    std::vector<float> buffer(K);
    float* s = buffer.data();
    for (int64_t i = begin; i < end; ++i) {
      T* p = all + i * K;
      const int64_t t = from + i % per % rows;
      int64_t n = K;
      if (pattern.mask) {
        const bool* m = pattern.row(i / per / kv, t) + seen.first;
        parts(K, [&](int64_t k, auto lanes) { store(s + k, load(p + k, lanes) * Floats(scale), lanes); });
        for (int64_t k = 0; k < K; ++k) s[k] = m[k] ? s[k] : -std::numeric_limits<float>::infinity();
      } else {
        n = t + 1 + pattern.S - pattern.T;
        parts(n, [&](int64_t k, auto lanes) { store(s + k, load(p + k, lanes) * Floats(scale), lanes); });
      }
      Floats most(-std::numeric_limits<float>::max());
      parts(n, [&](int64_t k, auto lanes) {
        most = Floats::set(most, at::vec::maximum(most, load(s + k, lanes)), lanes);
      });
      const Floats top(at::vec::vec_reduce_all<float>([](Floats a, Floats b) { return at::vec::maximum(a, b); }, most));
      const float total = sum(n, [&](int64_t k, auto lanes) {
        const Floats e = exponential<T>(load(s + k, lanes) - top);
        store(s + k, e, lanes);
        return Floats::set(Floats(0.0f), e, lanes);
      });
      const Floats share(total > 0 ? 1.0f / total : 0.0f);
      parts(n, [&](int64_t k, auto lanes) { store(p + k, load(s + k, lanes) * share, lanes); });
      std::fill(p + n, p + K, T(0.0f));
    }
  });
}

// In place: grad (.., K) of the probabilities p -> of the unscaled scores, scale p (grad - sum(p grad)).
template <typename T>
void probabilities_backward(const Tensor& grad, const Tensor& p, float scale) {
  const int64_t K = p.size(-1);
  T* all = grad.mutable_data_ptr<T>();
  const T* of = p.const_data_ptr<T>();
  at::parallel_for(0, p.numel() / K, 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      T* g = all + i * K;
      const T* q = of + i * K;
      const Floats dot(sum(K, [&](int64_t k, auto lanes) { return load(g + k, lanes) * load(q + k, lanes); }));
      parts(K, [&](int64_t k, auto lanes) {
        store(g + k, Floats(scale) * load(q + k, lanes) * (load(g + k, lanes) - dot), lanes);
      });
    }
  });
}

// The sizes that attention's two directions share, and its blocks of queries.
struct Shape {
  int64_t B, KV, G, T, S, D;
  Shape(const Tensor& q, const Tensor& k)
      : B(q.size(0)), KV(k.size(1)), G(q.size(1) / k.size(1)), T(q.size(2)), S(k.size(2)), D(q.size(3)) {}
  Tensor flat(const Tensor& kv) const { return kv.contiguous().view({B * KV, S, D}); }
  Tensor grouped(const Tensor& q) const { return q.unflatten(1, {KV, G}); }  // (B, KV, G, T, D)
  Tensor block(const Tensor& grouped, int64_t from, int64_t rows) const {
    return grouped.narrow(3, from, rows).reshape({B * KV, G * rows, D});
  }
  // (B, heads, rows, D) whose memory is (B, rows, heads, D), as the projections have it
  Tensor fresh(int64_t heads, int64_t rows, const Tensor& like) const {
    return at::empty({B, rows, heads, D}, like.options()).transpose(1, 2);
  }
};

// softmax(q k^T / sqrt(D)) v: q (B, heads, T, D), k and v (B, kv heads, S, D). Returns y as q, and the probabilities, block after
// block, for the gradient. Each block of queries meets only the keys that one of them sees.
std::tuple<Tensor, Tensor> attention(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask) {
  const Shape s(q, k);
  const Pattern pattern{mask ? OptionalTensor(mask->contiguous()) : mask, s.T, s.S};
  const Tensor keys = s.flat(k), values = s.flat(v), queries = s.grouped(q);
  Tensor y = s.fresh(q.size(1), s.T, q);
  const Tensor out = s.grouped(y);
  std::vector<Seen> seen;
  int64_t size = 0;
  for (int64_t from = 0; from < s.T; from += QUERIES) {
    seen.push_back(pattern.seen(from, std::min(s.T, from + QUERIES)));
    size += (std::min(s.T, from + QUERIES) - from) * (seen.back().last - seen.back().first);
  }
  Tensor all = at::empty({s.B * s.KV * s.G * size}, q.options());
  int64_t at = 0;
  for (int64_t from = 0, i = 0; from < s.T; from += QUERIES, ++i) {
    const int64_t rows = std::min(QUERIES, s.T - from), n = seen[i].last - seen[i].first;
    Tensor p = all.narrow(0, at, s.B * s.KV * s.G * rows * n).view({s.B * s.KV, s.G * rows, n});
    at += p.numel();
    at::bmm_out(p, s.block(queries, from, rows), keys.narrow(1, seen[i].first, n).mT());
    by_type(p, [&](auto* type) {
      probabilities<Of<decltype(type)>>(p, pattern, from, rows, seen[i], s.KV, 1.0f / std::sqrt(float(s.D)));
    });
    out.narrow(3, from, rows).copy_(at::bmm(p, values.narrow(1, seen[i].first, n)).view({s.B, s.KV, s.G, rows, s.D}));
  }
  return {y, all};
}

std::tuple<Tensor, Tensor, Tensor> attention_backward(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v,
                                                      const OptionalTensor& mask, const Tensor& all) {
  const Shape s(q, k);
  const Pattern pattern{mask ? OptionalTensor(mask->contiguous()) : mask, s.T, s.S};
  const Tensor keys = s.flat(k), values = s.flat(v), queries = s.grouped(q), upper = s.grouped(grad);
  Tensor dq = s.fresh(q.size(1), s.T, q), dk = s.fresh(s.KV, s.S, k), dv = s.fresh(s.KV, s.S, v);
  const Tensor out = s.grouped(dq);
  Tensor sum_k = at::zeros({s.B * s.KV, s.S, s.D}, q.options().dtype(at::kFloat)), sum_v = at::zeros_like(sum_k);
  int64_t at = 0;
  for (int64_t from = 0; from < s.T; from += QUERIES) {
    const int64_t rows = std::min(QUERIES, s.T - from);
    const Seen seen = pattern.seen(from, from + rows);
    const int64_t n = seen.last - seen.first;
    const Tensor p = all.narrow(0, at, s.B * s.KV * s.G * rows * n).view({s.B * s.KV, s.G * rows, n});
    at += p.numel();
    const Tensor g = s.block(upper, from, rows);
    sum_v.narrow(1, seen.first, n).add_(at::bmm(p.mT(), g));
    Tensor d = at::bmm(g, values.narrow(1, seen.first, n).mT());
    by_type(p, [&](auto* type) { probabilities_backward<Of<decltype(type)>>(d, p, 1.0f / std::sqrt(float(s.D))); });
    sum_k.narrow(1, seen.first, n).add_(at::bmm(d.mT(), s.block(queries, from, rows)));
    out.narrow(3, from, rows).copy_(at::bmm(d, keys.narrow(1, seen.first, n)).view({s.B, s.KV, s.G, rows, s.D}));
  }
  dk.copy_(sum_k.view({s.B, s.KV, s.S, s.D}));
  dv.copy_(sum_v.view({s.B, s.KV, s.S, s.D}));
  return {dq, dk, dv};
}

// -log softmax(capped logits)[target] per row of logits (N, V); targets (N), 0 where below 0. In place the logits become
// their gradient, unless `gradient` is false.
Tensor cross_entropy_(const Tensor& logits, const Tensor& targets, double softcap, bool gradient) {
  TORCH_CHECK(logits.is_contiguous() && targets.is_contiguous() && targets.numel() == logits.size(0));
  const int64_t V = logits.size(1);
  const float cap = softcap;
  Tensor losses = at::empty({logits.size(0)}, logits.options().dtype(at::kFloat));
  float* out = losses.mutable_data_ptr<float>();
  const int64_t* wanted = targets.const_data_ptr<int64_t>();
  by_type(logits, [&](auto* type) {
    using T = Of<decltype(type)>;
    T* all = logits.mutable_data_ptr<T>();
    at::parallel_for(0, logits.size(0), 8, [&](int64_t begin, int64_t end) {
      std::vector<float> buffer(V);
      float* e = buffer.data();
      for (int64_t n = begin; n < end; ++n) {
        T* row = all + n * V;
        const int64_t target = wanted[n];
        if (target < 0) {
          out[n] = 0.0f;
          if (gradient) std::fill(row, row + V, T(0.0f));
          continue;
        }
        auto logit = [&](int64_t i, auto lanes) {
          const Floats x = load(row + i, lanes);
          return cap > 0 ? Floats(cap) * (x / Floats(cap)).tanh() : x;
        };
        Floats most(-std::numeric_limits<float>::infinity());
        parts(V, [&](int64_t i, auto lanes) {
          const Floats x = logit(i, lanes);
          if (cap > 0) store(e + i, x, lanes);
          most = Floats::set(most, at::vec::maximum(most, x), lanes);
        });
        const float top = at::vec::vec_reduce_all<float>([](Floats a, Floats b) { return at::vec::maximum(a, b); }, most);
        const float chosen = cap > 0 ? e[target] : static_cast<float>(row[target]);
        const float total = sum(V, [&](int64_t i, auto lanes) {
          const Floats x = exponential<T>((cap > 0 ? load(e + i, lanes) : load(row + i, lanes)) - Floats(top));
          if (gradient) store(e + i, x, lanes);
          return Floats::set(Floats(0.0f), x, lanes);
        });
        out[n] = std::log(total) - (chosen - top);
        if (!gradient) continue;
        const Floats share(1.0f / total);
        const float slope = cap > 0 ? 1.0f - chosen / cap * (chosen / cap) : 1.0f;
        const float at_target = (e[target] / total - 1.0f) * slope;
        parts(V, [&](int64_t i, auto lanes) {
          Floats p = load(e + i, lanes) * share;
          if (cap > 0) {
            const Floats t = (load(row + i, lanes) / Floats(cap)).tanh();
            p = p * (Floats(1.0f) - t * t);
          }
          store(row + i, p, lanes);
        });
        row[target] = T(at_target);
      }
    });
  });
  return losses;
}

}  // namespace

TORCH_LIBRARY(pocketgpt_training, m) {
  m.def("norm_rotate(Tensor x, Tensor? weight, Tensor? cos, Tensor? sin, float eps, ScalarType dtype) -> (Tensor, Tensor)");
  m.def("norm_rotate_backward(Tensor grad, Tensor x, Tensor? weight, Tensor? cos, Tensor? sin, Tensor scale) -> (Tensor, Tensor)");
  m.def("swiglu(Tensor gate, Tensor up) -> Tensor");
  m.def("swiglu_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)");
  m.def("attention(Tensor q, Tensor k, Tensor v, Tensor? mask) -> (Tensor, Tensor)");
  m.def("attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor p) -> (Tensor, Tensor, Tensor)");
  m.def("cross_entropy_(Tensor(a!) logits, Tensor targets, float softcap, bool gradient) -> Tensor");
}

TORCH_LIBRARY_IMPL(pocketgpt_training, CPU, m) {
  m.impl("norm_rotate", &norm_rotate);
  m.impl("norm_rotate_backward", &norm_rotate_backward);
  m.impl("swiglu", &swiglu);
  m.impl("swiglu_backward", &swiglu_backward);
  m.impl("attention", &attention);
  m.impl("attention_backward", &attention_backward);
  m.impl("cross_entropy_", &cross_entropy_);
}
