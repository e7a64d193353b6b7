// The inner loops of decoding on a CPU: a few rows times packed weights, and attention over cached keys and values.
//
// A decode step reads every weight once and does little else, so its floor is bytes of weights over memory bandwidth.
// These loops stay near it in every weight format, because weights are widened in registers on their way to float32
// multiply-adds; docs/LOG.md has the comparison with torch's own kernels. Every output is one dot product, always
// summed in the same order, so a row's result does not depend, to the last bit, on what other rows are in the batch.
//
// Portable C++ with the vector extensions that gcc and clang share, in vectors as wide as the processor's: gcc keeps wider
// ones in memory instead of registers. A few instructions that it does not find by itself are spelled out.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __AVX2__
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int PANEL = 16;  // outputs whose weights lie side by side
constexpr int GROUP = 32;  // int4 weights that share a scale
constexpr int64_t RUN = 128;  // products that are summed one after another, before their sum joins that of the others
#ifdef __AVX512F__
constexpr int LANES = 16, SUMS = 24;  // floats in a vector, and vectors of sums that registers hold beside their factors
#elif defined(__AVX__)
constexpr int LANES = 8, SUMS = 12;
#elif defined(__aarch64__)
constexpr int LANES = 4, SUMS = 24;
#else
constexpr int LANES = 4, SUMS = 12;
#endif
constexpr int PARTS = PANEL / LANES;  // vectors that cover a panel
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));

constexpr int WIDE = 4;         // panels of weights at once, at most
constexpr int ROWS = 6;         // of what they are multiplied with at once, at most
constexpr int64_t QUERIES = 4;  // that attention serves with each key that it reads
constexpr int64_t AHEAD = 64;   // keys, or values, by which attention asks for them before it reads them
constexpr int64_t MANY = 48;    // rows from which weights are widened into a buffer first

struct Pair {  // bfloat16: two numbers that follow each other along K
  at::BFloat16 one[2];
};

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

// What bfloat16 weights are multiplied with: numbers rounded to the nearest bfloat16, or the even one of two. They are kept
// as float32 where the processor does not multiply bfloat16 itself.
#ifdef __AVX512BF16__
typedef at::BFloat16 Rounded;
inline Halves rounded(Floats v) { return (Halves)_mm512_cvtneps_pbh((__m512)v); }
#else
typedef float Rounded;
inline Floats rounded(Floats v) {
  const Ints bits = load<Ints>(&v), upper = (bits + 0x7fff + (bits >> 16 & 1)) >> 16 << 16;
  return v == v ? load<Floats>(&upper) : v;
}
#endif

inline Ints widen_bytes(Bytes b) {
#if defined(__AVX512F__)  // gcc 12 takes this conversion apart into single bytes
  return (Ints)_mm512_cvtepi8_epi32((__m128i)b);
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(&b)));
#else
  return __builtin_convertvector(b, Ints);
#endif
}

inline Floats widen(const int8_t* p) { return __builtin_convertvector(widen_bytes(load<Bytes>(p)), Floats); }

inline float one(const float* p) { return *p; }
inline float one(const at::BFloat16* p) { return static_cast<float>(*p); }
inline float one(const int8_t* p) { return *p; }

// a b + c, with one rounding where the processor can. By name: the compiler is free to choose, and chose differently for one
// row and for six.
inline Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

inline float sum(Floats v) {
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) v[i] += v[i + half];
  return v[0];
}

// Where vector v of outputs has its weights, or scales, for the k-th of K steps.
inline int64_t place(int v, int64_t k, int64_t K) { return (v / PARTS * K + k) * PANEL + v % PARTS * LANES; }

// acc[m][v] += x[m] . (outputs of vector v) over k in [from, to), for MR rows of x (M, K) and NV vectors of outputs, in the
// order of k.
template <int MR, int NV, typename W>
inline void dots(const float* x, const W* w, const float*, int64_t K, int64_t from, int64_t to, Floats (&acc)[MR][NV]) {
  for (int64_t k = from; k < to; ++k) {
    Floats b[NV];
#pragma GCC unroll 16
    for (int v = 0; v < NV; ++v) b[v] = widen(w + place(v, k, K));
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 16
      for (int v = 0; v < NV; ++v) acc[m][v] = fused(Floats{} + x[m * K + k], b[v], acc[m][v]);
  }
}

// The same for weights of which two that follow each other along K are read together: x[m][k] even + x[m][k + 1] odd.
template <int MR, int NV>
inline void add_two(const float* x, int64_t K, int64_t k, const Floats (&even)[NV], const Floats (&odd)[NV],
                    Floats (&acc)[MR][NV]) {
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 16
    for (int v = 0; v < NV; ++v) {
      acc[m][v] = fused(Floats{} + x[m * K + k], even[v], acc[m][v]);
      acc[m][v] = fused(Floats{} + x[m * K + k + 1], odd[v], acc[m][v]);
    }
}

template <int MR, int NV>
inline void dots(const float* x, const Nibbles* w, const float* scale, int64_t K, int64_t from, int64_t to,
                 Floats (&acc)[MR][NV]) {
  for (int64_t g = from / GROUP; g < to / GROUP; ++g) {
    Floats s[NV];
#pragma GCC unroll 16
    for (int v = 0; v < NV; ++v) s[v] = load<Floats>(scale + place(v, g, K / GROUP));
    for (int64_t k = g * GROUP; k < (g + 1) * GROUP; k += 2) {
      Floats even[NV], odd[NV];
#pragma GCC unroll 16
      for (int v = 0; v < NV; ++v) {
        const Ints pair = widen_bytes(load<Bytes>(w + place(v, k / 2, K / 2)));
        even[v] = __builtin_convertvector((pair & 15) - 8, Floats) * s[v];
        odd[v] = __builtin_convertvector(((pair >> 4) & 15) - 8, Floats) * s[v];
      }
      add_two(x, K, k, even, odd, acc);
    }
  }
}

inline Floats even_of(const Pair* p) {
  const Ints bits = load<Ints>(p) << 16;
  return load<Floats>(&bits);
}

inline Floats odd_of(const Pair* p) {
  const Ints bits = load<Ints>(p) >> 16 << 16;
  return load<Floats>(&bits);
}

// Both rounded to bfloat16, as the processors that multiply it want them; products and sums are float32.
template <int MR, int NV>
inline void dots(const Rounded* x, const Pair* w, const float*, int64_t K, int64_t from, int64_t to,
                 Floats (&acc)[MR][NV]) {
  for (int64_t k = from; k < to; k += 2) {
#ifdef __AVX512BF16__
    Ints b[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) b[v] = load<Ints>(w + place(v, k / 2, K / 2));
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m) {
      const __m512bh pair = (__m512bh)_mm512_set1_epi32(load<int32_t>(x + m * K + k));
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) acc[m][v] = (Floats)_mm512_dpbf16_ps((__m512)acc[m][v], pair, (__m512bh)b[v]);
    }
#else
    Floats even[NV], odd[NV];
#pragma GCC unroll 16
    for (int v = 0; v < NV; ++v) {
      const Pair* p = w + place(v, k / 2, K / 2);
      even[v] = even_of(p), odd[v] = odd_of(p);
    }
    add_two(x, K, k, even, odd, acc);
#endif
  }
}

template <typename W>
using Factor = std::conditional_t<std::is_same_v<W, Pair>, Rounded, float>;  // what weights of this kind are multiplied with

struct Product {
  const void* x;  // (M, K) of Factor<W>
  const float *scale, *bias;
  float* y;
  int64_t M, N, K;
  bool add;  // to what y holds
};

template <typename W>
inline const Factor<W>* row(const Product& p, int64_t m) {
  return static_cast<const Factor<W>*>(p.x) + m * p.K;
}

// The first n of LANES floats at p; the others are 0.
inline Floats part(const float* p, int64_t n) {
  if (n == LANES) return load<Floats>(p);
  Floats v = {};
  std::memcpy(&v, p, n * sizeof(float));
  return v;
}

// f(first, width) for the parts of n numbers that fit into a vector.
template <typename F>
inline void parts(int64_t n, F f) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) f(i, static_cast<int64_t>(LANES));
  if (i < n) f(i, n - i);
}

struct Scratch {
  std::vector<float> weights;
  std::vector<Floats> sums;
};

#ifdef __AMX_BF16__
// Whether the operating system lets this process use the matrix unit (AMX): arch_prctl(ARCH_REQ_XCOMP_PERM, tile data).
bool matrix_unit() {
  static const bool allowed = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
  return allowed;
}

// What lies in memory is as the source says: gcc does not know what the instructions of the unit read and write.
inline void settle(const void* p) { __asm__ volatile("" : : "r"(p) : "memory"); }

// sums (M, NV) += x times the weights of NV vectors of outputs, here panels. The unit multiplies 16 rows of 16 pairs with 16
// pairs of 16 outputs, each row for itself. Tiles 0 to 3 are sums, 4 is x, 5 and 6 are weights.
template <int NV>
void add_tiles(const Product& p, const Pair* w, Floats* sums) {
  struct {
    uint8_t palette = 1, start = 0, unused[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {0, 0, 0, 0, 0, 16, 16};
  } shape;
  constexpr int64_t STEP = 32, SOME = 256;  // so many of four panels fit into the first-level cache
  constexpr int64_t line = NV * sizeof(Floats);
  int64_t set = 0;
  for (int64_t from = 0; from < p.K; from += SOME)
    for (int64_t m = 0; m < p.M; m += 16) {
      const int64_t rows = std::min<int64_t>(16, p.M - m);
      if (rows != set) {
        for (int i = 0; i < 5; ++i) shape.rows[i] = rows;
        settle(&shape);
        _tile_loadconfig(&shape);
        set = rows;
      }
      Floats* out = sums + m * NV;
      settle(out);
      _tile_loadd(0, out, line);
      if constexpr (NV > 1) _tile_loadd(1, out + 1, line);
      if constexpr (NV > 2) {
        _tile_loadd(2, out + 2, line);
        _tile_loadd(3, out + 3, line);
      }
      for (int64_t k = from; k < std::min(from + SOME, p.K); k += STEP) {
        const Pair* b = w + k / 2 * PANEL;
        const int64_t next = p.K / 2 * PANEL;
        _tile_loadd(4, row<Pair>(p, m) + k, p.K * 2);
        _tile_loadd(5, b, 64);
        _tile_dpbf16ps(0, 4, 5);
        if constexpr (NV > 1) {
          _tile_loadd(6, b + next, 64);
          _tile_dpbf16ps(1, 4, 6);
        }
        if constexpr (NV > 2) {
          _tile_loadd(5, b + 2 * next, 64);
          _tile_dpbf16ps(2, 4, 5);
          _tile_loadd(6, b + 3 * next, 64);
          _tile_dpbf16ps(3, 4, 6);
        }
      }
      _tile_stored(0, out, line);
      if constexpr (NV > 1) _tile_stored(1, out + 1, line);
      if constexpr (NV > 2) {
        _tile_stored(2, out + 2, line);
        _tile_stored(3, out + 3, line);
      }
      settle(out);
    }
  _tile_release();
}
#endif

// sums (M, NV) += x times the weights of NV vectors of outputs. Each run of products has a sum of its own, which joins the
// others: one running sum over all of K would round several times as much. All rows take the weights of a run while the
// first-level cache holds them.
template <int NV, typename W>
void add_panels(const Product& p, const W* w, const float* group_scales, Floats* sums) {
  constexpr int most = std::min(ROWS, SUMS / NV);  // rows at once
  for (int64_t k = 0; k < p.K; k += RUN) {
    auto add = [&]<int MR>(int64_t m) {
      Floats some[MR][NV] = {};
      dots<MR, NV>(row<W>(p, m), w, group_scales, p.K, k, std::min(k + RUN, p.K), some);
      for (int i = 0; i < MR; ++i)
        for (int v = 0; v < NV; ++v) sums[(m + i) * NV + v] += some[i][v];
    };
    int64_t m = 0;
    for (; m + most <= p.M; m += most) add.template operator()<most>(m);
    auto rest = [&]<int MR>(auto self) {  // as many as are left
      if constexpr (MR > 0) {
        if (p.M - m == MR) add.template operator()<MR>(m);
        else self.template operator()<MR - 1>(self);
      }
    };
    rest.template operator()<most - 1>(rest);
  }
}

// y for NP panels from `panel` on, from their weights at w.
template <int NP, typename W>
void panels(const Product& p, const W* w, const float* group_scales, int64_t panel, Scratch& scratch) {
  constexpr int NV = NP * PARTS;
  scratch.sums.assign(p.M * NV, Floats{});
  auto add = [&] {
#ifdef __AMX_BF16__
    if constexpr (std::is_same_v<W, Pair>)
      if (matrix_unit()) return add_tiles<NV>(p, w, scratch.sums.data());
#endif
    add_panels<NV>(p, w, group_scales, scratch.sums.data());
  };
  add();
  for (int v = 0; v < NV; ++v) {
    const int64_t n = panel * PANEL + v * LANES, width = std::min<int64_t>(LANES, p.N - n);
    if (width <= 0) break;
    const Floats scale = p.scale ? part(p.scale + n, width) : Floats{} + 1.0f;
    const Floats bias = p.bias ? part(p.bias + n, width) : Floats{};
    for (int64_t m = 0; m < p.M; ++m) {
      float* out = p.y + m * p.N + n;
      Floats y = fused(scratch.sums[m * NV + v], scale, bias);
      if (p.add) y = part(out, width) + y;
      std::memcpy(out, &y, width * sizeof(float));
    }
  }
}

// Many rows: widen the weights of NP panels once, to what `dots` would have made of them each time.
template <int NP, typename W>
void widened(const Product& p, const W* w, const float* group_scales, int64_t panel, Scratch& scratch) {
  scratch.weights.resize(NP * p.K * PANEL);
  for (int64_t k = 0; k < NP * p.K; ++k)
    for (int v = 0; v < PARTS; ++v) {
      const int64_t one = place(v, k, 0), pair = place(v, k / 2, 0);
      Floats value;
      if constexpr (std::is_same_v<W, Nibbles>) {
        const Ints both = widen_bytes(load<Bytes>(w + pair));
        value = __builtin_convertvector(((k % 2 ? both >> 4 : both) & 15) - 8, Floats);
        value *= load<Floats>(group_scales + place(v, k / GROUP, 0));
      } else if constexpr (std::is_same_v<W, Pair>) {
        value = k % 2 ? odd_of(w + pair) : even_of(w + pair);
      } else {
        value = widen(w + one);
      }
      store(scratch.weights.data() + one, value);
    }
  panels<NP>(p, scratch.weights.data(), nullptr, panel, scratch);
}

// The share [begin, end) of the panels of y.
template <typename W>
void multiply(Product p, const W* w, int64_t begin, int64_t end, Scratch& scratch) {
  constexpr bool grouped = std::is_same_v<W, Nibbles>;
  constexpr bool plain = std::is_same_v<Factor<W>, W> || !std::is_same_v<Factor<W>, float>;  // nothing to widen
  const float* group_scales = grouped ? p.scale : nullptr;
  if (grouped) p.scale = nullptr;
  auto some = [&]<int NP>(int64_t panel) {
    const W* here = w + panel * PANEL * p.K / (grouped || std::is_same_v<W, Pair> ? 2 : 1);
    const float* scales = grouped ? group_scales + panel * PANEL * (p.K / GROUP) : nullptr;
    if (plain || p.M < MANY) return panels<NP>(p, here, scales, panel, scratch);
    if constexpr (!plain) widened<NP>(p, here, scales, panel, scratch);
  };
  const int64_t fit = SUMS / PARTS / std::clamp<int64_t>(p.M, 1, ROWS);  // panels whose sums are in registers
  int64_t n = begin;
  if constexpr (SUMS / PARTS >= WIDE)
    for (; fit >= WIDE && n + WIDE <= end; n += WIDE) some.template operator()<WIDE>(n);
  for (; fit >= 2 && n + 2 <= end; n += 2) some.template operator()<2>(n);
  for (; n < end; ++n) some.template operator()<1>(n);
}

using OptionalTensor = std::optional<at::Tensor>;

// What a PackedLinear of packed.py holds.
struct Matrix {
  at::Tensor weight;
  OptionalTensor scale, bias;
  int64_t N;

  bool paired() const { return weight.scalar_type() == at::kBFloat16; }
  // Of the packed weights: bfloat16 is padded with zeros to a multiple of 32.
  int64_t K() const { return weight.size(1) * (paired() || weight.scalar_type() == at::kByte ? 2 : 1); }
  int64_t panels() const { return (N + PANEL - 1) / PANEL; }

  // Rows [begin, end) of x (M, width) as `multiply` wants them for bfloat16, (M, K).
  void round(const float* x, int64_t width, int64_t begin, int64_t end, Rounded* out) const {
    for (int64_t m = begin; m < end; ++m) {
      Rounded* to = out + m * K();
      parts(width, [&](int64_t k, int64_t n) {
        const auto some = rounded(part(x + m * width + k, n));
        std::memcpy(to + k, &some, n * sizeof(Rounded));
      });
      std::fill(to + width, to + K(), Rounded(0.0f));
    }
  }

  // y (M, N) = x (M, K) times the weights, or y plus that; panels [begin, end) of it.
  void multiply(const void* x, int64_t M, float* y, bool add, int64_t begin, int64_t end,
                Scratch& scratch) const {
    const Product p{x, scale ? scale->const_data_ptr<float>() : nullptr, bias ? bias->const_data_ptr<float>() : nullptr,
                    y, M, N, K(), add};
    switch (weight.scalar_type()) {
      case at::kFloat: return ::multiply(p, weight.const_data_ptr<float>(), begin, end, scratch);
      case at::kBFloat16: return ::multiply(p, static_cast<const Pair*>(weight.const_data_ptr()), begin, end, scratch);
      case at::kChar: return ::multiply(p, weight.const_data_ptr<int8_t>(), begin, end, scratch);
      default: ::multiply(p, static_cast<const Nibbles*>(weight.const_data_ptr()), begin, end, scratch);
    }
  }
};

at::Tensor linear(const at::Tensor& x, const at::Tensor& w, const OptionalTensor& scale, const OptionalTensor& bias,
                  int64_t N) {
  const Matrix matrix{w, scale, bias, N};
  auto sizes = x.sizes().vec();
  sizes.back() = N;
  const at::Tensor flat = x.contiguous(), y = at::empty(sizes, x.options());
  const int64_t M = x.numel() / x.size(-1);
  std::vector<Rounded> factors(matrix.paired() ? M * matrix.K() : 0);
  const float* from = flat.const_data_ptr<float>();
  if (matrix.paired())
    at::parallel_for(0, M, 16, [&](int64_t begin, int64_t end) {
      matrix.round(from, x.size(-1), begin, end, factors.data());
    });
  at::parallel_for(0, matrix.panels(), 1, [&](int64_t begin, int64_t end) {
    Scratch scratch;
    const void* what = matrix.paired() ? static_cast<const void*>(factors.data()) : from;
    matrix.multiply(what, M, y.mutable_data_ptr<float>(), false, begin, end, scratch);
  });
  return y;
}

template <typename W>
void gather(const W* w, const float* scale, int64_t id, int64_t K, int64_t width, float* out) {
  const int64_t panel = id / PANEL, lane = id % PANEL;
  for (int64_t k = 0; k < width; ++k) {
    const int64_t at = (panel * K + k) / 2 * PANEL + lane;  // of two weights
    if constexpr (std::is_same_v<W, Nibbles>) {
      const uint8_t pair = w[at].pair;
      out[k] = static_cast<float>((k % 2 ? pair >> 4 : pair & 15) - 8) * scale[(panel * K + k) / GROUP * PANEL + lane];
    } else if constexpr (std::is_same_v<W, Pair>) {
      out[k] = one(&w[at].one[k % 2]);
    } else {
      out[k] = one(w + (panel * K + k) * PANEL + lane) * (scale ? scale[id] : 1.0f);
    }
  }
}

// The first `width` weights of row id.
void gather(const Matrix& m, int64_t id, int64_t width, float* out) {
  const float* s = m.scale ? m.scale->const_data_ptr<float>() : nullptr;
  switch (m.weight.scalar_type()) {
    case at::kFloat: return gather(m.weight.const_data_ptr<float>(), s, id, m.K(), width, out);
    case at::kBFloat16: return gather(static_cast<const Pair*>(m.weight.const_data_ptr()), s, id, m.K(), width, out);
    case at::kChar: return gather(m.weight.const_data_ptr<int8_t>(), s, id, m.K(), width, out);
    default: gather(static_cast<const Nibbles*>(m.weight.const_data_ptr()), s, id, m.K(), width, out);
  }
}

// Rows idx of packed weights, (..., width). An operation of its own, so that no compiler fuses it with the norm that
// follows and sums its squares in an order that depends on how many rows there are.
at::Tensor rows(const at::Tensor& idx, const at::Tensor& w, const OptionalTensor& scale, int64_t width) {
  const Matrix matrix{w, scale, std::nullopt, 0};
  auto sizes = idx.sizes().vec();
  sizes.push_back(width);
  const at::Tensor flat = idx.contiguous(), y = at::empty(sizes, w.options().dtype(at::kFloat));
  for (int64_t i = 0; i < idx.numel(); ++i)
    gather(matrix, flat.const_data_ptr<int64_t>()[i], width, y.mutable_data_ptr<float>() + i * width);
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

// Two vectors of sums that are to be added up, H at a time in each of LANES / (2 H) parts: one vector of parts of H.
template <int H, int... J>
inline Floats fold(Floats a, Floats b, std::integer_sequence<int, J...>) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, (J / H * 2 * H + J % H)...) +
         __builtin_shufflevector(a, b, (J / H * 2 * H + J % H + H)...);
#else
  return __builtin_shuffle(a, b, Ints{(J / H * 2 * H + J % H)...}) +
         __builtin_shuffle(a, b, Ints{(J / H * 2 * H + J % H + H)...});
#endif
}

// The sum of each of 2 H vectors, in the order of `sum`.
template <int H = LANES / 2>
inline Floats sums(Floats* v) {
  if constexpr (H == 0) return v[0];
  else {
    for (int i = 0; i < H; ++i) v[i] = fold<H>(v[2 * i], v[2 * i + 1], std::make_integer_sequence<int, LANES>());
    return sums<H / 2>(v);
  }
}

// Ask for n numbers. What a head has of a token is a few lines of memory, and the processor itself sees no stream in them
// where blocks of a pool lie apart, and too short a one where they do not (docs/LOG.md).
template <typename T>
inline void ahead(const T* p, int64_t n) {
  for (int64_t i = 0; i < n; i += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(p + i);
}

// A query, how many keys it sees, and where its result goes.
struct Query {
  const float* q;
  int64_t keys;
  float* out;
};

// NQ queries that share keys: out = softmax(scale q k^T) v. Key s lies k_at[s] numbers behind k, its value v_at[s] behind
// v. `scores` is scratch for NQ rows of `room` floats, at least the most keys and LANES more. The sums of a query are taken
// in the same order whatever stands beside it: weights of 0 for keys that only others see change nothing.
template <int NQ, typename T>
void attend_some(const Query* query, const T* k, const T* v, const int64_t* k_at, const int64_t* v_at, const bool* seen,
                 int64_t D, float* scores, int64_t room) {
  constexpr int SOME = NQ * 4 <= SUMS ? 4 : 2;  // keys at once, or vectors of values
  const float scale = 1.0f / std::sqrt(static_cast<float>(D));
  int64_t keys = 0;
  for (int i = 0; i < NQ; ++i) keys = std::max(keys, query[i].keys);
  for (int64_t s = 0; s < keys; s += LANES) {
    Floats dots[NQ][LANES] = {};
    const int64_t n = std::min<int64_t>(LANES, keys - s);
    for (int64_t j = s + AHEAD; j < std::min(s + AHEAD + LANES, keys); ++j) ahead(k + k_at[j], D);
    for (int64_t j = 0; j < n; j += SOME) {
      const T* key[SOME];
      for (int i = 0; i < SOME; ++i) key[i] = k + k_at[s + std::min(j + i, n - 1)];  // the last again: sums nobody reads
      Floats acc[NQ][SOME] = {};
      for (int64_t d = 0; d + LANES <= D; d += LANES)
#pragma GCC unroll 4
        for (int i = 0; i < SOME; ++i) {
          const Floats b = widen(key[i] + d);
#pragma GCC unroll 4
          for (int m = 0; m < NQ; ++m) acc[m][i] = fused(widen(query[m].q + d), b, acc[m][i]);
        }
#pragma GCC unroll 4
      for (int m = 0; m < NQ; ++m)
#pragma GCC unroll 4
        for (int i = 0; i < SOME; ++i) dots[m][j + i] = acc[m][i];
    }
    for (int m = 0; m < NQ; ++m) {
      Floats total = sums(dots[m]);
      for (int64_t r = D / LANES * LANES; r < D; ++r)
        for (int64_t i = 0; i < n; ++i) total[i] = std::fma(query[m].q[r], one(k + k_at[s + i] + r), total[i]);
      total *= scale;
      for (int64_t i = seen ? 0 : std::clamp<int64_t>(query[m].keys - s, 0, LANES); i < LANES; ++i)
        if (s + i >= query[m].keys || !seen[s + i]) total[i] = -INFINITY;
      store(scores + m * room + s, total);
    }
  }
  float share[NQ];
  for (int m = 0; m < NQ; ++m) {
    float* own = scores + m * room;
    Floats tops = Floats{} - INFINITY, mass = {};
    for (int64_t s = 0; s < keys; s += LANES) {
      const Floats here = load<Floats>(own + s);
      tops = here > tops ? here : tops;
    }
    float top = tops[0];
    for (int i = 1; i < LANES; ++i) top = std::max(top, tops[i]);
    for (int64_t s = 0; s < keys; s += LANES) {
      const Floats shifted = load<Floats>(own + s) - top;
      const Floats p = exponential(shifted < -100.0f ? Floats{} - 100.0f : shifted);
      const Floats kept = shifted < -100.0f ? Floats{} : p;
      store(own + s, kept);
      mass += kept;
    }
    share[m] = 1.0f / sum(mass);
  }
  auto mix = [&]<int NV>(int64_t d) {  // NV vectors of the result
    Floats acc[NQ][NV] = {};
    for (int64_t s = 0; s < keys; ++s) {
      ahead(v + v_at[std::min(s + AHEAD, keys - 1)] + d, NV * LANES);
#pragma GCC unroll 4
      for (int i = 0; i < NV; ++i) {
        const Floats b = widen(v + v_at[s] + d + i * LANES);
#pragma GCC unroll 4
        for (int m = 0; m < NQ; ++m) acc[m][i] = fused(Floats{} + scores[m * room + s], b, acc[m][i]);
      }
    }
    for (int m = 0; m < NQ; ++m)
      for (int i = 0; i < NV; ++i) store(query[m].out + d + i * LANES, acc[m][i] * share[m]);
  };
  int64_t d = 0;
  for (; d + SOME * LANES <= D; d += SOME * LANES) mix.template operator()<SOME>(d);
  for (; d + LANES <= D; d += LANES) mix.template operator()<1>(d);
  for (; d < D; ++d)
    for (int m = 0; m < NQ; ++m) {
      float total = 0;
      // fma by name, as above: else the rounding of a key would depend on how many there are
      for (int64_t s = 0; s < keys; ++s) total = std::fma(scores[m * room + s], one(v + v_at[s] + d), total);
      query[m].out[d] = total * share[m];
    }
}

template <typename T>
void attend_all(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& mask, at::Tensor& y) {
  const int64_t B = q.size(0), H = q.size(1), L = q.size(2), D = q.size(3), S = k.size(2), group = H / k.size(1);
  std::vector<int64_t> k_at(S), v_at(S);
  for (int64_t s = 0; s < S; ++s) k_at[s] = s * k.stride(2), v_at[s] = s * v.stride(2);
  at::parallel_for(0, B * H * L, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scores(S + LANES);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t t = task % L, h = task / L % H, b = task / L / H;
      const bool* seen = nullptr;
      if (mask)
        seen = mask->const_data_ptr<bool>() + (mask->size(0) > 1 ? b * mask->stride(0) : 0) + t * mask->stride(-2);
      const Query query{q.const_data_ptr<float>() + b * q.stride(0) + h * q.stride(1) + t * q.stride(2),
                        mask ? S : S - L + t + 1, y.mutable_data_ptr<float>() + ((b * H + h) * L + t) * D};
      attend_some<1>(&query, k.const_data_ptr<T>() + b * k.stride(0) + h / group * k.stride(1),
                     v.const_data_ptr<T>() + b * v.stride(0) + h / group * v.stride(1), k_at.data(), v_at.data(), seen, D,
                     scores.data(), S + LANES);
    }
  });
}

at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& mask) {
  at::Tensor y = at::empty(q.sizes(), q.options());
  if (k.scalar_type() == at::kFloat) attend_all<float>(q, k, v, mask, y);
  else attend_all<at::BFloat16>(q, k, v, mask, y);
  return y;
}

inline void store(float* p, Floats v, int64_t n) { std::memcpy(p, &v, n * sizeof(float)); }

// RMSNorm, or LayerNorm if `centre`; without a weight nothing at all.
struct Norm {
  OptionalTensor weight, bias;
  bool centre;
  float eps;

  void operator()(const float* x, int64_t n, float* y) const {
    Floats mean = {}, squares = {};
    if (centre) {
      parts(n, [&](int64_t i, int64_t width) { mean += part(x + i, width); });
      mean = Floats{} + sum(mean) / n;
    }
    parts(n, [&](int64_t i, int64_t width) {
      store(y + i, part(x + i, width) - mean, width);
      const Floats v = part(y + i, width);
      squares += v * v;
    });
    const float scale = 1.0f / std::sqrt(sum(squares) / n + eps);
    const float* w = weight->const_data_ptr<float>();
    const float* b = bias ? bias->const_data_ptr<float>() : nullptr;
    parts(n, [&](int64_t i, int64_t width) {
      const Floats v = part(y + i, width) * scale * part(w + i, width);
      store(y + i, b ? v + part(b + i, width) : v, width);
    });
  }
};

inline Floats sigmoid(Floats x) {
  const Floats size = x < 0.0f ? -x : x;
  const Floats e = exponential(size > 87.0f ? Floats{} - 87.0f : -size);
  return (x < 0.0f ? e : Floats{} + 1.0f) / (1.0f + e);
}

// The threads of a step. All run the same code, and take their shares of each part of it, with a wait between parts.
struct Team {
  int id, size;

  void wait() const {
#ifdef _OPENMP
#pragma omp barrier
#endif
  }

  // Its share of n things, of which `unit` are cheapest done together.
  std::pair<int64_t, int64_t> share(int64_t n, int64_t unit) const {
    const int64_t units = (n + unit - 1) / unit;
    return {std::min(n, units * id / size * unit), std::min(n, units * (id + 1) / size * unit)};
  }
};

template <typename F>
void together(F work) {
#ifdef _OPENMP
#pragma omp parallel num_threads(at::get_num_threads())
  work(Team{omp_get_thread_num(), omp_get_num_threads()});
#else
  work(Team{0, 1});
#endif
}

struct Layer {
  Norm attn_norm, q_norm, k_norm, mlp_norm;
  Matrix qkv, o, up, down;  // `up` is gate and up in SwiGLU
};

// All blocks of a packed model, and its last norm, as one call: a step of torch's operators, compiled or not, spends as
// long between the products of a small model as in them.
struct Network : torch::CustomClassHolder {
  using Tensors = std::vector<at::Tensor>;

  // numbers: n_head, n_kv_head, head_dim, n_inner. `tensors` and `widths` follow `take` and the order of calls below.
  Network(const std::vector<OptionalTensor>& tensors, const std::vector<int64_t>& widths, int64_t n_head, int64_t n_kv_head,
          int64_t head_dim, const std::string& mlp, bool centre, double eps)
      : n_head(n_head), n_kv_head(n_kv_head), D(head_dim), mlp(mlp) {
    auto tensor = tensors.begin();
    auto width = widths.begin();
    auto matrix = [&] { tensor += 3; return Matrix{tensor[-3].value(), tensor[-2], tensor[-1], *width++}; };
    auto norm = [&] { tensor += 2; return Norm{tensor[-2], tensor[-1], centre, static_cast<float>(eps)}; };
    embed = matrix();
    for (OptionalTensor* table : {&learned, &cos, &sin}) *table = *tensor++;
    final = norm();
    while (tensor != tensors.end()) {
      Layer& l = layers.emplace_back();
      l.attn_norm = norm(), l.q_norm = norm(), l.k_norm = norm(), l.mlp_norm = norm();
      l.qkv = matrix(), l.o = matrix(), l.up = matrix(), l.down = matrix();
    }
    C = layers[0].o.N;
  }

  // counts[r] new tokens for each row r, whose ids follow each other, behind the lengths[r] tokens that it holds: what the
  // head reads of them, (sum of counts, n_embd). Keys and values of a layer are (blocks, n_kv_head, size, head_dim) and
  // lie alike in all layers; token i of row r is in place i % size of block table[r * width + i / size].
  at::Tensor run(const std::vector<int64_t>& ids, const std::vector<int64_t>& counts, const std::vector<int64_t>& lengths,
                 const std::vector<int64_t>& table, const Tensors& keys, const Tensors& values) const {
    Batch batch;
    const at::Tensor& like = keys[0];
    const int64_t size = like.size(2), rows = counts.size(), width = table.size() / rows;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t begin = batch.at.size(), total = lengths[r] + counts[r];
      TORCH_CHECK(total <= width * size, "row ", r, " has no room for its new tokens");
      for (int64_t i = 0; i < total; ++i)
        batch.at.push_back(table[r * width + i / size] * like.stride(0) + i % size * like.stride(2));
      const int64_t first = batch.tokens.size(), group = n_head / n_kv_head, queries = counts[r] * group;
      for (int64_t i = 0; i < queries; i += QUERIES) batch.tiles.push_back({first, i, std::min(QUERIES, queries - i)});
      for (int64_t i = lengths[r]; i < total; ++i) batch.tokens.push_back({ids[batch.tokens.size()], i, begin});
      batch.alone = batch.alone && counts[r] <= 1 && group <= QUERIES;
      batch.longest = std::max(batch.longest, total);
    }
    at::Tensor y = at::empty({static_cast<int64_t>(batch.tokens.size()), C}, like.options().dtype(at::kFloat));
    if (like.scalar_type() == at::kFloat) forward<float>(batch, keys, values, y.mutable_data_ptr<float>());
    else forward<at::BFloat16>(batch, keys, values, y.mutable_data_ptr<float>());
    return y;
  }

 private:
  struct Token {
    int64_t id, position, row;  // row: where the places of its keys begin in Batch::at
  };
  struct Tile {
    int64_t token, first, n;  // n queries from `first` on, of those of all heads that share keys, of a row from `token` on
  };
  struct Batch {
    std::vector<Token> tokens;
    std::vector<Tile> tiles;
    std::vector<int64_t> at;  // per row, where each of its tokens lies
    int64_t longest = 0;
    bool alone = true;  // each new token is all that its row gets, and its heads that share keys are one tile
  };

  int64_t n_head, n_kv_head, D, C;
  std::string mlp;
  Matrix embed;
  OptionalTensor learned, cos, sin;
  Norm final;
  std::vector<Layer> layers;

  template <typename T>
  void forward(const Batch& batch, const Tensors& keys, const Tensors& values, float* out) const {
    const int64_t M = batch.tokens.size(), group = n_head / n_kv_head, gated = mlp == "swiglu" ? 2 : 1;
    const int64_t N = layers[0].qkv.N, up_width = layers[0].up.N, inner = up_width / gated, heads = n_head * D;
    at::Tensor x_ = at::empty({M, C}), qkv_ = at::empty({M, N}), y_ = at::empty({M, heads}), up_ = at::empty({M, up_width});
    at::Tensor hidden_ = at::empty({M, inner});
    const int threads = at::get_num_threads();
    const bool few = M <= 2;  // each thread norms and rounds these for itself, which takes less than a wait
    int64_t widest = 0;  // of what is rounded before it is multiplied
    for (const Matrix* matrix : {&layers[0].qkv, &layers[0].o, &layers[0].down})
      if (matrix->paired()) widest = std::max(widest, matrix->K());
    std::vector<Rounded> factors_((few ? threads : 1) * M * widest);
    at::Tensor normed_ = at::empty({few ? threads * M : M, C});
    float *x = x_.mutable_data_ptr<float>(), *qkv = qkv_.mutable_data_ptr<float>(), *y = y_.mutable_data_ptr<float>();
    float *up = up_.mutable_data_ptr<float>(), *hidden = hidden_.mutable_data_ptr<float>();
    together([&](Team team) {
      Scratch scratch;
      std::vector<float> scores(QUERIES * (batch.longest + LANES));
      float* normed = normed_.mutable_data_ptr<float>() + (few ? team.id * M * C : 0);
      Rounded* factors = factors_.data() + (few ? team.id * M * widest : 0);
      auto norm = [&](const Norm& norm) {
        const auto [begin, end] = few ? std::pair<int64_t, int64_t>{0, M} : team.share(M, 1);
        for (int64_t m = begin; m < end; ++m) norm(x + m * C, C, normed + m * C);
        if (!few) team.wait();
      };
      auto multiply = [&](const Matrix& matrix, const float* from, int64_t width, float* to, bool add = false) {
        const auto [begin, end] = team.share(matrix.panels(), WIDE);
        if (matrix.paired()) {
          const auto [first, last] = few ? std::pair<int64_t, int64_t>{0, M} : team.share(M, 1);
          matrix.round(from, width, first, last, factors);
          if (!few) team.wait();
        }
        matrix.multiply(matrix.paired() ? static_cast<const void*>(factors) : from, M, to, add, begin, end, scratch);
        team.wait();
      };
      // Norms and turns the queries and the key of a head of token m, in place, and keeps the key and its value.
      auto prepare = [&](const Layer& l, int64_t layer, int64_t m, int64_t h) {
        const Token& token = batch.tokens[m];
        float *q = qkv + m * N + h * group * D, *k = qkv + m * N + heads + h * D, *v = k + n_kv_head * D;
        for (int64_t g = 0; g <= group; ++g) {
          float* head = g < group ? q + g * D : k;
          const Norm& norm = g < group ? l.q_norm : l.k_norm;
          if (norm.weight) norm(head, D, head);
          if (cos) rotate(head, token.position);
        }
        const int64_t place = batch.at[token.row + token.position] + h * keys[layer].stride(1);
        std::copy(k, k + D, keys[layer].mutable_data_ptr<T>() + place);
        std::copy(v, v + D, values[layer].mutable_data_ptr<T>() + place);
      };
      auto attend = [&](const Layer& l, int64_t layer) {
        if (!batch.alone) {
          for (int64_t task = team.id; task < n_kv_head * M; task += team.size)
            prepare(l, layer, task % M, task / M);
          team.wait();
        }
        const int64_t tiles = batch.tiles.size(), room = batch.longest + LANES;
        for (int64_t task = team.id; task < n_kv_head * tiles; task += team.size) {
          const int64_t h = task / tiles, place = h * keys[layer].stride(1);
          const Tile& tile = batch.tiles[task % tiles];
          const int64_t* at = batch.at.data() + batch.tokens[tile.token].row;
          if (batch.alone && tile.first == 0) prepare(l, layer, tile.token, h);
          Query queries[QUERIES];
          for (int64_t i = 0; i < tile.n; ++i) {
            const int64_t m = tile.token + (tile.first + i) / group, g = h * group + (tile.first + i) % group;
            queries[i] = {qkv + m * N + g * D, batch.tokens[m].position + 1, y + m * heads + g * D};
          }
          auto some = [&]<int NQ>() {
            attend_some<NQ>(queries, keys[layer].const_data_ptr<T>() + place, values[layer].const_data_ptr<T>() + place, at,
                            at, nullptr, D, scores.data(), room);
          };
          switch (tile.n) {
            case 1: some.template operator()<1>(); break;
            case 2: some.template operator()<2>(); break;
            case 3: some.template operator()<3>(); break;
            default: some.template operator()<QUERIES>();
          }
        }
        team.wait();
      };
      const auto [from, to] = team.share(M, 1);
      for (int64_t m = from; m < to; ++m) {
        gather(embed, batch.tokens[m].id, C, x + m * C);
        if (learned) {
          const float* p = learned->const_data_ptr<float>() + batch.tokens[m].position * C;
          parts(C, [&](int64_t i, int64_t n) { store(x + m * C + i, part(x + m * C + i, n) + part(p + i, n), n); });
        }
      }
      team.wait();
      for (size_t i = 0; i < layers.size(); ++i) {
        const Layer& l = layers[i];
        norm(l.attn_norm);
        multiply(l.qkv, normed, C, qkv);
        attend(l, i);
        multiply(l.o, y, heads, x, true);
        norm(l.mlp_norm);
        multiply(l.up, normed, C, up);
        activate(up, hidden, M, inner, team);
        multiply(l.down, hidden, inner, x, true);
      }
      for (int64_t m = from; m < to; ++m) final(x + m * C, C, out + m * C);
    });
  }

  void rotate(float* head, int64_t position) const {
    const int64_t half = D / 2;
    const float *c = cos->const_data_ptr<float>() + position * half, *s = sin->const_data_ptr<float>() + position * half;
    parts(half, [&](int64_t i, int64_t n) {
      const Floats a = part(head + i, n), b = part(head + half + i, n), u = part(c + i, n), w = part(s + i, n);
      store(head + i, a * u - b * w, n);
      store(head + half + i, b * u + a * w, n);
    });
  }

  void activate(const float* up, float* hidden, int64_t M, int64_t inner, Team team) const {
    const bool gated = mlp == "swiglu", squared = mlp == "relu2";
    const auto [begin, end] = team.share(M * inner, LANES);  // any piece of it: rows need not begin with a vector
    for (int64_t at = begin; at < end;) {
      const int64_t m = at / inner, i = at % inner, n = std::min(end - at, inner - i);
      const float* from = up + m * inner * (gated ? 2 : 1) + i;
      parts(n, [&](int64_t j, int64_t width) {
        const Floats v = part(from + j, width);
        Floats y;
        if (gated) y = v * sigmoid(v) * part(from + inner + j, width);
        else if (squared) y = v > 0.0f ? v * v : Floats{};
        else y = v * sigmoid(1.5957691216f * (v + 0.044715f * v * v * v));  // the tanh form of GELU
        store(hidden + at + j, y, width);
      });
      at += n;
    }
    team.wait();
  }
};

}  // namespace

TORCH_LIBRARY(pocketgpt, m) {
  m.def("linear(Tensor x, Tensor w, Tensor? scale, Tensor? bias, int n) -> Tensor");
  m.def("rows(Tensor idx, Tensor w, Tensor? scale, int width) -> Tensor");
  m.def("attend(Tensor q, Tensor k, Tensor v, Tensor? mask) -> Tensor");
  m.class_<Network>("Network")
      .def(torch::init<std::vector<OptionalTensor>, std::vector<int64_t>, int64_t, int64_t, int64_t, std::string, bool,
                       double>())
      .def("run", &Network::run);
}

TORCH_LIBRARY_IMPL(pocketgpt, CPU, m) {
  m.impl("linear", &linear);
  m.impl("rows", &rows);
  m.impl("attend", &attend);
}
