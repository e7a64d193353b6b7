// The inner loops of decoding on a CPU: a few rows times packed weights, and attention over cached keys and values.
//
// A decode step reads every weight once and does little else, so its floor is bytes of weights over memory bandwidth.
// These loops stay near it in every weight format, because weights are widened in registers on their way to float32
// multiply-adds; docs/LOG.md has the comparison with torch's own kernels. Every output is one dot product, always
// summed in the same order, so a row's result does not depend, to the last bit, on what other rows are in the batch.
//
// Portable C++ with the vector extensions that gcc and clang share; one conversion is spelled out for AVX-512.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16;
constexpr int GROUP = 32;  // int4 weights that share a scale
constexpr int64_t RUN = 128;  // products that are summed one after another, before their sum joins that of the others
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef int8_t Bytes __attribute__((vector_size(16)));

#ifdef __AVX512F__
constexpr int WIDE = 4;         // panels of weights at once
#else
constexpr int WIDE = 1;         // as many accumulators as there are registers
#endif
constexpr int64_t MANY = 48;    // rows from which weights are widened into a buffer first

struct Nibbles {  // int4: 16 bytes hold GROUP values, the first half of them in the low nibbles, each plus 8
  uint8_t pair;
};

inline void store(float* p, Floats v) { std::memcpy(p, &v, sizeof(v)); }

template <typename V, typename P>
inline V load(const P* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}

inline Floats widen(const float* p) { return load<Floats>(p); }

inline Floats widen(const at::BFloat16* p) {  // bfloat16 is the upper half of a float32
  Ints bits = __builtin_convertvector(load<Halves>(p), Ints) << 16;
  return load<Floats>(&bits);
}

inline Ints widen_bytes(Bytes b) {
#ifdef __AVX512F__  // gcc 12 takes this conversion apart into single bytes
  return (Ints)_mm512_cvtepi8_epi32((__m128i)b);
#else
  return __builtin_convertvector(b, Ints);
#endif
}

inline Floats widen(const int8_t* p) { return __builtin_convertvector(widen_bytes(load<Bytes>(p)), Floats); }

inline float one(const float* p) { return *p; }
inline float one(const at::BFloat16* p) { return static_cast<float>(*p); }
inline float one(const int8_t* p) { return *p; }

inline float sum(Floats v) {
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) v[i] += v[i + half];
  return v[0];
}

// acc[m][v] += x[m] . (outputs of panel v) over k in [from, to), for MR rows of x (M, K) and NV panels, in the order of k.
template <int MR, int NV, typename W>
inline void dots(const float* x, const W* w, const float*, int64_t K, int64_t from, int64_t to, Floats (&acc)[MR][NV]) {
  for (int64_t k = from; k < to; ++k) {
    Floats b[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) {
      const W* p = w + (v * K + k) * LANES;
      b[v] = widen(p);
    }
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) acc[m][v] += x[m * K + k] * b[v];
  }
}

template <int MR, int NV>
inline void dots(const float* x, const Nibbles* w, const float* scale, int64_t K, int64_t from, int64_t to,
                 Floats (&acc)[MR][NV]) {
  for (int64_t g = from / GROUP; g < to / GROUP; ++g) {
    Floats s[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) s[v] = load<Floats>(scale + (v * (K / GROUP) + g) * LANES);
    for (int64_t k = g * GROUP; k < (g + 1) * GROUP; k += 2) {
      Floats even[NV], odd[NV];
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) {
        const Nibbles* p = w + (v * K + k) / 2 * LANES;
        const Ints pair = widen_bytes(load<Bytes>(p));
        even[v] = __builtin_convertvector((pair & 15) - 8, Floats) * s[v];
        odd[v] = __builtin_convertvector(((pair >> 4) & 15) - 8, Floats) * s[v];
      }
#pragma GCC unroll 8
      for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) {
          acc[m][v] += x[m * K + k] * even[v];
          acc[m][v] += x[m * K + k + 1] * odd[v];
        }
    }
  }
}

struct Product {
  const float *x, *scale, *bias;
  float* y;
  int64_t M, N, K;
};

// The first n of LANES floats at p; the others are 0.
inline Floats part(const float* p, int64_t n) {
  Floats v = {};
  std::memcpy(&v, p, n * sizeof(float));
  return v;
}

// y[m .. m + MR, NV panels from `panel`] from their weights at w.
template <int MR, int NV, typename W>
void tile(const Product& p, const W* w, const float* group_scales, int64_t m, int64_t panel) {
  Floats acc[MR][NV] = {};
  for (int64_t k = 0; k < p.K; k += RUN) {  // one running sum over all of K would round several times as much
    Floats some[MR][NV] = {};
    dots<MR, NV>(p.x + m * p.K, w, group_scales, p.K, k, std::min(k + RUN, p.K), some);
    for (int i = 0; i < MR; ++i)
      for (int v = 0; v < NV; ++v) acc[i][v] += some[i][v];
  }
  for (int v = 0; v < NV; ++v) {
    const int64_t n = (panel + v) * LANES, width = std::min<int64_t>(LANES, p.N - n);
    const Floats scale = p.scale ? part(p.scale + n, width) : Floats{} + 1.0f;
    const Floats bias = p.bias ? part(p.bias + n, width) : Floats{};
    for (int i = 0; i < MR; ++i) {
      const Floats y = acc[i][v] * scale + bias;
      std::memcpy(p.y + (m + i) * p.N + n, &y, width * sizeof(float));
    }
  }
}

template <int NV, typename W>
void panels(const Product& p, const W* w, const float* group_scales, int64_t panel) {
  int64_t m = 0;
  for (; m + 6 <= p.M; m += 6) tile<6, NV>(p, w, group_scales, m, panel);
  switch (p.M - m) {
    case 1: return tile<1, NV>(p, w, group_scales, m, panel);
    case 2: return tile<2, NV>(p, w, group_scales, m, panel);
    case 3: return tile<3, NV>(p, w, group_scales, m, panel);
    case 4: return tile<4, NV>(p, w, group_scales, m, panel);
    case 5: return tile<5, NV>(p, w, group_scales, m, panel);
  }
}

// Many rows: widen the weights of NV panels once, to what `dots` would have made of them each time.
template <int NV, typename W>
void widened(const Product& p, const W* w, const float* group_scales, int64_t panel, std::vector<float>& scratch) {
  scratch.resize(NV * p.K * LANES);
  if constexpr (std::is_same_v<W, Nibbles>) {
    for (int64_t k = 0; k < NV * p.K; ++k) {
      const Ints pair = widen_bytes(load<Bytes>(w + k / 2 * LANES));
      const Floats value = __builtin_convertvector(((k % 2 ? pair >> 4 : pair) & 15) - 8, Floats);
      store(scratch.data() + k * LANES, value * load<Floats>(group_scales + k / GROUP * LANES));
    }
  } else {
    for (int64_t k = 0; k < NV * p.K; ++k) store(scratch.data() + k * LANES, widen(w + k * LANES));
  }
  panels<NV>(p, scratch.data(), nullptr, panel);
}

template <typename W>
void multiply(Product p, const W* w) {
  constexpr bool grouped = std::is_same_v<W, Nibbles>;
  const float* group_scales = grouped ? p.scale : nullptr;
  if (grouped) p.scale = nullptr;
  at::parallel_for(0, (p.N + LANES - 1) / LANES, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch;
    auto some = [&]<int NV>(int64_t panel) {
      const W* here = w + panel * LANES * (grouped ? p.K / 2 : p.K);
      const float* scales = grouped ? group_scales + panel * LANES * (p.K / GROUP) : nullptr;
      if (p.M < MANY || std::is_same_v<W, float>) panels<NV>(p, here, scales, panel);
      else widened<NV>(p, here, scales, panel, scratch);
    };
    int64_t n = begin;
    for (; n + WIDE <= end; n += WIDE) some.template operator()<WIDE>(n);
    for (; n < end; ++n) some.template operator()<1>(n);
  });
}

using OptionalTensor = std::optional<at::Tensor>;

at::Tensor linear(const at::Tensor& x, const at::Tensor& w, const OptionalTensor& scale, const OptionalTensor& bias,
                  int64_t N) {
  const int64_t K = x.size(-1);
  auto sizes = x.sizes().vec();
  sizes.back() = N;
  const at::Tensor flat = x.contiguous(), y = at::empty(sizes, x.options());
  const Product p{flat.const_data_ptr<float>(), scale ? scale->const_data_ptr<float>() : nullptr,
                  bias ? bias->const_data_ptr<float>() : nullptr, y.mutable_data_ptr<float>(), x.numel() / K, N, K};
  switch (w.scalar_type()) {
    case at::kFloat: multiply(p, w.const_data_ptr<float>()); break;
    case at::kBFloat16: multiply(p, w.const_data_ptr<at::BFloat16>()); break;
    case at::kChar: multiply(p, w.const_data_ptr<int8_t>()); break;
    default: multiply(p, reinterpret_cast<const Nibbles*>(w.const_data_ptr<uint8_t>()));
  }
  return y;
}

template <typename W>
void gather(const at::Tensor& idx, const W* w, const float* scale, int64_t K, float* out) {
  for (int64_t i = 0; i < idx.numel(); ++i) {
    const int64_t id = idx.const_data_ptr<int64_t>()[i], panel = id / LANES, lane = id % LANES;
    for (int64_t k = 0; k < K; ++k, ++out) {
      if constexpr (std::is_same_v<W, Nibbles>) {
        const uint8_t pair = w[(panel * K + k) / 2 * LANES + lane].pair;
        *out = static_cast<float>((k % 2 ? pair >> 4 : pair & 15) - 8) * scale[(panel * K + k) / GROUP * LANES + lane];
      } else {
        *out = one(w + (panel * K + k) * LANES + lane) * (scale ? scale[id] : 1.0f);
      }
    }
  }
}

// Rows idx of packed weights, (..., K). An operation of its own, so that no compiler fuses it with the norm that follows
// and sums its squares in an order that depends on how many rows there are.
at::Tensor rows(const at::Tensor& idx, const at::Tensor& w, const OptionalTensor& scale) {
  const bool grouped = w.scalar_type() == at::kByte;
  const int64_t K = w.size(1) * (grouped ? 2 : 1);
  auto sizes = idx.sizes().vec();
  sizes.push_back(K);
  const at::Tensor flat = idx.contiguous(), y = at::empty(sizes, w.options().dtype(at::kFloat));
  const float* s = scale ? scale->const_data_ptr<float>() : nullptr;
  float* out = y.mutable_data_ptr<float>();
  switch (w.scalar_type()) {
    case at::kFloat: gather(flat, w.const_data_ptr<float>(), s, K, out); break;
    case at::kBFloat16: gather(flat, w.const_data_ptr<at::BFloat16>(), s, K, out); break;
    case at::kChar: gather(flat, w.const_data_ptr<int8_t>(), s, K, out); break;
    default: gather(flat, reinterpret_cast<const Nibbles*>(w.const_data_ptr<uint8_t>()), s, K, out);
  }
  return y;
}

// e^x for x <= 0: 2^n times a polynomial (Cephes); relative error below 2e-7.
inline Floats exponential(Floats x) {
  const Floats t = x * 1.44269504f;
  Ints n = __builtin_convertvector(t - 0.5f, Ints);  // rounds to nearest for t <= 0, where conversion rounds up
  const Floats f = __builtin_convertvector(n, Floats);
  const Floats r = x - f * 0.693359375f + f * 2.12194440e-4f;
  Floats p = 1.9875691500e-4f * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  n = n < -126 ? Ints{} - 127 : n;  // below the smallest normal number: zero
  Ints scale = (n + 127) << 23;
  return p * load<Floats>(&scale);
}

// One query against `keys` keys: out = softmax(scale q k^T) v. `scores` is scratch for keys + LANES floats.
template <typename T>
void attend_one(const float* q, const T* k, const T* v, const bool* seen, int64_t keys, int64_t D, int64_t k_stride,
                int64_t v_stride, float scale, float* scores, float* out) {
  for (int64_t s = 0; s < keys; s += 4) {
    Floats acc[4] = {};
    const int64_t n = std::min<int64_t>(4, keys - s);
    int64_t d = 0;
    for (; d + LANES <= D; d += LANES) {
      const Floats a = widen(q + d);
      if (n == 4)
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) acc[i] += a * widen(k + (s + i) * k_stride + d);
      else
        for (int i = 0; i < n; ++i) acc[i] += a * widen(k + (s + i) * k_stride + d);
    }
    for (int i = 0; i < n; ++i) {
      float total = sum(acc[i]);
      for (int64_t r = d; r < D; ++r) total += q[r] * one(k + (s + i) * k_stride + r);
      scores[s + i] = seen && !seen[s + i] ? -INFINITY : total * scale;
    }
  }
  const float top = *std::max_element(scores, scores + keys);
  std::fill(scores + keys, scores + keys + LANES, -INFINITY);
  Floats mass = {};
  for (int64_t s = 0; s < keys; s += LANES) {
    const Floats shifted = load<Floats>(scores + s) - top;
    const Floats p = exponential(shifted < -100.0f ? Floats{} - 100.0f : shifted);
    const Floats kept = shifted < -100.0f ? Floats{} : p;
    std::memcpy(scores + s, &kept, sizeof(kept));
    mass += kept;
  }
  const float share = 1.0f / sum(mass);
  int64_t d = 0;
  for (; d + WIDE * LANES <= D; d += WIDE * LANES) {
    Floats acc[2][WIDE] = {};
    int64_t s = 0;
    for (; s + 2 <= keys; s += 2)
#pragma GCC unroll 4
      for (int i = 0; i < WIDE; ++i) {
        acc[0][i] += scores[s] * widen(v + s * v_stride + d + i * LANES);
        acc[1][i] += scores[s + 1] * widen(v + (s + 1) * v_stride + d + i * LANES);
      }
    for (; s < keys; ++s)
      for (int i = 0; i < WIDE; ++i) acc[0][i] += scores[s] * widen(v + s * v_stride + d + i * LANES);
    for (int i = 0; i < WIDE; ++i) {
      const Floats total = (acc[0][i] + acc[1][i]) * share;
      std::memcpy(out + d + i * LANES, &total, sizeof(total));
    }
  }
  for (; d < D; ++d) {
    float total = 0;
    // fma by name, as above: else the rounding of a key would depend on how many there are
    for (int64_t s = 0; s < keys; ++s) total = std::fma(scores[s], one(v + s * v_stride + d), total);
    out[d] = total * share;
  }
}

template <typename T>
void attend_all(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& mask, at::Tensor& y) {
  const int64_t B = q.size(0), H = q.size(1), L = q.size(2), D = q.size(3), S = k.size(2), group = H / k.size(1);
  const float scale = 1.0f / std::sqrt(static_cast<float>(D));
  at::parallel_for(0, B * H * L, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scores(S + LANES);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t t = task % L, h = task / L % H, b = task / L / H;
      const bool* seen = nullptr;
      if (mask)
        seen = mask->const_data_ptr<bool>() + (mask->size(0) > 1 ? b * mask->stride(0) : 0) + t * mask->stride(-2);
      attend_one(q.const_data_ptr<float>() + b * q.stride(0) + h * q.stride(1) + t * q.stride(2),
                 k.const_data_ptr<T>() + b * k.stride(0) + h / group * k.stride(1),
                 v.const_data_ptr<T>() + b * v.stride(0) + h / group * v.stride(1), seen,
                 mask ? S : S - L + t + 1, D, k.stride(2), v.stride(2), scale, scores.data(),
                 y.mutable_data_ptr<float>() + ((b * H + h) * L + t) * D);
    }
  });
}

at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& mask) {
  at::Tensor y = at::empty(q.sizes(), q.options());
  if (k.scalar_type() == at::kFloat) attend_all<float>(q, k, v, mask, y);
  else attend_all<at::BFloat16>(q, k, v, mask, y);
  return y;
}

}  // namespace

TORCH_LIBRARY(pocketgpt, m) {
  m.def("linear(Tensor x, Tensor w, Tensor? scale, Tensor? bias, int n) -> Tensor");
  m.def("rows(Tensor idx, Tensor w, Tensor? scale) -> Tensor");
  m.def("attend(Tensor q, Tensor k, Tensor v, Tensor? mask) -> Tensor");
}

TORCH_LIBRARY_IMPL(pocketgpt, CPU, m) {
  m.impl("linear", &linear);
  m.impl("rows", &rows);
  m.impl("attend", &attend);
}
