#include <immintrin.h>

#include "kernels.hpp"

namespace thinwire {

namespace {

struct Avx2 {
  template <class W>
  static TW_INLINE __m256i equal(__m256i a, __m256i b) {
    if constexpr (sizeof(W) == 1) return _mm256_cmpeq_epi8(a, b);
    if constexpr (sizeof(W) == 2) return _mm256_cmpeq_epi16(a, b);
    if constexpr (sizeof(W) == 4) return _mm256_cmpeq_epi32(a, b);
    return _mm256_cmpeq_epi64(a, b);
  }

  template <class W>
  static size_t diff(const W* base, const W* changed, size_t count, uint32_t start, uint32_t* positions) {
    constexpr size_t lanes = 32 / sizeof(W);
    // One bit per word: the lowest bit of each word's bytes.
    constexpr uint32_t lowest = sizeof(W) == 1   ? 0xFFFFFFFF
                                : sizeof(W) == 2 ? 0x55555555
                                : sizeof(W) == 4 ? 0x11111111
                                                 : 0x01010101;
    size_t found = 0, i = 0;
    for (; i + lanes <= count; i += lanes) {
      _mm_prefetch(reinterpret_cast<const char*>(base + i) + kPrefetchBytes, _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(changed + i) + kPrefetchBytes, _MM_HINT_T0);
      const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(base + i));
      const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(changed + i));
      uint32_t mask = ~static_cast<uint32_t>(_mm256_movemask_epi8(equal<W>(a, b))) & lowest;
      for (; mask; mask &= mask - 1) {
        positions[found++] = start + static_cast<uint32_t>(i) + static_cast<uint32_t>(__builtin_ctz(mask)) / sizeof(W);
      }
    }
    for (; i < count; ++i) {
      if (base[i] != changed[i]) positions[found++] = start + static_cast<uint32_t>(i);
    }
    return found;
  }

  struct Tables {
    __m256i low[2], high[2], top, mask;
    __m128i shift;
  };

  static TW_INLINE Tables tables(const Layout& layout, const Costs& costs) {
    Tables t;
    for (int half = 0; half < 2; ++half) {
      t.low[half] =
          _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(costs.low + 16 * half)));
      t.high[half] =
          _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(costs.high + 16 * half)));
    }
    t.top = _mm256_set1_epi8(static_cast<char>(costs.top));
    t.mask = _mm256_set1_epi16(static_cast<int16_t>(layout.field_mask));
    t.shift = _mm_cvtsi32_si128(layout.field_shift);
    return t;
  }

  // Costs of 32 words, summed over groups of eight: the order of the groups is 0, 2, 1, 3.
  static TW_INLINE __m256i groups_of_32(const uint16_t* base, const Tables& t) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(base));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(base + 16));
    const __m256i fields = _mm256_packus_epi16(_mm256_and_si256(_mm256_srl_epi16(a, t.shift), t.mask),
                                               _mm256_and_si256(_mm256_srl_epi16(b, t.shift), t.mask));
    const __m256i cls = _mm256_min_epu8(_mm256_subs_epu8(t.top, fields), _mm256_set1_epi8(kClassCount - 1));
    const __m256i upper = _mm256_slli_epi16(cls, 3);  // bit 4 of the class, moved to bit 7: which half of the table
    const __m256i low =
        _mm256_blendv_epi8(_mm256_shuffle_epi8(t.low[0], cls), _mm256_shuffle_epi8(t.low[1], cls), upper);
    const __m256i high =
        _mm256_blendv_epi8(_mm256_shuffle_epi8(t.high[0], cls), _mm256_shuffle_epi8(t.high[1], cls), upper);
    const __m256i zero = _mm256_setzero_si256();
    return _mm256_add_epi64(_mm256_sad_epu8(low, zero), _mm256_slli_epi64(_mm256_sad_epu8(high, zero), 8));
  }

  static void block_sums(const uint16_t* base, size_t blocks, const Layout& layout, const Costs& costs,
                         uint32_t* sums) {
    const Tables t = tables(layout, costs);
    for (size_t b = 0; b < blocks; ++b) {
      const uint16_t* block = base + b * kBlockElements;
      const __m256i sum = _mm256_add_epi64(_mm256_add_epi64(groups_of_32(block, t), groups_of_32(block + 32, t)),
                                           _mm256_add_epi64(groups_of_32(block + 64, t), groups_of_32(block + 96, t)));
      const __m128i half = _mm_add_epi64(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
      sums[b] = static_cast<uint32_t>(_mm_cvtsi128_si32(half) + _mm_extract_epi32(half, 2));
    }
  }

  using Prefix = const uint32_t*;

  static Prefix load_prefix(const uint32_t* before) { return before; }

  static TW_INLINE Prefix group_prefix(const uint16_t* base, const Layout& layout, const Costs& costs,
                                       uint32_t* before) {
    const Tables t = tables(layout, costs);
    alignas(32) uint64_t groups[16];
    for (int i = 0; i < 4; ++i)
      _mm256_store_si256(reinterpret_cast<__m256i*>(groups + 4 * i), groups_of_32(base + 32 * i, t));
    uint32_t sum = 0;
    for (int i = 0; i < 16; i += 4) {
      before[i] = sum += static_cast<uint32_t>(groups[i]);
      before[i + 1] = sum += static_cast<uint32_t>(groups[i + 2]);
      before[i + 2] = sum += static_cast<uint32_t>(groups[i + 1]);
      before[i + 3] = sum += static_cast<uint32_t>(groups[i + 3]);
    }
    return before;
  }

  static TW_INLINE size_t count_at_most(Prefix prefix, uint32_t reach) {
    size_t count = 0;
    for (size_t g = 0; g < kGroupsPerBlock; ++g) count += prefix[g] <= reach;
    return count;
  }

  static void accumulate(uint64_t* acc, const uint8_t* data, const uint8_t* secret, size_t stripes) {
    __m256i sum[2] = {_mm256_load_si256(reinterpret_cast<__m256i*>(acc)),
                      _mm256_load_si256(reinterpret_cast<__m256i*>(acc + 4))};
    for (size_t s = 0; s < stripes; ++s) {
      for (int h = 0; h < 2; ++h) {
        const __m256i value = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + s * kStripeBytes + 32 * h));
        const __m256i keyed =
            _mm256_xor_si256(value, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(secret + 8 * s + 32 * h)));
        const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
        sum[h] =
            _mm256_add_epi64(sum[h], _mm256_add_epi64(product, _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2))));
      }
    }
    _mm256_store_si256(reinterpret_cast<__m256i*>(acc), sum[0]);
    _mm256_store_si256(reinterpret_cast<__m256i*>(acc + 4), sum[1]);
  }

  static void scramble(uint64_t* acc, const uint8_t* secret) {
    for (int i = 0; i < 8; ++i) acc[i] = (acc[i] ^ (acc[i] >> 47) ^ load64(secret + 8 * i)) * kPrime32_1;
  }
};

}  // namespace

const Kernels kAvx2Kernels = {"avx2",        encode_any<Avx2>,       decode_any<Avx2>,
                              xxh3_64<Avx2>, find_changes_any<Avx2>, find_rounded_changes<Avx2>};

}  // namespace thinwire
